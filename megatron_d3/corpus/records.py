"""From a chunk of a file to documents: texts, their scores, and what is wrong with the rest."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_d3.corpus.sources import Chunk, open_parquet
from megatron_d3.errors import CorpusError

_PARQUET_ROWS = 1024  # decoded at a time


@dataclass(frozen=True)
class Keys:
    """What to take from a row of `.jsonl` or Parquet.

    Attributes:
        text: key of the text; dots lead into nested objects ("meta.text"), unless a key has
            that name, dots and all; None: rows without text, for their scores alone.
        scores: keys of the scores, one number each.
        id: key of a text or an integer that tells documents apart, or None.
    """

    text: str | None = "text"
    scores: tuple[str, ...] = ()
    id: str | None = None

    @property
    def all(self) -> tuple[str, ...]:
        """Every key asked for."""
        return tuple(key for key in (self.text, *self.scores, self.id) if key is not None)


@dataclass(frozen=True)
class Problem:
    """A row that gives no document.

    Attributes:
        span: number of its span in the shard.
        row: as of `Chunk.first_row`, or -1: the whole file.
        reason: in a few words, the same for all rows of one kind.
        detail: what is special to this row.
    """

    span: int
    row: int
    reason: str
    detail: str


@dataclass
class Rows:
    """The documents of a chunk.

    Attributes:
        texts: a tuple of strings a document; more than one where the text is a list of strings,
            each of which becomes a sequence.
        scores: a tuple of numbers a document.
        ids: of the documents, if asked for.
        problems: rows that are none, in order.
        num_bytes: of all texts, as UTF-8.
        num_blank: lines without content, which are no rows.
    """

    texts: list[tuple[str, ...]] = field(default_factory=list)
    scores: list[tuple[float, ...]] = field(default_factory=list)
    ids: list[str | int] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    num_bytes: int = 0
    num_blank: int = 0


class _Refusal(Exception):
    """A row that is no document: reason and detail."""


def read_rows(chunk: Chunk, keys: Keys) -> Rows:
    """Return the documents of a chunk.

    Raises:
        CorpusError: a Parquet file that has no such column, or cannot be read.
    """
    rows = Rows()
    if chunk.form == "file":
        _add(rows, chunk, -1, keys, chunk.data)
        return rows
    if chunk.form == "parquet":
        for row, record in enumerate(_parquet_rows(chunk, keys), chunk.first_row):
            _add(rows, chunk, row, keys, record)
        return rows
    for row, line in enumerate(_lines(chunk.data), chunk.first_row):
        if not line.strip():
            rows.num_blank += 1
        else:
            _add(rows, chunk, row, keys, line)
    return rows


def _lines(data: bytes) -> Sequence[str | bytes]:
    """Return lines without their ends: as text, or as bytes if any of them is not UTF-8."""
    body = data.removesuffix(b"\n")
    try:
        # Several times faster than line by line. Only "\n" ends a line: text may hold U+2028.
        return body.decode().split("\n")
    except UnicodeDecodeError:
        return body.split(b"\n")


def _add(rows: Rows, chunk: Chunk, row: int, keys: Keys, content: Any) -> None:
    name: str | int | None = None
    try:
        if isinstance(content, bytes):
            content = _decode(content)
        if chunk.form == "jsonl":
            content = _parse(content)
        if chunk.form in ("jsonl", "parquet"):
            texts = () if keys.text is None else _texts(_look_up(content, keys.text), keys.text)
            name = None if keys.id is None else _id(_look_up(content, keys.id), keys.id)
            scores = tuple(_score(_look_up(content, key), key) for key in keys.scores)
        else:
            texts, scores = (content.removesuffix("\r") if row >= 0 else content,), ()
        rows.num_bytes += sum(_num_bytes(text) for text in texts)
    except _Refusal as refusal:
        reason, detail = refusal.args
        rows.problems.append(Problem(chunk.span, row, reason, detail))
        return
    rows.texts.append(texts)
    rows.scores.append(scores)
    if name is not None:
        rows.ids.append(name)


def _decode(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise _Refusal("not UTF-8", f"byte {error.start} is {content[error.start]:#04x}") from None


def _num_bytes(text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        detail = f"half of a surrogate pair at character {error.start}"
        raise _Refusal("not valid Unicode", detail) from None


def _parse(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _Refusal("broken JSON", str(error)) from None


def _look_up(record: Any, key: str) -> Any:
    if isinstance(record, dict) and key in record:
        return record[key]
    value = record
    for name in key.split("."):
        if not isinstance(value, dict) or name not in value:
            raise _Refusal(f"no key {key!r}", f"at {name!r}")
        value = value[name]
    return value


def _texts(value: Any, key: str) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return tuple(value)
    raise _Refusal(f"{key!r} is no text", f"got {type(value).__name__}")


def _id(value: Any, key: str) -> str | int:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise _Refusal(f"id {key!r} is no text and no integer", f"got {type(value).__name__}")
    return value


def _score(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Refusal(f"score {key!r} is no number", f"got {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _Refusal(f"score {key!r} is no number", f"got {number}")
    return number


def _parquet_rows(chunk: Chunk, keys: Keys) -> Iterator[dict[str, Any]]:
    file = open_parquet(chunk.path)
    names = set(file.schema_arrow.names)
    columns = []
    for key in keys.all:
        name = key if key in names else key.split(".")[0]
        if name not in names:
            raise CorpusError(
                f"{chunk.path}: has no column {name!r}; it has {', '.join(sorted(names))}"
            )
        columns.append(name)
    columns = list(dict.fromkeys(columns))
    try:
        batches = file.iter_batches(
            _PARQUET_ROWS, row_groups=[chunk.row_group], columns=columns, use_threads=False
        )
        for batch in batches:
            values = [_values(batch.column(name)) for name in columns]
            for row in zip(*values, strict=True):
                yield dict(zip(columns, row, strict=True))
    except (OSError, ValueError) as error:  # pyarrow's errors are both
        raise CorpusError(f"{chunk.path}: damaged row group {chunk.row_group}: {error}") from error


def _values(column: Any) -> list[Any]:
    """Return the values of a column; text that is not UTF-8 as bytes, to be refused by its row."""
    try:
        values: list[Any] = column.to_pylist()
    except UnicodeDecodeError:
        values = [_value(entry) for entry in column]
    return values


def _value(entry: Any) -> Any:
    try:
        return entry.as_py()
    except UnicodeDecodeError:
        return entry.as_buffer().to_pybytes()
