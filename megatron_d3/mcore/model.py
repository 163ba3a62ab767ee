"""The model, built by stock Megatron: the one place that knows its class.

Megatron 0.19 builds a GPT from its arguments itself; this file only adds what a run without
Transformer Engine or Apex lacks: norm layers that mark their parameters `sequence_parallel`.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.models.gpt import default_layer_spec


def model_config(args: argparse.Namespace) -> Any:
    """Megatron's model configuration for these arguments."""
    config = gpt_config_from_args(args)
    if args.sequence_parallel and args.transformer_impl == "local" and args.spec is None:
        config.transformer_layer_spec = _spec_with_marked_norms
    return config


def _spec_with_marked_norms(config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Megatron's local layers, their torch norms replaced by :func:`marked_norm`."""
    spec = default_layer_spec(config, vp_stage)
    if isinstance(spec, TransformerBlockSubmodules):  # with experts, this stage's layers one by one
        layers = spec.layer_specs
    else:
        layers = [spec] * get_num_layers_to_build(
            config.transformer, vp_stage, mpu.get_pipeline_model_parallel_rank())
    return TransformerBlockSubmodules(
        layer_specs=[_with_marked_norms(layer) for layer in layers], layer_norm=marked_norm)


def _with_marked_norms(layer: Any) -> Any:
    submodules = dataclasses.replace(
        layer.submodules, input_layernorm=marked_norm, pre_mlp_layernorm=marked_norm)
    return dataclasses.replace(layer, submodules=submodules)


def marked_norm(
    config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
) -> torch.nn.Module:
    """A torch LayerNorm or RMSNorm that works under sequence parallelism.

    Each tensor-parallel rank normalises its part of the sequence, so the gradient of the norm's
    parameters is partial: the mark `sequence_parallel` makes Megatron add the parts up.
    """
    norms = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
    norm = norms[config.normalization](hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm
