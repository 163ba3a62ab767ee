"""A seeded permutation of [0, n) that is computed, never stored.

Megatron shuffles by storing a permuted index of every sample. Here the sample at place `i` of an
epoch is a function of (key, n, i), so that a domain of 10^12 samples starts as fast as one of ten.

Method: an alternating Feistel network over a rectangle. With a = ceil(sqrt(n)), b = ceil(n / a),
write x = left * b + right; even rounds add a keyed hash of `right` to `left` (mod a), odd rounds a
hash of `left` to `right` (mod b). Each round can be undone whatever the hash is, so all of them
together are a bijection of [0, a * b). Results of n or more (at most a - 1 of them exist) are sent
through again ("cycle walking"), which makes it a bijection of [0, n).

Source: the generalized Feistel cipher and cycle walking of Black & Rogaway, "Ciphers with Arbitrary
Finite Domains" (CT-RSA 2002). Difference: the round function is a fast multiplicative hash instead
of a cipher; this is for mixing data, not for secrets.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import isqrt

import numpy as np

VERSION = 1
"""Part of the key: a change of the method is a change of every order, on purpose."""

_NUM_ROUNDS = 8
_MULTIPLY_1 = 0x9E3779B97F4A7C15  # odd, 2^64 / golden ratio
_MULTIPLY_2 = 0xD6E8FEB86659FD93  # odd, from a search for good bit avalanche (rrmxmx mixers)
_MASK = (1 << 64) - 1
# Values permuted at a time: five uint64 buffers of this length stay in the L2 cache.
_BLOCK = 1 << 14


class Permutation:
    """A bijection of [0, size), fixed by `key`.

    Args:
        size: number of values, 1 <= size < 2^62.
        key: integers of any size and sign; another key is another order.

    Raises:
        ValueError: size out of range.

    >>> order = Permutation(5, key=(1234, 0))
    >>> [order.at(i) for i in range(5)]
    [1, 0, 2, 4, 3]
    """

    def __init__(self, size: int, *, key: Sequence[int]) -> None:
        if not 1 <= size < 1 << 62:
            raise ValueError(f"size: got {size}, expected 1 <= size < 2^62")
        self.size = size
        self.height = isqrt(size - 1) + 1  # a; height * width < size + height
        self.width = -(-size // self.height)  # b
        self._keys = _round_keys(size, key)

    def at(self, index: int) -> int:
        """Return the value at one place, in a few microseconds.

        Raises:
            IndexError: index outside [0, size).
        """
        if not 0 <= index < self.size:
            raise IndexError(f"index {index} outside [0, {self.size})")
        height, width = self.height, self.width
        while True:
            left, right = divmod(index, width)
            for even, odd in self._keys:
                left += _hash(right, even, height)
                left -= height * (left >= height)
                right += _hash(left, odd, width)
                right -= width * (right >= width)
            index = left * width + right
            if index < self.size:
                return index

    def apply(self, indices: np.ndarray) -> np.ndarray:
        """Return the values at many places: (N,) integers -> (N,) int64, 10^7 in about a second.

        Raises:
            IndexError: an index outside [0, size).
        """
        return self._map(indices, self._forward)

    def inverse(self, values: np.ndarray) -> np.ndarray:
        """Return the places at which the values stand: `inverse(apply(i)) == i`.

        Raises:
            IndexError: a value outside [0, size).
        """
        return self._map(values, self._backward)

    def _map(self, values: np.ndarray, step: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        values = np.asarray(values, np.int64)
        if values.size and (values.min() < 0 or values.max() >= self.size):
            raise IndexError(f"indices {values.min()} to {values.max()} outside [0, {self.size})")
        out = np.empty(values.shape, np.int64)
        for start in range(0, len(values), _BLOCK):
            block = step(values[start : start + _BLOCK].astype(np.uint64))
            walking = np.flatnonzero(block >= self.size)
            while walking.size:
                block[walking] = step(block[walking])
                walking = walking[block[walking] >= self.size]
            out[start : start + _BLOCK] = block
        return out

    def _forward(self, values: np.ndarray) -> np.ndarray:
        left, right = self._split(values)
        buffers = np.empty_like(left), np.empty_like(left)
        for even, odd in self._keys:
            _add_hash(left, right, even, self.height, buffers)
            _add_hash(right, left, odd, self.width, buffers)
        return self._join(left, right)

    def _backward(self, values: np.ndarray) -> np.ndarray:
        left, right = self._split(values)
        buffers = np.empty_like(left), np.empty_like(left)
        for even, odd in reversed(self._keys):
            _subtract_hash(right, left, odd, self.width, buffers)
            _subtract_hash(left, right, even, self.height, buffers)
        return self._join(left, right)

    def _split(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        width = np.uint64(self.width)
        left = values // width
        return left, values - left * width

    def _join(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        joined: np.ndarray = left * np.uint64(self.width) + right
        return joined


def permute(indices: np.ndarray, *, size: int, key: Sequence[int]) -> np.ndarray:
    """Return where each index goes in the permutation of [0, size) that `key` fixes.

    Args:
        indices: (N,) integers in [0, size).
        size: length of the permutation.
        key: integers, for example (seed, crc32(domain name), epoch).

    Returns:
        (N,) int64; all of [0, size) once if `indices` are.
    """
    return permutation(size, tuple(key)).apply(indices)


def unpermute(values: np.ndarray, *, size: int, key: Sequence[int]) -> np.ndarray:
    """Return the indices that `permute` sends to `values`."""
    return permutation(size, tuple(key)).inverse(values)


@lru_cache(maxsize=4096)
def permutation(size: int, key: tuple[int, ...]) -> Permutation:
    """Return a `Permutation`, made once a process."""
    return Permutation(size, key=key)


def _round_keys(size: int, key: Sequence[int]) -> list[tuple[int, int]]:
    """Derive a 64-bit key a round, as (even, odd) pairs."""
    text = ",".join(str(operator.index(part)) for part in (VERSION, size, *key))
    stream = hashlib.blake2b(
        text.encode(), digest_size=8 * _NUM_ROUNDS, person=b"d3-shuffle"
    ).digest()
    keys = [int.from_bytes(stream[i : i + 8], "little") for i in range(0, len(stream), 8)]
    return list(zip(keys[::2], keys[1::2], strict=True))


def _hash(value: int, key: int, bound: int) -> int:
    """Hash to [0, bound), bound < 2^32: the top 32 bits, scaled (no division)."""
    mixed = ((value ^ key) * _MULTIPLY_1) & _MASK
    mixed = ((mixed ^ (mixed >> 32)) * _MULTIPLY_2) & _MASK
    return ((mixed >> 32) * bound) >> 32


def _hash_many(
    values: np.ndarray, key: int, bound: int, out: np.ndarray, spare: np.ndarray
) -> None:
    """Write what `_hash` returns for each of (N,) uint64 values to `out`."""
    np.bitwise_xor(values, np.uint64(key), out=out)
    np.multiply(out, np.uint64(_MULTIPLY_1), out=out)
    np.right_shift(out, np.uint64(32), out=spare)
    np.bitwise_xor(out, spare, out=out)
    np.multiply(out, np.uint64(_MULTIPLY_2), out=out)
    np.right_shift(out, np.uint64(32), out=out)
    np.multiply(out, np.uint64(bound), out=out)
    np.right_shift(out, np.uint64(32), out=out)


def _add_hash(
    target: np.ndarray,
    source: np.ndarray,
    key: int,
    bound: int,
    buffers: tuple[np.ndarray, np.ndarray],
) -> None:
    """target = (target + hash(source)) mod bound, in place."""
    out, spare = buffers
    _hash_many(source, key, bound, out, spare)
    np.add(target, out, out=target)
    # NOTE: below the bound the difference wraps to a huge number, so the minimum is the remainder.
    np.subtract(target, np.uint64(bound), out=out)
    np.minimum(target, out, out=target)


def _subtract_hash(
    target: np.ndarray,
    source: np.ndarray,
    key: int,
    bound: int,
    buffers: tuple[np.ndarray, np.ndarray],
) -> None:
    """target = (target - hash(source)) mod bound, in place."""
    out, spare = buffers
    _hash_many(source, key, bound, out, spare)
    np.subtract(target, out, out=target)
    np.add(target, np.uint64(bound), out=out)
    np.minimum(target, out, out=target)
