"""Random pairs of different positions."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import numpy as np


def random_pairs(
    num_positions: int, shape: tuple[int, ...], *, seed: int | Sequence[int], name: str
) -> np.ndarray:
    """Return (*shape, 2) int64, in each pair two different positions, every such pair alike.

    Args:
        num_positions: L; below 2 there is no pair, and the first axis comes back empty.
        shape: of the pairs.
        seed: one number or several, each >= 0.
        name: of who draws them, so that two who do with one seed differ.
    """
    if num_positions < 2:
        return np.empty((0, *shape[1:], 2), np.int64)
    rng = np.random.default_rng([*np.atleast_1d(seed).tolist(), crc32(name.encode())])
    first = rng.integers(num_positions, size=shape)
    other = rng.integers(num_positions - 1, size=shape)
    return np.stack([first, other + (other >= first)], axis=-1)
