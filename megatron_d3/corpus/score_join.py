"""Scores from a file of somebody else's: one row a document, joined by order or by id."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from megatron_d3.corpus.index import Index
from megatron_d3.corpus.records import Keys, Rows, read_rows
from megatron_d3.corpus.sources import chunks, cut, find_files, rows_before
from megatron_d3.errors import ConfigError, CorpusError

_SHARD_BYTES = 1 << 40


def join(
    index: Index,
    files: Sequence[str | Path],
    keys: Sequence[str],
    *,
    id_key: str | None = None,
    documents: Sequence[str | Path] = (),
) -> np.ndarray:
    """Return the scores of a corpus from `.jsonl` or `.parquet` files, (M, D) float64.

    Args:
        index: the corpus.
        files: paths, folders or globs, read one after another.
        keys: of the M scores.
        id_key: join by this key instead of by order; ids may come in any order, and some may be
            of no document.
        documents: with `id_key`: the files the corpus was tokenized from, which say what id the
            document at each place has.

    Raises:
        ConfigError: an id_key without documents, or documents without id_key.
        CorpusError: a row without its score or id, a document without a score (the first is
            named), more or fewer rows than documents, an id that occurs twice.
    """
    if (id_key is None) != (not documents):
        raise ConfigError("--id-key and --documents: give both, or none to join by order")
    if id_key is None:
        scores = [score for rows in _rows(files, Keys(None, tuple(keys))) for score in rows.scores]
        _check_count(len(scores), index, "rows")
        return np.array(scores, np.float64).reshape(len(scores), len(keys)).T
    known: dict[str | int, tuple[float, ...]] = {}
    for rows in _rows(files, Keys(None, tuple(keys), id_key)):
        for name, score in zip(rows.ids, rows.scores, strict=True):
            if name in known:
                raise CorpusError(f"{files[0]}: id {name!r} occurs twice; it names one document")
            known[name] = score
    found: list[tuple[float, ...]] = []
    for rows in _rows(documents, Keys(None, (), id_key)):
        for name in rows.ids:
            if name not in known:
                raise CorpusError(f"document {len(found):,} has no score: no row has id {name!r}")
            found.append(known[name])
    _check_count(len(found), index, "documents in the files given")
    return np.array(found, np.float64).reshape(len(found), len(keys)).T


def _rows(files: Sequence[str | Path], keys: Keys) -> Iterator[Rows]:
    for shard in cut(find_files(files), shard_bytes=_SHARD_BYTES, txt="line"):
        for chunk in chunks(shard):
            if chunk.form not in ("jsonl", "parquet"):
                raise CorpusError(f"{chunk.path}: scores are read from .jsonl and .parquet")
            rows = read_rows(chunk, keys)
            if rows.problems:
                problem = rows.problems[0]
                row = problem.row + rows_before(shard[chunk.span])
                place = f"row {row:,}" if chunk.form == "parquet" else f"line {row + 1:,}"
                raise CorpusError(f"{chunk.path}, {place}: {problem.reason}: {problem.detail}")
            yield rows


def _check_count(count: int, index: Index, what: str) -> None:
    if count != index.num_documents:
        raise CorpusError(
            f"{count:,} {what}, but {index.prefix} has {index.num_documents:,} documents"
        )
