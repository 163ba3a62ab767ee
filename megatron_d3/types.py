"""Small values that several layers share. No behaviour beyond trivial properties."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class DomainInfo:
    """What a mixer may know of a domain.

    Attributes:
        name: unique name, the key of every per-domain mapping.
        num_samples: training samples in one epoch, each of `seq_length` tokens.
        num_tokens: training tokens in one epoch.
    """

    name: str
    num_samples: int
    num_tokens: int


@dataclass(frozen=True)
class StepSignals:
    """What one training step measured, reduced over the whole global batch.

    Attributes:
        iteration: 1-based number of the step, as Megatron logs it.
        consumed: samples consumed by training once the step is done.
        loss_sums: (K,) float64, sum of token losses per domain, nats; 0 where `num_tokens` is 0.
        num_tokens: (K,) int64, unmasked tokens per domain.
        is_skipped: the optimizer skipped the step (overflow); its losses may be NaN or infinite.
        excess_sums: (K,) float64, sum of max(loss - reference loss, 0) per token, nats; None where
            the run has no reference model.
    """

    iteration: int
    consumed: int
    loss_sums: np.ndarray
    num_tokens: np.ndarray
    is_skipped: bool = False
    excess_sums: np.ndarray | None = None


@dataclass(frozen=True)
class MixContext:
    """Where in the run the segment lies whose weights are asked for.

    Attributes:
        step: 0-based training step that consumes the segment's first position.
        position: the segment's first position.
        total_samples: positions of the whole run.
        consumed: (K,) int64, samples of each domain in the positions before `position`.
    """

    step: int
    position: int
    total_samples: int
    consumed: np.ndarray
