"""Writing a plan directory: append-only, crash-safe, in bounded memory.

    plan.json            what the plan was made from              replaced as a whole
    positions.bin        10 bytes a position                      appended, before its row
    rounds.jsonl         one row a round: commits its positions   appended
    ledger.jsonl         one row a training step                  appended
    evals.jsonl          one row an evaluation                    appended
    windows.jsonl        one row a window, where there are any    appended
    windows/*.npz        its arrays                               added
    state/*.npz          scheduler states                         added
    abandoned-NNNN/      what a resume from an older checkpoint set aside
    lock                 held by the writing process
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_d3.errors import PlanError
from megatron_d3.plan.files import (
    AppendFile,
    explained,
    is_there,
    lock,
    sync_directory,
    write_atomically,
)
from megatron_d3.plan.header import PlanFile
from megatron_d3.plan.reader import (
    EVALS,
    LEDGER,
    PLAN,
    POSITIONS,
    ROUNDS,
    STATE,
    PlanReader,
    read_positions,
)
from megatron_d3.plan.rows import NO_HASH, LossRow, RoundRow, last_line, seal_of, sealed
from megatron_d3.plan.segment import RECORD, Segment
from megatron_d3.plan.snapshot import Snapshot
from megatron_d3.plan.state import DeciderState
from megatron_d3.plan.windows import ARRAYS, WINDOWS, WindowRow, write_arrays
from megatron_d3.types import StepSignals


@dataclass(frozen=True)
class Cut:
    """How much of each file a resumed run keeps.

    Attributes:
        plan: content of `plan.json` after the cut.
        sizes: bytes kept, by file name.
        arrays: stored states and windows' arrays that do not belong to what is kept.
        iteration: the checkpoint's, for the note left with what is set aside.
    """

    plan: PlanFile
    sizes: dict[str, int]
    arrays: tuple[Path, ...]
    iteration: int


class PlanStore:
    """The writer of a plan directory. One process at a time.

    Args:
        directory: holds a plan; its files must end with complete rows (see `set_aside`).

    Raises:
        PlanError: no plan, another version, another writer, or no permission.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.plan = PlanReader(directory).plan
        self._lock = lock(directory)
        self._files = {name: AppendFile(directory / name)
                       for name in (POSITIONS, ROUNDS, LEDGER, EVALS)}
        if is_there(directory / WINDOWS):  # only a run with windows makes it
            self._files[WINDOWS] = AppendFile(directory / WINDOWS)
        for stray in (*directory.glob("*.tmp"), *(directory / STATE).glob("*.tmp"),
                      *(directory / ARRAYS).glob("*.tmp")):
            if stray.is_file():  # half of an atomic write that never became a file
                stray.unlink()
        self._seals: dict[str, str] = {}
        self._find_seals()

    @classmethod
    def create(cls, directory: Path, plan: PlanFile) -> PlanStore:
        """Start a plan.

        Raises:
            PlanError: the directory holds a plan or parts of one, or cannot be written.
        """
        for name in (PLAN, POSITIONS, ROUNDS, LEDGER):
            if is_there(directory / name):
                raise PlanError(
                    f"{directory}: {name} is there already; resume that plan, or move it away")
        with explained(directory, "make"):
            directory.mkdir(parents=True, exist_ok=True)
        write_atomically(directory / PLAN, plan.to_text().encode())
        return cls(directory)

    def append_segment(self, segment: Segment, *, iteration: int) -> None:
        """Write the positions of a round, then the row that commits them; see `append_segments`."""
        self.append_segments((segment,), iteration=iteration)

    def append_segments(self, segments: Sequence[Segment], *, iteration: int) -> None:
        """Write the positions of rounds decided together, then the rows that commit them.

        Raises:
            PlanError: they cannot be written; the plan is then as before.
        """
        positions, rounds = self._files[POSITIONS], self._files[ROUNDS]
        before = positions.size
        rows = [RoundRow.of(segment, iteration, self._names).to_line() for segment in segments]
        records = [segment.records for segment in segments]
        content = records[0] if len(records) == 1 else np.concatenate(records)
        positions.append(memoryview(content.view(np.uint8)))
        try:
            rounds.append(b"".join(rows))
        except PlanError:
            positions.truncate(before)
            raise

    def append_ledger(self, signals: StepSignals) -> None:
        """Write the row of a training step.

        Raises:
            PlanError: it cannot be written.
        """
        self._append_sealed(LEDGER, LossRow.of_step(signals, self._names).to_body())

    def append_eval(
        self, iteration: int, split: str, loss_sums: np.ndarray, num_tokens: np.ndarray
    ) -> None:
        """Write the row of an evaluation. One that repeats the last row is not written again:
        Megatron evaluates once more at the end of a run.

        Raises:
            PlanError: it cannot be written.
        """
        body = LossRow.of_eval(iteration, split, loss_sums, num_tokens, self._names).to_body()
        last = last_line(self.directory / EVALS)
        if last is None or not last[0].startswith(body[:-1]):
            self._append_sealed(EVALS, body)

    def append_window(self, row: WindowRow, arrays: Mapping[str, np.ndarray]) -> None:
        """Write what was measured in a window: its arrays, if there are any, then its row.

        Raises:
            PlanError: it cannot be written.
        """
        if arrays:
            write_arrays(self.directory, row.round, arrays)
        if WINDOWS not in self._files:
            self._files[WINDOWS] = AppendFile(self.directory / WINDOWS)
        self._append_sealed(WINDOWS, row.to_body())

    def snapshot(self, state: DeciderState, *, generation: int | None = None) -> Snapshot:
        """Store the scheduler's state; it must be that of what was appended so far.

        Args:
            state: after at least one round.
            generation: index of its generation; the last unless given.

        Raises:
            PlanError: it cannot be written.
        """
        index = len(self.plan.generations) - 1 if generation is None else generation
        return Snapshot.write(
            self.directory / STATE, state, generation=index, rounds_bytes=self._files[ROUNDS].size, ledger_bytes=self._files[LEDGER].size)

    def positions(self, start: int, stop: int) -> np.ndarray:
        """Return the records of decided positions [start, stop); many are memory-mapped.

        Raises:
            PlanError: `positions.bin` does not reach so far.
        """
        return read_positions(
            self.directory, start - self.plan.generations[0].position, stop - start)

    def sync(self) -> None:
        """Make everything written so far survive a power failure. Call it before a checkpoint.

        Raises:
            PlanError: the disk refuses.
        """
        for name in (POSITIONS, LEDGER, EVALS, WINDOWS, ROUNDS):  # rounds vouch for the rest
            if name in self._files:
                self._files[name].sync()
        with explained(self.directory, "write"):
            sync_directory(self.directory)

    def close(self) -> None:
        """Give up the files and the lock."""
        for file in self._files.values():
            file.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def write_plan(self, plan: PlanFile) -> None:
        """Replace `plan.json`.

        Raises:
            PlanError: it cannot be written.
        """
        write_atomically(self.directory / PLAN, plan.to_text().encode())
        self.plan = plan

    def write_missing(self, records: np.ndarray) -> None:
        """Append positions whose rows are there already (a replay has computed them again)."""
        self._files[POSITIONS].append(memoryview(np.ascontiguousarray(records).view(np.uint8)))

    def set_aside(self, cut: Cut) -> Path | None:
        """Move what lies beyond the cut to `abandoned-NNNN/`. Nothing is deleted.

        A crash in between leaves the plan as it was or cut, with everything still there.

        Returns:
            The new directory, or None if nothing lies beyond the cut.

        Raises:
            PlanError: it cannot be written.
        """
        tails = {name: size for name, size in cut.sizes.items() if self._files[name].size > size}
        if not tails and not cut.arrays and cut.plan == self.plan:
            return None
        with explained(self.directory, "set aside a part of"):
            kept = self._copy_aside(tails, cut)
            # NOTE: the ledger first. Whatever of this a crash leaves undone, a checkpoint newer than
            # this one is refused, and the same one repeats the cut.
            for name in (LEDGER, ROUNDS, POSITIONS, EVALS, WINDOWS):
                if name in tails:
                    self._files[name].truncate(tails[name])
            if tails.get(WINDOWS) == 0:  # as if there had been no window
                self._files.pop(WINDOWS).close()
                (self.directory / WINDOWS).unlink()
            for path in cut.arrays:
                aside = kept / path.parent.name
                aside.mkdir(exist_ok=True)
                os.rename(path, aside / path.name)
        if cut.plan != self.plan:
            self.write_plan(cut.plan)
        self._find_seals()
        return kept

    def _copy_aside(self, tails: dict[str, int], cut: Cut) -> Path:
        numbers = [int(path.name.removeprefix("abandoned-"))
                   for path in self.directory.glob("abandoned-[0-9]*") if not path.suffix]
        kept = self.directory / f"abandoned-{max(numbers, default=0) + 1:04d}"
        aside = kept.with_suffix(".tmp")
        shutil.rmtree(aside, ignore_errors=True)  # an unfinished copy; its originals are in place
        aside.mkdir()
        for name, size in tails.items():
            with open(self.directory / name, "rb") as source, open(aside / name, "wb") as target:
                source.seek(size)
                shutil.copyfileobj(source, target, 1 << 20)
                os.fsync(target.fileno())
        shutil.copyfile(self.directory / PLAN, aside / PLAN)
        note = {"resumed_at_iteration": cut.iteration, "bytes_kept": cut.sizes}
        write_atomically(aside / "note.json", json.dumps(note, indent=1).encode() + b"\n")
        os.rename(aside, kept)
        sync_directory(self.directory)
        return kept

    @property
    def _names(self) -> tuple[str, ...]:
        return self.plan.generations[-1].header.names

    def _append_sealed(self, name: str, body: bytes) -> None:
        line, seal = sealed(body, self._seals[name])
        self._files[name].append(line)
        self._seals[name] = seal

    def _find_seals(self) -> None:
        for name in (LEDGER, EVALS, WINDOWS):
            path = self.directory / name
            found = last_line(path)
            self._seals[name] = NO_HASH if found is None else seal_of(path, found[0])


def num_bytes(num_positions: int) -> int:
    """Return the size of so many positions in `positions.bin`."""
    return num_positions * RECORD.itemsize
