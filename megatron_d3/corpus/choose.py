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
    itemsize = index.dtype.itemsize
    is_valid = np.zeros(index.num_documents, bool)
    for start in range(0, index.num_documents, BLOCK):
        bounds = index.document_indices[start : start + BLOCK + 1].tolist()
        first, last = bounds[0], bounds[-1]
        begins = index.pointers[first:last].tolist()
        sizes = (index.lengths[first:last].astype(np.int64) * itemsize).tolist()
        for number in range(len(bounds) - 1):  # about 1.5 us a document and a second a GB
            state = hashlib.blake2b(digest_size=8, key=key)
            total = 0
            for sequence in range(bounds[number] - first, bounds[number + 1] - first):
                begin = begins[sequence]
                state.update(tokens[begin : begin + sizes[sequence]])
                total += sizes[sequence]
            value = int.from_bytes(state.digest(), "little")
            is_valid[start + number] = total > 0 and value < limit
    return is_valid


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
