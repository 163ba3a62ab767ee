"""The state of a run's decisions, as named arrays when stored or broadcast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

_SCALARS = ("round", "position", "step", "iteration", "consumed", "decided_at", "chain")


@dataclass(frozen=True, eq=False)
class Pending:
    """Units that were drawn and have no position yet (windows with `overlap`).

    Attributes:
        records: (P, G) of `RECORD`, P >= 1 units of G samples, in the order in which they were drawn.
        weights: (P, K) float64, the weights that each was drawn with.
    """

    records: np.ndarray
    weights: np.ndarray


@dataclass(frozen=True, eq=False)
class DeciderState:
    """Everything a decision depends on besides the settings.

    Attributes:
        round: rounds decided, hence the number of the next one.
        position: the frontier, first position not decided.
        step: 0-based training step that consumes `position`.
        iteration: training steps observed; a round decided now is recorded at this iteration.
        consumed: samples consumed by the observed steps.
        decided_at: `iteration` of the last decided round, -1 before the first.
        chain: hash over all segments so far.
        cursors: (K,) int64, samples drawn of each domain, pending ones included: its next ordinal.
        carry: (K,) float64, cumulative target minus cumulative count (apportionment).
        weights: (K,) float64 of the last round, NaN before the first.
        mixer: the mixer's named arrays.
        pending: units that were drawn and not committed, None for none.
    """

    round: int
    position: int
    step: int
    iteration: int
    consumed: int
    decided_at: int
    chain: int
    cursors: np.ndarray
    carry: np.ndarray
    weights: np.ndarray
    mixer: dict[str, np.ndarray]
    pending: Pending | None = None

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return the state as named arrays, to be stored or broadcast."""
        arrays = {
            name: np.array(getattr(self, name), np.uint64 if name == "chain" else np.int64)
            for name in _SCALARS
        }
        arrays |= {"cursors": self.cursors, "carry": self.carry, "weights": self.weights}
        arrays |= {f"mixer.{name}": array for name, array in self.mixer.items()}
        if self.pending is not None:
            arrays["pending.records"] = self.pending.records
            arrays["pending.weights"] = self.pending.weights
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> DeciderState:
        """Rebuild a state from :meth:`to_arrays`."""
        scalars: dict[str, Any] = {name: int(arrays[name]) for name in _SCALARS}
        prefix = "mixer."
        mixer = {name[len(prefix):]: np.asarray(array)
                 for name, array in arrays.items() if name.startswith(prefix)}
        pending = None
        if "pending.records" in arrays:
            pending = Pending(np.asarray(arrays["pending.records"]),
                              np.asarray(arrays["pending.weights"]))
        return cls(cursors=np.asarray(arrays["cursors"]), carry=np.asarray(arrays["carry"]),
                   weights=np.asarray(arrays["weights"]), mixer=mixer, pending=pending, **scalars)
