"""Projected curvature: each unit's Hessian along the window's main gradient directions.

Gradients lie in few directions of high curvature, where a Hessian's diagonal holds next to nothing
of g^T H g. So H_j is measured along an orthonormal basis P (d x r) of the window's gradients, by r
forward differences of gradients a unit, and `algebra.projected_quadratic` does the rest from
sketches: neither a gradient nor a product H_j P is stored. R (grad_j(theta + eps P) - grad_j(theta))
is the difference of two sketches.

    basis      P                                                          gradients a unit
    principal  the r main eigenvectors of the (sketched) Gram matrix;     1 + (1 + r) m / n
               one pass more, over the curvature sequences, forms them
    mean       the window's mean gradient; r = 1                          1 + m / n

The mean of units that differ is not what most of them have in common: on a small GPT and units of one
domain each, all sequences measured, two principal directions had a regret of 0.04, one of 0.17, the mean
of 0.57 (`benchmarks/d3/probe_sequences.py`).

m of the n probe sequences are used for curvature. Memory: r extra vectors, and
none for the weights while they are displaced.
Between data-parallel groups go r directions a window. All of it is linear in sequences,
so that groups may share a unit, down to a sequence each: `deal.py`.

Split halves: gradients and curvature of the two halves of the sequences; P is common to both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from megatron_d3.errors import ProbeError
from megatron_d3.influence.estimators.algebra import advantage_of, gram_of, projected_quadratic
from megatron_d3.influence.estimators.deal import deal
from megatron_d3.influence.estimators.linear import add_up, probe
from megatron_d3.influence.estimators.measuring import ALONG_GRADIENTS, Measuring, add, scale
from megatron_d3.influence.estimators.pieces import Probed, cut_halves, places
from megatron_d3.influence.settings import D3Config
from megatron_d3.influence.source import GradientSource, Influence, Loss, StepModel

if TYPE_CHECKING:
    from megatron_d3.influence.sketch import Sketch
    from megatron_d3.influence.source import Vector

_RANK_TOLERANCE = 1e-9
"""Eigenvalues of the Gram matrix below this share of the largest are rounding."""


def estimate(
    source: GradientSource, sketch: Sketch, settings: D3Config, step: StepModel
) -> Influence:
    """Return S by curvature along the mean gradient or principal directions; see the module."""
    measuring = Measuring(source, sketch, settings, step)
    is_mean = settings.basis == "mean"
    total = source.new_vector() if is_mean else []

    def add_to_total(unit: int, loss: Loss) -> None:
        gradient = measuring.whitened(source.gradients)
        add(total, gradient, loss.num_tokens, is_first=False)

    pieces = cut_halves(source.num_sequences, measuring.num_curved)
    probed = probe(measuring, pieces, on_gradient=add_to_total if is_mean else None)
    if probed.bad_units:
        return measuring.refuse(probed)
    if is_mean:
        with measuring.timed("reduce"):
            source.sum_over_groups(total)
        directions = _orthonormal(source, [total])
    else:
        directions = _orthonormal(source, _principal(measuring, probed))
    basis = np.array([measuring.sketch(d) for d in directions]).reshape(-1, measuring.dim)
    basis = measuring.group_sum(basis)  # (r, k)
    products, bad_units = _products(measuring, probed, directions)
    if bad_units:
        return measuring.refuse(probed, bad_units)
    return _conclude(measuring, probed, products, basis)


def _principal(measuring: Measuring, probed: Probed) -> list[Vector]:
    """Return the window's main r directions: sums of its gradients, by one pass more.

    The sums are of gradients of the curvature sequences: S needs directions near the main ones, no more.
    """
    gram = gram_of(probed.of(None, probed.sketches))
    values, vectors = (a[..., ::-1] for a in np.linalg.eigh(gram))  # descending
    weights = np.where(values > _RANK_TOLERANCE * max(values[0], 0.0), vectors, 0.0)
    # Signs and last digits are the machine's own, and the groups must add up the same sums.
    weights = measuring.source.from_rank_0(weights[:, :measuring.settings.num_directions])
    weights = weights[:, weights.any(axis=0)]  # (L, r)
    num_directions = weights.shape[1]
    source = measuring.source
    tokens = probed.tokens[places(probed.pieces, only_curved=True)].sum(axis=0)  # (L,)
    directions: list[Vector] = [source.new_vector() for _ in range(num_directions)]
    parts = deal(
        probed.pieces, source.num_units, source.group, source.num_groups, only_curved=True)
    for part in parts if directions else ():
        loss = measuring.gradient(part.unit, part.start, part.stop)
        factors = weights[part.unit] * (loss.num_tokens / tokens[part.unit])  # (r,)
        for direction, factor in zip(directions, factors, strict=True):
            add(direction, measuring.whitened(source.gradients), float(factor), is_first=False)
    with measuring.timed("reduce"):
        for direction in directions:
            source.sum_over_groups(direction)
    return directions


def _orthonormal(source: GradientSource, vectors: list[Vector]) -> list[Vector]:
    """Make vectors orthonormal in place (Gram-Schmidt) and drop those that others span."""
    kept: list[Vector] = []
    for vector in vectors:
        before = source.dot(vector, vector)
        for other in kept:
            add(vector, other, -source.dot(vector, other), is_first=False)
        # Whether a direction is left is for all ranks to agree on; none is where all gradients are 0.
        square, before = source.from_rank_0(np.array([source.dot(vector, vector), before]))
        if square > _RANK_TOLERANCE * before:
            scale(vector, float(square**-0.5))
            kept.append(vector)
    return kept


def _products(
    measuring: Measuring, probed: Probed, directions: list[Vector]
) -> tuple[np.ndarray, tuple[int, ...]]:
    """Return sketches of H_j P by forward differences, and the units that gave no number.

    The displacement is P^(1/2) d in the weights, and its gradients are multiplied by P^(1/2), so
    that the product is that of the whitened Hessian. Weights of low precision are displaced by a
    multiple of what was asked, plus rounding that has nothing to do with gradients: the multiple
    is taken out.

    Returns:
        (r, P, L, k), 0 for pieces that are not curved; directions are overwritten.
    """
    source = measuring.source
    curved = places(probed.pieces, only_curved=True)
    shape = (len(directions), len(curved), measuring.num_units, measuring.dim)
    moved, bad = np.zeros(shape), np.zeros(measuring.num_units)
    lengths = np.zeros(len(directions))
    for number, direction in enumerate(directions):
        if measuring.root is not None:
            for tensor, root in zip(direction, measuring.root, strict=True):
                tensor.mul_(root)
        square = source.dot(direction, direction)
        size = measuring.length_along(square**0.5)
        with source.moved_along(direction, size) as along:
            lengths[number] = along / square
            sums = add_up(measuring, probed.pieces, only_curved=True)
            moved[number] = sums.sketches[curved]
            bad += sums.bad
    share = np.array(measuring.share)
    moved, bad, lengths, num_groups = measuring.all_sum(moved, bad, lengths * share, share)
    lengths = lengths / num_groups  # the same on every rank, to the last bit
    if not (lengths > 0).all():
        raise ProbeError(
            f"d3.order.difference: {measuring.difference(ALONG_GRADIENTS):g} of the weights' norm does not move "
            "weights of this precision; choose a larger one"
        )
    moved /= probed.tokens[curved, :, None]
    products = np.zeros((len(directions), *probed.sketches.shape))
    products[:, curved] = (moved - probed.sketches[curved]) / lengths[:, None, None, None]
    return products, tuple(int(u) for u in np.flatnonzero(bad))


def _conclude(
    measuring: Measuring, probed: Probed, products: np.ndarray, basis: np.ndarray
) -> Influence:
    """Return S of the whole and of the halves from sketches (P, L, k) and (r, P, L, k)."""
    factors = measuring.clip_factors(probed.norms)

    def advantage(half: int | None) -> np.ndarray:
        gradients = probed.of(half, probed.sketches)  # (L, k)
        curved = (
            np.stack([probed.curved_mean(half, h) for h in products])
            if len(products)
            else (np.zeros((0, *gradients.shape)))
        )  # (r, L, k)
        quadratic = projected_quadratic(gradients, curved, basis)
        return advantage_of(gram_of(gradients), quadratic, factors, measuring.step.gamma)

    halves = (advantage(0), advantage(1)) if probed.has_halves else None
    gram = gram_of(probed.of(None, probed.sketches))
    return measuring.answer(probed, gram, advantage(None), halves)
