"""Samples per training step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_d3.errors import ConfigError
from megatron_d3.plan.batch_schedule import BatchSchedule


def test_constant_size_at_any_point() -> None:
    schedule = BatchSchedule.constant(6)
    assert [schedule.size_at(c) for c in (0, 5, 6, 10**12)] == [6, 6, 6, 6]
    assert schedule.stop_after(4, 10**9) == 4 + 6 * 10**9


def test_a_batch_that_starts_below_a_threshold_keeps_its_size() -> None:
    schedule = BatchSchedule(((0, 4), (10, 8), (30, 2)))
    starts = [0]
    for _ in range(8):
        starts.append(starts[-1] + schedule.size_at(starts[-1]))
    assert starts == [0, 4, 8, 12, 20, 28, 36, 38, 40]
    assert [schedule.stop_after(0, n) for n in range(9)] == starts


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    gaps=st.lists(st.integers(1, 30), min_size=4, max_size=4),
    consumed=st.integers(0, 60), num_batches=st.integers(0, 40))
def test_stop_after_is_the_sum_of_sizes(
    sizes: list[int], gaps: list[int], consumed: int, num_batches: int
) -> None:
    thresholds = [0]
    for gap in gaps[:len(sizes) - 1]:
        thresholds.append(thresholds[-1] + gap)
    schedule = BatchSchedule(tuple(zip(thresholds, sizes, strict=True)))
    position = consumed
    for _ in range(num_batches):
        position += schedule.size_at(position)
    assert schedule.stop_after(consumed, num_batches) == position
    assert BatchSchedule.from_json(schedule.to_json()) == schedule


@pytest.mark.parametrize(("steps", "message"), [
    ((), r"expected a first step at 0"),
    (((4, 8),), r"got \(\(4, 8\),\), expected a first step at 0"),
    (((0, 8), (8, 4), (8, 2)), r"thresholds must increase, got 8 after 8"),
    (((0, 0),), r"got a global batch of 0 from sample 0 on"),
])
def test_bad_steps_are_refused(steps: tuple[tuple[int, int], ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BatchSchedule(steps)
