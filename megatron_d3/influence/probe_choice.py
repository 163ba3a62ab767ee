"""Which sequences of each unit stand for it when it is probed.

    unit      a2 b1 a1 c1 b2 a3 c2 a4      sorted by domain, shuffled inside one
    sample    c2 c1 a4 a1 a3 a2 b1 b2      every (N / n)-th from a random start
    halves    c2       a3     |            dealt in turns: both hold the same domains
                    a4     b1 |            as nearly as possible

A systematic sample (Cochran, "Sampling Techniques", 1977, chapter 8) of a list sorted by stratum: each
sequence is taken with probability n / N, so that means over the sample are unbiased for the unit, and
each domain gets its share of n, rounded up or down. A mixer that deals domains out evenly fills a
unit in turns: its first n sequences hold some domains only, and two halves of them different ones.

Where the sample starts, in which order the domains stand and which half is dealt first is drawn for a
window, not for a unit: units of equal shares are probed on equal domains. S compares units, and would
else hold the difference of the domains that happen to be probed. (In 16 windows of seven domains S agreed
with that of all sequences as well with a draw for each unit: -0.14 +- 0.14, 0.17 +- 0.12, 0.05 +- 0.10
and -0.12 +- 0.09 more with one draw for all, at n = 4, 8, 12 and 16 of 32.)
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import numpy as np

VERSION = 2
"""Raised whenever the same domains and seed give another choice."""


def choose_probes(
    domains: np.ndarray, num_sequences: int, *, num_curved: int | None = None, seed: Sequence[int]
) -> np.ndarray:
    """Return the places of each unit's probe sequences, in the order in which they are measured.

    The first n // 2 are one half, the others the other (`estimators/pieces.py`). Each sequence is
    taken with probability n / N, and of an even n in either half with the same. A domain with c of a
    unit's N sequences has c n / N of the n, rounded up or down, and its numbers in the two halves
    differ by at most 1. The curvature sequences, the first ones of each half, are a systematic sample
    of the half.

    Args:
        domains: (L, N) ids of the domains of each unit's sequences.
        num_sequences: n, from 1 to N.
        num_curved: m, sequences for curvature, from 1 to n; None: all.
        seed: of the run and of the window, e.g. its first round. The same window measured again has
            the same probe sequences; units that are left for a later window (`overlap`) have others
            there, whose errors are independent.

    Returns:
        (L, n) int64, in [0, N), none twice in a unit.

    >>> domains = np.array([[7, 8, 9, 7, 8, 9, 7, 8]])
    >>> chosen = choose_probes(domains, 4, seed=[1, 0])
    >>> chosen.tolist(), np.take_along_axis(domains, chosen, 1).tolist()
    ([[7, 0, 4, 2]], [[8, 7, 8, 9]])
    """
    num_units, size = domains.shape
    assert 1 <= num_sequences <= size
    shared = np.random.default_rng([*seed, crc32(b"d3 probes")])
    known, kinds = np.unique(domains, return_inverse=True)
    ranks = shared.permutation(len(known))[kinds.reshape(domains.shape)]  # (L, N)
    picks = _systematic(size, num_sequences, shared)
    picks = picks[_dealt(num_sequences, num_curved or num_sequences, shared)]
    chosen = np.empty((num_units, num_sequences), np.int64)
    for unit in range(num_units):
        own = np.random.default_rng([*seed, crc32(b"d3 probes of a unit"), unit])
        shuffled = own.permutation(size)
        in_order = shuffled[np.argsort(ranks[unit, shuffled], kind="stable")]
        chosen[unit] = in_order[picks]
    return chosen


def _systematic(size: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return (count,) ascending places of [0, size), each taken with probability count / size."""
    start = rng.integers(size)  # in units of 1 / count, so that all is whole numbers
    return (start + size * np.arange(count)) // max(count, 1)


def _dealt(count: int, num_curved: int, rng: np.random.Generator) -> np.ndarray:
    """Return [0, count) in the order of measurement: two halves, each its curved ones first."""
    if count == 1:
        return np.zeros(1, np.int64)
    # Of an odd number the second half has one more: it is dealt to first.
    begin = 1 if count % 2 else int(rng.integers(2))
    places = np.arange(count)
    order = []
    for half, curved in ((places[begin::2], num_curved // 2),
                         (places[1 - begin::2], num_curved - num_curved // 2)):
        is_curved = np.zeros(len(half), bool)
        is_curved[_systematic(len(half), curved, rng)] = True
        order += [half[is_curved], half[~is_curved]]
    return np.concatenate(order)
