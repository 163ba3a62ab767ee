"""Greedy insertion: one unit after the other at its best place among those already placed.

Source: Greedy Insertion of arXiv 2605.31164, which does not say in which sequence units are taken;
here in that of the row sums. For the linear ordering problem it is the constructive heuristic of
Becker 1967 with insertion. O(L^2).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_d3.influence.settings import D3Config
from megatron_d3.influence.solvers.kernels import whole_numbers
from megatron_d3.influence.solvers.row_sum import row_sum


def greedy_insertion(
    advantage: np.ndarray, *, settings: D3Config, seed: int | Sequence[int]
) -> np.ndarray:
    """Return (L,) int64 units; of equal places the last is taken.

    >>> S = np.array([[0.0, -1.0, 2.0], [1.0, 0.0, 4.0], [-2.0, -4.0, 0.0]])
    >>> greedy_insertion(S, settings=D3Config(), seed=0)
    array([1, 0, 2])
    """
    weights = whole_numbers(advantage)
    order = np.empty(len(weights), np.int64)
    for num_placed, unit in enumerate(row_sum(weights, settings=settings, seed=seed).tolist()):
        # Cost of the place after the first n units, beside that of the first place: what this unit
        # holds against those n.
        costs = np.zeros(num_placed + 1, np.int64)
        np.cumsum(weights[unit, order[:num_placed]], out=costs[1:])
        place = num_placed - int(np.argmin(costs[::-1]))
        order[place + 1 : num_placed + 1] = order[place:num_placed]
        order[place] = unit
    return order
