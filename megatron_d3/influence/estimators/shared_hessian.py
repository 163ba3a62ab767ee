"""Ablation: one Hessian diagonal for the whole window, the mean of all units' Hutchinson diagonals.

Q_ij = sum of g_i^2 h no longer depends on j, so that S_ij = gamma^2 / 2 (Q_j - Q_i): rank 2, no
cycles, and sorting by one number a unit is optimal. It shows what per-unit curvature adds: without
it D3 is a curriculum by a scalar. (Unequal factors of clipping add a first-order part.)

Cost, memory and split halves: those of `hutchinson_diagonal.py`.

Source: ablation of arXiv 2605.31164 (D^3).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_d3.influence.estimators.hutchinson_diagonal import estimate_diagonal
from megatron_d3.influence.settings import D3Config
from megatron_d3.influence.source import GradientSource, Influence, StepModel

if TYPE_CHECKING:
    from megatron_d3.influence.sketch import Sketch


def estimate(
    source: GradientSource, sketch: Sketch, settings: D3Config, step: StepModel
) -> Influence:
    """Return S by the window's mean diagonal; see the module."""
    return estimate_diagonal(source, sketch, settings, step, is_shared=True)
