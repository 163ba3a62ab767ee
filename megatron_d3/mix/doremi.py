"""DoReMi's proxy step: Group DRO over domains (arXiv 2305.10429, Algorithm 1).

Symbols of the paper, used in this file only, K domains:

    lambda[i] = 1/n_i * sum over the n_i tokens of domain i in the global batch
                        of max(l_proxy - l_ref, 0)                          clipped per token
    alpha'    = alpha * exp(eta * lambda)
    alpha     = (1 - c) * alpha' / sum(alpha') + c / K                      alpha_0 = 1/K
    alpha_bar = mean of alpha_1 .. alpha_T

Domains are *sampled* uniformly at every step; alpha weighs the loss of the proxy, not its data
(`mcore/proxy.py`). The alpha that weighs step t is alpha_{t-1}: that of all steps before it.

Known differences from the paper: a domain without tokens in a step keeps its last lambda, 0 before
its first token (the paper's is 0/0 there); a step that the optimizer skipped changes nothing, and a
domain whose excess is not finite counts as absent. `variant: official` follows the released code,
which also counts alpha_0 in the mean, and starts the scores of unseen domains at ln(vocabulary):
one absent domain then took .997 of the weight in six steps, so here that start is a setting of its
own, `initial_score`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np

from megatron_d3.errors import ConfigError, PlanError
from megatron_d3.fields import Range
from megatron_d3.types import DomainInfo, MixContext, StepSignals

STOP_TOLERANCE = 1e-3
"""Iterated DoReMi ends when no weight moved by this much (section 3.3 of the paper)."""


class DoReMi:
    """Uniform samples, and domain weights for the proxy's loss.

    State: `alpha` (K,), the present weights; `score` (K,), the last lambda of each domain, nats;
    `alpha_sum` (K,), sum of alpha_1 .. alpha_T; `num_steps` (), T.
    """

    VERSION: ClassVar[int] = 1
    is_online: ClassVar[bool] = True
    uses_total_samples: ClassVar[bool] = False

    @dataclass(frozen=True)
    class Config:
        """Settings of `type: doremi`."""

        reference: Path | None = None
        """Checkpoint folder of the reference model (what was its `--save`, of which the latest
        checkpoint is taken, or one `iter_*` of it); it runs frozen beside the proxy, under the same
        layout. It may be of another size, but must have the proxy's tokenizer, vocabulary and
        sequence length."""

        losses: Path | None = None
        """Folder of the reference's token losses, written by `megatron-d3 doremi losses`; takes the
        place of `reference`, and no reference model is held in memory."""

        eta: Annotated[float, Range("(0, inf)")] = 1.0
        """Step size of the weights."""

        c: Annotated[float, Range("[0, 1]")] = 1e-3
        """Share of the uniform distribution that is mixed into the weights after each step."""

        variant: Literal["paper", "official"] = "paper"
        """`paper`: the loss is the weighted sum of the domains' token means. `official`: as the
        released code, the weighted mean over all tokens, and alpha_0 counts in the mean of the
        weights."""

        initial_score: Annotated[float, Range("[0, inf)")] = 0.0
        """Excess loss of a domain before its first token, in nats. The released code has
        ln(vocabulary size) here, which lets one absent domain take almost all weight."""

        def resolved(self) -> DoReMi.Config:
            """Return the settings with the latest checkpoint in place of the run's folder.

            A plan then records which one it was: a reference that was trained further meanwhile is
            another one, and a resume says so.
            """
            latest = None if self.reference is None else latest_checkpoint(self.reference)
            return self if latest is None else replace(self, reference=latest)

    def __init__(self, config: Config, domains: Sequence[DomainInfo], *, total_samples: int):
        """Raises ConfigError unless there is exactly one source of reference losses."""
        if (config.reference is None) == (config.losses is None):
            got = "neither" if config.reference is None else "both"
            raise ConfigError(
                f"d3.mix: got {got} of reference and losses, expected one: the checkpoint of the "
                "reference model, or its stored token losses")
        self.config = config
        self._num_domains = len(domains)

    def init(self) -> dict[str, np.ndarray]:
        """Return the state before the first step."""
        num_domains = self._num_domains
        return {
            "alpha": np.full(num_domains, 1.0 / num_domains),
            "score": np.full(num_domains, self.config.initial_score),
            "alpha_sum": np.zeros(num_domains),
            "num_steps": np.array(0, np.int64),
        }

    def update(self, state: dict[str, np.ndarray], signals: StepSignals) -> dict[str, np.ndarray]:
        """Return the state after one trained step.

        Raises:
            PlanError: the step measured no excess over a reference.
        """
        if signals.is_skipped:
            return state
        if signals.excess_sums is None:
            raise PlanError(
                f"step {signals.iteration}: no excess loss over a reference was measured; only a "
                "run with mix.type doremi measures it")
        is_measured = (signals.num_tokens > 0) & np.isfinite(signals.excess_sums)
        score = state["score"].copy()
        score[is_measured] = signals.excess_sums[is_measured] / signals.num_tokens[is_measured]
        with np.errstate(divide="ignore"):  # c = 0 lets a weight become 0
            logits = np.log(state["alpha"]) + self.config.eta * score
        raw = np.exp(logits - logits.max())  # any factor cancels; this one cannot overflow
        c = self.config.c
        alpha = (1.0 - c) * raw / raw.sum() + c / self._num_domains
        return {
            "alpha": alpha, "score": score, "alpha_sum": state["alpha_sum"] + alpha,
            "num_steps": state["num_steps"] + 1,
        }

    def weights(self, state: dict[str, np.ndarray], context: MixContext) -> np.ndarray:
        """Return (K,) 1/K each: what is sampled does not depend on alpha."""
        return np.full(self._num_domains, 1.0 / self._num_domains)

    def loss_weights(self, state: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return (K,) alpha as it weighs the loss of the next step."""
        return state["alpha"].copy()

    def mean_weights(self, state: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return (K,) alpha_bar, the result of the proxy run; uniform before its first step."""
        total, num_steps = state["alpha_sum"], int(state["num_steps"])
        if self.config.variant == "official" or num_steps == 0:
            total, num_steps = total + 1.0 / self._num_domains, num_steps + 1
        mean: np.ndarray = total / num_steps
        return mean


def latest_checkpoint(save: Path) -> Path | None:
    """Return the folder of the latest checkpoint in a Megatron `--save` folder, None without one."""
    try:
        latest = (save / "latest_checkpointed_iteration.txt").read_text().strip()
    except OSError:
        return None
    return save / (f"iter_{int(latest):07d}" if latest.isdigit() else latest)


def token_coefficients(
    alpha: np.ndarray, num_tokens: np.ndarray, *, sampling_weights: np.ndarray,
    variant: Literal["paper", "official"],
) -> np.ndarray:
    """Return d loss / d (token loss) for a token of each domain in a global batch.

    `paper`: alpha_i / n_i, so that the sum over all tokens is the weighted sum of the domains' token
    means. `official`: alpha'_i / sum_j n_j alpha'_j with alpha' = alpha / sampling weight, the
    released code's weighted mean over all tokens.

    Args:
        alpha: (K,) weights on the simplex.
        num_tokens: (K,) tokens of each domain in the global batch.
        sampling_weights: (K,) what the batch was sampled with.
        variant: which of the two.

    Returns:
        (K,) float64; 0 for a domain without tokens.

    >>> uniform = np.full(2, 0.5)
    >>> token_coefficients(
    ...     np.array([0.75, 0.25]), np.array([3, 1]), sampling_weights=uniform, variant="paper"
    ... ).tolist()
    [0.25, 0.25]
    """
    is_there = num_tokens > 0
    if variant == "paper":
        return np.divide(alpha, num_tokens, out=np.zeros(len(alpha)), where=is_there)
    share = np.divide(alpha, sampling_weights, out=np.zeros(len(alpha)),
                      where=is_there & (sampling_weights > 0))
    total = float((share * num_tokens).sum())
    return share / total if total > 0 else share


def convergence(alpha_bar: np.ndarray, alpha_ref: np.ndarray) -> float:
    """Return max |alpha_bar - alpha_ref|, the measure of the stop rule."""
    return float(np.abs(alpha_bar - alpha_ref).max())
