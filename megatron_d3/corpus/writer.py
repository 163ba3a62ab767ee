"""Write a `.bin`/`.idx` pair as a stream of documents; see `index.py` for the format.

For the same documents the files are byte-identical to those of Megatron's
`IndexedDatasetBuilder`. Differences: a token that does not fit the dtype is an error instead of
another token; appending a corpus follows its pointers, where Megatron copies the `.bin` whole and
so undoes an order; an existing corpus is never overwritten, and until everything is written and
flushed nothing stands under the final name.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import numpy as np
from numpy.typing import ArrayLike

from megatron_d3.corpus.index import (
    FORMAT_VERSION,
    HEADER,
    MAGIC,
    Index,
    code_of_dtype,
    read_index,
    suffixed,
)
from megatron_d3.corpus.publish import aside, clear_up
from megatron_d3.errors import CorpusError

_COPY_TOKENS = 1 << 20
_WRITE_BLOCK = 1 << 16
_MAX_LENGTH = 2**31 - 1


class IndexWriter:
    """A context manager; the corpus appears under its name when the block ends without error.

    >>> with IndexWriter(prefix, dtype="uint16") as writer:         # doctest: +SKIP
    ...     writer.add_document([5, 6, 7])

    Args:
        prefix: path of both files without suffix; its folder must exist.
        dtype: dtype of a token, see `dtype_for_vocab`.
        has_modes: also write a mode per sequence (multimodal files).

    Raises:
        CorpusError: the corpus exists already, or the dtype is not one of the format.
    """

    def __init__(
        self, prefix: str | Path, *, dtype: np.dtype | type | str, has_modes: bool = False
    ) -> None:
        self.prefix = Path(prefix)
        self._code = code_of_dtype(dtype)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._limits = np.iinfo(self.dtype)
        self._lengths = array("i")
        self._documents = array("q", [0])
        self._modes = array("b") if has_modes else None
        self.num_tokens = 0
        self._bin: IO[bytes] | None = None

    @property
    def num_documents(self) -> int:
        """Documents added so far."""
        return len(self._documents) - 1

    def __enter__(self) -> Self:
        for path in (suffixed(self.prefix, ".bin"), suffixed(self.prefix, ".idx")):
            if path.exists():
                raise CorpusError(f"{path}: exists; remove it or choose another name")
        if self.prefix.parent.is_dir():
            clear_up(self.prefix, (".bin", ".idx"))  # what a killed process left
        try:
            self._bin = open(self._aside(".bin"), "wb")
        except OSError as error:
            raise CorpusError(f"{self.prefix}: cannot be written: {error.strerror}") from error
        return self

    def add_document(
        self,
        tokens: ArrayLike,
        lengths: Sequence[int] | None = None,
        modes: Sequence[int] | None = None,
    ) -> None:
        """Append one document.

        Args:
            tokens: (T,) integers.
            lengths: lengths of its sequences, sum T; default one sequence of all tokens.
            modes: one a sequence, default 0; only with `has_modes`.

        Raises:
            CorpusError: a token outside the dtype, lengths that do not sum to T, modes amiss.
        """
        values = np.asarray(tokens)
        if values.size == 0:
            values = values.astype(self.dtype)
        if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
            raise CorpusError(f"{self.prefix}: tokens must be one row of integers")
        if values.size and (values.min() < 0 or values.max() > self._limits.max):
            raise CorpusError(
                f"{self.prefix}: document {self.num_documents} has tokens from {values.min()} to "
                f"{values.max()}, expected 0 to {self._limits.max} ({self.dtype.name})"
            )
        sizes = [values.size] if lengths is None else [int(length) for length in lengths]
        if sum(sizes) != values.size or any(not 0 <= size <= _MAX_LENGTH for size in sizes):
            raise CorpusError(
                f"{self.prefix}: document {self.num_documents} has {values.size} tokens, but its "
                f"sequence lengths are {sizes}; each must lie in [0, {_MAX_LENGTH}]"
            )
        self._add_modes(modes, len(sizes))
        self._write(values.astype(self.dtype, copy=False))
        self._lengths.extend(sizes)
        self._documents.append(len(self._lengths))

    def add_index(self, prefix: str | Path) -> None:
        """Append all documents of another corpus, in the order of its index.

        Raises:
            CorpusError: it cannot be read, or has another dtype, or has modes where this has not.
        """
        index = read_index(prefix)
        if index.dtype != self.dtype:
            raise CorpusError(
                f"{prefix}: {index.dtype.name} tokens cannot be appended to {self.dtype.name}"
            )
        if (index.modes is None) != (self._modes is None) and index.num_sequences:
            raise CorpusError(f"{prefix}: modes in one corpus and none in {self.prefix}")
        for offset, count in _runs(index):
            chunk = np.empty(count, index.dtype)
            index.read_into(chunk, offset)
            self._write(chunk)
        first = len(self._lengths)
        self._lengths.frombytes(index.lengths.tobytes())
        self._documents.frombytes((index.document_indices[1:] + first).tobytes())
        if self._modes is not None and index.modes is not None:
            self._modes.frombytes(index.modes.tobytes())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._bin is not None
        try:
            if kind is None:
                self._finish(self._bin)
        except OSError as problem:
            raise CorpusError(f"{self.prefix}: cannot be written: {problem.strerror}") from problem
        finally:
            with suppress(OSError):  # a full disk fails here a second time
                self._bin.close()
            for suffix in (".bin", ".idx"):
                self._aside(suffix).unlink(missing_ok=True)

    def _finish(self, bin_file: IO[bytes]) -> None:
        _flush(bin_file)
        with open(self._aside(".idx"), "wb") as file:
            self._write_index(file)
            _flush(file)
        # NOTE: the index comes last, a `.bin` without one is recognised as unfinished.
        for suffix in (".bin", ".idx"):
            os.replace(self._aside(suffix), suffixed(self.prefix, suffix))

    def _write_index(self, file: IO[bytes]) -> None:
        lengths = np.frombuffer(self._lengths, np.int32)
        file.write(
            HEADER.pack(MAGIC, FORMAT_VERSION, self._code, len(lengths), len(self._documents))
        )
        file.write(lengths.astype("<i4", copy=False).tobytes())
        end = 0
        for start in range(0, len(lengths), _WRITE_BLOCK):
            sizes = lengths[start : start + _WRITE_BLOCK].astype("<i8") * self.dtype.itemsize
            ends = end + np.cumsum(sizes)
            file.write((ends - sizes).astype("<i8", copy=False).tobytes())
            end = int(ends[-1])
        file.write(np.frombuffer(self._documents, np.int64).astype("<i8", copy=False).tobytes())
        if self._modes is not None:
            file.write(self._modes.tobytes())

    def _add_modes(self, modes: Sequence[int] | None, count: int) -> None:
        if self._modes is None:
            if modes is not None:
                raise CorpusError(f"{self.prefix}: modes given, but opened without has_modes")
            return
        if modes is not None and len(modes) != count:
            raise CorpusError(f"{self.prefix}: {len(modes)} modes for {count} sequences")
        self._modes.extend([0] * count if modes is None else modes)

    def _write(self, values: np.ndarray) -> None:
        assert self._bin is not None, "used outside its `with` block"
        try:
            self._bin.write(values.tobytes())
        except OSError as error:
            raise CorpusError(f"{self.prefix}: cannot be written: {error.strerror}") from error
        self.num_tokens += values.size

    def _aside(self, suffix: str) -> Path:
        return aside(self.prefix, suffix)


def _runs(index: Index) -> Iterator[tuple[int, int]]:
    """Yield (first byte, tokens) of pieces that lie back to back, in the order of the index."""
    itemsize = index.dtype.itemsize
    begin = end = 0
    for start in range(0, index.num_sequences, _WRITE_BLOCK):
        pointers = index.pointers[start : start + _WRITE_BLOCK].tolist()
        lengths = index.lengths[start : start + _WRITE_BLOCK].tolist()
        for pointer, length in zip(pointers, lengths, strict=True):
            if pointer != end or end - begin >= _COPY_TOKENS * itemsize:
                if end > begin:
                    yield begin, (end - begin) // itemsize
                begin = pointer
            end = pointer + length * itemsize
    if end > begin:
        yield begin, (end - begin) // itemsize


def _flush(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
