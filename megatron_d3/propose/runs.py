"""Finished runs, the limits of a proposal, and what all back ends ask of the two."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_d3.errors import ConfigError
from megatron_d3.mix.caps import project

WEIGHT, LOSS = "weight/", "loss/"
_LABELS = ("run", "name")  # columns that only name a row


@dataclass(frozen=True)
class Runs:
    """Finished runs.

    Attributes:
        domains: K names.
        targets: M names of losses.
        weights: (N, K) float64, each row on the simplex.
        losses: (N, M) float64 > 0.
    """

    domains: tuple[str, ...]
    targets: tuple[str, ...]
    weights: np.ndarray
    losses: np.ndarray


@dataclass(frozen=True)
class Limits:
    """What a proposal must keep to.

    Attributes:
        prior: (K,) float64 on the simplex, > 0.
        upper: (K,) float64, the most of each domain; may be inf.
        max_kl: the greatest KL(x || prior) in nats; may be inf.
    """

    prior: np.ndarray
    upper: np.ndarray
    max_kl: float


@dataclass(frozen=True)
class Proposal:
    """A proposed mixture.

    Attributes:
        weights: (K,) float64 on the simplex.
        predicted: (M,) float64, the fit's losses there.
        predicted_prior: (M,) float64, at the prior.
        errors: (M,) float64, root mean square error of predicting left-out runs, nats.
        spreads: (M,) float64, the same error of predicting the mean of the other runs.
        gap: bound on what a better mixture could gain in the fitted mean loss (nats), NaN where the
            back end has none.
    """

    weights: np.ndarray
    predicted: np.ndarray
    predicted_prior: np.ndarray
    errors: np.ndarray
    spreads: np.ndarray
    gap: float


def read_runs(path: Path, targets: Sequence[str] = ()) -> Runs:
    """Read a CSV: columns `weight/DOMAIN` and `loss/NAME`, a row a run; `run` may name it.

    Args:
        path: of the file.
        targets: names of the losses to take; empty for all.

    Raises:
        ConfigError: naming file, line and column: no such file, an unknown column, a cell that is no
            number in its range, no weight or loss columns, or no such loss.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [row for row in csv.reader(file) if row]
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    header = [cell.strip().removeprefix("d3/") for cell in rows[0]] if rows else []
    for name in header:
        if not name.startswith((WEIGHT, LOSS)) and name not in _LABELS:
            raise ConfigError(f"{path}: unknown column {name!r}, expected weight/DOMAIN, loss/NAME "
                              "or run")
    if len(set(header)) < len(header):
        raise ConfigError(f"{path}: a column is there twice")
    domains = [name.removeprefix(WEIGHT) for name in header if name.startswith(WEIGHT)]
    losses = [name.removeprefix(LOSS) for name in header if name.startswith(LOSS)]
    for name in targets:
        if name not in losses:
            raise ConfigError(f"--target {name}: {path} has no column {LOSS}{name}")
    losses = [name for name in losses if name in targets] if targets else losses
    if len(domains) < 2 or not losses:
        raise ConfigError(f"{path}: expected two or more columns {WEIGHT}DOMAIN, one or more "
                          f"{LOSS}NAME")
    values = np.array([_numbers(row, header, f"{path}:{number}")
                       for number, row in enumerate(rows[1:], start=2)]).reshape(-1, len(header))
    at = {name: i for i, name in enumerate(header)}
    weights = values[:, [at[WEIGHT + name] for name in domains]]
    total = weights.sum(axis=1, keepdims=True)
    if not (total > 0).all():
        raise ConfigError(f"{path}:{int(np.argmin(total)) + 2}: all weights are 0")
    return Runs(tuple(domains), tuple(losses), weights / total,
                values[:, [at[LOSS + name] for name in losses]])


def _numbers(row: Sequence[str], header: Sequence[str], where: str) -> list[float]:
    if len(row) != len(header):
        raise ConfigError(f"{where}: got {len(row)} cells, expected {len(header)}")
    values = []
    for name, cell in zip(header, row, strict=True):
        if name in _LABELS:
            values.append(np.nan)
            continue
        try:
            value = float(cell)
        except ValueError:
            value = np.nan
        is_loss = name.startswith(LOSS)
        if not (np.isfinite(value) and (value > 0 if is_loss else value >= 0)):
            raise ConfigError(f"{where}: {name}: got {cell!r}, expected a finite number "
                              + ("> 0" if is_loss else ">= 0"))
        values.append(value)
    return values


def limits_of(
    domains: Sequence[str], prior: dict[str, float], caps: dict[str, float], max_kl: float
) -> Limits:
    """Build the limits from named numbers; the prior is divided by its sum (empty: uniform).

    Raises:
        ConfigError: a name that is no domain, a prior or cap that is not above 0, or one missing.
    """
    for kind, named in (("prior", prior), ("cap", caps)):
        for name, number in named.items():
            if name not in domains:
                raise ConfigError(f"--{kind} {name}: no such domain; known: {', '.join(domains)}")
            if not (number > 0 and np.isfinite(number)):
                raise ConfigError(f"--{kind} {name}: got {number}, expected a number above 0")
    missing = [name for name in domains if prior and name not in prior]
    if missing:
        raise ConfigError(f"--prior: none given of {', '.join(missing)}")
    values = np.array([prior[name] for name in domains] if prior else np.ones(len(domains)))
    upper = np.array([caps.get(name, np.inf) for name in domains])
    return Limits(values / values.sum(), upper, max_kl)


def check_limits(limits: Limits) -> None:
    if limits.upper.sum() < 1:
        raise ConfigError(
            f"the caps add up to {limits.upper.sum():.4g}, expected at least 1: no mixture fits")
    nearest = project(limits.prior, limits.upper)[0]
    if divergence(nearest, limits.prior) > limits.max_kl:
        raise ConfigError(
            f"no mixture below the caps is within a KL divergence of {limits.max_kl:g} of the "
            f"prior; the nearest has {divergence(nearest, limits.prior):.4g}")


def require_better_than_mean(runs: Runs, errors: np.ndarray) -> np.ndarray:
    """Return (M,) errors of the mean; refuse fits that are no better."""
    num_runs = len(runs.losses)
    spreads = runs.losses.std(axis=0) * num_runs / (num_runs - 1)
    for name, error, spread in zip(runs.targets, errors, spreads, strict=True):
        if error >= spread:
            raise ConfigError(
                f"loss {name}: the fit misses left-out runs by {error:.4f}, their mean by "
                f"{spread:.4f}: the runs do not say how it depends on the mixture; add runs, or "
                "leave this loss out")
    return np.asarray(spreads)


def divergence(x: np.ndarray, prior: np.ndarray) -> float:
    """Return KL(x || prior) in nats."""
    has = x > 0
    return float((x[has] * np.log(x[has] / prior[has])).sum())


def rms(errors: np.ndarray) -> float:
    return float(np.sqrt(np.mean(errors * errors)))
