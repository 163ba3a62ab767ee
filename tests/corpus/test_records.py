"""Rows of text files: what becomes a document, and what is wrong with the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_d3.corpus.records import Keys, Rows, read_rows
from megatron_d3.corpus.sources import Chunk, Form, chunks, cut
from megatron_d3.errors import CorpusError


def read(data: bytes | str, *, form: Form = "jsonl", keys: Keys = Keys()) -> Rows:  # noqa: B008
    content = data.encode() if isinstance(data, str) else data
    return read_rows(Chunk(0, Path("a.jsonl"), form, 10, content, 0, 0), keys)


def test_lines_become_documents_in_order():
    rows = read('{"text": "a\\u00e9"}\n\n{"text": ["b", "c"], "x": 1}\n')
    assert rows.texts == [("aé",), ("b", "c")]
    assert (rows.num_bytes, rows.num_blank, rows.problems) == (5, 1, [])


def test_nested_keys_and_keys_with_dots():
    keys = Keys("doc.body", ("meta.quality", "n.x"))
    rows = read('{"doc": {"body": "t"}, "meta": {"quality": 2}, "n.x": 0.5}', keys=keys)
    assert rows.texts == [("t",)]
    assert rows.scores == [(2.0, 0.5)]


@pytest.mark.parametrize(
    ("line", "reason", "detail"),
    [
        (b'{"text": "a"', "broken JSON", "Expecting ',' delimiter"),
        (b"[" * 100_000, "broken JSON", "recursion"),
        (b'{"txt": "a"}', "no key 'text'", "at 'text'"),
        (b'["text"]', "no key 'text'", "at 'text'"),
        (b'{"text": null}', "'text' is no text", "got NoneType"),
        (b'{"text": ["a", 1]}', "'text' is no text", "got list"),
        (b'{"text": "\xff", "score": 1}', "not UTF-8", "byte 10 is 0xff"),
        (b'{"text": "\\ud800", "score": 1}', "not valid Unicode", "surrogate pair at character 0"),
        (b'{"text": "a"}', "no key 'score'", "at 'score'"),
        (b'{"text": "a", "score": "1"}', "score 'score' is no number", "got str"),
        (b'{"text": "a", "score": true}', "score 'score' is no number", "got bool"),
        (b'{"text": "a", "score": NaN}', "score 'score' is no number", "got nan"),
        (b'{"text": "a", "score": 1e999}', "score 'score' is no number", "got inf"),
        (b'{"text": "a", "score": 1' + b"0" * 400 + b"}", "score 'score' is no number", "got inf"),
    ],
)
def test_rows_that_are_no_documents_are_named(line, reason, detail):
    good = b'{"text": "good", "score": 1}\n'
    rows = read(good + line + b"\n" + good, keys=Keys(scores=("score",)))
    assert rows.texts == [("good",), ("good",)]
    (problem,) = rows.problems
    assert (problem.row, problem.reason) == (11, reason)
    assert detail in problem.detail


def test_lines_of_text_lose_their_ends_only():
    rows = read(" a \r\nb\u2028c\n\nd", form="lines")
    assert rows.texts == [(" a ",), ("b\u2028c",), ("d",)]
    assert rows.num_blank == 1


def test_a_file_is_one_document_with_all_its_bytes():
    assert read("a\r\n\nb\n", form="file").texts == [("a\r\n\nb\n",)]
    (problem,) = read(b"a\xffb", form="file").problems
    assert (problem.row, problem.reason) == (-1, "not UTF-8")


def write_parquet(path: Path, columns: dict, **options: int) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), path, **options)


def test_parquet_rows_with_nested_scores(tmp_path):
    columns = {
        "text": ["a", None, "c", "d"],
        "meta": [{"q": 1.0}, {"q": 2.0}, {"q": None}, {"q": 4.0}],
    }
    write_parquet(tmp_path / "a.parquet", columns, row_group_size=3)
    shards = cut([tmp_path / "a.parquet"], shard_bytes=1)
    assert len(shards) == 2
    found = [
        read_rows(chunk, Keys(scores=("meta.q",))) for shard in shards for chunk in chunks(shard)
    ]
    assert [rows.texts for rows in found] == [[("a",)], [("d",)]]
    assert [rows.scores for rows in found] == [[(1.0,)], [(4.0,)]]
    assert [(problem.row, problem.reason) for problem in found[0].problems] == [
        (1, "'text' is no text"),
        (2, "score 'meta.q' is no number"),
    ]


def test_parquet_text_that_is_not_utf8_is_one_row(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    raw = pyarrow.array([b"a", b"\xff\xfe", b"c"], pyarrow.binary())
    text = pyarrow.StringArray.from_buffers(3, raw.buffers()[1], raw.buffers()[2])
    write_parquet(tmp_path / "a.parquet", {"text": text})
    (shard,) = cut([tmp_path / "a.parquet"], shard_bytes=1)
    (chunk,) = chunks(shard)
    rows = read_rows(chunk, Keys())
    assert rows.texts == [("a",), ("c",)]
    assert [problem.row for problem in rows.problems] == [1]


def test_a_missing_column_is_named_with_those_there_are(tmp_path):
    write_parquet(tmp_path / "a.parquet", {"body": ["a"], "id": [1]})
    (shard,) = cut([tmp_path / "a.parquet"], shard_bytes=1)
    (chunk,) = chunks(shard)
    with pytest.raises(CorpusError, match=r"has no column 'text'; it has body, id"):
        read_rows(chunk, Keys())
