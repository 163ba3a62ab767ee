"""RSR: the order of the row sums, refined by random pair swaps. The paper's solver.

Source: arXiv 2605.31164, which does not give the number of swaps nor how pairs are drawn; here
`swaps` pairs of different positions, each pair alike, swapped where that lowers the cost. A swap is
judged in O(L).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_d3.influence.settings import D3Config
from megatron_d3.influence.solvers.kernels import swap_pairs, whole_numbers
from megatron_d3.influence.solvers.random_pairs import random_pairs
from megatron_d3.influence.solvers.row_sum import row_sum


def rsr(advantage: np.ndarray, *, settings: D3Config, seed: int | Sequence[int]) -> np.ndarray:
    """Return (L,) int64 units after `settings.swaps` tried swaps.

    >>> S = np.array([[0.0, -1.0, 3.0], [1.0, 0.0, -4.0], [-3.0, 4.0, 0.0]])
    >>> rsr(S, settings=D3Config(swaps=20), seed=0)
    array([0, 2, 1])
    """
    weights = whole_numbers(advantage)
    order = row_sum(weights, settings=settings, seed=seed)
    pairs = random_pairs(len(order), (settings.swaps,), seed=seed, name="rsr")
    return swap_pairs(weights, order, pairs)
