"""The datasets a planned run hands to Megatron: map-style, a position in, a sample out.

Megatron's sampler, DataLoader, resume and broadcasts stay in use; the training dataset only looks
its position up in the plan. A sample holds what Megatron's `GPTDataset` gives for the same tokens,
and its origin: which domain and position it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids
from megatron.core.datasets.utils import Split
from torch.utils.data import Dataset

from megatron_d3.corpus.domain import Domain
from megatron_d3.mcore.position_ring import PositionRing

# A pad id that no corpus holds, as Megatron uses where the tokenizer has no pad of its own.
_NO_PAD = -1


@dataclass
class SampleMaker:
    """Turns the tokens of a sample into the fields Megatron's model wants.

    Attributes:
        eod: id of the end-of-document token.
        pad: id of the padding token, which never counts in the loss; -1 for none.
        reset_position_ids, reset_attention_mask, eod_mask_loss, create_attention_mask: Megatron's
            flags of these names.
    """

    eod: int
    pad: int
    reset_position_ids: bool
    reset_attention_mask: bool
    eod_mask_loss: bool
    create_attention_mask: bool

    def __post_init__(self) -> None:
        self._is_constant = not (
            self.reset_position_ids or self.reset_attention_mask or self.eod_mask_loss)
        self._cached: tuple[Any, torch.Tensor, torch.Tensor] | None = None

    def fields(self, tokens: np.ndarray) -> dict[str, torch.Tensor]:
        """Return tokens, labels, loss mask, position ids and, if asked for, attention mask.

        Args:
            tokens: (seq_length + 1,) int64; the last one is only a label.
        """
        text = torch.from_numpy(tokens)
        inputs, labels = text[:-1].clone(), text[1:].clone()  # (S,), (S,)
        if self._cached is None or not self._is_constant:
            self._cached = _get_ltor_masks_and_position_ids(
                inputs, self.eod, self.reset_position_ids, self.reset_attention_mask,
                self.eod_mask_loss, self.create_attention_mask)
        attention_mask, loss_mask, position_ids = self._cached
        loss_mask = loss_mask.clone()
        loss_mask[labels == self.pad] = 0.0
        inputs[inputs == self.pad] = 0
        labels[labels == self.pad] = 0
        fields = {"tokens": inputs, "labels": labels, "loss_mask": loss_mask,
                  "position_ids": position_ids}
        if attention_mask is not None:
            fields["attention_mask"] = attention_mask
        return fields


def pad_id(tokenizer: Any, *, is_ambiguous_allowed: bool) -> int:
    """The id that Megatron's datasets treat as padding with this tokenizer.

    A pad id that is also another special token (often the end of a document) pads nothing, unless
    `--allow-ambiguous-pad-tokens` insists.
    """
    try:
        pad = int(tokenizer.pad)
    except Exception:  # noqa: BLE001  (tokenizers raise various errors where they have none)
        return _NO_PAD
    others = _special_ids(tokenizer)
    return pad if is_ambiguous_allowed or pad not in others else _NO_PAD


def _special_ids(tokenizer: Any) -> list[int]:
    try:
        ids = [v for k, v in tokenizer.special_tokens_dict.items() if k != "pad_token"]
    except (AttributeError, IndexError, ValueError):
        ids = []
    if ids:
        return ids
    for name in ("eos", "eod"):
        try:
            ids.append(getattr(tokenizer, name))
        except (AttributeError, NotImplementedError):
            continue
    return ids


class PlannedDataset(Dataset[dict[str, torch.Tensor]]):
    """Training samples by position.

    Args:
        ring: the decided positions.
        domains: by the domain number that the ring holds.
        maker: makes the fields of a sample.
        total_samples: positions of the run.
    """

    split = Split.train

    def __init__(
        self, ring: PositionRing, domains: Sequence[Domain], maker: SampleMaker, total_samples: int
    ) -> None:
        self._ring = ring
        self._domains = domains
        self._maker = maker
        self._total_samples = total_samples

    def __len__(self) -> int:
        return self._total_samples

    def __getitem__(self, position: int) -> dict[str, torch.Tensor]:
        domain, ordinal = self._ring.read(position)
        fields = self._maker.fields(self._domains[domain].train_tokens(ordinal))
        return fields | {"origin": torch.tensor([domain, position])}


class HeldOutDataset(Dataset[dict[str, torch.Tensor]]):
    """The same held-out samples at every evaluation, as many of each domain as it has.

    Domains take turns, in domain order; one whose samples are used up is passed over, and when all
    are, they start again.

    Args:
        domains: all domains, in domain order; those without a held-out part are passed over.
        maker: makes the fields of a sample.
        num_samples: length of the dataset over all evaluations.
        samples_per_evaluation: after so many samples the next evaluation starts.
    """

    split = Split.valid

    def __init__(
        self, domains: Sequence[Domain], maker: SampleMaker, *,
        num_samples: int, samples_per_evaluation: int,
    ) -> None:
        self._domains = domains
        self._maker = maker
        sizes = [domain.valid.num_samples if domain.valid else 0 for domain in domains]
        self._order = take_turns(sizes, samples_per_evaluation)  # (E, 2)
        self._length = num_samples

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        domain, sample = (int(x) for x in self._order[index % len(self._order)])
        fields = self._maker.fields(self._domains[domain].valid_tokens(sample))
        return fields | {"origin": torch.tensor([domain, index])}


def take_turns(sizes: Sequence[int], count: int) -> np.ndarray:
    """Deal samples of several domains in turns.

    Args:
        sizes: (K,) samples of each domain.
        count: how many to deal, starting again when all are dealt.

    Returns:
        (count, 2) int64: domain, sample.

    >>> take_turns([2, 1], 4).tolist()
    [[0, 0], [1, 0], [0, 1], [0, 0]]
    """
    sizes = [min(size, count) for size in sizes]  # no domain can be asked for more
    domains = np.repeat(np.arange(len(sizes)), sizes)  # (N,)
    samples = np.concatenate([np.arange(size) for size in sizes])  # (N,)
    order = np.lexsort((domains, samples))  # by sample, then by domain
    dealt = np.stack((domains[order], samples[order]), axis=1).astype(np.int64)
    return dealt[np.arange(count) % len(dealt)]
