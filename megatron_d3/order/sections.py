"""Sectioned curricula: STR and SAW, a curriculum whose section borders are cycled through.

Source: "Demystifying Data Organization for Enhanced LLM Training" (arXiv 2605.30334). Symbols:
K sections with split points round(N*s/K), s = 1..K-1; radius r = round(N*rho) around each, rho
the `ratio`; within a region items are folded (STR) or zigzagged (SAW) in L layers, outside they
stay monotone. `round` is Python's, half to even. Differences from the released code: a ratio
above 0.5 is refused, and an even L of SAW warns, since continuity (guidance G3) is lost.
"""

from __future__ import annotations

import math
import warnings

import numpy as np

from megatron_d3.errors import ConfigError
from megatron_d3.order.layers import check_layers, lay

VERSION = 1


def str_order(items: np.ndarray, *, sections: int, ratio: float, layers: int) -> np.ndarray:
    """Return the STR order: monotone, with the neighbourhood of each section border folded.

    Args:
        items: (N,) any dtype, in ranked order.
        sections: K, at least 1; 1 leaves the order as it is.
        ratio: rho in [0, 0.5], the radius of a transition region as a share of N.
        layers: L, at least 1.

    Returns:
        (N,) a new array.

    Raises:
        ConfigError: a parameter out of its range.

    Source: the reference's `cross_guidance_order`, mode "folding".

    >>> str_order(np.arange(10), sections=2, ratio=0.2, layers=2).tolist()
    [0, 1, 2, 3, 5, 4, 6, 7, 8, 9]
    """
    return _sectioned(items, sections=sections, ratio=ratio, layers=layers, is_zigzag=False)


def saw_order(items: np.ndarray, *, sections: int, ratio: float, layers: int) -> np.ndarray:
    """Return the SAW order: as `str_order` with zigzag in the regions.

    Warns for even `layers`: a region then ends at its low end, and the next item lies about
    2 * ratio * N ranks higher.

    Source: the reference's `cross_guidance_order`, mode "zigzag".

    >>> saw_order(np.arange(10), sections=2, ratio=0.3, layers=3).tolist()
    [0, 1, 2, 5, 6, 3, 4, 7, 8, 9]
    """
    if layers >= 1 and layers % 2 == 0:
        _warn_of_jump(transitions(len(items), sections=sections, ratio=ratio), layers)
    return _sectioned(items, sections=sections, ratio=ratio, layers=layers, is_zigzag=True)


def transitions(num_items: int, *, sections: int, ratio: float) -> list[tuple[int, int]]:
    """Return the transition regions as half-open rank ranges, clamped where they would overlap.

    Args:
        num_items: N.
        sections: K, at least 1.
        ratio: rho in [0, 0.5].

    Returns:
        the non-empty regions, ascending and disjoint.

    >>> transitions(30, sections=3, ratio=0.2)  # the second would begin at 14
    [(4, 16), (16, 26)]
    """
    if sections < 1:
        raise ConfigError(f"order.sections: got {sections}, expected at least 1")
    if not (math.isfinite(ratio) and 0 <= ratio <= 0.5):
        raise ConfigError(f"order.ratio: got {ratio}, expected a number in [0, 0.5]")
    radius = round(num_items * ratio)
    regions: list[tuple[int, int]] = []
    if radius == 0:
        return regions
    cursor = 0
    for section in range(1, sections):
        split_point = round(num_items * section / sections)
        start = max(cursor, split_point - radius)
        cursor = min(num_items, split_point + radius)
        if start < cursor:
            regions.append((start, cursor))
        if cursor == num_items:
            break
    return regions


def _sectioned(
    items: np.ndarray, *, sections: int, ratio: float, layers: int, is_zigzag: bool
) -> np.ndarray:
    check_layers(layers)
    out = items.copy()
    for start, stop in transitions(len(items), sections=sections, ratio=ratio):
        lay(items[start:stop], out[start:stop], layers=layers, is_zigzag=is_zigzag)
    return out


def _warn_of_jump(regions: list[tuple[int, int]], layers: int) -> None:
    # With L even the last layer runs downwards and ends at rank start + L - 1.
    jumps = [stop - (start + layers - 1) for start, stop in regions if stop - start > layers]
    if jumps:
        warnings.warn(
            f"saw: with {layers} layers (even) every transition region ends at its low end, and "
            f"the next document lies up to {max(jumps)} ranks higher; an odd number of layers "
            "keeps the curriculum continuous",
            stacklevel=3,
        )
