"""The verb `index` and its subverbs, from flags to files and printed tables."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import numpy as np
import pytest

from megatron_d3.cli import index as verb
from megatron_d3.corpus.index import HEADER, read_index
from megatron_d3.corpus.scores import read_scores
from megatron_d3.corpus.writer import IndexWriter
from megatron_d3.errors import ConfigError, CorpusError


def write(prefix: Path, documents, scores=None) -> Path:
    with IndexWriter(prefix, dtype="uint16") as writer:
        for document in documents:
            writer.add_document(document)
    if scores is not None:
        np.save(f"{prefix}.scores.npy", np.array(scores, dtype=np.float64))
    return prefix


def index(*flags: str | Path) -> int:
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    return verb.run(parser.parse_args([str(flag) for flag in flags]))


@pytest.fixture
def web(tmp_path: Path) -> Path:
    return write(tmp_path / "web", [[1, 2, 3], [4], [5, 6]], [0.1, 0.2, 0.3])


@pytest.fixture
def code(tmp_path: Path) -> Path:
    return write(tmp_path / "code", [[7, 8], []], [0.4, 0.5])


def overflown(prefix: Path) -> Path:
    """Three sequences of 1 GiB in a sparse file, the third pointer wrapped to negative."""
    lengths = np.full(3, 1 << 29, "<i4")
    pointers = np.array([0, 1 << 30, -(1 << 31)], "<i8")
    header = HEADER.pack(b"MMIDIDX\0\0", 1, 8, 3, 4)
    documents = np.arange(4, dtype="<i8")
    Path(f"{prefix}.idx").write_bytes(b"".join(map(bytes, (header, lengths, pointers, documents))))
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(3 << 30)
    return prefix


def test_check_of_sound_and_broken_corpora(web, code, tmp_path, capsys):
    assert index("check", web, code) == 0
    (tmp_path / "code.bin").write_bytes(b"12")
    assert index("check", web, code) == 1
    assert capsys.readouterr().out == (
        f"{web}: ok, 3 documents, 6 tokens of uint16\n"
        f"{code}: ok, 2 documents, 2 tokens of uint16\n"
        f"{web}: ok, 3 documents, 6 tokens of uint16\n"
        f"{code}: broken, 2 documents, 2 tokens of uint16\n"
        "  error: 2 sequences do not lie in the .bin of 2 bytes, first sequence 0 with 2 tokens of "
        "2 bytes at byte 0; it is cut short or belongs to another index\n"
    )


def test_check_of_a_missing_corpus(tmp_path, capsys):
    assert index("check", tmp_path / "none") == 1
    assert "none.idx: no such file" in capsys.readouterr().out


def test_check_compares_token_ids_with_a_vocabulary(web, capsys):
    assert index("check", web, "--vocab-size", "6", "--json") == 1
    report = json.loads(capsys.readouterr().out)[0]
    assert report["counts"]["largest_token"] == 6
    assert "in document 2" in report["errors"][0]


def test_fix_writes_a_new_index(tmp_path, capsys):
    bad = overflown(tmp_path / "bad")
    before = (tmp_path / "bad.idx").read_bytes()
    assert index("check", bad) == 1
    assert "--fix OUT" in capsys.readouterr().out
    assert index("check", bad, "--fix", tmp_path / "good") == 0
    assert read_index(tmp_path / "good").pointers.tolist() == [0, 1 << 30, 2 << 30]
    assert (tmp_path / "bad.idx").read_bytes() == before


def test_check_refuses_flags_that_mean_nothing(web, code, tmp_path):
    with pytest.raises(ConfigError, match=r"--vocab-size: got 0"):
        index("check", web, "--vocab-size", "0")
    with pytest.raises(ConfigError, match=r"--fix: got 2 corpora"):
        index("check", web, code, "--fix", tmp_path / "out")


def test_show_prints_a_table_and_the_first_documents(web, code, capsys):
    assert index("show", web, code, "--documents", "1") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()) for line in lines[:3]] == [
        "corpus dtype documents sequences tokens min median max order scores",
        f"{web} uint16 3 3 6 1 2 3 stored score",
        f"{code} uint16 2 2 2 0 0 2 stored score",
    ]
    assert lines[3:] == ["", f"{web} document 0: 1 2 3", "", f"{code} document 0: 7 8"]


def test_show_cuts_long_documents(tmp_path, capsys):
    index("show", write(tmp_path / "a", [range(41)]))
    assert capsys.readouterr().out.endswith(" 38 39 ...\n")


def test_show_as_json(web, capsys):
    index("show", web, "--json")
    assert json.loads(capsys.readouterr().out)[0]["num_tokens"] == 6


def test_merge_puts_corpora_and_scores_one_after_another(web, code, tmp_path):
    assert index("merge", web, code, "--output-prefix", tmp_path / "all") == 0
    got = read_index(tmp_path / "all")
    assert np.fromfile(tmp_path / "all.bin", "<u2").tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert got.lengths.tolist() == [3, 1, 2, 2, 0]
    scores = read_scores(tmp_path / "all.scores.npy", index=got)
    assert scores.row(None).tolist() == [0.1, 0.2, 0.3, 0.4, 0.5]
    assert json.loads((tmp_path / "all.origin.json").read_text())["verb"] == "index merge"


def test_merge_warns_where_scores_are_lost(web, code, tmp_path, capsys):
    (tmp_path / "code.scores.npy").unlink()
    index("merge", web, code, "--output-prefix", tmp_path / "all")
    assert "warning: " in (err := capsys.readouterr().err)
    assert "code.scores.npy is missing" in err
    assert not (tmp_path / "all.scores.npy").exists()


def test_split_gives_every_document_to_one_side(tmp_path, capsys):
    documents = [[number, number + 1] for number in range(60)]
    web = write(tmp_path / "web", documents, range(60))
    flags = ("--train-prefix", tmp_path / "train", "--valid-prefix", tmp_path / "valid")
    assert index("split", web, *flags, "--valid-fraction", "0.3", "--json") == 0
    train, valid = (read_scores(tmp_path / f"{side}.scores.npy").row(None) for side in ("train", "valid"))  # fmt: skip
    assert sorted([*train, *valid]) == list(range(60))
    assert 0 < len(valid) < 40
    assert os.path.samefile(tmp_path / "web.bin", tmp_path / "valid.bin")
    assert read_index(tmp_path / "valid").pointers.tolist() == [4 * int(doc) for doc in valid]
    assert '"verb": "index split"' in capsys.readouterr().out


def test_split_into_one_name_is_refused(web, tmp_path):
    flags = ("--train-prefix", tmp_path / "a", "--valid-prefix", tmp_path / "a")
    with pytest.raises(ConfigError, match=r"is the --train-prefix as well"):
        index("split", web, *flags)


def test_sample_keeps_documents_in_their_order(tmp_path):
    web = write(tmp_path / "web", [[number] for number in range(60)], range(60))
    flags = ("--documents", "9", "--seed", "3", "--copy", "--output-prefix", tmp_path / "some")
    assert index("sample", web, *flags) == 0
    tokens = np.fromfile(tmp_path / "some.bin", "<u2").tolist()
    assert len(tokens) == 9
    assert tokens == sorted(tokens)
    assert read_scores(tmp_path / "some.scores.npy").row(None).tolist() == tokens


def test_existing_output_is_refused(web, tmp_path):
    index("merge", web, "--output-prefix", tmp_path / "a")
    with pytest.raises(CorpusError, match=r"exists; .*--overwrite"):
        index("merge", web, "--output-prefix", tmp_path / "a")
    assert index("merge", web, "--output-prefix", tmp_path / "a", "--overwrite") == 0


def test_a_subverb_is_needed(capsys):
    with pytest.raises(SystemExit) as stop:
        index()
    assert stop.value.code == 2


def test_show_decodes_the_first_documents(tmp_path, capsys):
    from tests.corpus_helpers import write_corpus

    web = write_corpus(tmp_path / "web", [list(b"caf\xc3\xa9\n"), [*b"x" * 60]])
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    verb.run(parser.parse_args(["show", str(web), "--tokenizer-type", "bytes"]))
    lines = capsys.readouterr().out.replace(str(tmp_path), "DIR").splitlines()
    assert lines[-3:] == [
        'DIR/web document 0: "café\\n"',
        "",
        f'DIR/web document 1: "{"x" * 40}" ...',
    ]
