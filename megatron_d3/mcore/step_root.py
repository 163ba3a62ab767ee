"""P^(1/2) of the optimizer's preconditioner, read from Megatron's (sharded) optimizer state.

Which step that is, and what of it is left out: `influence/adam.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from megatron_d3.errors import ProbeError
from megatron_d3.influence.adam import step_root_
from megatron_d3.mcore.probe_groups import optimizer_group

if TYPE_CHECKING:
    from megatron_d3.influence.source import Vector


def step_root(
    optimizer: Any, parameters: Sequence[torch.nn.Parameter],
    means_of: Callable[[Vector], Sequence[float]],
) -> list[torch.Tensor] | None:
    """Return P^(1/2) of each parameter, or None where the optimizer is plain SGD.

    With the distributed optimizer each data-parallel rank holds a part of v, and all-reduces of the
    size of the local gradients collect it: collective over the data-parallel group (of experts, the
    expert-data-parallel one).

    Args:
        optimizer: Megatron's.
        parameters: float32 or bfloat16 parameters of this rank, in layout order.
        means_of: returns the mean of each unsharded parameter of a vector, in layout order; that of
            all parameters where it is 0.

    Returns:
        For each parameter a float32 tensor of its shape, or None.

    Raises:
        ProbeError: another optimizer than Adam or SGD, or no step was taken yet.
    """
    leaves = _leaves(optimizer)
    if all("sgd" in type(leaf.optimizer).__name__.lower() for leaf in leaves):
        return None
    num_steps = steps_taken(optimizer)
    if num_steps == 0:
        raise ProbeError(
            "order.step: optimizer: Adam has no second moments before its first step")
    group = leaves[0].optimizer.param_groups[0]
    beta2 = group["betas"][1]
    moments = []
    for parameter in parameters:
        moment = _second_moment(parameter, leaves).div_(1.0 - beta2**num_steps)
        moments.append(moment.view(parameter.shape))
    return [step_root_(moment, mean, beta2=beta2, num_steps=num_steps, eps=group["eps"])
            for moment, mean in zip(moments, means_of(moments), strict=True)]


def steps_taken(optimizer: Any) -> int:
    """Steps that Adam has taken: 0 while its second moments mean nothing; the same on all ranks."""
    steps = [0]
    for leaf in _leaves(optimizer):
        steps += [int(group.get("step", 0)) for group in leaf.optimizer.param_groups]
        steps += [int(state["step"]) for state in leaf.optimizer.state.values() if "step" in state]
    # A rank of the distributed optimizer may own nothing.
    most = torch.tensor(max(steps), device=torch.device("cuda", torch.cuda.current_device()))
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
    return int(most)


def clip_of(optimizer: Any) -> float | None:
    """Largest gradient norm of a step, or None."""
    clip = float(_leaves(optimizer)[0].config.clip_grad)
    return clip if clip > 0 else None


def learning_rate_of(optimizer: Any) -> float:
    """The learning rate of the next step; the largest where parameter groups differ."""
    return max(float(group["lr"]) for group in optimizer.param_groups)


def _leaves(optimizer: Any) -> list[Any]:
    parts = getattr(optimizer, "chained_optimizers", None)
    return [optimizer] if parts is None else [leaf for part in parts for leaf in _leaves(part)]


def _second_moment(parameter: torch.nn.Parameter, leaves: Sequence[Any]) -> torch.Tensor:
    """Return a float32 copy of Adam's v of a parameter, flat."""
    is_distributed = any(hasattr(leaf, "model_param_group_index_map") for leaf in leaves)
    moment = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
    for leaf in leaves:
        if is_distributed:
            if parameter in leaf.model_param_group_index_map:
                owned = leaf._get_model_param_range_map(parameter)["param"]
                states = leaf._get_main_param_and_optimizer_states(parameter)
                moment[owned.start:owned.end] = _moment(states).view(-1).float()
            continue
        main = getattr(parameter, "main_param", None)
        state = leaf.optimizer.state.get(parameter if main is None else main)
        if state:
            return moment.copy_(_moment(state).reshape(-1))
    if not is_distributed:
        raise ProbeError("order.step: optimizer: the optimizer has no state of a parameter")
    torch.distributed.all_reduce(moment, group=optimizer_group(parameter))
    return moment


def _moment(state: Any) -> torch.Tensor:
    if "exp_avg_sq" not in state:
        raise ProbeError(
            "order.step: optimizer: needs Adam's second moments (--optimizer adam) or --optimizer "
            f"sgd; this optimizer keeps {', '.join(sorted(state))}")
    moment: torch.Tensor = state["exp_avg_sq"]
    return moment
