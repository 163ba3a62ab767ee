"""Windows of documents: every token but the first predicted once, nothing across documents."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_d3.corpus.index import read_index
from megatron_d3.corpus.windows import (
    batches,
    cut_shards,
    cut_windows,
    mean_losses,
    refuse_unknown_tokens,
)
from megatron_d3.errors import CorpusError
from tests.corpus_helpers import write_corpus

DOCS = [[1, 2, 3, 4, 5], [], [6], [7, 8, 9]]


def test_a_document_is_cut_without_overlap(tmp_path):
    index = read_index(write_corpus(tmp_path / "web", DOCS, sequence_length=2))
    windows = cut_windows(index, 0, 4, seq_length=3)
    assert windows.num_predicted.tolist() == [4, 0, 0, 2]
    assert windows.lengths.tolist() == [3, 2, 1]
    assert windows.documents.tolist() == [0, 3, 0]
    (batch, last) = batches(windows, batch_size=2, seq_length=3)
    assert batch.inputs.tolist() == [[1, 2, 3], [7, 8, 0]]
    assert batch.labels.tolist() == [[2, 3, 4], [8, 9, 0]]
    assert batch.is_predicted.tolist() == [[True] * 3, [True, True, False]]
    assert batch.windows.tolist() == [0, 1]
    assert last.inputs.tolist() == [[4, 0, 0], [0, 0, 0]]
    assert last.labels[0, 0] == 5 and last.is_predicted.sum() == 1
    assert last.windows.tolist() == [2, -1]
    means = mean_losses(windows, np.array([6.0, 5.0, 2.0]))
    assert means.tolist() == [2.0, 0.0, 0.0, 2.5]


@given(
    sizes=st.lists(st.integers(0, 12), max_size=12),
    seq_length=st.integers(1, 7),
    batch_size=st.integers(1, 5),
    cut=st.integers(0, 12),
)
def test_every_token_but_the_first_is_predicted_from_the_one_before(
    tmp_path_factory, sizes, seq_length, batch_size, cut
):
    docs = [[100 * number + place for place in range(size)] for number, size in enumerate(sizes)]
    index = read_index(write_corpus(tmp_path_factory.mktemp("w") / "web", docs))
    seen = []
    first = min(cut, len(docs))
    for start, stop in ((0, first), (first, len(docs))):
        windows = cut_windows(index, start, stop, seq_length=seq_length)
        for batch in batches(windows, batch_size=batch_size, seq_length=seq_length):
            assert batch.inputs.shape[1] <= seq_length
            pairs = np.stack([batch.inputs, batch.labels])[:, batch.is_predicted]
            assert (pairs[1] == pairs[0] + 1).all()
            seen += pairs[1].tolist()
    assert sorted(seen) == sorted(token for doc in docs for token in doc[1:])


def test_shards_hold_all_documents_and_about_equal_tokens(tmp_path):
    rng = np.random.default_rng(0)
    docs = [[1] * int(size) for size in rng.integers(0, 40, 1000)]
    index = read_index(write_corpus(tmp_path / "web", docs))
    bounds = cut_shards(index)
    assert bounds[0] == 0 and bounds[-1] == 1000 and (np.diff(bounds) > 0).all()
    sizes = [sum(map(len, docs[a:b])) for a, b in itertools.pairwise(bounds)]
    assert 50 < len(sizes) <= 64
    assert max(sizes) <= index.num_tokens / 64 + 80
    for few in ([], [[]], [[], []], [[1]], [[1], [], [2] * 500, []]):
        found = cut_shards(read_index(write_corpus(tmp_path / "few", few)))
        assert found[0] == 0 and found[-1] == len(few)


def test_a_token_that_the_model_does_not_know_is_refused(tmp_path):
    index = read_index(write_corpus(tmp_path / "web", DOCS))
    windows = cut_windows(index, 1, 4, seq_length=3)
    refuse_unknown_tokens(windows, 10, first=1, index=index)
    with pytest.raises(CorpusError, match=r"document 3 has token 9, but the model's vocabulary is "):
        refuse_unknown_tokens(windows, 9, first=1, index=index)
    empty = cut_windows(index, 1, 2, seq_length=3)
    refuse_unknown_tokens(empty, 1, first=1, index=index)
