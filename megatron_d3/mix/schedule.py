"""A schedule: weights given at some training steps, and how to pass from one to the next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from megatron_d3.errors import ConfigError
from megatron_d3.mix.stateless import Stateless
from megatron_d3.mix.weights import weights_by_name
from megatron_d3.types import DomainInfo, MixContext

WHERE = "d3.mix.knots"


class Schedule(Stateless):
    """Weights that follow knots `[step, weights]`; each knot's weights are divided by their sum.

    A knot's weights hold from the named 0-based step on: that step is the first trained with them.
    Between knots they stay (`step`), or move in a straight line (`linear`) or along half a cosine
    wave (`cosine`) to the next. After the last knot they stay.
    """

    @dataclass(frozen=True)
    class Config:
        """Settings of `type: schedule`."""

        knots: tuple[tuple[int, dict[str, float]], ...]
        """Pairs `[step, {domain: weight}]`, steps rising from 0 (0-based training steps), each with
        a weight >= 0 for every domain."""

        interpolation: Literal["step", "linear", "cosine"] = "step"
        """How the weights pass from one knot to the next."""

    def __init__(self, config: Config, domains: Sequence[DomainInfo], *, total_samples: int):
        """Raises ConfigError for steps that do not rise from 0 or weights that are no weights."""
        if not config.knots:
            raise ConfigError(f"{WHERE}: got none, expected at least [0, weights]")
        steps = [step for step, _ in config.knots]
        if steps[0] != 0:
            raise ConfigError(
                f"{WHERE}[0]: got step {steps[0]}, expected 0, so that every step has weights"
            )
        for index, (before, step) in enumerate(pairwise(steps), start=1):
            if step <= before:
                raise ConfigError(f"{WHERE}[{index}]: got step {step}, expected one after {before}")
        self._steps = np.array(steps, np.int64)  # (N,)
        self._knots: np.ndarray = np.array(
            [
                weights_by_name(weights, domains, f"{WHERE}[{index}][1]")
                for index, (_, weights) in enumerate(config.knots)
            ]
        )  # (N, K)
        self._interpolation = config.interpolation

    def weights(self, state: dict[str, np.ndarray], context: MixContext) -> np.ndarray:
        """Return the (K,) float64 weights of `context.step`."""
        last = int(np.searchsorted(self._steps, context.step, side="right")) - 1
        here: np.ndarray = self._knots[last]
        if self._interpolation == "step" or last + 1 == len(self._steps):
            return here.copy()
        start, end = self._steps[last : last + 2]
        fraction = float(context.step - start) / float(end - start)
        if self._interpolation == "cosine":
            fraction = (1.0 - math.cos(math.pi * fraction)) / 2.0
        return np.asarray(here + fraction * (self._knots[last + 1] - here))
