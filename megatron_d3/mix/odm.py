"""ODM: a bandit whose reward is the loss, so that domains not yet learned are drawn more often.

Source: Albalak et al. 2023 (arXiv 2312.02406), in two rules. With K domains, t the training step
counted from 1 at the start of training, L_i the mean loss of domain i's tokens in the step, and

    eps_t = min(1/K, sqrt(ln K / (K t))),   eps_0 = 1/K,

`paper` (Algorithm 1):

    R_i      <- a R_i + (1 - a) L_i / pi_t(i)                       for domains with tokens
    pi_{t+1} =  (1 - K eps_{t+1}) softmax(eps_t R) + eps_{t+1}

`official` (the released code's `SmoothedMeanWeightUpdater`, alon-albalak/online-data-mixing, which
alone fits its published weights):

    R_i      <- s R_i + (1 - s) exp(L_i)                            for domains with tokens
    pi       =  (1 - K eps_t) R / sum(R) + eps_t

Known differences: a batch mixes domains, so each step rewards all that it holds; pi_t in the
paper's reward is the rule's own distribution at step t, whatever a cap made of it and however far
ahead the step's samples were decided.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np

from megatron_d3.fields import Range
from megatron_d3.mix.online import WEIGHTS, initial_weights, mean_losses
from megatron_d3.mix.weights import numbers_by_name, proportional
from megatron_d3.types import DomainInfo, MixContext, StepSignals

_SMOOTHING = {"official": 0.5, "paper": 0.9}


class ODM:
    """Online data mixing: weights follow the losses, with some exploration of every domain.

    The weights are the initial ones during the warm-up and until the first loss after it. A domain
    that is absent from a batch, exhausted, or whose loss is not finite keeps its reward; one that
    was never seen after the warm-up has the exploration share eps. A skipped step changes nothing
    but t.
    """

    VERSION: ClassVar[int] = 1
    is_online: ClassVar[bool] = True
    uses_total_samples: ClassVar[bool] = False

    @dataclass(frozen=True)
    class Config:
        """Settings of `type: odm`."""

        variant: Literal["official", "paper"] = "official"
        """The rule: that of the released code (reward exp(loss), weights linear in it) or the
        printed one (reward loss / weight, weights a softmax that returns to uniform)."""

        smoothing: Annotated[float, Range("[0, 1)")] | None = None
        """Share of a domain's old reward that each step keeps: `s` of the code, `alpha` of the
        paper. Null: 0.5 for `official`, 0.9 for `paper`."""

        warmup_steps: Annotated[int, Range("[0, inf)")] = 0
        """Training steps, counted from the start of training, whose losses are not looked at. The
        released scripts take 2000 of 100,000."""

        weights: dict[str, float] | Path | None = None
        """Weights during the warm-up, as for `static`: by domain, a JSON file, or null for uniform.
        0 keeps a domain out of the warm-up only."""

        first_update: Literal["zero", "observation"] = "zero"
        """What a domain's reward is before its first loss: 0, as in the released code, so that it
        takes some steps to grow; or the first reward itself."""

        def resolved(self) -> ODM.Config:
            """Return the settings with a file's weights in place of its path."""
            if self.weights is None:
                return self
            return replace(self, weights=numbers_by_name(self.weights, "weights", WEIGHTS))

    def __init__(self, config: Config, domains: Sequence[DomainInfo], *, total_samples: int):
        """Raises ConfigError for weights that are no weights of the domains."""
        self._initial = initial_weights(config.weights, domains)
        self._variant = config.variant
        self._smoothing = (
            _SMOOTHING[config.variant] if config.smoothing is None else config.smoothing
        )
        self._warmup_steps = config.warmup_steps
        self._is_first_whole = config.first_update == "observation"

    def init(self) -> dict[str, np.ndarray]:
        """Return the state: `iteration` (), `rewards` (K,) and `num_updates` (K,)."""
        num_domains = len(self._initial)
        return {
            "iteration": np.zeros((), np.int64),
            "rewards": np.zeros(num_domains),
            "num_updates": np.zeros(num_domains, np.int64),
        }

    def update(self, state: dict[str, np.ndarray], signals: StepSignals) -> dict[str, np.ndarray]:
        """Return the state after one more training step."""
        after = {**state, "iteration": np.array(signals.iteration, np.int64)}
        if signals.iteration <= self._warmup_steps:
            return after
        losses, has_reward = mean_losses(signals)
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            if self._variant == "official":
                observed = np.exp(losses)
            else:
                observed = losses / self._policy(state, signals.iteration)
        has_reward &= np.isfinite(observed)  # a loss of 710 nats has no perplexity in float64
        smoothed = self._smoothing * state["rewards"] + (1.0 - self._smoothing) * np.where(
            has_reward, observed, 0.0
        )
        if self._is_first_whole:
            smoothed = np.where(state["num_updates"] == 0, observed, smoothed)
        after["rewards"] = np.where(has_reward, smoothed, state["rewards"])
        after["num_updates"] = state["num_updates"] + has_reward
        return after

    def weights(self, state: dict[str, np.ndarray], context: MixContext) -> np.ndarray:
        """Return the (K,) float64 weights that follow the last observed step."""
        return self._policy(state, int(state["iteration"]) + 1)

    def _policy(self, state: dict[str, np.ndarray], step: int) -> np.ndarray:
        """Return pi of the 1-based `step`, given the rewards of the steps before it."""
        if not state["num_updates"].any():
            return self._initial.copy()
        rewards, num_domains = state["rewards"], len(self._initial)
        if self._variant == "official":
            eps = exploration(num_domains, step - 1)
            shares = proportional(rewards, "d3.mix") if rewards.any() else self._initial
        else:
            eps = exploration(num_domains, step)
            logits = exploration(num_domains, step - 1) * rewards
            powers = np.exp(logits - logits.max())
            shares = powers / powers.sum()
        return np.asarray((1.0 - num_domains * eps) * shares + eps)


def exploration(num_domains: int, step: int) -> float:
    """Return eps_t, the weight that every domain has at least.

    >>> exploration(4, 0), round(exploration(4, 2001), 6)
    (0.25, 0.013161)
    """
    if step <= 0:
        return 1.0 / num_domains
    return min(1.0 / num_domains, math.sqrt(math.log(num_domains) / (num_domains * step)))
