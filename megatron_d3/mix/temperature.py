"""Temperature: between natural (1) and uniform (inf) weights.

Source: p_i ~ n_i ** (1 / T), Arivazhagan et al. 2019 (arXiv 1907.05019, section 4.2); mT5 (arXiv
2010.11934) writes alpha = 1 / T = 0.3. Sizes n_i are training tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from megatron_d3.fields import Range
from megatron_d3.mix.stateless import Stateless
from megatron_d3.mix.weights import proportional
from megatron_d3.types import DomainInfo, MixContext


class Temperature(Stateless):
    """Weights in proportion to a power of the number of training tokens."""

    @dataclass(frozen=True)
    class Config:
        """Settings of `type: temperature`."""

        temperature: Annotated[float, Range("(0, inf]")]
        """T in p ~ tokens ** (1 / T): 1 is natural, inf uniform, below 1 favours the large."""

    def __init__(self, config: Config, domains: Sequence[DomainInfo], *, total_samples: int):
        """Raises ConfigError when no domain holds a token."""
        sizes = np.array([domain.num_tokens for domain in domains], np.float64)
        shares = proportional(sizes, "d3.mix")
        # Relative to the largest: 1 stays 1 whatever the power, the others shrink towards 0.
        powers = (shares / shares.max()) ** (1.0 / config.temperature)
        self._weights = proportional(powers, "d3.mix")

    def weights(self, state: dict[str, np.ndarray], context: MixContext) -> np.ndarray:
        """Return (K,) float64, the same at every step."""
        return self._weights.copy()
