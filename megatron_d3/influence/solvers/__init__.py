"""Solvers of the linear ordering problem: from S to the order of a window. One file each.

    S ── whole_numbers ── row_sum ── greedy_insertion ── insertion ── ils      (each starts from the
         (kernels.py)         └───── rsr                               exact    one to its left)

All return (L,) int64, the unit at each position; the same on every machine, with and without the C
extension, for the same S, settings and seed. Each minimises
:func:`megatron_d3.influence.graph.violation_cost`. Where S is zero they return the stored order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from megatron_d3.influence.settings import D3Config
from megatron_d3.influence.solvers.exact import exact
from megatron_d3.influence.solvers.greedy_insertion import greedy_insertion
from megatron_d3.influence.solvers.ils import ils
from megatron_d3.influence.solvers.insertion import insertion
from megatron_d3.influence.solvers.kernels import is_compiled, sort_twins, whole_numbers
from megatron_d3.influence.solvers.row_sum import row_sum
from megatron_d3.influence.solvers.rsr import rsr

VERSION = 1
"""Raised whenever the same S, settings and seed give another order."""

SOLVERS: dict[str, Callable[..., np.ndarray]] = {
    "row_sum": row_sum,
    "greedy_insertion": greedy_insertion,
    "rsr": rsr,
    "insertion": insertion,
    "ils": ils,
    "exact": exact,
}
"""By the name that `solver` may have; each is called like :func:`solve`."""


def solve(
    advantage: np.ndarray, *, settings: D3Config, seed: int | Sequence[int]
) -> np.ndarray:
    """Return the order that `settings.solver` finds for S.

    Args:
        advantage: (L, L) S, any L >= 0; S_ij > 0 means unit i before unit j.
        settings: `solver`, `swaps` and `solver_rounds` are used.
        seed: one number or several, e.g. of the run and of the round.

    Returns:
        (L,) int64, a permutation. Units with equal rows of S keep their stored sequence.

    Raises:
        ProbeError: S is not square, not finite, or not antisymmetric.
        ConfigError: `exact` for too many units.

    >>> S = np.array([[0.0, -1.0, 3.0], [1.0, 0.0, -4.0], [-3.0, 4.0, 0.0]])
    >>> solve(S, settings=D3Config(), seed=[7, 0])
    array([0, 2, 1])
    """
    weights = whole_numbers(np.asarray(advantage, np.float64))
    order = SOLVERS[settings.solver](weights, settings=settings, seed=seed)
    return sort_twins(weights, order)


__all__ = ["SOLVERS", "VERSION", "is_compiled", "solve"]
