"""DoReMi's proxy step (arXiv 2305.10429, Algorithm 1): the loss that Megatron differentiates.

    before the step   token losses of the reference, a coefficient per token of each domain
    in the step       loss = sum over the global batch of coefficient[domain] * token loss
    after it          excess sums, reduced with the tally -> ledger -> the mixer's next alpha

Samples have a fixed length, so how many tokens of each domain a global batch holds is known before
its first forward pass: with the coefficient alpha_i / n_i the sum over all micro-batches and
data-parallel ranks is the paper's loss, exactly, in one pass. alpha is that of the steps before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from megatron.core import mpu
from torch.utils.data import Dataset, default_collate

from megatron_d3.errors import PlanError
from megatron_d3.mcore.position_ring import PositionRing
from megatron_d3.mcore.reference_model import ReferenceModel
from megatron_d3.mix.doremi import DoReMi, token_coefficients
from megatron_d3.plan.dealing import indices_of_rank

type Samples = Dataset[dict[str, torch.Tensor]]


@dataclass(frozen=True)
class LocalBatch:
    """What this rank trains on in one step.

    Attributes:
        consumed: first position of the global batch.
        positions: (M, B) int64, positions of each micro-batch of this data-parallel rank.
        domains: (M, B) int64, domain of each.
        ordinals: (M, B) int64, draw number of each within its domain.
        counts: (K,) int64, samples of each domain in the whole global batch.
    """

    consumed: int
    positions: np.ndarray
    domains: np.ndarray
    ordinals: np.ndarray
    counts: np.ndarray

    @classmethod
    def of_step(
        cls, ring: PositionRing, consumed: int, size: int, *, micro_batch_size: int,
        num_domains: int,
    ) -> LocalBatch:
        """Look up the global batch [consumed, consumed + size)."""
        domains, ordinals = ring.read_range(consumed, consumed + size)  # (size,)
        dealt = local_positions(size, micro_batch_size)  # (M, B)
        counts = np.bincount(domains, minlength=num_domains)
        return cls(consumed, consumed + dealt, domains[dealt], ordinals[dealt], counts)


def local_positions(size: int, micro_batch_size: int) -> np.ndarray:
    """Return (M, B) which of a global batch's samples this data-parallel rank trains on."""
    return indices_of_rank(
        size, micro_batch_size, dp_size=mpu.get_data_parallel_world_size(),
        dp_rank=mpu.get_data_parallel_rank())


class ReferenceLosses(Protocol):
    """Where the token losses of the reference come from."""

    def open(self) -> None:
        """Get ready; called once, on every rank, when Megatron's process groups exist."""

    def of_batch(self, batch: LocalBatch, dataset: Samples | None) -> list[torch.Tensor]:
        """Return (B, S) float32 losses in nats for each micro-batch; [] but on the last stage.

        `dataset` holds the samples by position; None on ranks that read none.
        """


class ProxyStep:
    """Weighs the proxy's token losses, and keeps what the excess is measured against.

    Args:
        mixer: gives alpha.
        reference: gives the reference's token losses.
        seq_length: tokens of a sample; each counts in the loss.
        micro_batch_size: samples of a micro-batch.
        is_per_token_loss: Megatron's `--calculate-per-token-loss`.
    """

    def __init__(
        self, mixer: DoReMi, reference: ReferenceLosses, *, seq_length: int, micro_batch_size: int,
        is_per_token_loss: bool,
    ) -> None:
        self.mixer = mixer
        self.micro_batch_size = micro_batch_size
        self.reference = reference
        self._seq_length = seq_length
        self._is_per_token_loss = is_per_token_loss
        self._index = 0  # of the next micro-batch
        self._num_microbatches = 0
        self._num_tokens = np.zeros(0, np.int64)

    def open(self) -> None:
        """Get the reference ready; called once, on every rank.

        Raises:
            ConfigError: it cannot be loaded.
        """
        self.reference.open()
        self._device = torch.device("cuda", torch.cuda.current_device())

    def start_step(
        self, batch: LocalBatch, dataset: Samples | None, *, alpha: np.ndarray,
        sampling_weights: np.ndarray,
    ) -> None:
        """Prepare a training step, on every rank: Megatron's pipeline runs the reference.

        Args:
            batch: what this rank is about to train on.
            dataset: samples by position; None on ranks that read none.
            alpha: (K,) weights of the loss.
            sampling_weights: (K,) what the batch was sampled with.
        """
        self._num_tokens = batch.counts * self._seq_length  # (K,)
        coefficients = token_coefficients(
            alpha, self._num_tokens, sampling_weights=sampling_weights,
            variant=self.mixer.config.variant)
        self._sample_coefficients = torch.from_numpy(
            coefficients[batch.domains]).float().to(self._device)  # (M, B)
        self._positions = torch.from_numpy(batch.positions).to(self._device)  # (M, B)
        self._num_microbatches = len(batch.positions)
        self._reference_losses = self.reference.of_batch(batch, dataset)
        self._index = 0

    def weigh(
        self, losses: torch.Tensor, mask: torch.Tensor, num_tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the loss of one micro-batch in Megatron's scale, its report, and the reference.

        Args:
            losses: (B, S) float32 token losses in nats.
            mask: (B, S) float32.
            num_tokens: () what the loss function returns as the number of tokens.

        Returns:
            The scalar to differentiate; (2,) what Megatron sums over all micro-batches and divides,
            so that the log shows the loss of the global batch; (B, S) the reference's losses.
        """
        if self._index == self._num_microbatches:
            self._index = 0  # Megatron's rerun state machine runs the same forward passes again
        index, self._index = self._index, self._index + 1
        weighted = torch.sum((losses * mask).sum(dim=1) * self._sample_coefficients[index])
        # Each micro-batch of each rank is one of `num_parts` terms of the global batch's loss.
        num_parts = self._num_microbatches * mpu.get_data_parallel_world_size(
            with_context_parallel=True)
        if self._is_per_token_loss:
            # Megatron sums the gradients and divides by the tokens of the global batch.
            scale: Any = float(self._num_tokens.sum())
        else:
            # Megatron divides by these tokens, by the micro-batches and by the ranks.
            scale = torch.clamp(num_tokens, min=1) * num_parts
        report = torch.stack(
            (weighted.detach(), torch.full_like(weighted, 1.0 / num_parts, requires_grad=False)))
        return weighted * scale, report, self._reference_losses[index]

    def is_elsewhere(self, origin: torch.Tensor) -> torch.Tensor:
        """Whether the micro-batch just weighed holds other positions than planned; no device sync.

        Args:
            origin: (B, 2) domain and position of each sample, as read.
        """
        return (origin[:, 1] != self._positions[self._index - 1]).any()

    def require_whole_samples(self, num_tokens: np.ndarray, iteration: int) -> None:
        """Check after a step that every token counted: (K,) tokens of the global batch.

        Raises:
            PlanError: some were masked, so the coefficients were wrong.
        """
        if not np.array_equal(num_tokens, self._num_tokens):
            raise PlanError(
                f"step {iteration}: {int(num_tokens.sum())} tokens counted in the loss, planned were "
                f"{int(self._num_tokens.sum())}: the corpus holds padding tokens, whose number per "
                "domain is not known before the step; DoReMi's loss needs whole samples")


class ModelLosses:
    """The reference's token losses, from a frozen model in this process.

    Args:
        build: builds and loads the model once Megatron's process groups exist.
        get_batch: `(iterator, vp_stage) -> (batch, origin)` of `mcore/forward_step.py`.
    """

    def __init__(self, build: Any, get_batch: Any) -> None:
        self._build = build
        self._get_batch = get_batch

    def open(self) -> None:
        """Build and load the model."""
        self._model: ReferenceModel = self._build()

    def of_batch(self, batch: LocalBatch, dataset: Samples | None) -> list[torch.Tensor]:
        """Run the step's samples through the reference's pipeline, forward only."""
        iterators = [_read(batch, dataset) for _ in range(self._model.num_chunks)]
        return self._model.token_losses(iterators, len(batch.positions), self._get_batch)


def _read(batch: LocalBatch, dataset: Samples | None) -> Iterator[dict[str, Any]] | None:
    """The micro-batches that the training step is about to read through its DataLoader."""
    if dataset is None:
        return None
    return (default_collate([dataset[int(p)] for p in row]) for row in batch.positions)
