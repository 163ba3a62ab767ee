"""The mixture of least mean c + exp(t . x) within limits: a convex problem, with a bound on what is left."""

from __future__ import annotations

import numpy as np

from megatron_d3.mix.caps import project
from megatron_d3.propose.runs import Limits, divergence

_GAP = 1e-7  # nats; where a descent ends, unless its iterations end first
_SLACK = 1e-6  # of the largest divergence may stay unused
_MAX_ITERATIONS = 3000


def minimise(
    constants: np.ndarray, slopes: np.ndarray, limits: Limits
) -> tuple[np.ndarray, float]:
    """Minimise the mean of c + exp(t . x) over the simplex within the limits.

    The largest divergence is kept by a multiplier on KL(x || prior), found by bisection.

    Args:
        constants: (M,) float64.
        slopes: (M, K) float64.
        limits: see :class:`Limits`.

    Returns:
        (K,) float64, and the duality gap: no mixture within the limits is better by more, nats.
    """
    start = project(limits.prior, limits.upper)[0]

    def solve(multiplier: float, x: np.ndarray) -> tuple[np.ndarray, float]:
        return _descend(slopes, limits, multiplier, x)

    free, gap = solve(0.0, start)
    if divergence(free, limits.prior) <= limits.max_kl:
        return free, gap
    low, high = 1e-8, 1e4  # KL falls as the multiplier grows
    found, found_gap = start, np.inf
    for _ in range(60):
        middle = float(np.sqrt(low * high))
        x, gap = solve(middle, found)
        if divergence(x, limits.prior) > limits.max_kl:
            low = middle
            continue
        # Of the problem with the limit: what is left of the divergence counts at its price.
        gap += middle * (limits.max_kl - divergence(x, limits.prior))
        high, found, found_gap = middle, x, gap
        if divergence(x, limits.prior) > (1 - _SLACK) * limits.max_kl or high / low < 1 + 1e-9:
            break
    return found, found_gap


def _descend(
    slopes: np.ndarray, limits: Limits, multiplier: float, x: np.ndarray
) -> tuple[np.ndarray, float]:
    """Mirror descent on mean(exp(t . x)) + multiplier * KL(x || prior), to a duality gap."""
    log_prior = np.log(limits.prior)

    def smooth(y: np.ndarray) -> float:
        return float(np.exp(slopes @ y).mean())

    x = np.maximum(x, 1e-300)
    rate, value = 1.0, smooth(x)
    gap = np.inf
    for _ in range(_MAX_ITERATIONS):
        slope = (np.exp(slopes @ x) @ slopes) / len(slopes)  # (K,)
        full = slope + multiplier * (np.log(x) - log_prior + 1)
        gap = float(full @ x - full @ _cheapest(full, limits.upper))
        if gap < _GAP:
            break
        while True:
            logs = (np.log(x) / rate + multiplier * log_prior - slope) / (1 / rate + multiplier)
            raw = np.exp(logs - logs.max())
            new = np.maximum(project(raw / raw.sum(), limits.upper)[0], 1e-300)
            # The smooth part lies below its linear model plus KL(new || x) / rate where the rate
            # is small enough (Bregman descent).
            bound = value + slope @ (new - x) + divergence(new, x) / rate
            if smooth(new) <= bound + 1e-15 or rate < 1e-12:
                break
            rate /= 2
        x, value, rate = new, smooth(new), rate * 1.5
    return x / x.sum(), gap


def _cheapest(costs: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """Return the (K,) mixture of least cost below the limits: the cheapest domains, each in full."""
    mixture, left = np.zeros(len(costs)), 1.0
    for i in np.argsort(costs, kind="stable"):
        mixture[i] = min(left, upper[i])
        left -= mixture[i]
    return mixture
