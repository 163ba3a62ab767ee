"""Start many Megatron runs from one process that has imported Megatron once.

Importing Megatron costs 5-15 s a process. The zygote imports it and forks each rank of each run
from there, so a run costs about a second. Commands come as JSON lines on stdin, answers go to
stdout: see `launcher.py`. The ranks are ordinary processes with torchrun's environment; one test
uses the real `torchrun`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the imports print must not mix with the answers
    from megatron_d3.mcore import cpu

    cpu.enable()
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    for module in ("megatron.training.training", "megatron_d3.mcore.planned_setup"):
        importlib.import_module(module)  # the ranks find them imported

    # Each saving rank starts a multiprocessing manager; spawned, it would import all of this again.
    filesystem_async.get_write_results_queue.__defaults__ = ("fork",)


    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), file=answers, flush=True)


def _run(command: dict[str, Any]) -> dict[str, Any]:
    folder = Path(command["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    pids = {}
    for rank in range(command["world_size"]):
        pid = os.fork()
        if pid == 0:
            _child(rank, command, folder)
        pids[pid] = rank
    sessions = list(pids)
    codes = _wait(pids, command["world_size"], command["timeout"])
    for session in sessions:  # helpers that a killed rank left behind
        with contextlib.suppress(ProcessLookupError):
            os.killpg(session, signal.SIGKILL)
    return {"codes": codes}


def _wait(pids: dict[int, int], world_size: int, timeout: float) -> list[int]:
    """Wait for all ranks; when one fails the others are killed, as torchrun does."""
    codes = [0] * world_size
    deadline = time.monotonic() + timeout
    while pids:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            if time.monotonic() > deadline:
                _kill(pids, signal.SIGABRT)
                deadline = float("inf")
            time.sleep(0.02)
            continue
        rank = pids.pop(pid)
        codes[rank] = os.waitstatus_to_exitcode(status)
        if codes[rank] != 0:
            # Peers may be about to print the same error: let them, but not for long.
            deadline = min(deadline, time.monotonic() + 3)
    return codes


def _kill(pids: dict[int, int], number: int) -> None:
    for pid in pids:
        os.kill(pid, number)


def _child(rank: int, command: dict[str, Any], folder: Path) -> None:
    code = 1
    try:
        os.setsid()
        output = os.open(folder / f"rank{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        world_size = str(command["world_size"])
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world_size,
            LOCAL_WORLD_SIZE=world_size, MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(command["port"]), **command["environment"])
        sys.argv = ["megatron_d3.pretrain", *command["arguments"]]
        from tests.mcore import recorder

        recorder.install(folder / f"rank{rank}.jsonl", **command["recorder"])
        module, function = command["entry"].split(":")
        getattr(importlib.import_module(module), function)()
        code = 0
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        code = stop.code if isinstance(stop.code, int) else int(bool(stop.code))
    except BaseException:  # noqa: BLE001  (whatever it is belongs into the rank's log)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
