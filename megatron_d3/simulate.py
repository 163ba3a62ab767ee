"""Play a mixer over losses that are known beforehand: what it would decide, without training.

The losses do not answer to the mixture, as those of a model would. What a simulation shows is the
rule itself: how far its constants let the weights move, and which domain is used up when.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_d3.plan.decide import Decider
from megatron_d3.plan.draft import stored_order
from megatron_d3.types import DomainInfo, StepSignals


@dataclass(frozen=True)
class Simulation:
    """What a mixer decided.

    Attributes:
        num_steps: steps played; fewer than asked for where `exhausted: stop` ended the run.
        weights: (T, K) float64, target weights of each step.
        samples: (K,) int64, drawn of each domain.
        used_up_at: (K,) int64, 1-based step after which a domain had given all that `max_epochs`
            allows (without a limit: one epoch); 0 where it never did.
    """

    num_steps: int
    weights: np.ndarray
    samples: np.ndarray
    used_up_at: np.ndarray

    @property
    def first_exhaustion(self) -> int | None:
        """The domain that is used up first, ties by index; None if none is."""
        if not self.used_up_at.any():
            return None
        return int(np.argmin(np.where(self.used_up_at > 0, self.used_up_at, np.iinfo(np.int64).max)))


def simulate(
    decider: Decider, losses: np.ndarray, *, seq_length: int, read_ahead_steps: int
) -> Simulation:
    """Decide as a run would, step by step; windows as a whole, but in the stored order: which order
    is found depends on the model.

    Args:
        decider: of the run; its table ids are 0 to K - 1.
        losses: (T, K) float64, mean loss in nats per token of each step to play.
        seq_length: tokens a sample.
        read_ahead_steps: see the configuration's key.

    Raises:
        PlanError: the mixer or its cap cannot fill a round.
    """
    num_steps, num_domains = losses.shape
    schedule, state = decider.batch_schedule, decider.init()
    limits = _limits(decider)
    drawn = np.zeros(num_domains, np.int64)
    used_up_at = np.zeros(num_domains, np.int64)
    domains = np.zeros(0, np.int16)  # of the positions from the present to the frontier
    ahead: list[tuple[int, np.ndarray]] = []  # (stop, weights) of the rounds they came from
    weights: list[np.ndarray] = []
    consumed = 0
    for step in range(1, num_steps + 1):
        while state.position < schedule.stop_after(consumed, 1 + read_ahead_steps):
            decided = decider.advance(state, stored_order)
            if decided is None:
                break
            state, segments = decided
            domains = np.concatenate([domains, *(segment.domains for segment in segments)])
            ahead += [(segment.stop, segment.weights) for segment in segments]
        size = schedule.size_at(consumed)
        if len(domains) < size:
            break
        counts = np.bincount(domains[:size], minlength=num_domains)
        while ahead[0][0] <= consumed:
            del ahead[0]
        weights.append(ahead[0][1])
        domains, consumed, drawn = domains[size:], consumed + size, drawn + counts
        used_up_at[(used_up_at == 0) & (drawn >= limits)] = step
        num_tokens = counts * seq_length
        state = decider.observe(
            state, StepSignals(step, consumed, losses[step - 1] * num_tokens, num_tokens))
    return Simulation(
        len(weights), np.array(weights).reshape(-1, num_domains), drawn, used_up_at)


def _limits(decider: Decider) -> np.ndarray:
    """Return (K,) samples after which a domain counts as used up."""
    sizes = np.array([domain.num_samples for domain in decider.domains], np.int64)
    if decider.cap is None:
        return sizes
    return np.asarray(decider.cap.budgets)


def report(simulation: Simulation, domains: Sequence[DomainInfo], *, title: str) -> str:
    """Return the table that `megatron-d3 simulate` prints."""
    total = max(1, int(simulation.samples.sum()))
    width = max(6, *(len(domain.name) for domain in domains))
    last = simulation.weights[-1] if simulation.num_steps else np.full(len(domains), np.nan)
    head = (f"{'domain':{width}} {'samples':>12} {'share':>7} {'epochs':>8} {'last weight':>11}  "
            "used up after step")
    lines = [title, "", head]
    for i, domain in enumerate(domains):
        samples = int(simulation.samples[i])
        step = int(simulation.used_up_at[i])
        lines.append(
            f"{domain.name:{width}} {samples:12,} {samples / total:7.4f} "
            f"{samples / domain.num_samples:8.3f} {last[i]:11.4f}  {step or '-'}")
    first = simulation.first_exhaustion
    lines += ["", "first exhaustion: " + (
        "none" if first is None else
        f"{domains[first].name}, after step {simulation.used_up_at[first]}")]
    return "\n".join(lines)
