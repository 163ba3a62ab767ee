"""What the order of a window is to achieve: the paper's objective, and the controls beside it.

| objective | order | what it controls for |
|---|---|---|
| online | least violation of S (arXiv 2605.31164) | |
| reverse | that order backwards | direction: it keeps the same units together |
| random | any | order as such |
| group | similar units near each other | grouping without direction |
| spread | similar units far from each other | the opposite of grouping |

Similar are units whose gradients have a large cosine c_ij. `group` maximises, `spread` minimises

    sum over p < q of c(order_p, order_q) / (q - p),

so that each is the other's opposite: a quadratic assignment problem (Koopmans and Beckmann 1957),
here by best pair swaps until none helps, from several starts: a chain of nearest units, that chain
dealt out like cards, and some random orders. The changes of all pair swaps are a matrix product that
is kept up to date in O(L^2) a swap. All are whole numbers (cosines and 1 / (q - p) in units of
2**-20), hence the same on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import numpy as np

from megatron_d3.errors import ProbeError
from megatron_d3.influence.settings import D3Config
from megatron_d3.influence.solvers import solve
from megatron_d3.influence.solvers.kernels import sort_twins

VERSION = 1
"""Raised whenever the same arrays, settings and seed give another order."""

_NUM_RANDOM = 4  # random starts beside the two made ones

_ONE = 1 << 20  # cosine 1, and the nearness of neighbours; L times their product stays below 2**63


def order_window(
    advantage: np.ndarray, gram: np.ndarray | None, settings: D3Config, seed: int | Sequence[int]
) -> np.ndarray:
    """Return the order that `settings.objective` asks for; not `random`, see :func:`random_order`.

    Args:
        advantage: (L, L) S, used by `online` and `reverse`.
        gram: (L, L) inner products of the units' gradients, used by `group` and `spread`; None where
            there are none and the objective needs none.
        settings: `objective`, and what :func:`megatron_d3.influence.solvers.solve` uses.
        seed: one number or several, e.g. of the run and of the round.

    Returns:
        (L,) int64, a permutation.

    Raises:
        ProbeError: the array that is used is not square or not finite, or S not antisymmetric, or
            the gram is missing, or the objective is `random`.
        ConfigError: the solver cannot take so many units.

    >>> S = np.array([[0.0, -1.0, 3.0], [1.0, 0.0, -4.0], [-3.0, 4.0, 0.0]])
    >>> order_window(S, None, D3Config(), seed=0), order_window(S, None, D3Config(
    ...     objective="reverse"), seed=0)
    (array([0, 2, 1]), array([1, 2, 0]))
    """
    match settings.objective:
        case "online":
            return solve(advantage, settings=settings, seed=seed)
        case "reverse":
            return solve(advantage, settings=settings, seed=seed)[::-1].copy()
        case "random":
            raise ProbeError("objective random: got measurements, it needs none: use random_order")
        case "group":
            return group(cosines(gram), seed=seed)
        case "spread":
            return spread(cosines(gram), seed=seed)


def random_order(num_units: int, seed: int | Sequence[int]) -> np.ndarray:
    """Return a random order, (L,) int64; it needs no measurement."""
    rng = np.random.default_rng([*np.atleast_1d(seed).tolist(), crc32(b"random")])
    return rng.permutation(num_units).astype(np.int64)


def cosines(gram: np.ndarray | None) -> np.ndarray:
    """Return (L, L) float64 cosines of the units' gradients; 0 for a gradient of norm 0.

    Raises:
        ProbeError: no gram, not square, or not finite.

    >>> cosines(np.array([[4.0, 1.0], [1.0, 1.0]]))
    array([[1. , 0.5],
           [0.5, 1. ]])
    """
    if gram is None:
        raise ProbeError(
            "gram: got none, expected (L, L) inner products of gradients for objective group or "
            "spread"
        )
    gram = np.asarray(gram, np.float64)
    if gram.ndim != 2 or gram.shape[0] != gram.shape[1]:
        raise ProbeError(f"gram: got shape {gram.shape}, expected (L, L) for L units")
    if not np.isfinite(gram).all():
        row, column = np.argwhere(~np.isfinite(gram))[0].tolist()
        raise ProbeError(
            f"gram: got {gram[row, column]} for units {row} and {column}, expected finite numbers"
        )
    norms = np.sqrt(np.maximum(gram.diagonal(), 0.0))
    inverse = np.divide(1.0, norms, out=np.zeros_like(norms), where=norms > 0)
    # One norm after the other: the product of two small ones may be 0.
    return np.clip(gram * inverse[:, None] * inverse[None, :], -1.0, 1.0)


def group(similarity: np.ndarray, *, seed: int | Sequence[int]) -> np.ndarray:
    """Return an order with similar units near each other; ties by index.

    Args:
        similarity: (L, L) in [-1, 1], symmetric.
        seed: of the random starts.

    >>> kind = np.array([0, 1, 0, 1])
    >>> group((kind[:, None] == kind).astype(float), seed=0)
    array([0, 2, 1, 3])
    """
    return _least_total(similarity, -1, seed)


def spread(similarity: np.ndarray, *, seed: int | Sequence[int]) -> np.ndarray:
    """Return an order with similar units far from each other; ties by index.

    Args:
        similarity: (L, L) in [-1, 1], symmetric.
        seed: of the random starts.

    >>> kind = np.array([0, 0, 1, 1])
    >>> spread((kind[:, None] == kind).astype(float), seed=0)
    array([0, 2, 1, 3])
    """
    return _least_total(similarity, 1, seed)


def _least_total(similarity: np.ndarray, sign: int, seed: int | Sequence[int]) -> np.ndarray:
    """Return the order of least `sign` times total, the first of equals of all starts."""
    likeness = np.rint(similarity * _ONE).astype(np.int64)
    count = len(likeness)
    rng = np.random.default_rng([*np.atleast_1d(seed).tolist(), crc32(b"similar")])
    chain = _chain(likeness)
    num_rows = max(1, int(np.sqrt(count)))
    dealt = [chain[start::num_rows] for start in range(num_rows)]
    starts = [chain, np.concatenate(dealt), *(rng.permutation(count) for _ in range(_NUM_RANDOM))]
    found = [_swap_until_best(sign * likeness, start) for start in starts]
    order = min(found, key=lambda order: sign * _total(likeness, order))
    if count and order[0] > order[-1]:
        order = order[::-1]  # worth the same
    return sort_twins(likeness, order)


def _nearness(count: int) -> np.ndarray:
    """Return (L, L) int64, 1 / |p - q| of positions, the diagonal 0."""
    places = np.arange(count)
    distance = np.abs(places[:, None] - places)
    nearness = _ONE // np.maximum(distance, 1)
    np.fill_diagonal(nearness, 0)
    return nearness


def _total(likeness: np.ndarray, order: np.ndarray) -> int:
    """Return the sum over pairs of positions of likeness times nearness."""
    ordered = likeness[np.ix_(order, order)]
    return int((ordered * _nearness(len(order))).sum() // 2)


def _chain(likeness: np.ndarray) -> np.ndarray:
    """Return (L,) int64: from unit 0 on, always the unit left that is most like the last one."""
    count = len(likeness)
    order = np.zeros(count, np.int64)
    left = np.ones(count, bool)
    lowest = np.iinfo(np.int64).min
    for place in range(1, count):
        left[order[place - 1]] = False
        order[place] = np.argmax(np.where(left, likeness[order[place - 1]], lowest))
    return order


def _swap_until_best(costs: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return the order after the pair swap that lowers the costs most, the first of equals, was made
    again and again until none lowers it."""
    order = order.copy()
    count = len(order)
    if count < 2:
        return order
    nearness = _nearness(count)
    ordered = costs[np.ix_(order, order)]  # (L, L) by positions
    np.fill_diagonal(ordered, 0)
    mixed = ordered @ nearness  # (L, L) the costs of the unit at p, were it at q
    while True:
        own = mixed.diagonal()
        # Half the change when p and q change places. The unit at p, at q, would meet itself there:
        # the last term puts the other one in its place.
        change = mixed + mixed.T - own[:, None] - own[None, :] + 2 * ordered * nearness
        p, q = (int(place) for place in np.unravel_index(np.argmin(change), change.shape))
        if change[p, q] >= 0:
            return order
        order[[p, q]] = order[[q, p]]
        mixed += np.multiply.outer(ordered[:, q] - ordered[:, p], nearness[p] - nearness[q])
        ordered[[p, q]] = ordered[[q, p]]
        ordered[:, [p, q]] = ordered[:, [q, p]]
        mixed[[p, q]] = ordered[[p, q]] @ nearness
