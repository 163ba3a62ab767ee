"""Check a `.bin`/`.idx` pair, all of it, and recognise one kind of damage that can be repaired.

Everything is looked at in blocks, so memory stays constant, and each file is read once: the
`.idx` always, the `.bin` only to compare token ids with a vocabulary.

The damage: with NumPy 2, older Megatron-LM added up the pointers of a large index in 32 bits, when
merging above all (Megatron-LM issues 1519 and 1672). From 2 GiB on they are negative or too small
by multiples of 2**32. Lengths and tokens are right, so that the pointers can
be computed again, provided the sequences lie in the `.bin` in stored order; a match of every
pointer modulo 2**32 proves that they do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_d3.corpus.index import (
    FORMAT_VERSION,
    HEADER,
    MAGIC,
    Index,
    code_of_dtype,
    read_index,
    suffixed,
)
from megatron_d3.corpus.publish import Publication
from megatron_d3.errors import CorpusError

_BLOCK = 1 << 16  # sequences, or documents, at a time
_TOKEN_BYTES = 1 << 24


@dataclass
class Report:
    """What was found.

    Attributes:
        prefix: the corpus.
        errors: what makes it unusable, each a sentence with the first place and the count.
        notes: what is legal but worth knowing.
        counts: numbers of the corpus; empty if its header cannot be read.
        is_overflown: the pointers were added up in 32 bits and can be repaired.
    """

    prefix: str
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    counts: dict[str, Any] = field(default_factory=dict)
    is_overflown: bool = False


def check_index(prefix: str | Path, *, vocab_size: int | None = None) -> Report:
    """Check a corpus and report everything found, instead of raising at the first.

    Args:
        prefix: path of the pair without suffix.
        vocab_size: also read the `.bin` and look for ids outside [0, vocab_size).
    """
    report = Report(str(prefix))
    try:
        index = read_index(prefix, check_bin=False)
    except CorpusError as error:
        report.errors.append(str(error))
        return report
    report.counts = {
        "dtype": index.dtype.name,
        "num_documents": index.num_documents,
        "num_sequences": index.num_sequences,
        "bin_bytes": index.bin_bytes,
        "has_modes": index.modes is not None,
    }
    _check_documents(index, report)
    _check_sequences(index, report)
    if vocab_size is not None:
        _check_tokens(index, report, vocab_size)
    return report


def repair(prefix: str | Path, new: Publication, *, is_copying: bool = False) -> None:
    """Write a corpus whose pointers overflowed, with the pointers it should have had.

    Args:
        prefix: the damaged corpus; it is left as it is.
        new: the open publication; has the suffixes ".bin" and ".idx".
        is_copying: copy the `.bin` instead of linking it.

    Raises:
        CorpusError: there is nothing to repair, or something else is wrong as well.
    """
    report = check_index(prefix)
    if not report.is_overflown:
        state = report.errors[0] if report.errors else "it is sound"
        raise CorpusError(f"{prefix}: cannot be repaired, only overflown pointers can: {state}")
    if len(report.errors) > 1:
        raise CorpusError(f"{prefix}: more than its pointers is wrong: {report.errors[-1]}")
    index = read_index(prefix, check_bin=False)
    bin_path = suffixed(Path(prefix), ".bin")
    if is_copying:
        new.concatenate(".bin", [bin_path])
    else:
        new.link(".bin", bin_path)
    new.write(".idx", _idx_with_sequential_pointers(index))


@dataclass
class _Tally:
    """One kind of fault: how often, and where first."""

    count: int = 0
    first: int = -1

    def add(self, is_bad: np.ndarray, start: int) -> None:
        count = int(np.count_nonzero(is_bad))
        if count and not self.count:
            self.first = start + int(np.argmax(is_bad))
        self.count += count


def _check_documents(index: Index, report: Report) -> None:
    decreasing, empty = _Tally(), _Tally()
    documents = index.document_indices
    for start in range(0, index.num_documents, _BLOCK):
        steps = np.diff(documents[start : start + _BLOCK + 1])
        decreasing.add(steps < 0, start)
        empty.add(steps == 0, start)
    if decreasing.count:
        at = decreasing.first
        report.errors.append(
            f"document indices decrease {decreasing.count:,} times, first from {documents[at]:,} "
            f"to {documents[at + 1]:,} after document {at:,}"
        )
    if empty.count:
        report.notes.append(
            f"{empty.count:,} documents have no sequence, first document {empty.first:,}"
        )
    report.counts["num_empty_documents"] = empty.count


def _check_sequences(index: Index, report: Report) -> None:
    """Compare lengths and pointers with the `.bin` and with an index in stored order."""
    negative, outside, moved, unlike = _Tally(), _Tally(), _Tally(), _Tally()
    itemsize, end, longest, num_tokens = index.dtype.itemsize, 0, 0, 0
    for start in range(0, index.num_sequences, _BLOCK):
        lengths = index.lengths[start : start + _BLOCK].astype(np.int64)
        pointers = index.pointers[start : start + _BLOCK]
        sizes = lengths * itemsize
        ends = end + np.cumsum(sizes)
        stored = ends - sizes  # where each sequence lies if all lie back to back
        end = int(ends[-1])
        longest = max(longest, int(lengths.max()))
        num_tokens += int(lengths.sum())
        negative.add(lengths < 0, start)
        room = index.bin_bytes - np.maximum(pointers, 0)  # no overflow: both are at least 0
        outside.add((pointers < 0) | (np.maximum(sizes, 0) > room), start)
        moved.add(pointers != stored, start)
        unlike.add(((pointers - stored) & 0xFFFFFFFF) != 0, start)
    report.counts.update(num_tokens=num_tokens, longest_sequence=longest)
    report.counts["is_in_stored_order"] = moved.count == 0
    if negative.count:
        report.errors.append(
            f"{negative.count:,} sequences have a negative length, first sequence "
            f"{negative.first:,} with {index.lengths[negative.first]:,}"
        )
    is_complete = not negative.count and end <= index.bin_bytes
    if moved.count and not unlike.count and is_complete:
        report.is_overflown = True
        report.errors.append(
            f"{moved.count:,} pointers were added up in 32 bits (Megatron-LM issue 1672), first "
            f"that of sequence {moved.first:,}: {index.pointers[moved.first]:,}; the tokens are "
            "there, --fix OUT writes an index with the right pointers"
        )
    elif outside.count:
        at = outside.first
        report.errors.append(
            f"{outside.count:,} sequences do not lie in the .bin of {index.bin_bytes:,} bytes, "
            f"first sequence {at:,} with {index.lengths[at]:,} tokens of {itemsize} bytes at byte "
            f"{index.pointers[at]:,}; it is cut short or belongs to another index"
        )
    elif moved.count:
        report.notes.append(f"reordered: {moved.count:,} sequences are not in stored order")
    if is_complete and end < index.bin_bytes:
        report.notes.append(f"{index.bin_bytes - end:,} bytes of the .bin belong to no sequence")
    if not negative.count and end > index.bin_bytes and not outside.count:
        report.notes.append(f"sequences overlap: together {end:,} bytes, .bin {index.bin_bytes:,}")


def _check_tokens(index: Index, report: Report, vocab_size: int) -> None:
    """Read the `.bin` once and count ids outside the vocabulary."""
    wrong, largest = _Tally(), 0
    path = suffixed(index.prefix, ".bin")
    itemsize = index.dtype.itemsize
    with open(path, "rb") as file:
        start = 0  # token number
        while piece := file.read(_TOKEN_BYTES):
            tokens = np.frombuffer(piece, index.dtype, len(piece) // itemsize)
            if len(tokens) and (int(tokens.max()) >= vocab_size or int(tokens.min()) < 0):
                wrong.add((tokens >= vocab_size) | (tokens < 0), start)
            largest = max(largest, int(tokens.max())) if len(tokens) else largest
            start += len(tokens)
    report.counts["largest_token"] = largest
    if wrong.count:
        byte = wrong.first * itemsize
        report.errors.append(
            f"{wrong.count:,} tokens are outside the vocabulary of {vocab_size:,} (largest "
            f"{largest:,}), first at byte {byte:,} of the .bin{_owner(index, byte)}"
        )


def _owner(index: Index, byte: int) -> str:
    """Name the document that a byte of the `.bin` belongs to."""
    for start in range(0, index.num_sequences, _BLOCK):
        pointers = index.pointers[start : start + _BLOCK]
        sizes = index.lengths[start : start + _BLOCK].astype(np.int64) * index.dtype.itemsize
        holds = (pointers <= byte) & (byte - pointers < sizes)
        if holds.any():
            sequence = start + int(np.argmax(holds))
            bounds = index.document_indices
            return f", in document {int(np.searchsorted(bounds, sequence, side='right')) - 1:,}"
    return ""


def _idx_with_sequential_pointers(index: Index) -> Iterator[np.ndarray | bytes]:
    """Yield the bytes of the index as if its sequences lay back to back in stored order."""
    itemsize = index.dtype.itemsize
    code = code_of_dtype(index.dtype)
    num_indices = len(index.document_indices)
    yield HEADER.pack(MAGIC, FORMAT_VERSION, code, index.num_sequences, num_indices)
    yield index.lengths
    end = 0
    for start in range(0, index.num_sequences, _BLOCK):
        sizes = index.lengths[start : start + _BLOCK].astype(np.int64) * itemsize
        ends = end + np.cumsum(sizes)
        yield (ends - sizes).astype("<i8", copy=False)
        end = int(ends[-1])
    yield index.document_indices
    if index.modes is not None:
        yield index.modes
