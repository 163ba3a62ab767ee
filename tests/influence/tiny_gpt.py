"""A GPT of a few thousand parameters, and units of synthetic text of several kinds for it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import nn
from torch.nn import functional

ALPHABET = " abcdefghijklmnopqrstuvwxyz0123456789+-*=();:,.\n"
WORDS = ["the", "of", "and", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on", "are"]
NAMES = ["total", "count", "index", "value", "array", "width", "length"]


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for y in self.qkv(self.norm1(x)).chunk(3, dim=-1))  # (B, heads, T, width / heads)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class TinyGPT(nn.Module):
    """Tied embeddings, learned positions, pre-norm; every operation has second derivatives."""

    def __init__(
        self, *, vocab_size: int = len(ALPHABET), seq_length: int = 24, width: int = 16,
        num_layers: int = 1, num_heads: int = 2, seed: int = 0,
    ) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.tokens = nn.Embedding(vocab_size, width)
            self.positions = nn.Embedding(seq_length, width)
            self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
            self.norm = nn.LayerNorm(width)
            for name, p in self.named_parameters():
                if p.dim() == 2:
                    scale = (2 * num_layers) ** -0.5 if ".out." in name or ".down." in name else 1
                    nn.init.normal_(p, std=scale * (0.02 if "tok" in name else width**-0.5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.tokens.weight.T


@dataclass(frozen=True)
class Units:
    """Token ids (L, n, T + 1) as a `Task` of `PlainSource`."""

    ids: torch.Tensor

    def __call__(
        self, model: nn.Module, unit: int, start: int, stop: int, sample_key: int | None
    ) -> tuple[torch.Tensor, int]:
        ids = self.ids[unit, start:stop]
        logits = model(ids[:, :-1])  # (B, T, V)
        labels = ids[:, 1:]
        if sample_key is not None:
            rows = [self._draw(logits[b].detach(), unit, start + b, sample_key)
                    for b in range(len(ids))]
            labels = torch.stack(rows)
        total = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return total, labels.numel()

    def _draw(self, logits: torch.Tensor, unit: int, sequence: int, key: int) -> torch.Tensor:
        seed = (key * 1009 + unit) * 1009 + sequence
        generator = torch.Generator().manual_seed(seed)
        return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


def text(kind: int, rng: np.random.Generator, length: int) -> str:
    """Return text of one of six kinds: words, sums, code, repetition, reversed words, noise."""
    num_pieces = length // 2 + 1  # the shortest piece has two characters
    words = [WORDS[i] for i in rng.integers(0, len(WORDS), num_pieces)]
    names = [NAMES[i] for i in rng.integers(0, len(NAMES), num_pieces)]
    numbers = [int(n) for n in rng.integers(0, 50, num_pieces + 1)]
    pairs = list(pairwise(numbers))
    match kind % 6:
        case 0: pieces = [f"{word} " for word in words]
        case 1: pieces = [f"{a}+{b}={a + b};" for a, b in pairs]
        case 2: pieces = [f"{x} = {x[::-1]}({a});\n" for x, (a, _) in zip(names, pairs, strict=True)]
        case 3: pieces = [f"{word},{word},{word}.\n" for word in words]
        case 4: pieces = [f"{word[::-1]} " for word in words]
        case _: pieces = [ALPHABET[a] for a in rng.integers(0, len(ALPHABET), length)]
    return "".join(pieces)[:length]


def make_units(
    num_units: int, num_sequences: int, seq_length: int = 24, *, seed: int = 0,
    is_mixed: bool = False,
) -> Units:
    """Return units of one kind each, in turn, or with each sequence of a kind of its own."""
    rng = np.random.default_rng(seed)
    rows = []
    for unit in range(num_units):
        for _ in range(num_sequences):
            kind = int(rng.integers(6)) if is_mixed else unit
            rows.append([ALPHABET.index(c) for c in text(kind, rng, seq_length + 1)])
    return Units(torch.tensor(rows).view(num_units, num_sequences, seq_length + 1))


def train(
    model: nn.Module, *, steps: int, seq_length: int = 24, lr: float = 0.3, seed: int = 1
) -> nn.Module:
    """Return a copy trained by SGD on batches of the six kinds."""
    model = copy.deepcopy(model)
    batches = make_units(steps, 12, seq_length, seed=seed, is_mixed=True)
    for step in range(steps):
        total, num_tokens = batches(model, step, 0, 12, None)
        model.zero_grad()
        (total / num_tokens).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= lr * p.grad
    return model
