"""A frozen reference model beside the one that trains, under the same parallel layout.

    checkpoint = find_checkpoint(path)             # its folder and its arguments; no process group
    require_same_text(checkpoint, args)            # tokenizer, vocabulary, sequence length
    model = ReferenceModel(checkpoint, args)       # built, loaded, eval mode
    losses = model.token_losses(iterators, n)      # Megatron's own forward-only pipeline schedule

The reference's shape comes from the arguments stored in its checkpoint, so it may be of another size
than the model that trains; layout and precision are the run's.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, mpu
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model, unwrap_model

from megatron_d3.errors import ConfigError
from megatron_d3.mcore.args import tokenizer_name
from megatron_d3.mcore.model import model_config
from megatron_d3.mcore.rng import untouched_rng

WHERE = "d3.mix.reference"

# Arguments that make the shape of a dense GPT, and nothing about where or how it runs.
SHAPE = (
    "num_layers", "encoder_num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads",
    "num_query_groups", "group_query_attention", "kv_channels", "max_position_embeddings",
    "position_embedding_type", "add_position_embedding", "use_rotary_position_embeddings",
    "rotary_base", "rotary_percent", "rotary_interleaved", "rotary_seq_len_interpolation_factor",
    "use_rope_scaling", "rope_scaling_factor", "rope_type", "add_bias_linear", "add_qkv_bias",
    "squared_relu", "swiglu", "quick_geglu", "untie_embeddings_and_output_weights",
    "apply_layernorm_1p", "layernorm_zero_centered_gamma", "normalization", "norm_epsilon",
    "layernorm_epsilon", "qk_layernorm", "qk_l2_norm", "apply_query_key_layer_scaling",
    "softmax_type", "window_size", "window_attn_skip_freq", "no_rope_freq",
)
# What a reference cannot have yet, and the value that says it has not.
_NOT_DENSE = (
    "num_experts", "heterogeneous_layers_config_path", "hybrid_layer_pattern",
    "experimental_attention_variant", "mtp_num_layers", "multi_latent_attention", "spec",
)
# How the run spreads its own layers over the pipeline: the reference's are spread evenly.
_UNEVEN = (
    "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
    "pipeline_model_parallel_layout",
)

Iterators = Sequence[Iterator[dict[str, Any]] | None]


@dataclass(frozen=True)
class ReferenceCheckpoint:
    """A checkpoint on disk and the arguments that its run had.

    Attributes:
        folder: the `iter_*` folder.
        args: Megatron's arguments of the run that saved it.
        where: what asked for it, the first word of errors.
    """

    folder: Path
    args: argparse.Namespace
    where: str = WHERE


def find_checkpoint(folder: Path, *, where: str = WHERE) -> ReferenceCheckpoint:
    """Look a checkpoint up and read its arguments, without any process group.

    Args:
        folder: an `iter_*` folder.
        where: what asks for it, the first word of errors.

    Raises:
        ConfigError: there is none, or not in the format `torch_dist`.
    """
    if not dist_checkpointing.check_is_distributed_checkpoint(str(folder)):
        raise ConfigError(
            f"{where}: no checkpoint in {folder}; expected the --save folder of its run, "
            "saved with --ckpt-format torch_dist")
    stored = dist_checkpointing.load_common_state_dict(str(folder))
    if stored.get("args") is None:
        raise ConfigError(f"{where}: the checkpoint {folder} does not hold its run's arguments")
    return ReferenceCheckpoint(folder, stored["args"], where)


def require_same_text(checkpoint: ReferenceCheckpoint, args: argparse.Namespace) -> None:
    """Check that the reference's token losses can be compared with this run's, token by token.

    Raises:
        ConfigError: another tokenizer, vocabulary or sequence length, or as `require_layout`.
    """
    theirs = checkpoint.args
    where = f"{checkpoint.where}: {checkpoint.folder} was trained with"
    if tokenizer_name(theirs) != tokenizer_name(args):
        raise ConfigError(
            f"{where} tokenizer {tokenizer_name(theirs)} (type:file:padded vocabulary), this run has "
            f"{tokenizer_name(args)}; token losses compare only with one tokenizer and vocabulary")
    if theirs.seq_length != args.seq_length:
        raise ConfigError(
            f"{where} --seq-length {theirs.seq_length}, this run has {args.seq_length}; train the "
            "reference with this one")
    require_layout(checkpoint, args)


def require_layout(checkpoint: ReferenceCheckpoint, args: argparse.Namespace) -> None:
    """Check that the model can be built under this run's layout.

    Raises:
        ConfigError: not a dense GPT, or layers or heads that do not divide.
    """
    theirs = checkpoint.args
    where = f"{checkpoint.where}: {checkpoint.folder} was trained with"
    unfit = [name for name in _NOT_DENSE if getattr(theirs, name, None)]
    if unfit:
        raise ConfigError(f"{where} {', '.join(unfit)}: only dense GPT models can be references yet")
    num_stages = args.pipeline_model_parallel_size * (
        args.virtual_pipeline_model_parallel_size or 1)
    if theirs.num_layers % num_stages:
        raise ConfigError(
            f"{where} {theirs.num_layers} layers, which do not divide into this run's {num_stages} "
            "pipeline stages")
    if theirs.num_attention_heads % args.tensor_model_parallel_size:
        raise ConfigError(
            f"{where} {theirs.num_attention_heads} attention heads, which do not divide into this "
            f"run's --tensor-model-parallel-size {args.tensor_model_parallel_size}")


def reference_args(
    checkpoint: ReferenceCheckpoint, args: argparse.Namespace
) -> argparse.Namespace:
    """Return this run's arguments with the reference's shape; `args` stays as it is."""
    merged = copy.copy(args)
    for name in SHAPE:
        if hasattr(checkpoint.args, name) and hasattr(args, name):
            setattr(merged, name, getattr(checkpoint.args, name))
    for name in (*_UNEVEN, *_NOT_DENSE):
        if hasattr(args, name):
            setattr(merged, name, None)
    merged.multi_latent_attention = False
    merged.attention_dropout = merged.hidden_dropout = 0.0
    merged.perform_initialization = False  # every weight is loaded
    return merged


class ReferenceModel:
    """This rank's part of the reference model.

    Args:
        checkpoint: what to load.
        args: this run's arguments.

    Raises:
        ConfigError: a weight is missing in the checkpoint.
    """

    def __init__(self, checkpoint: ReferenceCheckpoint, args: argparse.Namespace) -> None:
        with untouched_rng():
            config = model_config(reference_args(checkpoint, args))
            builder = config.get_builder_cls()(config)
            self._chunks: list[Any] = builder.build_distributed_models(
                pg_collection=ProcessGroupCollection.use_mpu_process_groups(), wrap_with_ddp=False,
                data_parallel_random_init=False)
        _load(unwrap_model(self._chunks), checkpoint)
        for chunk in self._chunks:
            chunk.requires_grad_(False)
            chunk.eval()
        self._args = args

    @property
    def num_chunks(self) -> int:
        """Model chunks on this rank: virtual pipeline stages."""
        return len(self._chunks)

    def token_losses(
        self, iterators: Iterators, num_microbatches: int, get_batch: Callable[..., Any], *,
        seq_length: int | None = None,
    ) -> list[torch.Tensor]:
        """Run micro-batches through the pipeline, forward only.

        Args:
            iterators: for each model chunk an iterator over micro-batches; None on ranks that do not
                read samples.
            num_microbatches: how many.
            get_batch: `(iterator, vp_stage) -> (batch, origin)`, see `mcore/forward_step.py`.
            seq_length: S of these micro-batches; None: the run's.

        Returns:
            On the last pipeline stage one (B, S) float32 tensor of losses in nats for each
            micro-batch; elsewhere nothing.
        """

        def forward_step(iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
            batch, _ = get_batch(iterator, get_attr_wrapped_model(model, "vp_stage"))
            output = model(
                batch["tokens"], batch["position_ids"], batch["attention_mask"],
                labels=batch["labels"], loss_mask=batch["loss_mask"])
            return output, _keep

        with torch.no_grad():
            kept = get_forward_backward_func()(
                forward_step_func=forward_step, data_iterator=list(iterators), model=self._chunks,
                num_microbatches=num_microbatches, seq_length=seq_length or self._args.seq_length,
                micro_batch_size=self._args.micro_batch_size,
                decoder_seq_length=self._args.decoder_seq_length, forward_only=True,
                collect_non_loss_data=True)
        return kept if mpu.is_pipeline_last_stage(ignore_virtual=True) else []


def _keep(output: torch.Tensor, non_loss_data: bool = True) -> torch.Tensor:
    return output.float()


def _load(models: list[Any], checkpoint: ReferenceCheckpoint) -> None:
    """Load weights saved under any layout, without optimizer, RNG or counters."""
    folder = checkpoint.folder
    common = dist_checkpointing.load_common_state_dict(str(folder))
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or {}
    metadata = {**metadata, "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}
    keys = [f"model{i}" if len(models) > 1 else "model" for i in range(len(models))]
    wanted = {key: model.sharded_state_dict(metadata=metadata)
              for key, model in zip(keys, models, strict=True)}
    try:
        state = dist_checkpointing.load(wanted, str(folder))
    except (dist_checkpointing.core.CheckpointingException, KeyError) as error:
        raise ConfigError(f"{checkpoint.where}: cannot load {folder}: {error}") from error
    for key, model in zip(keys, models, strict=True):
        model.load_state_dict(state[key])
