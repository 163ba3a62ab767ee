"""Shares of a window among data-parallel groups: complete, disjoint, balanced."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_d3.influence.estimators.deal import deal, most_sequences
from megatron_d3.influence.estimators.pieces import Piece, cut_halves


def shares(num_sequences: int, num_units: int, num_groups: int) -> list[list[tuple[int, int, int]]]:
    pieces = cut_halves(num_sequences, num_sequences)
    return [[(p.unit, p.start, p.stop) for p in deal(pieces, num_units, group, num_groups)]
            for group in range(num_groups)]


@pytest.mark.parametrize(("num_groups", "expected"), [
    (1, [[(0, 0, 2), (0, 2, 4), (1, 0, 2), (1, 2, 4)]]),
    (2, [[(0, 0, 2), (0, 2, 4)], [(1, 0, 2), (1, 2, 4)]]),
    (3, [[(0, 0, 1), (0, 1, 2)], [(0, 2, 3), (0, 3, 4), (1, 0, 1)],
         [(1, 1, 2), (1, 2, 3), (1, 3, 4)]]),
    (4, [[(0, 0, 2)], [(0, 2, 4)], [(1, 0, 2)], [(1, 2, 4)]]),
    (8, [[(u, s, s + 1)] for u in range(2) for s in range(4)]),
    (9, [[], *([(u, s, s + 1)] for u in range(2) for s in range(4))]),
])  # fmt: skip
def test_two_units_of_four_sequences(num_groups, expected):
    assert shares(4, 2, num_groups) == expected


@pytest.mark.parametrize(("num_groups", "expected"), [
    (1, 480), (30, 16), (59, 10), (60, 8), (90, 6), (120, 4), (180, 4), (240, 2), (479, 2), (480, 1),
    (2000, 1)])  # fmt: skip
def test_the_busiest_group_of_a_window_of_60_units(num_groups, expected):
    assert most_sequences(cut_halves(8, 8), 60, num_groups) == expected


@given(num_sequences=st.integers(1, 9), num_curved=st.integers(1, 9), num_units=st.integers(1, 7),
       num_groups=st.integers(1, 80))  # fmt: skip
def test_every_sequence_is_measured_once_and_within_its_piece(
    num_sequences, num_curved, num_units, num_groups
):
    pieces = cut_halves(num_sequences, min(num_curved, num_sequences))
    found = [p for group in range(num_groups) for p in deal(pieces, num_units, group, num_groups)]
    measured = [(p.unit, s) for p in found for s in range(p.start, p.stop)]
    assert measured == [(u, s) for u in range(num_units) for s in range(num_sequences)]
    for part in found:
        piece = pieces[part.piece]
        assert piece.start <= part.start < part.stop <= piece.stop


@given(num_sequences=st.integers(1, 9), num_curved=st.integers(1, 9), num_units=st.integers(1, 7),
       num_groups=st.integers(1, 80))  # fmt: skip
def test_curvature_is_measured_once_in_ranges_of_the_gradients(
    num_sequences, num_curved, num_units, num_groups
):
    num_curved = min(num_curved, num_sequences)
    pieces = cut_halves(num_sequences, num_curved)
    everything, by_group = ([deal(pieces, num_units, group, num_groups, only_curved=only_curved)
                             for group in range(num_groups)] for only_curved in (False, True))
    curved = [part for parts in by_group for part in parts]
    assert curved == [p for parts in everything for p in parts if pieces[p.piece].is_curved]
    assert sum(p.stop - p.start for p in curved) == num_units * num_curved
    counts = [len(parts) for parts in by_group]
    assert max(counts) - min(counts) <= 1
    most = max(sum(p.stop - p.start for p in parts) for parts in by_group)
    assert most == most_sequences(pieces, num_units, num_groups, only_curved=True)


@given(num_sequences=st.integers(1, 9), num_units=st.integers(1, 7), factor=st.integers(1, 3))
def test_enough_groups_measure_one_sequence_each(num_sequences, num_units, factor):
    pieces = cut_halves(num_sequences, num_sequences)
    assert most_sequences(pieces, num_units, factor * num_sequences * num_units) == 1


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 7))
def test_one_group_cuts_nothing(lengths, num_units):
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    pieces = [Piece(0, s, s + n, True) for s, n in zip(starts, lengths, strict=True)]
    found = [(p.unit, p.start, p.stop) for p in deal(pieces, num_units, 0, 1)]
    assert found == [(u, p.start, p.stop) for u in range(num_units) for p in pieces]
