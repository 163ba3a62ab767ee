"""The sketches in PyTorch: the reference of `_sketch.c`, and what runs on CUDA.

Each function returns what one shard adds to the sketch, (dim,) float64 on the shard's device. Every
bucket gathers its own elements or is filled by a sort, so that results do not depend on the order
in which threads run. Work goes in chunks of about a million elements: index arithmetic needs
several int64 an element.

On CUDA the gather is compiled into one kernel that reads each element once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator

import torch

from megatron_d3.influence.layout import Shard
from megatron_d3.influence.sketch_hash import hash64, hash_below, shift_right, sign_bits

CHUNK = 1 << 20
"""Elements whose indices are computed at once; no part of the result but for rounding."""


def rotation(values: torch.Tensor, shard: Shard, dim: int, keys: tuple[int, int]) -> torch.Tensor:
    """Rotate each block of `dim` elements by a random offset, sign every element, and add up.

    Args:
        values: flat local tensor, floating.
        shard: what it holds.
        dim: number of buckets.
        keys: of the offsets and of the signs.
    """
    total = torch.zeros(dim, dtype=torch.float64, device=values.device)
    if shard.num_elements == 0:
        return total
    gather = _compiled_gather() if values.is_cuda else _gather
    first, stop = shard.global_start // dim, -(-shard.global_stop // dim)
    step = max(1, CHUNK // dim) if not values.is_cuda else max(1, 64 * CHUNK // dim)
    place = (shard.global_start, max(shard.global_stride, 1), shard.run_length, shard.num_runs,
             shard.local_start, shard.local_stride)
    for start in range(first, stop, step):
        blocks = torch.arange(start, min(start + step, stop), device=values.device)
        offsets = hash_below(hash64(blocks, keys[0]), dim)
        first_word = (start * dim) >> 6
        last_word = ((int(min(start + step, stop)) * dim - 1) >> 6) + 1
        words = hash64(torch.arange(first_word, last_word, device=values.device), keys[1])
        total += gather(values, blocks, offsets, words, first_word, dim, place)
    return total


def _gather(
    values: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor, words: torch.Tensor,
    first_word: int, dim: int, place: tuple[int, ...],
) -> torch.Tensor:
    """Return (dim,) float64: bucket t takes from each block b the element (t - offset_b) mod dim."""
    global_start, global_stride, run_length, num_runs, local_start, local_stride = place
    bucket = torch.arange(dim, device=values.device)
    index = bucket[None, :] - offsets[:, None]  # (blocks, dim)
    index = torch.where(index < 0, index + dim, index)
    p = blocks[:, None] * dim + index  # global offset
    sign = (words[(p >> 6) - first_word] >> (p & 63)) & 1
    column = p - global_start
    is_held = (column >= 0) & (column < run_length)
    local = local_start + column
    if num_runs > 1:  # a division an element; most shards are one run
        run = torch.div(column, global_stride, rounding_mode="floor")
        column = column - run * global_stride
        is_held = (run >= 0) & (run < num_runs) & (column < run_length)
        local = local_start + run * local_stride + column
    local = torch.where(is_held, local, local_start)
    value = torch.where(is_held, values[local], 0).to(torch.float64)
    return torch.where(sign == 1, -value, value).sum(0)


@functools.cache
def _compiled_gather() -> Callable[..., torch.Tensor]:
    return torch.compile(_gather, dynamic=True)


def count(values: torch.Tensor, shard: Shard, dim: int, keys: tuple[int, int]) -> torch.Tensor:
    """Add each element, signed, to a bucket of its own: the sparse JL transform with s = 1.

    Arguments as for :func:`rotation`; one key gives buckets and signs, the second is not used.
    """
    total = torch.zeros(dim, dtype=torch.float64, device=values.device)
    for p, piece in _chunks(values, shard, CHUNK):
        word = hash64(p, keys[0])
        signed = torch.where((word & 1) == 1, -piece, piece).to(torch.float64)
        if values.is_cuda:  # by a sort, without atomics
            total.index_put_((hash_below(word, dim),), signed, accumulate=True)
        else:
            total.index_add_(0, hash_below(word, dim), signed)
    return total


def gaussian(values: torch.Tensor, shard: Shard, dim: int, keys: tuple[int, int]) -> torch.Tensor:
    """Multiply by a dense matrix of independent N(0, 1 / dim), made anew chunk by chunk.

    Entries j and j + ceil(dim / 2) of column p come from hash64(j, hash64(p, key)) by the method
    of Box and Muller; its upper half gives the radius, its lower half an angle within 45 degrees,
    two bits of which choose the quadrant. O(dim) an element. Arguments as for :func:`count`.
    """
    half = (dim + 1) // 2
    rows = torch.arange(half, device=values.device)[:, None]
    total = torch.zeros(2 * half, dtype=torch.float64, device=values.device)
    for p, piece in _chunks(values, shard, max(1, CHUNK // half)):
        word = hash64(rows, hash64(p, keys[0])[None, :])  # (half, chunk)
        upper, lower = shift_right(word, 33), (word << 32) >> 32  # 31 bits, 32 bits with a sign
        uniform = upper.to(torch.float32) * 2.0**-31 + 2.0**-32  # in (0, 1]
        radius = torch.sqrt(-2 * torch.log(uniform))
        angle = lower.to(torch.float32) * (math.pi / 4 * 2.0**-31)
        cosine = torch.cos(angle)
        cosine = torch.where((lower & 2) == 2, -cosine, cosine)
        sine, is_swapped = torch.sin(angle), (lower & 1) == 1
        real = piece.to(torch.float64)
        total[:half] += (radius * torch.where(is_swapped, sine, cosine)).to(torch.float64) @ real
        total[half:] += (radius * torch.where(is_swapped, cosine, sine)).to(torch.float64) @ real
    return total[:dim] / math.sqrt(dim)


def _chunks(
    values: torch.Tensor, shard: Shard, size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (global offsets int64, elements), each (up to `size`,), run after run."""
    length = max(shard.run_length, 1)
    for start in range(0, shard.num_elements, size):
        n = torch.arange(start, min(start + size, shard.num_elements), device=values.device)
        run = torch.div(n, length, rounding_mode="floor")
        column = n - run * length
        yield (shard.global_start + run * shard.global_stride + column,
               values[shard.local_start + run * shard.local_stride + column])


def random_signs(shard: Shard, key: int, device: torch.device) -> torch.Tensor:
    """Return (num_elements,) float32 of +1 and -1 by global offset, in the order of the runs."""
    runs = torch.arange(shard.num_runs, device=device)[:, None] * shard.global_stride
    p = shard.global_start + runs + torch.arange(shard.run_length, device=device)[None, :]
    return 1 - 2 * sign_bits(p.flatten(), key).to(torch.float32)
