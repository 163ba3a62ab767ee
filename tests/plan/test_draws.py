"""The audit's own count of what was drawn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_d3.plan.draws import Draws
from megatron_d3.plan.segment import RECORD


def records(*pairs: tuple[int, int]) -> np.ndarray:
    return np.array(list(pairs), RECORD)


def test_consecutive_draws_must_be_the_next_ones() -> None:
    draws = Draws(2)
    assert draws.consecutive(records((0, 0), (1, 0), (0, 1))) is None
    assert draws.consecutive(records((1, 1), (0, 3), (0, 4))) == 1
    assert draws.wanted == 2


def test_ordered_draws_may_come_in_any_order() -> None:
    draws = Draws(3)
    assert draws.ordered(records((0, 3), (0, 4), (2, 1))) is None
    assert draws.cursors.tolist() == [0, 0, 0] and len(draws.ahead) == 3
    assert draws.ordered(records((0, 0), (0, 1), (2, 0))) is None
    assert draws.cursors.tolist() == [2, 0, 2]
    assert draws.ahead.tolist() == [(0, 3), (0, 4)]
    assert draws.ordered(records((0, 2))) is None
    assert draws.cursors.tolist() == [5, 0, 2] and len(draws.ahead) == 0


@pytest.mark.parametrize(("later", "index"), [
    (((0, 3), (0, 5)), 0),  # waits among those ahead
    (((0, 2), (0, 1)), 1),  # below the cursor
    (((1, 0), (0, 2), (1, 0)), 2),  # within the same
])
def test_a_repeated_draw_is_found(later: tuple[tuple[int, int], ...], index: int) -> None:
    draws = Draws(2)
    assert draws.ordered(records((0, 0), (0, 1), (0, 3))) is None
    assert draws.ordered(records(*later)) == index


def test_a_generation_may_pass_over_but_not_go_back() -> None:
    draws = Draws(2)
    draws.ordered(records((0, 0), (0, 3), (1, 0)))
    assert Draws.begin(draws, [4]) == [1]  # domain 1 from 0 again
    draws = Draws(2)
    draws.ordered(records((0, 0), (0, 3)))
    assert draws.begin([3, 0]) == [0]
    draws = Draws(2)
    draws.ordered(records((0, 0), (0, 3)))
    assert draws.begin([4, 7]) == []
    assert draws.consecutive(records((0, 4), (1, 7))) is None


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6)), max_size=24), st.integers(1, 5))
def test_it_agrees_with_a_set(pairs: list[tuple[int, int]], size: int) -> None:
    draws = Draws(3)
    seen: set[tuple[int, int]] = set()
    for start in range(0, len(pairs), size):
        part = pairs[start:start + size]
        expected = None
        for i, pair in enumerate(part):
            if pair in seen:
                expected = i
                break
            seen.add(pair)
        assert draws.ordered(records(*part)) == expected
        if expected is not None:
            return
        cursors = [next(i for i in range(99) if (k, i) not in seen) for k in range(3)]
        assert draws.cursors.tolist() == cursors
        assert draws.ahead.tolist() == sorted(p for p in seen if p[1] >= cursors[p[0]])
