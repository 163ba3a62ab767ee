"""How many samples each training step consumes.

Megatron's global batch is constant or follows `--step-batch-size-schedule`, a list of thresholds in
consumed samples. (`--rampup-batch-size` is ignored by every Megatron this package supports.)

Source: `megatron.core.num_microbatches_calculator.StepBatchsizeNumMicroBatchesCalculator`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron_d3.errors import ConfigError


@dataclass(frozen=True)
class BatchSchedule:
    """Global batch size as a step function of the consumed samples.

    >>> schedule = BatchSchedule(((0, 4), (10, 8)))
    >>> schedule.size_at(8), schedule.size_at(12)
    (4, 8)
    >>> schedule.stop_after(0, 4)          # batches start at 0, 4, 8, 12: 4 + 4 + 4 + 8
    20

    Attributes:
        steps: (threshold, size) pairs: once `threshold` samples are consumed, a global batch holds
            `size` samples. The first threshold is 0; thresholds increase.

    Raises:
        ConfigError: no steps, a first threshold other than 0, thresholds that do not increase, or a
            size below 1.
    """

    steps: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        steps = tuple((int(threshold), int(size)) for threshold, size in self.steps)
        object.__setattr__(self, "steps", steps)
        if not steps or steps[0][0] != 0:
            raise ConfigError(f"batch schedule: got {steps}, expected a first step at 0 samples")
        for (before, _), (after, _) in pairwise(steps):
            if after <= before:
                raise ConfigError(
                    f"batch schedule: thresholds must increase, got {after} after {before}")
        for threshold, size in steps:
            if size < 1:
                raise ConfigError(
                    f"batch schedule: got a global batch of {size} from sample {threshold} on, "
                    "expected at least 1")

    @classmethod
    def constant(cls, size: int) -> BatchSchedule:
        """Return the schedule of a run whose every global batch holds `size` samples."""
        return cls(((0, size),))

    @classmethod
    def from_json(cls, steps: Sequence[Sequence[int]]) -> BatchSchedule:
        """Rebuild a schedule from :meth:`to_json`."""
        return cls(tuple((threshold, size) for threshold, size in steps))

    def to_json(self) -> list[list[int]]:
        """Return the steps as nested lists."""
        return [[threshold, size] for threshold, size in self.steps]

    def size_at(self, consumed: int) -> int:
        """Return the size of the global batch that starts after `consumed` samples."""
        return self.steps[self._step_at(consumed)][1]

    def stop_after(self, consumed: int, num_batches: int) -> int:
        """Return the samples consumed once `num_batches` more batches are done.

        A batch that starts below a threshold keeps its size although it ends above it. The cost is
        that of the thresholds passed, not of the batches.
        """
        at = self._step_at(consumed)
        while num_batches > 0:
            size = self.steps[at][1]
            taken = num_batches
            if at + 1 < len(self.steps):
                taken = min(taken, -(-(self.steps[at + 1][0] - consumed) // size))
            consumed += taken * size
            num_batches -= taken
            at = self._step_at(consumed)
        return consumed

    def _step_at(self, consumed: int) -> int:
        return bisect_right(self.steps, consumed, key=lambda step: step[0]) - 1
