"""Sketches: short random images of a gradient that keep inner products.

    layout, config -> make_sketch -> Sketch      sketch(vector) -> (dim,) float64, a linear map R

E<Rx, Ry> = <x, y>, with a relative error of about 1 / sqrt(dim). R is a function of (global name,
offset in the unsharded tensor, seed): the sum over the ranks that hold a model is the sketch of the
whole, whatever the split. No part of R is stored; a vector is read once, tensor by tensor.

    rotation       blocks of `dim` elements, each rotated by a random offset, every element with a
                   random sign, summed. O(d), at the speed of memory. The default (`auto`)
    rotation_srht  rotation to 65,536, then a subsampled randomised Hadamard transform to `dim`:
                   shorter tails when few elements hold most of the norm
    count          the count-sketch, each element to a bucket of its own. O(d), several times slower
    gaussian       dense N(0, 1 / dim), made anew for each vector. O(d dim): 3 s of one core for
                   10**6 elements and dim 3500
    none           the vector itself, each element at its place in the whole model; dim = d

Rotation: with p the offset of an element, b = p div k, i = p mod k, it goes to bucket
(i + r_b) mod k, r_b = hash64(b) scaled to [0, k), with a sign from a bit of hash64(p div 64). Two
elements of one block never meet, two of different blocks meet with probability 1 / k, and signs are
independent; hence Var <Rx, Ry> <= (|x|^2 |y|^2 + <x, y>^2) / k, the bound of dense matrices.

Sources: Charikar, Chen, Farach-Colton 2002 (count-sketch); Kane, Nelson 2014, "Sparser
Johnson-Lindenstrauss transforms"; Ailon, Chazelle 2009 and Tropp 2011 (SRHT). Unlike in a
count-sketch, bucket and sign of an element are not independent of its neighbours' buckets; the
variance above needs only pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from megatron_d3.errors import ProbeError
from megatron_d3.influence import sketch_torch
from megatron_d3.influence.layout import Layout, Shard
from megatron_d3.influence.settings import SketchConfig
from megatron_d3.influence.sketch_hash import make_key

try:
    from megatron_d3.influence import _sketch as _compiled  # type: ignore[attr-defined,unused-ignore]
except ImportError:  # built without a C compiler: PyTorch, the same up to rounding
    _compiled = None

SEGMENT = 1 << 23
"""Elements that a thread on a CPU sums apart from the rest; these sums are added in order. A part of
the rounding: the same for any number of threads."""

SRHT_DIM = 65_536
"""Size between the two stages of `rotation_srht`, or the next power of two above a larger dim."""

Keys = tuple[int, int]
KERNELS: dict[str, Callable[[torch.Tensor, Shard, int, Keys], torch.Tensor]] = {
    "rotation": sketch_torch.rotation,
    "count": sketch_torch.count,
    "gaussian": sketch_torch.gaussian,
}


def is_compiled() -> bool:
    """Tell whether sketches on a CPU are computed by the C version."""
    return _compiled is not None


class Sketch(Protocol):
    """A random linear map of vectors over a layout."""

    dim: int

    def __call__(self, vector: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return the (dim,) float64 sketch of the elements that this rank counts.

        Args:
            vector: one floating tensor for each of the layout's, in its order, with its number of
                elements. Taken one at a time: a generator of temporaries holds only one.

        NaN and infinity come out as such. The result is on the tensors' device.
        """
        ...


def make_sketch(config: SketchConfig, layout: Layout) -> Sketch:
    """Return the sketch that a configuration asks for, over the tensors of this rank.

    Raises:
        ProbeError: `dim` is larger than the number of elements of the whole model, so that a
            sketch would only add noise. (`none` takes no `dim`.)
    """
    if config.type == "none":
        return Identity(layout)
    if config.dim > layout.num_elements:
        raise ProbeError(
            f"d3.order.sketch.dim: got {config.dim}, more than the model's {layout.num_elements} "
            "parameters; choose a smaller one, or `type: none` for exact inner products")
    if config.type == "rotation_srht":
        return RotationSRHT(layout, config.dim, config.seed)
    return HashedSketch(layout, "rotation" if config.type == "auto" else config.type,
                        config.dim, config.seed)


class HashedSketch:
    """`rotation`, `count` or `gaussian`: a sum over shards of what a kernel makes of each."""

    def __init__(self, layout: Layout, kind: str, dim: int, seed: int) -> None:
        self.dim = dim
        self._layout = layout
        self._kind = kind
        self._keys = {
            name: (make_key(name, seed, f"{kind} bucket"), make_key(name, seed, f"{kind} sign"))
            for name in layout.global_sizes}

    def __call__(self, vector: Iterable[torch.Tensor]) -> torch.Tensor:
        """See :class:`Sketch`."""
        total = torch.zeros(self.dim, dtype=torch.float64)
        for values, shard in counted_shards(vector, self._layout):
            total = total.to(values.device)
            for part in self._parts(values, shard):
                total += part
        return total

    def _parts(self, values: torch.Tensor, shard: Shard) -> Iterator[torch.Tensor]:
        """Yield the sketch of each segment, in order, computed by as many threads as PyTorch's."""
        keys = self._keys[shard.name]

        def sketch(segment: Shard) -> torch.Tensor:
            if _compiled is None or values.is_cuda:
                return KERNELS[self._kind](values, segment, self.dim, keys)
            return _run_compiled(self._kind, values, segment, self.dim, keys)

        if values.is_cuda:
            yield sketch(shard)
            return
        num_threads = torch.get_num_threads()
        if num_threads == 1 or shard.num_elements <= SEGMENT:
            yield from map(sketch, segments(shard, SEGMENT))
            return
        with ThreadPoolExecutor(num_threads) as pool:
            yield from pool.map(sketch, segments(shard, SEGMENT))


def _run_compiled(
    kind: str, values: torch.Tensor, shard: Shard, dim: int, keys: Keys
) -> torch.Tensor:
    """Do what `KERNELS[kind]` does, in C and without the GIL."""
    if values.dtype == torch.bfloat16:
        values = values.view(torch.int16)  # NumPy has no bfloat16; C knows it by its size
    elif values.dtype == torch.float16:
        values = values[shard.local_start : shard.local_stop].to(torch.float32)
        shard = shard.moved(0)
    array = values.numpy()
    runs = (shard.global_start, shard.num_runs, shard.run_length, shard.global_stride,
            shard.local_start, shard.local_stride)
    out = np.zeros(dim)
    getattr(_compiled, kind)(array, array.itemsize, runs, keys, out)
    return torch.from_numpy(out)


class RotationSRHT:
    """`rotation_srht`: rotation to m buckets, then signs, a Hadamard matrix and `dim` of its rows.

    Both stages keep inner products on average: E[R^T R] = I.
    """

    def __init__(self, layout: Layout, dim: int, seed: int) -> None:
        self.dim = dim
        self._size = max(SRHT_DIM, 1 << (dim - 1).bit_length())
        self._first = HashedSketch(layout, "rotation", self._size, seed)
        rng = np.random.default_rng([seed, make_key("", seed, "srht")])
        self._signs = torch.from_numpy(1.0 - 2.0 * rng.integers(0, 2, self._size))
        self._rows = torch.from_numpy(np.sort(rng.permutation(self._size)[:dim]))

    def __call__(self, vector: Iterable[torch.Tensor]) -> torch.Tensor:
        """See :class:`Sketch`."""
        first = self._first(vector)
        mixed = hadamard(first * self._signs.to(first.device))
        return mixed[self._rows.to(first.device)] * math.sqrt(1 / self.dim)


class Identity:
    """`none`: the elements themselves, tensors in the order of their names."""

    def __init__(self, layout: Layout) -> None:
        self.dim = layout.num_elements
        self._layout = layout
        self._starts = layout.global_starts()

    def __call__(self, vector: Iterable[torch.Tensor]) -> torch.Tensor:
        """See :class:`Sketch`."""
        total = torch.zeros(self.dim, dtype=torch.float64)
        for values, shard in counted_shards(vector, self._layout):
            total = total.to(values.device)
            runs = (shard.num_runs, shard.run_length)
            start = self._starts[shard.name] + shard.global_start
            target = total.as_strided(runs, (shard.global_stride, 1), start)
            target += values.as_strided(
                runs, (shard.local_stride, 1), values.storage_offset() + shard.local_start)
        return total


def counted_shards(
    vector: Iterable[torch.Tensor], layout: Layout
) -> Iterator[tuple[torch.Tensor, Shard]]:
    """Yield (flat tensor, shard) for every counted shard that has elements, one tensor at a time.

    A tensor that is not contiguous is copied.
    """
    for values, shards in zip(vector, layout.tensors, strict=True):
        assert values.is_floating_point(), f"a gradient of {values.dtype}"
        flat = values.detach().reshape(-1)
        for shard in shards:
            assert shard.num_elements == 0 or shard.local_stop <= flat.numel(), (
                f"{shard.name}: the tensor has {flat.numel()} elements, the layout expects "
                f"{shard.local_stop}")
            if shard.is_counted and shard.num_elements:
                yield flat, shard


def segments(shard: Shard, size: int) -> Iterator[Shard]:
    """Cut a shard, in order, into pieces of about `size` elements: of a run, or of whole runs."""
    if shard.num_elements <= size:  # what most are: no need of a copy
        yield shard
        return
    if shard.run_length >= size:
        for run in range(shard.num_runs):
            for start in range(0, shard.run_length, size):
                length = min(size, shard.run_length - start)
                yield replace(
                    shard, num_runs=1, run_length=length,
                    global_start=shard.global_start + run * shard.global_stride + start,
                    local_start=shard.local_start + run * shard.local_stride + start)
        return
    step = max(1, size // max(1, shard.run_length))
    for run in range(0, shard.num_runs, step):
        yield replace(
            shard, num_runs=min(step, shard.num_runs - run),
            global_start=shard.global_start + run * shard.global_stride,
            local_start=shard.local_start + run * shard.local_stride)


def hadamard(vector: torch.Tensor) -> torch.Tensor:
    """Multiply (m,) by the Hadamard matrix of +1 and -1, m a power of two. O(m log m)."""
    width = 1
    while width < len(vector):
        pairs = vector.view(-1, 2, width)
        vector = torch.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), 1).view(-1)
        width *= 2
    return vector
