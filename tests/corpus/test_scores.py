"""Score files: what is written is read back, and what does not belong is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_d3.corpus.index import Index, read_index
from megatron_d3.corpus.scores import (
    array_hash,
    join_scores,
    npy_chunks,
    read_scores,
    score_chunks,
    score_json,
)
from megatron_d3.corpus.writer import IndexWriter
from megatron_d3.errors import CorpusError


@pytest.fixture
def index(tmp_path: Path) -> Index:
    with IndexWriter(tmp_path / "web", dtype="uint16") as writer:
        for length in (1, 2, 3):
            writer.add_document([7] * length)
    return read_index(tmp_path / "web")


def write(path: Path, values, names, index: str, documents=None) -> Path:
    values = np.array(values)
    chunks = score_chunks(values, documents=documents)
    count = values.shape[1] if documents is None else len(documents)
    text = score_json(names, num_documents=count, index=index)
    path.write_bytes(b"".join(bytes(chunk) for chunk in chunks))
    path.with_suffix(".json").write_bytes(text)
    return path


def test_one_score_is_one_number_a_document(tmp_path, index):
    path = write(tmp_path / "web.scores.npy", [[3.0, 1.0, 2.0]], ["quality"], index.digest)
    assert np.load(path).tolist() == [3.0, 1.0, 2.0]
    scores = read_scores(path, index=index)
    assert scores.names == ("quality",)
    assert scores.row(None).tolist() == scores.row("quality").tolist() == [3.0, 1.0, 2.0]


def test_several_scores_are_chosen_by_name(tmp_path, index):
    values = [[3.0, 1.0, 2.0], [30.0, 10.0, 20.0]]
    path = write(tmp_path / "web.scores.npy", values, ["quality", "length"], index.digest)
    scores = read_scores(path, index=index)
    assert scores.row("length").tolist() == [30.0, 10.0, 20.0]
    with pytest.raises(CorpusError, match=r"holds several scores \(quality, length\); choose one"):
        scores.row(None)
    with pytest.raises(CorpusError, match=r"no score named 'lenght'; did you mean 'length'\?"):
        scores.row("lenght")
    with pytest.raises(CorpusError, match=r"no score named 'x'; it has quality, length"):
        scores.row("x")


def test_chosen_documents_are_written_in_their_order(tmp_path):
    values = [[3.0, 1.0, 2.0], [30.0, 10.0, 20.0]]
    path = write(tmp_path / "s.npy", values, ["a", "b"], "h", np.array([2, 0]))
    assert np.load(path).tolist() == [[2.0, 3.0], [20.0, 30.0]]


def test_an_npy_from_elsewhere_needs_no_json(tmp_path, index):
    np.save(tmp_path / "other.npy", np.array([1, 2, 3]))
    scores = read_scores(tmp_path / "other.npy", index=index)
    assert (scores.names, scores.index) == (("score",), None)
    assert scores.row("score").tolist() == [1, 2, 3]


def test_several_corpora_are_joined(tmp_path):
    first = read_scores(write(tmp_path / "a.npy", [[1.0, 2.0]], ["q"], "h"))
    second = read_scores(write(tmp_path / "b.npy", [[3.0]], ["q"], "h"))
    assert join_scores([first, second]).row("q").tolist() == [1.0, 2.0, 3.0]
    other = read_scores(write(tmp_path / "c.npy", [[3.0]], ["r"], "h"))
    with pytest.raises(CorpusError, match=r"has r, but .* has q; corpora ordered as one"):
        join_scores([first, other])


def test_scores_of_another_corpus_are_refused(tmp_path, index):
    path = write(tmp_path / "web.scores.npy", [[3.0, 1.0, 2.0]], ["quality"], "0123")
    with pytest.raises(CorpusError, match=r"made for another corpus"):
        read_scores(path, index=index)


def test_another_number_of_documents_is_refused(tmp_path, index):
    np.save(tmp_path / "s.npy", np.zeros(4))
    with pytest.raises(CorpusError, match=r"4 scores, but .*web has 3 documents"):
        read_scores(tmp_path / "s.npy", index=index)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.zeros((2, 2, 2)), r"expected one score a document"),
        (np.array(["a"]), r"got dtype <U1, expected float64"),
    ],
)
def test_arrays_that_are_no_scores_are_refused(tmp_path, values, message):
    np.save(tmp_path / "s.npy", values)
    with pytest.raises(CorpusError, match=message):
        read_scores(tmp_path / "s.npy")


@pytest.mark.parametrize("content", [b"", b"not an npy", b"\x93NUMPY\x01\x00"])
def test_files_that_are_no_arrays_are_refused(tmp_path, content):
    (tmp_path / "s.npy").write_bytes(content)
    with pytest.raises(CorpusError, match=r"not an .npy file that can be read"):
        read_scores(tmp_path / "s.npy")


def test_pickled_objects_are_refused(tmp_path):
    np.save(tmp_path / "s.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(CorpusError, match=r"not an .npy file that can be read"):
        read_scores(tmp_path / "s.npy")


def test_a_missing_file_names_the_verb_that_makes_one(tmp_path):
    with pytest.raises(CorpusError, match=r"no such file; `megatron-d3 score` makes one"):
        read_scores(tmp_path / "s.npy")


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"version": 2, "names": ["q"], "num_documents": 3, "index": "h"}, r"version 2, expected"),
        ({"version": 1}, r"not the description of a score file: KeyError"),
        (
            {"version": 1, "names": ["q"], "num_documents": 4, "index": "h"},
            r"describes 1 scores of 4 documents, but s.npy holds 1 of 3",
        ),
    ],
)
def test_a_json_that_does_not_fit_is_refused(tmp_path, meta, message):
    np.save(tmp_path / "s.npy", np.zeros(3))
    (tmp_path / "s.json").write_text(json.dumps(meta))
    with pytest.raises(CorpusError, match=message):
        read_scores(tmp_path / "s.npy")


def test_array_hash_is_that_of_the_values(tmp_path):
    values = np.arange(10.0)
    (tmp_path / "v.npy").write_bytes(b"".join(bytes(chunk) for chunk in npy_chunks(values)))
    again = np.load(tmp_path / "v.npy", mmap_mode="r")
    assert array_hash(values) == array_hash(again) != array_hash(values[::-1])
