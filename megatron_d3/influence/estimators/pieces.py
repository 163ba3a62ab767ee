"""Which probe sequences are measured together, and means over them.

A unit's probe sequences are cut in two halves, [0, n // 2) and [n // 2, n), so that S can be had
twice from disjoint sequences. All that is linear in sequences (gradients, curvature) is measured by
half; the whole is the mean of the halves weighted by their tokens. With `curvature_sequences` below
n, curvature is measured on the first sequences of each half, so that the halves stay disjoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Piece:
    """A range of probe sequences that is measured in one call.

    Attributes:
        half: 0 or 1.
        start: first sequence.
        stop: one past the last.
        is_curved: whether curvature is measured on it.
    """

    half: int
    start: int
    stop: int
    is_curved: bool


def cut_halves(num_sequences: int, num_curved: int) -> tuple[Piece, ...]:
    """Cut n sequences in two halves, and each half where its curvature sequences end.

    >>> [(p.half, p.start, p.stop, p.is_curved) for p in cut_halves(8, 4)]
    [(0, 0, 2, True), (0, 2, 4, False), (1, 4, 6, True), (1, 6, 8, False)]
    >>> [(p.half, p.start, p.stop, p.is_curved) for p in cut_halves(1, 1)]
    [(0, 0, 1, True)]
    """
    if num_sequences == 1:
        return (Piece(0, 0, 1, True),)
    middle, first = num_sequences // 2, num_curved // 2
    cuts = ((0, 0, first, middle), (1, middle, middle + num_curved - first, num_sequences))
    pieces = [
        piece
        for half, start, curved, stop in cuts
        for piece in (Piece(half, start, curved, True), Piece(half, curved, stop, False))
    ]
    return tuple(piece for piece in pieces if piece.start < piece.stop)


def places(
    pieces: Sequence[Piece], half: int | None = None, *, only_curved: bool = False
) -> list[int]:
    """Return the indices of the pieces of a half (None: of both), maybe only of those for curvature.

    >>> pieces = cut_halves(8, 4)
    >>> places(pieces, 1), places(pieces, only_curved=True)
    ([2, 3], [0, 2])
    """
    return [p for p, piece in enumerate(pieces)
            if half in (None, piece.half) and (piece.is_curved or not only_curved)]


@dataclass(frozen=True)
class Probed:
    """The units' gradients, equal on all ranks; P pieces, L units, sketches of k numbers.

    Attributes:
        pieces: (P,) what was measured.
        sketches: (P, L, k) of each piece's gradient (of P^(1/2) g with the optimizer's root).
        tokens: (P, L).
        losses: (P, L) mean token losses.
        norms: (L,) norms of the plain gradients of all pieces together.
        bad_units: units whose loss or gradient is not finite; their rows are 0.
    """

    pieces: tuple[Piece, ...]
    sketches: np.ndarray
    tokens: np.ndarray
    losses: np.ndarray
    norms: np.ndarray
    bad_units: tuple[int, ...]

    def of(self, half: int | None, values: np.ndarray) -> np.ndarray:
        """Return the token-weighted mean over the pieces of a half, or of both (None).

        Args:
            half: 0, 1 or None.
            values: (P, L, ...).
        """
        chosen = places(self.pieces, half)
        return weighted_mean(values[chosen], self.tokens[chosen])

    def curved_mean(self, half: int | None, values: np.ndarray) -> np.ndarray:
        """Return the same of what was measured on the pieces for curvature only."""
        chosen = places(self.pieces, half, only_curved=True)
        return weighted_mean(values[chosen], self.tokens[chosen])

    @property
    def has_halves(self) -> bool:
        """Whether both halves have gradients and curvature."""
        return {piece.half for piece in self.pieces if piece.is_curved} == {0, 1}


def weighted_mean(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the mean over the first axis of (P, L, ...) with weights (P, L), not all zero in P."""
    shares = weights / weights.sum(axis=0)
    return np.einsum("pl,pl...->l...", shares, values)
