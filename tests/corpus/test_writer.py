"""Writing `.bin`/`.idx`: bytes, refusals, and nothing half-written."""

from __future__ import annotations

import importlib.util
import os
import resource
import signal
import socket
import subprocess

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_d3.corpus import writer as writer_module
from megatron_d3.corpus.index import read_index
from megatron_d3.corpus.writer import IndexWriter
from megatron_d3.errors import CorpusError
from tests.corpus_helpers import documents, read_documents, write_corpus, write_raw_idx


def test_bytes_of_a_small_corpus(tmp_path):
    write_corpus(tmp_path / "a", [[1, 2, 3], [], [4]], sequence_length=2)
    assert (tmp_path / "a.bin").read_bytes() == bytes([1, 0, 2, 0, 3, 0, 4, 0])
    assert (tmp_path / "a.idx").read_bytes() == (
        b"MMIDIDX\0\0"
        + (1).to_bytes(8, "little")
        + bytes([8])
        + (3).to_bytes(8, "little")
        + (4).to_bytes(8, "little")
        + np.array([2, 1, 1], "<i4").tobytes()
        + np.array([0, 4, 6], "<i8").tobytes()
        + np.array([0, 2, 2, 3], "<i8").tobytes()
    )


@settings(max_examples=50, deadline=None)
@given(
    docs=st.lists(st.lists(st.integers(0, 60_000), max_size=9), max_size=20),
    dtype=st.sampled_from(["uint16", "int32", "int64"]),
    sequence_length=st.sampled_from([None, 1, 4]),
)
def test_reads_back_what_was_written(tmp_path_factory, docs, dtype, sequence_length):
    prefix = tmp_path_factory.mktemp("corpus") / "a"
    write_corpus(prefix, docs, dtype, sequence_length=sequence_length)
    assert read_documents(prefix) == docs
    assert read_index(prefix).dtype == np.dtype(dtype)


@pytest.mark.mcore
@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")
@pytest.mark.parametrize("multimodal", [False, True])
def test_bytes_are_those_of_megatrons_builder(tmp_path, multimodal):
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    docs = [doc for doc in documents(seed=3, num_documents=40) if doc]
    lengths = [[len(doc) // 2, len(doc) - len(doc) // 2] for doc in docs]
    modes = [[i % 3, 1] for i in range(len(docs))]
    theirs = IndexedDatasetBuilder(str(tmp_path / "m.bin"), np.uint16, multimodal=multimodal)
    with IndexWriter(tmp_path / "d", dtype=np.uint16, has_modes=multimodal) as ours:
        for doc, length, mode in zip(docs, lengths, modes, strict=True):
            theirs.add_document(doc, length, mode if multimodal else None)
            ours.add_document(doc, length, mode if multimodal else None)
    theirs.finalize(str(tmp_path / "m.idx"))
    with IndexWriter(tmp_path / "e", dtype=np.uint16, has_modes=multimodal) as again:
        again.add_index(tmp_path / "d")
    for suffix in (".bin", ".idx"):
        expected = (tmp_path / f"m{suffix}").read_bytes()
        assert (tmp_path / f"d{suffix}").read_bytes() == expected
        assert (tmp_path / f"e{suffix}").read_bytes() == expected


def test_add_index_appends_documents_and_sequences(tmp_path):
    write_corpus(tmp_path / "a", [[1, 2, 3], [4]], sequence_length=2)
    write_corpus(tmp_path / "b", [[], [5, 6]])
    with IndexWriter(tmp_path / "ab", dtype="uint16") as writer:
        writer.add_document([9])
        writer.add_index(tmp_path / "a")
        writer.add_index(tmp_path / "b")
        assert (writer.num_documents, writer.num_tokens) == (5, 7)
    assert read_documents(tmp_path / "ab") == [[9], [1, 2, 3], [4], [], [5, 6]]
    assert read_index(tmp_path / "ab").lengths.tolist() == [1, 2, 1, 1, 0, 2]


def test_add_index_keeps_an_order_made_by_pointers(tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "_COPY_TOKENS", 2)
    write_corpus(tmp_path / "a", [[1, 2], [3, 4, 5], [6]])
    write_raw_idx(  # documents 2, 0, 0 of 3
        tmp_path / "a.idx", lengths=[1, 2, 2], pointers=[10, 0, 0], document_indices=[0, 1, 2, 3]
    )
    with IndexWriter(tmp_path / "b", dtype="uint16") as writer:
        writer.add_index(tmp_path / "a")
    assert read_documents(tmp_path / "b") == [[6], [1, 2], [1, 2]]
    assert read_index(tmp_path / "b").pointers.tolist() == [0, 2, 6]


def test_modes_are_written_and_appended(tmp_path):
    with IndexWriter(tmp_path / "a", dtype="int32", has_modes=True) as writer:
        writer.add_document([1, 2, 3], [1, 2], [4, 5])
        writer.add_document([1])
    with IndexWriter(tmp_path / "b", dtype="int32", has_modes=True) as writer:
        writer.add_index(tmp_path / "a")
        writer.add_index(tmp_path / "a")
    modes = read_index(tmp_path / "b").modes
    assert modes is not None and modes.tolist() == [4, 5, 0, 4, 5, 0]


@pytest.mark.parametrize(
    ("tokens", "lengths", "modes", "message"),
    [
        ([1, -1], None, None, r"document 1 has tokens from -1 to 1, expected 0 to 65535 \(uint16"),
        ([1, 70000], None, None, "document 1 has tokens from 1 to 70000, expected 0 to 65535"),
        ([0.5], None, None, "tokens must be one row of integers"),
        ([[1]], None, None, "tokens must be one row of integers"),
        ([1, 2], [1], None, r"document 1 has 2 tokens, but its sequence lengths are \[1\]"),
        ([1, 2], [3, -1], None, r"sequence lengths are \[3, -1\]; each must lie in \[0, "),
        ([1, 2], None, [0], "modes given, but opened without has_modes"),
    ],
)
def test_bad_documents_are_refused_and_leave_nothing(tmp_path, tokens, lengths, modes, message):
    with (
        pytest.raises(CorpusError, match=message),
        IndexWriter(tmp_path / "a", dtype="uint16") as writer,
    ):
        writer.add_document([7])
        writer.add_document(tokens, lengths, modes)
    assert list(tmp_path.iterdir()) == []


def test_a_mode_for_each_sequence_is_required(tmp_path):
    with (
        pytest.raises(CorpusError, match="1 modes for 2 sequences"),
        IndexWriter(tmp_path / "a", dtype="uint16", has_modes=True) as writer,
    ):
        writer.add_document([1, 2], [1, 1], [0])


def test_add_index_refuses_another_dtype_or_missing_modes(tmp_path):
    write_corpus(tmp_path / "a", [[1]], "int32")
    with (
        pytest.raises(CorpusError, match="int32 tokens cannot be appended to uint16"),
        IndexWriter(tmp_path / "b", dtype="uint16") as writer,
    ):
        writer.add_index(tmp_path / "a")
    with (
        pytest.raises(CorpusError, match="modes in one corpus and none in"),
        IndexWriter(tmp_path / "b", dtype="int32", has_modes=True) as writer,
    ):
        writer.add_index(tmp_path / "a")


def test_unknown_dtype_is_refused(tmp_path):
    with pytest.raises(CorpusError, match="token dtype float32: expected one of uint8, int8"):
        IndexWriter(tmp_path / "a", dtype=np.float32)


def test_existing_corpus_is_not_overwritten(tmp_path):
    write_corpus(tmp_path / "a", [[1]])
    with pytest.raises(CorpusError, match=r"a.bin: exists; remove it or choose another name"):
        IndexWriter(tmp_path / "a", dtype="uint16").__enter__()
    assert read_documents(tmp_path / "a") == [[1]]


def test_missing_folder_is_refused(tmp_path):
    with pytest.raises(CorpusError, match="cannot be written: No such file"):
        IndexWriter(tmp_path / "none" / "a", dtype="uint16").__enter__()


def test_any_exception_leaves_nothing(tmp_path):
    with pytest.raises(KeyError), IndexWriter(tmp_path / "a", dtype="uint16") as writer:
        writer.add_document([1])
        raise KeyError("user code")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("num_tokens", [1000, 10**6])
def test_full_disk_leaves_nothing(tmp_path, num_tokens):
    """A limit on file sizes fails like a full disk: in `add_document`, or when flushing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with (
            pytest.raises(CorpusError, match="a: cannot be written: File too large"),
            IndexWriter(tmp_path / "a", dtype="uint16") as writer,
        ):
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
            writer.add_document(np.zeros(num_tokens, np.int64))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert os.listdir(tmp_path) == []


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path):
    child = subprocess.Popen(["true"])
    child.wait()
    left = tmp_path / f"a.bin.tmp-{socket.gethostname()}-{child.pid}"
    running = tmp_path / f"a.idx.tmp-{socket.gethostname()}-{os.getppid()}"
    elsewhere = tmp_path / "a.bin.tmp-another-host-1"
    for path in (left, running, elsewhere):
        path.write_bytes(b"x")
    write_corpus(tmp_path / "a", [[1]])
    assert not left.exists()
    assert running.exists() and elsewhere.exists()
