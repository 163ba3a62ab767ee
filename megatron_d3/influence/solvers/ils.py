"""Iterated local search: insertion local search, disturbed and repeated. The default.

Source: iterated local search for the linear ordering problem (Schiavinotto and Stuetzle 2004, "The
linear ordering problem: instances, search space analysis and algorithms"): insertion moves, random
swaps as the disturbance. Different from it: an order that is a little worse is kept as well, by a
threshold that falls to 0 (Dueck and Scheuer 1990, "Threshold accepting").
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_d3.influence.settings import D3Config
from megatron_d3.influence.solvers.greedy_insertion import greedy_insertion
from megatron_d3.influence.solvers.kernels import iterated_search, whole_numbers
from megatron_d3.influence.solvers.random_pairs import random_pairs

NUM_SWAPS = 6
"""Swaps of one disturbance."""

THRESHOLD = 4.0
"""How much worse an order may be at first, in mean entries of |S|.

Mean gap to the best known at 200 rounds, structured S and dense noise, in percent, of 20 graphs of 60
units and 3 of 240: 0.007, 0.16, 0.13, 1.0 with these two; 0.026, 0.26, 0.16, 1.4 with 10 swaps and
threshold 0, the best number of swaps without a threshold. 2 to 16 swaps and thresholds to 8 tried."""


def ils(advantage: np.ndarray, *, settings: D3Config, seed: int | Sequence[int]) -> np.ndarray:
    """Return (L,) int64 units, the best order of `settings.solver_rounds` disturbances.

    >>> S = np.array([[0.0, -1.0, 3.0], [1.0, 0.0, -4.0], [-3.0, 4.0, 0.0]])
    >>> ils(S, settings=D3Config(), seed=0)
    array([0, 2, 1])
    """
    weights = whole_numbers(advantage)
    order = greedy_insertion(weights, settings=settings, seed=seed)
    num_rounds = settings.solver_rounds if len(order) > 1 else 0
    pairs = random_pairs(len(order), (num_rounds, NUM_SWAPS), seed=seed, name="ils")
    return iterated_search(weights, order, pairs, _limits(weights, num_rounds))


def _limits(weights: np.ndarray, num_rounds: int) -> np.ndarray:
    """Return (R,) int64, from THRESHOLD mean entries down towards 0 by equal steps."""
    mean = np.abs(weights).sum() // max(weights.size, 1)
    left = 1.0 - np.arange(num_rounds) / max(num_rounds, 1)
    return np.rint(THRESHOLD * mean * left).astype(np.int64)
