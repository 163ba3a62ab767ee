"""Reading `.bin`/`.idx`, and every way in which a pair can be broken."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from megatron_d3.corpus import index as index_module
from megatron_d3.corpus.index import HEADER, dtype_for_vocab, read_index
from megatron_d3.errors import CorpusError
from tests.corpus_helpers import documents, read_documents, write_corpus, write_raw_idx


def broken(tmp_path: Path, *, bin_bytes: int = 10, **fields) -> Path:
    """Write a pair whose `.idx` differs from a good one (lengths 2, 3) in the fields given."""
    good = {"lengths": [2, 3], "pointers": [0, 4], "document_indices": [0, 1, 2]}
    (tmp_path / "a.bin").write_bytes(bytes(bin_bytes))
    write_raw_idx(tmp_path / "a.idx", **(good | fields))
    return tmp_path / "a"


def test_reads_what_the_format_says(tmp_path):
    index = read_index(broken(tmp_path))
    assert index.dtype == np.uint16
    assert index.lengths.tolist() == [2, 3]
    assert index.pointers.tolist() == [0, 4]
    assert index.document_indices.tolist() == [0, 1, 2]
    assert index.modes is None
    assert (index.num_sequences, index.num_documents, index.num_tokens) == (2, 2, 5)


def test_arrays_are_read_only_views(tmp_path):
    index = read_index(broken(tmp_path))
    for view in (index.lengths, index.pointers, index.document_indices):
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1


def test_reads_tokens_at_any_byte(tmp_path):
    index = read_index(write_corpus(tmp_path / "a", [[1, 2, 3], [4]]))
    out = np.empty(2, index.dtype)
    index.read_into(out, 4)
    assert out.tolist() == [3, 4]


def test_modes_are_recognised_by_the_file_size(tmp_path):
    prefix = broken(tmp_path)
    with open(tmp_path / "a.idx", "ab") as file:
        file.write(bytes([7, 1]))
    modes = read_index(prefix).modes
    assert modes is not None and modes.tolist() == [7, 1]


def test_large_index_is_mapped_and_equal(tmp_path, monkeypatch):
    docs = documents(num_documents=300)
    prefix = write_corpus(tmp_path / "a", docs)
    small = read_index(prefix)
    monkeypatch.setattr(index_module, "_READ_BELOW_BYTES", 0)
    mapped = read_index(prefix)
    assert isinstance(mapped.raw.base, np.memmap) or isinstance(mapped.raw, np.memmap)
    assert mapped.raw.tobytes() == small.raw.tobytes()
    assert mapped.lengths.tolist() == [len(doc) for doc in docs]


def test_empty_corpus_reads_as_empty(tmp_path):
    index = read_index(write_corpus(tmp_path / "a", []))
    assert (index.num_sequences, index.num_documents, index.num_tokens) == (0, 0, 0)


def test_prefix_keeps_dots_of_its_name(tmp_path):
    assert read_documents(write_corpus(tmp_path / "c4.en.text", [[1], [2]])) == [[1], [2]]


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_missing_file_is_named(tmp_path, suffix):
    prefix = broken(tmp_path)
    (tmp_path / f"a{suffix}").unlink()
    with pytest.raises(CorpusError, match=rf"a\{suffix}: no such file; a corpus is a pair"):
        read_index(prefix)


def test_suffix_in_the_prefix_is_pointed_out(tmp_path):
    prefix = broken(tmp_path)
    with pytest.raises(CorpusError, match=f"give the prefix without suffix: {prefix}$"):
        read_index(tmp_path / "a.bin")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"magic": b"MMIDIDY\0\0"}, r"starts with b'MMIDIDY\\x00\\x00', expected .* not an index"),
        ({"version": 2}, "format version 2, expected 1"),
        ({"code": 0}, "dtype code 0, expected one of"),
        ({"code": 7}, "dtype code 7, expected one of .* \\(integers"),
        ({"num_sequences": 3}, "82 bytes, but 3 sequences and 3 document indices take 94"),
        ({"num_sequences": 2**62}, "82 bytes, but 4,611,686,018,427,387,904 sequences"),
        ({"num_indices": 2**64 - 1}, "18,446,744,073,709,551,615 document indices"),
        ({"document_indices": []}, "no document indices, expected at least"),
        ({"document_indices": [1, 1, 2]}, "document indices run from 1 to 2, expected 0 to .* 2"),
        ({"document_indices": [0, 1, 1]}, "document indices run from 0 to 1, expected 0 to .* 2"),
        ({"document_indices": [0, 3, 1, 2]}, "document index 2 is 1 after 3; .* not decrease"),
        ({"lengths": [2, -1]}, "sequence 1 has length -1, expected >= 0"),
        ({"lengths": [2, 4]}, "sequence 1 is 4 tokens of 2 bytes at byte 4, but a.bin has 10"),
        ({"pointers": [0, 6]}, "sequence 1 is 3 tokens of 2 bytes at byte 6, but a.bin has 10"),
        ({"pointers": [-2, 4]}, "sequence 0 is 2 tokens of 2 bytes at byte -2"),
        ({"pointers": [0, 2**63 - 1]}, "sequence 1 is 3 tokens .* byte 9,223,372,036,854,775,807"),
        ({"pointers": [-(2**63), 4]}, "sequence 0 is 2 tokens"),
        ({"dtype": "int32"}, "sequence 1 is 3 tokens of 4 bytes at byte 4, but a.bin has 10"),
    ],
)
def test_broken_index_is_refused(tmp_path, fields, message):
    with pytest.raises(CorpusError, match=message):
        read_index(broken(tmp_path, **fields))


def test_truncated_bin_is_refused(tmp_path):
    with pytest.raises(CorpusError, match="a.bin has 9 bytes; it is cut short or belongs"):
        read_index(broken(tmp_path, bin_bytes=9))


@pytest.mark.parametrize("kept", range(0, HEADER.size + 48, 7))
def test_index_cut_anywhere_is_refused(tmp_path, kept):
    prefix = broken(tmp_path)
    data = (tmp_path / "a.idx").read_bytes()
    (tmp_path / "a.idx").write_bytes(data[:kept])
    with pytest.raises(CorpusError, match="it is cut short"):
        read_index(prefix)


def test_checks_beyond_the_first_block(tmp_path, monkeypatch):
    monkeypatch.setattr(index_module, "_CHECK_BLOCK", 2)
    fields = {"lengths": [1] * 5, "pointers": [0, 2, 4, 6, 8]}
    with pytest.raises(CorpusError, match="document index 4 is 1 after 3"):
        read_index(broken(tmp_path, document_indices=[0, 1, 2, 3, 1, 5], **fields))
    with pytest.raises(CorpusError, match="sequence 4 is 1 tokens"):
        read_index(broken(tmp_path, bin_bytes=9, document_indices=[0, 5], **fields))


def test_contents_are_not_checked_when_not_asked(tmp_path):
    assert read_index(broken(tmp_path, bin_bytes=9), check_bin=False).num_tokens == 5


def test_bin_cut_while_in_use_is_an_error(tmp_path):
    index = read_index(broken(tmp_path))
    index.read_into(np.empty(3, index.dtype), 4)
    os.truncate(tmp_path / "a.bin", 6)
    with pytest.raises(CorpusError, match="ends at byte 6, but had 10 bytes when it was opened"):
        index.read_into(np.empty(3, index.dtype), 4)


def test_bin_replaced_while_in_use_is_an_error(tmp_path):
    index = read_index(broken(tmp_path))
    (tmp_path / "a.bin").write_bytes(bytes(12))
    with pytest.raises(CorpusError, match="was replaced since it was opened"):
        index.read_into(np.empty(3, index.dtype), 4)


def test_bin_removed_while_in_use_is_an_error(tmp_path):
    index = read_index(broken(tmp_path))
    (tmp_path / "a.bin").unlink()
    with pytest.raises(CorpusError, match="a.bin: cannot be opened: No such file"):
        index.read_into(np.empty(3, index.dtype), 4)


def test_rewritten_corpus_is_not_read_through_an_old_descriptor(tmp_path):
    for token in (1, 2, 3):
        assert read_documents(write_corpus(tmp_path / "a", [[token, token]])) == [[token, token]]


def test_too_many_open_files_says_what_to_do(tmp_path, monkeypatch):
    prefix = broken(tmp_path)

    def refuse(*args, **kwargs):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(index_module, "_READ_BELOW_BYTES", 0)
    monkeypatch.setattr(np, "memmap", refuse)
    with pytest.raises(CorpusError, match=r"Too many open files; raise the limit .*ulimit -n"):
        read_index(prefix)


def test_pickle_stores_the_path_and_opens_again(tmp_path):
    index = read_index(write_corpus(tmp_path / "a", documents(num_documents=2000)))
    data = pickle.dumps(index)
    assert len(data) < 300
    assert pickle.loads(data).pointers.tolist() == index.pointers.tolist()


def test_pickle_of_a_replaced_corpus_is_refused(tmp_path):
    data = pickle.dumps(read_index(write_corpus(tmp_path / "a", [[1, 2]])))
    write_corpus(tmp_path / "a", [[1, 2], [3]])
    with pytest.raises(CorpusError, match="was replaced since it was opened"):
        pickle.loads(data)


@pytest.mark.parametrize(
    ("vocab_size", "name"),
    [(None, "int32"), (100, "uint16"), (65_499, "uint16"), (65_500, "int32"), (256_000, "int32")],
)
def test_dtype_for_vocab_is_megatrons(vocab_size, name):
    assert dtype_for_vocab(vocab_size).name == name
