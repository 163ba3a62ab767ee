"""Row sums: first the unit whose advantages over all others add up to most.

Source: Row-Sum of arXiv 2605.31164. It is the order of the least-squares potential (HodgeRank, see
:func:`megatron_d3.influence.graph.row_sum_potential`), hence the best order where S is a difference
of numbers, one a unit. O(L^2).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_d3.influence.settings import D3Config
from megatron_d3.influence.solvers.kernels import whole_numbers


def row_sum(
    advantage: np.ndarray, *, settings: D3Config, seed: int | Sequence[int]
) -> np.ndarray:
    """Return (L,) int64 units by descending row sum of S, the lower index first of equals.

    >>> S = np.array([[0.0, -1.0, -2.0], [1.0, 0.0, 4.0], [2.0, -4.0, 0.0]])
    >>> row_sum(S, settings=D3Config(), seed=0)
    array([1, 2, 0])
    """
    return np.argsort(-whole_numbers(advantage).sum(axis=1), kind="stable").astype(np.int64)
