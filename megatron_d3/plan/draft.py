"""Windows: the next units are decided together, then trained in an order found for them.

    mixer -> draft of the window's units -> an orderer's permutation -> one round a slot

A unit is one global batch. The mixer decides the units of a window one after the other, as without
windows, only that it sees no losses in between; the order then says which unit fills which slot.
Windows are aligned to step numbers: window w holds the steps [w L, (w + 1) L), so that a resume, a
fork or another length of the run does not move them. They are shorter where a plan or generation
begins inside one, where the global batch changes its size (units of a window are equally large),
and at the end of the data.

With `overlap` the horizon recedes: the pool holds up to L units, all of it is ordered, the first
half is committed, and the rest stays in the pool for the next decision. Where nothing can be added
to a pool, all of it is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from megatron_d3.errors import PlanError
from megatron_d3.plan.segment import Segment, chain_hash
from megatron_d3.plan.state import DeciderState, Pending

if TYPE_CHECKING:
    from megatron_d3.plan.decide import Decider

VERSION = 1


@dataclass(frozen=True)
class WindowRule:
    """How a run is cut into windows.

    Attributes:
        length: L, units that are ordered together, >= 1.
        overlap: commit only the first half of each order.
    """

    length: int
    overlap: bool = False

    @property
    def stride(self) -> int:
        """Units that a whole window commits: L, or half of it (rounded down) with overlap."""
        return max(1, self.length // 2) if self.overlap else self.length

    def ends(self, step: int) -> tuple[int, int]:
        """Return where a decision taken at `step` ends: the steps it commits, those it drafts.

        >>> WindowRule(4).ends(5), WindowRule(4, overlap=True).ends(5)
        ((8, 8), (6, 8))
        """
        first = step // self.stride * self.stride
        return first + self.stride, first + self.length


@dataclass(frozen=True, eq=False)
class Draft:
    """The units of a window, n of them with G samples each, before they have an order.

    Attributes:
        round: number of the first slot's round.
        step: 0-based training step of the first slot.
        start: first position of the first slot.
        iteration: training steps observed so far.
        num_slots: units that are committed now: n, fewer with `overlap`.
        num_pending: units that an earlier decision left in the pool; the first ones.
        records: (n, G) of `RECORD`, the samples of each unit, in the order in which they were drawn.
        weights: (n, K) float64, the weights that each unit was drawn with.
        states: the state after each new unit was drawn, for going back into the window.
    """

    round: int
    step: int
    start: int
    iteration: int
    num_slots: int
    num_pending: int
    records: np.ndarray
    weights: np.ndarray
    states: tuple[DeciderState, ...]

    @property
    def num_units(self) -> int:
        """n."""
        return len(self.records)

    @property
    def unit_size(self) -> int:
        """G, samples in each unit: the global batch size."""
        return int(self.records.shape[1])


# Finds the order of a draft: (n,) int, slot s gets unit order[s]. Must answer the same on all ranks.
Orderer = Callable[[Draft], np.ndarray]


def stored_order(draft: Draft) -> np.ndarray:
    """Return the order in which the mixer decided the units."""
    return np.arange(draft.num_units)


def checked(order: np.ndarray, draft: Draft) -> np.ndarray:
    """Return an orderer's answer as the (num_slots,) int64 units of the slots to commit.

    Raises:
        PlanError: it is not a permutation of the window's units.
    """
    order = np.asarray(order)
    if order.shape != (draft.num_units,) or not np.array_equal(
            np.sort(order), np.arange(draft.num_units)):
        raise PlanError(
            f"window at step {draft.step} (round {draft.round}): got the order {order.tolist()}, "
            f"expected a permutation of 0 to {draft.num_units - 1}")
    return order[:draft.num_slots].astype(np.int64)


def make_draft(decider: Decider, state: DeciderState) -> Draft | None:
    """Decide the units of the next window; None where no unit is left. See `Decider.draft`."""
    assert decider.windows is not None and decider.round_steps == 1, "a unit is one global batch"
    commit_end, draft_end = decider.windows.ends(state.step)
    pending = state.pending
    parts = [] if pending is None else list(pending.records)
    weights = [] if pending is None else list(pending.weights)
    num_pending = len(parts)
    size = len(parts[0]) if parts else decider.round_stop(state.position) - state.position
    ahead = replace(state, round=state.round + num_pending, step=state.step + num_pending,
                    position=state.position + num_pending * size, pending=None)
    states = []
    while ahead.step < draft_end and decider.round_stop(ahead.position) - ahead.position == size:
        decided = decider.decide(ahead)
        if decided is None:
            break
        ahead, segment = decided
        parts.append(segment.records)
        weights.append(segment.weights)
        states.append(ahead)
    if not parts:
        return None
    num_slots = commit_end - state.step if ahead.step == draft_end else len(parts)
    return Draft(
        round=state.round, step=state.step, start=state.position, iteration=state.iteration,
        num_slots=num_slots, num_pending=num_pending, records=np.stack(parts),
        weights=np.stack(weights), states=tuple(states))


def commit(
    state: DeciderState, draft: Draft, units: Sequence[int] | np.ndarray
) -> tuple[DeciderState, list[Segment]]:
    """Fill the slots of a window.

    Args:
        state: that the draft was made from.
        draft: the window's units.
        units: (num_slots,) which unit fills each slot; no unit twice.

    Returns:
        The state at the window's end, and the segments in the order of slots.
    """
    units = [int(unit) for unit in units]
    assert len(units) == draft.num_slots and len(set(units)) == len(units)
    size, chain, before = draft.unit_size, state.chain, state.weights
    segments = []
    for slot, unit in enumerate(units):
        start = draft.start + slot * size
        weights, records = draft.weights[unit], draft.records[unit]
        where = (draft.round + slot, draft.step + slot, start, start + size)
        chain = chain_hash(chain, where=where, weights=weights, records=records)
        segments.append(Segment(
            *where, weights=weights, has_new_weights=weights.tobytes() != before.tobytes(),
            records=records, chain=chain, unit=unit))
        before = weights
    rest = np.setdiff1d(np.arange(draft.num_units), units)
    # NOTE: in the order of the draft. The rows of `rounds.jsonl` say which units were taken, so
    # that a replay knows the rest; the order found for the rest is not recorded.
    pending = Pending(draft.records[rest], draft.weights[rest]) if len(rest) else None
    drafted = draft.states[-1] if draft.states else state
    after = replace(
        drafted, round=draft.round + len(units), step=draft.step + len(units),
        position=segments[-1].stop, decided_at=state.iteration, chain=chain, weights=before,
        pending=pending)
    return after, segments


def rewind(
    state: DeciderState, draft: Draft, units: Sequence[int], position: int
) -> DeciderState:
    """Return the state from which another decision may go on at a position inside a window.

    The cursors are those after the last-drawn unit of the slots before `position`: of the units
    drawn before it, those that fill later slots are passed over, since a domain's draws only ever
    go forward. Units drawn after it may be drawn again.

    Args:
        state: that the draft was made from.
        draft: the window's units.
        units: (num_slots,) which unit fills each slot.
        position: samples consumed, between the window's start and end.
    """
    num_kept = -(-(position - draft.start) // draft.unit_size)
    newest = max(units[:num_kept], default=-1) - draft.num_pending
    reached = draft.states[newest] if newest >= 0 else state
    return replace(reached, position=position, pending=None)


def num_passed_over(state: DeciderState, *, cursors: Sequence[int], num_positions: int) -> int:
    """Return how many samples were drawn in a generation that fill no position of it.

    Args:
        state: where the generation ends.
        cursors: (K,) its cursors when it began.
        num_positions: that it fills.
    """
    return int(state.cursors.sum()) - sum(cursors) - num_positions

