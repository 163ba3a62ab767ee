"""Check a whole plan: compute it again from its settings and ledger, and compare every byte.

Found are, among others: one sample swapped or repeated, a changed weight, loss or cursor, a row that
was added or removed, an end that is missing, a stored state of another run. The corpora are not
needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_d3.errors import PlanError
from megatron_d3.plan.draws import Draws
from megatron_d3.plan.reader import EVALS, LEDGER, POSITIONS, ROUNDS, PlanReader
from megatron_d3.plan.replay import DeciderFactory, Replay, ReplayError
from megatron_d3.plan.rows import NO_HASH, LossRow, iter_lines, last_line, unseal
from megatron_d3.plan.segment import RECORD
from megatron_d3.plan.snapshot import Snapshot
from megatron_d3.plan.state import DeciderState
from megatron_d3.plan.windows import WINDOWS, WindowRow

# A plan of another run would fill the screen.
_MAX_FINDINGS = 10


@dataclass(frozen=True)
class Audit:
    """What an audit saw.

    Attributes:
        findings: what is wrong, a sentence each, in the order found; empty for a sound plan.
        num_rounds: rounds checked.
        num_positions: positions checked.
        num_steps: ledger rows checked.
        num_states: stored states checked.
        num_windows: windows among the rounds, each checked to hold just its units.
    """

    findings: tuple[str, ...]
    num_rounds: int
    num_positions: int
    num_steps: int
    num_states: int
    num_windows: int = 0

    @property
    def is_sound(self) -> bool:
        """Nothing is wrong."""
        return not self.findings


def audit(directory: Path, make_decider: DeciderFactory) -> Audit:
    """Audit a plan that no run is writing to at the moment.

    Args:
        directory: the plan directory.
        make_decider: builds the decider of each generation from `plan.json`.

    Raises:
        PlanError: there is no plan, or it has another version: nothing can be checked.
    """
    return _Auditor(PlanReader(directory), make_decider).run()


class _Auditor:
    def __init__(self, reader: PlanReader, make_decider: DeciderFactory) -> None:
        self._reader = reader
        self._make_decider = make_decider
        self._findings: list[str] = []
        self._draws = Draws(len(reader.plan.table))
        self._window: list[tuple[int, int, np.ndarray]] = []  # (round, start, records) of its slots
        self._generation = 0
        self._states = {(s.round, s.iteration): s for s in reader.snapshots()}
        self._num_rounds = self._num_states = self._num_steps = self._num_windows = 0
        self._checked_to = reader.first_position

    def run(self) -> Audit:
        try:
            self._replay()
        except PlanError as error:
            self._findings.append(str(error))
        else:
            self._check_ends()
            self._findings += [f"{snapshot.path}: not a state of this plan"
                               for snapshot in self._states.values()]
        for name, rows in ((EVALS, self._reader.evals()), (WINDOWS, self._reader.windows())):
            try:
                self._check_seals(name, rows)
            except PlanError as error:
                self._findings.append(str(error))
        return Audit(tuple(self._findings), self._num_rounds,
                     self._checked_to - self._reader.first_position, self._num_steps,
                     self._num_states, self._num_windows)

    def _replay(self) -> None:
        replay = Replay(self._reader, self._make_decider, visit=self._check_state)
        try:
            for row, segment in replay.rounds():
                self._enter(replay)
                stop = self._reader.stop_of(row)
                if stop > segment.start:
                    expected = segment.records[:stop - segment.start]
                    self._check_positions(row.round, segment.start, expected)
                    self._count(row.round, segment.start, expected,
                                is_ordered=segment.unit is not None)
                self._num_rounds += 1
                if segment.unit is not None and segment.stop == replay.state.position:
                    self._end_window(replay, is_whole=stop == segment.stop)
        finally:
            self._num_steps = sum(1 for _ in iter_lines(self._reader.directory / LEDGER))
        if replay.state.consumed > replay.state.position:
            self._findings.append(
                f"{ROUNDS}: decides positions up to {replay.state.position - 1}, but training has "
                f"consumed {replay.state.consumed}: its end is missing")

    def _enter(self, replay: Replay) -> None:
        """Take over the cursors of a generation that begins: they only ever go forward."""
        if replay.generation == self._generation:
            return
        self._generation = replay.generation
        for domain in self._draws.begin(replay.current.cursors):
            self._findings.append(
                f"generation {self._generation} (from position {replay.current.position}): draws "
                f"{self._reader.plan.table[domain].name} again from "
                f"{replay.current.cursors[domain]} on, which was trained on before")

    def _count(
        self, round_number: int, start: int, records: np.ndarray, *, is_ordered: bool
    ) -> None:
        """Check that no sample comes twice, without trusting the replay."""
        if is_ordered:  # a window is counted as a whole
            self._window.append((round_number, start, records))
            return
        wrong = self._draws.consecutive(records)
        if wrong is not None:
            self._findings.append(
                f"position {start + wrong} (round {round_number}): {self._named(records[wrong])} is "
                f"not the next sample of its domain, which is {self._draws.wanted}")

    def _end_window(self, replay: Replay, *, is_whole: bool) -> None:
        self._num_windows += 1
        parts, self._window = self._window, []
        repeated = self._draws.ordered(np.concatenate([r for *_, r in parts])) if parts else None
        if repeated is not None:
            at = parts[0][1] + repeated
            number, start, records = next(part for part in reversed(parts) if part[1] <= at)
            self._findings.append(f"position {at} (round {number}): "
                                  f"{self._named(records[at - start])} was drawn before")
        if is_whole and replay.state.pending is None and len(self._draws.ahead):
            self._findings.append(
                f"round {self._num_rounds - 1}: its window ends before "
                f"{self._named(self._draws.ahead[0])}, but a sample drawn earlier is missing")

    def _check_positions(self, round_number: int, start: int, expected: np.ndarray) -> None:
        num_stored = self._reader.first_position + self._reader.num_stored - start
        stored = self._reader.stored(start, start + min(len(expected), max(0, num_stored)))
        if stored.tobytes() != expected[:len(stored)].tobytes():
            i = int(np.flatnonzero(stored != expected[:len(stored)])[0])
            self._findings.append(
                f"position {start + i} (round {round_number}): {POSITIONS} has "
                f"{self._named(stored[i])}, expected {self._named(expected[i])}")
        if len(self._findings) >= _MAX_FINDINGS:
            raise ReplayError(f"{_MAX_FINDINGS} findings: stopped at position {start}")
        self._checked_to = start + len(stored)
        if len(stored) < len(expected):
            raise ReplayError(f"position {self._checked_to}: {POSITIONS} ends before it; its end is "
                              "missing")

    def _named(self, record: np.ndarray) -> str:
        domain, sample = int(record["domain"]), int(record["sample"])
        table = self._reader.plan.table
        name = table[domain].name if 0 <= domain < len(table) else f"unknown domain {domain}"
        return f"{name} {sample}"

    def _check_state(self, state: DeciderState) -> None:
        snapshot = self._states.pop((state.round - 1, state.iteration), None)
        if snapshot is None:
            return
        # NOTE: at a fork two states have these numbers; the later one was stored last.
        if not _is_same(snapshot, state):
            self._states[state.round - 1, state.iteration] = snapshot
        else:
            self._num_states += 1

    def _check_ends(self) -> None:
        reader = self._reader
        size = (reader.directory / POSITIONS).stat().st_size
        committed = (reader.frontier - reader.first_position) * RECORD.itemsize
        if size != committed:
            self._findings.append(
                f"{POSITIONS}: holds {size} bytes, {ROUNDS} commits {committed}: the end of {ROUNDS} "
                "is missing, or the run was killed while writing (a resume sets that aside)")
        for name in (ROUNDS, LEDGER, EVALS, WINDOWS):
            path = reader.directory / name
            last = last_line(path)
            end = 0 if last is None else last[1]
            if path.exists() and end != path.stat().st_size:
                self._findings.append(f"{name}: its last row is torn: the run was killed while "
                                      "writing (a resume sets it aside)")

    def _check_seals(self, name: str, rows: Iterable[tuple[LossRow | WindowRow, int, bytes]]) -> None:
        seal: str | None = NO_HASH
        for row, _, line in rows:
            seal = unseal(line, seal or NO_HASH)
            if seal is None:
                self._findings.append(f"{name}: the row of iteration {row.iteration} was changed, "
                                      "or rows before it are missing")
                return


def _is_same(snapshot: Snapshot, state: DeciderState) -> bool:
    stored, computed = snapshot.state.to_arrays(), state.to_arrays()
    return stored.keys() == computed.keys() and all(
        stored[name].tobytes() == computed[name].tobytes() for name in stored)
