"""The folder in which a corpus grows, shard by shard, until it is published.

    web.parts/job.json       what is being made: sources, tokenizer, options
    web.parts/lock           held while a process works here
    web.parts/00000012.bin   tokens of shard 12; .lengths .counts .scores lie beside it
    web.parts/00000012.json  numbers and problems of shard 12; written last: it is done

A run that was interrupted finds its finished shards here, provided the job is the same in every
field. The folder is removed when the corpus stands.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np

from megatron_d3.corpus.index import (
    FORMAT_VERSION,
    HEADER,
    MAGIC,
    code_of_dtype,
    suffixed,
)
from megatron_d3.corpus.records import Problem
from megatron_d3.errors import CorpusError

SUFFIX = ".parts"
LOSS_PARTS = ".loss.parts"
"""Of the folder of `score --loss-of`, which holds `00000012.loss` for every finished shard."""
_ARRAYS = (".bin", ".lengths", ".counts", ".scores")


@dataclass
class Encoded:
    """Documents as tokens: what a worker hands back for a chunk.

    Attributes:
        tokens: of all documents, in the dtype of the corpus.
        lengths: (S,) int32, tokens a sequence.
        counts: (D,) int32, sequences a document.
        scores: (D, M) float64.
        tally: numbers and problems.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    counts: np.ndarray
    scores: np.ndarray
    tally: Tally


@dataclass
class Tally:
    """Numbers of a chunk, of a shard, or of a corpus.

    Attributes:
        num_documents: documents written.
        num_sequences: sequences written.
        num_tokens: tokens written, with those that end documents.
        num_bytes: UTF-8 bytes of their texts.
        num_empty: documents without a token, written or not.
        num_blank: lines without content.
        problems: rows skipped, in order.
        num_rows: lines read, by span of the shard; numbers the lines of later spans of a file.
    """

    num_documents: int = 0
    num_sequences: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    num_empty: int = 0
    num_blank: int = 0
    problems: list[Problem] = field(default_factory=list)
    num_rows: dict[int, int] = field(default_factory=dict)

    def add(self, other: Tally) -> None:
        """Add the numbers, not the problems, of another."""
        self.num_documents += other.num_documents
        self.num_sequences += other.num_sequences
        self.num_tokens += other.num_tokens
        self.num_bytes += other.num_bytes
        self.num_empty += other.num_empty
        self.num_blank += other.num_blank

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Tally:
        """Return what `to_dict` was called on."""
        problems = [Problem(**problem) for problem in values["problems"]]
        rows = {int(span): count for span, count in values["num_rows"].items()}
        return Tally(**{**values, "problems": problems, "num_rows": rows})


class PartWriter:
    """A context manager that writes one shard; done when its block ends without error."""

    def __init__(self, folder: Path, number: int) -> None:
        self._base = folder / f"{number:08d}"
        self._files: list[IO[bytes]] = []
        self.tally = Tally()

    def __enter__(self) -> Self:
        for suffix in _ARRAYS:
            self._files.append(open(suffixed(self._base, suffix), "wb"))
        return self

    def add(self, encoded: Encoded) -> None:
        """Append a chunk."""
        arrays = (encoded.tokens, encoded.lengths, encoded.counts, encoded.scores)
        for file, array in zip(self._files, arrays, strict=True):
            file.write(np.ascontiguousarray(array))
        self.tally.add(encoded.tally)
        self.tally.problems += encoded.tally.problems
        for span, count in encoded.tally.num_rows.items():
            self.tally.num_rows[span] = self.tally.num_rows.get(span, 0) + count

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                for file in self._files:
                    file.flush()
                    os.fsync(file.fileno())
        finally:
            for file in self._files:
                file.close()
        if kind is None:
            write_json(suffixed(self._base, ".json"), self.tally.to_dict())


@dataclass(frozen=True)
class Parts:
    """The finished shards of a job, in order.

    Attributes:
        folder: where they lie.
        count: how many.
    """

    folder: Path
    count: int

    def tally(self, number: int) -> Tally:
        """Return the numbers of one shard."""
        return Tally.from_dict(json.loads((self.folder / f"{number:08d}.json").read_bytes()))

    def bins(self) -> Iterator[Path]:
        """Yield the tokens of each shard as a file."""
        for number in range(self.count):
            yield self.folder / f"{number:08d}.bin"

    def idx(self, dtype: np.dtype, total: Tally) -> Iterator[np.ndarray | bytes]:
        """Yield the bytes of the `.idx` of all shards together; memory of one shard."""
        code = code_of_dtype(dtype)
        yield HEADER.pack(MAGIC, FORMAT_VERSION, code, total.num_sequences, total.num_documents + 1)
        for number in range(self.count):
            yield self._array(number, ".lengths", "<i4")
        end = 0
        for number in range(self.count):
            sizes = self._array(number, ".lengths", "<i4").astype(np.int64) * dtype.itemsize
            ends = end + np.cumsum(sizes)
            yield (ends - sizes).astype("<i8", copy=False)
            end = int(ends[-1]) if len(ends) else end
        yield np.zeros(1, "<i8")
        last = 0
        for number in range(self.count):
            bounds = last + np.cumsum(self._array(number, ".counts", "<i4"), dtype=np.int64)
            yield bounds.astype("<i8", copy=False)
            last = int(bounds[-1]) if len(bounds) else last

    def scores(self, num_scores: int, num_documents: int) -> np.ndarray:
        """Return all scores, (M, D) float64, as a memory map in the folder."""
        if not num_documents:
            return np.empty((num_scores, 0))
        shape = (num_scores, num_documents)
        values = np.memmap(self.folder / "scores", "<f8", mode="w+", shape=shape)
        start = 0
        for number in range(self.count):
            part = self._array(number, ".scores", "<f8").reshape(-1, num_scores)
            values[:, start : start + len(part)] = part.T
            start += len(part)
        return values

    def _array(self, number: int, suffix: str, dtype: str) -> np.ndarray:
        return np.fromfile(self.folder / f"{number:08d}{suffix}", dtype)


@contextmanager
def hold(folder: Path, job: dict[str, Any], *, is_replacing: bool) -> Iterator[None]:
    """Make or continue the folder of a job, and keep other processes out of it.

    Args:
        folder: it is made, its parent must exist.
        job: JSON values; an unfinished job of other values is refused if any of its shards is done.
        is_replacing: remove what an unfinished job of other values left, instead.

    Raises:
        CorpusError: another process works there, or an unfinished job differs; the message names
            the first field.
    """
    if not folder.parent.is_dir():
        raise CorpusError(f"{folder.parent}: no such folder; create it first")
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CorpusError(f"{folder}: another process is tokenizing to this prefix") from None
        except OSError:
            pass  # a file system without locks: two runs at once are the user's care
        path = folder / "job.json"
        wanted = json.loads(json.dumps(job))
        if path.exists() and is_replacing and json.loads(path.read_bytes()) != wanted:
            for name in os.listdir(folder):
                if name != "lock":
                    (folder / name).unlink()
        if path.exists() and finished(folder):
            _refuse_change(folder, json.loads(path.read_bytes()), wanted)
        if not path.exists() or json.loads(path.read_bytes()) != wanted:
            write_json(path, wanted)
        yield


def finished(folder: Path) -> set[int]:
    """Return the numbers of the shards that are done."""
    # NOTE: one listing, no look-up of names: a network file system may remember for a minute that
    # a name did not exist.
    names = (entry.name for entry in os.scandir(folder))
    return {int(name[:8]) for name in names if len(name) == 13 and name[:8].isdigit()}


def remove(folder: Path) -> None:
    """Remove the folder of a job that is published."""
    shutil.rmtree(folder, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    """Write a small JSON file: aside, flushed, renamed."""
    aside = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    with open(aside, "w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def _refuse_change(folder: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    for name in sorted(old.keys() | new.keys()):
        before, now = old.get(name), new.get(name)
        if before == now or (name, before) == ("on_error", "fail"):
            continue  # a shard that is done without a broken row is the same under "skip"
        if isinstance(before, list) and isinstance(now, list):
            pairs = zip(before, now, strict=False)
            before, now = next((pair for pair in pairs if pair[0] != pair[1]), (before, now))
        raise CorpusError(
            f"{folder}: holds shards of an unfinished run with another {name}: {_short(before)}, "
            f"now {_short(now)}; repeat that run to finish it, or give --overwrite to start again"
        )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:197] + "..."
