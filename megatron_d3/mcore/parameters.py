"""Where each local parameter lies in the unsharded model: what makes a sketch independent of layout.

Megatron's own description for its distributed checkpoints is the source: `sharded_state_dict` names
each tensor by a key that no parallel layout changes, with its global shape and the offset of the
local part, and tells replicas apart. So tensor, pipeline and virtual pipeline parallelism, tied
embeddings, grouped query attention, gated MLPs (two halves in one tensor) and experts are handled
where Megatron handles them, and nothing here depends on the model's class.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.utils import unwrap_model

from megatron_d3.errors import ProbeError
from megatron_d3.influence.layout import Layout, Shard
from megatron_d3.mcore.probe_groups import group_axes, is_expert, is_first_replica


def trained_parameters(chunks: Sequence[Any]) -> list[torch.nn.Parameter]:
    """Return this rank's parameters that have gradients, in the order of every vector."""
    return [p for chunk in chunks for p in chunk.parameters() if p.requires_grad]


def parameter_layout(chunks: Sequence[Any], parameters: Sequence[torch.nn.Parameter]) -> Layout:
    """Describe the local parameters; collective over the ranks of one group.

    Args:
        chunks: the model chunks of this rank, as Megatron trains them.
        parameters: :func:`trained_parameters` of them.

    Raises:
        ProbeError: a parameter is not covered by Megatron's description of the model.
    """
    starts = [(p.data_ptr(), i) for i, p in enumerate(parameters)]
    starts.sort()
    addresses = [address for address, _ in starts]
    shards: list[list[Shard]] = [[] for _ in parameters]
    for piece in _pieces(chunks):
        data = piece.data
        at = bisect_right(addresses, data.data_ptr()) - 1
        if at < 0 or data.numel() == 0:
            continue
        index = starts[at][1]
        parameter = parameters[index]
        offset = (data.data_ptr() - parameter.data_ptr()) // parameter.element_size()
        if offset >= parameter.numel():
            continue  # a buffer, or a parameter that is not trained
        found = _shards(piece, offset)
        if not (is_expert(parameter) or is_first_replica()):
            found = (shard.replica() for shard in found)
        shards[index].extend(found)
    for parameter, parts in zip(parameters, shards, strict=True):
        covered = sum(shard.num_runs * shard.run_length for shard in parts)
        if covered != parameter.numel():
            raise ProbeError(
                f"the model's sharded_state_dict describes {covered} of the {parameter.numel()} "
                f"elements of a parameter of shape {tuple(parameter.shape)}: D3 cannot tell where "
                "they lie in the unsharded model")
    sizes = {shard.name: shard.global_size for parts in shards for shard in parts}
    return Layout(tuple(tuple(parts) for parts in shards), _all_sizes(sizes))


def _pieces(chunks: Sequence[Any]) -> Iterator[ShardedTensor]:
    metadata = {"dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}
    for model in unwrap_model(list(chunks)):
        for value in model.sharded_state_dict(metadata=metadata).values():
            built = value.build() if isinstance(value, ShardedTensorFactory) else value
            yield from _tensors(built)


def _tensors(value: Any) -> Iterator[ShardedTensor]:
    if isinstance(value, ShardedTensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _shards(piece: ShardedTensor, local_start: int) -> Iterator[Shard]:
    """Describe one piece as runs of rows; a piece cut in more than two dimensions gives several."""
    stacked = piece.prepend_axis_num
    name = piece.key
    if stacked:
        name += "[" + ",".join(str(i) for i in piece.global_offset[:stacked]) + "]"
    shape = tuple(piece.global_shape[stacked:])
    offset = tuple(piece.global_offset[stacked:])
    local = tuple(piece.data.shape)
    if len(local) > 2:
        # Dimensions that are whole fold into the one before.
        while len(local) > 2 and local[-1] == shape[-1]:
            local = (*local[:-2], local[-2] * local[-1])
            offset = (*offset[:-2], offset[-2] * shape[-1])
            shape = (*shape[:-2], shape[-2] * shape[-1])
    if len(local) == 1:
        local, offset, shape = (1, *local), (0, *offset), (1, *shape)
    strides = [math.prod(shape[i + 1:]) for i in range(len(shape))]
    rows, columns = local[-2:]
    if columns == shape[-1]:  # whole rows are one run
        rows, columns = 1, rows * columns
    is_counted = not any(piece.replica_id[:-1] if isinstance(piece.replica_id, tuple) else ())
    is_counted = is_counted and mpu.get_context_parallel_rank() == 0
    step = local[-2] * local[-1]
    for number, leading in enumerate(itertools.product(*(range(n) for n in local[:-2]))):
        start = sum((o + i) * s for o, i, s in zip(offset[:-2], leading, strides, strict=False))
        start += offset[-2] * strides[-2] + offset[-1]
        yield Shard(
            name=name, global_size=math.prod(shape), global_start=start, num_runs=rows,
            run_length=columns, global_stride=shape[-1], local_start=local_start + number * step,
            local_stride=columns, is_counted=is_counted)


def _all_sizes(sizes: dict[str, int]) -> dict[str, int]:
    for group in group_axes():
        gathered: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(gathered, sizes, group=group)
        sizes = {name: size for part in gathered for name, size in part.items()}
    return dict(sorted(sizes.items()))
