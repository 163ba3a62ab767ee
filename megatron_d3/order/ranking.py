"""From scores to ranks: the stable sort that every order but `shuffle` starts with."""

from __future__ import annotations

import zlib

import numpy as np

from megatron_d3.errors import CorpusError

_BLOCK = 1 << 20  # scores looked at together while searching for a bad one: 8 MB


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
