"""Static weights: written down, read from a file, or uniform."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_d3.mix.stateless import Stateless
from megatron_d3.mix.weights import numbers_by_name, weights_by_name
from megatron_d3.types import DomainInfo, MixContext

WHERE = "d3.mix.weights"


class Static(Stateless):
    """The same weights at every step.

    >>> domains = [DomainInfo("web", 10, 10), DomainInfo("code", 10, 10)]
    >>> mixer = Static(Static.Config({"web": 3, "code": 1}), domains, total_samples=100)
    >>> context = MixContext(step=0, position=0, total_samples=100, consumed=np.zeros(2, np.int64))
    >>> mixer.weights(mixer.init(), context).tolist()
    [0.75, 0.25]
    """

    @dataclass(frozen=True)
    class Config:
        """Settings of `type: static`."""

        weights: dict[str, float] | Path | None = None
        """A weight >= 0 for every domain, in any unit (0 leaves a domain out); or the path of a
        JSON file that holds them under the key `weights`; or null: all domains alike."""

        def resolved(self) -> Static.Config:
            """Return the settings with the file's weights in place of its path.

            A plan then records what decided it, and a later change of the file is a change of
            settings. Raises ConfigError for a file that holds no weights.
            """
            if self.weights is None:
                return self
            return Static.Config(numbers_by_name(self.weights, "weights", WHERE))

    def __init__(self, config: Config, domains: Sequence[DomainInfo], *, total_samples: int):
        """Raises ConfigError for weights that are no weights, or a file that has none."""
        if config.weights is None:
            self._weights = np.full(len(domains), 1.0 / len(domains))
        else:
            named = numbers_by_name(config.weights, "weights", WHERE)
            self._weights = weights_by_name(named, domains, WHERE)

    def weights(self, state: dict[str, np.ndarray], context: MixContext) -> np.ndarray:
        """Return (K,) float64, the same at every step."""
        return self._weights.copy()
