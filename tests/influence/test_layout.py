"""Shards name exactly the elements that a split leaves on a rank."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_d3.influence import layout as module
from megatron_d3.influence.layout import (
    Layout,
    Shard,
    cut,
    dim_slice,
    flat_slice,
    single_layout,
    whole_tensor,
)


def places(shard: Shard) -> list[tuple[int, int]]:
    """Return (local, global) offsets of every element, run after run."""
    return [
        (shard.local_start + run * shard.local_stride + i,
         shard.global_start + run * shard.global_stride + i)
        for run in range(shard.num_runs) for i in range(shard.run_length)
    ]


@st.composite
def slices(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int, int]:
    """A shape, one of its dimensions, and a range of its indices."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    dim = draw(st.integers(0, len(shape) - 1))
    start = draw(st.integers(0, shape[dim]))
    return shape, dim, start, draw(st.integers(start, shape[dim]))


def test_the_examples_in_the_text_are_true():
    assert doctest.testmod(module).failed == 0


def test_a_whole_tensor_is_one_run():
    assert whole_tensor("w", (3, 4)) == Shard("w", 12, 0, 1, 12, 12, 0, 12)
    assert whole_tensor("scalar", ()) == Shard("scalar", 1, 0, 1, 1, 1, 0, 1)


def test_a_column_parallel_weight_is_one_run():
    assert places(dim_slice("w", (4, 3), 0, 2, 3)) == [(0, 6), (1, 7), (2, 8)]
    assert dim_slice("w", (4, 3), 0, 2, 3).num_runs == 1


def test_a_row_parallel_weight_is_a_run_for_each_row():
    shard = dim_slice("w", (2, 4), 1, 2, 4)
    assert (shard.num_runs, shard.run_length) == (2, 2)
    assert places(shard) == [(0, 2), (1, 3), (2, 6), (3, 7)]


def test_a_flat_slice_starts_inside_a_row():
    assert places(flat_slice("w", (2, 4), 3, 6)) == [(0, 3), (1, 4), (2, 5)]


@given(slices())
def test_a_slice_of_any_dimension_holds_what_numpy_slices(case):
    shape, dim, start, stop = case
    whole = np.arange(int(np.prod(shape))).reshape(shape)
    local = np.take(whole, range(start, stop), axis=dim).ravel()
    shard = dim_slice("w", shape, dim, start, stop)
    assert shard.num_elements == local.size
    assert sorted(places(shard)) == list(enumerate(local.tolist()))


@given(slices(), st.data())
def test_a_cut_of_a_shard_holds_a_range_of_the_local_tensor(case, data):
    shape, dim, first, last = case
    shard = dim_slice("w", shape, dim, first, last).moved(data.draw(st.integers(0, 3)))
    start = data.draw(st.integers(0, shard.num_elements + 4))
    stop = data.draw(st.integers(start, shard.num_elements + 4))
    expected = [(local - start, p) for local, p in places(shard) if start <= local < stop]
    pieces = cut(shard, start, stop)
    assert [place for piece in pieces for place in places(piece)] == expected
    assert len(pieces) <= 3


def test_a_cut_skips_the_gaps_between_runs():
    shard = Shard("w", 20, 1, 3, 2, 6, 4, 5)  # local 4 5, 9 10, 14 15
    assert [places(piece) for piece in cut(shard, 5, 15)] == [
        [(0, 2)], [(4, 7), (5, 8)], [(9, 13)]]
    assert cut(shard, 6, 9) == () and cut(shard, 16, 30) == () and cut(shard, 0, 4) == ()


def test_a_shard_moves_and_becomes_a_replica():
    shard = whole_tensor("w", (2, 2))
    assert shard.is_counted and not shard.replica().is_counted
    assert places(shard.moved(5))[0] == (5, 0)
    assert (shard.global_stop, shard.local_stop, shard.moved(5).local_stop) == (4, 4, 9)


@pytest.mark.parametrize(("numbers", "message"), [
    ((8, -1, 1, 4, 4, 0, 4), "w: negative start or length"),
    ((8, 5, 1, 4, 4, 0, 4), "w: runs end at 9 of 8 elements"),
    ((8, 0, 3, 2, 4, 0, 2), "w: runs end at 10 of 8 elements"),
    ((8, 0, 2, 3, 2, 0, 3), "w: runs of 3 elements overlap at strides 2 and 3"),
    ((8, 0, 2, 3, 4, 0, 1), "w: runs of 3 elements overlap at strides 4 and 1"),
])  # fmt: skip
def test_a_shard_that_cannot_be_is_refused(numbers, message):
    with pytest.raises(AssertionError, match=message):
        Shard("w", *numbers)


def test_an_empty_shard_may_lie_anywhere():
    assert places(Shard("w", 8, 8, 0, 0, 0, 0, 0)) == []
    assert cut(Shard("w", 8, 8, 0, 0, 0, 0, 0), 0, 4) == ()


def test_a_slice_outside_its_tensor_is_refused():
    with pytest.raises(AssertionError, match=r"w: \[2, 5\) of 4 in 1"):
        dim_slice("w", (3, 4), 1, 2, 5)


def test_a_layout_sorts_the_names_and_counts_each_element_once():
    layout = Layout(
        ((whole_tensor("b", (2,)), whole_tensor("a", (3, 1)).moved(2)),), {"b": 2, "c": 7, "a": 3})
    assert list(layout.global_sizes) == ["a", "b", "c"]
    assert layout.num_elements == 12
    assert layout.global_starts() == {"a": 0, "b": 3, "c": 5}


def test_a_single_layout_holds_its_tensors_in_their_order():
    layout = single_layout({"b": (2, 2), "a": (3,)})
    assert layout == Layout(((whole_tensor("b", (2, 2)),), (whole_tensor("a", (3,)),)),
                            {"a": 3, "b": 4})


@pytest.mark.parametrize(("sizes", "message"), [
    ({"a": 4}, "w: 4 elements here, None in the list"),
    ({"w": 5}, "w: 4 elements here, 5 in the list"),
])  # fmt: skip
def test_a_layout_whose_names_do_not_fit_is_refused(sizes, message):
    with pytest.raises(AssertionError, match=message):
        Layout(((whole_tensor("w", (4,)),),), sizes)
