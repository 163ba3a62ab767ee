"""Cut documents into windows for a model that scores them: the model's side of `score --loss-of`.

Every token of a document but its first is predicted once, from the tokens before it in its window;
no window sees another document. Of T tokens, with S the model's sequence length:

    inputs   t0 .. tS-1 | tS .. t2S-1 | ...           ceil((T - 1) / S) windows
    labels   t1 .. tS   | tS+1 .. t2S | ... tT-1

Windows of a shard are sorted by length, so that those of a batch are of almost one length and
little of it is padding. Shards are cut by tokens alone, so that another number of processes finds
the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron_d3.corpus.index import Index
from megatron_d3.corpus.rewrite import document_tokens
from megatron_d3.corpus.score import documents
from megatron_d3.errors import CorpusError

_SHARD_TOKENS = 1 << 20
_NUM_SHARDS = 64  # of a small corpus, to be spread over processes
_MULTIPLE = 64  # window lengths are rounded up to it: few shapes, and what fast kernels like


@dataclass(frozen=True, eq=False)
class Windows:
    """The windows of consecutive documents, longest first.

    Attributes:
        tokens: (T,) of all documents, one after another.
        starts: (W,) int64, where each window's inputs start in `tokens`.
        lengths: (W,) int64, tokens it predicts, 1..S; not increasing.
        documents: (W,) int64, its document, counted from the first of the shard.
        num_predicted: (D,) int64, tokens predicted in each document.
    """

    tokens: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    documents: np.ndarray
    num_predicted: np.ndarray


@dataclass(frozen=True, eq=False)
class Batch:
    """Windows for one forward pass.

    Attributes:
        inputs: (B, L) int64, padded with 0 at the end.
        labels: (B, L) int64, likewise.
        is_predicted: (B, L) bool, False: padding.
        windows: (B,) int64, number of each window; -1: a row that only fills the batch.
    """

    inputs: np.ndarray
    labels: np.ndarray
    is_predicted: np.ndarray
    windows: np.ndarray


def cut_shards(index: Index) -> np.ndarray:
    """Return (n+1,) int64, the first document of each shard; about 2^20 tokens a shard."""
    ends = np.cumsum(document_tokens(index))
    total = int(ends[-1]) if len(ends) else 0
    size = max(1, min(_SHARD_TOKENS, -(-total // _NUM_SHARDS)))
    # A shard ends with the document in which the next multiple of `size` lies.
    marks = np.searchsorted(ends, np.arange(size, total + size, size)) + 1
    return np.unique(np.concatenate(([0], np.minimum(marks, len(ends)), [len(ends)])))


def cut_windows(index: Index, first: int, last: int, *, seq_length: int) -> Windows:
    """Read the documents [first, last) and cut them into windows.

    Args:
        index: the corpus.
        first: number of the first document.
        last: number after the last.
        seq_length: S, tokens a window predicts at most.
    """
    parts, sizes = [np.empty(0, index.dtype)], [np.empty(0, np.int64)]
    for _, tokens, bounds in documents(index, first=first, last=last):
        parts.append(tokens)
        sizes.append(np.diff(bounds))
    size = np.concatenate(sizes)  # (D,)
    num_predicted = np.maximum(size - 1, 0)
    counts = -(-num_predicted // seq_length)  # windows a document
    owners = np.repeat(np.arange(len(size)), counts)  # (W,)
    number = np.arange(len(owners)) - (np.cumsum(counts) - counts)[owners]  # within its document
    lengths = np.minimum(num_predicted[owners] - number * seq_length, seq_length)
    starts = (np.cumsum(size) - size)[owners] + number * seq_length
    order = np.argsort(-lengths, kind="stable")
    return Windows(
        np.concatenate(parts), starts[order], lengths[order], owners[order], num_predicted
    )


def batches(windows: Windows, *, batch_size: int, seq_length: int) -> Iterator[Batch]:
    """Yield all windows, `batch_size` together, as long as the longest of them and no longer.

    Args:
        windows: of a shard.
        batch_size: B.
        seq_length: no batch is longer.
    """
    for start in range(0, len(windows.starts), batch_size):
        chosen = np.arange(start, start + batch_size)  # (B,)
        chosen[chosen >= len(windows.starts)] = -1
        lengths = np.where(chosen < 0, 0, windows.lengths[chosen])
        length = min(-(-int(lengths.max()) // _MULTIPLE) * _MULTIPLE, seq_length)
        is_predicted = np.arange(length) < lengths[:, None]  # (B, L)
        places = np.where(is_predicted, windows.starts[chosen][:, None] + np.arange(length), 0)
        inputs = np.where(is_predicted, windows.tokens[places], 0).astype(np.int64)
        labels = np.where(is_predicted, windows.tokens[places + is_predicted], 0).astype(np.int64)
        yield Batch(inputs, labels, is_predicted, chosen)


def mean_losses(windows: Windows, sums: np.ndarray) -> np.ndarray:
    """Return the mean loss of each document, (D,) float64; 0 where nothing is predicted.

    Args:
        windows: of a shard.
        sums: (W,) float64, summed losses of each window.
    """
    total = np.bincount(windows.documents, sums, minlength=len(windows.num_predicted))
    return total / np.maximum(windows.num_predicted, 1)


def refuse_unknown_tokens(windows: Windows, vocab_size: int, *, first: int, index: Index) -> None:
    """Raise unless a model of this vocabulary has an embedding for every token.

    Args:
        windows: of a shard.
        vocab_size: of the model, padding included.
        first: number of the shard's first document.
        index: the corpus, for the message.

    Raises:
        CorpusError: names the first document.
    """
    tokens = windows.tokens
    if not len(tokens) or (int(tokens.max()) < vocab_size and int(tokens.min()) >= 0):
        return
    at = int(np.argmax((tokens >= vocab_size) | (tokens < 0)))
    sizes = document_tokens(index)[first:]
    document = first + int(np.searchsorted(np.cumsum(sizes), at, side="right"))
    raise CorpusError(
        f"{index.prefix}: document {document:,} has token {int(tokens[at]):,}, but the model's "
        f"vocabulary is {vocab_size:,}; it was trained with another tokenizer"
    )
