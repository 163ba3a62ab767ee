"""The plan of a running job: what the training loop calls.

Rank 0 holds a :class:`PlanKeeper`, which writes the plan; every other rank a :class:`PlanFollower`
started from the keeper's arrays. Both compute the same segments from the same calls:

    keeper = PlanKeeper.open(directory, header, make_decider, iteration=..., consumed=...)
    arrays = keeper.state_arrays()                                  # broadcast
    follower = PlanFollower.from_arrays(header, make_decider, arrays)

    segments = plan.advance(until)      # before a training step, on every rank
    assert plan.fingerprint is the same on every rank
    ...                                 # the step itself
    plan.observe(signals)               # after it, on every rank
    keeper.sync()                       # before each checkpoint
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import numpy as np

from megatron_d3.errors import PlanError, ResumeError
from megatron_d3.plan.decide import Decider
from megatron_d3.plan.draft import Orderer
from megatron_d3.plan.files import explained, is_there
from megatron_d3.plan.header import PlanFile, RunHeader
from megatron_d3.plan.lease import Lease
from megatron_d3.plan.reach import Checkpoint
from megatron_d3.plan.reader import PLAN
from megatron_d3.plan.replay import DeciderFactory
from megatron_d3.plan.resume import resume
from megatron_d3.plan.segment import Segment
from megatron_d3.plan.state import DeciderState
from megatron_d3.plan.store import PlanStore
from megatron_d3.plan.windows import WindowRow
from megatron_d3.types import StepSignals

# A resume replays at most so many rounds: ~0.1 s at a global batch of 1,024.
SNAPSHOT_EVERY = 100


class PlanFollower:
    """Decides the run's plan without writing it.

    Args:
        decider: the run's settings.
        state: where the run is.

    Attributes:
        decider: as given.
        state: as of now; `state.position` is the frontier.
    """

    def __init__(self, decider: Decider, state: DeciderState) -> None:
        self.decider = decider
        self.state = state

    @classmethod
    def from_arrays(
        cls, header: RunHeader, make_decider: DeciderFactory, arrays: Mapping[str, np.ndarray]
    ) -> PlanFollower:
        """Start from a keeper's :meth:`state_arrays` and the run's own header."""
        table_ids = tuple(int(i) for i in arrays["table_ids"])
        return PlanFollower(make_decider(header, table_ids), DeciderState.from_arrays(arrays))

    @property
    def chain(self) -> int:
        """64-bit hash over all segments so far: equal on every rank, or they have come apart."""
        return self.state.chain

    @property
    def fingerprint(self) -> int:
        """64-bit hash over `chain` and what may not show in any segment yet: the mixer's state, and
        pending units."""
        digest = blake2b(struct.pack("<Q", self.chain), digest_size=8)
        pending = self.state.pending
        for array in (*self.state.mixer.values(),
                      *((pending.records, pending.weights) if pending is not None else ())):
            digest.update(np.ascontiguousarray(array).view(np.uint8))
        return int.from_bytes(digest.digest(), "little")

    def state_arrays(self) -> dict[str, np.ndarray]:
        """Return named arrays from which another rank can follow."""
        return self.state.to_arrays() | {"table_ids": np.asarray(self.decider.table_ids, np.int16)}

    def advance(self, until: int, orderer: Orderer | None = None) -> list[Segment]:
        """Decide rounds until all positions below `until` (or the run's end) are decided.

        Args:
            until: see above. With windows the last one is decided as a whole.
            orderer: called with the draft of each window, on every rank; its answer must be the
                same on all. Needed with windows only.

        Returns:
            The new segments, often none. The frontier stays below `until` only at the end of the
            run, or where `exhausted: stop` ends it: nothing can be trained beyond it then.

        Raises:
            PlanError: a mixer or cap cannot fill the round, the order is not one of the window's
                units, or the segments cannot be written.
        """
        segments: list[Segment] = []
        while self.state.position < until:
            decided = self.decider.advance(self.state, orderer)
            if decided is None:
                break
            after, new = decided
            self._write_segments(new, after)
            segments += new
        return segments

    def observe(self, signals: StepSignals) -> None:
        """Take in what a training step measured, reduced over all ranks.

        Raises:
            PlanError: the steps are out of order, or the row cannot be written.
        """
        if signals.iteration <= self.state.iteration:
            raise PlanError(f"training step {signals.iteration} was observed after step "
                            f"{self.state.iteration}: steps must come in order, each once")
        self._write_step(signals)
        self.state = self.decider.observe(self.state, signals)

    def _write_segments(self, segments: Sequence[Segment], after: DeciderState) -> None:
        self.state = after

    def _write_step(self, signals: StepSignals) -> None:
        pass


class PlanKeeper(PlanFollower):
    """Decides the run's plan and writes it.

    Args:
        decider: the run's settings.
        state: where the run is.
        store: the plan on disk, as of `state`.
        messages: lines for the log: what a resume did.
        snapshot_every: rounds between stored states.

    Attributes:
        lease: the right to write, where several jobs may want it.
    """

    lease: Lease | None = None

    def __init__(
        self, decider: Decider, state: DeciderState, store: PlanStore,
        *, messages: Sequence[str] = (), snapshot_every: int = SNAPSHOT_EVERY,
    ) -> None:
        super().__init__(decider, state)
        self.store = store
        self.messages = tuple(messages)
        self._snapshot_every = snapshot_every

    @classmethod
    def open(
        cls, directory: Path, header: RunHeader, make_decider: DeciderFactory, *,
        iteration: int = 0, consumed: int = 0, mode: Literal["strict", "fork"] = "strict",
        copy_from: Path | None = None, snapshot_every: int = SNAPSHOT_EVERY,
    ) -> PlanKeeper:
        """Start the plan in `directory`, or continue it from a checkpoint.

        Args:
            directory: the plan directory, made if missing.
            header: what the run makes its plan from.
            make_decider: builds the decider of a header, given its domains' table ids.
            iteration: training steps done (the checkpoint's; 0 without one).
            consumed: training samples consumed by then.
            mode: `fork` allows changes that alter the order of samples from here on, and a plan
                that starts at a checkpoint made without one.
            copy_from: plan directory beside the checkpoint that was loaded, if it is another; copied
                when `directory` has no plan yet, and left as it is.
            snapshot_every: rounds between stored states.

        Raises:
            ResumeError: the plan does not belong to this run or checkpoint.
            PlanError: the plan cannot be read or written, or another process writes it.
        """
        is_copied = copy_from is not None and not is_there(directory / PLAN) and copy_plan(
            copy_from, directory)
        if is_there(directory / PLAN):
            try:
                resumed = resume(directory, Checkpoint(iteration, consumed), header, make_decider,
                                 is_fork=mode == "fork")
            except PlanError:
                if is_copied:  # what was refused must not wait there for the next start
                    shutil.rmtree(directory)
                raise
            return cls(resumed.decider, resumed.state, resumed.store, messages=resumed.messages,
                       snapshot_every=snapshot_every)
        if iteration > 0 and mode == "strict":
            raise ResumeError(
                f"plan {directory}: there is none, but the checkpoint is of iteration {iteration}; "
                "give the --d3-plan-dir that belongs to it, or let a plan start at this checkpoint "
                "with --d3-resume fork")
        plan = PlanFile.begin(header, iteration=iteration, position=consumed)
        decider = make_decider(header, plan.generations[0].domain_ids)
        store = PlanStore.create(directory, plan)
        return cls(decider, decider.init(position=consumed, iteration=iteration), store,
                   snapshot_every=snapshot_every)

    @property
    def read_ahead_steps(self) -> int | None:
        """Global batches to decide beyond the next one, as the plan began; see `RunHeader`."""
        return self.store.plan.generations[-1].header.read_ahead_steps

    def positions(self, start: int, stop: int | None = None) -> np.ndarray:
        """Return the records of positions [start, stop), e.g. those read ahead before a resume.

        `stop` is the frontier unless given.

        Raises:
            PlanError: a position is not decided.
        """
        stop = self.state.position if stop is None else stop
        if stop > self.state.position:
            raise PlanError(f"{self.store.directory}: position {stop - 1} was asked for, decided "
                            f"are those below {self.state.position}")
        return self.store.positions(start, stop)

    def note_eval(
        self, loss_sums: np.ndarray, num_tokens: np.ndarray, *, split: str = "valid"
    ) -> None:
        """Record an evaluation at the present iteration; decisions do not depend on it.

        Args:
            loss_sums: (K,) float64, nats.
            num_tokens: (K,) int64.
            split: `valid` or `test`.

        Raises:
            PlanError: the row cannot be written.
        """
        self._require_lease()
        self.store.append_eval(self.state.iteration, split, loss_sums, num_tokens)

    def note_window(self, row: WindowRow, arrays: Mapping[str, np.ndarray]) -> None:
        """Record what was measured in a window; decisions do not depend on it.

        Args:
            row: its `round` and `iteration` are those of the window's draft.
            arrays: named arrays, e.g. S and the order.

        Raises:
            PlanError: it cannot be written.
        """
        self.store.append_window(row, arrays)

    def sync(self) -> None:
        """Make the plan survive a power failure. Before each checkpoint; else at most once a second.

        Raises:
            PlanError: the disk refuses, or another life of the job has taken over.
        """
        self._require_lease()
        self.store.sync()

    def close(self) -> None:
        """Sync and give the plan up."""
        try:
            self.store.sync()
        finally:
            self.store.close()

    def _require_lease(self) -> None:
        if self.lease is not None:
            self.lease.require()

    def _write_segments(self, segments: Sequence[Segment], after: DeciderState) -> None:
        self._require_lease()
        before = self.state.round
        self.store.append_segments(segments, iteration=self.state.iteration)
        self.state = after
        if after.round // self._snapshot_every > before // self._snapshot_every:
            self.store.snapshot(after)

    def _write_step(self, signals: StepSignals) -> None:
        self._require_lease()
        self.store.append_ledger(signals)


def copy_plan(source: Path, directory: Path) -> bool:
    """Copy a plan directory, without what was set aside in it; False if there is no plan.

    Raises:
        PlanError: the copy cannot be written, or `directory` holds something.
    """
    if not is_there(source / PLAN):
        return False
    aside = directory.with_name(directory.name + ".tmp")
    with explained(directory, "copy"):
        directory.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)  # an unfinished copy
        shutil.copytree(source, aside, ignore=shutil.ignore_patterns("abandoned-*", "lock", "*.tmp"))
        aside.rename(directory)
    return True
