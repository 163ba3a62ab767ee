"""The source of measurements that estimators see, on Megatron's model: see influence/source.py.

Vectors are lists of local tensors in the order of the layout, as large as the local gradients; the
only ones that live here are the saved weights while they are displaced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megatron_d3.errors import ProbeError
from megatron_d3.influence.layout import Shard
from megatron_d3.influence.sketch_hash import hash64, make_key, random_signs
from megatron_d3.influence.source import Loss
from megatron_d3.mcore import collective
from megatron_d3.mcore.probe_groups import across_groups, group_axes, group_number, num_groups
from megatron_d3.mcore.step_root import step_root

if TYPE_CHECKING:
    from megatron_d3.influence.source import Direction, Vector
    from megatron_d3.mcore.probe import Probe, UnitSamples

# Machine epsilon of the matrix products that CUDA may use for float32.
_TF32_EPS = 2.0**-10
# The lower bits of a float32 that bfloat16 has not.
_BF16_TAIL = 0xFFFF


class MegatronSource:
    """Measures the units of one window. Made by `Probe.measuring`.

    Args:
        probe: knows the model.
        samples: the sequences that stand for the units.
    """

    def __init__(self, probe: Probe, samples: UnitSamples) -> None:
        num_units = samples.num_units
        self._probe = probe
        self.layout = probe.layout
        self.num_units = num_units
        self.num_sequences = samples.num_sequences
        self._samples = samples
        self.group, self.num_groups = group_number(), num_groups()
        self._is_displaced = False

    @property
    def precision(self) -> float:
        """See `GradientSource`."""
        coarsest = max(torch.finfo(p.dtype).eps for p in self._probe.parameters)
        is_tf32 = torch.version.cuda is not None and torch.backends.cuda.matmul.allow_tf32
        return max(coarsest, _TF32_EPS) if is_tf32 else coarsest

    @property
    def gradients(self) -> list[torch.Tensor]:
        """The last gradient; see `GradientSource`."""
        return [parameter.main_grad for parameter in self._probe.parameters]  # type: ignore[attr-defined]

    def gradient(self, unit: int, start: int, stop: int, *, sample_key: int | None = None) -> Loss:
        """See `GradientSource`."""
        return self._agreed(*self._probe.run(
            self._samples, unit, start, stop, forward_only=False, sample_key=sample_key))

    def loss(self, unit: int, start: int, stop: int) -> Loss:
        """See `GradientSource`."""
        return self._agreed(*self._probe.run(
            self._samples, unit, start, stop, forward_only=True))

    def _agreed(self, total: float, num_tokens: int) -> Loss:
        """Tell all ranks of the group the loss, which its last stage knows."""
        (total,) = self.group_sum(np.array([total]))
        return Loss(total / max(1, num_tokens), num_tokens)

    def new_vector(self) -> list[torch.Tensor]:
        """See `GradientSource`."""
        return [torch.zeros_like(gradient) for gradient in self.gradients]

    def dot(self, x: Vector, y: Vector) -> float:
        """See `GradientSource`."""
        local = sum(_local_dot(a, b, shards)
                    for a, b, shards in zip(x, y, self.layout.tensors, strict=True))
        return float(self.group_sum(np.array([local]))[0])

    def sum_over_groups(self, vector: Vector) -> None:
        """See `GradientSource`."""
        if self.num_groups == 1:
            return
        for tensor in vector:
            torch.distributed.all_reduce(tensor, group=across_groups())

    def all_sum(self, array: np.ndarray) -> np.ndarray:
        """See `GradientSource`."""
        return self._summed(array, [None])

    def group_sum(self, array: np.ndarray) -> np.ndarray:
        """See `GradientSource`, and `probe_groups.py` for the ranks that belong together."""
        return self._summed(array, group_axes())

    def _summed(self, array: np.ndarray, groups: Sequence[Any]) -> np.ndarray:
        groups = [g for g in groups if torch.distributed.get_world_size(g) > 1]
        if not groups:
            return array.copy()
        device = torch.device("cuda", torch.cuda.current_device())
        tensor = torch.from_numpy(np.array(array, np.float64)).to(device)
        for group in groups:
            torch.distributed.all_reduce(tensor, group=group)
        return tensor.cpu().numpy()

    def from_rank_0(self, array: np.ndarray) -> np.ndarray:
        """See `GradientSource`."""
        return collective.on_rank_0(lambda: array)

    # --- weights --------------------------------------------------------------------------------

    def weights_norm(self) -> float:
        """See `GradientSource`."""
        weights = [p.data for p in self._probe.parameters]
        return float(np.sqrt(self.dot(weights, weights)))

    def tensor_scales(self) -> list[float]:
        """See `GradientSource`."""
        means = self._means([p.data for p in self._probe.parameters], lambda x: torch.dot(x, x))
        return [mean**0.5 for mean in means]

    def _means(
        self, vector: Vector, total: Callable[[torch.Tensor], torch.Tensor]
    ) -> list[float]:
        """Return the mean of each unsharded parameter, in layout order; that of all where it is 0.

        Args:
            vector: local tensors.
            total: the sum that is divided by the number of elements, of flat float64 elements.
        """
        names = {name: i for i, name in enumerate(self.layout.global_sizes)}
        totals = np.zeros(len(names))
        for tensor, shards in zip(vector, self.layout.tensors, strict=True):
            for shard in shards:
                if shard.is_counted:
                    totals[names[shard.name]] += float(total(_runs(tensor, shard).double()))
        totals = self.group_sum(totals)  # (T,)
        sizes = np.array(list(self.layout.global_sizes.values()), np.float64)
        means = totals / sizes
        means[means == 0] = totals.sum() / sizes.sum()
        # NOTE: a tensor with several shards is one parameter of one name (a gated MLP's halves).
        return [float(means[names[shards[0].name]]) for shards in self.layout.tensors]

    @contextlib.contextmanager
    def displaced(self, direction: Direction, size: float) -> Iterator[Vector]:
        """See `GradientSource`. bfloat16 weights are rounded at random, without bias."""
        assert not self._is_displaced, "displacements do not nest"
        parameters = self._probe.parameters
        saved = [parameter.data.clone() for parameter in parameters]
        self._is_displaced = True
        try:
            tensors: Iterable[torch.Tensor] = direction() if callable(direction) else direction
            for index, (parameter, tensor) in enumerate(zip(parameters, tensors, strict=True)):
                self._displace(parameter.data, tensor, size, index)
            yield _Displacement(parameters, saved, size)
        finally:
            for parameter, before in zip(parameters, saved, strict=True):
                parameter.data.copy_(before)
            self._is_displaced = False

    @contextlib.contextmanager
    def moved_along(self, direction: Vector, size: float) -> Iterator[float]:
        """See `GradientSource`. bfloat16 weights are rounded at random, without bias."""
        assert not self._is_displaced, "displacements do not nest"
        swapped: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._is_displaced = True
        try:
            along = 0.0
            for index, (parameter, tensor) in enumerate(
                    zip(self._probe.parameters, direction, strict=True)):
                data = parameter.data
                assert torch.finfo(tensor.dtype).eps <= torch.finfo(data.dtype).eps
                before = data.clone()
                swapped.append((data, before))
                self._displace(data, tensor, size, index)
                along += _local_dot(
                    data.float() - before.float(), tensor, self.layout.tensors[index])
                tensor.copy_(before.view(tensor.shape))
                swapped[-1] = (data, tensor)
            yield float(self.group_sum(np.array([along]))[0])
        finally:
            for data, before in swapped:
                data.copy_(before.view(data.shape))
            self._is_displaced = False

    def _displace(self, data: torch.Tensor, tensor: torch.Tensor, size: float, index: int) -> None:
        if data.dtype == torch.float32:
            data.add_(tensor.view(data.shape).to(data.dtype), alpha=size)
            return
        if data.dtype != torch.bfloat16:
            raise ProbeError(
                f"weights of {data.dtype} cannot be displaced by small amounts; D3 works with "
                "float32 and bfloat16 weights")
        moved = data.float().add_(tensor.view(data.shape).float(), alpha=size)
        tail = torch.empty(data.numel(), dtype=torch.int32, device=data.device)
        for shard in self.layout.tensors[index]:
            words = hash64(_offsets(shard, data.device), make_key(shard.name, 0, "rounding"))
            _runs(tail, shard, as_view=True).copy_(
                (words & _BF16_TAIL).view(shard.num_runs, shard.run_length))
        # Adding a random tail before cutting it off rounds up with the probability it should.
        bits = moved.view(torch.int32).add_(tail.view(data.shape)).bitwise_and_(~_BF16_TAIL)
        data.copy_(bits.view(torch.float32))

    def rademacher(self, probe: int) -> Iterator[torch.Tensor]:
        """See `GradientSource`."""
        for gradient, shards in zip(self.gradients, self.layout.tensors, strict=True):
            signs = torch.empty(gradient.numel(), dtype=gradient.dtype, device=gradient.device)
            for shard in shards:
                key = make_key(shard.name, probe, "rademacher")
                _runs(signs, shard, as_view=True).copy_(random_signs(
                    shard.global_start, (shard.num_runs, shard.run_length), shard.global_stride, key,
                    signs.device))
            yield signs.view(gradient.shape)

    def step_root(self) -> Vector | None:
        """See `GradientSource`.

        Raises:
            ProbeError: the optimizer has no second moments (yet).
        """
        return step_root(self._probe.optimizer, self._probe.parameters,
                         lambda moments: self._means(moments, torch.sum))


class _Displacement(Sequence[torch.Tensor]):
    """(weights - saved) / size, computed when a tensor is asked for: no copy of all of it."""

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], saved: Sequence[torch.Tensor], size: float
    ) -> None:
        self._parameters = parameters
        self._saved = saved
        self._size = size

    def __len__(self) -> int:
        return len(self._saved)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        moved, saved = self._parameters[index].data.float(), self._saved[index].float()
        return (moved - saved) / self._size


def _local_dot(x: torch.Tensor, y: torch.Tensor, shards: Iterable[Shard]) -> float:
    """Return the inner product over the counted elements of a local tensor, summed in float64."""
    return sum(float(torch.dot(_runs(x, shard).double(), _runs(y, shard).double()))
               for shard in shards if shard.is_counted)


def _runs(tensor: torch.Tensor, shard: Shard, *, as_view: bool = False) -> torch.Tensor:
    """Return the elements of a shard: flat, or as a (num_runs, run_length) view to write to."""
    flat = tensor.reshape(-1) if not as_view else tensor.view(-1)
    view = flat.as_strided(
        (shard.num_runs, shard.run_length), (shard.local_stride, 1),
        flat.storage_offset() + shard.local_start)
    return view if as_view else view.reshape(-1)


def _offsets(shard: Shard, device: torch.device) -> torch.Tensor:
    """Return the (num_runs * run_length,) int64 global offsets of a shard's elements."""
    starts = shard.global_start + torch.arange(
        shard.num_runs, device=device) * shard.global_stride  # (R,)
    inner = torch.arange(shard.run_length, device=device)  # (r,)
    return (starts[:, None] + inner).reshape(-1)
