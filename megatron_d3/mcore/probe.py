"""Losses, gradients and gradient differences of chosen samples, between two training steps.

    probe = Probe(chunks, optimizer, settings)
    with probe.measuring(samples) as source:      # a GradientSource, see influence/source.py
        source.gradient(unit, 0, 8); source.gradients

Training goes on bit for bit as if nothing had been measured: weights, random states, gradient
buffers' meaning (the next step zeroes them), the configuration's functions and the parameter
gathering hooks are what they were when the block is left, whatever happened in it.

What makes gradients local to a data-parallel group: `finalize_model_grads_func`, `no_sync_func`,
`grad_sync_func`, `param_sync_func` and `grad_scale_func` of Megatron's configuration are put aside,
and every chunk stays inside `no_sync()`. Within the model-parallel group gradients are completed as
Megatron completes them: sums over tensor-parallel ranks of what sequence parallelism splits, over
the first and last pipeline stage of tied embeddings, over context-parallel ranks of everything.
`probe_groups.py` says what expert parallelism makes of a group.

A model with experts is probed in evaluation mode: neither auxiliary losses of its routers (load
balancing, z-loss) nor their noise are part of a loss or gradient here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.distributed.finalize_model_grads import (
    _allreduce_non_tensor_model_parallel_grads,
    _allreduce_word_embedding_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.utils import get_attr_wrapped_model, get_model_config, unwrap_model
from torch.utils.data import default_collate

from megatron_d3.influence.layout import Layout
from megatron_d3.mcore.forward_step import get_batch
from megatron_d3.mcore.parameters import parameter_layout, trained_parameters
from megatron_d3.mcore.probe_groups import is_expert, is_first_replica, num_replicas
from megatron_d3.mcore.probe_labels import sampled_labels
from megatron_d3.mcore.probe_source import MegatronSource
from megatron_d3.mcore.rng import untouched_rng

# What Megatron's configuration must not do inside a probe, by name, and what stands in for it.
_ASIDE: dict[str, Any] = {
    "finalize_model_grads_func": None, "no_sync_func": contextlib.nullcontext,
    "grad_sync_func": None, "param_sync_func": None, "grad_scale_func": None, "timers": None,
}

# Whether these train decides of their own work only that activations are recomputed or offloaded.
_RECOMPUTING = (TransformerBlock, Attention, MoELayer)

Fields = dict[str, torch.Tensor]


@dataclass(frozen=True)
class UnitSamples:
    """The sequences that stand for each unit of a window.

    Attributes:
        num_units: L.
        num_sequences: n, of each unit.
        read: (unit, sequence) -> the fields of a sample.
    """

    num_units: int
    num_sequences: int
    read: Callable[[int, int], Fields]


@dataclass(frozen=True)
class ProbeSettings:
    """What a probe reads of the run.

    Attributes:
        seq_length: tokens of a sample.
        micro_batch_size: samples of a micro-batch.
        vocab_size: ids that a label may be; those above are padding of the embedding.
        has_dropout: dropout, or anything else that differs between training and evaluation.
    """

    seq_length: int
    micro_batch_size: int
    vocab_size: int
    has_dropout: bool


class Probe:
    """Measures on the present weights. One for a run, on every rank.

    Args:
        chunks: Megatron's model chunks of this rank, wrapped in its DistributedDataParallel.
        optimizer: Megatron's optimizer.
        settings: of the run.

    Raises:
        ProbeError: the model's parameters cannot be placed in the unsharded model.
    """

    def __init__(self, chunks: list[Any], optimizer: Any, settings: ProbeSettings) -> None:
        self.chunks = chunks
        self.optimizer = optimizer
        self.settings = settings
        self.parameters = trained_parameters(chunks)
        self.layout: Layout = parameter_layout(chunks, self.parameters)
        self._config = get_model_config(chunks[0])

    @contextlib.contextmanager
    def measuring(self, samples: UnitSamples) -> Iterator[MegatronSource]:
        """Put training aside and give a source of measurements; collective over all ranks."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(untouched_rng())
            stack.enter_context(_kept_buffers(self.chunks))
            stack.enter_context(self._gathered_parameters())
            stack.enter_context(self._without_synchronisation())
            if self.settings.has_dropout:
                stack.enter_context(_evaluating(self.chunks))
            yield MegatronSource(self, samples)

    @contextlib.contextmanager
    def _gathered_parameters(self) -> Iterator[None]:
        """With --overlap-param-gather: gather now, and leave gathering as it was."""
        hooked = [c for c in self.chunks if getattr(c, "remove_forward_pre_hook_handles", None)]
        if hooked:
            self.optimizer.prepare_model_params_for_param_sync()
        for chunk in hooked:
            chunk.disable_forward_pre_hook(param_sync=True)
        try:
            yield
        finally:
            for chunk in hooked:
                chunk.enable_forward_pre_hook()

    @contextlib.contextmanager
    def _without_synchronisation(self) -> Iterator[None]:
        # The plain float32 optimizer leaves `grad` pointing into the buffer of `main_grad`: the first
        # backward pass would add to it there, and the hook once more. A step begins with None too.
        for parameter in self.parameters:
            parameter.grad = None
        aside = _ASIDE | {
            "microbatch_group_size_per_vp_stage": mpu.get_pipeline_model_parallel_world_size()}
        with contextlib.ExitStack() as stack:
            for chunk in self.chunks:
                stack.callback(chunk.zero_grad_buffer)
            for name, value in aside.items():
                stack.callback(setattr, self._config, name, getattr(self._config, name))
                setattr(self._config, name, value)
            yield

    def run(
        self, samples: UnitSamples, unit: int, start: int, stop: int, *, forward_only: bool,
        sample_key: int | None = None,
    ) -> tuple[float, int]:
        """Run sequences [start, stop) of a unit through Megatron's own pipeline schedule.

        Returns:
            Sum of the token losses in nats and the number of tokens, the same on all ranks of the
            group. Without `forward_only` every parameter's `main_grad` holds the gradient of the
            mean token loss, complete within the group.
        """
        size = max(n for n in range(1, self.settings.micro_batch_size + 1)
                   if (stop - start) % n == 0)
        batches = [[samples.read(unit, s) for s in range(first, first + size)]
                   for first in range(start, stop, size)]
        # An interleaved pipeline wants a multiple of its stages: the rest are blanks that count
        # nothing.
        num_stages = mpu.get_pipeline_model_parallel_world_size() if len(self.chunks) > 1 else 1
        batches += [[_blank(fields) for fields in batches[-1]]] * (-len(batches) % num_stages)
        num_microbatches = len(batches)
        num_tokens = sum(int(fields["loss_mask"].sum()) for batch in batches for fields in batch)
        losses: list[torch.Tensor] = []
        where = (unit * samples.num_sequences + start, sample_key)
        step = _ForwardStep(
            losses, size, where, num_tokens=num_tokens, vocab_size=self.settings.vocab_size,
            scale=num_microbatches / mpu.get_context_parallel_world_size() / max(1, num_tokens))
        iterators = [_collated(batches) for _ in self.chunks]
        # zero_grad_buffer ends any no_sync(): it comes first.
        if not forward_only:
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
        with contextlib.ExitStack() as stack:
            for chunk in self.chunks:
                stack.enter_context(chunk.no_sync())
            if forward_only:
                stack.enter_context(torch.no_grad())
            get_forward_backward_func()(
                forward_step_func=step, data_iterator=iterators, model=self.chunks,
                num_microbatches=num_microbatches, seq_length=self.settings.seq_length,
                micro_batch_size=size, forward_only=forward_only)
        if not forward_only:
            self._complete_gradients()
        is_heard = (mpu.is_pipeline_last_stage(ignore_virtual=True)
                    and mpu.get_tensor_model_parallel_rank() == 0 and is_first_replica())
        total = torch.stack(losses).sum() if is_heard else torch.zeros((), dtype=torch.float64)
        return float(total), num_tokens

    def _complete_gradients(self) -> None:
        """Make every `main_grad` the whole gradient of its local parameter."""
        _allreduce_non_tensor_model_parallel_grads(
            self.chunks, self._config, mpu.get_tensor_model_parallel_group())
        _allreduce_word_embedding_grads(
            self.chunks, self._config, mpu.get_embedding_group(check_initialized=False),
            mpu.get_pipeline_model_parallel_group())
        if mpu.get_context_parallel_world_size() > 1:
            for parameter in self.parameters:
                torch.distributed.all_reduce(
                    parameter.main_grad, group=mpu.get_context_parallel_group())  # type: ignore[attr-defined]
        if num_replicas() > 1:  # each sent the experts the same tokens
            for parameter in filter(is_expert, self.parameters):
                parameter.main_grad.div_(num_replicas())  # type: ignore[attr-defined]


class _ForwardStep:
    """Megatron's `forward_step_func` of a probe: the mean token loss, nothing tallied."""

    def __init__(
        self, losses: list[torch.Tensor], size: int, where: tuple[int, int | None], *,
        num_tokens: int, vocab_size: int, scale: float,
    ) -> None:
        self._losses = losses
        self._size = size
        self._first, self._sample_key = where
        self._num_tokens = num_tokens
        self._vocab_size = vocab_size
        self._scale = scale
        self._index = 0

    def __call__(self, iterator: Any, model: Any, return_schedule_plan: bool = False) -> Any:
        assert not return_schedule_plan, "refused where the run's settings are read"
        batch, _ = get_batch(
            iterator, get_attr_wrapped_model(model, "vp_stage"), micro_batch_size=self._size)
        labels = batch["labels"] if self._sample_key is None else None
        output = model(
            batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=labels,
            loss_mask=batch["loss_mask"])
        return output, lambda out: self._loss(out, batch, model)

    def _loss(
        self, output: torch.Tensor, batch: dict[str, Any], model: Any
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return what Megatron differentiates; it divides by the number of micro-batches."""
        if self._sample_key is not None:  # (B, S, V/tp) logits
            first = self._first + self._index * self._size
            self._index += 1
            labels = sampled_labels(
                output.detach(), key=self._sample_key, first_sequence=first,
                vocab_size=self._vocab_size)
            (inner,) = unwrap_model([model])
            output = inner.compute_language_model_loss(labels, output.transpose(0, 1).contiguous())
        total = torch.sum(output.float() * batch["loss_mask"])
        self._losses.append(total.detach().double())
        # With two results Megatron multiplies by the context-parallel size: see finalize above.
        return total * self._scale, {}


def _blank(fields: Fields) -> Fields:
    return fields | {"loss_mask": torch.zeros_like(fields["loss_mask"])}


def _collated(batches: list[list[Fields]]) -> Iterator[Fields]:
    return (default_collate(batch) for batch in batches)


@contextlib.contextmanager
def _kept_buffers(chunks: Sequence[Any]) -> Iterator[None]:
    """Restore what modules note in passing, such as a router its tokens per expert."""
    buffers = [b for model in unwrap_model(list(chunks)) for b in model.buffers()]
    before = [b.clone() for b in buffers]
    try:
        yield
    finally:
        for buffer, kept in zip(buffers, before, strict=True):
            buffer.copy_(kept)


@contextlib.contextmanager
def _evaluating(chunks: Sequence[Any]) -> Iterator[None]:
    """Switch dropout off, not recomputation; each module returns to the mode it was in."""
    modules = [m for chunk in chunks for m in chunk.modules() if m.training]
    for module in modules:
        module.training = isinstance(module, _RECOMPUTING)
    try:
        yield
    finally:
        for module in modules:
            module.training = True
