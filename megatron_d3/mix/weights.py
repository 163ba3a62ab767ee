"""Weights by name, as users write them, into checked arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from megatron_d3.errors import ConfigError
from megatron_d3.fields import did_you_mean
from megatron_d3.types import DomainInfo


def weights_by_name(
    weights: Mapping[str, float], domains: Sequence[DomainInfo], where: str
) -> np.ndarray:
    """Return the weights in the order of the domains, divided by their sum.

    Args:
        weights: a finite number >= 0 for every domain, not all 0; 0 leaves a domain out.
        domains: the K domains.
        where: dotted place of the mapping, the start of every error message.

    Returns:
        (K,) float64 on the simplex.

    Raises:
        ConfigError: a weight is negative, infinite or NaN, belongs to no domain or is missing, or
            all are 0.
    """
    names = [domain.name for domain in domains]
    for name, weight in weights.items():
        if name not in names:
            raise ConfigError(f"{where}.{name}: no such domain{did_you_mean(name, names)}")
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(f"{where}.{name}: got {weight}, expected a finite number >= 0")
    for name in names:
        if name not in weights:
            raise ConfigError(
                f"{where}: no weight for domain {name}; give it one, 0 to leave it out"
            )
    return proportional(np.array([weights[name] for name in names], np.float64), where)


def proportional(sizes: np.ndarray, where: str) -> np.ndarray:
    """Return (K,) float64 sizes divided by their sum.

    Raises:
        ConfigError: all are 0.
    """
    largest = sizes.max()
    if not largest > 0:
        raise ConfigError(f"{where}: all weights are 0, expected at least one above 0")
    shares = sizes / largest  # first, so that the sum of huge numbers stays finite
    return np.asarray(shares / shares.sum())
