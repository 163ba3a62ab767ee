"""Compute a plan again from its settings and ledger, and compare it with what is on disk.

Rounds and training steps interleave as they did in the run: a round recorded at iteration i was
decided after the ledger rows up to i had been observed. The order of a window was found by looking
at the model: it is taken from the rows, and checked to be one of the window's units. Resume replays
from the last usable snapshot, audit from the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from megatron_d3.errors import PlanError
from megatron_d3.plan import apportion, draft
from megatron_d3.plan.decide import Decider
from megatron_d3.plan.generations import enter, next_generation
from megatron_d3.plan.header import Generation, RunHeader
from megatron_d3.plan.reader import LEDGER, ROUNDS, PlanReader
from megatron_d3.plan.rows import NO_HASH, RoundRow, last_line, parsed, seal_of, unseal
from megatron_d3.plan.segment import Segment
from megatron_d3.plan.snapshot import Snapshot
from megatron_d3.plan.state import DeciderState

# Builds the decider of a generation from its header and its domains' table ids.
DeciderFactory = Callable[[RunHeader, tuple[int, ...]], Decider]


class ReplayError(PlanError):
    """The plan on disk is not what its settings and ledger lead to. Names the first difference."""


class VersionError(PlanError):
    """The installed algorithms cannot compute the plan again."""


class Replay:
    """A plan being computed again.

    Args:
        reader: the plan; `reader.plan` says which generations count.
        make_decider: builds the decider of each.
        until: stop at this iteration: as of a checkpoint taken there. None for all of the plan.
        position: samples consumed by then: where a generation that begins there would start.
        snapshot: where to start; None for the start of the plan.
        visit: called with each state that the run went through after its first round.

    Attributes:
        state: as of now.
        rewound: state at `position` (or at the start of the next generation) where rounds already
            reach beyond; None while they do not.
        decider: of the current generation.
        generation: its index.
        rounds_end: bytes of `rounds.jsonl` replayed.
        ledger_end: bytes of `ledger.jsonl` replayed.

    Raises:
        ReplayError: by the constructor, if the snapshot is not that of the rows before it.
    """

    def __init__(
        self, reader: PlanReader, make_decider: DeciderFactory, *, until: int | None = None,
        position: int | None = None, snapshot: Snapshot | None = None,
        visit: Callable[[DeciderState], None] | None = None,
    ) -> None:
        self.reader = reader
        self.until = until
        self.rewound: DeciderState | None = None
        self.generation = 0 if snapshot is None else snapshot.generation
        self._make_decider = make_decider
        self._position = position
        self._visit = visit or (lambda state: None)
        current = self._generations[self.generation]
        self.decider = self._decider_of(current)
        self.state = self.decider.init(position=current.position, iteration=current.iteration)
        self.rounds_end = self.ledger_end = 0
        self._seal = NO_HASH
        if snapshot is not None:
            self.state = snapshot.state
            self.rounds_end, self.ledger_end = snapshot.rounds_bytes, snapshot.ledger_bytes
            self._check_snapshot(snapshot)
        self._ledger = reader.ledger(self.ledger_end)
        self._next_row = next(self._ledger, None)

    @property
    def current(self) -> Generation:
        """The current generation."""
        return self._generations[self.generation]

    def rounds(self) -> Iterator[tuple[RoundRow, Segment]]:
        """Replay round after round; `state` is that after the one just yielded, or its window.

        When the iterator ends, the ledger and the generations up to `until` have been replayed too.

        Raises:
            ReplayError: a round, a generation or the ledger differs from what it should be.
        """
        rows = self.reader.rounds(self.rounds_end)
        for row, end in rows:
            if self.until is not None and row.iteration >= self.until:
                break
            while self._upcoming is not None and row.round >= self._upcoming.round:
                self._begin_generation()
            self._observe_through(row.iteration)
            if self.decider.windows is None:
                segment = self._decide(row)
                self.rounds_end = end
                yield row, segment
            else:
                yield from self._decide_window(row, end, rows)
        while self._upcoming is not None:
            self._begin_generation()
        self._observe_through(self.until)

    @property
    def _generations(self) -> tuple[Generation, ...]:
        return self.reader.plan.generations

    @property
    def _upcoming(self) -> Generation | None:
        following = self.generation + 1
        return self._generations[following] if following < len(self._generations) else None

    def _decider_of(self, generation: Generation) -> Decider:
        decider = self._make_decider(generation.header, generation.domain_ids)
        config, versions = generation.header.config, generation.header.versions
        installed = {"apportion": apportion.VERSION, "windows": draft.VERSION,
                     config.get("mix", {}).get("type"): decider.mixer.VERSION}
        for name, version in installed.items():
            if versions.get(name, version) != version:
                raise VersionError(
                    f"positions from {generation.position} on were decided by version "
                    f"{versions[name]} of {name}, this is {version}; use the Megatron-D3 that wrote "
                    "the plan")
        return decider

    def _check_snapshot(self, snapshot: Snapshot) -> None:
        directory, state = self.reader.directory, self.state
        path = directory / ROUNDS
        found = last_line(path, before=self.rounds_end)
        row = None if found is None else parsed(path, found[0], RoundRow)
        if row is None or (row.round, row.chain) != (state.round - 1, state.chain):
            raise ReplayError(f"{snapshot.path}: not the state after round {state.round - 1} of "
                              f"{ROUNDS}")
        found = last_line(directory / LEDGER, before=self.ledger_end)
        if found is not None:
            self._seal = seal_of(directory / LEDGER, found[0])

    def _observe_through(self, iteration: int | None) -> None:
        """Observe the ledger's rows up to an iteration (None: all)."""
        while self._next_row is not None:
            row, end, line = self._next_row
            if iteration is not None and row.iteration > iteration:
                return
            seal = unseal(line, self._seal)
            if seal is None:
                raise ReplayError(f"{LEDGER}: the row of iteration {row.iteration} was changed, or "
                                  "rows before it are missing")
            try:
                signals = row.to_signals(self.current.header.names)
            except KeyError as error:
                raise ReplayError(f"{LEDGER}: the row of iteration {row.iteration} has a domain "
                                  f"{error} that the plan has not") from error
            self.state = self.decider.observe(self.state, signals)
            self.ledger_end, self._seal = end, seal
            self._visit(self.state)
            self._next_row = next(self._ledger, None)

    def _decide(self, row: RoundRow) -> Segment:
        before = self.state
        self._check_iteration(row)
        decided = self.decider.decide(before)
        if decided is None:
            raise _superfluous(row)
        self.state, segment = decided
        self._compare(row, segment)
        self._visit(self.state)
        target = self._target
        if target is not None and self.rewound is None and segment.stop > target:
            cut = self.decider.decide(before, limit=target)
            self.rewound = before if cut is None else cut[0]
        return segment

    def _decide_window(
        self, row: RoundRow, end: int, rows: Iterator[tuple[RoundRow, int]]
    ) -> Iterator[tuple[RoundRow, Segment]]:
        """Replay the window that a row begins; take its other rows from `rows`."""
        before = self.state
        self._check_iteration(row)
        drafted = self.decider.draft(before)
        if drafted is None:
            raise _superfluous(row)
        found = [(row, end), *islice(rows, drafted.num_slots - 1)]
        window = [each for each, _ in found]
        units = _units(window, drafted)
        self.state, segments = draft.commit(before, drafted, units)
        for each, segment in zip(window, segments, strict=True):
            self._compare(each, segment)
        self.rounds_end = found[-1][1]
        self._visit(self.state)
        target = self._target
        if target is not None and self.rewound is None and self.state.position > target:
            self.rewound = draft.rewind(before, drafted, units, target)
        yield from zip(window, segments, strict=True)

    @property
    def _target(self) -> int | None:
        """Where the next generation begins, or would begin."""
        return self._upcoming.position if self._upcoming is not None else self._position

    def _check_iteration(self, row: RoundRow) -> None:
        if self.state.iteration != row.iteration:
            raise ReplayError(f"round {row.round} was decided at iteration {row.iteration}, "
                              f"{LEDGER} has rows up to {self.state.iteration}")

    def _compare(self, row: RoundRow, segment: Segment) -> None:
        expected = RoundRow.of(segment, row.iteration, self.current.header.names)
        for field in ("round", "step", "start", "stop", "unit", "weights", "chain"):
            old, new = getattr(row, field), getattr(expected, field)
            if old != new:
                if field == "chain":
                    field, old, new = "hash", f"{old:016x}", f"{new:016x}"
                raise ReplayError(f"round {row.round} (positions {segment.start}-{segment.stop - 1}"
                                  f"): {field} {old} in {ROUNDS}, {new} when computed again")

    def _begin_generation(self) -> None:
        old, new = self.current, self._upcoming
        assert new is not None
        self._observe_through(new.iteration)
        rewound = self.rewound or self.state
        expected = next_generation(self.reader.plan, self.generation, rewound, new.header,
                                   iteration=new.iteration, round_number=self.state.round)
        if expected != new:
            raise ReplayError(f"generation {self.generation + 1} (from position {new.position}): "
                              "its cursors or ids are not those that the plan leads to")
        self.decider = self._decider_of(new)
        self.state = enter(self.state, rewound, old, new, self.decider)
        self.generation += 1
        self.rewound = None
        self._visit(self.state)


def _superfluous(row: RoundRow) -> ReplayError:
    return ReplayError(f"round {row.round} should not exist: the plan is complete before it")


def _units(rows: Sequence[RoundRow], drafted: draft.Draft) -> list[int]:
    """Return the units of a window's slots as its rows have them.

    Raises:
        ReplayError: a row is missing, was decided at another time than the first, or the units are
            not different ones of the window.
    """
    first, last = drafted.round, drafted.round + drafted.num_slots - 1
    where = f"rounds {first}-{last} (steps {drafted.step}-{drafted.step + drafted.num_slots - 1})"
    if len(rows) < drafted.num_slots:
        raise ReplayError(
            f"{where}: a window of which {ROUNDS} has {len(rows)} of {drafted.num_slots} rows: its "
            "end is missing, or the run was killed while writing (a resume sets that aside)")
    for row in rows:
        if row.iteration != drafted.iteration:
            raise ReplayError(f"{where}: a window, decided at iteration {drafted.iteration}, but "
                              f"{ROUNDS} says {row.iteration} at round {row.round}")
    units = [-1 if row.unit is None else row.unit for row in rows]
    if len(set(units)) < len(units) or not set(units) <= set(range(drafted.num_units)):
        raise ReplayError(
            f"{where}: a window of {drafted.num_units} units, but {ROUNDS} has the order "
            f"{[row.unit for row in rows]}: not each unit once")
    return units
