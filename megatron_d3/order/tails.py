"""Segment order (SEG x-y): chosen tails of the score range first and last, the rest between.

Source: "Demystifying Data Organization for Enhanced LLM Training" (arXiv 2605.30334), guidance G1,
boundary sharpening. Difference from the released code: NumPy's generator shuffles, and if both
ends ask for more than there is, both are scaled by the same factor (the code gives the last
segment whatever rounding leaves).
"""

from __future__ import annotations

import math
import warnings

import numpy as np

from megatron_d3.errors import ConfigError

VERSION = 1
TAILS = ("low", "high")


def segment(
    items: np.ndarray,
    *,
    first_percent: float,
    last_percent: float,
    first_tail: str = "low",
    last_tail: str = "high",
    rng: np.random.Generator,
) -> np.ndarray:
    """Put a tail of the scores first and another last, each part shuffled within itself.

    Args:
        items: (N,) any dtype, by **ascending** score.
        first_percent: percent of the items in the first part, in [0, 100]; rounded down.
        last_percent: percent of the items in the last part; a sum beyond 100 scales both down and
            warns.
        first_tail: "low" or "high", the scores the first part is taken from.
        last_tail: the same for the last part. The same tail twice: one block is taken, shuffled
            and split, so that both parts hold the same mixture.
        rng: consumed by the shuffles.

    Returns:
        (N,) a new array.

    Raises:
        ConfigError: a percentage out of range or a tail that is neither "low" nor "high".

    Source: the reference's `segment.order`.
    """
    _check(first_percent, last_percent, first_tail, last_tail)
    num_items = len(items)
    total = first_percent + last_percent
    if total > 100:
        warnings.warn(
            f"segment: {first_percent:g} + {last_percent:g} percent is more than all; scaled to "
            f"{100 * first_percent / total:g} + {100 * last_percent / total:g}",
            stacklevel=2,
        )
    scale = max(total, 100)
    num_first = math.floor(num_items * first_percent / scale)
    num_last = math.floor(num_items * last_percent / scale)

    if first_tail == last_tail:
        taken = num_first + num_last
        at_low = first_tail == "low"
        block = (items[:taken] if at_low else items[num_items - taken :]).copy()
        middle = items[taken:] if at_low else items[: num_items - taken]
        rng.shuffle(block)
        first, last = block[:num_first], block[num_first:]
    elif first_tail == "low":
        first, middle, last = np.split(items, [num_first, num_items - num_last])
    else:
        last, middle, first = np.split(items, [num_last, num_items - num_first])

    out = np.concatenate((first, middle, last))
    for part in np.split(out, [num_first, num_items - num_last]):  # views of `out`
        rng.shuffle(part)
    return out


def _check(first_percent: float, last_percent: float, first_tail: str, last_tail: str) -> None:
    for name, percent in (("first_percent", first_percent), ("last_percent", last_percent)):
        if not 0 <= percent <= 100:  # False for NaN as well
            raise ConfigError(f"order.{name}: got {percent}, expected a number in [0, 100]")
    for name, tail in (("first_tail", first_tail), ("last_tail", last_tail)):
        if tail not in TAILS:
            raise ConfigError(f"order.{name}: got {tail!r}, expected 'low' or 'high'")
