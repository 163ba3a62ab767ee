"""Choose documents of a corpus: a held-out part by content, or a random sample.

Both give document numbers in stored order, to be written by `rewrite.py`.
"""

from __future__ import annotations

import hashlib

import numpy as np

from megatron_d3.corpus.index import Index
from megatron_d3.corpus.rewrite import BLOCK, document_tokens, map_bin
from megatron_d3.errors import ConfigError

VERSION = 1


def split_by_content(index: Index, *, valid_fraction: float, seed: int) -> np.ndarray:
    """Decide by a seeded hash of its tokens whether a document is held out.

    Equal documents fall on the same side, so that no validation document is trained on; the side
    depends on nothing but the tokens, the dtype and the seed, whatever the order or the corpus.

    Args:
        index: the corpus; its `.bin` is read once.
        valid_fraction: expected share of documents held out, in [0, 1].
        seed: 0 or more.

    Returns:
        (D,) bool, True: held out. Documents without tokens are never held out.

    Raises:
        ConfigError: a fraction out of its range or a negative seed.
    """
    if not 0 <= valid_fraction <= 1:
        raise ConfigError(f"--valid-fraction: got {valid_fraction}, expected a number in [0, 1]")
    _check_seed(seed)
    limit = round(valid_fraction * 2**64)
    key = seed.to_bytes(16, "little")
    tokens = map_bin(index)
    is_valid = np.zeros(index.num_documents, bool)
    for start in range(0, index.num_documents, BLOCK):
        bounds = index.document_indices[start : start + BLOCK + 1]
        first, last = int(bounds[0]), int(bounds[-1])
        begins = index.pointers[first:last]
        sizes = index.lengths[first:last].astype(np.int64) * index.dtype.itemsize
        digests = _digests(tokens, bounds - first, begins, begins + sizes, key)
        values = np.frombuffer(digests, "<u8")
        ends = np.concatenate(([0], np.cumsum(sizes)))
        has_tokens = np.diff(ends[bounds - first]) > 0
        # As Python's integers where a fraction of 1 makes the limit 2^64, beyond 64 bits.
        is_below = values < np.uint64(limit) if limit < 2**64 else np.ones(len(values), bool)
        is_valid[start : start + len(values)] = is_below & has_tokens
    return is_valid


def _digests(
    tokens: memoryview, bounds: np.ndarray, begins: np.ndarray, ends: np.ndarray, key: bytes
) -> bytes:
    """Return 8 bytes a document, joined: a keyed hash of its tokens.

    Args:
        tokens: the `.bin`.
        bounds: (b+1,) first sequence of each document.
        begins: (s,) first byte of each sequence.
        ends: (s,) byte after its last.
        key: of the hash.
    """
    blake2b = hashlib.blake2b  # about a microsecond a document and a second a GB
    places = zip(begins.tolist(), ends.tolist(), strict=True)
    if len(bounds) - 1 == len(begins) and np.array_equal(bounds, np.arange(len(bounds))):
        return b"".join([blake2b(tokens[i:j], digest_size=8, key=key).digest() for i, j in places])
    found = []
    for count in np.diff(bounds).tolist():
        state = blake2b(digest_size=8, key=key)
        for _ in range(count):
            begin, end = next(places)
            state.update(tokens[begin:end])
        found.append(state.digest())
    return b"".join(found)


def sample(
    index: Index,
    *,
    seed: int,
    documents: int | None = None,
    tokens: int | None = None,
    fraction: float | None = None,
) -> np.ndarray:
    """Draw documents without replacement, uniformly; exactly one size has to be given.

    Args:
        index: the corpus.
        seed: 0 or more.
        documents: this many, at most all.
        tokens: until the sample has at least this many tokens, at most all.
        fraction: this share of all documents, rounded to the nearest count.

    Returns:
        (M,) int64, ascending.

    Raises:
        ConfigError: none or several sizes, one out of its range, a negative seed.
    """
    _check_seed(seed)
    given = [size for size in (documents, tokens, fraction) if size is not None]
    if len(given) != 1:
        raise ConfigError("sample: give exactly one of --documents, --tokens, --fraction")
    total = index.num_documents
    drawn = np.random.default_rng([seed, VERSION]).permutation(total)
    if fraction is not None:
        if not 0 <= fraction <= 1:
            raise ConfigError(f"--fraction: got {fraction}, expected a number in [0, 1]")
        count = round(fraction * total)
    elif documents is not None:
        if not 0 <= documents <= total:
            raise ConfigError(f"--documents: got {documents:,}, the corpus has {total:,}")
        count = documents
    else:
        assert tokens is not None
        ends = np.cumsum(document_tokens(index)[drawn])
        available = int(ends[-1]) if total else 0
        if not 0 <= tokens <= available:
            raise ConfigError(f"--tokens: got {tokens:,}, the corpus has {available:,}")
        count = int(np.searchsorted(ends, tokens)) + 1 if tokens else 0
    return np.sort(drawn[:count]).astype(np.int64, copy=False)


def _check_seed(seed: int) -> None:
    if seed < 0:
        raise ConfigError(f"--seed: got {seed}, expected 0 or more")
