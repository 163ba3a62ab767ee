"""The verb `score`: computed scores, scores of a file, and what it refuses."""

from __future__ import annotations

import argparse
import json

import pytest

from megatron_d3.cli import score as verb
from megatron_d3.corpus.index import read_index
from megatron_d3.corpus.scores import read_scores
from megatron_d3.errors import ConfigError, CorpusError
from tests.corpus_helpers import write_corpus


def run(*flags) -> int:
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    return verb.run(parser.parse_args([str(flag) for flag in flags]))


@pytest.fixture
def web(tmp_path):
    return write_corpus(tmp_path / "web", [[65, 66], [67], [68, 69, 70]])


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def scores_of(prefix) -> dict[str, list[float]]:
    scores = read_scores(f"{prefix}.scores.npy", index=read_index(prefix))
    return {name: scores.row(name).tolist() for name in scores.names}


def test_scores_are_computed_and_reported(web, capsys):
    assert run("--prefix", web, "--method", "length", "zlib", "--tokenizer-type", "bytes") == 0
    assert scores_of(web) == {"length": [2, 1, 3], "zlib": [10 / 2, 9 / 1, 11 / 3]}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("web.scores.npy: 3 documents")
    assert " ".join(lines[1].split()) == "length min 10% median 90% max 1 1.2 2 2.8 3"


def test_scores_are_added_or_refused_or_replaced(web, capsys):
    run("--prefix", web, "--method", "length")
    with pytest.raises(CorpusError, match=r"exists; choose another name or give --overwrite"):
        run("--prefix", web, "--method", "unigram")
    run("--prefix", web, "--method", "zlib", "--add")
    assert list(scores_of(web)) == ["length", "zlib"]
    with pytest.raises(ConfigError, match=r"--method: two scores named 'zlib'"):
        run("--prefix", web, "--method", "zlib", "--add")
    capsys.readouterr()
    run("--prefix", web, "--method", "bigram", "--overwrite", "--json")
    assert list(scores_of(web)) == ["bigram"]
    assert set(json.loads(capsys.readouterr().out)["bigram"]) == {
        "min", "p10", "median", "p90", "max"}  # fmt: skip


def test_scores_of_a_file_are_joined_by_order(web, tmp_path):
    rows = [{"m": {"q": n}, "r": -n} for n in range(3)]
    path = write_rows(tmp_path / "q.jsonl", rows)
    run("--prefix", web, "--from", path, "--key", "m.q", "r")
    assert scores_of(web) == {"m.q": [0, 1, 2], "r": [0, -1, -2]}


def test_scores_of_a_parquet_file_are_joined_by_id(web, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {"id": ["c", "x", "a", "b"], "q": [3.0, 9.0, 1.0, 2.0]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "q.parquet")
    source = write_rows(tmp_path / "a.jsonl", [{"id": name, "text": "t"} for name in "abc"])
    join = ["--id-key", "id", "--documents", source]
    run("--prefix", web, "--from", tmp_path / "q.parquet", "--key", "q", *join)
    assert scores_of(web) == {"q": [1, 2, 3]}


@pytest.mark.parametrize(
    ("rows", "ids", "message"),
    [
        ([{"q": 1}], None, r"1 rows, but .*web has 3 documents"),
        ([{"q": 1}, {"q": None}], None, r"q\.jsonl, line 2: score 'q' is no number: got None"),
        ([{"q": 1, "id": 1}] * 2, [1, 2, 3], r"id 1 occurs twice"),
        ([{"q": 1, "id": 1}], [1, 2, 3], r"document 1 has no score: no row has id 2"),
        ([{"q": 1, "id": 1}], [1, 1], r"2 documents in the files given, but .*web has 3"),
        ([{"q": 1, "id": 1.5}], [1], r"line 1: id 'id' is no text and no integer: got float"),
    ],
)
def test_scores_that_do_not_fit_are_refused(web, tmp_path, rows, ids, message):
    path = write_rows(tmp_path / "q.jsonl", rows)
    join = []
    if ids:
        source = write_rows(tmp_path / "a.jsonl", [{"id": name} for name in ids])
        join = ["--id-key", "id", "--documents", source]
    with pytest.raises(CorpusError, match=message):
        run("--prefix", web, "--from", path, "--key", "q", *join)
    assert not (tmp_path / "web.scores.npy").exists()


def test_scores_that_may_not_be_written_are_refused_before_they_are_computed(web, monkeypatch):
    run("--prefix", web, "--method", "length")
    monkeypatch.setattr(verb, "score", lambda *_, **__: pytest.fail("computed"))
    monkeypatch.setattr(verb, "train", lambda *_, **__: pytest.fail("started"))
    monkeypatch.setattr(verb, "require_training_packages", lambda: None)
    for flags in (["--method", "zlib"], ["--loss-of", "run"]):
        with pytest.raises(CorpusError, match=r"scores\.npy: exists; choose another name"):
            run("--prefix", web, *flags)


def test_flags_that_contradict_each_other_are_refused(web, tmp_path):
    (tmp_path / "q.txt").write_text("1\n")
    for flags, message in (
        ([], "give either --method or --from"),
        (["--method", "length", "--from", "q.jsonl"], "give either --method or --from"),
        (["--from", "q.jsonl"], "--from and --key: give both"),
        (["--from", "q.jsonl", "--key", "q", "--id-key", "id"], "--id-key and --documents: give"),
        (["--method", "zlib", "--workers", "0"], "--workers: got 0, expected at least 1"),
        (["--method", "zlib", "--loss-of", "run"], "either --method or --from or --loss-of"),
        (["--loss-of", "run", "--num-processes", "0"], "--num-processes: got 0, expected at"),
        (["--method", "length", "--", "--bf16"], "what is --bf16"),
    ):
        with pytest.raises(ConfigError, match=message):
            run("--prefix", web, *flags)
    with pytest.raises(CorpusError, match=r"q\.txt: scores are read from \.jsonl and \.parquet"):
        run("--prefix", web, "--from", tmp_path / "q.txt", "--key", "q")
