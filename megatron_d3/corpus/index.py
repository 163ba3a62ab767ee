"""Megatron's `.bin`/`.idx` pair: read without copying, every byte checked.

A prefix `web` names two files. `web.bin` holds token ids back to back; `web.idx` says where each
sequence lies in it and which sequences form a document:

    9 bytes   b"MMIDIDX\\0\\0"
    u64       version, 1
    u8        dtype code of the tokens
    u64       S, number of sequences
    u64       D + 1, number of document indices
    int32[S]  sequence lengths, in tokens
    int64[S]  sequence pointers, in bytes from the start of the `.bin`
    int64[D+1] document d is the sequences [index[d], index[d + 1])
    int8[S]   sequence modes, only in multimodal files

All numbers are little-endian. Nothing obliges the pointers to ascend: an order is changed by
rewriting the `.idx` alone.

Source: the format of Megatron-Core's `megatron.core.datasets.indexed_dataset`. Differences: what
Megatron asserts, or notices only when a sample is read, is an error with a reason here; `.bin` is
read with `pread`, so a file cut short under a running job is an error and not a SIGBUS.
"""

from __future__ import annotations

import errno
import hashlib
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NoReturn

import numpy as np

from megatron_d3.corpus.scan import Scan, scan
from megatron_d3.errors import CorpusError

MAGIC = b"MMIDIDX\x00\x00"
FORMAT_VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
"""Token dtypes by their code in the file. Codes 6 and 7 are floats, which no token is."""

# An `.idx` up to this size is read into memory: a memory map holds a file descriptor for life,
# and a thousand small domains would meet the usual limit of 1,024.
_READ_BELOW_BYTES = 256 * 1024
# Sequences checked at a time: three int64 temporaries of this length stay in the L2 cache.
_CHECK_BLOCK = 1 << 15


@dataclass(frozen=True, eq=False)
class Index:
    """An opened `.idx` and the `.bin` it describes.

    The arrays are read-only views of the file, never copies. Safe to share with forked
    processes; pickling stores the path and opens the files again.

    Attributes:
        prefix: path without suffix.
        dtype: dtype of a token in the `.bin`.
        lengths: (S,) int32, tokens per sequence.
        pointers: (S,) int64, first byte of each sequence in the `.bin`.
        document_indices: (D+1,) int64, non-decreasing from 0 to S.
        modes: (S,) int8, or None where the file has none.
        raw: (bytes of the `.idx`,) uint8, the whole file.
        bin_bytes: size of the `.bin`.
    """

    prefix: Path
    dtype: np.dtype
    lengths: np.ndarray
    pointers: np.ndarray
    document_indices: np.ndarray
    modes: np.ndarray | None
    raw: np.ndarray
    bin_bytes: int
    _bin_key: tuple[str, int, int, int]

    @property
    def num_sequences(self) -> int:
        """Number of sequences, S."""
        return len(self.lengths)

    @property
    def num_documents(self) -> int:
        """Number of documents, D."""
        return len(self.document_indices) - 1

    @property
    def num_tokens(self) -> int:
        """Sum of all lengths; one pass over them, so keep the result."""
        return int(self.lengths.sum(dtype=np.int64))

    @cached_property
    def scan(self) -> Scan:
        """Sums and checksum of all sequences; the first use is a pass over the file."""
        return scan(self.lengths, self.pointers, itemsize=self.dtype.itemsize,
                    bin_bytes=self.bin_bytes)

    @cached_property
    def digest(self) -> str:
        """Hash of the whole `.idx`; the first use is a pass over it, about a second a GB."""
        state = hashlib.blake2b(digest_size=16)
        for start in range(0, self.raw.size, 1 << 24):
            state.update(self.raw[start : start + (1 << 24)])
        return state.hexdigest()

    def read_into(self, out: np.ndarray, offset: int) -> None:
        """Fill `out`, a contiguous array of `dtype`, from byte `offset` of the `.bin`.

        Raises:
            CorpusError: the `.bin` ends early or was replaced since it was opened.
        """
        if out.size == 0:
            return
        file = _open_bin(*self._bin_key)
        view = memoryview(out.view(np.uint8))
        done = 0
        while done < len(view):
            got = os.preadv(file.fd, [view[done:]], offset + done)
            if got <= 0:
                raise CorpusError(
                    f"{self._bin_key[0]}: ends at byte {offset + done:,}, but had "
                    f"{self.bin_bytes:,} bytes when it was opened; do not change a corpus in use"
                )
            done += got

    def __reduce__(self) -> tuple[Callable[..., Index], tuple[str, int, int]]:
        return _reopen, (str(self.prefix), self.raw.size, self.bin_bytes)


def read_index(prefix: str | Path, *, check_bin: bool = True) -> Index:
    """Open a `.bin`/`.idx` pair.

    Args:
        prefix: path of both files without suffix.
        check_bin: also check every length, pointer and document index against the `.bin`;
            one pass over the `.idx`, about 0.05 s for 10^7 documents.

    Raises:
        CorpusError: a file is missing, cut short, or not what the format says.
    """
    prefix = Path(prefix)
    idx_path, bin_path = suffixed(prefix, ".idx"), suffixed(prefix, ".bin")
    for path in (idx_path, bin_path):
        if not path.is_file():
            raise CorpusError(_missing(prefix, path))
    raw = _map(idx_path)
    if raw.size < HEADER.size:
        raise CorpusError(
            f"{idx_path}: {raw.size} bytes, expected a header of {HEADER.size}; it is cut short"
        )
    magic, version, code, num_sequences, num_indices = HEADER.unpack(raw[: HEADER.size].tobytes())
    if magic != MAGIC:
        raise CorpusError(f"{idx_path}: starts with {magic!r}, expected {MAGIC!r}; not an index")
    if version != FORMAT_VERSION:
        raise CorpusError(f"{idx_path}: format version {version}, expected {FORMAT_VERSION}")
    if code not in DTYPES:
        raise CorpusError(
            f"{idx_path}: dtype code {code}, expected one of {sorted(DTYPES)} (integers)"
        )
    has_modes = _check_size(idx_path, raw.size, num_sequences, num_indices)
    stat = bin_path.stat()
    offset = HEADER.size
    lengths = np.frombuffer(raw, "<i4", num_sequences, offset)
    offset += lengths.nbytes
    pointers = np.frombuffer(raw, "<i8", num_sequences, offset)
    offset += pointers.nbytes
    documents = np.frombuffer(raw, "<i8", num_indices, offset)
    offset += documents.nbytes
    index = Index(
        prefix=prefix,
        dtype=DTYPES[code],
        lengths=lengths,
        pointers=pointers,
        document_indices=documents,
        modes=np.frombuffer(raw, "i1", num_sequences, offset) if has_modes else None,
        raw=raw,
        bin_bytes=stat.st_size,
        _bin_key=(str(bin_path), stat.st_ino, stat.st_mtime_ns, stat.st_size),
    )
    _check_ends(index, idx_path)
    if check_bin:
        if not index.scan.is_sound:
            _refuse_first_bad(index, idx_path, bin_path)
        _check_documents(index, idx_path)
    return index


def dtype_for_vocab(vocab_size: int | None) -> np.dtype:
    """Choose the token dtype Megatron's own preprocessing chooses for a vocabulary.

    >>> dtype_for_vocab(32_000), dtype_for_vocab(128_256)
    (dtype('uint16'), dtype('int32'))
    """
    return DTYPES[8] if vocab_size is not None and vocab_size < 65_500 else DTYPES[4]


def code_of_dtype(dtype: np.dtype | type | str) -> int:
    """Return the file's code of a token dtype.

    Raises:
        CorpusError: not an integer type that the format knows.
    """
    wanted = np.dtype(dtype).newbyteorder("<")
    for code, known in DTYPES.items():
        if known == wanted:
            return code
    names = ", ".join(known.name for known in DTYPES.values())
    raise CorpusError(f"token dtype {np.dtype(dtype).name}: expected one of {names}")


def suffixed(prefix: Path, suffix: str) -> Path:
    """Append a suffix, keeping dots that are part of the name (`c4.en` -> `c4.en.idx`)."""
    return prefix.with_name(prefix.name + suffix)


def _missing(prefix: Path, path: Path) -> str:
    hint = "a corpus is a pair PREFIX.bin and PREFIX.idx"
    if prefix.suffix in (".bin", ".idx"):
        hint = f"give the prefix without suffix: {prefix.with_suffix('')}"
    return f"{path}: no such file; {hint}"


def _map(path: Path) -> np.ndarray:
    """Return the bytes of a file, read into memory if small, else memory-mapped."""
    try:
        if path.stat().st_size <= _READ_BELOW_BYTES:
            return np.frombuffer(path.read_bytes(), np.uint8)
        return np.asarray(np.memmap(path, np.uint8, mode="r"))
    except OSError as error:
        hint = "; raise the limit of open files (ulimit -n)" if error.errno == errno.EMFILE else ""
        raise CorpusError(f"{path}: cannot be opened: {error.strerror}{hint}") from error


def _check_size(path: Path, size: int, num_sequences: int, num_indices: int) -> bool:
    """Compare the counts with the file size, in Python's integers; return "has modes"."""
    expected = HEADER.size + 12 * num_sequences + 8 * num_indices
    if size == expected:
        return False
    if size == expected + num_sequences:
        return True
    raise CorpusError(
        f"{path}: {size:,} bytes, but {num_sequences:,} sequences and {num_indices:,} document "
        f"indices take {expected:,} (or {expected + num_sequences:,} with modes); "
        f"it is cut short or not complete"
    )


def _check_ends(index: Index, path: Path) -> None:
    """Check the two document indices that all others lie between."""
    documents, num_sequences = index.document_indices, index.num_sequences
    if len(documents) == 0:
        raise CorpusError(f"{path}: no document indices, expected at least [0]")
    if documents[0] != 0 or documents[-1] != num_sequences:
        raise CorpusError(
            f"{path}: document indices run from {documents[0]} to {documents[-1]}, "
            f"expected 0 to the number of sequences, {num_sequences}"
        )


def _refuse_first_bad(index: Index, idx_path: Path, bin_path: Path) -> NoReturn:
    """Name the first sequence that does not lie inside the `.bin`."""
    itemsize = index.dtype.itemsize
    for start in range(0, index.num_sequences, _CHECK_BLOCK):
        lengths = index.lengths[start : start + _CHECK_BLOCK]
        pointers = index.pointers[start : start + _CHECK_BLOCK]
        if lengths.min() < 0:
            first = int(np.argmax(lengths < 0))
            raise CorpusError(
                f"{idx_path}: sequence {start + first} has length {lengths[first]}, expected >= 0"
            )
        # NOTE: as unsigned, a negative pointer is beyond every file: one comparison for both.
        starts = pointers.view(np.uint64)
        room = np.maximum(index.bin_bytes - pointers, 0)  # bytes left behind each pointer
        is_bad = (starts > index.bin_bytes) | (lengths.astype(np.int64) * itemsize > room)
        if is_bad.any():
            first = int(np.argmax(is_bad))
            raise CorpusError(
                f"{idx_path}: sequence {start + first} is {lengths[first]} tokens of {itemsize} "
                f"bytes at byte {pointers[first]:,}, but {bin_path.name} has "
                f"{index.bin_bytes:,} bytes; it is cut short or belongs to another index"
            )
    raise AssertionError("the scan found a bad sequence that is not there")


def _check_documents(index: Index, path: Path) -> None:
    """Check that the document indices do not decrease."""
    documents = index.document_indices
    for start in range(0, len(documents) - 1, _CHECK_BLOCK):
        block = documents[start : start + _CHECK_BLOCK + 1]
        if (block[1:] < block[:-1]).any():
            first = start + int(np.argmax(block[1:] < block[:-1]))
            raise CorpusError(
                f"{path}: document index {first + 1} is {documents[first + 1]} after "
                f"{documents[first]}; document indices must not decrease"
            )


class _OpenFile:
    """A file descriptor that closes with its last user."""

    def __init__(self, path: str) -> None:
        self.fd = os.open(path, os.O_RDONLY)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if hasattr(self, "fd"):
            close(self.fd)


# NOTE: inode and time are part of the key so that a corpus rewritten under the same name is not
# read through an old descriptor. Bounded, so that thousands of domains need no raised limit;
# `pread` keeps no position, so descriptors may be shared with forked workers.
@lru_cache(maxsize=256)
def _open_bin(path: str, inode: int, mtime_ns: int, size: int) -> _OpenFile:
    try:
        file = _OpenFile(path)
    except OSError as error:
        raise CorpusError(f"{path}: cannot be opened: {error.strerror}") from error
    if os.fstat(file.fd).st_size != size:
        raise CorpusError(
            f"{path}: was replaced since it was opened; do not change a corpus in use"
        )
    return file


def _reopen(prefix: str, idx_bytes: int, bin_bytes: int) -> Index:
    """Open again in another process what was checked in the first."""
    index = read_index(prefix, check_bin=False)
    if (index.raw.size, index.bin_bytes) != (idx_bytes, bin_bytes):
        raise CorpusError(
            f"{prefix}: was replaced since it was opened; do not change a corpus in use"
        )
    return index
