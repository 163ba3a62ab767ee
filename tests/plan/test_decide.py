"""One round from state and settings."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_d3.errors import PlanError
from megatron_d3.plan.batch_schedule import BatchSchedule
from megatron_d3.plan.decide import Decider, canonical, number_draws
from megatron_d3.plan.segment import RECORD, Segment, chain_hash
from megatron_d3.plan.state import DeciderState
from megatron_d3.types import MixContext, StepSignals
from tests.plan_helpers import Budget, Chaser, Fixed, infos


def decider(
    *weights: float, sizes: tuple[int, ...] = (100, 100), total: int = 64, batch: int = 4,
    **changes: object,
) -> Decider:
    made = Decider(
        domains=infos(*sizes), table_ids=tuple(range(len(sizes))), mixer=Fixed(weights), cap=None,
        total_samples=total, batch_schedule=BatchSchedule.constant(batch), seed=7)
    return replace(made, **changes)  # type: ignore[arg-type]


def all_segments(settings: Decider, state: DeciderState | None = None) -> list[Segment]:
    state = state or settings.init()
    segments = []
    while (decided := settings.decide(state)) is not None:
        state, segment = decided
        segments.append(segment)
    return segments


def test_first_rounds_of_two_domains() -> None:
    state = decider(0.75, 0.25, table_ids=(5, 3)).init()
    rounds = []
    for _ in range(2):
        decided = decider(0.75, 0.25, table_ids=(5, 3)).decide(state)
        assert decided is not None
        state, segment = decided
        rounds.append((segment.round, segment.step, segment.start, segment.stop,
                       segment.has_new_weights, segment.records.tolist()))
    assert rounds == [
        (0, 0, 0, 4, True, [(5, 0), (5, 1), (3, 0), (5, 2)]),
        (1, 1, 4, 8, False, [(5, 3), (5, 4), (3, 1), (5, 5)]),
    ]
    assert state.cursors.tolist() == [6, 2]
    assert (state.round, state.step, state.position, state.decided_at) == (2, 2, 8, 0)


def test_domains_and_samples_are_the_columns_of_the_records() -> None:
    segment = all_segments(decider(0.5, 0.5))[0]
    assert segment.domains.tolist() == [0, 1, 0, 1]
    assert segment.samples.tolist() == [0, 0, 1, 1]
    assert RECORD.itemsize == 10


def test_rounds_follow_the_batch_schedule_and_end_with_the_run() -> None:
    settings = decider(0.5, 0.5, total=31, round_steps=2,
                       batch_schedule=BatchSchedule(((0, 4), (10, 8))))
    spans = [(s.step, s.start, s.stop) for s in all_segments(settings)]
    assert spans == [(0, 0, 8), (2, 8, 20), (4, 20, 31)]


def test_the_mixer_is_asked_for_the_rounds_first_step() -> None:
    asked = []

    class Recorder(Fixed):
        def weights(self, state: dict[str, np.ndarray], context: MixContext) -> np.ndarray:
            asked.append((context.step, context.position, context.total_samples,
                          context.consumed.tolist()))
            return np.array(self.values)

    all_segments(decider(total=12, round_steps=2, mixer=Recorder((0.5, 0.5))))
    assert asked == [(0, 0, 12, [0, 0]), (2, 8, 12, [4, 4])]


@given(cut=st.integers(1, 15), sampling=st.sampled_from(["apportion", "multinomial"]),
       limit_a=st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_a_limit_gives_a_prefix_of_the_round(cut: int, sampling: str, limit_a: int) -> None:
    settings = decider(0.4, 0.6, batch=16, sampling=sampling,
                       cap=Budget(np.array([limit_a, 100])))
    whole, part = settings.decide(settings.init()), settings.decide(settings.init(), limit=cut)
    assert whole is not None and part is not None
    assert part[1].records.tolist() == whole[1].records.tolist()[:cut]
    assert part[0].position == cut
    assert part[0].cursors.sum() == cut


def test_limit_before_the_frontier_decides_nothing() -> None:
    assert decider(0.5, 0.5).decide(decider(0.5, 0.5).init(position=4), limit=4) is None


@given(weights=st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any),
       round_steps=st.integers(1, 5), sampling=st.sampled_from(["apportion", "multinomial"]))
@settings(max_examples=40, deadline=None)
def test_each_ordinal_exactly_once_in_order(
    weights: list[int], round_steps: int, sampling: str
) -> None:
    shares = tuple(w / sum(weights) for w in weights)
    segments = all_segments(decider(*shares, sizes=(5, 5, 5), round_steps=round_steps,
                                    sampling=sampling))
    records = np.concatenate([s.records for s in segments])
    assert len(records) == 64
    for domain in range(3):
        drawn = records["sample"][records["domain"] == domain]
        assert drawn.tolist() == list(range(len(drawn)))
    if sampling == "apportion":
        counts = np.bincount(records["domain"], minlength=3)
        assert np.abs(counts - 64 * np.array(shares)).max() < 1


def test_round_length_does_not_change_the_order_of_constant_weights() -> None:
    orders = [np.concatenate([s.records for s in all_segments(
        decider(0.55, 0.45, round_steps=n))]).tolist() for n in (1, 3, 16)]
    assert orders[0] == orders[1] == orders[2]


def test_multinomial_differs_between_rounds_and_seeds_but_not_between_runs() -> None:
    def domains(seed: int) -> list[list[int]]:
        return [s.domains.tolist() for s in all_segments(
            decider(0.5, 0.5, batch=16, sampling="multinomial", seed=seed))]
    assert domains(7) == domains(7)
    assert domains(7) != domains(8)
    assert domains(7)[0] != domains(7)[1]


def test_redistribute_keeps_within_the_budgets_to_the_last_sample() -> None:
    settings = decider(0.5, 0.3, 0.2, sizes=(9, 9, 100), total=40, batch=16,
                       cap=Budget(np.array([9, 5, 26])))
    records = np.concatenate([s.records for s in all_segments(settings)])
    assert np.bincount(records["domain"]).tolist() == [9, 5, 26]
    for domain in range(3):
        drawn = records["sample"][records["domain"] == domain]
        assert drawn.tolist() == list(range(len(drawn)))


@given(weights=st.lists(st.integers(1, 20), min_size=4, max_size=4),
       budgets=st.lists(st.integers(0, 30), min_size=3, max_size=3),
       batch=st.integers(1, 40), sampling=st.sampled_from(["apportion", "multinomial"]))
@settings(max_examples=60, deadline=None)
def test_redistribute_never_exceeds_a_budget(
    weights: list[int], budgets: list[int], batch: int, sampling: str
) -> None:
    shares = tuple(w / sum(weights) for w in weights)
    limits = np.array([*budgets, 64])
    records = np.concatenate([s.records for s in all_segments(decider(
        *shares, sizes=(30, 30, 30, 64), batch=batch, sampling=sampling, cap=Budget(limits)))])
    assert len(records) == 64
    assert np.all(np.bincount(records["domain"], minlength=4) <= limits)


def test_a_budget_overdrawn_before_a_fork_gives_no_more() -> None:
    settings = decider(0.5, 0.5, total=8, cap=Budget(np.array([5, 100])))
    state = replace(settings.init(), cursors=np.array([7, 0]))
    records = np.concatenate([s.records for s in all_segments(settings, state)])
    assert records.tolist() == [(1, i) for i in range(8)]


def test_stop_ends_the_plan_before_the_round_that_does_not_fit() -> None:
    settings = decider(0.5, 0.5, cap=Budget(np.array([5, 100]), "stop"))
    assert [s.stop for s in all_segments(settings)] == [4, 8]


def test_repeat_goes_on_into_the_next_epoch() -> None:
    settings = decider(0.5, 0.5, sizes=(3, 100), total=16, cap=Budget(np.array([3, 100]), "repeat"))
    records = np.concatenate([s.records for s in all_segments(settings)])
    assert records["sample"][records["domain"] == 0].tolist() == list(range(8))


def test_no_domain_with_weight_left_is_an_error() -> None:
    settings = decider(1.0, 0.0, total=16, batch=16, cap=Budget(np.array([5, 100])))
    with pytest.raises(PlanError, match=r"round 0: every domain that has weight is exhausted, the "
                                        r"last was a; raise d3.mix.max_epochs"):
        settings.decide(settings.init())


@pytest.mark.parametrize("weights", [
    (0.5, 0.6), (1.5, -0.5), (float("nan"), 1.0), (1.0,), (0.0, 0.0)])
def test_weights_off_the_simplex_are_refused(weights: tuple[float, ...]) -> None:
    with pytest.raises(PlanError, match=r"round 0: mixer Fixed gave weights \[.*expected 2 numbers"):
        decider(*weights).decide(decider().init())


def signals(iteration: int, *sums: float) -> StepSignals:
    return StepSignals(iteration, 4 * iteration, np.array(sums), np.array([4] * len(sums)))


def test_only_online_mixers_see_signals() -> None:
    fixed = decider(0.5, 0.5)
    state = fixed.observe(fixed.init(), signals(1, 8.0, 4.0))  # Fixed.update would raise
    assert (state.iteration, state.consumed) == (1, 4)
    online = decider(mixer=Chaser(2))
    state = online.observe(online.init(), signals(1, 8.0, 4.0))
    assert state.mixer["mean"].tolist() == [1.5, 1.0]
    decided = online.decide(state)
    assert decided is not None and decided[1].weights.tolist() == [0.6, 0.4]
    assert decided[0].decided_at == 1


def test_mixers_see_what_the_ledger_keeps() -> None:
    seen = canonical(StepSignals(
        1, 4, np.array([np.inf, -np.inf, np.nan, 2.5, 9.0]), np.array([1, 1, 1, 1, 0])))
    np.testing.assert_array_equal(seen.loss_sums, [np.nan, np.nan, np.nan, 2.5, 0.0])


def test_state_round_trips_through_arrays() -> None:
    online = decider(mixer=Chaser(2))
    state = online.observe(online.init(position=8, iteration=2), signals(3, 8.0, 4.0))
    decided = online.decide(state)
    assert decided is not None
    state = replace(decided[0], chain=(1 << 64) - 1)
    arrays = state.to_arrays()
    again = DeciderState.from_arrays(arrays)
    assert again.chain == (1 << 64) - 1
    for name, array in again.to_arrays().items():
        assert array.dtype == arrays[name].dtype
        np.testing.assert_array_equal(array, arrays[name])


def test_depends_on_total() -> None:
    assert not decider(0.5, 0.5).depends_on_total
    assert decider(0.5, 0.5, cap=Budget(np.array([1, 1]))).depends_on_total
    assert decider(mixer=Chaser(2)).depends_on_total  # says nothing: it might


def test_every_part_of_a_segment_moves_its_hash() -> None:
    records = np.array([(0, 0), (1, 0)], RECORD)
    weights = np.array([0.5, 0.5])
    def of(chain: int = 0, where: tuple[int, int, int, int] = (0, 0, 0, 2),
           w: np.ndarray = weights, r: np.ndarray = records) -> int:
        return chain_hash(chain, where=where, weights=w, records=r)
    swapped = records[::-1].copy()
    hashes = [of(), of(1), of(where=(1, 0, 0, 2)), of(where=(0, 1, 0, 2)), of(where=(0, 0, 1, 2)),
              of(where=(0, 0, 0, 3)), of(w=np.nextafter(weights, 1)), of(r=swapped)]
    assert len(set(hashes)) == 8
    assert of() == 0x6bb11d502839d3ac  # frozen: a plan on disk is checked against it


@given(st.lists(st.integers(0, 3), max_size=30))
def test_number_draws_counts_each_domain_on(domains: list[int]) -> None:
    cursors = np.array([0, 10, 0, 5])
    samples, after = number_draws(np.array(domains, np.int16), cursors)
    expected, count = [], cursors.tolist()
    for domain in domains:
        expected.append(count[domain])
        count[domain] += 1
    assert samples.tolist() == expected
    assert after.tolist() == count
