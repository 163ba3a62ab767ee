"""What a corpus holds, in numbers and in its first documents."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megatron_d3.corpus.index import Index, suffixed
from megatron_d3.corpus.rewrite import BLOCK, document_tokens
from megatron_d3.corpus.scores import SUFFIXES


@dataclass(frozen=True)
class Description:
    """One row of the table.

    Attributes:
        prefix: the corpus.
        dtype: of a token.
        num_documents: documents.
        num_sequences: sequences.
        num_tokens: tokens.
        shortest: tokens of the shortest document.
        median: tokens of the middle document, the lower of two.
        longest: tokens of the longest document.
        bin_bytes: size of the `.bin`.
        is_in_stored_order: sequences lie back to back in the `.bin` in the order of the index.
        has_modes: sequences have a mode.
        scores: names of the scores beside it.
    """

    prefix: str
    dtype: str
    num_documents: int
    num_sequences: int
    num_tokens: int
    shortest: int
    median: int
    longest: int
    bin_bytes: int
    is_in_stored_order: bool
    has_modes: bool
    scores: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON values."""
        return asdict(self)


def describe(index: Index) -> Description:
    """Count a corpus; one pass over its `.idx`, 8 bytes a document in memory."""
    sizes = document_tokens(index)
    middle = (len(sizes) - 1) // 2
    return Description(
        prefix=str(index.prefix),
        dtype=index.dtype.name,
        num_documents=index.num_documents,
        num_sequences=index.num_sequences,
        num_tokens=int(sizes.sum()),
        shortest=int(sizes.min(initial=np.iinfo(np.int64).max)) if len(sizes) else 0,
        longest=int(sizes.max(initial=0)),
        median=int(np.partition(sizes, middle)[middle]) if len(sizes) else 0,
        bin_bytes=index.bin_bytes,
        is_in_stored_order=_is_in_stored_order(index),
        has_modes=index.modes is not None,
        scores=_score_names(index),
    )


def table(rows: Sequence[Description]) -> str:
    """Return the rows as an aligned text table, numbers to the right."""
    head = ("corpus", "dtype", "documents", "sequences", "tokens", "min", "median", "max", "order",
            "scores")  # fmt: skip
    cells: list[tuple[str, ...]] = [head]
    for row in rows:
        numbers = (row.num_documents, row.num_sequences, row.num_tokens)
        sizes = (row.shortest, row.median, row.longest)
        cells.append((
            row.prefix, row.dtype, *(f"{number:,}" for number in numbers + sizes),
            "stored" if row.is_in_stored_order else "reordered", " ".join(row.scores) or "-",
        ))  # fmt: skip
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = [
        "  ".join(
            cell.rjust(width) if 2 <= column <= 7 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    return "\n".join(lines)


def first_tokens(index: Index, document: int, *, limit: int) -> np.ndarray:
    """Return the first tokens of a document, at most `limit`, across its sequences."""
    start, stop = index.document_indices[document : document + 2].tolist()
    parts: list[np.ndarray] = []
    left = limit
    for sequence in range(start, stop):
        count = min(left, int(index.lengths[sequence]))
        part = np.empty(count, index.dtype)
        index.read_into(part, int(index.pointers[sequence]))
        parts.append(part)
        left -= count
        if left == 0:
            break
    return np.concatenate(parts) if parts else np.empty(0, index.dtype)


def _is_in_stored_order(index: Index) -> bool:
    end = 0
    for start in range(0, index.num_sequences, BLOCK):
        sizes = index.lengths[start : start + BLOCK].astype(np.int64) * index.dtype.itemsize
        ends = end + np.cumsum(sizes)
        if not np.array_equal(ends - sizes, index.pointers[start : start + BLOCK]):
            return False
        end = int(ends[-1])
    return True


def _score_names(index: Index) -> tuple[str, ...]:
    path = suffixed(index.prefix, SUFFIXES[1])
    if path.is_file():
        try:
            return tuple(map(str, json.loads(path.read_bytes())["names"]))
        except (ValueError, KeyError, TypeError):
            return ("unreadable",)
    return ("score",) if suffixed(index.prefix, SUFFIXES[0]).is_file() else ()
