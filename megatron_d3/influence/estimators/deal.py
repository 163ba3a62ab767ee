"""Which data-parallel group measures which sequences, where a unit may be shared by several groups.

What is linear in sequences may be measured range by range on any rank and added up. The pieces of all
units are cut in ranges, unit by unit, and each group gets as many successive ranges as the others,
give or take one. With few groups a range is a whole piece; with more than units, pieces are cut:

    L units of n = 8 sequences, in two pieces of 4     ranges of    sequences of the busiest group
    D = L / 2 groups                                   4            16
    D = L                                              4            8
    D = 2 L                                            4            4
    D = 4 L                                            2            2
    D = 8 L and more                                   1            1

All of it depends on numbers that every rank knows, so that nothing need be agreed upon. A pass over some
of the pieces only takes their ranges as all pieces together are cut, and deals them anew: what is measured
twice, to take the difference, is then measured in the same calls, whose micro-batches a model may depend
on (a router that drops tokens).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megatron_d3.influence.estimators.pieces import Piece

CALL_SEQUENCES = 1
"""What a call takes besides its sequences, in sequences: a sketch, and what a small pass costs at all.
Measured on a CPU, with a model of 0.4 M parameters and sequences of 64 tokens: 2 (9.5 ms with one
sequence, 19.1 with four). It falls as models and sequences grow."""


_Range = tuple[int, int, int]  # piece, start, stop


@dataclass(frozen=True)
class Part:
    """A range of a unit's probe sequences that one group measures in one call.

    Attributes:
        unit: in [0, L).
        piece: index of the piece that it is a part of.
        start: first probe sequence.
        stop: one past the last.
    """

    unit: int
    piece: int
    start: int
    stop: int


def deal(
    pieces: Sequence[Piece], num_units: int, group: int, num_groups: int, *, only_curved: bool = False
) -> tuple[Part, ...]:
    """Return what a group measures of L units, maybe nothing; all groups together: everything once.

    Pieces are cut in equal ranges (to one sequence) so that the busiest group is done soonest;
    among equals, with the fewest sequences, then in the fewest ranges.

    Args:
        pieces: of every unit.
        num_units: L.
        group: whose share is returned.
        num_groups: D.
        only_curved: leave out the pieces that are not for curvature; the others are cut as if all
            were measured.

    >>> halves = [Piece(0, 0, 2, True), Piece(1, 2, 4, True)]
    >>> [(p.unit, p.start, p.stop) for p in deal(halves, 2, group=0, num_groups=1)]
    [(0, 0, 2), (0, 2, 4), (1, 0, 2), (1, 2, 4)]
    >>> [(p.unit, p.start, p.stop) for p in deal(halves, 2, group=2, num_groups=4)]
    [(1, 0, 2)]
    >>> [(p.unit, p.start, p.stop) for p in deal(halves, 2, group=2, num_groups=8)]
    [(0, 2, 3)]
    """
    ranges = _ranges(pieces, num_units, num_groups, only_curved)
    first, last = _bounds(len(ranges) * num_units, num_groups)[group : group + 2]
    places = (divmod(i, len(ranges)) for i in range(first, last))
    return tuple(Part(unit, *ranges[place]) for unit, place in places)


def most_sequences(
    pieces: Sequence[Piece], num_units: int, num_groups: int, *, only_curved: bool = False
) -> int:
    """Return how many sequences the busiest group measures."""
    ranges = _ranges(pieces, num_units, num_groups, only_curved)
    return _busiest(ranges, num_units, num_groups, call=0)


def _ranges(
    pieces: Sequence[Piece], num_units: int, num_groups: int, only_curved: bool
) -> list[_Range]:
    """Return the ranges of every unit: those with which a pass over all and one over the pieces for
    curvature take least together."""

    def curved(way: list[_Range]) -> list[_Range]:
        return [part for part in way if pieces[part[0]].is_curved]

    def cost(way: list[_Range]) -> list[int]:
        return [sum(_busiest(ranges, num_units, num_groups, call=call)
                    for ranges in (way, curved(way))) for call in (CALL_SEQUENCES, 0)]

    longest = max(piece.stop - piece.start for piece in pieces)
    best = min((_cut(pieces, most) for most in range(longest, 0, -1)), key=cost)
    return curved(best) if only_curved else best


def _cut(pieces: Sequence[Piece], most: int) -> list[_Range]:
    """Cut each piece in the fewest equal ranges of at most so many sequences."""
    ranges: list[_Range] = []
    for index, piece in enumerate(pieces):
        length = piece.stop - piece.start
        count = -(-length // most)
        cuts = [piece.start + length * i // count for i in range(count + 1)]
        ranges += [(index, a, b) for a, b in pairwise(cuts)]
    return ranges


def _busiest(ranges: Sequence[_Range], num_units: int, num_groups: int, *, call: int) -> int:
    """Return what the busiest group takes, in passes over one sequence, for so much a call."""
    costs = np.tile([stop - start + call for _, start, stop in ranges], num_units)
    until = np.concatenate([[0], np.cumsum(costs)])
    return int(np.diff(until[_bounds(len(costs), num_groups)]).max())


def _bounds(num_ranges: int, num_groups: int) -> np.ndarray:
    """Return (D + 1,) where each group's ranges begin, and the end."""
    return num_ranges * np.arange(num_groups + 1) // num_groups
