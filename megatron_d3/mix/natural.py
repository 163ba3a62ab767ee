"""Natural weights: every domain in proportion to its size, so that all end their epoch together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_d3.mix.stateless import Stateless
from megatron_d3.mix.weights import proportional
from megatron_d3.types import DomainInfo, MixContext


class Natural(Stateless):
    """Weights in proportion to the number of training tokens."""

    @dataclass(frozen=True)
    class Config:
        """`type: natural` has no settings."""

    def __init__(self, config: Config, domains: Sequence[DomainInfo], *, total_samples: int):
        """Raises ConfigError when no domain holds a token."""
        sizes = np.array([domain.num_tokens for domain in domains], np.float64)
        self._weights = proportional(sizes, "d3.mix")

    def weights(self, state: dict[str, np.ndarray], context: MixContext) -> np.ndarray:
        """Return (K,) float64, the same at every step."""
        return self._weights.copy()
