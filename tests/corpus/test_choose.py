"""Held-out parts and samples: who is chosen depends on the tokens and the seed alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_d3.corpus import choose
from megatron_d3.corpus.choose import sample, split_by_content
from megatron_d3.corpus.index import Index, read_index
from megatron_d3.corpus.writer import IndexWriter
from megatron_d3.errors import ConfigError


def corpus(prefix: Path, documents) -> Index:
    with IndexWriter(prefix, dtype="uint16") as writer:
        for document in documents:
            writer.add_document(document)
    return read_index(prefix)


def test_equal_documents_fall_on_the_same_side_wherever_they_are(tmp_path):
    a = corpus(tmp_path / "a", [[number % 50, 7] for number in range(200)])
    b = corpus(tmp_path / "b", [[49 - number, 7] for number in range(50)])
    sides = split_by_content(a, valid_fraction=0.5, seed=1)
    assert np.array_equal(sides, np.tile(sides[:50], 4))
    assert np.array_equal(split_by_content(b, valid_fraction=0.5, seed=1), sides[:50][::-1])
    assert not np.array_equal(split_by_content(a, valid_fraction=0.5, seed=2), sides)


def test_sequences_of_a_document_are_hashed_as_one(tmp_path):
    with IndexWriter(tmp_path / "a", dtype="uint16") as writer:
        for number in range(64):
            writer.add_document([number, 1, 2], [2, 1])
    whole = corpus(tmp_path / "b", [[number, 1, 2] for number in range(64)])
    parts = split_by_content(read_index(tmp_path / "a"), valid_fraction=0.5, seed=0)
    assert np.array_equal(parts, split_by_content(whole, valid_fraction=0.5, seed=0))


def test_about_the_wanted_fraction_is_held_out(tmp_path):
    index = corpus(tmp_path / "a", [[number % 256, number // 256] for number in range(4000)])
    held = int(split_by_content(index, valid_fraction=0.1, seed=0).sum())
    assert 340 < held < 460  # 400, three standard deviations of 19


def test_blocks_do_not_change_the_split(tmp_path, monkeypatch):
    index = corpus(tmp_path / "a", [[number] for number in range(50)])
    wanted = split_by_content(index, valid_fraction=0.5, seed=0)
    monkeypatch.setattr(choose, "BLOCK", 7)
    assert np.array_equal(split_by_content(index, valid_fraction=0.5, seed=0), wanted)


@pytest.mark.parametrize(("fraction", "held"), [(0, 0), (1, 3)])
def test_all_or_nothing(tmp_path, fraction, held):
    index = corpus(tmp_path / "a", [[1], [2], [], [3]])
    assert split_by_content(index, valid_fraction=fraction, seed=0).sum() == held


def test_a_sample_is_drawn_without_replacement_in_stored_order(tmp_path):
    index = corpus(tmp_path / "a", [[number] * 3 for number in range(100)])
    by_count = sample(index, seed=1, documents=20)
    assert len(by_count) == 20
    assert (np.diff(by_count) > 0).all()
    assert np.array_equal(sample(index, seed=1, fraction=0.2), by_count)
    assert np.array_equal(sample(index, seed=1, tokens=60), by_count)
    assert np.array_equal(sample(index, seed=1, tokens=58), by_count)
    assert not np.array_equal(sample(index, seed=2, documents=20), by_count)


@pytest.mark.parametrize("size", [{"documents": 0}, {"tokens": 0}, {"fraction": 0.0}])
def test_a_sample_of_nothing(tmp_path, size):
    assert sample(corpus(tmp_path / "a", [[1], [2]]), seed=0, **size).tolist() == []


def test_a_sample_of_everything(tmp_path):
    index = corpus(tmp_path / "a", [[1], [2, 3]])
    for size in ({"documents": 2}, {"tokens": 3}, {"fraction": 1.0}):
        assert sample(index, seed=0, **size).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ({}, r"exactly one of"),
        ({"documents": 1, "tokens": 1}, r"exactly one of"),
        ({"documents": 3}, r"--documents: got 3, the corpus has 2"),
        ({"tokens": 4}, r"--tokens: got 4, the corpus has 3"),
        ({"fraction": 1.1}, r"--fraction: got 1.1"),
        ({"fraction": float("nan")}, r"--fraction: got nan"),
    ],
)
def test_sizes_out_of_range_are_refused(tmp_path, size, message):
    with pytest.raises(ConfigError, match=message):
        sample(corpus(tmp_path / "a", [[1], [2, 3]]), seed=0, **size)


def test_bad_fractions_and_seeds_are_refused(tmp_path):
    index = corpus(tmp_path / "a", [[1]])
    with pytest.raises(ConfigError, match=r"--valid-fraction: got 2"):
        split_by_content(index, valid_fraction=2, seed=0)
    with pytest.raises(ConfigError, match=r"--seed: got -1"):
        split_by_content(index, valid_fraction=0.5, seed=-1)
    with pytest.raises(ConfigError, match=r"--seed: got -1"):
        sample(index, seed=-1, documents=1)
