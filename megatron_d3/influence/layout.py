"""Where the elements of a rank's parameters lie in the unsharded model.

    local tensor 0 -> (Shard, ...)     its elements: runs of an unsharded tensor, by global name
    local tensor 1 -> (Shard, ...)
    all of them    -> Layout           with the names and sizes of the whole model

A *vector* over a layout is one contiguous tensor for each local parameter, in the layout's order.
What is computed from (global name, global offset) alone, such as a sketch or a random sign, is then
the same under every tensor, pipeline and data-parallel split once the ranks' parts are added.

An offset counts the elements of the unsharded tensor in row-major order. A tensor split along its
first dimension holds one run, one split along its second a run for each row; a matrix stored as two
halves of different origin (a gated MLP) has two shards, so has the piece of a flat buffer that
starts inside a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Shard:
    """A piece of an unsharded parameter, held in a flattened local tensor.

    Run r covers the global offsets `global_start + r * global_stride` up to `run_length` further,
    and lies at `local_start + r * local_stride` of the local tensor. Runs do not overlap.
    """

    name: str
    """Global name of the parameter, the same under every layout."""
    global_size: int
    """Elements of the unsharded tensor."""
    global_start: int
    num_runs: int
    run_length: int
    global_stride: int
    local_start: int
    local_stride: int
    is_counted: bool = True
    """False: a replica of what another rank counts; sketches and inner products skip it."""

    def __post_init__(self) -> None:
        sizes = (self.global_start, self.num_runs, self.run_length, self.local_start)
        assert min(sizes) >= 0, f"{self.name}: negative start or length in {self}"
        if self.num_elements == 0:
            return
        assert self.global_stop <= self.global_size, (
            f"{self.name}: runs end at {self.global_stop} of {self.global_size} elements")
        if self.num_runs > 1:
            assert min(self.global_stride, self.local_stride) >= self.run_length, (
                f"{self.name}: runs of {self.run_length} elements overlap at strides "
                f"{self.global_stride} and {self.local_stride}")

    @property
    def num_elements(self) -> int:
        """Elements in all runs."""
        return self.num_runs * self.run_length

    @property
    def global_stop(self) -> int:
        """Global offset after the last element of the last run."""
        return self.global_start + (self.num_runs - 1) * self.global_stride + self.run_length

    @property
    def local_stop(self) -> int:
        """Local offset after the last element of the last run."""
        return self.local_start + (self.num_runs - 1) * self.local_stride + self.run_length

    def moved(self, local_start: int) -> Shard:
        """Return the same piece at another place of its local tensor."""
        return replace(self, local_start=local_start)

    def replica(self) -> Shard:
        """Return the same piece, counted by another rank."""
        return replace(self, is_counted=False)


@dataclass(frozen=True)
class Layout:
    """The local tensors of one rank, and the names and sizes of the whole model."""

    tensors: tuple[tuple[Shard, ...], ...]
    """For each local tensor the shards it is made of."""
    global_sizes: Mapping[str, int]
    """Elements of every unsharded tensor of all ranks, sorted by name: the same on every rank."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "global_sizes", dict(sorted(self.global_sizes.items())))
        for shard in (shard for shards in self.tensors for shard in shards):
            size = self.global_sizes.get(shard.name)
            assert size == shard.global_size, (
                f"{shard.name}: {shard.global_size} elements here, {size} in the list of all names")

    @property
    def num_elements(self) -> int:
        """Elements of the unsharded model, each once."""
        return sum(self.global_sizes.values())

    def global_starts(self) -> dict[str, int]:
        """Return where each tensor starts in the concatenation of all in order of their names."""
        starts, start = {}, 0
        for name, size in self.global_sizes.items():
            starts[name] = start
            start += size
        return starts


def single_layout(shapes: Mapping[str, Sequence[int]]) -> Layout:
    """Return the layout of an unsharded model: its tensors as they come, all counted."""
    tensors = tuple((whole_tensor(name, shape),) for name, shape in shapes.items())
    return Layout(tensors, {name: math.prod(shape) for name, shape in shapes.items()})


def whole_tensor(name: str, shape: Sequence[int]) -> Shard:
    """Return the shard of a parameter that is not split."""
    return flat_slice(name, shape, 0, math.prod(shape))


def flat_slice(name: str, shape: Sequence[int], start: int, stop: int) -> Shard:
    """Return the shard of the flat elements [start, stop), as a ZeRO-like split holds them."""
    length = stop - start
    return Shard(name, math.prod(shape), start, 1, length, length, 0, length)


def dim_slice(name: str, shape: Sequence[int], dim: int, start: int, stop: int) -> Shard:
    """Return the shard of the indices [start, stop) of one dimension, the local tensor contiguous.

    `dim` 0 is what a column-parallel weight (out, in) holds, 1 what a row-parallel one does.

    >>> shard = dim_slice("w", (3, 8), 1, 4, 8)
    >>> shard.num_runs, shard.run_length, shard.global_start, shard.global_stride
    (3, 4, 4, 8)
    """
    assert 0 <= start <= stop <= shape[dim], f"{name}: [{start}, {stop}) of {shape[dim]} in {dim}"
    inner = math.prod(shape[dim + 1:])
    num_runs, length = math.prod(shape[:dim]), (stop - start) * inner
    stride = shape[dim] * inner
    if length == stride:  # nothing is cut off: one run
        return whole_tensor(name, shape)
    return Shard(name, math.prod(shape), start * inner, num_runs, length, stride, 0, length)


def cut(shard: Shard, start: int, stop: int) -> tuple[Shard, ...]:
    """Return what the local range [start, stop) holds of a shard, with `start` as the new origin.

    For a contiguous piece of a flat local tensor: a part of a run, whole runs, a part of a run.
    """
    pieces: list[Shard] = []
    if shard.num_elements == 0:
        return ()
    stride = shard.local_stride if shard.num_runs > 1 else max(shard.run_length, 1)
    first = max(0, (start - shard.local_start) // stride)
    last = min(shard.num_runs - 1, (stop - 1 - shard.local_start) // stride)
    run = first
    while run <= last:
        place = shard.local_start + run * stride  # of the run's first element
        head = max(0, start - place)
        tail = min(shard.run_length, stop - place)
        count = 1
        if head == 0 and tail == shard.run_length:  # so are all that end by `stop`
            whole = (stop - place - shard.run_length) // stride + 1
            count = min(whole, shard.num_runs - run)
        if head < tail:
            pieces.append(replace(
                shard, global_start=shard.global_start + run * shard.global_stride + head,
                num_runs=count, run_length=tail - head, local_start=place + head - start))
        run += count
    return tuple(pieces)
