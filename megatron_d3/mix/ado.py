"""ADO: more of the domains whose loss is about to fall, by a power law fitted to each online.

Source: Jiang et al. 2024 (arXiv 2410.11820) and its released code (yidingjiang/ado). With mu the
initial weights, h a moving mean of each domain's share of the tokens, and L_i(n) the domain's power
law after n samples of the whole run, after each step t

    slope_i =  max(a_i, min_exponent) * (L_i(n) - irreducible_i) / n
    rho     ~  mu * h ** s * slope, no entry below delta_min of the sum
    pi      =  (1 - gamma_2) * mean + gamma_2 * rho
    mean    <- (1 - 1 / (t + 1)) * mean + rho / (t + 1)

Known differences: laws are fitted by least squares on the loss over a grid of exponents
(`mix/power_law.py`), not by L-BFGS with a Huber loss on its logarithm, so that the state is small
and every rank finds the same; the bounds on the parameters are settings (the released code's
irreducible loss of at least 1.65 nats is wrong for code); mu is uniform unless given (the paper:
natural).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np

from megatron_d3.errors import ConfigError
from megatron_d3.fields import Range
from megatron_d3.mix.online import WEIGHTS, initial_weights, mean_losses
from megatron_d3.mix.power_law import Bounds, add_losses, empty_sums, fit
from megatron_d3.mix.weights import numbers_by_name
from megatron_d3.types import DomainInfo, MixContext, StepSignals

_MIN_LOSSES = 10  # of a domain, before its law is fitted


class ADO:
    """Adaptive data optimization: weights follow the slopes of the domains' scaling laws.

    The weights are the initial ones until the first fit. A domain with too few losses for a fit
    counts with the median slope of the others. A skipped step changes nothing.
    """

    VERSION: ClassVar[int] = 1
    is_online: ClassVar[bool] = True
    uses_total_samples: ClassVar[bool] = False

    @dataclass(frozen=True)
    class Config:
        """Settings of `type: ado`."""

        weights: dict[str, float] | Path | None = None
        """mu, the weights that the slopes multiply and the run begins with, as for `static`: by
        domain, a JSON file, or null for uniform. A domain of weight 0 has the floor only."""

        ignore_steps: Annotated[int, Range("[0, inf)")] = 500
        """First training steps whose losses no law is fitted to."""

        start_step: Annotated[int, Range("[1, inf)")] = 1000
        """Training step of the first fit at the earliest; the initial weights hold until then."""

        fit_steps: Annotated[int, Range("[1, inf)")] = 1000
        """Training steps between two fits, counted from the start of training."""

        history: Annotated[float, Range("(0, 1]")] = 0.1
        """gamma_1: how much of the moving share h one step replaces."""

        mixing: Annotated[float, Range("(0, 1]")] = 0.1
        """gamma_2: share of the present step in the weights, against the mean of all so far."""

        power: Annotated[float, Range("[0, inf)")] = 0.5
        """s: how strongly a domain's share so far raises its weight."""

        floor: Annotated[float, Range("[0, 1)")] = 0.01
        """delta_min: least share of a domain in one step's distribution, before it is normalised
        again."""

        min_exponent: Annotated[float, Range("[0, inf)")] = 0.05
        """Least exponent that a slope is computed with."""

        exponent: tuple[float, float] = (0.001, 0.8)
        """Least and greatest exponent of a fit, above 0."""

        irreducible: tuple[float, float] = (0.0, float("inf"))
        """Least and greatest irreducible loss of a fit, in nats per token."""

        scale: tuple[float, float] = (0.0, float("inf"))
        """Least and greatest factor of a fit, in nats per token after one sample."""

        def resolved(self) -> ADO.Config:
            """Return the settings with a file's weights in place of its path."""
            if self.weights is None:
                return self
            return replace(self, weights=numbers_by_name(self.weights, "weights", WEIGHTS))

    def __init__(self, config: Config, domains: Sequence[DomainInfo], *, total_samples: int):
        """Raises ConfigError for weights that are no weights, or bounds that are no interval."""
        self._config = config
        self._prior = initial_weights(config.weights, domains)
        for name in ("exponent", "irreducible", "scale"):
            low, high = getattr(config, name)
            least = np.nextafter(0, 1) if name == "exponent" else 0.0
            if not least <= low <= high or (name == "exponent" and not high < np.inf):
                raise ConfigError(
                    f"d3.mix.{name}: got [{low}, {high}], expected two numbers that rise from "
                    + ("above 0 and end" if name == "exponent" else "0 or more")
                )
        self._bounds = Bounds(config.irreducible, config.scale, config.exponent)

    def init(self) -> dict[str, np.ndarray]:
        """Return the state: (K,) weights, shares and laws, and the sums of the fits."""
        unknown = np.full(len(self._prior), np.nan)
        return {
            "policy": self._prior.copy(),
            "average": self._prior.copy(),
            "history": self._prior.copy(),
            "irreducible": unknown,
            "scale": unknown.copy(),
            "exponent": unknown.copy(),
            **empty_sums(len(self._prior)),
        }

    def update(self, state: dict[str, np.ndarray], signals: StepSignals) -> dict[str, np.ndarray]:
        """Return the state after one more training step."""
        num_tokens, config, step = signals.num_tokens, self._config, signals.iteration
        if signals.is_skipped or not num_tokens.any():
            return state
        losses, has_loss = mean_losses(signals)
        shares = num_tokens / num_tokens.sum()
        after = dict(state)
        after["history"] = (1.0 - config.history) * state["history"] + config.history * shares
        if step > config.ignore_steps:
            after |= add_losses(
                state,
                n=signals.consumed,
                losses=losses,
                weights=np.where(has_loss, num_tokens, 0).astype(np.float64),
                bounds=self._bounds,
            )
        if step >= config.start_step and step % config.fit_steps == 0:
            law = fit(after, self._bounds, min_losses=_MIN_LOSSES)
            after |= dict(zip(("irreducible", "scale", "exponent"), law, strict=True))
        if np.isfinite(after["exponent"]).any():
            latest = self._latest(after, signals.consumed)
            average = state["average"]
            after["policy"] = (1.0 - config.mixing) * average + config.mixing * latest
            after["average"] = (1.0 - 1.0 / (step + 1)) * average + latest / (step + 1)
        return after

    def _latest(self, state: dict[str, np.ndarray], n: int) -> np.ndarray:
        """Return rho: (K,) on the simplex."""
        exponent = np.maximum(state["exponent"], self._config.min_exponent)
        slopes = exponent * state["scale"] * float(n) ** -state["exponent"] / n
        slopes = np.where(np.isfinite(slopes), slopes, np.nanmedian(slopes))
        scores = self._prior * state["history"] ** self._config.power * slopes
        if not scores.sum() > 0:  # no loss falls
            scores = self._prior
        return at_least(scores / scores.sum(), self._config.floor)

    def weights(self, state: dict[str, np.ndarray], context: MixContext) -> np.ndarray:
        """Return the (K,) float64 weights that follow the last observed step."""
        return state["policy"].copy()


def at_least(shares: np.ndarray, floor: float) -> np.ndarray:
    """Raise (K,) shares to the floor and divide by the sum, which may leave them slightly below it.

    >>> at_least(np.array([0.9, 0.1, 0.0]), 0.25).round(3).tolist()
    [0.643, 0.179, 0.179]
    """
    raised = np.maximum(shares, floor)
    return np.asarray(raised / raised.sum())
