"""What mixers share that learn from the losses of the training run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from megatron_d3.mix.weights import numbers_by_name, weights_by_name
from megatron_d3.types import DomainInfo, StepSignals

WEIGHTS = "d3.mix.weights"


def mean_losses(signals: StepSignals) -> tuple[np.ndarray, np.ndarray]:
    """Return the (K,) mean loss of each domain's tokens and a (K,) mask of those to learn from.

    A domain is left out where it had no tokens or its loss is not finite; all are left out where
    the optimizer skipped the step, since the weights that were measured are then no better.
    """
    has_loss = (signals.num_tokens > 0) & np.isfinite(signals.loss_sums)
    if signals.is_skipped:
        has_loss = np.zeros_like(has_loss)
    means = np.zeros(len(has_loss))
    means[has_loss] = signals.loss_sums[has_loss] / signals.num_tokens[has_loss]
    return means, has_loss


def initial_weights(
    weights: Mapping[str, float] | Path | None, domains: Sequence[DomainInfo]
) -> np.ndarray:
    """Return the (K,) weights a run begins with; uniform where none are given.

    Raises:
        ConfigError: they are no weights of these domains.
    """
    if weights is None:
        return np.full(len(domains), 1.0 / len(domains))
    return weights_by_name(numbers_by_name(weights, "weights", WEIGHTS), domains, WEIGHTS)
