"""Indexes of chosen documents: tokens, document borders and modes against plain lists."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_d3.corpus import rewrite as rewrite_module
from megatron_d3.corpus.index import Index, read_index
from megatron_d3.corpus.publish import Publication
from megatron_d3.corpus.rewrite import (
    document_tokens,
    open_source,
    rewrite,
)
from megatron_d3.corpus.writer import IndexWriter
from megatron_d3.errors import CorpusError

Document = list[list[int]]  # sequences of tokens

SIMPLE: list[Document] = [[[1, 2]], [[3]], [[4, 5, 6]]]
MIXED: list[Document] = [[[1], [2, 3]], [], [[4, 5, 6]], [[], [7]]]


def write(prefix: Path, documents: list[Document], *, dtype="uint16", has_modes=False) -> Path:
    with IndexWriter(prefix, dtype=dtype, has_modes=has_modes) as writer:
        for number, document in enumerate(documents):
            lengths = [len(sequence) for sequence in document]
            tokens = [token for sequence in document for token in sequence]
            modes = [number % 100] * len(document) if has_modes else None
            writer.add_document(tokens, lengths, modes)
    return prefix


def documents_of(index: Index) -> list[Document]:
    def sequence(number: int) -> list[int]:
        tokens = np.empty(index.lengths[number], index.dtype)
        index.read_into(tokens, int(index.pointers[number]))
        return tokens.tolist()

    bounds = index.document_indices.tolist()
    return [[sequence(number) for number in range(start, stop)] for start, stop in pairwise(bounds)]


def make(out: Path, prefixes: list[Path], documents, **flags) -> Index:
    source = open_source([read_index(prefix) for prefix in prefixes])
    chosen = None if documents is None else np.array(documents, dtype=np.int64)
    with Publication(out, [".bin", ".idx"]) as new:
        rewrite(source, chosen, new, **flags)
    return read_index(out)


@pytest.mark.parametrize("is_copying", [False, True])
@pytest.mark.parametrize("documents", [SIMPLE, MIXED], ids=["simple", "mixed"])
def test_a_new_order_keeps_documents_whole(tmp_path, documents, is_copying):
    order = list(range(len(documents)))[::-1]
    got = make(tmp_path / "out", [write(tmp_path / "in", documents)], order, is_copying=is_copying)
    assert documents_of(got) == documents[::-1]


def test_linking_copies_no_tokens(tmp_path):
    write(tmp_path / "in", SIMPLE)
    got = make(tmp_path / "out", [tmp_path / "in"], [2, 0, 1])
    assert os.path.samefile(tmp_path / "in.bin", tmp_path / "out.bin")
    assert got.pointers.tolist() == [6, 0, 4]
    assert got.lengths.tolist() == [3, 2, 1]


def test_copying_writes_the_tokens_in_the_new_order(tmp_path):
    write(tmp_path / "in", SIMPLE)
    got = make(tmp_path / "out", [tmp_path / "in"], [2, 0, 1], is_copying=True)
    write(tmp_path / "wanted", [SIMPLE[2], SIMPLE[0], SIMPLE[1]])
    for suffix in (".bin", ".idx"):
        ours = (tmp_path / f"out{suffix}").read_bytes()
        assert ours == (tmp_path / f"wanted{suffix}").read_bytes()
    assert got.pointers.tolist() == [0, 6, 10]


def test_modes_are_kept(tmp_path):
    write(tmp_path / "in", MIXED, has_modes=True)
    got = make(tmp_path / "out", [tmp_path / "in"], [3, 2, 1, 0])
    assert got.modes is not None
    assert got.modes.tolist() == [3, 3, 2, 0, 0]


def test_several_corpora_get_one_bin(tmp_path):
    prefixes = [write(tmp_path / "a", SIMPLE), write(tmp_path / "b", MIXED)]
    got = make(tmp_path / "out", prefixes, [6, 0, 3, 1, 5, 4, 2])
    both = SIMPLE + MIXED
    assert documents_of(got) == [both[number] for number in (6, 0, 3, 1, 5, 4, 2)]
    sizes = [(tmp_path / f"{name}.bin").stat().st_size for name in ("a", "b", "out")]
    assert sizes[2] == sizes[0] + sizes[1]


def test_corpora_that_share_a_bin_do_not_copy_it(tmp_path):
    write(tmp_path / "in", SIMPLE)
    make(tmp_path / "a", [tmp_path / "in"], [2])
    make(tmp_path / "b", [tmp_path / "in"], [0, 1])
    got = make(tmp_path / "out", [tmp_path / "a", tmp_path / "b"], None)
    assert documents_of(got) == [SIMPLE[2], SIMPLE[0], SIMPLE[1]]
    assert os.path.samefile(tmp_path / "in.bin", tmp_path / "out.bin")


def test_a_symbolic_link_is_resolved(tmp_path):
    write(tmp_path / "in", SIMPLE)
    for suffix in (".bin", ".idx"):
        (tmp_path / f"link{suffix}").symlink_to(tmp_path / f"in{suffix}")
    make(tmp_path / "out", [tmp_path / "link"], [0, 1, 2])
    assert not (tmp_path / "out.bin").is_symlink()
    assert os.path.samefile(tmp_path / "in.bin", tmp_path / "out.bin")


@pytest.mark.parametrize("documents", [[], [[]], [[[]]]], ids=["none", "empty", "no tokens"])
@pytest.mark.parametrize("is_copying", [False, True])
def test_corpora_without_tokens(tmp_path, documents, is_copying):
    write(tmp_path / "in", documents)
    got = make(tmp_path / "out", [tmp_path / "in"], None, is_copying=is_copying)
    assert documents_of(got) == documents


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), block=st.integers(1, 4), is_copying=st.booleans(), has_modes=st.booleans())
def test_any_choice_of_documents_in_any_block_size(
    tmp_path_factory, data, block, is_copying, has_modes
):
    folder = tmp_path_factory.mktemp("rewrite")
    sequence = st.lists(st.integers(0, 9), max_size=3)
    corpus = st.lists(st.lists(sequence, max_size=3), max_size=4)
    corpora = data.draw(st.lists(corpus, min_size=1, max_size=3))
    everything = [document for documents in corpora for document in documents]
    numbers = st.integers(0, max(len(everything) - 1, 0))
    chosen = data.draw(st.lists(numbers, max_size=8)) if everything else []
    prefixes = [
        write(folder / str(number), documents, has_modes=has_modes)
        for number, documents in enumerate(corpora)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rewrite_module, "BLOCK", block)
        got = make(folder / "out", prefixes, chosen, is_copying=is_copying)
        sizes = document_tokens(got).tolist()
    assert documents_of(got) == [everything[number] for number in chosen]
    assert sizes == [sum(map(len, everything[number])) for number in chosen]
    assert (got.modes is not None) == (has_modes and got.num_sequences > 0)


def test_different_dtypes_are_refused(tmp_path):
    write(tmp_path / "a", SIMPLE)
    write(tmp_path / "b", SIMPLE, dtype="int32")
    with pytest.raises(CorpusError, match=r"b: int32 tokens, but .*a has uint16"):
        make(tmp_path / "out", [tmp_path / "a", tmp_path / "b"], None)


def test_modes_in_one_of_two_corpora_are_refused(tmp_path):
    write(tmp_path / "a", SIMPLE)
    write(tmp_path / "b", SIMPLE, has_modes=True)
    with pytest.raises(CorpusError, match=r"modes in one of it and"):
        make(tmp_path / "out", [tmp_path / "a", tmp_path / "b"], None)


def test_no_corpus_is_refused():
    with pytest.raises(CorpusError, match=r"expected at least one"):
        open_source([])


def test_a_bin_replaced_after_opening_is_refused(tmp_path):
    source = open_source([read_index(write(tmp_path / "in", SIMPLE))])
    (tmp_path / "in.bin").write_bytes(b"")
    with (
        pytest.raises(CorpusError, match=r"was replaced since it was opened"),
        Publication(tmp_path / "out", [".bin", ".idx"]) as new,
    ):
        rewrite(source, None, new, is_copying=True)
    assert not list(tmp_path.glob("out*"))


def test_hashes_depend_on_the_index_only(tmp_path):
    write(tmp_path / "a", SIMPLE)
    write(tmp_path / "b", SIMPLE)
    write(tmp_path / "c", MIXED)
    hashes = [read_index(tmp_path / name).digest for name in "abc"]
    assert hashes[0] == hashes[1] != hashes[2]
    assert hashes[0] == hashlib.blake2b((tmp_path / "a.idx").read_bytes(), digest_size=16).hexdigest()


@pytest.mark.mcore
@pytest.mark.filterwarnings("ignore")  # importing Megatron and torch warns
@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")
def test_megatron_merges_to_the_same_bytes_and_reads_the_new_order(tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

    both = SIMPLE + MIXED
    prefixes = [write(tmp_path / "a", SIMPLE), write(tmp_path / "b", MIXED)]
    builder = IndexedDatasetBuilder(str(tmp_path / "m.bin"), dtype=np.uint16)
    for prefix in prefixes:
        builder.add_index(str(prefix))
    builder.finalize(str(tmp_path / "m.idx"))
    make(tmp_path / "ours", prefixes, None)
    for suffix in (".bin", ".idx"):
        merged = (tmp_path / f"m{suffix}").read_bytes()
        assert (tmp_path / f"ours{suffix}").read_bytes() == merged

    order = [6, 0, 3, 1, 5, 4, 2]
    make(tmp_path / "out", prefixes, order)
    got = IndexedDataset(str(tmp_path / "out"))
    wanted = [sequence for number in order for sequence in both[number]]
    assert [got[number].tolist() for number in range(len(got))] == wanted
