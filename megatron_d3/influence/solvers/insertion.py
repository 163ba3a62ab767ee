"""Insertion local search: from greedy insertion, move units until no move helps.

Source: the insertion neighbourhood of the linear ordering problem (Laguna, Marti, Campos 1999,
"Intensification and diversification with elite tabu search solutions for the linear ordering
problem"); all places of one unit cost O(L) together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_d3.influence.settings import D3Config
from megatron_d3.influence.solvers.greedy_insertion import greedy_insertion
from megatron_d3.influence.solvers.kernels import iterated_search, whole_numbers


def insertion(
    advantage: np.ndarray, *, settings: D3Config, seed: int | Sequence[int]
) -> np.ndarray:
    """Return (L,) int64 units; no single unit has a better place.

    >>> S = np.array([[0.0, -1.0, 3.0], [1.0, 0.0, -4.0], [-3.0, 4.0, 0.0]])
    >>> insertion(S, settings=D3Config(), seed=0)
    array([0, 2, 1])
    """
    weights = whole_numbers(advantage)
    order = greedy_insertion(weights, settings=settings, seed=seed)
    no_rounds = np.empty(0, np.int64)
    return iterated_search(weights, order, no_rounds.reshape(0, 1, 2), no_rounds)
