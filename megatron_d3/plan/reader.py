"""Reading a plan directory, also one that a run is writing to at this moment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megatron_d3.errors import PlanError
from megatron_d3.plan.files import explained, is_there
from megatron_d3.plan.header import PlanFile
from megatron_d3.plan.rows import LossRow, RoundRow, iter_lines, last_line, parsed
from megatron_d3.plan.segment import RECORD
from megatron_d3.plan.snapshot import Snapshot
from megatron_d3.plan.windows import WindowRow, read_windows

PLAN, POSITIONS, ROUNDS, LEDGER, EVALS, STATE = (
    "plan.json", "positions.bin", "rounds.jsonl", "ledger.jsonl", "evals.jsonl", "state")

_MAX_COPIED = 1 << 16  # records read into memory at once


class PlanReader:
    """A plan on disk, read row by row and through memory maps: memory does not grow with it.

    Args:
        directory: the plan directory.

    Raises:
        PlanError: there is no plan, it cannot be read, or it has another version.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        path = directory / PLAN
        if not is_there(path):
            raise PlanError(f"{directory}: no plan here ({PLAN} is missing); give the directory of a "
                            "run, or its d3/")
        with explained(path, "read"):
            # Bytes that are no UTF-8 are damage too: what is put in their place is no JSON.
            text = path.read_text(encoding="utf-8", errors="replace")
        self.plan = PlanFile.from_text(text, where=str(path))

    @property
    def first_position(self) -> int:
        """The plan's first position: not 0 where it was started at a checkpoint."""
        return self.plan.generations[0].position

    @property
    def frontier(self) -> int:
        """First position not decided."""
        found = last_line(self.directory / ROUNDS)
        if found is None:
            return self.plan.generations[-1].position
        row = parsed(self.directory / ROUNDS, found[0], RoundRow)
        return self.stop_of(row)

    def generation_of(self, round_number: int) -> int:
        """Return the index of the generation that a round belongs to."""
        starts = [generation.round for generation in self.plan.generations]
        return max(0, int(np.searchsorted(starts, round_number, side="right")) - 1)

    def stop_of(self, row: RoundRow) -> int:
        """Return where the row's positions end: a later generation may have begun before its stop."""
        later = self.plan.generations[self.generation_of(row.round) + 1:]
        return min([row.stop, *(generation.position for generation in later)])

    def rounds(self, offset: int = 0) -> Iterator[tuple[RoundRow, int]]:
        """Yield the rounds in order, each with the offset of the end of its line."""
        path = self.directory / ROUNDS
        for line, end in iter_lines(path, offset):
            yield parsed(path, line, RoundRow), end

    def ledger(self, offset: int = 0) -> Iterator[tuple[LossRow, int, bytes]]:
        """Yield the training steps in order, each with the end of its line, and the line."""
        path = self.directory / LEDGER
        for line, end in iter_lines(path, offset):
            yield parsed(path, line, LossRow), end, line

    def evals(self) -> Iterator[tuple[LossRow, int, bytes]]:
        """Yield the evaluations in order, each with the end of its line, and the line."""
        path = self.directory / EVALS
        for line, end in iter_lines(path):
            yield parsed(path, line, LossRow), end, line

    def windows(self) -> Iterator[tuple[WindowRow, int, bytes]]:
        """Yield what was noted of each window, each with the end of its line, and the line; see
        `windows.read_arrays` for its arrays."""
        return read_windows(self.directory)

    def positions(self, start: int, stop: int) -> np.ndarray:
        """Return the records of positions [start, stop); many are memory-mapped.

        Raises:
            PlanError: a position is below the plan's first or not decided.
        """
        if start < self.first_position:
            raise PlanError(f"{self.directory}: position {start} was asked for, the plan starts at "
                            f"{self.first_position}")
        if stop > self.frontier:
            raise PlanError(f"{self.directory}: position {stop - 1} was asked for, decided are "
                            f"those below {self.frontier}")
        return self.stored(start, stop)

    def stored(self, start: int, stop: int) -> np.ndarray:
        """Return the records of [start, stop) that are on disk, whether committed or not.

        Raises:
            PlanError: the file is too short.
        """
        return read_positions(self.directory, start - self.first_position, stop - start)

    @property
    def num_stored(self) -> int:
        """Whole records in `positions.bin`."""
        path = self.directory / POSITIONS
        return path.stat().st_size // RECORD.itemsize if path.exists() else 0

    def snapshots(self) -> list[Snapshot]:
        """Return the stored states, newest first, not yet loaded."""
        paths = sorted((self.directory / STATE).glob("*.npz"), reverse=True)
        return [Snapshot(path) for path in paths]


def read_positions(directory: Path, first_record: int, num_records: int) -> np.ndarray:
    """Return records of `positions.bin` by their index in the file; many are memory-mapped.

    Raises:
        PlanError: the file is too short.
    """
    path = directory / POSITIONS
    if num_records <= 0:
        return np.empty(0, RECORD)
    end = (first_record + num_records) * RECORD.itemsize
    size = path.stat().st_size if path.exists() else 0
    if end > size:
        raise PlanError(f"{path}: holds {size} bytes, the rounds need {end}: its end is missing; "
                        "resume the run (it writes the rest again) or restore the file")
    offset = first_record * RECORD.itemsize
    if num_records <= _MAX_COPIED:  # a map costs 0.4 ms, whatever its size
        return np.fromfile(path, RECORD, num_records, offset=offset)
    return np.memmap(path, RECORD, "r", offset=offset, shape=(num_records,))
