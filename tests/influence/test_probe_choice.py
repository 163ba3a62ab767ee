"""Which sequences stand for a unit: unbiased, proportional in domains, in two halves alike."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_d3.influence.estimators.pieces import cut_halves
from megatron_d3.influence.probe_choice import choose_probes

# Whatever a mixer may fill units with, n of N and m of n.
CASES = st.integers(1, 24).flatmap(lambda size: st.tuples(
    st.lists(st.lists(st.integers(0, 5), min_size=size, max_size=size), min_size=1, max_size=4),
    st.integers(1, size))).flatmap(lambda case: st.tuples(
        st.just(np.array(case[0])), st.just(case[1]), st.integers(1, case[1]), st.integers(0, 99)))


def counts(domains: np.ndarray) -> np.ndarray:
    return np.bincount(domains, minlength=6)


@given(CASES)
def test_each_domain_has_its_share_rounded_up_or_down(case):
    domains, n, m, seed = case
    chosen = choose_probes(domains, n, num_curved=m, seed=[seed])
    assert chosen.dtype == np.int64
    assert chosen.shape == (len(domains), n)
    for row, places in zip(domains, chosen, strict=True):
        assert len(set(places.tolist())) == n
        share = counts(row) * n / len(row)
        assert (np.abs(counts(row[places]) - share) < 1).all()


@given(CASES)
def test_halves_hold_the_same_domains_and_curvature_is_spread_over_them(case):
    domains, n, m, seed = case
    chosen = choose_probes(domains, n, num_curved=m, seed=[seed])
    pieces = cut_halves(n, m)
    for row, places in zip(domains, chosen, strict=True):
        middle = n // 2 if n > 1 else 1  # a single sequence is the first half
        halves = [row[places[:middle]], row[places[middle:]]]
        assert np.abs(counts(halves[0]) - counts(halves[1])).max() <= 1
        for piece in pieces:
            if piece.is_curved:
                half = halves[piece.half]
                share = counts(half) * (piece.stop - piece.start) / len(half)
                assert (np.abs(counts(row[places[piece.start:piece.stop]]) - share) < 1).all()


@given(CASES)
def test_the_same_window_has_the_same_choice_again(case):
    domains, n, m, seed = case
    first = choose_probes(domains, n, num_curved=m, seed=[seed, 3])
    np.testing.assert_array_equal(first, choose_probes(domains, n, num_curved=m, seed=[seed, 3]))


def test_another_round_or_seed_has_other_sequences():
    domains = np.arange(64)[None] % 4
    found = {tuple(choose_probes(domains, 8, seed=[s, r])[0].tolist())
             for s in range(4) for r in range(4)}
    assert len(found) == 16


@pytest.mark.parametrize(("row", "n", "m"), [
    ([0, 1, 2] * 3, 4, 4), ([0, 0, 0, 0, 0, 1, 2], 3, 2), ([0] * 6, 1, 1), ([2, 2, 1, 0], 4, 2),
    ([0, 1] * 4, 6, 3),
])
def test_every_sequence_is_as_likely_as_any_other(row, n, m):
    """Of 1000 windows, within 5 standard errors; of an even n in the halves, and curved, too."""
    num_windows, size = 1000, len(row)
    domains = np.array([row, row])
    chosen = np.stack([choose_probes(domains, n, num_curved=m, seed=[9, round_])
                       for round_ in range(num_windows)])  # (windows, 2, n)
    parts = {"all": slice(0, n)}
    if n % 2 == 0:
        parts |= {f"{piece.half}, curved {piece.is_curved}": slice(piece.start, piece.stop)
                  for piece in cut_halves(n, m)}
    for name, part in parts.items():
        share = len(range(*part.indices(n))) / size
        error = (share * (1 - share) / num_windows) ** 0.5
        for unit in range(2):
            found = np.bincount(chosen[:, unit, part].ravel(), minlength=size) / num_windows
            np.testing.assert_allclose(found, share, atol=5 * error, err_msg=name)


def test_a_unit_probed_in_full_is_only_dealt():
    domains = np.array([[0, 0, 1, 1, 2, 2, 3, 3]])
    (places,) = choose_probes(domains, 8, seed=[0])
    assert sorted(places.tolist()) == list(range(8))
    for half in (places[:4], places[4:]):
        assert sorted(domains[0, half].tolist()) == [0, 1, 2, 3]


def test_units_of_equal_shares_are_probed_on_equal_domains():
    """Dealt in turns with another domain first in each unit; 5 of 7 domains."""
    domains = np.stack([np.roll(np.arange(28) % 7, shift) for shift in range(6)])
    chosen = choose_probes(domains, 5, seed=[2])
    probed = np.take_along_axis(domains, chosen, 1)
    assert (probed == probed[0]).all()
    assert len(set(probed[0].tolist())) == 5
    assert len({tuple(places) for places in chosen.tolist()}) == 6
