"""The sketches in PyTorch: the reference of `_sketch.c`, and what runs on CUDA.

Each function returns what one shard adds to the sketch, (dim,) float64 on the shard's device. A
bucket gathers its own elements, or is filled after a sort, so that results do not depend on the
order in which threads run. Work goes in chunks: index arithmetic takes several int64 an element.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from megatron_d3.influence.layout import Shard
from megatron_d3.influence.sketch_hash import hash64, hash_below, shift_right, signs_from_words

CHUNK = 1 << 16
"""Elements whose indices are computed at once on a CPU, within its cache."""

CUDA_CHUNK = 1 << 24
"""The same on CUDA, so that launching kernels does not take longer than they do."""

FUSED_CHUNK = 1 << 28
"""Elements of one call of the compiled rotation, which needs memory for their words only."""


def rotation(values: torch.Tensor, shard: Shard, dim: int, keys: tuple[int, int]) -> torch.Tensor:
    """Rotate each block of `dim` elements by a random offset, sign every element, and add up.

    Args:
        values: flat local tensor, floating.
        shard: what it holds.
        dim: number of buckets.
        keys: of the offsets and of the signs.
    """
    total = torch.zeros(dim, dtype=torch.float64, device=values.device)
    gather = _gather_for(values)
    first, stop = shard.global_start // dim, -(-shard.global_stop // dim)
    step = max(2, FUSED_CHUNK // dim) if gather else max(1, CHUNK // dim)
    for start in range(first, stop, step):
        # On CUDA 2 blocks or more, though empty: a size of 1 would be compiled apart.
        end = max(min(start + step, stop), start + 2 if gather else 0)
        blocks = torch.arange(start, end, device=values.device)
        offsets = hash_below(hash64(blocks, keys[0]), dim)
        numbers = torch.arange(start * dim >> 6, (end * dim >> 6) + 2, device=values.device)
        words = hash64(numbers, keys[1])
        if gather:
            place = torch.tensor(_place(shard), device=values.device)
            total += gather(values, place, shard.num_runs == 1, blocks, offsets, words, dim)
        else:
            total += _rotate_rows(values, shard, blocks, offsets, words, dim)
    return total


def _gather_for(values: torch.Tensor) -> Callable[..., torch.Tensor] | None:
    return _compiled(_gather_elements) if values.is_cuda else None


def _rotate_rows(
    values: torch.Tensor, shard: Shard, blocks: torch.Tensor, offsets: torch.Tensor,
    words: torch.Tensor, dim: int,
) -> torch.Tensor:
    """Return (dim,) float64, the sum of some blocks: signs from a table, rows rotated."""
    start = int(blocks[0]) * dim
    stop = start + len(blocks) * dim
    if shard.num_runs == 1 and shard.global_start <= start and stop <= shard.global_stop:
        first = shard.local_start + start - shard.global_start
        dense = values[first : first + stop - start]
    else:
        p = torch.arange(start, stop, device=values.device)
        local, is_held = _find(p, _place(shard), shard.num_runs == 1)
        dense = torch.where(is_held, values[local], 0)
    signs = signs_from_words(words)[start & 63 :][: stop - start]
    rows = (dense * signs).view(-1, dim)
    index = torch.arange(dim, device=values.device) + (dim - offsets)[:, None]
    return torch.cat((rows, rows), 1).gather(1, index).sum(0, dtype=torch.float64)


def _gather_elements(
    values: torch.Tensor, place: torch.Tensor, is_one_run: bool, blocks: torch.Tensor,
    offsets: torch.Tensor, words: torch.Tensor, dim: int,
) -> torch.Tensor:
    """Return what `_rotate_rows` does as a reduction that compiles into one kernel.

    Bucket t takes from each block the element (t - offset) mod dim, so that each element is read
    once; the hashes of blocks and of 64 elements come ready. `place` is a tensor, since each new
    integer would be compiled apart.
    """
    bucket = torch.arange(dim, device=values.device)
    index = bucket[None, :] - offsets[:, None]  # (blocks, dim)
    p = blocks[:, None] * dim + torch.where(index < 0, index + dim, index)
    local, is_held = _find(p, place.unbind(), is_one_run)
    first_word = (blocks[0] * dim) >> 6
    is_negative = (words[(p >> 6) - first_word] >> (p & 63)) & 1
    value = torch.where(is_held, values[local], 0).to(torch.float64)
    return torch.where(is_negative == 1, -value, value).sum(0)


def _place(shard: Shard) -> tuple[int, ...]:
    return (shard.global_start, shard.num_runs, shard.run_length, shard.global_stride,
            shard.local_start, shard.local_stride)


def _find(
    p: torch.Tensor, place: Sequence[Any], is_one_run: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where global offsets lie in the local tensor, and whether they do at all."""
    global_start, num_runs, run_length, global_stride, local_start, local_stride = place
    column = p - global_start
    local = local_start + column
    if is_one_run:
        is_held = (column >= 0) & (column < run_length)
    else:  # a division an element
        run = torch.div(column, global_stride, rounding_mode="floor")
        column = column - run * global_stride
        is_held = (run >= 0) & (run < num_runs) & (column < run_length)
        local = local_start + run * local_stride + column
    return torch.where(is_held, local, local_start), is_held


@functools.cache
def _compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return torch.compile(function, dynamic=True)


def count(values: torch.Tensor, shard: Shard, dim: int, keys: tuple[int, int]) -> torch.Tensor:
    """Add each element, signed, to a bucket of its own: the sparse JL transform with s = 1.

    Arguments as for :func:`rotation`; one key gives buckets and signs, the second is not used.
    """
    total = torch.zeros(dim, dtype=torch.float64, device=values.device)
    for p, piece in _chunks(values, shard, CUDA_CHUNK if values.is_cuda else CHUNK):
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
    rows = torch.arange(half, device=values.device)
    make = _compiled(_normals) if values.is_cuda else _normals
    total = torch.zeros(2, half, dtype=torch.float64, device=values.device)
    size = (CUDA_CHUNK if values.is_cuda else CHUNK) // half
    for p, piece in _chunks(values, shard, max(1, size)):
        total += make(rows, hash64(p, keys[0])) @ piece.to(torch.float64)
    return total.view(-1)[:dim] / math.sqrt(dim)


def _normals(rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return (2, rows, keys) float64 of the precision of float32: the cosines, then the sines."""
    word = hash64(rows[:, None], keys[None, :])
    upper, lower = shift_right(word, 33), (word << 32) >> 32  # 31 bits; 32 bits with a sign
    uniform = upper.to(torch.float32) * 2.0**-31 + 2.0**-32  # in (0, 1]
    radius = torch.sqrt(-2 * torch.log(uniform))
    angle = lower.to(torch.float32) * (math.pi / 4 * 2.0**-31)
    cosine, sine = torch.cos(angle), torch.sin(angle)
    cosine = torch.where((lower & 2) == 2, -cosine, cosine)
    is_swapped = (lower & 1) == 1
    first, second = torch.where(is_swapped, sine, cosine), torch.where(is_swapped, cosine, sine)
    return torch.stack((radius * first, radius * second)).to(torch.float64)


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
