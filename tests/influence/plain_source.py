"""A `GradientSource` on plain torch, and a world of ranks that are threads of one process.

    sources = World(num_groups=2, num_shards=2)         # 2 x data-parallel, 2 x model-parallel
    world.run(lambda rank: estimate(PlainSource(model, task, rank=rank), ...))   # one result a rank

Every rank computes whole gradients and shows its group's slice of them: each parameter's flat
elements are cut in `num_shards` ranges, except small ones, which are replicas as norms are under
tensor parallelism.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_d3.influence.layout import Layout, flat_slice
from megatron_d3.influence.source import Loss

REPLICATED_BELOW = 20  # elements

# (model, unit, start, stop, sample_key) -> (sum of token losses, tokens)
Task = Callable[[torch.nn.Module, int, int, int, int | None], tuple[torch.Tensor, int]]


class World:
    """Ranks as threads; rank = group * num_shards + shard."""

    def __init__(self, num_groups: int = 1, num_shards: int = 1) -> None:
        self.num_groups, self.num_shards = num_groups, num_shards
        self._slots: list[Any] = [None] * (num_groups * num_shards)
        self._barrier = threading.Barrier(len(self._slots))

    def run(self, work: Callable[[Rank], Any]) -> list[Any]:
        """Return what `work` returns on each rank, in order; the first real error is raised."""
        ranks = [Rank(self, g, s) for g in range(self.num_groups) for s in range(self.num_shards)]

        def guarded(rank: Rank) -> Any:
            try:
                return work(rank)
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(len(ranks)) as pool:
            futures = [pool.submit(guarded, rank) for rank in ranks]
        errors = [f.exception() for f in futures if f.exception() is not None]
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]

    def exchange(self, place: int, value: Any) -> list[Any]:
        """Return what every rank brought."""
        self._slots[place] = value
        self._barrier.wait()
        values = list(self._slots)
        self._barrier.wait()
        return values


@dataclass(frozen=True)
class Rank:
    world: World
    group: int
    shard: int

    def exchange(self, value: Any) -> list[list[Any]]:
        """Return what all ranks brought, by group and shard."""
        n = self.world.num_shards
        values = self.world.exchange(self.group * n + self.shard, value)
        return [values[g : g + n] for g in range(0, len(values), n)]


class PlainSource:
    """Units' losses and gradients of a module.

    With several groups, calls of a group's own (`dot`, `group_sum`, `displaced`) may come at
    different times than those of another: ranks then exchange through their group's own world.
    """

    def __init__(
        self, model: torch.nn.Module, task: Task, *, num_units: int, num_sequences: int,
        rank: Rank | None = None, group_world: World | None = None,
        root: dict[str, torch.Tensor] | None = None,
    ) -> None:
        self.model = copy.deepcopy(model)
        self._task = task
        self._rank = rank or Rank(World(), 0, 0)
        self._group = Rank(group_world or World(1, 1), 0, self._rank.shard)
        self._root = root
        self.num_units, self.num_sequences = num_units, num_sequences
        self.group, self.num_groups = self._rank.group, self._rank.world.num_groups
        self.parameters = dict(self.model.named_parameters())
        tensors, self._ranges = [], []
        num_shards = self._rank.world.num_shards
        for name, p in self.parameters.items():
            if p.numel() < REPLICATED_BELOW:
                start, stop = 0, p.numel()
            else:
                start, stop = (p.numel() * (self._rank.shard + i) // num_shards for i in (0, 1))
            shard = flat_slice(name, p.shape, start, stop)
            is_replica = p.numel() < REPLICATED_BELOW and self._rank.shard > 0
            tensors.append((shard.replica() if is_replica else shard,))
            self._ranges.append((start, stop))
        self.layout = Layout(tuple(tensors), {n: p.numel() for n, p in self.parameters.items()})
        self.precision = torch.finfo(next(iter(self.parameters.values())).dtype).eps
        self.gradients: list[torch.Tensor] = []
        self.calls: list[tuple[Any, ...]] = []

    def _local(self, whole: list[torch.Tensor]) -> list[torch.Tensor]:
        return [
            x.detach().reshape(-1)[a:b].clone()
            for x, (a, b) in zip(whole, self._ranges, strict=True)]

    def _whole(self, local: list[torch.Tensor]) -> list[torch.Tensor]:
        """Put the pieces of the group's ranks together."""
        (pieces,) = self._group.exchange(list(local))
        result = []
        for i, p in enumerate(self.parameters.values()):
            parts = [rank[i].reshape(-1) for rank in pieces]
            is_replica = p.numel() < REPLICATED_BELOW
            result.append((parts[0] if is_replica else torch.cat(parts)).view(p.shape))
        return result

    def gradient(self, unit: int, start: int, stop: int, *, sample_key: int | None = None) -> Loss:
        self.calls.append(("gradient", unit, start, stop, sample_key))
        total, num_tokens = self._task(self.model, unit, start, stop, sample_key)
        weights = list(self.parameters.values())
        self.gradients = self._local(list(torch.autograd.grad(total / max(1, num_tokens), weights)))
        return Loss(float(total.detach()) / max(1, num_tokens), num_tokens)

    def loss(self, unit: int, start: int, stop: int) -> Loss:
        self.calls.append(("loss", unit, start, stop))
        with torch.no_grad():
            total, num_tokens = self._task(self.model, unit, start, stop, None)
        return Loss(float(total) / num_tokens, num_tokens)

    def new_vector(self) -> list[torch.Tensor]:
        return [torch.zeros_like(x) for x in self._local(list(self.parameters.values()))]

    def dot(self, x, y) -> float:
        local = sum(
            float(torch.dot(a.reshape(-1).double(), b.reshape(-1).double()))
            for a, b, (shard,) in zip(x, y, self.layout.tensors, strict=True) if shard.is_counted)
        return float(self.group_sum(np.array([local]))[0])

    def sum_over_groups(self, vector) -> None:
        groups = self._rank.exchange([x.clone() for x in vector])
        for i, x in enumerate(vector):
            x.copy_(sum(group[self._rank.shard][i] for group in groups))

    def all_sum(self, array: np.ndarray) -> np.ndarray:
        return sum(a for group in self._rank.exchange(array) for a in group)

    def group_sum(self, array: np.ndarray) -> np.ndarray:
        return sum(self._group.exchange(array)[0])

    def from_rank_0(self, array: np.ndarray) -> np.ndarray:
        return self._rank.exchange(array)[0][0].copy()

    def weights_norm(self) -> float:
        return float(torch.cat([p.detach().reshape(-1).double()
                                for p in self.parameters.values()]).norm())

    def tensor_scales(self) -> list[float]:
        overall = self.weights_norm() / self.layout.num_elements**0.5
        return [float(p.detach().double().square().mean().sqrt()) or overall
                for p in self.parameters.values()]

    @contextlib.contextmanager
    def displaced(self, direction, size: float) -> Iterator[list[torch.Tensor]]:
        whole = self._whole(list(direction() if callable(direction) else direction))
        saved = [p.detach().clone() for p in self.parameters.values()]
        try:
            with torch.no_grad():
                for p, x in zip(self.parameters.values(), whole, strict=True):
                    p.add_(x, alpha=size)
            applied = zip(self.parameters.values(), saved, strict=True)
            yield self._local([(p.detach() - s) / size for p, s in applied])
        finally:
            with torch.no_grad():
                for p, s in zip(self.parameters.values(), saved, strict=True):
                    p.copy_(s)

    @contextlib.contextmanager
    def moved_along(self, direction, size: float) -> Iterator[float]:
        with self.displaced(direction, size) as applied:
            along = size * self.dot(applied, direction)
            for tensor in direction:
                tensor.fill_(float("nan"))  # it holds other things meanwhile
            yield along

    def rademacher(self, probe: int) -> Iterator[torch.Tensor]:
        for (name, p), (start, stop) in zip(self.parameters.items(), self._ranges, strict=True):
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) * 1000 + probe)
            bits = torch.randint(0, 2, (p.numel(),), generator=generator)
            yield (1 - 2 * bits[start:stop]).to(p.dtype)

    def step_root(self) -> list[torch.Tensor] | None:
        return None if self._root is None else self._local([self._root[n] for n in self.parameters])


def in_world(
    num_groups: int, num_shards: int, work: Callable[[PlainSource], Any], *args: Any,
    **options: Any,
) -> list[Any]:
    """Return what `work` makes of each rank's source; further arguments make the sources."""
    groups = [World(1, num_shards) for _ in range(num_groups)]
    return World(num_groups, num_shards).run(lambda rank: work(
        PlainSource(*args, rank=rank, group_world=groups[rank.group], **options)))
