"""Training runs of one process each, forked from one that has imported Megatron.

Importing Megatron takes 5-15 s; a study of many short runs pays it once. CPU only: CUDA does not
survive a fork.

    import_megatron()
    pid = start(flags_of_pretrain, log=Path("run.log"))
    wait([pid])
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

PRETRAIN = "megatron_d3.mcore.pretrain:main"
STORE_LOSSES = "megatron_d3.mcore.store_losses:main"

_PR_SET_PDEATHSIG = 1


def import_megatron() -> None:
    """Import what a run needs. Call it once, before the first :func:`start`.

    NOTE: `OMP_NUM_THREADS` must be 1: the threads of a pool do not survive a fork.
    """
    assert os.environ.get("OMP_NUM_THREADS") == "1"
    from megatron_d3.mcore import cpu

    cpu.enable()
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    for module in ("megatron.training.training", "megatron_d3.mcore.planned_setup",
                   "megatron_d3.mcore.proxy_setup"):
        importlib.import_module(module)
    # A rank that saves starts a multiprocessing manager; spawned, it would import all of it again.
    filesystem_async.get_write_results_queue.__defaults__ = ("fork",)


def start(
    arguments: Sequence[str], *, log: Path, entry: str = PRETRAIN,
    setup: Callable[[], None] = lambda: None,
) -> int:
    """Start a run with its output in a file; return its process id.

    Args:
        arguments: its flags.
        log: appended to.
        entry: `module:function` to call.
        setup: called before it, in the run's process.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    pid = os.fork()
    if pid == 0:
        _child(arguments, log, port, lambda: _call(entry, setup))
    return pid


def wait(pids: Sequence[int], *, log: Path) -> None:
    """Wait for runs; when one fails, end the others and leave with the end of the log."""
    left = set(pids)
    while left:
        pid, status = os.wait()
        left.discard(pid)
        if status:
            for other in left:
                os.kill(other, signal.SIGKILL)
                os.waitpid(other, 0)
            raise SystemExit(log.read_text(errors="replace")[-3000:])


def _call(entry: str, setup: Callable[[], None]) -> None:
    setup()
    module, function = entry.split(":")
    getattr(importlib.import_module(module), function)()


def _child(arguments: Sequence[str], log: Path, port: int, main: Callable[[], None]) -> None:
    code = 1
    try:
        with contextlib.suppress(OSError, AttributeError):  # Linux: end with the parent
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(
            RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1",
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        sys.argv = ["megatron_d3.pretrain", *arguments]
        main()
        code = 0
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        code = stop.code if isinstance(stop.code, int) else int(bool(stop.code))
    except BaseException:  # noqa: BLE001  (whatever it is belongs into the log)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
