"""Which ranks measure a unit together, and which hold the same part of the model elsewhere.

    group   the ranks of one copy of the experts, with pipeline parallelism those of all stages
    across  the ranks at the same place of every group

Without expert parallelism a group is a model-parallel (and context-parallel) group. With it, the
ranks that share one copy of the experts make up R whole model-parallel groups, data-parallel
replicas of all other weights. They measure together: the same sequences of the same unit at the
same time, so that every exchange of tokens finds its partners. Losses, and gradients of what is no
expert, are then whole on each replica and count on the first; an expert hears the same tokens from
every replica, and its gradient is R times the unit's.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import mpu


def group_number() -> int:
    """Return this rank's group, in [0, num_groups)."""
    return int(mpu.get_data_parallel_rank()) // num_replicas()


def num_groups() -> int:
    """Return how many groups there are."""
    return int(mpu.get_data_parallel_world_size()) // num_replicas()


def num_replicas() -> int:
    """Return R, the model-parallel groups in a group; 1 without expert parallelism."""
    num_parts = mpu.get_expert_model_parallel_world_size()
    if num_parts == 1:
        return 1
    num_ranks = num_parts * mpu.get_expert_tensor_parallel_world_size()
    return int(num_ranks // mpu.get_tensor_model_parallel_world_size())


def is_first_replica() -> bool:
    """Whether this rank counts what all replicas of a group know."""
    return bool(mpu.get_data_parallel_rank() % num_replicas() == 0)


def group_axes() -> list[Any]:
    """Return the process groups whose product is this rank's group."""
    if num_replicas() > 1:
        return [mpu.get_expert_tensor_model_pipeline_parallel_group()]
    return [mpu.get_model_parallel_group(), mpu.get_context_parallel_group()]


def across_groups() -> Any:
    """Return the process group of the ranks at this rank's place in every group."""
    if num_replicas() > 1:
        return mpu.get_expert_data_parallel_group()
    return mpu.get_data_parallel_group()


def is_expert(parameter: torch.nn.Parameter) -> bool:
    """Whether a parameter is split by expert parallelism: Megatron's own mark."""
    return not getattr(parameter, "allreduce", True)


def optimizer_group(parameter: torch.nn.Parameter) -> Any:
    """Return the process group over which the distributed optimizer splits a parameter's state."""
    if is_expert(parameter):
        return mpu.get_expert_data_parallel_group(partial_expert_data_parallel=True)
    return mpu.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)
