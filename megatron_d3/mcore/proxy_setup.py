"""From `mix: {type: doremi, ...}` to a :class:`ProxyStep`, everything checked before the start."""

from __future__ import annotations

import argparse
from functools import partial

from megatron_d3.config import RunConfig
from megatron_d3.errors import ConfigError
from megatron_d3.mcore.forward_step import get_batch
from megatron_d3.mcore.proxy import ModelLosses, ProxyStep, ReferenceLosses
from megatron_d3.mcore.reference_model import (
    ReferenceModel,
    find_checkpoint,
    require_same_text,
)
from megatron_d3.mcore.stored_losses import StoredLosses
from megatron_d3.mix.doremi import DoReMi
from megatron_d3.plan.header import RunHeader


def proxy_step(
    config: RunConfig, header: RunHeader, args: argparse.Namespace
) -> ProxyStep | None:
    """Return the proxy's step of a DoReMi run, None for any other mixer.

    Args:
        config: the run's configuration.
        header: what its plan is made from.
        args: Megatron's validated arguments.

    Raises:
        ConfigError: the reference is missing or was trained on other tokens, or an option makes the
            loss something else.
    """
    params = config.mix.params
    if not isinstance(params, DoReMi.Config):
        return None
    _refuse(args)
    mixer = DoReMi(
        params, [record.info for record in header.domains], total_samples=header.total_samples)
    return ProxyStep(
        mixer, _reference(params, header, args), seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        is_per_token_loss=args.calculate_per_token_loss)


def _reference(
    params: DoReMi.Config, header: RunHeader, args: argparse.Namespace
) -> ReferenceLosses:
    if params.losses is not None:
        if args.context_parallel_size > 1:
            raise ConfigError(
                "d3.mix.losses: not possible with --context-parallel-size: stored losses are not "
                "split over the sequence; use reference")
        return StoredLosses(params.losses, header)
    assert params.reference is not None, "DoReMi.__init__ has checked it"
    checkpoint = find_checkpoint(params.reference)
    require_same_text(checkpoint, args)
    return ModelLosses(partial(ReferenceModel, checkpoint, args), get_batch)


def _refuse(args: argparse.Namespace) -> None:
    """Raise ConfigError for options under which tokens do not count as DoReMi counts them."""
    refused = (
        (args.eod_mask_loss, "--eod-mask-loss",
         "the number of tokens per domain must be known before the step"),
        (args.mtp_num_layers, "--mtp-num-layers", "its extra losses know no domains"),
        (args.delay_wgrad_compute or args.overlap_moe_expert_parallel_comm,
         "--delay-wgrad-compute or --overlap-moe-expert-parallel-comm",
         "their schedule has not been tried with a reference model"),
    )
    for is_asked, flag, why in refused:
        if is_asked:
            raise ConfigError(f"{flag}: not possible with d3.mix.type doremi: {why}")
