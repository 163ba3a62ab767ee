"""The paper's estimator: the diagonal of each unit's Hessian by Hutchinson's random probes.

h_j = E[z * (H_j z)], z of random signs, which the whole window shares (common random numbers: what
the probe's noise has in common cancels between units). H_j z by central differences of gradients;
a second backward pass would be silently wrong where a custom autograd function drops second
derivatives, as Megatron's do. Each parameter is displaced in proportion to its root mean square.

The signs are multiplied in before the sketch, so that nothing is stored:
R h_j = (R (z * g_j(theta + eps z)) - R (z * g_j(theta - eps z))) / (2 eps).

Cost: 1 + 2 * probes * m / n gradients a unit, m of the n probe sequences for curvature.
Memory: one extra vector.

Split halves: sequences and probes both; each half of the sequences has its own probes, at no
additional cost, so that the halves agree no better than two independent measurements do. The whole,
the mean of both, has the noise of 2 * probes probes.

Source: arXiv 2605.31164 (D^3); Hutchinson 1990; Liu et al. 2023 (Sophia, "Sophia-H", section 2.3),
which takes double backward. Known difference: the paper does not say how g^T H g is computed from
sketches; here by `diagonal.py`. With `step: optimizer` h is multiplied by P, the signs stay those
of the plain coordinates, where every weight moves by a like share of its size.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch

from megatron_d3.influence.estimators.diagonal import (
    Diagonals,
    DiagonalTable,
    Squares,
    conclude,
)
from megatron_d3.influence.estimators.measuring import ALONG_SIGNS, Measuring
from megatron_d3.influence.estimators.pieces import Piece, cut_halves
from megatron_d3.influence.settings import D3Config
from megatron_d3.influence.source import GradientSource, Influence, StepModel

if TYPE_CHECKING:
    from megatron_d3.influence.sketch import Sketch
    from megatron_d3.influence.source import Vector


def estimate(
    source: GradientSource, sketch: Sketch, settings: D3Config, step: StepModel
) -> Influence:
    """Return S by Hutchinson's diagonal; see the module."""
    return estimate_diagonal(source, sketch, settings, step, is_shared=False)


def estimate_diagonal(
    source: GradientSource, sketch: Sketch, settings: D3Config, step: StepModel, *, is_shared: bool
) -> Influence:
    """Return S by each unit's diagonal, or by their mean for all units."""
    measuring = Measuring(source, sketch, settings, step)
    pieces = cut_halves(source.num_sequences, source.num_sequences)
    squares = Squares(measuring, pieces)
    probed = measuring.probe(pieces, on_piece=squares.on_piece, on_unit=squares.on_unit)
    if probed.bad_units:
        return measuring.refuse(probed)
    diagonals = _diagonals(measuring)
    return conclude(measuring, probed, squares, diagonals.shared() if is_shared else diagonals)


def _diagonals(measuring: Measuring) -> Diagonals:
    """Measure z * (H z) of each unit and half."""
    table = DiagonalTable(measuring)
    curved = [
        piece
        for piece in cut_halves(measuring.source.num_sequences, measuring.num_curved)
        if piece.is_curved
    ]
    for probe in range(measuring.settings.probes):
        for piece in curved:
            for sign in (1, -1):
                _add_displaced(measuring, table, piece, probe, sign)
    return table.collect()


def _add_displaced(
    measuring: Measuring, table: DiagonalTable, piece: Piece, probe: int, sign: int
) -> None:
    """Add one of the two terms of the central difference, for all own units."""
    source, probes = measuring.source, measuring.settings.probes
    scales = source.tensor_scales()
    size = sign * measuring.difference(ALONG_SIGNS)

    def direction() -> Iterable[torch.Tensor]:
        signs = source.rademacher(2 * probe + piece.half)
        return (z * s for z, s in zip(signs, scales, strict=True))

    with source.displaced(direction, size) as applied:
        for unit in measuring.own_units:
            loss = measuring.gradient(unit, piece.start, piece.stop)
            if probe == 0 and sign == 1:
                table.note_tokens(piece, unit, loss)
            diagonal = partial(_flipped, measuring, applied, scales)
            table.add(piece, unit, loss, diagonal, 1 / (2 * size * probes))


def _flipped(
    measuring: Measuring, applied: Vector, scales: Iterable[float]
) -> Iterable[torch.Tensor]:
    """Yield z * gradient over the scale of the displacement, times P.

    NOTE: the signs are read off the displacement instead of being drawn again. Only its signs: its
    rounding differs between the two terms of a difference and would be divided by its size.
    """
    gradient = measuring.whitened(measuring.whitened(measuring.source.gradients))
    return (g * a.sign().div_(s) for g, a, s in zip(gradient, applied, scales, strict=True))
