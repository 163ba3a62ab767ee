"""A segment: the positions that one round filled, and the hash that chains segments together."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

# One position of the plan, packed: the domain's id in the plan's table, and the domain's own draw
# number (`epoch * num_samples + i`; the shuffle is applied on reading). 10 bytes, the same two
# arrays as Megatron's `dataset_index` and `dataset_sample_index`.
RECORD = np.dtype([("domain", "<i2"), ("sample", "<i8")])


@dataclass(frozen=True, eq=False)
class Segment:
    """The result of one decision.

    Attributes:
        round: number of the decision, from 0.
        step: 0-based training step that consumes position `start`.
        start: first position.
        stop: position after the last.
        weights: (K,) float64 domain weights that the segment was drawn with, caps applied.
        has_new_weights: the weights differ from those of the round before.
        records: (stop - start,) of `RECORD`: domain table id and ordinal of each position.
        chain: 64-bit hash over this segment and all before it.
        unit: which unit of its window fills the segment; None without windows.
    """

    round: int
    step: int
    start: int
    stop: int
    weights: np.ndarray
    has_new_weights: bool
    records: np.ndarray
    chain: int
    unit: int | None = None

    @property
    def domains(self) -> np.ndarray:
        """(n,) int16 table ids."""
        return self.records["domain"]

    @property
    def samples(self) -> np.ndarray:
        """(n,) int64 ordinals."""
        return self.records["sample"]


def chain_hash(
    chain: int, *, where: tuple[int, int, int, int], weights: np.ndarray, records: np.ndarray
) -> int:
    """Return the hash of a segment chained to that of the segments before it.

    The iteration at which a round was decided is not part of it: two runs have equal chains if and
    only if they have equal rounds, weights and positions.

    Args:
        chain: hash of the segments before, 0 for none.
        where: (round, step, start, stop).
        weights: (K,) float64.
        records: (n,) of `RECORD`, contiguous.
    """
    digest = blake2b(struct.pack("<Q4q", chain, *where), digest_size=8)
    digest.update(np.ascontiguousarray(weights, dtype="<f8"))
    digest.update(records.view(np.uint8))
    return int.from_bytes(digest.digest(), "little")
