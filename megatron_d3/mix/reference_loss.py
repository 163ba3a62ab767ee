"""Reference loss: more of the domains that are still above the loss they are known to reach.

Source: Sheared LLaMA, Xia et al. 2023 (arXiv 2310.06694), Algorithm 1, with a floor c / K:

    w <- (1 - c) normalise(w * exp(eta * max(l - l_ref, 0))) + c / K

every `update_steps` training steps, l the mean loss of a domain's tokens since the last update.
Known differences: l is the training loss, not that of an evaluation, so that nothing but the ledger
decides; the released code does not clip at 0 (`clip: false`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np

from megatron_d3.errors import ConfigError
from megatron_d3.fields import Range
from megatron_d3.mix.online import WEIGHTS, initial_weights, mean_losses
from megatron_d3.mix.weights import numbers_by_name, require_domains
from megatron_d3.types import DomainInfo, MixContext, StepSignals

WHERE = "d3.mix.losses"


class ReferenceLoss:
    """Weights grow where the loss exceeds a reference, and shrink elsewhere.

    A domain without tokens since the last update (absent, exhausted, not finite, skipped) counts
    with its last excess, 0 before the first.
    """

    VERSION: ClassVar[int] = 1
    is_online: ClassVar[bool] = True
    uses_total_samples: ClassVar[bool] = False

    @dataclass(frozen=True)
    class Config:
        """Settings of `type: reference_loss`."""

        losses: dict[str, float] | Path
        """The loss to reach, in nats per token, of every domain; or a JSON file that holds them
        under the key `loss`: what `megatron-d3 plot table RUN --json` prints of a former run."""

        weights: dict[str, float] | Path | None = None
        """Weights before the first update, as for `static`: by domain, a JSON file, or null for
        uniform. A domain of weight 0 has the floor only."""

        eta: Annotated[float, Range("(0, inf)")] = 1.0
        """How strongly one update follows the excess loss, per nat."""

        floor: Annotated[float, Range("[0, 1)")] = 1e-4
        """c: share of the weight that is always spread evenly over the domains."""

        clip: bool = True
        """Whether a domain below its reference counts as at it (the paper) or keeps losing weight
        (the released code)."""

        update_steps: Annotated[int, Range("[1, inf)")] = 100
        """Training steps between two updates, counted from the start of training."""

        def resolved(self) -> ReferenceLoss.Config:
            """Return the settings with the files' numbers in place of their paths."""
            weights = self.weights
            if weights is not None:
                weights = numbers_by_name(weights, "weights", WEIGHTS)
            losses = numbers_by_name(self.losses, "loss", WHERE)
            return replace(self, losses=losses, weights=weights)

    def __init__(self, config: Config, domains: Sequence[DomainInfo], *, total_samples: int):
        """Raises ConfigError for weights or losses that are not those of the domains."""
        self._initial = initial_weights(config.weights, domains)
        losses = numbers_by_name(config.losses, "loss", WHERE)
        self._references = _references(losses, [domain.name for domain in domains])
        self._eta, self._floor, self._is_clipped = config.eta, config.floor, config.clip
        self._update_steps = config.update_steps

    def init(self) -> dict[str, np.ndarray]:
        """Return the state, (K,) each: `weights`, `excess` and the sums since the last update."""
        num_domains = len(self._initial)
        return {
            "weights": self._initial.copy(),
            "excess": np.zeros(num_domains),
            "loss_sums": np.zeros(num_domains),
            "num_tokens": np.zeros(num_domains, np.int64),
        }

    def update(self, state: dict[str, np.ndarray], signals: StepSignals) -> dict[str, np.ndarray]:
        """Return the state after one more training step."""
        _, has_loss = mean_losses(signals)
        loss_sums = state["loss_sums"] + np.where(has_loss, signals.loss_sums, 0.0)
        num_tokens = state["num_tokens"] + np.where(has_loss, signals.num_tokens, 0)
        if signals.iteration % self._update_steps:
            return {**state, "loss_sums": loss_sums, "num_tokens": num_tokens}
        means = np.divide(loss_sums, num_tokens, out=np.zeros_like(loss_sums), where=num_tokens > 0)
        excess = np.where(num_tokens > 0, means - self._references, state["excess"])
        return {
            "weights": self._step(state["weights"], excess),
            "excess": excess,
            "loss_sums": np.zeros_like(loss_sums),
            "num_tokens": np.zeros_like(num_tokens),
        }

    def _step(self, weights: np.ndarray, excess: np.ndarray) -> np.ndarray:
        scores = self._eta * (np.maximum(excess, 0.0) if self._is_clipped else excess)
        grown = weights * np.exp(scores - scores[weights > 0].max())
        return np.asarray((1.0 - self._floor) * grown / grown.sum() + self._floor / len(weights))

    def weights(self, state: dict[str, np.ndarray], context: MixContext) -> np.ndarray:
        """Return the (K,) float64 weights since the last update."""
        return state["weights"].copy()


def _references(losses: dict[str, float], names: Sequence[str]) -> np.ndarray:
    """Return the (K,) reference losses in the order of the domains."""
    require_domains(losses, names, WHERE, what="reference loss")
    for name, loss in losses.items():
        if not math.isfinite(loss):
            raise ConfigError(f"{WHERE}.{name}: got {loss}, expected a finite number")
    return np.array([losses[name] for name in names], np.float64)
