"""Small corpora for tests; plain functions, usable from any test module.

>>> write_corpus(tmp_path / "web", [[1, 2, 3], [], [4, 5]])                  # doctest: +SKIP
>>> write_corpus(tmp_path / "web", documents(seed=1, num_documents=50))      # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_d3.corpus.index import HEADER, MAGIC, code_of_dtype, read_index, suffixed
from megatron_d3.corpus.writer import IndexWriter


def documents(
    *,
    seed: int = 0,
    num_documents: int = 20,
    max_length: int = 30,
    vocab_size: int = 1000,
    eod: int | None = None,
) -> list[list[int]]:
    """Make reproducible documents of 0 to `max_length` tokens, each ended by `eod` if given."""
    rng = np.random.default_rng(seed)
    end = [] if eod is None else [eod]
    return [
        rng.integers(1, vocab_size, rng.integers(0, max_length + 1)).tolist() + end
        for _ in range(num_documents)
    ]


def write_corpus(
    prefix: str | Path,
    docs: Sequence[Sequence[int]],
    dtype: np.dtype | type | str = "uint16",
    *,
    sequence_length: int | None = None,
) -> Path:
    """Write `docs` to PREFIX.bin/.idx, replacing what is there, and return the prefix.

    Args:
        prefix: path without suffix; its folder is made.
        docs: token ids, one list a document.
        dtype: dtype of a token.
        sequence_length: cut each document into sequences of this many tokens; default one.
    """
    prefix = Path(prefix)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    for suffix in (".bin", ".idx"):
        suffixed(prefix, suffix).unlink(missing_ok=True)
    with IndexWriter(prefix, dtype=dtype) as writer:
        for doc in docs:
            lengths = None
            if sequence_length is not None:
                starts = range(0, len(doc), sequence_length)
                lengths = [min(sequence_length, len(doc) - start) for start in starts]
            writer.add_document(doc, lengths)
    return prefix


def write_raw_idx(
    path: str | Path,
    *,
    lengths: Sequence[int],
    pointers: Sequence[int],
    document_indices: Sequence[int],
    dtype: np.dtype | type | str = "uint16",
    magic: bytes = MAGIC,
    version: int = 1,
    code: int | None = None,
    num_sequences: int | None = None,
    num_indices: int | None = None,
) -> None:
    """Write an `.idx` field by field, right or wrong."""
    Path(path).write_bytes(
        HEADER.pack(
            magic,
            version,
            code_of_dtype(dtype) if code is None else code,
            len(lengths) if num_sequences is None else num_sequences,
            len(document_indices) if num_indices is None else num_indices,
        )
        + np.array(lengths, "<i4").tobytes()
        + np.array(pointers, "<i8").tobytes()
        + np.array(document_indices, "<i8").tobytes()
    )


def read_documents(prefix: str | Path) -> list[list[int]]:
    """Read every document of a corpus, following its pointers."""
    index = read_index(prefix)
    found = []
    for start, stop in zip(index.document_indices[:-1], index.document_indices[1:], strict=True):
        tokens: list[int] = []
        for sequence in range(start, stop):
            piece = np.empty(index.lengths[sequence], index.dtype)
            index.read_into(piece, int(index.pointers[sequence]))
            tokens += piece.tolist()
        found.append(tokens)
    return found
