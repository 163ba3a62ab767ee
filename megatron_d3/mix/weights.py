"""Weights by name, as users write them, into checked arrays."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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


def numbers_by_name(
    source: Mapping[str, float] | Path, key: str, where: str
) -> dict[str, float]:
    """Return a mapping of names to numbers, or the one that a JSON file holds under `key`.

    Args:
        source: the mapping, or the file's path.
        key: its key in the file. A list of one mapping, as `megatron-d3 plot table --json` prints
            it, stands for that mapping.
        where: dotted place of the setting, the start of every error message.

    Raises:
        ConfigError: the file cannot be read or holds no such mapping.
    """
    if not isinstance(source, Path):
        return dict(source)
    try:
        content: Any = json.loads(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{where}: cannot read {source}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{where}: {source} is not JSON: {error}") from error
    if isinstance(content, list) and len(content) == 1:
        content = content[0]
    named = content.get(key) if isinstance(content, Mapping) else None
    is_named = isinstance(named, Mapping) and all(
        isinstance(number, int | float) and not isinstance(number, bool)
        for number in named.values()
    )
    if not is_named:
        raise ConfigError(f'{where}: {source} holds no {{"{key}": {{name: number}}}}')
    return dict(named)  # type: ignore[arg-type]
