"""A limit on repetition around any mixer: `max_epochs`.

Each domain has a budget of floor(E_i * size_i) samples for the whole run. With `redistribute` the
weight of a domain may not exceed what spreads its budget evenly over the rest of the run,

    u_i = (budget_i - consumed_i) / remaining samples,
    x   = the distribution nearest to w (least KL(x || w)) with x_i <= u_i
        = min(u_i, tau * w_i), tau such that the sum is 1,

so a small domain is seen less often, but until the end. `repeat` leaves the weights alone and
exceeds the budgets; `stop` leaves them alone and ends the plan where one would be exceeded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from megatron_d3.errors import ConfigError
from megatron_d3.fields import did_you_mean
from megatron_d3.types import DomainInfo, MixContext

UNLIMITED = 1 << 62
"""The budget of a domain without a limit, in samples."""

WHERE = "d3.mix.max_epochs"


def project(weights: np.ndarray, upper: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the distribution nearest to `weights` that stays below `upper`.

    Args:
        weights: (K,) float64 on the simplex.
        upper: (K,) float64 >= 0, the most that each entry may be; may be inf.

    Returns:
        (K,) float64, min(upper, tau * weights) with sum 1, and tau >= 1. Where even the upper
        limits of all entries with a weight add up to less than 1, the limits divided by their sum,
        and inf.

    >>> project(np.array([0.2, 0.2, 0.3, 0.3]), np.array([5.75, 0.9, 0.075, 0.0125]))[0].round(5)
    array([0.45625, 0.45625, 0.075  , 0.0125 ])
    """
    has_weight = weights > 0
    reachable = np.where(has_weight, upper, 0.0)
    if reachable.sum() <= 1.0:
        # Nothing to choose: all are at their limits. (No limit at all: no room, keep the weights.)
        return (reachable / reachable.sum() if reachable.any() else weights.copy()), np.inf
    # While tau grows, entries reach their limit in the order of weight / upper, largest first.
    at = np.flatnonzero(has_weight)  # (A,)
    with np.errstate(all="ignore"):  # limits of 0, and weights at the end of float64's range
        at = at[np.argsort(-weights[at] / upper[at], kind="stable")]
        projected = np.where(has_weight, upper, 0.0)
        for num_capped in range(len(at)):
            free = at[num_capped:]
            left = 1.0 - upper[at[:num_capped]].sum()
            shares = left * (weights[free] / weights[free].sum())
            if shares[0] <= upper[free[0]]:
                break
        projected[free] = np.minimum(shares, upper[free])
        return projected, float(left / weights[free].sum())


class EpochCap:
    """The limit `max_epochs` and what happens when a domain has reached it.

    The planner asks :meth:`cap` for the weights of each round and, since a carry may still ask for
    one sample more, keeps the counts within `budgets` itself (`redistribute`: the others take the
    place; `stop`: the plan ends; `repeat`: nothing).

    Attributes:
        exhausted: `redistribute`, `repeat` or `stop`.
        budgets: (K,) int64, samples that each domain may give in the whole run.
    """

    def __init__(
        self,
        max_epochs: float | Mapping[str, float],
        exhausted: Literal["redistribute", "repeat", "stop"],
        domains: Sequence[DomainInfo],
    ):
        """Build the cap.

        Args:
            max_epochs: one number > 0 for all domains (may be inf), or a number by domain; domains
                left out have no limit.
            exhausted: see the class.
            domains: the K domains.

        Raises:
            ConfigError: a number that is not > 0, or a name that is no domain.
        """
        names = [domain.name for domain in domains]
        by_name = (
            max_epochs if isinstance(max_epochs, Mapping) else dict.fromkeys(names, max_epochs)
        )
        known = set(names)
        for name, epochs in by_name.items():
            if name not in known:
                raise ConfigError(f"{WHERE}.{name}: no such domain{did_you_mean(name, names)}")
            if not epochs > 0:
                raise ConfigError(f"{WHERE}: got {epochs}, expected a number > 0")
        self.exhausted: Literal["redistribute", "repeat", "stop"] = exhausted
        self.budgets = np.array(
            [_budget(by_name.get(domain.name, np.inf), domain.num_samples) for domain in domains],
            np.int64,
        )

    def cap(self, weights: np.ndarray, context: MixContext) -> np.ndarray:
        """Return the (K,) float64 weights to use instead, on the simplex.

        With `redistribute` a domain whose budget is used up gets 0, unless no domain that has a
        weight has any budget left: then the weights come back as they are, and it is the caller
        that finds no room. If those with a weight cannot fill the rest of the run (a schedule may
        give the others theirs later), they are taken in proportion to what they have left.
        """
        remaining = context.total_samples - context.position
        if self.exhausted != "redistribute" or remaining <= 0:
            return weights
        room = np.maximum(self.budgets - context.consumed, 0)
        return project(weights, room / remaining)[0]

    def check(self, total_samples: int) -> str | None:
        """Compare the length of the run with the budgets, before it starts.

        Returns:
            A sentence worth logging when `repeat` will exceed the budgets or `stop` will end the
            run early, else None.

        Raises:
            ConfigError: `redistribute` and the budgets are smaller than the run.
        """
        largest = sum(self.budgets.tolist())
        if total_samples <= largest:
            return None
        missing = total_samples - largest
        if self.exhausted == "redistribute":
            raise ConfigError(
                f"{WHERE}: the run has {total_samples} samples, {missing} more than all domains"
                f" give within their max_epochs; the largest feasible run has {largest} samples."
                " Shorten the run, raise max_epochs, or choose exhausted: repeat or stop"
            )
        if self.exhausted == "repeat":
            return f"{WHERE}: {missing} of {total_samples} samples repeat beyond max_epochs"
        return (
            f"{WHERE}: the run will stop after {largest} of {total_samples} samples at the latest"
        )


def rehearse(
    mixer: Any,
    cap: EpochCap,
    *,
    total_samples: int,
    step_at: Callable[[int], int],
    num_slices: int = 256,
) -> None:
    """Run through the budgets of an offline mixer, so that a run does not break off in the middle.

    Weights of 0 may leave a part of the budgets out of reach although their sum suffices. The run
    is followed in equal slices with fractional samples.

    Args:
        mixer: a mixer; online mixers (whose weights nobody knows yet) pass unseen.
        cap: its cap; only `redistribute` is followed.
        total_samples: positions of the run.
        step_at: the 0-based training step that consumes a position.
        num_slices: how finely the run is followed.

    Raises:
        ConfigError: at some position the domains with a weight have no budget left.
    """
    if mixer.is_online or cap.exhausted != "redistribute":
        return
    consumed = np.zeros(len(cap.budgets))
    edges = np.linspace(0, total_samples, num_slices + 1).astype(np.int64)
    for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        num_samples = stop - start
        context = MixContext(step_at(start), start, total_samples, consumed.astype(np.int64))
        weights = cap.cap(mixer.weights(mixer.init(), context), context)
        room = np.where(weights > 0, np.maximum(cap.budgets - consumed, 0.0), 0.0)
        if room.sum() < num_samples - 1e-6 * total_samples:
            largest = start + int(room.sum())
            raise ConfigError(
                f"{WHERE}: from step {context.step} on, the domains that have a weight cannot fill"
                f" the run within their max_epochs; the largest feasible run has about {largest} of"
                f" the {total_samples} samples. Give other domains a weight or raise max_epochs"
            )
        if num_samples:
            consumed += num_samples * project(weights, room / num_samples)[0]


def _budget(epochs: float, num_samples: int) -> int:
    """Return floor(epochs * num_samples), forgiving a rounding error just below an integer."""
    limit = epochs * num_samples * (1 + 1e-12) if num_samples else 0.0
    return UNLIMITED if limit >= UNLIMITED else int(limit)
