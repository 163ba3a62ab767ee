"""Samples are what plain concatenation gives, however the documents lie in the files."""

from __future__ import annotations

import importlib.util
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_d3.corpus import samples as samples_module
from megatron_d3.corpus import scan as scan_module
from megatron_d3.corpus.index import read_index
from megatron_d3.corpus.samples import SampleCutter, block_sums
from megatron_d3.errors import CorpusError
from tests.corpus_helpers import documents, write_corpus, write_raw_idx


def reference(docs: list[list[int]], seq_length: int) -> list[list[int]]:
    """Lay all documents end to end and cut: the slow and obvious way."""
    stream = [token for doc in docs for token in doc]
    starts = range(0, len(stream) - seq_length, seq_length)
    return [stream[start : start + seq_length + 1] for start in starts]


def cut(cutter: SampleCutter) -> list[list[int]]:
    return [cutter.tokens(sample).tolist() for sample in range(cutter.num_samples)]


def cutter_of(tmp_path, *corpora, seq_length, **kwargs) -> SampleCutter:
    prefixes = [write_corpus(tmp_path / str(i), docs) for i, docs in enumerate(corpora)]
    return SampleCutter([read_index(p) for p in prefixes], seq_length=seq_length, **kwargs)


def test_small_corpus_whole(tmp_path):
    cutter = cutter_of(tmp_path, [[1, 2, 3], [], [4], [5, 6, 7, 8, 9]], seq_length=3)
    assert cut(cutter) == [[1, 2, 3, 4], [4, 5, 6, 7]]
    assert (cutter.num_samples, cutter.num_tokens) == (2, 9)
    assert cutter.tokens(0).dtype == np.int64
    assert cutter.documents_of(0) == [(0, 0, 0, 3), (0, 2, 0, 1)]
    assert cutter.documents_of(1) == [(0, 2, 0, 1), (0, 3, 0, 3)]


@pytest.mark.parametrize(
    ("num_tokens", "num_samples"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2)]
)
def test_last_label_must_exist(tmp_path, num_tokens, num_samples):
    cutter = cutter_of(tmp_path, [[1] * num_tokens], seq_length=4)
    assert cutter.num_samples == num_samples


docs_strategy = st.lists(st.lists(st.integers(0, 999), max_size=12), max_size=30)


@settings(max_examples=150, deadline=None)
@given(
    corpora=st.lists(docs_strategy, min_size=1, max_size=3),
    seq_length=st.integers(1, 40),
    sequence_length=st.sampled_from([None, 1, 5]),
    block=st.sampled_from([1, 2, 7, 1024]),
)
def test_equals_plain_concatenation(tmp_path_factory, corpora, seq_length, sequence_length, block):
    folder = tmp_path_factory.mktemp("corpus")
    prefixes = [
        write_corpus(folder / str(i), docs, sequence_length=sequence_length)
        for i, docs in enumerate(corpora)
    ]
    with pytest.MonkeyPatch.context() as patch:
        for module in (samples_module, scan_module):
            patch.setattr(module, "BLOCK", block)
        cutter = SampleCutter([read_index(p) for p in prefixes], seq_length=seq_length)
        assert cut(cutter) == reference([doc for docs in corpora for doc in docs], seq_length)
        for sample in range(cutter.num_samples):
            pieces = cutter.documents_of(sample)
            found = [
                token
                for number, document, offset, length in pieces
                for token in corpora[number][document][offset : offset + length]
            ]
            assert found == cutter.tokens(sample).tolist()
            assert len({piece[:2] for piece in pieces}) == len(pieces)
            assert all(length > 0 for *_, length in pieces)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), seq_length=st.integers(1, 20))
def test_follows_permuted_pointers(tmp_path_factory, data, seq_length):
    docs = data.draw(docs_strategy)
    order = data.draw(st.permutations(range(len(docs))))
    prefix = write_corpus(tmp_path_factory.mktemp("corpus") / "a", docs)
    index = read_index(prefix)
    write_raw_idx(
        f"{prefix}.idx",
        lengths=index.lengths[list(order)],
        pointers=index.pointers[list(order)],
        document_indices=index.document_indices,
    )
    cutter = SampleCutter([read_index(prefix)], seq_length=seq_length)
    assert cut(cutter) == reference([docs[i] for i in order], seq_length)


def test_document_ranges_select_a_part(tmp_path):
    docs = documents(num_documents=10, max_length=9)
    more = documents(seed=1, num_documents=5, max_length=9)
    cutter = cutter_of(tmp_path, docs, more, seq_length=4, documents=[(3, 7), (1, 5)])
    assert cut(cutter) == reference(docs[3:7] + more[1:5], 4)
    assert cutter.documents_of(0)[0][:2] == (0, 3 + [bool(d) for d in docs[3:]].index(True))


def test_many_short_documents_cross_blocks(tmp_path):
    docs = documents(num_documents=5000, max_length=3)
    cutter = cutter_of(tmp_path, docs, seq_length=700)
    assert cut(cutter) == reference(docs, 700)


def test_one_long_document(tmp_path):
    docs = [list(range(10_000))]
    assert cut(cutter_of(tmp_path, docs, seq_length=999)) == reference(docs, 999)


@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64"])
def test_every_dtype_reads_as_int64(tmp_path, dtype):
    prefix = write_corpus(tmp_path / "a", [[1, 2, 255]], dtype)
    cutter = SampleCutter([read_index(prefix)], seq_length=2)
    assert cutter.tokens(0).tolist() == [1, 2, 255]
    assert cutter.tokens(0).dtype == np.int64


@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 1025, 40_000])
def test_block_sums_are_the_sums_of_blocks(count):
    lengths = np.random.default_rng(0).integers(0, 2**31 - 1, count, dtype=np.int32)
    expected = [
        int(lengths[start : start + 1024].sum(dtype=np.int64)) for start in range(0, count, 1024)
    ]
    assert block_sums(lengths).tolist() == expected


def test_pickled_cutter_gives_the_same_samples(tmp_path):
    cutter = cutter_of(tmp_path, documents(num_documents=3000), seq_length=50)
    data = pickle.dumps(cutter)
    assert len(data) < 2000
    assert cut(pickle.loads(data)) == cut(cutter)


@pytest.mark.parametrize("sample", [-1, 2])
def test_sample_out_of_range_is_refused(tmp_path, sample):
    cutter = cutter_of(tmp_path, [[1] * 9], seq_length=4)
    for method in (cutter.tokens, cutter.documents_of):
        with pytest.raises(IndexError, match=rf"sample {sample} outside \[0, 2\)"):
            method(sample)


def test_mixed_dtypes_are_refused(tmp_path):
    indexes = [
        read_index(write_corpus(tmp_path / "a", [[1, 2]])),
        read_index(write_corpus(tmp_path / "b", [[1, 2]], "int32")),
    ]
    with pytest.raises(CorpusError, match="b: int32 tokens, but .*a has uint16; all prefixes"):
        SampleCutter(indexes, seq_length=1)


def test_nothing_to_cut_is_refused():
    with pytest.raises(CorpusError, match="no corpus given, expected at least one prefix"):
        SampleCutter([], seq_length=1)


def test_bad_arguments_are_refused(tmp_path):
    index = read_index(write_corpus(tmp_path / "a", [[1, 2], [3]]))
    with pytest.raises(CorpusError, match="seq_length: got 0, expected at least 1"):
        SampleCutter([index], seq_length=0)
    with pytest.raises(CorpusError, match="2 document ranges for 1 prefixes"):
        SampleCutter([index], seq_length=1, documents=[(0, 1), (0, 1)])
    for wrong in [(-1, 1), (1, 0), (0, 3)]:
        with pytest.raises(CorpusError, match=r"documents .* expected a range in \[0, 2\]"):
            SampleCutter([index], seq_length=1, documents=[wrong])


@pytest.mark.mcore
@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")
def test_equals_megatrons_sample_index(tmp_path):
    """Megatron's own index of an unshuffled epoch, followed token by token."""
    from megatron.core.datasets import helpers

    docs = documents(seed=5, num_documents=400, max_length=60)
    prefix = write_corpus(tmp_path / "a", docs, sequence_length=25)
    index, seq_length = read_index(prefix), 37
    cutter = SampleCutter([index], seq_length=seq_length)
    sequences = np.arange(index.num_sequences, dtype=np.int32)
    table = helpers.build_sample_idx(
        np.array(index.lengths), sequences, seq_length, 1, index.num_tokens, True, True
    )
    assert cutter.num_samples == len(table) - 1
    ends = np.append(0, np.cumsum(index.lengths))
    stream = np.array([token for doc in docs for token in doc])
    for sample, (sequence, offset) in enumerate(table[:-1]):
        start = ends[sequence] + offset
        assert cutter.tokens(sample).tolist() == stream[start : start + seq_length + 1].tolist()
