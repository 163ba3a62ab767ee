"""`torchrun` for tests: its rendezvous and its agent, but the ranks are forked from a process that has
imported Megatron, which takes 5 s of a processor otherwise, for each rank of each life.

Each rank records what it trained on beside its log, and waits at the gates of `gates.py`.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from pathlib import Path


def main() -> None:
    """Meet the other nodes, fork the ranks, end with them."""
    parser = argparse.ArgumentParser()
    for flag in ("nnodes", "nproc-per-node", "rdzv-backend", "rdzv-id", "rdzv-conf",
                 "rdzv-endpoint", "max-restarts"):
        parser.add_argument(f"--{flag}")
    parser.add_argument("--no-python", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    flags = args.command[4:]  # bash -c SCRIPT _ FLAGS...
    _import_megatron()
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=int(args.nnodes), max_nodes=int(args.nnodes),
        nproc_per_node=int(args.nproc_per_node), run_id=args.rdzv_id, rdzv_backend="c10d",
        rdzv_endpoint=args.rdzv_endpoint, max_restarts=0, start_method="fork",
        rdzv_configs={"join_timeout": int(args.rdzv_conf.split("=")[1])}, monitor_interval=0.1)
    try:
        elastic_launch(config, _rank)(flags)
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        sys.exit(1)


def _import_megatron() -> None:
    import importlib

    from megatron_d3.mcore import cpu

    cpu.enable()
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    for module in ("megatron.training.training", "megatron_d3.mcore.planned_setup"):
        importlib.import_module(module)
    # Each saving rank starts a manager process; spawned, it would import all of this again.
    filesystem_async.get_write_results_queue.__defaults__ = ("fork",)


def _rank(flags: list[str]) -> None:
    """What `python -m megatron_d3.pretrain FLAGS` would do."""
    log = Path(os.environ["LOGS"]) / f"{socket.gethostname()}-rank{os.environ['RANK']}.log"
    file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.argv = ["megatron_d3.pretrain", *flags]
    from megatron_d3.mcore.pretrain import main
    from tests.mcore import recorder
    from tests.slurm import gates  # noqa: F401

    recorder.install(log.with_suffix(".jsonl"))
    code: object = 0
    try:
        main()
    except SystemExit as stop:
        code = stop.code
    if code not in (0, None):
        print(code, file=sys.stderr)
        os._exit(1)


if __name__ == "__main__":
    main()
