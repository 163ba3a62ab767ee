"""Scores computed from the tokens of a corpus, for data that brings none.

| name | a document's score | reads |
|---|---|---|
| length | tokens | the `.idx` |
| zlib | compressed size / size, level 6: low is repetitive, near 1 is noise | the `.bin` |
| unigram | mean of -ln p(token), nats a token: high is rare words | the `.bin` |
| bigram | mean of -ln p(token | token before), nats a token: high is unusual text | the `.bin` |

The n-gram models are counted on a sample of documents of the corpus itself or of a reference
corpus; p(b) = (c(b) + 1) / (N + V) and p(b | a) = (c(ab) + m p(b)) / (c(a) + m) with m = 64, the
Dirichlet prior of language-model retrieval. The first token of a document counts with p(b).
A document without tokens has length 0, zlib 1 and surprisal 0.

`zlib` compresses the decoded text if there is a tokenizer, else the ids as they are stored. Its
value depends on the zlib in use; those of one run compare.

Memory: a block of documents, beside the scores and the counts (24 bytes a distinct bigram).
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from megatron_d3.corpus.choose import sample
from megatron_d3.corpus.index import Index
from megatron_d3.corpus.rewrite import document_tokens, map_bin
from megatron_d3.errors import ConfigError, CorpusError

VERSION = 1
METHODS = ("length", "zlib", "unigram", "bigram")
_PRIOR = 64.0
_BLOCK_TOKENS = 1 << 21
_BLOCK_DOCUMENTS = 1 << 14


@dataclass(frozen=True, eq=False)
class Grams:
    """Counts of tokens and pairs.

    Attributes:
        surprisal: (V,) float64, -ln p(b).
        counts: (V,) int64, how often a token is followed by another.
        pairs: (P,) int64, ascending, a * V + b of every pair seen; empty for a unigram model.
        pair_counts: (P,) int64.
    """

    surprisal: np.ndarray
    counts: np.ndarray
    pairs: np.ndarray
    pair_counts: np.ndarray


def score(
    index: Index,
    method: str,
    *,
    reference: Index | None = None,
    fit_tokens: int = 10_000_000,
    seed: int = 0,
    decode: Callable[[Sequence[int]], str] | None = None,
    threads: int = 1,
) -> np.ndarray:
    """Return one score a document, (D,) float64.

    Args:
        index: the corpus.
        method: one of `METHODS`.
        reference: what the n-gram models are counted on; None: the corpus itself.
        fit_tokens: documents are drawn for it until there are so many tokens, at most all.
        seed: of that draw.
        decode: ids to text, for zlib.
        threads: that compress.

    Raises:
        ConfigError: an unknown method, or less than one token to count.
        CorpusError: a reference of another dtype, which is another tokenizer.
    """
    if method == "length":
        return document_tokens(index).astype(np.float64)
    if method == "zlib":
        return _zlib(index, decode, threads)
    if method not in METHODS:
        raise ConfigError(f"--method: got {method!r}, expected one of {', '.join(METHODS)}")
    source = index if reference is None else reference
    if source.dtype != index.dtype:
        raise CorpusError(
            f"{source.prefix}: {source.dtype.name} tokens, but {index.prefix} has "
            f"{index.dtype.name}; a reference needs the same tokenizer"
        )
    grams = count(source, fit_tokens=fit_tokens, seed=seed, has_pairs=method == "bigram")
    out = np.zeros(index.num_documents)
    for first, tokens, bounds in documents(index):
        costs = _costs(grams, tokens, bounds)
        ends = np.concatenate(([0.0], np.cumsum(costs)))
        sizes = np.diff(bounds)
        out[first : first + len(sizes)] = np.diff(ends[bounds]) / np.maximum(sizes, 1)
    return out


def count(index: Index, *, fit_tokens: int, seed: int, has_pairs: bool) -> Grams:
    """Count tokens, and pairs if wanted, on a sample of documents.

    Raises:
        ConfigError: `fit_tokens` below 1.
    """
    if fit_tokens < 1:
        raise ConfigError(f"--fit-tokens: got {fit_tokens}, expected at least 1")
    sizes = document_tokens(index)
    total = int(sizes.sum())
    chosen = np.ones(index.num_documents, bool)
    if fit_tokens < total:
        chosen[:] = False
        chosen[sample(index, seed=seed, tokens=fit_tokens)] = True
    width = 0
    ones, befores, pairs = np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64)
    parts: list[np.ndarray] = []
    for first, tokens, bounds in documents(index, chosen):
        del first
        ids = tokens.astype(np.int64)
        if len(ids) and int(ids.max()) >= width:
            width = int(ids.max()) + 1
            ones, befores = (np.pad(counts, (0, width - len(counts))) for counts in (ones, befores))
        ones += np.bincount(ids, minlength=width)
        if has_pairs:
            starts = _starts(bounds, len(ids))
            follows = ~starts[1:]
            parts.append((ids[:-1] << 32 | ids[1:])[follows])  # V is known at the end only
            befores += np.bincount(ids[:-1][follows], minlength=width)
    pair_counts = np.zeros(0, np.int64)
    if parts:
        pairs, pair_counts = np.unique(np.concatenate(parts), return_counts=True)
    # Ids beyond the sample's largest share the count 0: one more row stands for all of them.
    chances = (np.append(ones, 0) + 1) / (ones.sum() + width + 1)
    return Grams(-np.log(chances), np.append(befores, 0), pairs, pair_counts)


def documents(
    index: Index,
    chosen: np.ndarray | None = None,
    *,
    first: int = 0,
    last: int | None = None,
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield (first document, tokens, bounds) of blocks of documents, in the order of the index.

    Args:
        index: the corpus.
        chosen: (D,) bool, documents to read; others have no tokens here. None: all.
        first: number of the document to begin with.
        last: number of the document to end before; None: the end.

    Yields:
        number of the block's first document; (T,) tokens; (b + 1,) where each document starts
        among them.
    """
    view = map_bin(index)
    itemsize = index.dtype.itemsize
    limit = _BLOCK_TOKENS
    start, end = first, index.num_documents if last is None else last
    while start < end:
        stop = min(start + _BLOCK_DOCUMENTS, end)
        marks = index.document_indices[start : stop + 1]
        lengths = index.lengths[marks[0] : marks[-1]].astype(np.int64)
        ends = np.concatenate(([0], np.cumsum(lengths)))
        bounds = ends[marks - marks[0]]  # (b + 1,)
        taken = max(1, int(np.searchsorted(bounds, limit, side="right")) - 1)
        bounds, stop = bounds[: taken + 1], start + taken
        begin, finish = int(marks[0]), int(marks[taken])
        places = index.pointers[begin:finish].tolist()
        sizes = (lengths[: finish - begin] * itemsize).tolist()
        if chosen is not None:
            is_read = np.repeat(chosen[start:stop], np.diff(marks[: taken + 1]))
            sizes = (np.array(sizes, np.int64) * is_read).tolist()
            bounds = np.concatenate(([0], np.cumsum(np.diff(bounds) * chosen[start:stop])))
        joined = b"".join(
            view[place : place + size] for place, size in zip(places, sizes, strict=True)
        )
        yield start, np.frombuffer(joined, index.dtype), bounds
        start = stop


def _costs(grams: Grams, tokens: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Return -ln p of every token, (T,) float64."""
    ids = np.minimum(tokens, len(grams.surprisal) - 1).astype(np.int64)  # unseen: the last row
    costs = grams.surprisal[ids]
    if not len(grams.pairs) or len(ids) < 2:
        return costs
    follows = ~_starts(bounds, len(ids))[1:]
    before, after = ids[:-1][follows], ids[1:][follows]
    keys = before << 32 | after
    places = np.minimum(np.searchsorted(grams.pairs, keys), len(grams.pairs) - 1)
    seen = np.where(grams.pairs[places] == keys, grams.pair_counts[places], 0)
    chances = seen + _PRIOR * np.exp(-costs[1:][follows])
    costs[1:][follows] = np.log(grams.counts[before] + _PRIOR) - np.log(chances)
    return costs


def _starts(bounds: np.ndarray, num_tokens: int) -> np.ndarray:
    """Return (T,) bool, whether a token is the first of its document."""
    starts = np.zeros(num_tokens + 1, bool)
    starts[bounds] = True
    return starts[:num_tokens]


def _zlib(index: Index, decode: Callable[[Sequence[int]], str] | None, threads: int) -> np.ndarray:
    out = np.ones(index.num_documents)

    def ratio(content: bytes) -> float:
        return len(zlib.compress(content, 6)) / len(content) if content else 1.0

    with ThreadPoolExecutor(threads) as pool:
        for first, tokens, bounds in documents(index):
            marks = bounds.tolist()
            texts: list[bytes] = []
            for start, stop in itertools.pairwise(marks):
                piece = tokens[start:stop]
                texts.append(piece.tobytes() if decode is None else decode(piece.tolist()).encode())
            size = max(1, len(texts) // (4 * threads))
            out[first : first + len(texts)] = list(pool.map(ratio, texts, chunksize=size))
    return out
