"""From `order: {type: d3, ...}` and Megatron's flags to a window orderer, or to a refusal."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from megatron_d3.config import RunConfig
from megatron_d3.corpus.domain import Domain
from megatron_d3.errors import ConfigError
from megatron_d3.mcore.datasets import SampleMaker
from megatron_d3.mcore.probe import ProbeSettings
from megatron_d3.mcore.window import WindowOrderer
from megatron_d3.plan.header import RunHeader

_NOISE = "differences of gradients would be differences of its noise"

# (attribute, value that is fine, flag, why a probe cannot work with it)
_REFUSED: tuple[tuple[str, Any, str, str], ...] = (
    ("fp8", None, "--fp8-format", "a probe would move the scaling factors that training uses"),
    ("fp4", None, "--fp4-format", "a probe would move the scaling factors that training uses"),
    ("fp16", False, "--fp16", "float16 weights cannot be displaced by small amounts; use --bf16"),
    ("cuda_graph_impl", "none", "--cuda-graph-impl", "a captured step cannot be probed"),
    ("use_megatron_fsdp", False, "--use-megatron-fsdp", "gradients are not whole on any rank"),
    ("use_torch_fsdp2", False, "--use-torch-fsdp2", "gradients are not whole on any rank"),
    ("overlap_moe_expert_parallel_comm", False, "--overlap-moe-expert-parallel-comm",
     "it replaces the forward step"),
    ("delay_wgrad_compute", False, "--delay-wgrad-compute", "gradients come after the backward pass"),
    ("defer_embedding_wgrad_compute", False, "--defer-embedding-wgrad-compute",
     "gradients come after the backward pass"),
    ("moe_input_jitter_eps", None, "--moe-input-jitter-eps", _NOISE),
    ("moe_router_force_load_balancing", False, "--moe-router-force-load-balancing", _NOISE),
    ("moe_router_force_biased", None, "--moe-router-force-biased", _NOISE),
)


def window_orderer(
    config: RunConfig, domains: Sequence[Domain], maker: SampleMaker, args: argparse.Namespace, *,
    header: RunHeader, vocab_size: int,
) -> WindowOrderer | None:
    """Return the orderer that the configuration asks for; None where samples keep their order.

    Args:
        config: of the run.
        domains: opened, in domain order.
        maker: makes the fields of a sample.
        args: Megatron's validated arguments.
        header: what the plan is made from.
        vocab_size: ids of the tokenizer; the embedding may have more rows.

    Raises:
        ConfigError: a flag with which a probe cannot work, `step: optimizer` of another optimizer
            than Adam, or more probe sequences than a unit has; a random order is found without one.
    """
    if config.order is None:
        return None
    d3 = config.order.params
    if d3.objective == "random":
        return WindowOrderer(d3, domains, maker=maker, seed=header.seed, settings=None)
    settings = probe_settings(args, vocab_size)
    if d3.step == "optimizer" and args.optimizer != "adam":
        raise ConfigError(
            f"d3.order.step: `optimizer` is the step of --optimizer adam, got {args.optimizer}; use "
            "`step: sgd`")
    smallest = min(size for _, size in header.batch_schedule.steps)
    if d3.probe_sequences > smallest:
        raise ConfigError(
            f"d3.order.probe_sequences: got {d3.probe_sequences}, more than the {smallest} sequences "
            "of a unit (--global-batch-size)")
    return WindowOrderer(d3, domains, maker=maker, seed=header.seed, settings=settings)


def probe_settings(args: argparse.Namespace, vocab_size: int) -> ProbeSettings:
    """Return what a probe reads of the run.

    Args:
        args: Megatron's validated arguments.
        vocab_size: ids of the tokenizer; the embedding may have more rows.

    Raises:
        ConfigError: a flag with which a probe cannot work.
    """
    for attribute, fine, flag, why in _REFUSED:
        value = getattr(args, attribute, fine)  # some flags exist in some Megatron versions only
        if value != fine and value:
            raise ConfigError(f"{flag}: not possible with d3.order: {why}")
    if args.num_experts is not None and args.moe_router_load_balancing_type == "sinkhorn":
        raise ConfigError(
            "--moe-router-load-balancing-type sinkhorn: not possible with d3.order: its routers "
            "choose other experts in evaluation, in which experts are probed, than in training")
    _refuse_expert_layouts(args)
    has_dropout = args.attention_dropout > 0 or args.hidden_dropout > 0
    return ProbeSettings(
        seq_length=args.seq_length, micro_batch_size=args.micro_batch_size, vocab_size=vocab_size,
        has_dropout=has_dropout or args.num_experts is not None)


def _refuse_expert_layouts(args: argparse.Namespace) -> None:
    """Refuse what a group of ranks (`probe_groups.py`) cannot be made of.

    Raises:
        ConfigError: experts are split otherwise than a whole number of model-parallel groups is.
    """
    num_parts = args.expert_model_parallel_size
    num_tensor, num_expert_tensor = args.tensor_model_parallel_size, args.expert_tensor_parallel_size
    if args.num_experts is None:
        return
    if num_parts == 1 and num_expert_tensor != num_tensor:
        raise ConfigError(
            f"--expert-tensor-parallel-size {num_expert_tensor}: not possible with d3.order while "
            f"--tensor-model-parallel-size is {num_tensor} and experts are not split otherwise; use "
            f"{num_tensor}, or --expert-model-parallel-size above 1")
    if num_parts > 1 and args.context_parallel_size > 1:
        raise ConfigError(
            "--expert-model-parallel-size: not possible with d3.order and --context-parallel-size "
            "above 1: the ranks of one sequence would have to be told from replicas; use one of them")
    if num_parts * num_expert_tensor % num_tensor:
        raise ConfigError(
            f"--expert-model-parallel-size {num_parts} times --expert-tensor-parallel-size "
            f"{num_expert_tensor}: with d3.order it has to be a multiple of "
            f"--tensor-model-parallel-size {num_tensor}, so that the tokens of a sequence meet every "
            "expert once")
