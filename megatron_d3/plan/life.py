"""One process that writes a plan, described so that processes elsewhere can tell what became of it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_d3.errors import ConfigError

SECONDS = 60.0
"""Default length of a lease. A job requeued after a crash waits up to 1.5 times as long."""


@dataclass(frozen=True)
class Life:
    """One process that writes a plan.

    Attributes:
        job: the scheduler's name of the job, or what stands for one.
        restart: how often the job was started before: Slurm's count, then torchrun's.
        host: the node's name.
        machine: of the running kernel and its process numbers; equal only where `pid` means the same.
        pid: of the process.
        started: when it started, in the kernel's ticks, since numbers are used again.
        seconds: length of its lease.
    """

    job: str
    restart: tuple[int, int]
    host: str
    machine: str
    pid: int
    started: int
    seconds: float

    @classmethod
    def here(cls, environ: Mapping[str, str] = os.environ) -> Life:
        """Describe this process, as a life of the job that it belongs to.

        Args:
            environ: with Slurm's and torchrun's variables, and `MEGATRON_D3_LEASE_SECONDS`.

        Raises:
            ConfigError: that variable is no positive number.
        """
        asked = environ.get("MEGATRON_D3_LEASE_SECONDS", str(SECONDS))
        try:
            seconds = float(asked)
        except ValueError:
            seconds = 0.0
        if not 0 < seconds < float("inf"):
            raise ConfigError(
                f"MEGATRON_D3_LEASE_SECONDS: got {asked!r}, expected seconds above 0, e.g. 60")
        host, pid = socket.gethostname(), os.getpid()
        run_id = environ.get("TORCHELASTIC_RUN_ID", "none")  # torchrun's default says nothing
        if run_id == "none":
            run_id = f"{host}-{os.getppid()}"
        slurm, elastic = (int(environ.get(name) or 0)
                          for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"))
        return cls(
            job=environ.get("SLURM_JOB_ID") or run_id, restart=(slurm, elastic), host=host,
            machine=_machine(), pid=pid, started=_started(pid) or 0, seconds=seconds)

    def __str__(self) -> str:
        return f"job {self.job} (start {sum(self.restart) + 1}) on {self.host}, process {self.pid}"

    def is_next_start_of(self, other: Life) -> bool:
        """Whether the scheduler started this life because it gave the other one up."""
        return self.job == other.job and self.restart > other.restart

    def is_known_dead(self) -> bool:
        """Whether the process is gone; False where this machine cannot tell."""
        return self.machine == _machine() and _started(self.pid) != self.started


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _started(pid: int) -> int | None:
    """Return when a process started, in ticks since the machine did; None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # from the third field on
    return None if fields[0] in "ZX" else int(fields[19])
