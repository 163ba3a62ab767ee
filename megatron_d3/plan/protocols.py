"""What the decider asks of a mixer and of a limit on repetition."""

from __future__ import annotations

from typing import ClassVar, Literal, Protocol

import numpy as np

from megatron_d3.types import MixContext, StepSignals


class Mixer(Protocol):
    """What the decider asks of a mixer (see `megatron_d3.mix`)."""

    VERSION: ClassVar[int]
    is_online: ClassVar[bool]

    def init(self) -> dict[str, np.ndarray]: ...
    def update(
        self, state: dict[str, np.ndarray], signals: StepSignals
    ) -> dict[str, np.ndarray]: ...
    def weights(self, state: dict[str, np.ndarray], context: MixContext) -> np.ndarray: ...


class Cap(Protocol):
    """What the decider asks of a limit on repetition (see `megatron_d3.mix.caps.EpochCap`).

    Attributes:
        exhausted: what happens to a domain that has given all it may.
        budgets: (K,) int64, samples that each domain may give in the whole run.
    """

    exhausted: Literal["redistribute", "repeat", "stop"]
    budgets: np.ndarray

    def cap(self, weights: np.ndarray, context: MixContext) -> np.ndarray: ...
