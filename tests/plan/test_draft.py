"""Windows: drafted by the mixer, committed in an order."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_d3.errors import PlanError
from megatron_d3.plan.batch_schedule import BatchSchedule
from megatron_d3.plan.decide import Decider
from megatron_d3.plan.draft import Draft, Orderer, WindowRule, checked, commit, rewind, stored_order
from megatron_d3.plan.segment import Segment
from megatron_d3.plan.state import DeciderState
from tests.plan_helpers import Budget, Chaser, Fixed, infos, random_order, reverse_order


def decider(
    length: int = 4, *, overlap: bool = False, total: int = 64, batch: int = 4, **changes: object
) -> Decider:
    made = Decider(
        domains=infos(100, 100), table_ids=(0, 1), mixer=Fixed((0.6, 0.4)), cap=None,
        total_samples=total, batch_schedule=BatchSchedule.constant(batch), seed=7,
        windows=WindowRule(length, overlap))
    return replace(made, **changes)  # type: ignore[arg-type]


def windows_of(
    subject: Decider, orderer: Orderer | None, state: DeciderState | None = None
) -> list[tuple[DeciderState, list[Segment]]]:
    """Every window to the end of the data: the state after it, and its segments."""
    state, made = state or subject.init(), []
    while (decided := subject.advance(state, orderer)) is not None:
        state = decided[0]
        made.append(decided)
    return made


def all_segments(subject: Decider, orderer: Orderer | None) -> list[Segment]:
    return [segment for _, segments in windows_of(subject, orderer) for segment in segments]


def content(segment: Segment) -> tuple[object, ...]:
    return (segment.round, segment.step, segment.start, segment.stop, segment.weights.tobytes(),
            segment.has_new_weights, segment.records.tobytes(), segment.chain)


def lengths(subject: Decider, state: DeciderState | None = None) -> list[int]:
    return [len(segments) for _, segments in windows_of(subject, stored_order, state)]


SCHEDULES = (((0, 4),), ((0, 3), (20, 5)), ((0, 8), (1, 2), (30, 7)))

some_runs = given(
    length=st.integers(1, 9), overlap=st.booleans(), total=st.integers(1, 70),
    steps=st.sampled_from(SCHEDULES), sampling=st.sampled_from(["apportion", "multinomial"]),
    budgets=st.sampled_from([None, (20, 200), (5, 66)]),
    exhausted=st.sampled_from(["redistribute", "repeat", "stop"]))


def some_run(
    length: int, overlap: bool, total: int, steps: tuple[tuple[int, int], ...], sampling: str,
    budgets: tuple[int, int] | None, exhausted: str,
) -> Decider:
    cap = None if budgets is None else Budget(np.array(budgets), exhausted)  # type: ignore[arg-type]
    return decider(length, overlap=overlap, total=total, batch_schedule=BatchSchedule(steps),
                   sampling=sampling, cap=cap)


@some_runs
@settings(max_examples=80, deadline=None)
def test_the_stored_order_is_the_run_without_windows(**choice: object) -> None:
    subject = some_run(**choice)  # type: ignore[arg-type]
    plain = all_segments(replace(subject, windows=None), None)
    ordered = all_segments(subject, stored_order)
    assert [content(s) for s in ordered] == [content(s) for s in plain]
    assert all(s.unit is not None for s in ordered) and all(s.unit is None for s in plain)


@some_runs
@settings(max_examples=80, deadline=None)
def test_any_order_holds_the_same_units(**choice: object) -> None:
    subject = some_run(**choice)  # type: ignore[arg-type]
    plain = all_segments(replace(subject, windows=None), None)
    windows = windows_of(subject, random_order)
    ordered = [segment for _, segments in windows for segment in segments]
    # The slots are those of the run without windows, the units fill them in another order.
    assert [(s.round, s.step, s.start, s.stop) for s in ordered] == [
        (s.round, s.step, s.start, s.stop) for s in plain]
    units = Counter((s.records.tobytes(), s.weights.tobytes()) for s in plain)
    assert Counter((s.records.tobytes(), s.weights.tobytes()) for s in ordered) == units
    if windows:
        assert windows[-1][0].pending is None
        assert windows[-1][0].cursors.sum() == ordered[-1].stop
    first = 0
    for after, segments in windows:  # no window, or pool, reaches over L steps
        assert after.position == segments[-1].stop and after.chain == segments[-1].chain
        assert after.round == segments[-1].round + 1 and after.step == segments[-1].step + 1
        num_pending = 0 if after.pending is None else len(after.pending.records)
        length = subject.windows.length  # type: ignore[union-attr]
        assert len(segments) + num_pending <= length
        if not subject.windows.overlap:  # type: ignore[union-attr]
            assert num_pending == 0
            drawn = Counter(s.records.tobytes() for s in segments)
            assert drawn == Counter(s.records.tobytes() for s in plain[first:first + len(segments)])
        first += len(segments)


def test_windows_are_aligned_to_steps() -> None:
    assert lengths(decider(5)) == [5, 5, 5, 1]
    subject = decider(5)
    assert lengths(subject, subject.init(position=12, iteration=3)) == [2, 5, 5, 1]
    assert lengths(decider(1)) == [1] * 16
    assert lengths(decider(60)) == [16]
    # Half of five is two; with the last pool all of it is committed.
    assert lengths(decider(5, overlap=True)) == [2, 2, 2, 2, 2, 2, 4]
    subject = decider(4, overlap=True)
    assert lengths(subject, subject.init(position=12, iteration=3)) == [1, 2, 2, 2, 2, 2, 2]


def test_a_window_ends_where_the_global_batch_changes() -> None:
    """Steps of 3 to position 21, then of 5; the last one has 4 samples."""
    subject = decider(4, batch_schedule=BatchSchedule(((0, 3), (20, 5))), total=50)
    sizes = [[s.stop - s.start for s in segments] for _, segments in windows_of(subject, random_order)]
    assert sizes == [[3, 3, 3, 3], [3, 3, 3], [5], [5, 5, 5, 5], [4]]
    subject = replace(subject, windows=WindowRule(4, overlap=True))
    sizes = [[s.stop - s.start for s in segments] for _, segments in windows_of(subject, random_order)]
    assert sizes == [[3, 3], [3, 3], [3, 3, 3], [5], [5, 5], [5, 5], [4]]


def test_stop_cuts_a_window_where_the_data_ends() -> None:
    budgets = np.array([13, 100])
    subject = decider(4, cap=Budget(budgets, "stop"))
    assert lengths(subject) == [4, 1]  # six batches ask for 14 or 15 of the first domain
    assert lengths(replace(subject, cap=Budget(budgets, "redistribute"))) == [4] * 4
    assert lengths(replace(subject, cap=Budget(np.array([1, 100]), "stop"))) == []


def test_budgets_hold_across_windows() -> None:
    subject = decider(5, mixer=Fixed((0.5, 0.5)), cap=Budget(np.array([9, 55])))
    records = np.concatenate([s.records for s in all_segments(subject, reverse_order)])
    assert np.bincount(records["domain"]).tolist() == [9, 55]
    assert len(np.unique(records)) == 64


def test_a_unit_keeps_its_weights_and_the_rows_say_where_they_change() -> None:
    class Ramp(Fixed):
        def weights(self, state, context):  # type: ignore[no-untyped-def]
            share = context.step / 16
            return np.array([share, 1 - share])

    segments = all_segments(decider(4, mixer=Ramp((0, 0))), reverse_order)
    assert [s.unit for s in segments[:8]] == [3, 2, 1, 0] * 2
    assert [s.weights[0] * 16 for s in segments[:8]] == [3, 2, 1, 0, 7, 6, 5, 4]
    for segment in segments:  # apportioned to the weights of its own unit
        assert abs((segment.domains == 0).sum() - 4 * segment.weights[0]) <= 1
    assert all(s.has_new_weights for s in segments)
    assert [s.has_new_weights for s in all_segments(decider(4), random_order)] == [
        True, *[False] * 15]


def test_the_mixer_sees_no_losses_within_a_window() -> None:
    subject = decider(4, mixer=Chaser(2))
    draft = subject.draft(subject.init())
    assert draft is not None
    assert (draft.num_units, draft.num_slots, draft.unit_size) == (4, 4, 4)
    assert (draft.round, draft.step, draft.start, draft.iteration) == (0, 0, 0, 0)
    assert np.all(draft.weights == 0.5)
    assert [s.position for s in draft.states] == [4, 8, 12, 16]


def test_pending_units_lead_the_next_pool() -> None:
    subject = decider(4, overlap=True)
    drafts: list[Draft] = []

    def keep(draft: Draft) -> np.ndarray:
        drafts.append(draft)
        return reverse_order(draft)

    windows = windows_of(subject, keep)
    assert [(d.num_units, d.num_pending, d.num_slots) for d in drafts] == [
        (4, 0, 2), *[(4, 2, 2)] * 6, (2, 2, 2)]
    for (after, _), draft in zip(windows, drafts[1:], strict=False):
        assert after.pending is not None
        assert draft.records[:2].tobytes() == after.pending.records.tobytes()
        assert draft.weights[:2].tobytes() == after.pending.weights.tobytes()
    # Units 0 and 1, always last, wait in the pool until nothing can be added.
    first = subject.draft(subject.init())
    assert first is not None
    assert drafts[-1].records.tobytes() == first.records[:2].tobytes()


def test_the_state_round_trips_with_pending_units() -> None:
    subject = decider(5, overlap=True)
    state = windows_of(subject, random_order)[0][0]
    assert state.pending is not None and len(state.pending.records) == 3
    again = DeciderState.from_arrays({k: a.copy() for k, a in state.to_arrays().items()})
    assert {k: (a.dtype, a.tobytes()) for k, a in again.to_arrays().items()} == {
        k: (a.dtype, a.tobytes()) for k, a in state.to_arrays().items()}
    assert "pending.records" not in subject.init().to_arrays()
    left = [content(s) for _, window in windows_of(subject, random_order, again) for s in window]
    assert left == [content(s) for s in all_segments(subject, random_order)[2:]]


@pytest.mark.parametrize("order", [
    [0, 1, 2], [0, 1, 2, 2], [0, 1, 2, 4], [-1, 0, 1, 2], [[0, 1, 2, 3]], [0.5, 1, 2, 3]])
def test_an_order_that_is_no_permutation_is_refused(order: list[object]) -> None:
    subject = decider(4)
    with pytest.raises(PlanError, match=r"window at step 0 \(round 0\): got the order \[.*\], "
                                        r"expected a permutation of 0 to 3"):
        subject.advance(subject.init(), lambda draft: np.array(order))


def test_a_permutation_is_taken_whatever_its_type() -> None:
    draft = decider(4, overlap=True).draft(decider(4).init())
    assert draft is not None
    taken = checked(np.array([3.0, 0, 1, 2]), draft)
    assert (taken.dtype, taken.tolist()) == (np.int64, [3, 0])


def test_another_order_moves_the_hash() -> None:
    chains = {all_segments(decider(4), orderer)[-1].chain
              for orderer in (stored_order, reverse_order, random_order)}
    assert len(chains) == 3


@given(length=st.integers(1, 8), overlap=st.booleans(), num_kept=st.integers(0, 8),
       number=st.integers(0, 3), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_going_back_into_a_window_gives_nothing_twice(
    length: int, overlap: bool, num_kept: int, number: int, seed: int
) -> None:
    subject = decider(length, overlap=overlap, total=200)

    def orderer(draft: Draft) -> np.ndarray:
        return np.random.default_rng([seed, draft.round]).permutation(draft.num_units)

    before = subject.init()
    trained: list[Segment] = []
    for _ in range(number):
        decided = subject.advance(before, orderer)
        assert decided is not None
        before = decided[0]
        trained += decided[1]
    draft = subject.draft(before)
    assert draft is not None
    units = checked(orderer(draft), draft)
    _, segments = commit(before, draft, units)
    num_kept = min(num_kept, len(segments))
    position = before.position + 4 * num_kept
    state = rewind(before, draft, units.tolist(), position)
    assert (state.position, state.pending) == (position, None)
    trained += segments[:num_kept]
    again = [s for _, window in windows_of(subject, stored_order, replace(state, step=0))
             for s in window]
    samples = np.concatenate([s.records for s in (*trained, *again)])
    assert len(np.unique(samples)) == len(samples)
    if not overlap:  # passed over: just the units that were drawn before the last one trained
        newest = units[:num_kept].max(initial=-1)
        num_passed = int(state.cursors.sum()) - position
        assert num_passed == 4 * (newest + 1 - num_kept)
    if overlap and num_kept == 0 and number == 0:
        assert state.cursors.tolist() == [0, 0]


def test_the_rule_of_lengths() -> None:
    assert WindowRule(5).ends(12) == (15, 15)
    assert WindowRule(5, overlap=True).ends(12) == (14, 17)
    assert WindowRule(1, overlap=True).ends(7) == (8, 8)
    for rule in (WindowRule(6), WindowRule(6, overlap=True), WindowRule(7, overlap=True)):
        ends = [rule.ends(step) for step in range(40)]
        for step, (commit_end, draft_end) in enumerate(ends):
            assert step < commit_end <= draft_end
            assert commit_end - step <= rule.stride and draft_end - step <= rule.length
        for (one, _), (two, _) in pairwise(ends):
            assert two in (one, one + rule.stride)
