"""Domains: what is trained on, what is held out, in which order, and what is refused."""

from __future__ import annotations

import multiprocessing
import pickle
import shutil
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_d3.corpus.domain import open_domain
from megatron_d3.errors import CorpusError
from megatron_d3.types import DomainInfo
from tests.corpus_helpers import documents, write_corpus, write_raw_idx


def open_web(*paths, **kwargs):
    settings = {"seq_length": 4, "seed": 1, "valid_fraction": 0.0} | kwargs
    return open_domain("web", paths=paths, **settings)


def epoch_of(domain, epoch: int) -> list[int]:
    size = domain.info.num_samples
    found = [domain.locate(epoch * size + i) for i in range(size)]
    assert {number for number, _ in found} == {epoch}
    return [sample for _, sample in found]


def test_info_counts_the_training_part(tmp_path):
    prefix = write_corpus(tmp_path / "a", [[1] * 30, [2] * 12, [3] * 8])
    domain = open_web(prefix, valid_fraction=0.1)
    assert domain.info == DomainInfo("web", 10, 42)
    assert domain.valid is not None
    assert (domain.valid.num_samples, domain.valid.num_tokens) == (1, 8)
    assert domain.valid_tokens(0).tolist() == [3] * 5


def test_stored_order_is_the_order_of_the_files(tmp_path):
    docs = documents(num_documents=20)
    domain = open_web(write_corpus(tmp_path / "a", docs), order="stored")
    stream = [token for doc in docs for token in doc]
    assert epoch_of(domain, 0) == list(range(domain.info.num_samples))
    assert domain.train_tokens(1).tolist() == stream[4:9]
    assert domain.train_tokens(1 + domain.info.num_samples).tolist() == stream[4:9]


def test_every_epoch_is_another_permutation(tmp_path):
    domain = open_web(write_corpus(tmp_path / "a", documents(num_documents=50)))
    size = domain.info.num_samples
    epochs = [epoch_of(domain, epoch) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert domain.train_tokens(5).tolist() == domain.train.tokens(epochs[0][5]).tolist()


def test_shuffle_depends_on_seed_and_name_only(tmp_path):
    prefix = write_corpus(tmp_path / "a", documents(num_documents=50))
    first = epoch_of(open_web(prefix), 0)
    assert epoch_of(open_web(prefix), 0) == first
    assert epoch_of(open_web(prefix, seed=2), 0) != first
    other = open_domain("code", paths=[prefix], seq_length=4, seed=1, valid_fraction=0)
    assert epoch_of(other, 0) != first


def test_several_prefixes_are_laid_end_to_end(tmp_path):
    first, second = documents(num_documents=9), documents(seed=1, num_documents=9)
    domain = open_web(
        write_corpus(tmp_path / "a", first), write_corpus(tmp_path / "b", second), order="stored"
    )
    stream = [token for doc in first + second for token in doc]
    assert domain.info.num_tokens == len(stream)
    last = domain.info.num_samples - 1
    assert domain.train_tokens(last).tolist() == stream[4 * last : 4 * last + 5]


def held_out(domain) -> list[tuple[int, int]]:
    return [] if domain.valid is None else list(domain.valid.documents)


def test_nothing_is_held_out_at_fraction_zero(tmp_path):
    domain = open_web(write_corpus(tmp_path / "a", [[1] * 9, [2] * 9]), valid_fraction=0)
    assert domain.valid is None
    with pytest.raises(CorpusError, match="domain web: nothing is held out"):
        domain.valid_tokens(0)


@pytest.mark.parametrize(
    ("lengths", "fraction", "expected"),
    [
        ([10] * 10, 0.2, [(8, 10)]),  # exactly two documents
        ([10] * 10, 0.21, [(7, 10)]),  # the third is needed
        ([10] * 10, 0.01, [(9, 10)]),  # one sample is 5 tokens, one document
        ([10, 10, 3, 3, 3], 0.01, [(3, 5)]),  # one sample needs two documents
        ([10, 0, 10, 0, 0], 0.5, [(2, 5)]),  # documents without tokens
        ([10, 90], 0.01, [(1, 2)]),  # the last document is large
        ([90, 10], 0.9, [(1, 2)]),  # one is always left to train on
    ],
)
def test_the_fewest_last_documents_are_held_out(tmp_path, lengths, fraction, expected):
    prefix = write_corpus(tmp_path / "a", [[1] * length for length in lengths])
    domain = open_web(prefix, valid_fraction=fraction)
    assert held_out(domain) == expected
    assert domain.train.documents == ((0, expected[0][0]),)


def test_each_prefix_holds_out_its_own_tail(tmp_path):
    docs = [[1] * 10] * 20
    prefixes = [write_corpus(tmp_path / name, docs) for name in "ab"]
    single = write_corpus(tmp_path / "c", [[1] * 50])
    domain = open_web(*prefixes, single, valid_fraction=0.1)
    assert held_out(domain) == [(18, 20), (18, 20), (1, 1)]  # c is one document: trained on whole


def test_a_single_document_is_trained_on_whole(tmp_path):
    domain = open_web(write_corpus(tmp_path / "a", [[1] * 50]), valid_fraction=0.5)
    assert domain.valid is None and domain.info.num_tokens == 50


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=2, max_size=60),
    fraction=st.floats(0.001, 0.6),
)
def test_held_out_part_is_the_shortest_tail(tmp_path_factory, lengths, fraction):
    total, seq_length = sum(lengths), 4
    docs = [[1] * length for length in lengths]
    prefix = write_corpus(tmp_path_factory.mktemp("corpus") / "a", docs, sequence_length=3)
    wanted = max(fraction * total, seq_length + 1)
    tails = [sum(lengths[cut:]) for cut in range(len(lengths) + 1)]
    cut = max([cut for cut in range(1, len(lengths)) if tails[cut] >= wanted], default=1)
    if min(total - tails[cut], tails[cut]) <= seq_length:
        with pytest.raises(CorpusError, match="domain web: "):
            open_web(prefix, valid_fraction=fraction)
    else:
        assert tails[held_out(open_web(prefix, valid_fraction=fraction))[0][0]] == tails[cut]


def test_valid_paths_are_held_out_instead(tmp_path):
    train = write_corpus(tmp_path / "a", [[1] * 20, [2] * 20])
    valid = write_corpus(tmp_path / "b", [[3] * 20])
    domain = open_web(train, valid_paths=[valid], valid_fraction=0.5)
    assert domain.info.num_tokens == 40
    assert domain.valid_tokens(3).tolist() == [3] * 5


class TestFingerprint:
    @pytest.fixture
    def prefix(self, tmp_path):
        return write_corpus(tmp_path / "a", documents(num_documents=20))

    def test_is_the_same_for_a_moved_corpus_and_another_name(self, prefix, tmp_path):
        expected = open_web(prefix).fingerprint
        for suffix in (".bin", ".idx"):
            shutil.copy(f"{prefix}{suffix}", tmp_path / f"moved{suffix}")
        moved = open_domain("x", paths=[tmp_path / "moved"], seq_length=3, seed=5, valid_fraction=0)
        assert moved.fingerprint == expected
        assert len(expected) == 32

    @pytest.mark.parametrize("change", [{"order": "stored"}, {"valid_fraction": 0.3}])
    def test_changes_with_order_and_split(self, prefix, change):
        assert open_web(prefix, **change).fingerprint != open_web(prefix).fingerprint

    def test_changes_with_one_swapped_document(self, tmp_path):
        prefix = write_corpus(tmp_path / "a", [[1] * 5, [2] * 5, [3] * 5])
        before = open_web(prefix).fingerprint
        fields = {"lengths": [5, 5, 5], "document_indices": [0, 1, 2, 3]}
        write_raw_idx(f"{prefix}.idx", pointers=[0, 20, 10], **fields)
        assert open_web(prefix).fingerprint != before
        write_raw_idx(f"{prefix}.idx", pointers=[0, 10, 20], **fields)
        assert open_web(prefix).fingerprint == before

    def test_changes_with_the_bin_size(self, prefix):
        before = open_web(prefix).fingerprint
        with open(f"{prefix}.bin", "ab") as file:
            file.write(b"\0\0")
        assert open_web(prefix).fingerprint != before

    def test_changes_with_valid_paths_and_prefix_order(self, tmp_path):
        a = write_corpus(tmp_path / "a", [[1] * 20])
        b = write_corpus(tmp_path / "b", [[1] * 10, [1] * 10])
        found = [open_web(*paths).fingerprint for paths in ([a], [b], [a, b], [b, a])]
        found.append(open_web(a, valid_paths=[b]).fingerprint)
        assert len(set(found)) == 5


def test_pickled_domain_is_small_and_equal(tmp_path):
    domain = open_web(write_corpus(tmp_path / "a", documents(num_documents=3000)))
    data = pickle.dumps(domain)
    assert len(data) < 3000
    again = pickle.loads(data)
    for ordinal in (0, 7, 10**6):
        assert again.train_tokens(ordinal).tolist() == domain.train_tokens(ordinal).tolist()
    assert again.fingerprint == domain.fingerprint


def _read(domain, ordinals, queue):
    queue.put([domain.train_tokens(ordinal).tolist() for ordinal in ordinals])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_what_the_parent_reads(tmp_path, method):
    domain = open_web(write_corpus(tmp_path / "a", documents(num_documents=300)))
    expected = [domain.train_tokens(ordinal).tolist() for ordinal in range(50)]
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    workers = [
        context.Process(target=_read, args=(domain, range(50), queue))
        for _ in range(2 if method == "fork" else 1)
    ]
    for worker in workers:
        worker.start()
    for _ in workers:
        assert queue.get(timeout=60) == expected
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"order": "random"}, "domain web: order: got 'random', expected shuffle or stored"),
        ({"valid_fraction": 1.0}, r"domain web: valid_fraction: got 1.0, .* in \[0, 1\)"),
        ({"valid_fraction": -0.1}, r"domain web: valid_fraction: got -0.1, .* in \[0, 1\)"),
        ({"valid_fraction": float("nan")}, "domain web: valid_fraction: got nan"),
        ({"seq_length": 0}, "domain web: seq_length: got 0, expected at least 1"),
        ({"seq_length": 20}, r"training part has 20 tokens, shorter than .* seq_length 20 \+ 1"),
        ({"seq_length": 15, "valid_fraction": 0.1}, "its training part has 10 tokens"),
    ],
)
def test_bad_arguments_are_refused(tmp_path, kwargs, message):
    prefix = write_corpus(tmp_path / "a", [[1] * 10, [2] * 10])
    with pytest.raises(CorpusError, match=message):
        open_web(prefix, **kwargs)


def test_domain_without_prefixes_is_refused():
    with pytest.raises(CorpusError, match="domain web: no corpus given"):
        open_web()


def test_broken_file_is_refused_with_the_domains_name(tmp_path):
    with pytest.raises(CorpusError, match="domain web: .*nowhere.idx: no such file"):
        open_web(tmp_path / "nowhere")


@pytest.mark.parametrize("docs", [[], [[]], [[], []]])
def test_empty_domain_is_refused(tmp_path, docs):
    prefix = write_corpus(tmp_path / "a", docs)
    with pytest.raises(CorpusError, match=f"domain web: no tokens in {prefix}"):
        open_web(prefix, valid_fraction=0.1)


def test_empty_shard_of_a_domain_is_allowed(tmp_path):
    empty = write_corpus(tmp_path / "a", [[], []])
    domain = open_web(empty, write_corpus(tmp_path / "b", [[1] * 9] * 9), valid_fraction=0.2)
    assert domain.info.num_tokens + domain.valid.num_tokens == 81


def test_short_held_out_part_is_refused(tmp_path):
    prefix = write_corpus(tmp_path / "a", [[1] * 10, [2] * 3])
    with pytest.raises(CorpusError, match="held-out part has 3 tokens, .* valid_fraction: 0"):
        open_web(prefix, valid_fraction=0.1)
    short = write_corpus(tmp_path / "b", [[1] * 3])
    with pytest.raises(CorpusError, match="domain web: its held-out part has 3 tokens"):
        open_web(prefix, valid_paths=[short])


def test_prefix_named_twice_is_refused(tmp_path):
    prefix = write_corpus(tmp_path / "a", [[1] * 20])
    again = tmp_path / "b" / ".." / "a"
    with pytest.raises(CorpusError, match="domain web: .*a: named twice"):
        open_web(prefix, again)
    with pytest.raises(CorpusError, match="domain web: .*a: named twice"):
        open_web(prefix, valid_paths=[prefix])


def test_mixed_dtypes_are_refused(tmp_path):
    first = write_corpus(tmp_path / "a", [[1] * 20])
    second = write_corpus(tmp_path / "b", [[1] * 20], "int32")
    message = "domain web: .*b: int32 tokens, but .*a has uint16; all prefixes"
    with pytest.raises(CorpusError, match=message):
        open_web(first, second)
    with pytest.raises(CorpusError, match=message):
        open_web(first, valid_paths=[second])


def test_a_million_documents_open_at_once(tmp_path):
    """No index is built: a million documents take milliseconds, the bound is for slow machines."""
    lengths = np.full(10**6, 2)
    write_raw_idx(
        tmp_path / "a.idx",
        lengths=lengths,
        pointers=np.cumsum(lengths) * 2 - 4,
        document_indices=np.arange(10**6 + 1),
    )
    np.arange(2 * 10**6, dtype=np.uint16).tofile(tmp_path / "a.bin")
    start = time.perf_counter()
    domain = open_web(tmp_path / "a", seq_length=1024, order="stored", valid_fraction=0.01)
    assert time.perf_counter() - start < 2
    expected = np.arange(500 * 1024, 501 * 1024 + 1) % 65536
    assert domain.train_tokens(500).tolist() == expected.tolist()
