"""Cyclic orders: fold (FO-L) and zigzag (ZIG-L), several passes over the whole range of scores.

Source: "Demystifying Data Organization for Enhanced LLM Training" (arXiv 2605.30334); its
guidance G2, cyclic scheduling. No difference in the result; it is computed as the transpose of
a matrix with a row for every L items, so that neither N nor L is looped over.
"""

from __future__ import annotations

import warnings

import numpy as np

from megatron_d3.errors import ConfigError

VERSION = 1


def fold(items: np.ndarray, *, layers: int) -> np.ndarray:
    """Concatenate the `layers` slices `items[l::layers]`: each pass visits all ranks once.

    Args:
        items: (N,) any dtype, in ranked order.
        layers: L, at least 1; 1 or at least N leaves the order as it is.

    Returns:
        (N,) a new array.

    Raises:
        ConfigError: `layers` below 1.

    Source: the reference's `folding_order`.

    >>> fold(np.arange(7), layers=3).tolist()
    [0, 3, 6, 1, 4, 2, 5]
    """
    check_layers(layers)
    out = np.empty_like(items)
    lay(items, out, layers=layers, is_zigzag=False)
    return out


def zigzag(items: np.ndarray, *, layers: int) -> np.ndarray:
    """Fold with every second layer reversed, so that passes go up, down, up, ...

    Args, returns and errors as `fold`. Warns for even `layers`: the order then ends at the lowest
    ranks, and what follows it (the next epoch, the next domain) jumps.

    Source: the reference's `zigzag_order`.

    >>> zigzag(np.arange(9), layers=3).tolist()
    [0, 3, 6, 7, 4, 1, 2, 5, 8]
    """
    check_layers(layers)
    if layers % 2 == 0 and len(items) > layers:
        warnings.warn(
            f"zigzag: with {layers} layers (even) the order ends at rank {layers - 1} of "
            f"{len(items) - 1}, a jump of {len(items) - layers} ranks from the top; an odd number "
            "of layers ends at the top",
            stacklevel=2,
        )
    out = np.empty_like(items)
    lay(items, out, layers=layers, is_zigzag=True)
    return out


def check_layers(layers: int) -> None:
    """Raise `ConfigError` unless `layers` is at least 1."""
    if layers < 1:
        raise ConfigError(f"order.layers: got {layers}, expected at least 1")


def lay(items: np.ndarray, out: np.ndarray, *, layers: int, is_zigzag: bool) -> None:
    """Write the folded or zigzagged `items` into `out`, both (N,), which must not overlap."""
    num_items = len(items)
    layers = min(layers, max(num_items, 1))  # more layers than items: every layer holds one
    rows, rest = divmod(num_items, layers)  # N = rows * layers + rest
    columns = items[: rows * layers].reshape(rows, layers).T  # (L, rows): a row is a layer
    tail = items[rows * layers :]  # (rest,): one more item for each of the first layers
    long = out[: rest * (rows + 1)].reshape(rest, rows + 1)
    short = out[rest * (rows + 1) :].reshape(layers - rest, rows)
    if not is_zigzag:
        long[:, :rows] = columns[:rest]
        long[:, rows] = tail
        short[:] = columns[rest:]
        return
    long[0::2, :rows] = columns[:rest][0::2]
    long[0::2, rows] = tail[0::2]
    long[1::2, 1:] = columns[:rest][1::2, ::-1]
    long[1::2, 0] = tail[1::2]
    odd = (rest + 1) % 2  # the first short layer with an odd number, counted from `rest`
    short[odd::2] = columns[rest:][odd::2, ::-1]
    short[1 - odd :: 2] = columns[rest:][1 - odd :: 2]
