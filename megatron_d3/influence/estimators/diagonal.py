"""What the diagonal estimators share: Q_ij ~ sum of g_i^2 h_j, from two sketches a unit.

h_j stands for the diagonal of H_j, q_i = g_i * g_i. <R q_i, R h_j> is unbiased for any sketch R, and
no vector of a unit outlives its turn. (A diagonal taken in sketch space, R H R^T, would degenerate
to tr(H_j) |g_i|^2 / k.)

q and h are sketched without the mean of each parameter, which is large where all numbers are positive
and would make the sketch's error large; the rest of the product, sum_T mean(q_T) * sum(h_T), comes
from exact sums. Both, because errors in what q and h have in common cancel in S, which is
antisymmetric: with q alone centred they would not. (Error of S at k = 500 on a 16,000-parameter
GPT, neither / q / both: Fisher .19 / .23 / .18, Gauss-Newton .47 / .45 / .43.) Sums are of whole
parameters, hence the same under every layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from megatron_d3.influence.estimators.algebra import advantage_of, gram_of
from megatron_d3.influence.estimators.measuring import Measuring, add, is_usable, scale
from megatron_d3.influence.estimators.pieces import Piece, Probed, weighted_mean
from megatron_d3.influence.layout import Layout, Shard
from megatron_d3.influence.source import Influence, Loss

if TYPE_CHECKING:
    from megatron_d3.influence.source import Vector

WHOLE = 2
"""Where the whole stands after the two halves."""


class CentredSketch:
    """Sketches vectors without the mean of each parameter, and returns the sums beside.

    A vector is read twice, so that it is given as a function that makes it anew.
    """

    def __init__(self, measuring: Measuring) -> None:
        self._measuring = measuring
        self._layout: Layout = measuring.source.layout
        numbers = {name: number for number, name in enumerate(self._layout.global_sizes)}
        self._numbers = [numbers[shards[0].name] for shards in self._layout.tensors]
        self.sizes = np.array(list(self._layout.global_sizes.values()), np.float64)  # (T,)
        for shards in self._layout.tensors:
            assert len({shard.name for shard in shards}) == 1, f"several parameters in {shards}"

    def __call__(
        self, vector: Callable[[], Iterable[torch.Tensor]]
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Return this rank's part of the sketch (k,) and the group's sums over parameters (T,).

        None, on all ranks of the group, where the vector has something that is not a number.
        """
        with self._measuring.timed("sketch"):
            local = self._local_sums(vector())
        sums = self._measuring.group_sum(local)
        if not np.isfinite(sums).all():
            return None
        means = sums / self.sizes
        centred = (x - means[number] for x, number in zip(vector(), self._numbers, strict=True))
        return self._measuring.sketch(centred), sums

    def _local_sums(self, vector: Iterable[torch.Tensor]) -> np.ndarray:
        places, sums = [], []
        for tensor, shards, number in zip(vector, self._layout.tensors, self._numbers, strict=True):
            for shard in shards:
                if shard.is_counted and shard.num_elements:
                    places.append(number)
                    sums.append(_runs(tensor, shard).sum(dtype=torch.float64))
        total = np.zeros(len(self.sizes))
        if sums:  # one transfer from the device for all
            np.add.at(total, places, torch.stack(sums).numpy(force=True))
        return total


def _runs(tensor: torch.Tensor, shard: Shard) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    return flat.as_strided(
        (shard.num_runs, shard.run_length),
        (shard.local_stride, 1),
        flat.storage_offset() + shard.local_start,
    )


class Squares:
    """Sketches q_i of each half and of the whole, while `Measuring.probe` goes through the units.

    Its methods `on_piece` and `on_unit` are the hooks for it. Where a half has several pieces, its
    gradient is added up in one extra vector.
    """

    def __init__(self, measuring: Measuring, pieces: Sequence[Piece]) -> None:
        self._measuring = measuring
        self._pieces = pieces
        self._sketch = CentredSketch(measuring)
        shape = (3, measuring.num_units)
        self._sketches = np.zeros((*shape, measuring.dim))
        self._means = np.zeros((*shape, len(self._sketch.sizes)))
        self._bad = np.zeros(measuring.num_units)
        halves = [piece.half for piece in pieces]
        has_parts = len(set(halves)) < len(halves)
        self._partial = measuring.source.new_vector() if has_parts else None
        self._num_tokens = 0

    def on_piece(self, unit: int, index: int, loss: Loss) -> None:
        """Sketch the square of a half's gradient once the half is complete."""
        half = self._pieces[index].half
        gradients = self._measuring.source.gradients
        if self._partial is None:
            self._record(half, unit, gradients)
            return
        is_first = index == 0 or self._pieces[index - 1].half != half
        is_last = index == len(self._pieces) - 1 or self._pieces[index + 1].half != half
        self._num_tokens = loss.num_tokens + (0 if is_first else self._num_tokens)
        add(self._partial, gradients, loss.num_tokens, is_first=is_first)
        if is_last:
            scale(self._partial, 1 / self._num_tokens)
            self._record(half, unit, self._partial)

    def on_unit(self, unit: int, gradient: Vector) -> None:
        """Sketch the square of the whole unit's gradient."""
        self._record(WHOLE, unit, gradient)

    def _record(self, half: int, unit: int, gradient: Vector) -> None:
        measuring = self._measuring
        found = self._sketch(lambda: (x * x for x in measuring.whitened(gradient)))
        if found is None:
            self._bad[unit] = 1
            return
        self._sketches[half, unit] = found[0]
        self._means[half, unit] = found[1] / self._sketch.sizes * measuring.share

    def collect(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return sketches (3, L, k), means (3, L, T) and flags of bad units (L,) of all groups."""
        sketches, means, bad = self._measuring.all_sum(self._sketches, self._means, self._bad)
        return sketches, means, bad


@dataclass(frozen=True)
class Diagonals:
    """h_j of each half, equal on all ranks.

    Attributes:
        sketches: (H, L, k).
        sums: (H, L, T) sums over each parameter.
        tokens: (H, L) tokens that it was measured on; 0 where a half has none.
        bad_units: units with a loss or curvature that is not finite.
    """

    sketches: np.ndarray
    sums: np.ndarray
    tokens: np.ndarray
    bad_units: tuple[int, ...]

    def shared(self) -> Diagonals:
        """Return the same with one diagonal, the mean over the units, for all of them."""

        def mean(values: np.ndarray) -> np.ndarray:
            return np.broadcast_to(values.mean(axis=1, keepdims=True), values.shape)

        return Diagonals(mean(self.sketches), mean(self.sums), mean(self.tokens), self.bad_units)


class DiagonalTable:
    """Adds up what is measured of each unit's diagonal: sketches, and sums over parameters.

    What lands in a half is the token-weighted mean over the half's pieces.
    """

    def __init__(self, measuring: Measuring) -> None:
        self._measuring = measuring
        self._sketch = CentredSketch(measuring)
        shape = (2, measuring.num_units)
        self._sketches = np.zeros((*shape, measuring.dim))
        self._sums = np.zeros((*shape, len(self._sketch.sizes)))
        self._tokens = np.zeros(shape)
        self._bad = np.zeros(measuring.num_units)

    def add(
        self,
        piece: Piece,
        unit: int,
        loss: Loss,
        diagonal: Callable[[], Iterable[torch.Tensor]],
        factor: float,
    ) -> None:
        """Add factor * diagonal to the piece's half of a unit; a bad one is noted instead.

        Args:
            piece: what was measured.
            unit: its number.
            loss: its loss.
            diagonal: makes that of the (whitened) Hessian, one tensor at a time.
            factor: factors of all additions for one piece add up to the estimate.
        """
        found = self._sketch(diagonal)
        if found is None or not is_usable(loss):
            self._bad[unit] = 1
            return
        weight = factor * loss.num_tokens
        self._sketches[piece.half, unit] += weight * found[0]
        self._sums[piece.half, unit] += weight * found[1] * self._measuring.share

    def note_tokens(self, piece: Piece, unit: int, loss: Loss) -> None:
        """Count a piece's tokens: once, however often it is measured."""
        self._tokens[piece.half, unit] += loss.num_tokens * self._measuring.share

    def collect(self) -> Diagonals:
        """Return the diagonals of all groups."""
        sketches, sums, tokens, bad = self._measuring.all_sum(
            self._sketches, self._sums, self._tokens, self._bad
        )
        counts = np.maximum(tokens, 1)[:, :, None]
        bad_units = tuple(int(u) for u in np.flatnonzero(bad))
        return Diagonals(sketches / counts, sums / counts, tokens, bad_units)


def conclude(
    measuring: Measuring, probed: Probed, squares: Squares, diagonals: Diagonals
) -> Influence:
    """Return S of the whole and of the halves."""
    sketches, means, bad = squares.collect()
    bad_units = {*diagonals.bad_units, *(int(u) for u in np.flatnonzero(bad))}
    if bad_units:
        return measuring.refuse(probed, sorted(bad_units))
    factors = measuring.clip_factors(probed.norms)
    measured = [half for half in (0, 1) if diagonals.tokens[half].any()]

    def advantage(half: int | None) -> np.ndarray:
        chosen = measured if half is None else [half]
        tokens = diagonals.tokens[chosen]
        curvature = weighted_mean(diagonals.sketches[chosen], tokens)  # (L, k)
        sums = weighted_mean(diagonals.sums[chosen], tokens)  # (L, T)
        place = WHOLE if half is None else half
        quadratic = sketches[place] @ curvature.T + means[place] @ sums.T
        gram = gram_of(probed.of(half, probed.sketches))
        return advantage_of(gram, quadratic, factors, measuring.step.gamma)

    gram = gram_of(probed.of(None, probed.sketches))
    halves = (advantage(0), advantage(1)) if measured == [0, 1] else None
    return measuring.answer(probed, gram, advantage(None), halves)
