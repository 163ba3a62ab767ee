"""Passes of which only sums over sequences leave a group, so that groups may share a unit: `deal.py`.

No rank then has a unit's whole gradient. Its norm is therefore that of its sketch, also where one
group measures the whole unit, so that every layout clips alike: unbiased in its square, off by about
1 / sqrt(2 k), 1.2 % for k = 3500. Measured on a 60,000-parameter GPT, 16 units that are all clipped,
this brings the error of S from sketching to 6.7-15.9 % where exact norms left 6.3-14.9 %; with
k = 500 to 18-43 % from 9-41 %. (Norms of 8 sequences were 0.9 to 2.0 times those of 64 there.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_d3.influence.estimators.deal import deal
from megatron_d3.influence.estimators.measuring import Measuring
from megatron_d3.influence.estimators.pieces import Piece, Probed, places
from megatron_d3.influence.source import Loss


@dataclass(frozen=True)
class Sums:
    """Of a pass, over the sequences of this rank; 0 for what other groups measure.

    Attributes:
        sketches: (P, L, k) of (whitened) gradients times tokens.
        losses: (P, L) sums over tokens.
        tokens: (P, L).
        bad: (L,) 1 where a unit gave what is no number: it is in none of the sums.
    """

    sketches: np.ndarray
    losses: np.ndarray
    tokens: np.ndarray
    bad: np.ndarray


def add_up(
    measuring: Measuring,
    pieces: Sequence[Piece],
    *,
    only_curved: bool = False,
    on_gradient: Callable[[int, Loss], None] | None = None,
) -> Sums:
    """Measure and sketch this group's share of the units' gradients at the weights as they are.

    Args:
        measuring: of the window.
        pieces: of each unit; the sums are by piece.
        only_curved: see :func:`deal`; the sums of other pieces are 0.
        on_gradient: called with (unit, loss) while `source.gradients` holds the finite gradient of a
            range of its sequences.
    """
    source = measuring.source
    shape = (len(pieces), measuring.num_units)
    sums = Sums(
        np.zeros((*shape, measuring.dim)), np.zeros(shape), np.zeros(shape), np.zeros(shape[1])
    )
    parts = deal(pieces, shape[1], source.group, source.num_groups, only_curved=only_curved)
    for part in parts:
        loss = measuring.gradient(part.unit, part.start, part.stop)
        sketch = measuring.sketch(measuring.whitened(source.gradients))
        if not (np.isfinite(loss.mean) and np.isfinite(sketch).all()):
            sums.bad[part.unit] = 1  # nothing that is not a number goes into the sum over ranks
            continue
        place = part.piece, part.unit
        sums.sketches[place] += loss.num_tokens * sketch
        sums.losses[place] += loss.num_tokens * loss.mean * measuring.share
        sums.tokens[place] += loss.num_tokens * measuring.share
        if on_gradient is not None:
            on_gradient(part.unit, loss)
    return sums


def probe(
    measuring: Measuring,
    pieces: Sequence[Piece],
    *,
    on_gradient: Callable[[int, Loss], None] | None = None,
) -> Probed:
    """Measure and sketch the gradients of all units, as `Measuring.probe` does, on shared units.

    Cost: 1 gradient a unit, and with the optimizer's root a second sketch, of the plain gradient.

    Args:
        measuring: of the window.
        pieces: ranges that together hold each probe sequence once, by half.
        on_gradient: see :func:`add_up`.
    """
    is_scaled = measuring.root is not None
    plain = np.zeros((measuring.num_units if is_scaled else 0, measuring.dim))

    def on_range(unit: int, loss: Loss) -> None:
        if is_scaled:
            plain[unit] += loss.num_tokens * measuring.sketch(measuring.source.gradients)
        if on_gradient is not None:
            on_gradient(unit, loss)

    own = add_up(measuring, pieces, on_gradient=on_range)
    sketches, losses, tokens, bad, plain = measuring.all_sum(
        own.sketches, own.losses, own.tokens, own.bad, plain
    )
    if not is_scaled:
        plain = sketches.sum(axis=0)
    with np.errstate(over="ignore"):  # a number too large to be squared is none
        norms = np.linalg.norm(plain, axis=1) / np.maximum(tokens.sum(axis=0), 1)
    is_bad = (bad > 0) | _lacks_tokens(pieces, tokens) | ~np.isfinite(norms)  # (L,)
    counts = np.maximum(tokens, 1)
    return Probed(
        pieces=tuple(pieces),
        sketches=np.where(is_bad[:, None], 0, sketches / counts[..., None]),
        tokens=tokens,
        losses=np.where(is_bad, 0, losses / counts),
        norms=np.where(is_bad, 0, norms),
        bad_units=tuple(int(u) for u in np.flatnonzero(is_bad)),
    )


def _lacks_tokens(pieces: Sequence[Piece], tokens: np.ndarray) -> np.ndarray:
    """Return (L,) whether a half of a unit, or its part for curvature, has no tokens to take means of."""
    lacks = np.zeros(tokens.shape[1], bool)
    for half in {piece.half for piece in pieces}:
        for only_curved in (False, True):
            chosen = places(pieces, half, only_curved=only_curved)
            if chosen:
                lacks |= tokens[chosen].sum(axis=0) == 0
    return lacks
