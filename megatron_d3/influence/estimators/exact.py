"""The whole second order: Q_ij = g_i^T H_j g_i for every pair. An oracle, and for small models.

The Hessian acts through central differences along each unit's step direction u_i = P g_i,
(u_i.g_j(theta + eps u_i) - u_i.g_j(theta - eps u_i)) / (2 eps): numbers only, no sketch and no
stored gradient. The mean of the two terms is g_i.g_j, so that the Gram matrix is exact as well.

Cost: 1 + 2 L m / n gradients a unit, m of the n probe sequences for g_j and H_j. A data-parallel
group differentiates along its own units only. Memory: one extra vector.

Split halves: the sequences of g_j and H_j. The directions are common to both halves, so that their
noise does not count against reliability, and the token-weighted mean of both halves is S (without
clipping).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from megatron_d3.influence.estimators.algebra import advantage_of
from megatron_d3.influence.estimators.measuring import Measuring, is_usable
from megatron_d3.influence.estimators.pieces import Piece, cut_halves
from megatron_d3.influence.settings import D3Config
from megatron_d3.influence.source import GradientSource, Influence, StepModel

if TYPE_CHECKING:
    from megatron_d3.influence.sketch import Sketch
    from megatron_d3.influence.source import Vector


def estimate(
    source: GradientSource, sketch: Sketch, settings: D3Config, step: StepModel
) -> Influence:
    """Return S by the full second order; see the module. The sketch is not used for S."""
    measuring = Measuring(source, sketch, settings, step)
    halves = cut_halves(source.num_sequences, measuring.num_curved)
    pieces = [piece for piece in halves if piece.is_curved]
    num_units = measuring.num_units
    quadratic = np.zeros((len(pieces), num_units, num_units))  # (P, L of g_i, L of H_j)
    products = np.zeros_like(quadratic)
    tokens = np.zeros((len(pieces), num_units))
    bad = np.zeros(num_units)

    def differentiate(unit: int, gradient: Vector) -> None:
        if measuring.root is not None:
            for tensor, root in zip(gradient, measuring.root, strict=True):
                tensor.mul_(root).mul_(root)
        norm = source.dot(gradient, gradient) ** 0.5
        # A direction of zeros goes nowhere, but its unit's tokens are counted all the same.
        size = measuring.length_along(norm) if norm > 0 else 1.0
        for sign in (1, -1):
            with source.displaced(gradient, sign * size):
                for other in range(num_units):
                    for p, piece in enumerate(pieces):
                        loss = measuring.gradient(other, piece.start, piece.stop)
                        slope = source.dot(source.gradients, gradient) * measuring.share
                        if not (is_usable(loss) and np.isfinite(slope)):
                            bad[unit] = 1
                            continue
                        quadratic[p, unit, other] += sign * slope / (2 * size)
                        products[p, unit, other] += slope / 2
                        if sign == 1 and other == unit:
                            tokens[p, unit] = loss.num_tokens * measuring.share

    whole = Piece(0, 0, source.num_sequences, True)
    probed = measuring.probe([whole], on_unit=differentiate)
    quadratic, products, tokens, bad = measuring.all_sum(quadratic, products, tokens, bad)
    bad_units = tuple(int(u) for u in np.flatnonzero(bad))
    if probed.bad_units:  # they spoil what the others' steps do to them
        return measuring.refuse(probed)
    if bad_units:
        return measuring.refuse(probed, bad_units)
    factors = measuring.clip_factors(probed.norms)

    def mean(chosen: list[int], values: np.ndarray) -> np.ndarray:
        """Return the mean over pieces of (P, L, L), weighted by the tokens of j."""
        weights = tokens[chosen][:, None, :]
        return np.sum(values[chosen] * weights, axis=0) / weights.sum(axis=0)

    def advantage(chosen: list[int]) -> tuple[np.ndarray, np.ndarray]:
        gram = mean(chosen, products)
        gram = (gram + gram.T) / 2
        return gram, advantage_of(gram, mean(chosen, quadratic), factors, step.gamma)

    gram, whole_advantage = advantage(list(range(len(pieces))))
    split = (advantage([0])[1], advantage([1])[1]) if len(pieces) == 2 else None
    return measuring.answer(probed, gram, whole_advantage, split)
