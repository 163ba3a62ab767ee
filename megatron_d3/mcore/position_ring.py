"""The decided positions around the present, shared with this rank's DataLoader workers.

The plan of a run may hold 10^9 positions; training looks at a few thousand of them at a time. Each
rank that reads samples keeps just those in shared memory, in a ring: its workers see a new segment
as soon as it is written, on any node, without a file.
"""

from __future__ import annotations

import numpy as np
import torch

from megatron_d3.errors import PlanError


class PositionRing:
    """Positions [stop - capacity, stop) of the plan: position p at slot p mod capacity.

    Picklable into worker processes, whatever their start method (torch shares the memory).

    Args:
        start: first position that will be written.
        capacity: how many positions are kept; the reader must not fall further behind.
    """

    def __init__(self, *, start: int, capacity: int) -> None:
        self._domains = torch.zeros(capacity, dtype=torch.int16).share_memory_()
        self._samples = torch.zeros(capacity, dtype=torch.int64).share_memory_()
        self._bounds = torch.tensor([start, start], dtype=torch.int64).share_memory_()
        self._capacity = capacity

    @property
    def stop(self) -> int:
        """First position not yet decided: the frontier."""
        return int(self._bounds[1])

    def append(self, start: int, domains: np.ndarray, samples: np.ndarray) -> None:
        """Add the next positions.

        Args:
            start: the position of the first one; must be `stop`.
            domains: (n,) int16.
            samples: (n,) int64.

        Raises:
            PlanError: there is a gap, or the positions do not fit.
        """
        n = len(domains)
        if start != self.stop or n > self._capacity:
            raise PlanError(
                f"positions {start}-{start + n}: expected to follow {self.stop} and to fit into "
                f"{self._capacity}")
        slots = np.arange(start, start + n) % self._capacity  # (n,)
        self._domains.numpy()[slots] = domains
        self._samples.numpy()[slots] = samples
        # NOTE: the bound moves last: who sees it sees the positions below it.
        self._bounds[1] = start + n

    def read(self, position: int) -> tuple[int, int]:
        """Return (domain, sample) of a position.

        Raises:
            PlanError: the position is not decided yet, or was passed long ago.
        """
        first, stop = (int(bound) for bound in self._bounds)
        if not max(first, stop - self._capacity) <= position < stop:
            raise PlanError(
                f"position {position} was read, decided are {max(first, stop - self._capacity)}-"
                f"{stop - 1}: the read-ahead rule is broken (does a DataLoader prefetch more than "
                "2 batches a worker?)")
        slot = position % self._capacity
        return int(self._domains[slot]), int(self._samples[slot])

    def read_range(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (n,) int64 domains and samples of the positions [start, stop).

        Raises:
            PlanError: a position is not decided yet, or was passed long ago.
        """
        if start < stop:
            self.read(start)
            self.read(stop - 1)
        slots = np.arange(start, stop) % self._capacity  # (n,)
        return self._domains.numpy()[slots].astype(np.int64), self._samples.numpy()[slots].copy()
