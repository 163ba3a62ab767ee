"""Find text files, cut them into shards, and read shards as chunks of a few hundred kilobytes.

files, folders, globs -> spans (a file, or a part of one) -> shards (about `shard_bytes` of input,
the unit of resuming and of MPI ranks) -> chunks (the unit of a worker process)

The cuts depend on nothing but the files and `shard_bytes`. A plain line file is cut by bytes: a
line belongs to the span its first byte lies in. A Parquet file is cut between row groups, a
compressed file not at all.
"""

from __future__ import annotations

import glob
import gzip
import importlib
import io
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from megatron_d3.errors import ConfigError, CorpusError

CHUNK_BYTES = 1 << 19
"""Text given to a worker at a time, about a tenth of a second of work."""

Form = Literal["jsonl", "lines", "file", "parquet"]

_SUFFIXES: dict[str, tuple[str, str]] = {
    ".jsonl": ("jsonl", ""),
    ".jsonl.gz": ("jsonl", "gz"),
    ".jsonl.zst": ("jsonl", "zst"),
    ".json": ("jsonl", ""),
    ".json.gz": ("jsonl", "gz"),
    ".json.zst": ("jsonl", "zst"),
    ".parquet": ("parquet", ""),
    ".txt": ("txt", ""),
    ".txt.gz": ("txt", "gz"),
    ".txt.zst": ("txt", "zst"),
}


@dataclass(frozen=True)
class Span:
    """A file or a part of one.

    Attributes:
        path: the file.
        form: how documents lie in it.
        compression: "", "gz" or "zst".
        start: first byte; of a Parquet file, first row group.
        stop: byte, or row group, it ends before; -1: the end of the file.
        size: bytes on disk, as a share of the work.
    """

    path: Path
    form: Form
    compression: str
    start: int
    stop: int
    size: int


@dataclass(frozen=True)
class Chunk:
    """What a worker gets.

    Attributes:
        span: number of its span in the shard.
        path: the file.
        form: as of a span.
        first_row: number of its first line (from the start of the span) or row (of the file).
        data: whole lines, or one whole file; empty for Parquet, which the worker reads itself.
        row_group: of a Parquet file.
        progress: bytes of the file passed since the last chunk.
    """

    span: int
    path: Path
    form: Form
    first_row: int
    data: bytes
    row_group: int
    progress: int


def find_files(patterns: Sequence[str | Path]) -> list[Path]:
    """Return the files named by paths, folders (searched through) and globs, each sorted by name.

    Raises:
        CorpusError: nothing found, or a file whose suffix is none of those read.
    """
    found: list[Path] = []
    for pattern in map(str, patterns):
        path = Path(pattern)
        if path.is_file():
            files = [path]
        elif path.is_dir():
            files = sorted(inner for inner in path.rglob("*") if _suffix(inner) and inner.is_file())
        else:
            files = [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]
            files = [inner for inner in files if inner.is_file()]
        if not files:
            raise CorpusError(
                f"{pattern}: no such file, or no text file in it; read are {_known()}"
            )
        found += files
    for path in found:
        if not _suffix(path):
            raise CorpusError(f"{path}: no text file by its name; read are {_known()}")
    return found


def cut(
    files: Sequence[Path], *, shard_bytes: int, txt: str | None = None
) -> list[tuple[Span, ...]]:
    """Cut files into shards.

    Args:
        files: from `find_files`.
        shard_bytes: bytes of files in a shard, about.
        txt: whether a `.txt` holds one document a "line" or is one "file".

    Raises:
        ConfigError: a shard size below 1, or `.txt` files and no `txt`.
        CorpusError: a Parquet file that cannot be read.
    """
    if shard_bytes < 1:
        raise ConfigError(f"--shard-size: got {shard_bytes} bytes, expected at least 1")
    shards: list[tuple[Span, ...]] = []
    group: list[Span] = []
    size = 0
    for path in files:
        for span in _spans(path, shard_bytes, txt):
            if group and size + span.size > shard_bytes:
                shards.append(tuple(group))
                group, size = [], 0
            group.append(span)
            size += span.size
    if group:
        shards.append(tuple(group))
    return shards


def chunks(shard: Iterable[Span]) -> Iterator[Chunk]:
    """Read a shard, in order.

    Raises:
        CorpusError: a file that cannot be read, or a damaged compressed file.
    """
    for number, span in enumerate(shard):
        with _reading(span.path):
            if span.form == "parquet":
                yield from _row_groups(number, span)
            else:
                yield from _blocks(number, span)


def rows_before(span: Span) -> int:
    """Count the lines of a file that lie before a span; reads them."""
    count = 0
    left = span.start - 1
    with open(span.path, "rb") as file:
        while left > 0 and (block := file.read(min(left, 1 << 24))):
            count += block.count(b"\n")
            left -= len(block)
    return count + 1 if span.start else 0  # and the line across the border


def parquet_module() -> Any:
    """Import `pyarrow.parquet`.

    Raises:
        CorpusError: not installed.
    """
    try:
        return importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise CorpusError(
            "Parquet files need the package pyarrow: pip install megatron-d3[parquet]"
        ) from error


def open_parquet(path: Path) -> Any:
    """Open a `pyarrow.parquet.ParquetFile`.

    Raises:
        CorpusError: no pyarrow, or a damaged file.
    """
    parquet = parquet_module()
    try:
        return parquet.ParquetFile(path)
    except (OSError, ValueError) as error:  # pyarrow's errors are both
        raise CorpusError(f"{path}: not a Parquet file that can be read: {error}") from error


def _spans(path: Path, shard_bytes: int, txt: str | None) -> Iterator[Span]:
    form, compression = _SUFFIXES[_suffix(path)]
    size = path.stat().st_size
    if form == "parquet":
        yield from _parquet_spans(path, size, shard_bytes)
        return
    if form == "txt":
        if txt not in ("file", "line"):
            raise ConfigError(f"{path}: give --txt file (one document) or --txt line (one a line)")
        if txt == "file":
            yield Span(path, "file", compression, 0, -1, size)
            return
        form = "lines"
    kind: Form = "jsonl" if form == "jsonl" else "lines"
    if compression:
        yield Span(path, kind, compression, 0, -1, size)
        return
    for start in range(0, size, shard_bytes):
        stop = min(start + shard_bytes, size)
        yield Span(path, kind, "", start, stop, stop - start)


def _parquet_spans(path: Path, size: int, shard_bytes: int) -> Iterator[Span]:
    count = open_parquet(path).metadata.num_row_groups
    if not count:
        return
    per_span = max(1, round(count * shard_bytes / max(size, 1)))  # row groups
    for start in range(0, count, per_span):
        stop = min(start + per_span, count)
        yield Span(path, "parquet", "", start, stop, size * stop // count - size * start // count)


def _row_groups(number: int, span: Span) -> Iterator[Chunk]:
    metadata = open_parquet(span.path).metadata
    row = sum(metadata.row_group(group).num_rows for group in range(span.start))
    share = span.size // (span.stop - span.start)
    for group in range(span.start, span.stop):
        yield Chunk(number, span.path, "parquet", row, b"", group, share)
        row += metadata.row_group(group).num_rows


def _blocks(number: int, span: Span) -> Iterator[Chunk]:
    """Yield whole lines of about `CHUNK_BYTES`, or a file whole."""
    with open(span.path, "rb") as raw:
        stream = _decompressed(raw, span.compression)
        passed = position = span.start
        if span.form == "file":
            yield Chunk(number, span.path, span.form, 0, stream.read(), 0, span.size)
            return
        if span.start:
            stream.seek(span.start - 1)
            stream.readline()  # a line that started before belongs to the span before
            position = stream.tell()
        row = 0
        while span.stop < 0 or position < span.stop:
            wanted = CHUNK_BYTES if span.stop < 0 else min(CHUNK_BYTES, span.stop - position)
            block = stream.read(wanted)
            if not block:
                break
            if not block.endswith(b"\n"):
                block += stream.readline()
            position += len(block)
            now = raw.tell() if span.compression else position
            yield Chunk(number, span.path, span.form, row, block, 0, now - passed)
            passed = now
            row += block.count(b"\n")


def _decompressed(raw: IO[bytes], compression: str) -> IO[bytes]:
    if compression == "gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=raw), CHUNK_BYTES)
    if compression == "zst":
        try:
            zstandard = importlib.import_module("zstandard")
        except ImportError as error:
            raise CorpusError(
                "files ending in .zst need the package zstandard: pip install megatron-d3[zstd]"
            ) from error
        reader = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
        return io.BufferedReader(reader, CHUNK_BYTES)
    return raw


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn the errors of files and of decompression into one that names the file."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise CorpusError(f"{path}: damaged or cut short: {error}") from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise CorpusError(f"{path}: cannot be read: {reason}") from error
    except Exception as error:
        if type(error).__name__ != "ZstdError":
            raise
        raise CorpusError(f"{path}: damaged or cut short: {error}") from error


def _suffix(path: Path) -> str:
    """Return the suffix of a text file, "" for another."""
    name = os.path.basename(path)
    ends = [suffix for suffix in _SUFFIXES if name.endswith(suffix)]
    return max(ends, key=len, default="")


def _known() -> str:
    return ", ".join(_SUFFIXES)
