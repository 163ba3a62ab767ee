"""Run `python -m megatron_d3.pretrain` in several processes, and leave none behind.

What the processes print goes to a log file. However the run ends (by itself, by an error, by Ctrl-C
or a signal to this process), every process it started here has ended when :func:`train` returns.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_d3.errors import ConfigError, D3Error

_POLL_SECONDS = 0.5
_STOP_SECONDS = 10.0
_NUM_SHOWN = 15  # lines of a failed run's log

# torchrun's own words begin with one of these; what the processes said stands before.
_AGENT_MARKS = ("torch/distributed/elastic", "torch.distributed.elastic", "torch.multiprocessing")
# How the entry point says why it refuses; the message may go on for some lines.
_REFUSAL = re.compile(r"(megatron_d3\.pretrain|megatron-d3 (?:score|d3)): (rank \d+: )?")
_NUM_REFUSAL_LINES = 8


def require_training_packages() -> None:
    """Look whether Megatron can be imported, without importing it (that takes seconds).

    Raises:
        ConfigError: a package is missing; says how to install it.
    """
    for package in ("torch", "megatron", "psutil", "sentencepiece"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"training needs the package {package}; install it with "
                              "`pip install 'megatron-d3[megatron]'`")


def cpu_environment(num_processes: int) -> dict[str, str]:
    """Return the environment of CPU processes that share this machine fairly."""
    threads = max(1, (os.cpu_count() or 1) // num_processes)
    environment = os.environ | {"MEGATRON_D3_DEVICE": "cpu", "PYTHONUNBUFFERED": "1"}
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    # gloo would look this host's name up, which may not exist.
    if Path("/sys/class/net/lo").exists():
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment


def launch_environment(num_processes: int) -> dict[str, str]:
    """Return the environment of processes on the GPUs, or on the CPU as `mcore/cpu.py` decides."""
    device = os.environ.get("MEGATRON_D3_DEVICE", "")
    if not device:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    return cpu_environment(num_processes) if device == "cpu" else dict(os.environ)


def train(
    arguments: Sequence[str], *, log: Path, num_processes: int,
    environment: Mapping[str, str] | None = None, poll: Callable[[], None] = lambda: None,
    module: str = "megatron_d3.pretrain", launcher: Sequence[str] = (),
) -> None:
    """Run `megatron_d3.pretrain ARGUMENTS` through torchrun and wait for it.

    Args:
        arguments: Megatron's flags and ours.
        log: file that the output is appended to.
        num_processes: on this machine.
        environment: of the processes; default that of :func:`cpu_environment`.
        poll: called about twice a second while it runs.
        module: what each process runs.
        launcher: a command that starts `-m MODULE ARGUMENTS` in all processes, on whatever
            machines, in place of torchrun on this one.

    Raises:
        D3Error: it failed; the message holds its last lines and names the log.
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP reached this process.
    """
    local = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr",
             "127.0.0.1", "--nproc-per-node", str(num_processes)]
    command = [*(launcher or local), "-m", module, *arguments]
    with open(log, "ab") as output:
        start = output.tell()
        output.write(f"$ {shlex.join(command)}\n".encode())
        output.flush()
        with _signals_interrupt():
            agent = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
                env=cpu_environment(num_processes) if environment is None else environment)
            family = _Family(agent)
            try:
                while agent.poll() is None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        agent.wait(_POLL_SECONDS)
                    family.look()
                    poll()
            finally:
                family.end()
    if agent.returncode != 0:
        raise D3Error(failure(log, start, agent.returncode))


def failure(log: Path, start: int, code: int) -> str:
    """Explain why a run ended with an exit code, from what it logged.

    Args:
        log: its log file.
        start: byte of the log at which this run begins.
        code: its exit code.
    """
    with open(log, "rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").splitlines()
    own = list(itertools.takewhile(lambda line: not any(m in line for m in _AGENT_MARKS), lines))
    at = next((i for i, line in enumerate(lines) if _REFUSAL.match(line)), None)
    if at is not None:
        message = [_REFUSAL.sub("", lines[at], count=1)]
        for line in lines[at + 1:at + _NUM_REFUSAL_LINES]:
            if _REFUSAL.match(line) or any(mark in line for mark in _AGENT_MARKS):
                break
            message.append(line)
        return "\n".join([*message, f"(the whole log: {log})"])
    shown = "\n".join(f"  {line}" for line in own[-_NUM_SHOWN:])
    return f"training ended with exit code {code}; its last lines:\n{shown}\n(the whole log: {log})"


class _Family:
    """A process and all that it started, also those that outlive it."""

    def __init__(self, agent: subprocess.Popen[bytes]) -> None:
        self._agent = agent
        self._members: dict[int, Any] = {}  # psutil.Process by pid; knows a reused pid

    def look(self) -> None:
        """Remember who is there now. Later, orphans no longer show whose they are."""
        import psutil

        with contextlib.suppress(psutil.Error):
            for member in psutil.Process(self._agent.pid).children(recursive=True):
                self._members.setdefault(member.pid, member)

    def end(self) -> None:
        """End everyone: the agent first, which ends its workers, then whoever is left.

        NOTE: each of torchrun's workers leads a session of its own, and each worker of Megatron
        that saves a checkpoint starts another process; a signal to one group does not reach them.
        """
        import psutil

        self.look()
        if self._agent.poll() is None:
            self._agent.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._agent.wait(_STOP_SECONDS)
            self.look()
        for member in filter(_is_alive, self._members.values()):
            with contextlib.suppress(psutil.Error):
                member.kill()
        if self._agent.poll() is None:
            self._agent.kill()
        self._agent.wait()
        deadline = time.monotonic() + _STOP_SECONDS
        while any(map(_is_alive, self._members.values())) and time.monotonic() < deadline:
            time.sleep(0.05)


def _is_alive(process: Any) -> bool:
    """Whether a psutil.Process runs; a zombie, which its new parent has yet to reap, does not."""
    import psutil

    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into KeyboardInterrupt, so that `finally` runs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt)
              for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
