"""What `d3 study` compares, written as a user types it.

    projected               two main directions             projected:4      four of them
    projected:mean          the mean gradient
    hutchinson_diagonal:4   four probes                     gnb_diagonal:4   four drawn labels
    look_ahead:2            losses of two of the probe sequences

Everything else (probe sequences, sketch, size of differences, ...) is the configuration's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_d3.errors import ConfigError
from megatron_d3.fields import did_you_mean
from megatron_d3.influence.estimators import ESTIMATORS
from megatron_d3.influence.settings import D3Config

WHERE = "--estimators"

MEAN = "projected:mean"

DEFAULT = (
    "projected:mean", "projected:1", "projected", "projected:4", "hutchinson_diagonal", "hutchinson_diagonal:4",
    "gnb_diagonal", "gnb_diagonal:4", "fisher", "shared_hessian", "look_ahead", "look_ahead_even",
)
"""What is compared unless named; `exact` costs 2 L gradients a unit and has to be asked for."""

# What the number after the colon is.
_NUMBER = {
    "projected": "directions", "hutchinson_diagonal": "probes", "gnb_diagonal": "probes",
    "shared_hessian": "probes", "look_ahead": "curvature_sequences",
    "look_ahead_even": "curvature_sequences",
}


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Attributes:
        name: as typed.
        settings: with all that the configuration says.
    """

    name: str
    settings: D3Config


def make_cases(names: Sequence[str] | None, config: D3Config) -> list[Case]:
    """Return what to compare, the configured estimator first.

    Args:
        names: as typed; None for `DEFAULT`, of which more directions than units are left out.
        config: of the run; `window` is the number of units.

    Raises:
        ConfigError: a name that is no estimator, or a number that does not fit.

    >>> [case.name for case in make_cases(["fisher", "projected"], D3Config(directions=3))]
    ['projected:3', 'fisher', 'projected']
    """
    if names is None:
        names = [name for name in DEFAULT
                 if not name.startswith("projected") or _number(name, 1) <= config.window]
    cases = [Case(name_of(config), config), *(_case(name, config) for name in names)]
    unique = {case.name: case for case in reversed(cases)}  # the configured one stays as it is
    return [unique[name] for name in dict.fromkeys(case.name for case in cases)]


def name_of(config: D3Config) -> str:
    """Return how the configured estimator is typed.

    >>> name_of(D3Config()), name_of(D3Config(basis="mean")), name_of(D3Config(probes=4))
    ('projected', 'projected:mean', 'projected')
    """
    name = config.estimator
    if name == "projected" and config.basis == "mean":
        return MEAN
    key = _NUMBER.get(name, "")
    is_plain = {
        "": True, "probes": config.probes == 1,
        "directions": config.directions in (None, 2),
        "curvature_sequences": config.curvature_sequences is None,
    }
    return name if is_plain[key] else f"{name}:{getattr(config, key)}"


def _case(name: str, config: D3Config) -> Case:
    kind, colon, _ = name.partition(":")
    if kind not in ESTIMATORS:
        raise ConfigError(f"{WHERE}: no estimator {kind!r}{did_you_mean(kind, ESTIMATORS)}")
    changes: dict[str, Any] = {"estimator": kind, "directions": None, "basis": "principal", "probes": 1,
                               "min_agreement": None}  # that decides of a run, not of a study
    if _NUMBER.get(kind) == "curvature_sequences":
        changes["curvature_sequences"] = None
    if name == MEAN:
        changes["basis"] = "mean"
    elif colon:
        if kind not in _NUMBER:
            raise ConfigError(f"{WHERE}: got {name}, but {kind} takes no number")
        number = _number(name, 0)
        if number < 1:
            raise ConfigError(f"{WHERE}: got {name}, expected a whole number of at least 1 after the "
                              f"colon ({_NUMBER[kind]})")
        changes[_NUMBER[kind]] = number
    return Case(name, replace(config, **changes))


def _number(name: str, default: int) -> int:
    text = name.partition(":")[2]
    return int(text) if text.isdecimal() else default
