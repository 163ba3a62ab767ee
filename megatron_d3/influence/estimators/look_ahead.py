"""Look-ahead: the definition. Step along each unit, read the others' losses, step back exactly.

I_ij = l_j(theta - step_i) - l_j(theta). No expansion, so it holds for large steps; but the
first-order part, which cancels in S, is measured twice with the noise of the sub-sample, and
swamps what is left unless most of a unit's sequences are used.

`look_ahead_even` takes the part even in the step,
(l_j(theta - step_i) + l_j(theta + step_i) - 2 l_j(theta)) / 2, in which the first order cancels
before it can do harm. What clipping leaves of it, gamma (c_i - c_j) g_i.g_j, comes from sketches.

Cost: 1 gradient and 1 + (L - 1) m / n forwards a unit, twice as many forwards for the even part, m
of the n probe sequences for the losses. A data-parallel group steps along its own units only, so
that nothing but losses crosses groups. Memory: none beyond the saved weights.

Split halves: the sequences whose losses are read. The steps are common to both halves, so that
their noise does not count against reliability, and the token-weighted mean of both halves is S.

Source: the definition of arXiv 2605.31164 (D^3).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from megatron_d3.influence.estimators.algebra import advantage_of, gram_of
from megatron_d3.influence.estimators.measuring import Measuring, is_usable
from megatron_d3.influence.estimators.pieces import Piece, cut_halves
from megatron_d3.influence.settings import D3Config
from megatron_d3.influence.source import GradientSource, Influence, Loss, StepModel

if TYPE_CHECKING:
    from megatron_d3.influence.sketch import Sketch
    from megatron_d3.influence.source import Vector


def estimate(
    source: GradientSource, sketch: Sketch, settings: D3Config, step: StepModel
) -> Influence:
    """Return S by looking one step ahead; see the module."""
    return _estimate(source, sketch, settings, step, signs=(1,))


def estimate_even(
    source: GradientSource, sketch: Sketch, settings: D3Config, step: StepModel
) -> Influence:
    """Return S by the part of the look-ahead that is even in the step; see the module."""
    return _estimate(source, sketch, settings, step, signs=(1, -1))


def _estimate(
    source: GradientSource,
    sketch: Sketch,
    settings: D3Config,
    step: StepModel,
    *,
    signs: tuple[int, ...],
) -> Influence:
    measuring = Measuring(source, sketch, settings, step)
    table = _Losses(measuring, signs)
    whole = Piece(0, 0, source.num_sequences, True)
    probed = measuring.probe([whole], on_unit=table.look_ahead)
    ahead, before, tokens, bad_units = table.collect()
    if probed.bad_units:  # they spoil what the others' steps do to them
        return measuring.refuse(probed)
    if bad_units:
        return measuring.refuse(probed, bad_units)
    gram = gram_of(probed.of(None, probed.sketches))
    first = np.zeros_like(gram)
    if len(signs) == 2:  # the even part has lost it
        factors = measuring.clip_factors(probed.norms)
        first = advantage_of(gram, np.zeros_like(gram), factors, step.gamma)
    influence = ahead - before[:, None, :]  # (P, L, L)

    def advantage(chosen: list[int]) -> np.ndarray:
        weighted = influence[chosen] * tokens[chosen][:, None, :]
        mean = weighted.sum(axis=0) / tokens[chosen].sum(axis=0)
        np.fill_diagonal(mean, 0)
        return first + mean.T - mean

    places = {piece.half: [p] for p, piece in enumerate(table.pieces)}
    halves = (advantage(places[0]), advantage(places[1])) if len(places) == 2 else None
    return measuring.answer(probed, gram, advantage(list(range(len(table.pieces)))), halves)


class _Losses:
    """Losses of all units at the weights as they are and after each unit's step.

    Args:
        measuring: of the window.
        signs: of the steps; losses are averaged over them.
    """

    def __init__(self, measuring: Measuring, signs: tuple[int, ...]) -> None:
        self._measuring = measuring
        self._signs = signs
        halves = cut_halves(measuring.source.num_sequences, measuring.num_curved)
        self.pieces = [piece for piece in halves if piece.is_curved]
        shape = (len(self.pieces), measuring.num_units)
        self._ahead = np.zeros((*shape, measuring.num_units))  # (P, L of the step, L of the loss)
        self._before = np.zeros(shape)
        self._tokens = np.zeros(shape)
        self._bad = np.zeros(measuring.num_units)

    def look_ahead(self, unit: int, gradient: Vector) -> None:
        """Measure a unit's own losses, and those of the others after its step."""
        measuring, source = self._measuring, self._measuring.source
        for index in range(len(self.pieces)):
            loss = self._loss(unit, index, culprit=unit)
            self._before[index, unit] = loss.mean * measuring.share
            self._tokens[index, unit] = loss.num_tokens * measuring.share
        norm = np.array(source.dot(gradient, gradient) ** 0.5)
        step_size = measuring.step.gamma * float(measuring.clip_factors(norm))
        weight = measuring.share / len(self._signs)
        for sign in self._signs:
            with source.displaced(measuring.stepwise(gradient), -sign * step_size):
                for other in range(measuring.num_units):
                    for index in range(len(self.pieces) if other != unit else 0):
                        loss = self._loss(other, index, culprit=unit)
                        self._ahead[index, unit, other] += loss.mean * weight

    def _loss(self, unit: int, index: int, *, culprit: int) -> Loss:
        """Return a loss; where it is no number, note whose step or data made it so."""
        piece = self.pieces[index]
        loss = self._measuring.loss(unit, piece.start, piece.stop)
        if is_usable(loss):
            return loss
        self._bad[culprit] = 1
        return Loss(0.0, 1)

    def collect(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[int, ...]]:
        """Return losses after steps (P, L, L) and before (P, L), tokens (P, L), bad units."""
        ahead, before, tokens, bad = self._measuring.all_sum(
            self._ahead, self._before, self._tokens, self._bad
        )
        return ahead, before, tokens, tuple(int(u) for u in np.flatnonzero(bad))
