"""Estimators of the advantage S of a window, one a file, each with its cost and what it splits.

    estimator            measures of each unit                         gradients a unit (n = m)
    projected            H_j along the window's main directions        2 + r; 2 (mean)
    hutchinson_diagonal  diag(H_j) by random probes: the paper's       1 + 2 probes
    gnb_diagonal         diag of Gauss-Newton by drawn labels          1 + draws
    fisher               squared gradients of single sequences         1, sequence by sequence
    shared_hessian       one diagonal for all: an ablation             1 + 2 probes
    look_ahead           losses of all after its step                  1, and L forwards
    look_ahead_even      the same, even in the step                    1, and 2 L forwards
    exact                g_i^T H_j g_i of every pair                   1 + 2 L

Each is a function (source, sketch, settings, step) -> Influence, found by the name of the setting
`estimator`. `measuring.py` holds the passes over units, `algebra.py` and `diagonal.py` the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron_d3.influence.estimators import (
    exact,
    fisher,
    gnb_diagonal,
    hutchinson_diagonal,
    look_ahead,
    projected,
    shared_hessian,
)
from megatron_d3.influence.settings import D3Config
from megatron_d3.influence.source import GradientSource, Influence, StepModel

if TYPE_CHECKING:
    from megatron_d3.influence.sketch import Sketch

    Estimator = Callable[[GradientSource, Sketch, D3Config, StepModel], Influence]

ESTIMATORS: dict[str, Estimator] = {
    "projected": projected.estimate,
    "hutchinson_diagonal": hutchinson_diagonal.estimate,
    "gnb_diagonal": gnb_diagonal.estimate,
    "fisher": fisher.estimate,
    "shared_hessian": shared_hessian.estimate,
    "look_ahead": look_ahead.estimate,
    "look_ahead_even": look_ahead.estimate_even,
    "exact": exact.estimate,
}


def estimate(
    source: GradientSource, sketch: Sketch, settings: D3Config, step: StepModel
) -> Influence:
    """Return what the estimator of the settings finds about a window.

    Args:
        source: the model and the window; every rank calls with its own.
        sketch: of `source.layout`.
        settings: `estimator` and its options.
        step: the training step whose influence is measured.

    Raises:
        ProbeError: the step needs a root that the optimizer has not, or the weights are too coarse
            for the size of the differences.
    """
    return ESTIMATORS[settings.estimator](source, sketch, settings, step)
