"""Stands for `torchrun` and for the trainer in tests of job scripts: a second a life, no torch.

As `torchrun`: its flags, its rendezvous (the node that owns the endpoint listens, the others
connect, all give up after `join_timeout`), its children's environment, its death by a signal that
nobody handles. As `python -m megatron_d3.pretrain`: saves its step when USR1 comes and every ten
steps, resumes from there, and misbehaves as $MISCHIEF asks.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

_STEP_SECONDS = 0.1
_MOST_STEPS = int(os.environ.get("MOST_STEPS", "150"))


def torchrun() -> int:
    """Meet the other nodes, start the ranks, end with them."""
    parser = argparse.ArgumentParser()
    for flag in ("nnodes", "nproc-per-node", "rdzv-backend", "rdzv-id", "rdzv-conf",
                 "rdzv-endpoint", "max-restarts", "node-rank", "master-addr", "master-port"):
        parser.add_argument(f"--{flag}")
    parser.add_argument("--no-python", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args, before = parser.parse_known_args()
    num_nodes, num_ranks = int(args.nnodes), int(args.nproc_per_node)
    node, peers = _meet(args, num_nodes)
    command = args.command
    if not args.no_python:  # -m MODULE FLAGS
        command = [sys.executable, __file__, "trainer", *before, *command]
    ranks = [
        subprocess.Popen(command, env=os.environ | {
            "RANK": str(node * num_ranks + i), "LOCAL_RANK": str(i),
            "WORLD_SIZE": str(num_nodes * num_ranks)})
        for i in range(num_ranks)]
    while (codes := [rank.poll() for rank in ranks]).count(0) < num_ranks:
        if any(codes):
            for rank in ranks:
                rank.kill()
            return 1
        time.sleep(0.02)
    for peer in peers:
        peer.close()
    return 0


def _meet(args: argparse.Namespace, num_nodes: int) -> tuple[int, list[socket.socket]]:
    """Return this node's number and the connections that must stay open."""
    endpoint = args.rdzv_endpoint or f"{args.master_addr}:{args.master_port}"
    host, port = endpoint.rsplit(":", 1)
    seconds = float((args.rdzv_conf or "join_timeout=8").split("=")[1])
    deadline = time.monotonic() + seconds
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind(("" if args.node_rank == "0" else host, int(port)))
    except OSError:  # the endpoint is on another node, or another agent of this one has it
        while time.monotonic() < deadline:
            try:
                peer = socket.create_connection((host, int(port)), timeout=1)
                peer.settimeout(max(0.1, deadline - time.monotonic()))
                if number := peer.recv(8):
                    return int(number), [peer]
            except OSError:
                pass
            time.sleep(0.1)
        sys.exit("rendezvous: nobody answers")
    server.listen(16)
    peers: list[socket.socket] = []
    while len(peers) < num_nodes - 1:
        server.settimeout(max(0.1, deadline - time.monotonic()))
        try:
            peers.append(server.accept()[0])
        except TimeoutError:
            sys.exit("rendezvous: the other nodes did not come")
    for number, peer in enumerate(peers, start=1):
        peer.sendall(str(number).encode())
    return 0, [server, *peers]


def trainer() -> int:
    """Count steps until USR1 comes; once resumed, ten."""
    asked = []
    signal.signal(signal.SIGUSR1, lambda *_: asked.append(True))
    rank, mischief = os.environ["RANK"], os.environ.get("MISCHIEF", "")
    tracker = Path(sys.argv[sys.argv.index("--save") + 1]) / "latest_checkpointed_iteration.txt"
    start = step = int(tracker.read_text()) if tracker.exists() else 0
    total = start + 10 if start else _MOST_STEPS
    print(f"rank {rank} of {os.environ['WORLD_SIZE']} on {os.uname().nodename} from {start}",
          flush=True)
    if mischief == "refuse" and rank == "1":
        print(f"megatron_d3.pretrain: rank {rank}: CorpusError: web.idx: no such file")
        return 1
    while step < total and not asked:
        time.sleep(_STEP_SECONDS)
        step += 1
        if rank == "0" and step % 10 == 0:
            _save(tracker, step)
        if mischief == "crash" and rank == "2" and step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        if mischief == "crash-later" and rank == "2" and step == start + 15:
            os.kill(os.getpid(), signal.SIGKILL)
    if rank == "0":
        _save(tracker, step)
        (tracker.parent / "flags").write_text("\n".join(sys.argv))
        if not asked:
            (tracker.parent / "finished").touch()
    return 0


def doremi() -> int:
    """`megatron-d3 doremi FILE --step NAME --launcher WORDS`."""
    step, launcher = (sys.argv[sys.argv.index(flag) + 1] for flag in ("--step", "--launcher"))
    save = Path(step).absolute()
    code = subprocess.call([*shlex.split(launcher), "-m", "a.module", "--save", str(save)])
    if code:
        return 1
    return 0 if (save / "finished").exists() else 75


def _save(tracker: Path, step: int) -> None:
    tracker.parent.mkdir(exist_ok=True)
    aside = tracker.with_suffix(".tmp")
    aside.write_text(str(step))
    aside.replace(tracker)


if __name__ == "__main__":
    if sys.argv[1:5] == ["trainer", "-m", "megatron_d3", "doremi"]:
        sys.exit(doremi())
    sys.exit({"torchrun": torchrun, "trainer": trainer}[sys.argv.pop(1)]())
