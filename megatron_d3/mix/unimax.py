"""UniMax: as uniform as the sizes allow without repeating any domain more than N times.

Source: Chung et al. 2023 (arXiv 2304.09151), Algorithm 1. Known differences: sizes and budget are
counted in samples, not characters; N may differ by domain, and domains are then visited by
ascending N_i * size_i, which is the paper's order when N is one number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from megatron_d3.fields import Range
from megatron_d3.mix.stateless import Stateless
from megatron_d3.mix.weights import proportional
from megatron_d3.types import DomainInfo, MixContext


class UniMax(Stateless):
    """Weights fixed for the whole run from the domains' sizes and the run's length.

    `max_epochs` is the common key of all mixers: the same number shapes the distribution here and
    is enforced by :class:`~megatron_d3.mix.caps.EpochCap`. A run longer than `max_epochs` of
    everything is therefore refused at its start (`exhausted: redistribute`), stops early (`stop`),
    or repeats with weights in proportion to the limits (`repeat`), and the message says how many
    samples.

    Attributes:
        budgets: (K,) float64, samples given to each domain by the algorithm.
        unspent_samples: samples of the run that no domain may take; 0 when the run is feasible.
    """

    uses_total_samples: ClassVar[bool] = True

    @dataclass(frozen=True)
    class Config:
        """Settings of `type: unimax`."""

        max_epochs: (
            Annotated[float, Range("(0, inf]")] | dict[str, Annotated[float, Range("(0, inf]")]]
        )
        """N: no domain is planned to be repeated more often than this over the whole run. One
        number, or a number by domain (domains left out may repeat without limit)."""

    def __init__(self, config: Config, domains: Sequence[DomainInfo], *, total_samples: int):
        """Raises ConfigError when no domain holds a sample or the run has none."""
        sizes = np.array([domain.num_samples for domain in domains], np.float64)
        if isinstance(config.max_epochs, dict):
            epochs = np.array([config.max_epochs.get(domain.name, np.inf) for domain in domains])
        else:
            epochs = np.full(len(domains), config.max_epochs)
        limits = np.where(sizes > 0, sizes * np.where(sizes > 0, epochs, 0), 0)
        self.budgets, self.unspent_samples = spend(limits, float(total_samples))
        self._weights = proportional(self.budgets, "d3.mix")

    def weights(self, state: dict[str, np.ndarray], context: MixContext) -> np.ndarray:
        """Return (K,) float64, the same at every step."""
        return self._weights.copy()


def spend(limits: np.ndarray, budget: float) -> tuple[np.ndarray, float]:
    """Share a budget evenly among domains, none above its limit.

    Args:
        limits: (K,) float64, the most that each domain may take; may be inf.
        budget: what is to be shared, in the same unit.

    Returns:
        (K,) float64, what each takes, and what is left when every limit is reached.

    Source: Algorithm 1: in ascending order, U = min(budget left / domains left, limit).

    >>> spend(np.array([24.0, 4.0, 0.8, 0.2]), 10.0)[0].tolist()
    [5.0, 4.0, 0.8, 0.2]
    """
    taken = np.zeros(len(limits))
    left = budget
    order = np.argsort(limits, kind="stable")
    for num_done, domain in enumerate(order):
        taken[domain] = min(left / (len(order) - num_done), limits[domain])
        left -= taken[domain]
    return taken, max(0.0, float(left))
