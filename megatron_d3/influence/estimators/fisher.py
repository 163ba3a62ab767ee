"""Empirical Fisher: the diagonal of each unit's curvature from squared gradients of its sequences.

h_j = mean over sequences n of t g_jn * g_jn, t the tokens of a sequence. Per sequence, because the
unit's own gradient makes a trap of it: with h_j = g_j * g_j (or the matrix g_j g_j^T) Q is
symmetric and S identically 0. So it is with a single probe sequence.

Cost: 1 gradient a unit, but in n passes of one sequence each. Memory: two extra vectors.

Split halves: the sequences.

Source: an ablation of arXiv 2605.31164 (D^3). Known difference: the factor t, the same as for
Gauss-Newton, gives the scale of a Hessian of the mean token loss. It matters only beside a
first-order part, from clipping.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_d3.influence.estimators.diagonal import DiagonalTable, Squares, conclude
from megatron_d3.influence.estimators.measuring import Measuring
from megatron_d3.influence.estimators.pieces import cut_halves
from megatron_d3.influence.settings import D3Config
from megatron_d3.influence.source import GradientSource, Influence, Loss, StepModel

if TYPE_CHECKING:
    from megatron_d3.influence.sketch import Sketch


def estimate(
    source: GradientSource, sketch: Sketch, settings: D3Config, step: StepModel
) -> Influence:
    """Return S by the empirical Fisher diagonal; see the module."""
    measuring = Measuring(source, sketch, settings, step)
    pieces = tuple(
        replace(piece, start=n, stop=n + 1)
        for piece in cut_halves(source.num_sequences, measuring.num_curved)
        for n in range(piece.start, piece.stop)
    )
    squares, table = Squares(measuring, pieces), DiagonalTable(measuring)

    def on_piece(unit: int, index: int, loss: Loss) -> None:
        if pieces[index].is_curved:
            table.note_tokens(pieces[index], unit, loss)
            table.add(pieces[index], unit, loss, measuring.squares, loss.num_tokens)
        squares.on_piece(unit, index, loss)

    probed = measuring.probe(pieces, on_piece=on_piece, on_unit=squares.on_unit)
    if probed.bad_units:
        return measuring.refuse(probed)
    return conclude(measuring, probed, squares, table.collect())
