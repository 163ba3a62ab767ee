"""How much of a window measured by `projected` falls to one rank."""

from __future__ import annotations

from megatron_d3.influence.estimators.deal import most_sequences
from megatron_d3.influence.estimators.pieces import cut_halves
from megatron_d3.influence.settings import D3Config


def busiest_sequences(settings: D3Config, num_units: int, num_ranks: int) -> int:
    """Return the sequences that the rank with most passes forwards and backwards in all passes."""
    pieces = cut_halves(settings.probe_sequences, settings.num_curved)
    # Over what curvature is measured on: one that forms principal directions, one for each.
    num_curved_passes = 1 if settings.basis == "mean" else 1 + settings.num_directions
    return (most_sequences(pieces, num_units, num_ranks) + num_curved_passes
            * most_sequences(pieces, num_units, num_ranks, only_curved=True))
