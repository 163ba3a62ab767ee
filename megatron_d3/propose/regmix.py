"""RegMix: gradient boosting predicts the losses of many mixtures; the best are averaged.

Source: Liu et al. 2024 (arXiv 2407.01492). Known difference: scikit-learn's HistGradientBoosting in
place of LightGBM.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from megatron_d3.errors import ConfigError
from megatron_d3.propose.runs import (
    Limits,
    Proposal,
    Runs,
    check_limits,
    require_better_than_mean,
    rms,
)

_NUM_SIMULATED = 50_000
_TOP = 100  # simulated mixtures that are averaged


def propose_regmix(
    runs: Runs, limits: Limits, *, seed: int = 0, num_simulated: int = _NUM_SIMULATED
) -> Proposal:
    """Propose by RegMix: gradient boosting, simulation, mean of the best mixtures.

    Raises:
        ConfigError: scikit-learn is missing, too few runs, predictions no better than the mean, or
            no simulated mixture within the limits.
    """
    check_limits(limits)
    num_runs, num_domains = runs.weights.shape
    if num_runs < max(16, 2 * num_domains):
        raise ConfigError(f"{num_runs} runs: too few for boosting, expected at least "
                          f"{max(16, 2 * num_domains)} with different mixtures")
    models, errors = [], []
    for losses in runs.losses.T:
        models.append(_boosted(runs.weights, losses))
        errors.append(rms(_ten_fold(runs.weights, losses) - losses))
    spreads = require_better_than_mean(runs, np.array(errors))
    simulated = _simulated(limits, np.random.default_rng([seed, 0]), num_simulated)
    scores = np.mean([predict(simulated) for predict in models], axis=0)
    best = np.argsort(scores, kind="stable")[:_TOP]
    weights = simulated[best].mean(axis=0)  # the limits are convex: it keeps to them too

    def at(x: np.ndarray) -> np.ndarray:
        return np.array([float(predict(x[None])[0]) for predict in models])

    return Proposal(weights, at(weights), at(limits.prior), np.array(errors), spreads, np.nan)


def _boosted(weights: np.ndarray, losses: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    try:
        from sklearn.ensemble import HistGradientBoostingRegressor
        from threadpoolctl import threadpool_limits
    except ImportError as error:
        raise ConfigError(
            "the back end regmix needs scikit-learn: pip install 'megatron-d3[regmix]'") from error
    # Few rows: smaller leaves and steps than the library's defaults for 10^4 of them.
    model = HistGradientBoostingRegressor(
        max_iter=150, learning_rate=0.08, min_samples_leaf=max(2, min(20, len(losses) // 12)),
        early_stopping=False, random_state=0)
    with threadpool_limits(limits=1):  # so few rows: threads would only wait for each other
        model.fit(weights, losses)

    def predict(x: np.ndarray) -> np.ndarray:
        with threadpool_limits(limits=1):
            return np.asarray(model.predict(x))

    return predict


def _ten_fold(weights: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """Return (N,) predictions by fits on nine tenths of the other runs."""
    fold = np.arange(len(losses)) % 10
    predicted = np.empty(len(losses))
    for number in range(10):
        held_out = fold == number
        predicted[held_out] = _boosted(weights[~held_out], losses[~held_out])(weights[held_out])
    return predicted


def _simulated(limits: Limits, rng: np.random.Generator, num_simulated: int) -> np.ndarray:
    """Return (S, K) mixtures around the prior, from near to far, within the limits."""
    num_domains = len(limits.prior)
    strengths = np.exp(rng.uniform(np.log(0.3), np.log(30.0), num_simulated))
    shapes = strengths[:, None] * limits.prior * num_domains  # (S, K)
    drawn = rng.gamma(np.maximum(shapes, 1e-3))
    mixtures = drawn / np.maximum(drawn.sum(axis=1, keepdims=True), 1e-300)
    fits = (mixtures <= limits.upper).all(axis=1) & (mixtures.sum(axis=1) > 0.5)
    if np.isfinite(limits.max_kl):
        with np.errstate(divide="ignore", invalid="ignore"):
            terms = np.where(mixtures > 0, mixtures * np.log(mixtures / limits.prior), 0.0)
        fits &= terms.sum(axis=1) <= limits.max_kl
    if fits.sum() < _TOP:
        raise ConfigError(
            f"only {fits.sum()} of {num_simulated} simulated mixtures keep to the caps and the "
            "KL divergence; loosen them, or use the back end loglinear, which searches exactly")
    return np.asarray(mixtures[fits])
