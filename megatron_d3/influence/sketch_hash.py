"""Hashes of (name, offset) that are the same on every device, rank and layout.

`hash64(n, key)` is the n-th output of SplitMix64 started at `key` (Steele, Lea, Flood 2014, "Fast
splittable pseudorandom number generators", the finaliser by Stafford): any n at once, no state.
PyTorch has no arithmetic on unsigned words, so that words are int64 here and wrap; `_sketch.c` has
the same in C.
"""

from __future__ import annotations

import functools
import hashlib
import math
import sys

import torch

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB

assert sys.byteorder == "little", "signs are taken from words byte by byte"


def signed(word: int) -> int:
    """Return the int64 with the bits of an unsigned 64-bit word."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word


def make_key(name: str, seed: int, purpose: str) -> int:
    """Return the unsigned 64-bit key of a parameter; other purposes give independent ones."""
    text = f"{purpose}\0{seed}\0{name}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def shift_right(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift int64 words as if they were unsigned, by 1 to 63 bits."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def hash64(numbers: torch.Tensor, key: int | torch.Tensor) -> torch.Tensor:
    """Return int64 words of 64 random bits each, of the shape of `numbers` and `key` broadcast.

    Args:
        numbers: int64, n >= 0.
        key: an unsigned 64-bit integer, or int64 words.
    """
    start = signed(key) if isinstance(key, int) else key
    word = (numbers + 1) * signed(GOLDEN) + start
    word = (word ^ shift_right(word, 30)) * signed(MIX_1)
    word = (word ^ shift_right(word, 27)) * signed(MIX_2)
    return word ^ shift_right(word, 31)


def hash_below(words: torch.Tensor, stop: int) -> torch.Tensor:
    """Map words to [0, stop) by their upper 32 bits; off uniform by less than stop / 2**32."""
    return (shift_right(words, 32) * stop) >> 32


def sign_bits(offsets: torch.Tensor, key: int) -> torch.Tensor:
    """Return a random bit, 0 or 1, for each int64 offset: bit p mod 64 of hash64(p div 64)."""
    return (hash64(offsets >> 6, key) >> (offsets & 63)) & 1


def random_signs(
    start: int, shape: tuple[int, int], stride: int, key: int, device: torch.device | str
) -> torch.Tensor:
    """Return (R, r) float32, -1 where `sign_bits` of offset start + i * stride + j is 1, else 1.

    Several times as fast for runs of offsets: one hash for 64 of them.

    Args:
        start: first offset.
        shape: R runs of r offsets.
        stride: offsets from the start of a run to that of the next.
        key: as of `sign_bits`.
        device: of the result.
    """
    num_runs, length = shape
    signs = torch.empty(shape, dtype=torch.float32, device=device)
    period = 64 // math.gcd(stride, 64)  # runs that far apart begin at the same bit of a word
    for phase in range(min(period, num_runs)):
        rows = signs[phase::period]
        word, bit = divmod(start + phase * stride, 64)
        starts = word + torch.arange(len(rows), device=device) * (stride * period // 64)
        inner = torch.arange((bit + length + 63) // 64, device=device)
        words = hash64((starts[:, None] + inner).view(-1), key)
        rows.copy_(signs_from_words(words).view(len(rows), 64 * len(inner))[:, bit : bit + length])
    return signs


def signs_from_words(words: torch.Tensor) -> torch.Tensor:
    """Return (64 n,) float32 from (n,) int64 words: bits 0 and 1 as 1 and -1, the lowest first."""
    in_bytes = words.view(torch.uint8).to(torch.int32)
    return _signs_of_bytes(words.device).index_select(0, in_bytes).view(-1)


@functools.cache
def _signs_of_bytes(device: torch.device) -> torch.Tensor:
    """Return (256, 8) float32, the signs of each byte."""
    bits = (torch.arange(256)[:, None] >> torch.arange(8)[None, :]) & 1
    return (1 - 2 * bits.to(torch.float32)).to(device)
