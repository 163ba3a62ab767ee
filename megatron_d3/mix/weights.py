"""Weights by name, as users write them, into checked arrays."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
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
    require_domains(weights, names, where, what="weight", hint="; give it one, 0 to leave it out")
    for name, weight in weights.items():
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(f"{where}.{name}: got {weight}, expected a finite number >= 0")
    return proportional(np.array([weights[name] for name in names], np.float64), where)


def require_domains(
    named: Iterable[str], names: Sequence[str], where: str, *, what: str, hint: str = ""
) -> None:
    """Check that numbers by name are those of the run's domains, all of them and no others.

    Args:
        named: names that have a number.
        names: the run's domains.
        where: place of the mapping, the start of the message.
        what: that the numbers are, e.g. `weight`.
        hint: what to do about one that is missing.

    Raises:
        ConfigError: names every domain that is missing or unknown.
    """
    named = list(named)
    known, given = set(names), set(named)  # in lists 30,000 domains took 10 s
    unknown = [name for name in named if name not in known]
    missing = [name for name in names if name not in given]
    if len(unknown) == 1 and not missing:
        raise ConfigError(f"{where}.{unknown[0]}: no such domain{did_you_mean(unknown[0], names)}")
    if len(missing) == 1 and not unknown:
        raise ConfigError(f"{where}: no {what} for domain {missing[0]}{hint}")
    parts = [f"no such domains: {', '.join(unknown)}"] if unknown else []
    parts += [f"no {what} for: {', '.join(missing)}"] if missing else []
    if parts:
        raise ConfigError(f"{where}: not those of this run's domains; {'; '.join(parts)}")


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
