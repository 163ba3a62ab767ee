"""Local randomness on top of an order: window jitter (JIT-w) and Gumbel rank jitter.

Source: "Demystifying Data Organization for Enhanced LLM Training" (arXiv 2605.30334), guidance G4,
local diversity. Difference from the released code: a window may be a share of N, since the
source's 100,000 of about 1,000,000 means nothing on a corpus of another size.
"""

from __future__ import annotations

import math

import numpy as np

from megatron_d3.errors import ConfigError

VERSION = 1


def window_size(window: int | float, num_items: int) -> int:  # noqa: PYI041, the type decides
    """Return a jitter window in items: an int is a count, a float a share of all items.

    Args:
        window: a count of 0 or more, or a share in [0, 1] (rounded to the nearest count).
        num_items: N.

    Raises:
        ConfigError: a negative count, or a share outside [0, 1].

    >>> window_size(0.05, 1000), window_size(64, 1000)
    (50, 64)
    """
    if isinstance(window, int):
        if window < 0:
            raise ConfigError(f"order.jitter: got {window}, expected a count of 0 or more")
        return window
    if not (math.isfinite(window) and 0 <= window <= 1):
        raise ConfigError(
            f"order.jitter: got {window}, expected a share of the corpus in [0, 1] or a whole "
            "number of documents"
        )
    return round(window * num_items)


def jitter(items: np.ndarray, *, window: int, rng: np.random.Generator) -> None:
    """Shuffle consecutive disjoint windows of `window` items in place, the last one shorter.

    Args:
        items: (N,) any dtype; changed in place.
        window: items in a window; 0 and 1 change nothing.
        rng: consumed.

    Source: the reference's `window_based_shuffle`.
    """
    if window <= 1 or len(items) <= 1:
        return
    whole = len(items) // window * window
    windows = items[:whole].reshape(-1, window)
    if whole:
        rng.permuted(windows, axis=1, out=windows)  # 0.1 s for 10^7 items, any window
    rng.shuffle(items[whole:])


def gumbel_ranks(items: np.ndarray, *, temperature: float, rng: np.random.Generator) -> np.ndarray:
    """Return `items` reordered by their rank plus Gumbel noise of scale `temperature`, stably.

    Args:
        items: (N,) any dtype, in ranked order.
        temperature: tau in ranks, 0 or more; 0 leaves the order as it is.
        rng: consumed.

    Raises:
        ConfigError: a negative or infinite temperature.

    Source: the reference's `gumbel_rank_jitter`. Peak: 20 bytes an item beside `items`.
    """
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ConfigError(f"order.temperature: got {temperature}, expected 0 or more ranks")
    if temperature == 0:
        return items.copy()
    keys = rng.gumbel(size=len(items))  # (N,)
    keys *= temperature
    keys += np.arange(len(items))
    places = np.argsort(keys, kind="stable")
    del keys
    return items[places]
