"""The influence graph of a window: what an order costs, and how much of it is more than a sort.

`I_ij` is the influence of unit i on unit j: the loss of j after a step on i, minus the loss before.
The advantage `S = I^T - I` is antisymmetric; `S_ij > 0` says that i had better come before j. An
order pays `S_ij` for each pair that it violates, that is `S_ij > 0` with j before i.

Sources: "D^3: Dynamic Directional Graph-Constrained Data Scheduling for LLM Training"
(arXiv 2605.31164) for influence, advantage and objective. It is the linear ordering problem (Marti
and Reinelt, "The Linear Ordering Problem", 2011), also known as minimum weighted feedback arc set of
a tournament: with `P` the rows and columns of S in order, cost = (sum of |P_pq| - sum of P_pq) / 2
over p < q, so that the least cost has the largest sum above the diagonal. Potential and curl are
HodgeRank (Jiang, Lim, Yao, Ye, "Statistical ranking and combinatorial Hodge theory", 2011) on the
complete graph.

All arrays are float64, (L, L) for L units; orders are (L,) integers, the unit at each position.
"""

from __future__ import annotations

import numpy as np

from megatron_d3.errors import ProbeError
from megatron_d3.influence.settings import COMMON_STEPS, D3Config

_TOLERANCE = 1e-9  # of the largest entry: more than sums of float64 in another order differ by


def advantage(influence: np.ndarray) -> np.ndarray:
    """Return S = I^T - I of the influence matrix.

    NOTE: I is signed. With |I| or with the gain -I in its place, S would ask for another order: the
    first does not have the stated meaning, the second reverses it.

    >>> advantage(np.array([[0.0, -3.0], [-1.0, 0.0]]))  # a step on unit 0 lowers loss 1 by 3
    array([[ 0.,  2.],
           [-2.,  0.]])
    """
    return np.asarray(influence.T - influence, np.float64)


def check_advantage(advantage: np.ndarray) -> np.ndarray:
    """Return S as float64, exactly antisymmetric.

    Raises:
        ProbeError: S is not square, not finite, or not antisymmetric to 1e-9 of its largest entry.
    """
    found = np.asarray(advantage, np.float64)
    if found.ndim != 2 or found.shape[0] != found.shape[1]:
        raise ProbeError(f"advantage: got shape {found.shape}, expected (L, L) for L units")
    if not np.isfinite(found).all():
        row, column = np.argwhere(~np.isfinite(found))[0].tolist()
        raise ProbeError(
            f"advantage: got {found[row, column]} for units {row} and {column}, expected finite "
            "numbers; keep the stored order of this window"
        )
    # Halves, since the sum of two of the largest floats is none.
    wrong = np.abs(found / 2 + found.T / 2)
    if wrong.size and wrong.max() > _TOLERANCE * np.abs(found).max():
        row, column = np.unravel_index(np.argmax(wrong), wrong.shape)
        raise ProbeError(
            f"advantage: got {found[row, column]} for units {row} and {column} but "
            f"{found[column, row]} the other way round, expected opposite numbers"
        )
    return found / 2 - found.T / 2


def in_order(advantage: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return (L, L) S with rows and columns in `order`: what lies below the diagonal and is > 0 is
    violated."""
    return advantage[np.ix_(order, order)]


def violation_cost(advantage: np.ndarray, order: np.ndarray) -> float:
    """Return the sum of S_ij > 0 over the pairs with j before i.

    >>> S = np.array([[0.0, 2.0, 1.0], [-2.0, 0.0, 4.0], [-1.0, -4.0, 0.0]])
    >>> violation_cost(S, np.array([0, 1, 2])), violation_cost(S, np.array([2, 0, 1]))
    (0.0, 5.0)
    """
    return float(np.maximum(np.tril(in_order(advantage, order)), 0.0).sum())


def random_cost(advantage: np.ndarray) -> float:
    """Return the mean cost of all orders: half of sum |S_ij| over the pairs.

    >>> random_cost(np.array([[0.0, 2.0, 1.0], [-2.0, 0.0, 4.0], [-1.0, -4.0, 0.0]]))
    3.5
    """
    return float(np.abs(np.triu(advantage)).sum() / 2)


def relative_cost(advantage: np.ndarray, order: np.ndarray) -> float:
    """Return the cost as a share of that of a random order: 0 violates nothing, 1 is no better than
    random, 2 violates everything. 1 where S is zero: no order is better than another.

    >>> S = np.array([[0.0, 2.0], [-2.0, 0.0]])
    >>> relative_cost(S, np.array([0, 1])), relative_cost(S, np.array([1, 0]))
    (0.0, 2.0)
    >>> relative_cost(0 * S, np.array([1, 0]))
    1.0
    """
    expected = random_cost(advantage)
    return violation_cost(advantage, order) / expected if expected else 1.0


def swap_delta(advantage: np.ndarray, order: np.ndarray, p: int, q: int) -> float:
    """Return the change of the cost when the units at positions p and q change places, in O(L).

    For p < q with units a and b there and M between them: S_ab + sum over m in M of (S_am + S_mb).

    >>> S = np.array([[0.0, 2.0, 1.0], [-2.0, 0.0, 4.0], [-1.0, -4.0, 0.0]])
    >>> swap_delta(S, np.array([0, 1, 2]), 0, 2)  # 1 + (2 + 4)
    7.0
    """
    p, q = min(p, q), max(p, q)
    a, b, between = order[p], order[q], order[p + 1 : q]
    return float(advantage[a, b] + (advantage[a, between] + advantage[between, b]).sum())


def insertion_deltas(advantage: np.ndarray, order: np.ndarray, p: int) -> np.ndarray:
    """Return (L,) changes of the cost when the unit at position p moves to each position, in O(L).

    Later by `n` places it violates what it held against the n units it passes; earlier, it gains.

    >>> S = np.array([[0.0, 2.0, 1.0], [-2.0, 0.0, 4.0], [-1.0, -4.0, 0.0]])
    >>> insertion_deltas(S, np.array([0, 1, 2]), 1)  # before 0: +2, after 2: +4
    array([2., 0., 4.])
    """
    row = advantage[order[p], order]  # (L,) the unit at p against that at each position
    earlier = -np.cumsum(row[:p][::-1])[::-1]  # (p,)
    return np.concatenate([earlier, [0.0], np.cumsum(row[p + 1 :])])


def row_sum_potential(advantage: np.ndarray) -> np.ndarray:
    """Return (L,) phi, the potential whose differences phi_j - phi_i are nearest to S_ij.

    phi_i = -(1/L) sum_j S_ij, with mean 0: the least-squares potential on a complete graph. To sort
    by it, ascending, is to sort by row sums, descending.

    >>> row_sum_potential(np.array([[0.0, 3.0], [-3.0, 0.0]]))
    array([-1.5,  1.5])
    """
    return -advantage.sum(axis=1) / max(len(advantage), 1)


def potential_advantage(potential: np.ndarray) -> np.ndarray:
    """Return (L, L) phi_j - phi_i: an advantage without a cycle, of rank 2.

    >>> potential_advantage(np.array([1.0, 4.0]))
    array([[ 0.,  3.],
           [-3.,  0.]])
    """
    return potential[None, :] - potential[:, None]


def curl(advantage: np.ndarray) -> float:
    """Return |S - (phi_j - phi_i)| / |S| in [0, 1]: the share of S that no sort by one number has.

    Near 0 the graph is a scalar curriculum; independent random entries have sqrt((L - 2) / L) in
    the mean square. 0 where S is zero.

    >>> curl(np.array([[0.0, 1.0, -1.0], [-1.0, 0.0, 1.0], [1.0, -1.0, 0.0]]))  # a cycle
    1.0
    >>> curl(potential_advantage(np.array([1.0, 4.0, 9.0])))
    0.0
    """
    largest = np.abs(advantage).max(initial=0.0)
    if not largest:
        return 0.0
    scaled = advantage / largest  # squares of very large and very small entries stay numbers
    rest = scaled - potential_advantage(row_sum_potential(scaled))
    return float(min(np.linalg.norm(rest) / np.linalg.norm(scaled), 1.0))


def expected_agreement(reliability: float, num_sequences: int, unit_size: int) -> float:
    """Return the correlation to expect of S from n of N sequences with S from all N, in [0, 1].

    Spearman and Brown's formula for a finite population. Let S_m, from m sequences of each unit, be
    what all sequences like these would give, of variance T over the pairs, plus an error of variance
    s / m. Two halves of n / 2 sequences then correlate with r = T / (T + 2 s / n), so that S_n has
    the reliability R = T / (T + s / n) = 2 r / (1 + r). The n are among the N, hence
    Cov(S_n, S_N) = T + s / N = Var(S_N), and

        corr(S_n, S_N)^2 = (T + s / N) / (T + s / n) = R + (1 - R) n / N:

    1 where all are probed, even where r says that others would give another S; sqrt(n / N) for r = 0,
    and for r < 0, which the model does not know.

    What it leaves out: S is a product of gradients and curvature, and their errors, multiplied, fall
    faster than 1 / m; sequences that represent their domains leave a smaller error than drawn ones;
    and r of one window has an error of its own. `docs/d3.md` has measured agreements.

    Args:
        reliability: r, of :func:`split_half_reliability`.
        num_sequences: n.
        unit_size: N.

    >>> [round(expected_agreement(r, 8, 32), 3) for r in (-0.2, 0.0, 0.5, 1.0)]
    [0.5, 0.5, 0.866, 1.0]
    >>> expected_agreement(0.1, 8, 8)
    1.0
    """
    half = min(max(reliability, 0.0), 1.0)
    whole = 2 * half / (1 + half)
    return float(np.sqrt(whole + (1 - whole) * num_sequences / unit_size))


def how_far_it_holds(
    halves: tuple[np.ndarray, np.ndarray] | None, settings: D3Config, unit_size: int
) -> tuple[float | None, float | None]:
    """Return the reliability and the expected agreement of S, None and None where it has no halves.

    With m < n probe sequences for curvature the agreement is that of m, as if all errors were those of
    curvature. Estimators in `COMMON_STEPS` have none.

    Args:
        halves: S from two halves of n probe sequences of each unit.
        settings: what S was measured with.
        unit_size: N, sequences of a unit.
    """
    if halves is None:
        return None, None
    reliability = split_half_reliability(*halves)
    if settings.estimator in COMMON_STEPS:
        return reliability, None
    return reliability, expected_agreement(reliability, settings.num_curved, unit_size)


def split_half_reliability(first: np.ndarray, second: np.ndarray) -> float:
    """Return the correlation of two estimates of S, in [-1, 1], over all pairs of units.

    Over i != j both have mean zero, whatever the units' numbers, so it is the cosine of the two.
    S of all the data is more reliable than its halves: 2 r / (1 + r) of it is no noise (Spearman and
    Brown), see :func:`expected_agreement`. 0 where one of them is zero: nothing was measured.

    >>> S = np.array([[0.0, 2.0], [-2.0, 0.0]])
    >>> round(split_half_reliability(S, 3 * S), 9), round(split_half_reliability(S, -S), 9)
    (1.0, -1.0)
    >>> split_half_reliability(S, 0 * S)
    0.0
    """
    largest = np.abs(first).max(initial=0.0), np.abs(second).max(initial=0.0)
    if not (largest[0] and largest[1]):
        return 0.0
    a, b = first / largest[0], second / largest[1]
    cosine = (a * b).sum() / (np.linalg.norm(a) * np.linalg.norm(b))
    return float(np.clip(cosine, -1.0, 1.0))
