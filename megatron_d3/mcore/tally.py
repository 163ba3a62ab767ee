"""Per-domain loss sums and token counts of the running global batch."""

from __future__ import annotations

import torch


class DomainTally:
    """Adds up what the micro-batches of a step, or of an evaluation, cost per domain.

    Only the rank that read the samples adds (tensor-parallel rank 0 of the last pipeline stage);
    all others hold zeros, so that one sum over the world gives the global batch.

    Args:
        num_domains: K.
        has_reference: also sum the excess over the token losses of a reference model.

    Attributes:
        training: (K, 2) or with a reference (K, 3) float64: loss sum in nats, number of tokens, sum
            of max(loss - reference loss, 0) per token.
        evaluation: (K, 2) float64, loss sum in nats and number of tokens.
        position_sum: (1,) float64, sum of the positions that the step trained on.
    """

    def __init__(self, num_domains: int, *, has_reference: bool = False) -> None:
        self._num_domains = num_domains
        self._num_columns = 3 if has_reference else 2
        self._num_added = 0
        self._num_microbatches = 0
        self.allocate(torch.device("cpu"))

    def allocate(self, device: torch.device) -> None:
        """Start from zero on the device where the token losses are."""
        self._ids = torch.arange(self._num_domains, device=device)  # (K,)
        shape = (self._num_domains, self._num_columns)
        self.training = torch.zeros(shape, dtype=torch.float64, device=device)
        self.evaluation = torch.zeros(shape[0], 2, dtype=torch.float64, device=device)
        self.position_sum = torch.zeros(1, dtype=torch.float64, device=device)

    def start_step(self, num_microbatches: int) -> None:
        """Forget the last step; the next one adds `num_microbatches` times on this rank."""
        self.training.zero_()
        self.position_sum.zero_()
        self._num_added = 0
        self._num_microbatches = num_microbatches

    def add(
        self, token_losses: torch.Tensor, loss_mask: torch.Tensor, origin: torch.Tensor,
        *, is_training: bool, reference: torch.Tensor | None = None,
    ) -> None:
        """Add one micro-batch.

        Args:
            token_losses: (B, S) losses in nats.
            loss_mask: (B, S) 1 for tokens that count.
            origin: (B, 2) int64, domain in [0, K) and position of each sample.
            is_training: False adds to the evaluation's sums.
            reference: (B, S) token losses of the reference model, where the tally has one; only
                for training.
        """
        domain_ids, positions = origin.unbind(dim=1)  # (B,), (B,)
        batch_size = len(domain_ids)
        mask = loss_mask.view(batch_size, -1).float()
        losses = token_losses.view(batch_size, -1).float()
        columns = [(losses * mask).sum(dim=1), mask.sum(dim=1)]
        if reference is not None:
            excess = torch.clamp(losses - reference.view(batch_size, -1), min=0.0)  # per token
            columns.append((excess * mask).sum(dim=1))
        per_sample = torch.stack(columns, dim=1).double()  # (B, C)
        # A product with the one-hot matrix, not index_add_: atomics on a GPU add in any order.
        is_domain = (self._ids[:, None] == domain_ids[None, :]).double()  # (K, B)
        # 0 * NaN is NaN: a bad loss must reach its own domain only.
        sums = torch.where(is_domain[:, :, None] > 0, per_sample[None], 0.0).sum(dim=1)  # (K, C)
        if not is_training:
            self.evaluation += sums
            return
        if self._num_added == self._num_microbatches:
            # Megatron's rerun state machine runs the same forward passes again: count them once.
            self.start_step(self._num_microbatches)
        self._num_added += 1
        self.training += sums
        self.position_sum += positions.sum()

    def distrust_positions(self, is_elsewhere: torch.Tensor) -> None:
        """Void the sum of positions, without waiting for the device, where () bool is true."""
        self.position_sum += torch.where(is_elsewhere, float("nan"), 0.0)
