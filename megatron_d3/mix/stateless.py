"""What mixers share that decide from the domains and the step alone, learning nothing."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from megatron_d3.types import StepSignals


class Stateless:
    """`init` and `update` of a mixer without state: it ignores what training measured."""

    VERSION: ClassVar[int] = 1
    is_online: ClassVar[bool] = False
    uses_total_samples: ClassVar[bool] = False
    """Whether the length of the run has a part in the weights."""

    def init(self) -> dict[str, np.ndarray]:
        """Return no state."""
        return {}

    def update(self, state: dict[str, np.ndarray], signals: StepSignals) -> dict[str, np.ndarray]:
        """Return the state as it was."""
        return state
