"""The ranks of an `mpirun`, if there are any: broadcast and gather, nothing else.

A command started without `mpirun` never imports mpi4py. One that was started by it and has no
mpi4py, or one that belongs to another MPI, is refused: its processes would all do the whole work
and write the same files.
"""

from __future__ import annotations

import importlib
import os
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_d3.errors import ConfigError, D3Error

# Set by Hydra (MPICH, Intel MPI), Open MPI, MVAPICH2, and `srun`.
_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


@dataclass(frozen=True)
class Ranks:
    """The processes that share one command.

    Attributes:
        rank: number of this one.
        size: how many there are.
    """

    rank: int = 0
    size: int = 1
    _comm: Any = None

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        return value if self._comm is None else self._comm.bcast(value, root=0)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks in their order, on every rank."""
        if self._comm is None:
            return [value]
        values: list[Any] = self._comm.allgather(value)
        return values

    def collect(self, value: Any) -> list[Any]:
        """Return the values of all ranks in their order on rank 0, [] on others."""
        if self._comm is None:
            return [value]
        return self._comm.gather(value, root=0) or []

    def scatter(self, values: list[Any] | None) -> Any:
        """Return to each rank its own of rank 0's values, one a rank; others give None."""
        if self._comm is None:
            assert values is not None and len(values) == 1
            return values[0]
        return self._comm.scatter(values, root=0)

    def abort(self) -> None:
        """End all ranks at once: one of them met an error that nobody planned for."""
        if self._comm is not None:
            self._comm.Abort(1)


def find_ranks(environ: Mapping[str, str] = os.environ) -> Ranks:
    """Return the ranks this process was started with; one without `mpirun`.

    Raises:
        ConfigError: started by `mpirun`, but mpi4py is missing or sees another number of ranks.
    """
    sizes = [int(environ[name]) for name in _SIZES if environ.get(name, "").isdigit()]
    expected = max(sizes, default=1)
    if expected == 1:
        return Ranks()
    try:
        comm = importlib.import_module("mpi4py.MPI").COMM_WORLD
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"started as one of {expected} ranks, but mpi4py cannot be used ({error}): "
            "pip install megatron-d3[mpi], or start one process and give --workers"
        ) from error
    if comm.size != expected:
        raise ConfigError(
            f"started as one of {expected} ranks, but mpi4py sees {comm.size}: mpirun and mpi4py "
            "belong to different MPIs; use the mpirun of the MPI that mpi4py was built for"
        )
    return Ranks(comm.rank, comm.size, comm)


def on_all_ranks(work: Callable[[Ranks], int]) -> int:
    """Carry out a command on the ranks of an `mpirun`, or alone; return the exit code.

    A `D3Error` has to be raised by every rank or before the first exchange; rank 0 says it. After
    any other error all ranks are ended, for they would wait for the one that failed.

    Raises:
        D3Error: on rank 0, or where the ranks cannot be used.
    """
    ranks = find_ranks()
    try:
        return work(ranks)
    except D3Error:
        if ranks.rank:
            return 1
        raise
    except BaseException:
        if ranks.size > 1:
            traceback.print_exc()
            ranks.abort()
        raise
