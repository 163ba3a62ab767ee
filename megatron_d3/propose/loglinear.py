"""L(x) = c + exp(t . x) for each loss, fitted by least squares; its exact minimum.

Source: data mixing laws, Ye et al. 2024 (arXiv 2403.16952). For a given c this is linear least
squares on log(L - c), weighted by (L - c) ** 2 so that errors count as in the loss. c is taken from
a grid by leave-one-out error; the error that is reported leaves each run out of that choice too.
"""

from __future__ import annotations

import numpy as np

from megatron_d3.errors import ConfigError
from megatron_d3.propose.minimise import minimise
from megatron_d3.propose.runs import (
    Limits,
    Proposal,
    Runs,
    check_limits,
    require_better_than_mean,
    rms,
)

_NUM_CONSTANTS = 40  # tried for c
_LEAST_SINGULAR = 1e-3  # of the largest: below it the mixtures do not vary in some direction


def propose_loglinear(runs: Runs, limits: Limits) -> Proposal:
    """Propose by the log-linear fit.

    Raises:
        ConfigError: too few or collinear runs, a fit no better than the mean, or limits that leave
            no mixture.
    """
    check_limits(limits)
    require_independent(runs)
    fits, errors = [], []
    for losses in runs.losses.T:
        fits.append(fit_loglinear(runs.weights, losses))
        errors.append(rms(_left_out(runs.weights, losses) - losses))
    spreads = require_better_than_mean(runs, np.array(errors))
    constants = np.array([c for c, _ in fits])  # (M,)
    slopes = np.stack([t for _, t in fits])  # (M, K)
    weights, gap = minimise(constants, slopes, limits)

    def predict(x: np.ndarray) -> np.ndarray:
        return np.asarray(constants + np.exp(slopes @ x))

    return Proposal(weights, predict(weights), predict(limits.prior), np.array(errors), spreads, gap)


def require_independent(runs: Runs) -> None:
    """Refuse runs that cannot tell the domains apart.

    Raises:
        ConfigError: fewer runs than parameters plus one, or mixtures that do not vary in some
            direction; names the domains.
    """
    num_runs, num_domains = runs.weights.shape
    if num_runs < num_domains + 2:
        raise ConfigError(
            f"{num_runs} runs: too few for {num_domains} domains, expected at least "
            f"{num_domains + 2} with different mixtures")
    _, values, vectors = np.linalg.svd(runs.weights, full_matrices=False)
    if values[-1] < _LEAST_SINGULAR * values[0]:
        part = np.abs(vectors[-1])
        names = [name for name, p in zip(runs.domains, part, strict=True) if p > 0.3 * part.max()]
        raise ConfigError(
            f"the runs are collinear: the weights of {', '.join(names)} do not vary independently "
            f"(smallest singular value {values[-1]:.1e}, largest {values[0]:.1e}); add runs that "
            "mix them differently")


def fit_loglinear(weights: np.ndarray, losses: np.ndarray) -> tuple[float, np.ndarray]:
    """Fit L = c + exp(t . x).

    Args:
        weights: (N, K) float64 of full column rank, N > K.
        losses: (N,) float64 > 0.

    Returns:
        c >= 0 and t (K,) float64.
    """
    least = losses.min()
    closest = max(1e-3 * (losses.max() - least), 1e-6 * least)
    best: tuple[float, float, np.ndarray] | None = None
    for gap in np.geomspace(closest, least, _NUM_CONSTANTS):
        constant = max(0.0, float(least - gap))
        slopes, predicted = _line(weights, losses - constant)
        error = rms(constant + predicted - losses)
        if best is None or error < best[0]:
            best = error, constant, slopes
    assert best is not None
    return best[1], best[2]


def _line(weights: np.ndarray, excess: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return t (K,) and (N,) leave-one-out predictions of the excess, for excess = exp(t . x)."""
    logs = np.log(excess)
    scaled = weights * excess[:, None]  # least squares weighted by excess ** 2
    q, r = np.linalg.qr(scaled)
    slopes = np.linalg.solve(r, q.T @ (logs * excess))
    leverage = np.minimum((q * q).sum(axis=1), 1 - 1e-9)
    residual = logs - weights @ slopes
    # Without a row its residual grows by 1 / (1 - leverage): the closed form of refitting.
    left_out = logs - residual / (1 - leverage)
    return slopes, np.exp(np.clip(left_out, -700, 700))


def _left_out(weights: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """Return (N,) predictions of each run by a fit, c included, that has not seen it."""
    predicted = np.empty(len(losses))
    for i in range(len(losses)):
        others = np.arange(len(losses)) != i
        constant, slopes = fit_loglinear(weights[others], losses[others])
        predicted[i] = constant + np.exp(np.clip(weights[i] @ slopes, -700, 700))
    return predicted
