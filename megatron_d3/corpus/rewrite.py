"""Build an index of chosen documents of other indexes, in any order, without touching a token.

One operation serves the verbs `order`, `index merge`, `index split` and `index sample`: a list of
document numbers goes in, a pair `.bin`/`.idx` comes out. An `.idx` may point anywhere in its
`.bin`, so a new order, a subset or a repair is a new `.idx` (12 bytes a sequence and 8 a document)
over the same `.bin`, which gets a second name (a hard link). Several corpora need one `.bin`
together: theirs are copied one after another, a `.bin` shared by several of them only once.
`is_copying` writes the tokens again in their new order, for storage that dislikes random reads.

NOTE: a linked `.bin` *is* the original file; a program that writes into one of them in place
changes both. Replacing a file (as this package does) is safe.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_d3.corpus.index import (
    FORMAT_VERSION,
    HEADER,
    MAGIC,
    Index,
    code_of_dtype,
    suffixed,
)
from megatron_d3.corpus.publish import Publication
from megatron_d3.errors import CorpusError

BLOCK = 1 << 18  # documents, or sequences, in memory at a time
_COPY_BLOCK_BYTES = 1 << 26  # tokens gathered before they are written


@dataclass(frozen=True, eq=False)
class Source:
    """Documents of one or more indexes, numbered through from 0 in the order given.

    Attributes:
        indexes: one dtype, all with modes or all without.
        first_documents: (n+1,) int64, number of the first document of each index; the last entry
            is the number of all documents.
        bins: each distinct `.bin` once, in order of first use.
        bases: (n,) int64, byte at which the `.bin` of each index starts once `bins` are laid one
            after another.
        is_one_to_one: every document is exactly one sequence, so that their numbers are the same.
    """

    indexes: tuple[Index, ...]
    first_documents: np.ndarray
    bins: tuple[Path, ...]
    bases: np.ndarray
    is_one_to_one: bool

    @property
    def dtype(self) -> np.dtype:
        """Dtype of a token."""
        return self.indexes[0].dtype

    @property
    def has_modes(self) -> bool:
        """Whether sequences have a mode."""
        return any(index.modes is not None for index in self.indexes)

    @property
    def num_documents(self) -> int:
        """Number of documents in all indexes."""
        return int(self.first_documents[-1])


def open_source(indexes: Sequence[Index]) -> Source:
    """Number the documents of several indexes through.

    Raises:
        CorpusError: no index, different dtypes, or modes in some and not in others.
    """
    if not indexes:
        raise CorpusError("got no corpus, expected at least one")
    first = indexes[0]
    filled = [index for index in indexes if index.num_sequences]  # modes show in no other
    for index in indexes:
        if index.dtype != first.dtype:
            raise CorpusError(
                f"{index.prefix}: {index.dtype.name} tokens, but {first.prefix} has "
                f"{first.dtype.name}; one corpus has one dtype"
            )
    for index in filled:
        if (index.modes is None) != (filled[0].modes is None):
            raise CorpusError(f"{index.prefix}: modes in one of it and {filled[0].prefix} only")
    places: dict[tuple[int, int], int] = {}  # (device, inode) of a .bin -> its base
    bins, bases, end = [], [], 0
    for index in indexes:
        path = suffixed(index.prefix, ".bin")
        stat = path.stat()
        key = (stat.st_dev, stat.st_ino)
        if key not in places:
            places[key] = end
            bins.append(path)
            end += stat.st_size
        bases.append(places[key])
    counts = [index.num_documents for index in indexes]
    return Source(
        indexes=tuple(indexes),
        first_documents=np.concatenate(([0], np.cumsum(counts, dtype=np.int64))),
        bins=tuple(bins),
        bases=np.array(bases, dtype=np.int64),
        is_one_to_one=all(_is_one_to_one(index) for index in indexes),
    )


def rewrite(
    source: Source,
    documents: np.ndarray | None,
    new: Publication,
    *,
    is_copying: bool = False,
    copy: Callable[[np.ndarray, Path], None] | None = None,
) -> str:
    """Write the `.bin` and `.idx` of chosen documents into a publication.

    Args:
        source: where they come from.
        documents: (M,) integers in [0, source.num_documents), in the order wanted; a document may
            be left out or occur twice. None: all of them as they are.
        new: the open publication; has the suffixes ".bin" and ".idx".
        is_copying: write the tokens in the new order instead of linking the `.bin`.
        copy: does so, to a file, in place of this function: `copying.Copiers.write`.

    Returns:
        the digest of the new `.idx`, see `Index.digest`.

    Raises:
        CorpusError: the `.bin` is on another file system and `is_copying` is False.

    Memory: a few blocks of `BLOCK` documents, and 8 bytes a sequence where `documents` is given.
    """
    if is_copying and copy is not None and documents is not None:
        copy(documents, new.aside(".bin"))
    elif is_copying:
        new.write(".bin", tokens(source, documents))
    elif len(source.bins) == 1:
        new.link(".bin", source.bins[0])
    else:
        new.concatenate(".bin", source.bins)
    return new.write_hashed(".idx", _idx(source, documents, is_sequential=is_copying))


def document_tokens(index: Index) -> np.ndarray:
    """Return the number of tokens of each document, (D,) int64; O(D) memory."""
    out = np.empty(index.num_documents, np.int64)
    for start in range(0, len(out), BLOCK):
        bounds = index.document_indices[start : start + BLOCK + 1]
        lengths = index.lengths[bounds[0] : bounds[-1]]
        ends = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
        out[start : start + BLOCK] = np.diff(ends[bounds - bounds[0]])
    return out


def _idx(
    source: Source, documents: np.ndarray | None, *, is_sequential: bool
) -> Iterator[np.ndarray | bytes]:
    """Yield the bytes of the `.idx`, one section after another."""
    code = code_of_dtype(source.dtype)
    num_documents = source.num_documents if documents is None else len(documents)
    yield HEADER.pack(
        MAGIC, FORMAT_VERSION, code, _count_sequences(source, documents), num_documents + 1
    )
    for _, lengths in _section(source, documents, "lengths"):
        yield lengths.astype("<i4", copy=False)
    end = 0
    if is_sequential:
        for _, lengths in _section(source, documents, "lengths"):
            sizes = lengths.astype(np.int64) * source.dtype.itemsize
            ends = end + np.cumsum(sizes)
            yield (ends - sizes).astype("<i8", copy=False)
            end = int(ends[-1])
    else:
        for which, pointers in _section(source, documents, "pointers"):
            base = source.bases[which]
            yield (pointers + base if np.any(base) else pointers).astype("<i8", copy=False)
    yield np.zeros(1, "<i8")
    last = 0
    for counts in _counts(source, documents):
        bounds = last + np.cumsum(counts, dtype=np.int64)
        last = int(bounds[-1])
        yield bounds.astype("<i8", copy=False)
    if source.has_modes:
        for _, modes in _section(source, documents, "modes"):
            yield modes


def _count_sequences(source: Source, documents: np.ndarray | None) -> int:
    if documents is None:
        return sum(index.num_sequences for index in source.indexes)
    if source.is_one_to_one:
        return len(documents)
    return sum(int(counts.sum()) for counts in _counts(source, documents))


def _section(
    source: Source, documents: np.ndarray | None, name: str
) -> Iterator[tuple[int | np.ndarray, np.ndarray]]:
    """Yield an array of all sequences wanted, at most `BLOCK` at a time, none empty.

    Yields:
        index number: one for all, or (b,); and (b,) values of the array `name`.
    """
    arrays = [getattr(index, name) for index in source.indexes]
    if documents is None:
        for which, array in enumerate(arrays):
            for start in range(0, 0 if array is None else len(array), BLOCK):
                yield which, array[start : start + BLOCK]
        return
    # Sections of an `.idx` are not aligned, and a mapped file has small pages: gathering from a
    # copy takes a third of the time.
    arrays = [None if array is None else np.array(array) for array in arrays]
    if len(arrays) == 1 and source.is_one_to_one:
        for chosen in _chosen_blocks(source, documents):
            yield 0, arrays[0].take(chosen)
        return
    for owners, sequences in _sequence_blocks(source, documents):
        yield owners, _gather(arrays, owners, sequences)


def _counts(source: Source, documents: np.ndarray | None) -> Iterator[np.ndarray]:
    """Yield the number of sequences of every document wanted, at most `BLOCK` at a time."""
    if source.is_one_to_one:
        for chosen in _chosen_blocks(source, documents):
            yield np.ones(len(chosen), np.int64)
    elif documents is None:
        for index in source.indexes:
            for start in range(0, index.num_documents, BLOCK):
                yield np.diff(index.document_indices[start : start + BLOCK + 1])
    else:
        for _, _, counts in _document_blocks(source, documents):
            yield counts


def _document_blocks(
    source: Source, documents: np.ndarray | None
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield (index number, first sequence, number of sequences) of a block of documents."""
    for chosen in _chosen_blocks(source, documents):  # (b,)
        which = np.zeros(len(chosen), np.int64)
        if len(source.indexes) > 1:
            which = np.searchsorted(source.first_documents, chosen, side="right") - 1
        local = chosen - source.first_documents[which]
        if source.is_one_to_one:
            yield which, local, np.ones(len(chosen), np.int64)
            continue
        indices = [index.document_indices for index in source.indexes]
        firsts = _gather(indices, which, local)
        yield which, firsts, _gather(indices, which, local + 1) - firsts


def _chosen_blocks(source: Source, documents: np.ndarray | None) -> Iterator[np.ndarray]:
    """Yield the documents wanted, at most `BLOCK` at a time."""
    total = source.num_documents if documents is None else len(documents)
    for start in range(0, total, BLOCK):
        stop = min(start + BLOCK, total)
        if documents is None:
            yield np.arange(start, stop)
        else:
            yield np.asarray(documents[start:stop], dtype=np.int64)


def _sequence_blocks(
    source: Source, documents: np.ndarray | None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (index number, sequence) of every sequence, at most `BLOCK` at a time."""
    for which, firsts, counts in _document_blocks(source, documents):
        if (counts == 1).all():
            yield which, firsts
            continue
        ends = np.cumsum(counts)  # (documents,)
        total = int(ends[-1])
        for start in range(0, total, BLOCK):
            # sequences start..stop of this block; each is numbered from its document's first
            stop = min(start + BLOCK, total)
            places = np.arange(start, stop)
            document = np.searchsorted(ends, places, side="right")
            within = places - (ends - counts)[document]
            yield which[document], firsts[document] + within


def _gather(arrays: Sequence[np.ndarray], which: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return values of several arrays, each at its own places.

    Args:
        arrays: of one dtype, an index each; None for one without sequences.
        which: (b,) number of the array.
        places: (b,) where in it.
    """
    if len(arrays) == 1:
        return arrays[0][places]
    out = np.empty(len(places), arrays[which[0]].dtype if len(which) else np.int64)
    for number in np.unique(which):
        mine = np.flatnonzero(which == number)
        out[mine] = arrays[number][places[mine]]
    return out


def tokens(source: Source, documents: np.ndarray | None) -> Iterator[bytes]:
    """Yield the tokens of the documents in their order."""
    maps = [map_bin(index) for index in source.indexes]
    for which, sequences in _sequence_blocks(source, documents):
        starts = _gather([index.pointers for index in source.indexes], which, sequences)
        lengths = _gather([index.lengths for index in source.indexes], which, sequences)
        sizes = lengths.astype(np.int64)
        stops = starts + sizes * source.dtype.itemsize
        # One slice a sequence, about 0.2 us each: what is not the copying itself.
        pieces: list[memoryview] = []
        waiting = 0
        for number, start, stop in zip(
            which.tolist(), starts.tolist(), stops.tolist(), strict=True
        ):
            pieces.append(maps[number][start:stop])
            waiting += stop - start
            if waiting >= _COPY_BLOCK_BYTES:
                yield b"".join(pieces)
                pieces, waiting = [], 0
        yield b"".join(pieces)


def num_tokens(source: Source, documents: np.ndarray) -> int:
    """Return the number of tokens of chosen documents, each as often as it occurs."""
    return sum(
        int(lengths.sum(dtype=np.int64)) for _, lengths in _section(source, documents, "lengths")
    )


def _is_one_to_one(index: Index) -> bool:
    if index.num_sequences != index.num_documents:
        return False
    for start in range(0, index.num_documents, BLOCK):
        block = index.document_indices[start : start + BLOCK]
        if not np.array_equal(block, np.arange(start, start + len(block))):
            return False
    return True


def map_bin(index: Index) -> memoryview:
    """Return the bytes of the `.bin`, memory-mapped; refuse one replaced since it was opened."""
    if index.bin_bytes == 0:
        return memoryview(b"")
    path = suffixed(index.prefix, ".bin")
    if os.stat(path).st_size != index.bin_bytes:
        raise CorpusError(
            f"{path}: was replaced since it was opened; do not change a corpus in use"
        )
    return memoryview(np.memmap(path, np.uint8, mode="r"))
