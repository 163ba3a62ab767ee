"""The tokenizer: the text comes back, the same text gives the same model, documents end."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("sentencepiece")

from megatron_d3.corpus import tokenizer as tokenizer_module
from megatron_d3.corpus.index import read_index
from megatron_d3.corpus.tokenizer import Tokenizer, train_tokenizer
from megatron_d3.errors import CorpusError
from tests.corpus_helpers import read_documents

TEXTS = [
    "def area(width, height):\n    return width * height\n" * 20,
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.\n" * 20,
    "x = [1, 22, 333]\n\n\tindented  by\ttabs\n" * 20,
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "t.model"
    return train_tokenizer(TEXTS, path, vocab_size=420)


def test_special_ids_are_llamas(tokenizer):
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (420, 2)
    assert tokenizer.dtype.name == "uint16"


@pytest.mark.parametrize(
    "text",
    [*TEXTS, "", " leading, trailing  ", "\n\n\n", "été 漢字 😀 \x01", "\ttab", "a  b   c", "</s>"],
)
def test_text_comes_back(tokenizer, text):
    (tokens,) = tokenizer.encode([text])
    assert tokenizer.decode(tokens) == text
    assert tokenizer.eod_id not in tokens.tolist()
    assert tokens.dtype == tokenizer.dtype


def test_unseen_characters_become_bytes(tokenizer):
    (tokens,) = tokenizer.encode(["漢"])
    assert len(tokens) == 3


def test_batches_and_threads_do_not_matter(tokenizer):
    one_by_one = [tokenizer.encode([text])[0].tolist() for text in TEXTS]
    for num_threads in (1, 3):
        together = tokenizer.encode(TEXTS, num_threads=num_threads)
        assert [tokens.tolist() for tokens in together] == one_by_one


def test_same_text_gives_the_same_file(tokenizer, tmp_path):
    again = train_tokenizer(iter(TEXTS), tmp_path / "again.model", vocab_size=420)
    assert again.path.read_bytes() == tokenizer.path.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["again.model"]


def test_every_document_ends_with_eod(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer_module, "_BATCH_CHARACTERS", 1000)
    texts = [*TEXTS, "", "end"]
    num_tokens = tokenizer.write_corpus(iter(texts), tmp_path / "a")
    documents = read_documents(tmp_path / "a")
    assert [tokenizer.decode(tokens[:-1]) for tokens in documents] == texts
    assert [tokens[-1] for tokens in documents] == [2] * 5
    assert documents[3] == [2]
    assert read_index(tmp_path / "a").num_tokens == num_tokens


@pytest.mark.parametrize("vocab_size", [100, 300, 100_000])
def test_vocabulary_that_does_not_fit_is_refused(tmp_path, vocab_size):
    with pytest.raises(CorpusError, match=f"tokenizer: vocab_size {vocab_size} cannot be trained"):
        train_tokenizer(TEXTS, tmp_path / "t.model", vocab_size=vocab_size)
    assert list(tmp_path.iterdir()) == []


def test_no_text_is_refused(tmp_path):
    with pytest.raises(CorpusError, match="cannot be trained on this text"):
        train_tokenizer([], tmp_path / "t.model", vocab_size=420)


def test_missing_folder_is_refused(tmp_path):
    with pytest.raises(CorpusError, match="t.model: cannot be written: No such file"):
        train_tokenizer(TEXTS, tmp_path / "none" / "t.model", vocab_size=420)


def test_missing_or_broken_model_is_refused(tmp_path):
    with pytest.raises(CorpusError, match="t.model: no such file; expected a SentencePiece"):
        Tokenizer(tmp_path / "t.model")
    (tmp_path / "t.model").write_bytes(b"no model")
    with pytest.raises(CorpusError, match="t.model: not a SentencePiece model"):
        Tokenizer(tmp_path / "t.model")


def test_missing_package_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(CorpusError, match="needs the package sentencepiece: pip install"):
        train_tokenizer(TEXTS, tmp_path / "t.model", vocab_size=420)


@pytest.mark.mcore
def test_megatron_gives_the_same_tokens_and_eod(tokenizer):
    library = pytest.importorskip("megatron.core.tokenizers.text.libraries")
    theirs = library.SentencePieceTokenizer(str(tokenizer.path))
    assert (theirs.vocab_size, theirs.eos_id) == (tokenizer.vocab_size, tokenizer.eod_id)
    for text in TEXTS:
        assert theirs.text_to_ids(text) == tokenizer.encode([text])[0].tolist()
