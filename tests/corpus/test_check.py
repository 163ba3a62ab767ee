"""Checking finds every fault, repairs the one it can, and never crashes on a damaged file."""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from megatron_d3.corpus import check
from megatron_d3.corpus.check import check_index, repair
from megatron_d3.corpus.index import HEADER, read_index
from megatron_d3.corpus.publish import Publication
from megatron_d3.corpus.writer import IndexWriter
from megatron_d3.errors import CorpusError


def write_raw(
    prefix: Path, lengths, pointers, documents, *, bin_bytes: int, modes=(), code: int = 8
) -> Path:
    """Write an index of any content over a sparse `.bin` of any size."""
    sections = (
        HEADER.pack(b"MMIDIDX\0\0", 1, code, len(lengths), len(documents)),
        np.array(lengths, "<i4").tobytes(),
        np.array(pointers, "<i8").tobytes(),
        np.array(documents, "<i8").tobytes(),
        np.array(modes, "i1").tobytes(),
    )
    Path(f"{prefix}.idx").write_bytes(b"".join(sections))
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(bin_bytes)
    return prefix


def wrapped(values) -> np.ndarray:
    """Return the values as 32-bit arithmetic leaves them."""
    return np.array(values, np.int64).astype(np.int32).astype(np.int64)


GIGA = 1 << 30
LENGTHS = [GIGA // 2, GIGA // 2, GIGA // 4, 3, GIGA // 2, 5]  # of 2 bytes: 4.5 GiB
POINTERS = (np.cumsum([0, *LENGTHS[:-1]]) * 2).tolist()
BIN_BYTES = sum(LENGTHS) * 2


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    with IndexWriter(tmp_path / "web", dtype="uint16") as writer:
        writer.add_document([1, 2, 3], [1, 2])
        writer.add_document([], [])
        writer.add_document([4, 5])
    return tmp_path / "web"


def test_a_sound_corpus_has_no_errors(sound):
    report = check_index(sound, vocab_size=6)
    assert report.errors == []
    assert report.notes == ["1 documents have no sequence, first document 1"]
    assert report.counts == {
        "dtype": "uint16",
        "num_documents": 3,
        "num_sequences": 3,
        "bin_bytes": 10,
        "has_modes": False,
        "num_empty_documents": 1,
        "num_tokens": 5,
        "longest_sequence": 2,
        "is_in_stored_order": True,
        "largest_token": 5,
    }


def test_a_corpus_without_documents_is_sound(tmp_path):
    write_raw(tmp_path / "a", [], [], [0], bin_bytes=0)
    report = check_index(tmp_path / "a", vocab_size=10)
    assert (report.errors, report.notes) == ([], [])


def test_token_ids_outside_the_vocabulary_name_their_document(sound):
    report = check_index(sound, vocab_size=5)
    assert report.errors == [
        "1 tokens are outside the vocabulary of 5 (largest 5), first at byte 8 of the .bin, in document 2"
    ]


def test_a_wrong_token_that_no_document_owns_is_found(tmp_path):
    write_raw(tmp_path / "a", [1], [0], [0, 1], bin_bytes=2)
    (tmp_path / "a.bin").write_bytes(b"\0\0\7\0")
    report = check_index(tmp_path / "a", vocab_size=5)
    assert report.errors == [
        "1 tokens are outside the vocabulary of 5 (largest 7), first at byte 2 of the .bin"
    ]
    assert report.notes == ["2 bytes of the .bin belong to no sequence"]


def test_negative_token_ids_are_found(tmp_path):
    write_raw(tmp_path / "a", [2], [0], [0, 1], bin_bytes=8, code=4)
    np.array([3, -1], "<i4").tofile(tmp_path / "a.bin")
    assert "first at byte 4" in check_index(tmp_path / "a", vocab_size=5).errors[0]


def test_an_unreadable_header_is_one_error(sound):
    (sound.parent / "web.idx").write_bytes(b"short")
    report = check_index(sound)
    assert len(report.errors) == 1
    assert "cut short" in report.errors[0]
    assert report.counts == {}


def test_every_kind_of_fault_is_counted(tmp_path):
    write_raw(tmp_path / "a", [2, -1, -3], [0, 4, 4], [0, 2, 1, 3], bin_bytes=4)
    assert check_index(tmp_path / "a").errors == [
        "document indices decrease 1 times, first from 2 to 1 after document 1",
        "2 sequences have a negative length, first sequence 1 with -1",
    ]
    write_raw(tmp_path / "b", [2, 1, 1], [0, 4, 2], [0, 3], bin_bytes=4)
    assert check_index(tmp_path / "b").errors == [
        "1 sequences do not lie in the .bin of 4 bytes, first sequence 1 with 1 tokens of 2 bytes at byte 4; it is cut short or belongs to another index"
    ]


def test_a_reordered_index_is_sound(tmp_path):
    write_raw(tmp_path / "a", [1, 2], [4, 0], [0, 1, 2], bin_bytes=6)
    report = check_index(tmp_path / "a")
    assert report.errors == []
    assert report.notes == ["reordered: 2 sequences are not in stored order"]


def test_overlapping_sequences_are_noted(tmp_path):
    write_raw(tmp_path / "a", [2, 2], [0, 0], [0, 2], bin_bytes=4)
    report = check_index(tmp_path / "a")
    assert report.errors == []
    assert report.notes == [
        "reordered: 1 sequences are not in stored order",
        "sequences overlap: together 8 bytes, .bin 4",
    ]


@pytest.mark.parametrize("modes", [(), (0, 1, 2, 3, 4, 5)])
def test_overflown_pointers_are_recognised_and_repaired(tmp_path, modes):
    documents = [0, 2, 5, 6]
    flags = {"bin_bytes": BIN_BYTES, "modes": modes}
    write_raw(tmp_path / "bad", LENGTHS, wrapped(POINTERS), documents, **flags)
    write_raw(tmp_path / "good", LENGTHS, POINTERS, documents, **flags)
    report = check_index(tmp_path / "bad")
    assert report.is_overflown
    assert report.errors == [
        "4 pointers were added up in 32 bits (Megatron-LM issue 1672), first that of sequence 2: -2,147,483,648; the tokens are there, --fix OUT writes an index with the right pointers"
    ]
    with Publication(tmp_path / "fixed", [".bin", ".idx"]) as new:
        repair(tmp_path / "bad", new)
    assert (tmp_path / "fixed.idx").read_bytes() == (tmp_path / "good.idx").read_bytes()
    assert os.path.samefile(tmp_path / "bad.bin", tmp_path / "fixed.bin")
    assert check_index(tmp_path / "fixed").errors == []


def test_pointers_that_wrapped_to_positive_are_recognised(tmp_path):
    """No pointer is negative or outside the `.bin`: only the layout betrays them."""
    lengths = [2 * GIGA - 1, 1, 7]
    pointers = [0, 4 * GIGA - 2, 4 * GIGA]
    write_raw(tmp_path / "a", lengths, [0, 4 * GIGA - 2, 0], [0, 3], bin_bytes=4 * GIGA + 14)
    assert check_index(tmp_path / "a").is_overflown
    write_raw(tmp_path / "a", lengths, pointers, [0, 3], bin_bytes=4 * GIGA + 14)
    assert check_index(tmp_path / "a").errors == []


def test_overflown_pointers_over_a_short_bin_are_not_repaired(tmp_path):
    write_raw(tmp_path / "a", LENGTHS, wrapped(POINTERS), [0, 6], bin_bytes=BIN_BYTES - 2)
    report = check_index(tmp_path / "a")
    assert not report.is_overflown
    with (
        pytest.raises(CorpusError, match=r"cannot be repaired.*4 sequences do not lie in the .bin"),
        Publication(tmp_path / "b", [".bin", ".idx"]) as new,
    ):
        repair(tmp_path / "a", new)
    assert not list(tmp_path.glob("b*"))


def test_a_sound_corpus_is_not_repaired(sound, tmp_path):
    with (
        pytest.raises(CorpusError, match=r"cannot be repaired.*it is sound"),
        Publication(tmp_path / "b", [".bin", ".idx"]) as new,
    ):
        repair(sound, new)


def test_what_is_broken_beyond_its_pointers_is_not_repaired(tmp_path):
    documents = [0, 4, 2, 6]
    flags = {"bin_bytes": BIN_BYTES}
    write_raw(tmp_path / "a", LENGTHS, wrapped(POINTERS), documents, **flags)
    with (
        pytest.raises(CorpusError, match=r"more than its pointers is wrong"),
        Publication(tmp_path / "b", [".bin", ".idx"]) as new,
    ):
        repair(tmp_path / "a", new)


def test_repair_can_copy_the_bin(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "check_index", lambda prefix: check.Report("", is_overflown=True))
    write_raw(tmp_path / "a", [1, 2], [9, 9], [0, 2], bin_bytes=6)
    with Publication(tmp_path / "b", [".bin", ".idx"]) as new:
        repair(tmp_path / "a", new, is_copying=True)
    assert not os.path.samefile(tmp_path / "a.bin", tmp_path / "b.bin")
    assert read_index(tmp_path / "b").pointers.tolist() == [0, 2]


@pytest.mark.parametrize("block", [1, 2, 5])
def test_blocks_do_not_change_what_is_found(tmp_path, monkeypatch, block):
    write_raw(tmp_path / "bad", LENGTHS, wrapped(POINTERS), [0, 2, 2, 6], bin_bytes=BIN_BYTES)
    whole = check_index(tmp_path / "bad")
    monkeypatch.setattr(check, "_BLOCK", block)
    assert check_index(tmp_path / "bad") == whole


NUMBERS = (0, 1, 3, 4, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


def mutate(raw: bytes, rng: random.Random) -> bytes:
    """Damage an index in one to three of the ways files get damaged."""
    data = bytearray(raw)
    for _ in range(rng.randint(1, 3)):
        kind = rng.randrange(5)
        at = rng.randrange(max(len(data), 1))
        if kind == 0 and data:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data = data[:at]
        elif kind == 2:
            data += bytes(rng.randrange(256) for _ in range(rng.randint(1, 24)))
        elif kind == 3 and len(data) >= HEADER.size:
            struct.pack_into("<Q", data, rng.choice((9, 18, 26)), rng.choice(NUMBERS))
        elif len(data) >= at + 8:
            struct.pack_into("<Q", data, at, rng.choice(NUMBERS))
    return bytes(data)


@pytest.mark.parametrize(
    "count", [1000, pytest.param(10_000, marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_damaged_indexes_give_an_error_or_a_right_answer(sound, count):
    idx = sound.with_suffix(".idx")
    raw, rng = idx.read_bytes(), random.Random(0)
    outcomes = {"ok": 0, "broken": 0}
    tracemalloc.start()
    for _ in range(count):
        idx.write_bytes(mutate(raw, rng))
        report = check_index(sound)
        outcomes["broken" if report.errors else "ok"] += 1
        try:
            index = read_index(sound)
        except CorpusError:
            assert report.errors
            continue
        assert not report.errors or report.is_overflown
        # an answer is right if every token asked for lies in the .bin
        assert index.num_sequences * 12 + len(index.document_indices) * 8 <= len(index.raw)
        for length, pointer in zip(index.lengths.tolist(), index.pointers.tolist(), strict=True):
            index.read_into(np.empty(length, index.dtype), pointer)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert outcomes["ok"] > count // 100
    assert outcomes["broken"] > count // 2
    assert peak < 10_000_000
