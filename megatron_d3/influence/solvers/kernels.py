"""The loops of the solvers: local search over orders, in whole numbers.

An order's cost changes by sums of entries of S. The entries are rounded to whole numbers of at most
2**(61 - 2 log2 L), 52 bits or less (49 for L = 60): then every sum is exact, equal costs are equal,
no search goes round in a circle of rounding errors, and the optional C version (`_solver.c`) cannot
differ from the one here. For L = 60 the rounding moves an entry by less than 2**-49 of the largest.

NOTE: nothing here draws random numbers; what is random comes in as an argument.
"""

from __future__ import annotations

import numpy as np

from megatron_d3.influence.graph import check_advantage

try:
    from megatron_d3.influence.solvers import (  # type: ignore[attr-defined,unused-ignore]
        _solver as _compiled,
    )
except ImportError:  # built without a C compiler: the same result, slower
    _compiled = None


def is_compiled() -> bool:
    """Tell whether the C version is in use."""
    return _compiled is not None


def whole_numbers(advantage: np.ndarray) -> np.ndarray:
    """Return S as (L, L) int64, scaled by a power of two; what is int64 already comes back.

    Raises:
        ProbeError: S is not square, not finite, or not antisymmetric.

    >>> whole_numbers(np.array([[0.0, 0.75], [-0.75, 0.0]])) >> 50
    array([[ 0,  3],
           [-3,  0]])
    """
    if advantage.dtype == np.int64:
        return advantage
    exact = check_advantage(advantage)
    bits = min(52, 61 - 2 * len(exact).bit_length())
    _, exponent = np.frexp(np.abs(exact).max(initial=0.0))  # the largest is below 2**exponent
    return np.rint(np.ldexp(exact, bits - exponent)).astype(np.int64)


def sort_twins(matrix: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return the order with units whose rows are equal in the sequence of their indices.

    Where only the matrix decides what an order is worth, such units may change places at no cost.

    Args:
        matrix: (L, L), a row a unit.
        order: (L,) int64.

    >>> sort_twins(np.zeros((3, 3)), np.array([2, 0, 1]))
    array([0, 1, 2])
    """
    _, group = np.unique(matrix, axis=0, return_inverse=True)
    group = group.reshape(-1)
    if not len(group) or group.max() + 1 == len(group):
        return order
    by_group = np.argsort(group, kind="stable")  # in each group by index
    places = np.argsort(group[order], kind="stable")  # in each group by position
    sorted_order = np.empty_like(order)
    sorted_order[places] = by_group
    return sorted_order


def iterated_search(
    weights: np.ndarray, order: np.ndarray, pairs: np.ndarray, limits: np.ndarray
) -> np.ndarray:
    """Return the best order seen in a descent and its repetitions, the first of equals.

    Descent: unit after unit is moved to its best place until none has a better one. Then, round
    after round, some pairs change places, the descent is repeated, and what came out is kept unless
    it is worse than what was kept before by more than the round's limit.

    Args:
        weights: (L, L) of :func:`whole_numbers`.
        order: (L,) int64, where to start.
        pairs: (R, n, 2) int64 positions that change places, n pairs in each of R rounds; with R = 0
            this is a single descent.
        limits: (R,) int64, >= 0, in the unit of `weights`.
    """
    order = order.copy()
    if _compiled is not None:
        _compiled.search(weights, order, np.ascontiguousarray(pairs), limits)
    else:
        _search_python(weights, order, pairs, limits)
    return order


def swap_pairs(weights: np.ndarray, order: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Return the order after each pair of positions in turn was swapped if that improves it.

    Args:
        weights: (L, L) of :func:`whole_numbers`.
        order: (L,) int64, where to start.
        pairs: (n, 2) int64 positions.
    """
    order = order.copy()
    if _compiled is not None:
        _compiled.swap(weights, order, np.ascontiguousarray(pairs))
    else:
        _swap_python(weights, order, pairs)
    return order


def _search_python(
    weights: np.ndarray, order: np.ndarray, pairs: np.ndarray, limits: np.ndarray
) -> None:
    """Search from `order`, in place. The reference for `iterate` of `_solver.c`."""
    gain = 0  # change of the cost since the best order
    _descend(weights, order)
    kept, best = order.copy(), order.copy()
    for swaps, limit in zip(pairs.tolist(), limits.tolist(), strict=True):
        change = 0
        for p, q in swaps:
            change += _swap_cost(weights, order, p, q)
            order[[p, q]] = order[[q, p]]
        change += _descend(weights, order)
        if change > limit:
            order[:] = kept
            continue
        kept[:] = order
        gain += change
        if gain < 0:
            gain = 0
            best[:] = order
    order[:] = best


def _descend(weights: np.ndarray, order: np.ndarray) -> int:
    """Move units to their best places until none has a better one; return the cost's change."""
    count, total, unit = len(order), 0, 0
    if not count:
        return 0
    places = np.arange(count)
    is_earlier = places < places[:, None]
    sums = np.zeros((count, count + 1), np.int64)
    while True:
        np.cumsum(weights[order[:, None], order], axis=1, out=sums[:, 1:])
        costs = np.where(is_earlier, sums[:, :-1], sums[:, 1:])  # (L, L) of p to q, up to p's own
        changes = costs.min(axis=1) - sums[places, places]
        better = np.flatnonzero(changes < 0)
        if not len(better):
            return total
        # The next of them, counting units from `unit` on.
        p = int(better[np.argmin((order[better] - unit) % count)])
        # Later places first, near ones before far ones: the first of equals is taken.
        later, earlier = p + int(np.argmin(costs[p, p:])), p - int(np.argmin(costs[p, p::-1]))
        q = later if costs[p, later] <= costs[p, earlier] else earlier
        total += int(changes[p])
        moved = int(order[p])
        order[min(p, q) : max(p, q) + 1] = (
            np.append(order[p + 1 : q + 1], moved) if p < q else np.append(moved, order[q:p])
        )
        unit = (moved + 1) % count


def _swap_cost(weights: np.ndarray, order: np.ndarray, p: int, q: int) -> int:
    """Return the change of the cost when the units at positions p and q change places."""
    p, q = min(p, q), max(p, q)
    a, b, between = order[p], order[q], order[p + 1 : q]
    return int(weights[a, b] + (weights[a, between] - weights[b, between]).sum())


def _swap_python(weights: np.ndarray, order: np.ndarray, pairs: np.ndarray) -> None:
    """Swap in place. The reference for `swap_pairs` of `_solver.c`."""
    for p, q in pairs.tolist():
        if _swap_cost(weights, order, p, q) < 0:
            order[[p, q]] = order[[q, p]]
