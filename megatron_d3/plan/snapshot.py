"""`state/*.npz`: the scheduler's state, so that a resume need not replay the plan from its start."""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from megatron_d3.errors import PlanError
from megatron_d3.plan.files import explained, write_atomically
from megatron_d3.plan.state import DeciderState

VERSION = 2
# A state without pending units is written as before there were any, and read by both.
_VERSION_WITHOUT_PENDING = 1


@dataclass(frozen=True)
class Snapshot:
    """A stored state, loaded when it is asked for.

    Attributes:
        path: `state/<last round>-<iteration>.npz`; the two numbers identify the state.
    """

    path: Path

    @classmethod
    def write(
        cls, directory: Path, state: DeciderState, *, generation: int, rounds_bytes: int,
        ledger_bytes: int,
    ) -> Snapshot:
        """Store a state.

        Args:
            directory: `state/` of the plan, made if missing.
            state: after at least one round.
            generation: index of the generation it belongs to.
            rounds_bytes: size of `rounds.jsonl` up to the state's last round.
            ledger_bytes: size of `ledger.jsonl` up to the state's iteration.

        Raises:
            PlanError: it cannot be written.
        """
        version = _VERSION_WITHOUT_PENDING if state.pending is None else VERSION
        arrays = state.to_arrays() | {
            "version": np.array(version), "generation": np.array(generation),
            "rounds_bytes": np.array(rounds_bytes), "ledger_bytes": np.array(ledger_bytes)}
        content = io.BytesIO()
        np.savez(content, allow_pickle=False, **arrays)
        path = directory / f"{state.round - 1:08d}-{state.iteration:08d}.npz"
        with explained(directory, "make"):
            directory.mkdir(exist_ok=True)
        write_atomically(path, content.getvalue())
        return cls(path)

    @cached_property
    def _arrays(self) -> dict[str, np.ndarray]:
        try:
            with np.load(self.path, allow_pickle=False) as file:
                arrays = dict(file)
        except (OSError, ValueError, EOFError, BadZipFile) as error:
            raise PlanError(f"{self.path}: cannot be read ({error}); move it away, the state is then "
                            "replayed from an earlier one") from error
        version = int(arrays.get("version", -1))
        if version not in (_VERSION_WITHOUT_PENDING, VERSION):
            raise PlanError(f"{self.path}: state version {version}, expected "
                            f"{_VERSION_WITHOUT_PENDING} or {VERSION}; use the Megatron-D3 that "
                            "wrote it, or move it away to replay an earlier one")
        return arrays

    @property
    def state(self) -> DeciderState:
        """The state."""
        return DeciderState.from_arrays(self._arrays)

    @property
    def round(self) -> int:
        """The state's last round, from the file's name."""
        return int(self.path.stem.partition("-")[0])

    @property
    def iteration(self) -> int:
        """The state's iteration, from the file's name."""
        return int(self.path.stem.rpartition("-")[2])

    @property
    def generation(self) -> int:
        """Index of its generation."""
        return int(self._arrays["generation"])

    @property
    def rounds_bytes(self) -> int:
        """Offset in `rounds.jsonl` at which the next round's line starts."""
        return int(self._arrays["rounds_bytes"])

    @property
    def ledger_bytes(self) -> int:
        """Offset in `ledger.jsonl` at which the next step's line starts."""
        return int(self._arrays["ledger_bytes"])
