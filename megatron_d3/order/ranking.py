"""From scores to ranks: the stable sort that every order but `shuffle` starts with.

NumPy's stable sort of 10^8 scores takes most of the time of an order. Its sort of plain integers is
about ten times faster (vectorised), so a document's number is packed into the low bits of its score:

    bits of the score that sort as it does, cut off | number of the document

Sorting these integers sorts by the score as far as it was kept, ties by document. Where scores
differ only in the bits that were cut off (for 10^7 uniform scores one document in fifty) the few
documents concerned are sorted once more.
"""

from __future__ import annotations

import os
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from megatron_d3.errors import CorpusError

_BLOCK = 1 << 20  # scores looked at together while searching for a bad one: 8 MB
_CACHE_BLOCK = 1 << 15  # a few temporaries of this length stay in a core's L2 cache
_MAX_THREADS = 4


def rank(scores: np.ndarray, *, ascending: bool) -> np.ndarray:
    """Return the documents in the order of their scores, equal scores in document order.

    Args:
        scores: (N,) float64, one score a document.
        ascending: lowest score first; otherwise highest first, ties still in document order, as
            `sorted(..., reverse=True)` leaves them.

    Returns:
        (N,) int64; entry r is the document of rank r.

    Raises:
        CorpusError: a score is NaN; the message names the first such document.

    >>> rank(np.array([2.0, 1.0, 2.0]), ascending=False).tolist()
    [0, 2, 1]
    """
    scores = np.asarray(scores)
    if scores.ndim != 1:
        raise CorpusError(f"scores: got shape {scores.shape}, expected one score a document")
    refuse_nan(scores)
    if scores.dtype.itemsize > 8:
        return _argsort(scores, ascending=ascending)
    number_bits = max(len(scores) - 1, 1).bit_length()
    keys = _sorted_keys(scores, ascending=ascending, number_bits=number_bits)
    close = _misplaced(keys, scores, ascending=ascending, number_bits=number_bits)
    if close is None:
        del keys
        return _argsort(scores, ascending=ascending)
    for start in range(0, len(keys), _CACHE_BLOCK):
        keys[start : start + _CACHE_BLOCK] &= (1 << number_bits) - 1
    ranked = keys.view(np.int64)
    if len(close):
        # All together: those of one place differ less from each other than from those of another.
        documents = ranked[close]
        ranked[close] = documents[_argsort(scores[documents], ascending=ascending)]
    return ranked


def _sorted_keys(scores: np.ndarray, *, ascending: bool, number_bits: int) -> np.ndarray:
    """Return (N,) uint64, ascending: cut-off scores with the documents' numbers."""
    keys = np.empty(len(scores), np.uint64)
    num_threads = min(_MAX_THREADS, os.cpu_count() or 1, -(-len(scores) // _BLOCK))
    bounds = [len(scores) * number // max(num_threads, 1) for number in range(num_threads + 1)]

    def share(first: int, last: int) -> None:
        for start in range(first, last, _CACHE_BLOCK):
            stop = min(start + _CACHE_BLOCK, last)
            keys[start:stop] = _pack(
                scores[start:stop], start, ascending=ascending, number_bits=number_bits)
        keys[first:last].sort()

    if num_threads > 1:
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(share, bounds[:-1], bounds[1:]))
        keys.sort(kind="stable")  # finds the sorted shares and merges them
    elif num_threads:
        share(*bounds)
    return keys


def _pack(block: np.ndarray, first: int, *, ascending: bool, number_bits: int) -> np.ndarray:
    """Return the keys of consecutive scores; the first is that of document `first`."""
    sign = np.uint64(1 << 63)
    if block.dtype.kind == "f":
        bits = (block.astype(np.float64, copy=False) + 0.0).view(np.int64)  # -0.0 equals 0.0
        # IEEE 754 numbers sort as their bits do, negative ones the other way round.
        key = bits.view(np.uint64) ^ ((bits >> 63).view(np.uint64) | sign)
    elif block.dtype.kind == "i":
        key = block.astype(np.int64).view(np.uint64) ^ sign
    else:
        key = block.astype(np.uint64)
    if not ascending:
        np.invert(key, out=key)
    key &= np.uint64(2**64 - (1 << number_bits))
    key |= np.arange(first, first + len(key), dtype=np.uint64)
    return key


def _misplaced(
    keys: np.ndarray, scores: np.ndarray, *, ascending: bool, number_bits: int
) -> np.ndarray | None:
    """Return the places whose scores the keys do not tell apart, (C,) int64, ascending.

    Returns:
        None if they are more than an eighth of all, nothing if they are in order as they are:
        scores that are really equal.
    """
    mask = np.uint64((1 << number_bits) - 1)
    found = [np.empty(0, np.int64)]
    count, is_settled = 0, True
    for start in range(0, len(keys) - 1, _CACHE_BLOCK):
        block = keys[start : start + _CACHE_BLOCK + 1]
        pairs = np.flatnonzero((block[1:] ^ block[:-1]) <= mask)
        if not len(pairs):
            continue
        if is_settled:
            first, second = scores[block[pairs] & mask], scores[block[pairs + 1] & mask]
            is_settled = not (first > second if ascending else first < second).any()
        count += len(pairs)
        is_few = count <= len(keys) // 8
        if not is_settled and not is_few:
            return None
        if is_few:
            found.append(np.union1d(pairs, pairs + 1) + start)
    return found[0] if is_settled else np.unique(np.concatenate(found))


def _argsort(scores: np.ndarray, *, ascending: bool) -> np.ndarray:
    if ascending:
        return np.argsort(scores, kind="stable").astype(np.int64, copy=False)
    # Sorting the reversed array and reading the result backwards keeps ties in document order
    # without negating the scores, which would need a second array of their size.
    ranked = np.argsort(scores[::-1], kind="stable").astype(np.int64, copy=False)  # (N,)
    np.subtract(len(scores) - 1, ranked, out=ranked)
    return ranked[::-1]


def refuse_nan(scores: np.ndarray) -> None:
    """Raise `CorpusError` naming the first document whose score is NaN; O(1) memory."""
    for start in range(0, len(scores), _BLOCK):
        is_nan = np.isnan(scores[start : start + _BLOCK])
        if is_nan.any():
            document = start + int(is_nan.argmax())
            raise CorpusError(
                f"scores: document {document} has no score (NaN); give every document a score or "
                "leave the document out of the corpus"
            )


def refuse_repeats(permutation: np.ndarray, num_items: int) -> None:
    """Raise `CorpusError` unless `permutation` holds each of 0..num_items-1 exactly once.

    Args:
        permutation: (N,) any integer dtype.
        num_items: what N has to be. One byte an item is used.
    """
    if permutation.shape != (num_items,):
        raise CorpusError(
            f"permutation: got shape {permutation.shape}, expected ({num_items},), an entry a "
            "document"
        )
    if permutation.dtype.kind not in "iu":
        raise CorpusError(f"permutation: got dtype {permutation.dtype}, expected integers")
    if num_items == 0:
        return
    lowest, highest = int(permutation.min()), int(permutation.max())
    if lowest < 0 or highest >= num_items:
        wrong = lowest if lowest < 0 else highest
        raise CorpusError(f"permutation: holds {wrong}, expected 0 to {num_items - 1}")
    is_seen = np.zeros(num_items, dtype=bool)
    is_seen[permutation] = True
    if not is_seen.all():
        raise CorpusError(
            f"permutation: document {int(is_seen.argmin())} is missing and another occurs twice"
        )


def stream(seed: int, name: str) -> np.random.Generator:
    """Return the random stream of one stage, so that adding a stage leaves the others as they are.

    Args:
        seed: 0 or more.
        name: the stage, for example "jitter".
    """
    return np.random.default_rng([seed, zlib.crc32(name.encode())])
