"""One pass over the sequences of an `.idx`: checked, summed and fingerprinted at memory speed.

Opening a corpus asks three things of every sequence: that it lies inside the `.bin`, how many
tokens come before it, and that it is the same as in the run before. One pass answers all, block by
block in the cache, on a few threads.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from zlib import crc32

import numpy as np

BLOCK = 1024
"""Sequences whose lengths are summed together: what a look-up has to search one by one."""

# Blocks handled at a time: the temporaries stay in a core's L2 cache.
_CHUNK_BLOCKS = 32
# Chunks per task of a thread, and threads at most: beyond four the memory is the limit.
_TASK_CHUNKS = 16
_MAX_THREADS = 4


@dataclass(frozen=True, eq=False)
class Scan:
    """What one pass over an index found.

    Attributes:
        is_sound: every sequence lies inside the `.bin`.
        block_sums: (ceil(S / BLOCK),) int64, tokens of each block of sequences.
        checksum: 16 bytes that change with any length or pointer: a hash over CRC-32s of chunks
            (pointers that follow from the lengths, as in every index that was not reordered, are
            covered by them). Made against accidents, not against malice.
    """

    is_sound: bool
    block_sums: np.ndarray
    checksum: bytes


def scan(lengths: np.ndarray, pointers: np.ndarray, *, itemsize: int, bin_bytes: int) -> Scan:
    """Look at every sequence once.

    Args:
        lengths: (S,) int32, tokens.
        pointers: (S,) int64, bytes.
        itemsize: bytes of a token.
        bin_bytes: size of the `.bin`.
    """
    chunk = _CHUNK_BLOCKS * BLOCK
    sums = np.empty(-(-len(lengths) // BLOCK), np.int64)

    def task(start: int) -> tuple[bool, bytes]:
        is_sound, checksums = True, []
        for at in range(start, min(start + _TASK_CHUNKS * chunk, len(lengths)), chunk):
            part, place = lengths[at : at + chunk], pointers[at : at + chunk]
            long = part.astype(np.int64)
            first = at // BLOCK
            sums[first : first + _CHUNK_BLOCKS] = np.add.reduceat(
                long, np.arange(0, len(part), BLOCK))
            long *= itemsize  # bytes
            is_in_place = bool(np.array_equal(place[1:], place[:-1] + long[:-1]))
            is_sound &= bool(part.min() >= 0) and (
                _fits(place[[0, -1]], long[[0, -1]], bin_bytes) if is_in_place
                else _fits(place, long, bin_bytes))
            checksum = crc32(part.view(np.uint8))
            # Pointers in place are fixed by the first one.
            told = place[:1] if is_in_place else place
            checksums.append(checksum.to_bytes(4, "little"))
            checksums.append(crc32(told.view(np.uint8)).to_bytes(4, "little"))
        return is_sound, b"".join(checksums)

    starts = range(0, len(lengths), _TASK_CHUNKS * chunk)
    num_threads = min(_MAX_THREADS, os.cpu_count() or 1, len(starts))
    if num_threads > 1:
        with ThreadPoolExecutor(num_threads) as pool:
            found = list(pool.map(task, starts))
    else:
        found = [task(start) for start in starts]
    digest = blake2b(b"".join(checksums for _, checksums in found), digest_size=16)
    return Scan(all(is_sound for is_sound, _ in found), sums, digest.digest())


def _fits(pointers: np.ndarray, num_bytes: np.ndarray, bin_bytes: int) -> bool:
    """Whether sequences of `num_bytes` >= 0 at `pointers` lie inside the `.bin`."""
    return bool(pointers.min() >= 0 and (pointers <= bin_bytes - num_bytes).all())
