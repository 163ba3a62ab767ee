"""Iterated local search: insertion local search, disturbed and repeated. The default.

Source: iterated local search for the linear ordering problem (Schiavinotto and Stuetzle 2004, "The
linear ordering problem: instances, search space analysis and algorithms"): insertion moves, random
swaps as the disturbance, better or equal orders kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_d3.influence.settings import D3Config
from megatron_d3.influence.solvers.greedy_insertion import greedy_insertion
from megatron_d3.influence.solvers.kernels import iterated_search, whole_numbers
from megatron_d3.influence.solvers.random_pairs import random_pairs

NUM_SWAPS = 10
"""Swaps of one disturbance. Of 3 to 14, at L = 60 and 200 rounds, 10 left the smallest mean gap on
dense noise (0.16 % against 0.66 % with 3 and 0.26 % with 14) and one of the smallest, 0.01-0.02 %, on
structured S."""


def ils(advantage: np.ndarray, *, settings: D3Config, seed: int | Sequence[int]) -> np.ndarray:
    """Return (L,) int64 units, the best order of `settings.solver_rounds` disturbances.

    >>> S = np.array([[0.0, -1.0, 3.0], [1.0, 0.0, -4.0], [-3.0, 4.0, 0.0]])
    >>> ils(S, settings=D3Config(), seed=0)
    array([0, 2, 1])
    """
    weights = whole_numbers(advantage)
    order = greedy_insertion(weights, settings=settings, seed=seed)
    shape = (settings.solver_rounds, NUM_SWAPS)
    pairs = random_pairs(len(order), shape, seed=seed, name="ils")
    return iterated_search(weights, order, pairs)
