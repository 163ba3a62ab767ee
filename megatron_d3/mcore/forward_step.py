"""Megatron's GPT forward step, with a tally of losses per domain, and DoReMi's loss where asked.

Megatron's wheel leaves `get_batch`, the loss function and `forward_step` to the entry point; these
are ours, made of its public parts. The loss and its report are stock Megatron's to the last digit.
The tally reads the token losses beside it and changes nothing. Only a DoReMi proxy
(`mix.type: doremi`) trains on another loss; what is reported as `lm loss` stays the stock one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import (
    StragglerDetector,
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import is_first_or_last_pipeline_stage

from megatron_d3.mcore.proxy import ProxyStep
from megatron_d3.mcore.tally import DomainTally

# The fields of a batch, as Megatron's helpers name them.
_FIELDS = (
    "attention_mask", "cu_seqlens", "cu_seqlens_padded", "hybrid_cp_group", "labels",
    "local_cp_size", "loss_mask", "max_seqlen", "position_ids", "tokens",
)
# A loss this many times the largest one seen is reported by --check-for-spiky-loss.
_SPIKY_LOSS_FACTOR = 10

Batch = dict[str, Any]
LossFunction = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]


class ForwardStep:
    """The `forward_step_func` of `megatron.training.pretrain`.

    Args:
        tally: collects loss sums and token counts per domain, or None for stock Megatron.
        proxy: weighs the loss of training by domain; needs the tally.
    """

    def __init__(
        self, tally: DomainTally | None = None, proxy: ProxyStep | None = None
    ) -> None:
        self._tally = tally
        self._proxy = proxy
        self._straggler_timer = StragglerDetector()

    def __call__(
        self, data_iterator: Iterator[Batch], model: Any, return_schedule_plan: bool = False
    ) -> tuple[Any, LossFunction]:
        """Run one micro-batch forward.

        Returns:
            The output tensor (token losses on the last pipeline stage) and the loss function that
            Megatron applies to it.
        """
        timers = get_timers()
        timers("batch-generator", log_level=2).start()
        with self._straggler_timer(bdata=True):
            vp_stage = get_attr_wrapped_model(model, "vp_stage")
            batch, origin = get_batch(data_iterator, vp_stage)
        timers("batch-generator").stop()

        loss_function = partial(
            _loss, batch["loss_mask"], tally=self._tally, origin=origin,
            is_training=model.training, proxy=self._proxy)
        with self._straggler_timer:
            if return_schedule_plan:
                schedule_plan = model.build_schedule_plan(
                    batch["tokens"], batch["position_ids"], batch["attention_mask"],
                    labels=batch["labels"], loss_mask=batch["loss_mask"])
                return schedule_plan, loss_function
            output = model(
                batch["tokens"], batch["position_ids"], batch["attention_mask"],
                labels=batch["labels"], loss_mask=batch["loss_mask"],
                packed_seq_params=_packed_seq_params(batch))
        return output, loss_function


def get_batch(
    data_iterator: Iterator[Batch], vp_stage: int | None, *, micro_batch_size: int | None = None
) -> tuple[Batch, torch.Tensor | None]:
    """Read a micro-batch on tensor-parallel rank 0 and share it as Megatron does.

    Args:
        data_iterator: yields micro-batches on the ranks that read.
        vp_stage: the virtual pipeline stage that asks, if any.
        micro_batch_size: samples that the iterator yields at a time; None for Megatron's.

    Returns:
        The batch, and domain and position of each sample, (micro_batch_size, 2) int64, where this
        rank read a planned dataset itself, else None.
    """
    args = get_args()
    has_cu_seqlens = args.dataloader_inter_document_masking
    if not is_first_or_last_pipeline_stage(vp_stage) and not has_cu_seqlens:
        return dict.fromkeys(_FIELDS), None

    batch: Batch = {}
    origin = None
    tp_rank = mpu.get_tensor_model_parallel_rank()
    if tp_rank == 0:
        sample = next(data_iterator)
        origin = sample.get("origin")
        if origin is not None:
            origin = origin.cuda(non_blocking=True)
        for field in _FIELDS:
            value = sample.get(field)
            batch[field] = None if value is None else value.cuda(non_blocking=True)
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=has_cu_seqlens,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=micro_batch_size or args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    batch = flatten_batch_for_packed_sequences(batch)
    if is_first_or_last_pipeline_stage(vp_stage):
        batch = get_batch_on_this_cp_rank(
            batch,
            is_hybrid_cp=False,
            cp_group=mpu.get_context_parallel_group(),
            use_per_sequence_balancing=has_cu_seqlens,
        )
    return batch, origin


def _packed_seq_params(batch: Batch) -> PackedSeqParams | None:
    if batch["cu_seqlens"] is None:
        return None
    cu_seqlens = batch["cu_seqlens"].squeeze(0)
    update_seqlen_stats_from_cu_seqlens(cu_seqlens)
    padded = batch["cu_seqlens_padded"]
    padded = cu_seqlens if padded is None else padded.squeeze(0)
    max_seqlen = int(batch["max_seqlen"].item())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=padded, cu_seqlens_kv=padded,
        cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=padded,
        max_seqlen_q=max_seqlen, max_seqlen_kv=max_seqlen,
        tokens_per_sample=get_args().seq_length,
    )


def _loss(
    loss_mask: torch.Tensor,
    token_losses: torch.Tensor,
    *,
    tally: DomainTally | None,
    origin: torch.Tensor | None,
    is_training: bool,
    proxy: ProxyStep | None = None,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of token losses, number of tokens, and the report that Megatron logs."""
    losses = token_losses.view(-1).float()
    mask = loss_mask.view(-1).float()
    loss = torch.sum(losses * mask)
    num_tokens = mask.sum().clone().detach().to(torch.int)
    report = {"lm loss": torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])}
    _validate(loss)
    reference = None
    if proxy is not None and is_training:
        loss, report["doremi loss"], reference = proxy.weigh(
            token_losses.float(), loss_mask.float(), num_tokens)
    if tally is not None and origin is not None:
        tally.add(token_losses.detach(), loss_mask, origin, is_training=is_training,
                  reference=reference)
        if proxy is not None and is_training:
            tally.distrust_positions(proxy.is_elsewhere(origin))
    return loss, num_tokens, report


def _validate(loss: torch.Tensor) -> None:
    """Megatron's checks of a local loss, through its rerun state machine."""
    args = get_args()
    rerun = get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        for reject, what in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            rerun.validate_result(
                result=loss, rejection_func=reject, tolerance=0.0, fatal=True,
                message=f"found {what} in local forward loss calculation")
    if args.check_for_spiky_loss:
        rerun.validate_result(
            result=loss, tolerance=0.0, fatal=False, message="Spiky loss",
            rejection_func=partial(
                rerun.is_unexpectedly_large, threshold=_SPIKY_LOSS_FACTOR, context="loss"))
