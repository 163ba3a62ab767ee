"""Gauss-Newton-Bartlett: the diagonal of the Gauss-Newton matrix from labels the model draws.

h_j = B g' * g', g' the gradient of the mean loss over B tokens whose labels are drawn from the
model's own prediction. Tokens are then independent with mean 0, so that E[g' g'^T] = G / B with G
the Gauss-Newton matrix of the mean loss: hence the factor B. Labels are drawn anew for each unit,
half and one of `probes` draws; with the unit's own labels S would be 0 (see `fisher.py`).

Cost: 1 + probes * m / n gradients a unit, m of the n probe sequences for curvature.
Memory: one extra vector.

Split halves: the sequences, each with its own labels. The whole is the token-weighted mean of both
halves' estimates, which has half the noise of one draw over all tokens.

Source: Liu et al. 2023 (Sophia, "Sophia-G", algorithm 2); an ablation of arXiv 2605.31164 (D^3).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_d3.influence.estimators.diagonal import (
    Diagonals,
    DiagonalTable,
    Squares,
    conclude,
)
from megatron_d3.influence.estimators.measuring import Measuring
from megatron_d3.influence.estimators.pieces import cut_halves
from megatron_d3.influence.settings import D3Config
from megatron_d3.influence.source import GradientSource, Influence, StepModel

if TYPE_CHECKING:
    from megatron_d3.influence.sketch import Sketch


def estimate(
    source: GradientSource, sketch: Sketch, settings: D3Config, step: StepModel
) -> Influence:
    """Return S by the diagonal of the Gauss-Newton matrix; see the module."""
    measuring = Measuring(source, sketch, settings, step)
    pieces = cut_halves(source.num_sequences, source.num_sequences)
    squares = Squares(measuring, pieces)
    probed = measuring.probe(pieces, on_piece=squares.on_piece, on_unit=squares.on_unit)
    if probed.bad_units:
        return measuring.refuse(probed)
    return conclude(measuring, probed, squares, _diagonals(measuring))


def _diagonals(measuring: Measuring) -> Diagonals:
    """Measure B g' * g' of each unit and half."""
    source, probes = measuring.source, measuring.settings.probes
    table = DiagonalTable(measuring)
    for unit in measuring.own_units:
        for piece in cut_halves(source.num_sequences, measuring.num_curved):
            for key in range(probes if piece.is_curved else 0):
                loss = measuring.gradient(unit, piece.start, piece.stop, sample_key=key)
                if key == 0:
                    table.note_tokens(piece, unit, loss)
                table.add(piece, unit, loss, measuring.squares, loss.num_tokens / probes)
    return table.collect()
