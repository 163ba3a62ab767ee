"""Scores: against a slow version in plain Python, and by hand."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_d3.corpus import score as module
from megatron_d3.corpus.index import read_index
from megatron_d3.corpus.score import documents, score
from megatron_d3.errors import ConfigError, CorpusError
from tests.corpus_helpers import write_corpus

DOCS = [[1, 2, 3], [], [4], [1, 2, 1, 2, 1, 2], [7, 7]]


@pytest.fixture
def web(tmp_path):
    return read_index(write_corpus(tmp_path / "web", DOCS))


def slow(docs: list[list[int]], reference: list[list[int]], method: str) -> list[float]:
    """Mean surprisal a token, nats, counting with dictionaries."""
    ones = Counter(token for doc in reference for token in doc)
    pairs = Counter(pair for doc in reference for pair in pairwise(doc))
    befores = Counter(before for doc in reference for before in doc[:-1])
    width = max(ones, default=-1) + 1
    total = sum(ones.values())

    def single(token: int) -> float:
        return (ones[token] + 1) / (total + width + 1)

    out = []
    for doc in docs:
        chances = [single(token) for token in doc]
        if method == "bigram":
            for place, (before, after) in enumerate(pairwise(doc), 1):
                seen = pairs[before, after] + 64 * single(after)
                chances[place] = seen / (befores[before] + 64)
        out.append(-math.fsum(map(math.log, chances)) / max(len(doc), 1))
    return out


def test_length_is_in_tokens(web):
    assert score(web, "length").tolist() == [3, 0, 1, 6, 2]


def test_a_unigram_by_hand(tmp_path):
    index = read_index(write_corpus(tmp_path / "a", [[0, 0, 1], [], [1]]))
    # N = 4, V = 2: p(0) = p(1) = 3 / 7
    np.testing.assert_allclose(
        score(index, "unigram"), [math.log(7 / 3), 0, math.log(7 / 3)], rtol=1e-14
    )


DOCUMENTS = st.lists(st.lists(st.integers(0, 9), max_size=8), min_size=1, max_size=8)


@given(docs=DOCUMENTS, reference=DOCUMENTS, block=st.integers(1, 20), is_cut=st.booleans())
@pytest.mark.parametrize("method", ["unigram", "bigram"])
def test_surprisal_is_that_of_a_slow_count(
    tmp_path_factory, method, docs, reference, block, is_cut
):
    folder = tmp_path_factory.getbasetemp()
    cut = 2 if is_cut else None
    index = read_index(write_corpus(folder / "docs", docs, sequence_length=cut))
    other = read_index(write_corpus(folder / "reference", reference))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK_TOKENS", block)
        patch.setattr(module, "_BLOCK_DOCUMENTS", 3)
        found = score(index, method, reference=other)
    np.testing.assert_allclose(found, slow(docs, reference, method), rtol=1e-12)


def test_a_sample_of_the_corpus_is_counted(tmp_path):
    docs = [[n % 7, n % 3, n % 5] for n in range(40)]
    index = read_index(write_corpus(tmp_path / "a", docs))
    whole = score(index, "bigram")
    np.testing.assert_allclose(whole, slow(docs, docs, "bigram"), rtol=1e-12)
    part = score(index, "bigram", fit_tokens=30, seed=1)
    assert part.tolist() == score(index, "bigram", fit_tokens=30, seed=1).tolist()
    assert part.tolist() != whole.tolist()


def test_zlib_compresses_ids_or_text(web):
    raw = [np.array(doc, "<u2").tobytes() for doc in DOCS]
    expected = [len(zlib.compress(content, 6)) / len(content) if content else 1 for content in raw]
    assert score(web, "zlib", threads=2).tolist() == expected
    texts = [b"x" * sum(doc) for doc in DOCS]
    expected = [len(zlib.compress(text, 6)) / len(text) if text else 1 for text in texts]
    assert score(web, "zlib", decode=lambda tokens: "x" * sum(tokens)).tolist() == expected


def test_blocks_follow_the_index_whatever_the_order(web, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK_TOKENS", 4)
    found = [
        tokens[start:stop].tolist()
        for _, tokens, bounds in documents(web)
        for start, stop in pairwise(bounds.tolist())
    ]
    assert found == DOCS


def test_what_cannot_be_scored_is_refused(web, tmp_path):
    with pytest.raises(ConfigError, match=r"--method: got 'loss', expected one of length, zlib"):
        score(web, "loss")
    with pytest.raises(ConfigError, match=r"--fit-tokens: got 0, expected at least 1"):
        score(web, "unigram", fit_tokens=0)
    other = read_index(write_corpus(tmp_path / "other", DOCS, "int32"))
    with pytest.raises(CorpusError, match=r"other: int32 tokens, but .*web has uint16"):
        score(web, "unigram", reference=other)
