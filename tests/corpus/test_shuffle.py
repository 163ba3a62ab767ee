"""The computed permutation: a bijection, fixed by its key, without visible order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_d3.corpus.shuffle import Permutation, permute, unpermute

SIZES = [1, 2, 3, 4, 5, 7, 16, 17, 100, 1000, 1 << 14, (1 << 14) + 1, 100_000]


def order(size: int, *key: int) -> list[int]:
    return permute(np.arange(size), size=size, key=key).tolist()


def test_known_orders():
    """Frozen: a change here is a change of every run, and takes a new VERSION."""
    assert order(5, 1234, 0) == [1, 0, 2, 4, 3]
    assert order(10, 0) == [0, 5, 4, 6, 9, 2, 8, 7, 1, 3]
    assert permute(np.array([0, 1, 10**15]), size=10**15 + 1, key=(7, 7)).tolist() == [
        204499601730600,
        723312359556388,
        281715006743192,
    ]


@pytest.mark.parametrize("size", SIZES)
def test_is_a_bijection(size):
    assert sorted(order(size, 1, 2, 3)) == list(range(size))


@pytest.mark.parametrize("size", SIZES)
def test_inverse_undoes_it(size):
    values = permute(np.arange(size), size=size, key=(9,))
    assert unpermute(values, size=size, key=(9,)).tolist() == list(range(size))


@settings(max_examples=200, deadline=None)
@given(
    size=st.integers(1, (1 << 62) - 1),
    key=st.lists(st.integers(-(2**70), 2**70), max_size=4),
    fraction=st.fractions(0, 1),
)
def test_one_at_a_time_equals_many_at_once(size, key, fraction):
    index = int((size - 1) * fraction)
    mapped = Permutation(size, key=key)
    value = mapped.at(index)
    assert 0 <= value < size
    assert mapped.apply(np.array([index])).tolist() == [value]
    assert mapped.inverse(np.array([value])).tolist() == [index]


def test_one_at_a_time_equals_many_at_once_for_every_place():
    mapped = Permutation(3000, key=(5,))
    assert [mapped.at(i) for i in range(3000)] == mapped.apply(np.arange(3000)).tolist()


def test_result_does_not_depend_on_what_else_is_asked():
    whole = np.array(order(50_000, 4))
    places = np.random.default_rng(0).integers(0, 50_000, 1000)
    assert permute(places, size=50_000, key=(4,)).tolist() == whole[places].tolist()


def test_other_seed_epoch_or_size_is_another_order():
    orders = [order(1000, 1, 2), order(1000, 1, 3), order(1000, 2, 1), order(1000, 12)]
    orders.append([value for value in order(1001, 1, 2) if value < 1000])
    for i, first in enumerate(orders):
        for second in orders[i + 1 :]:
            agreeing = sum(a == b for a, b in zip(first, second, strict=True))
            assert agreeing < 20  # 1 expected of two random orders


def test_small_orders_are_about_equally_likely():
    """All 24 orders of 4 over 4,800 keys: 200 expected each, standard deviation 14."""
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(4800):
        found = tuple(order(4, seed))
        counts[found] = counts.get(found, 0) + 1
    assert len(counts) == 24
    assert min(counts.values()) > 130 and max(counts.values()) < 270


@pytest.mark.parametrize("size", [10_000, 10**12])
def test_neighbours_are_uncorrelated(size):
    values = permute(np.arange(10_000), size=size, key=(3,)) / size
    assert abs(values.mean() - 0.5) < 0.015  # 5 standard deviations of a uniform sample
    correlation = np.corrcoef(values[:-1], values[1:])[0, 1]
    assert abs(correlation) < 0.05
    counts, _ = np.histogram(values, bins=100, range=(0, 1))
    assert ((counts - 100) ** 2 / 100).sum() < 200  # chi-square, 99 degrees of freedom


def test_about_one_place_keeps_its_sample():
    fixed = [sum(i == v for i, v in enumerate(order(500, seed))) for seed in range(200)]
    assert 0.6 < np.mean(fixed) < 1.4


@pytest.mark.parametrize("size", [0, -1, 1 << 62])
def test_size_out_of_range_is_refused(size):
    with pytest.raises(ValueError, match=f"size: got {size}, expected 1 <= size"):
        Permutation(size, key=(0,))


@pytest.mark.parametrize("index", [-1, 5])
def test_index_out_of_range_is_refused(index):
    mapped = Permutation(5, key=(0,))
    with pytest.raises(IndexError, match=rf"index {index} outside \[0, 5\)"):
        mapped.at(index)
    for many in (mapped.apply, mapped.inverse):
        with pytest.raises(IndexError, match=r"outside \[0, 5\)"):
            many(np.array([0, index]))


def test_no_indices_give_no_values():
    assert permute(np.array([], np.int64), size=5, key=(0,)).tolist() == []
