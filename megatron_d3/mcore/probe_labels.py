"""Labels drawn from the model's own prediction, the same under every layout.

The Gumbel trick: argmax over the vocabulary of logit + Gumbel noise is a draw from the softmax. The
noise of (key, sequence, token, id) comes from a hash, so that tensor-parallel ranks, which hold
parts of the vocabulary, need to agree on one number and its place only.
"""

from __future__ import annotations

import torch
from megatron.core import mpu

from megatron_d3.influence.sketch_hash import hash64, make_key, shift_right


def sampled_labels(
    logits: torch.Tensor, *, key: int, first_sequence: int, vocab_size: int
) -> torch.Tensor:
    """Draw one label a token.

    Args:
        logits: (B, S, V / tp) this rank's part of the vocabulary, any float dtype.
        key: another key gives independent labels.
        first_sequence: number of the first of the B sequences within the window.
        vocab_size: ids from there on pad the embedding and are never drawn.

    Returns:
        (B, S) int64, the same on all tensor-parallel ranks.
    """
    num_sequences, seq_length, part = logits.shape
    rank = mpu.get_tensor_model_parallel_rank()
    ids = torch.arange(part, device=logits.device) + rank * part  # (V / tp,)
    tokens = token_places(
        seq_length, mpu.get_context_parallel_rank(), mpu.get_context_parallel_world_size())
    tokens = tokens.to(logits.device)  # (S,)
    best = torch.empty(logits.shape[:2], dtype=torch.float32, device=logits.device)  # (B, S)
    labels = torch.empty(logits.shape[:2], dtype=torch.int64, device=logits.device)
    for b in range(num_sequences):
        words = hash64(tokens, make_key(str(first_sequence + b), key, "labels"))  # (S,)
        noisy = logits[b].float() + _gumbel(hash64(ids, words[:, None]))  # (S, V / tp)
        noisy[:, ids >= vocab_size] = -torch.inf
        best[b], labels[b] = noisy.max(dim=1)
    labels += rank * part
    if mpu.get_tensor_model_parallel_world_size() == 1:
        return labels
    group = mpu.get_tensor_model_parallel_group()
    highest = best.clone()
    torch.distributed.all_reduce(highest, op=torch.distributed.ReduceOp.MAX, group=group)
    labels[best < highest] = torch.iinfo(torch.int64).max
    torch.distributed.all_reduce(labels, op=torch.distributed.ReduceOp.MIN, group=group)
    return labels


def token_places(num_tokens: int, cp_rank: int, cp_size: int) -> torch.Tensor:
    """Return which tokens of a sequence a context-parallel rank holds, (num_tokens,) int64.

    Of 2 * cp_size equal chunks it holds number cp_rank from the front and from the back, so that
    causal attention costs each rank the same.

    Args:
        num_tokens: on the rank; even where cp_size > 1.
        cp_rank: from 0.
        cp_size: ranks that share the sequence.
    """
    if cp_size == 1:
        return torch.arange(num_tokens)
    chunk = torch.arange(num_tokens // 2)
    front, back = cp_rank, 2 * cp_size - 1 - cp_rank
    return torch.cat([front * len(chunk) + chunk, back * len(chunk) + chunk])


def _gumbel(words: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel numbers from 64-bit words: -log(-log(u)), u uniform in (0, 1)."""
    uniform = (shift_right(words, 11).double() + 0.5) * 2.0**-53
    return (-torch.log(-torch.log(uniform))).float()
