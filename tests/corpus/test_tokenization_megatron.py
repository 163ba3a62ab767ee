"""Tokenized corpora against Megatron's own tokenizer classes and index builder, byte for byte.

The loop below is what Megatron's `tools/preprocess_data.py` does for a document: the script itself
is not part of the wheel.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_d3.corpus.encoders import TokenizerFiles
from megatron_d3.corpus.encoding import Settings
from megatron_d3.corpus.records import Keys
from megatron_d3.corpus.sources import cut
from megatron_d3.corpus.tokenization import tokenize
from megatron_d3.corpus.tokenizer import train_tokenizer
from tests.corpus.test_encoders import make_hf, make_tiktoken

pytestmark = [
    pytest.mark.mcore,
    pytest.mark.filterwarnings("ignore"),  # importing Megatron and torch warns
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core"),
]

TEXTS = [
    "The quick brown fox jumps over the lazy dog, lower and lowest.",
    "",
    "  spaces   and\ttabs\r\n\nnew lines ",
    ["a list of texts", "", "of two sequences"],
    "naïve 北京 \u2028 🙂 \u2581 <|endoftext|> </s>",
    "".join(chr(number) for number in range(1, 700)),
]


def make(kind: str, folder: Path) -> tuple[TokenizerFiles, Any]:
    """Return a small tokenizer, and Megatron's object for the same files."""
    from megatron.core.tokenizers.text import libraries

    if kind == "sentencepiece":
        texts = [text for text in TEXTS[:-1] if isinstance(text, str)] * 20
        train_tokenizer(texts, folder / "sp.model", vocab_size=400)
        files = TokenizerFiles(kind, model=folder / "sp.model")
        return files, libraries.SentencePieceTokenizer(str(files.model))
    if kind == "tiktoken":
        files = make_tiktoken(folder, is_json=True)
        options = {"num_special_tokens": 10, "vocab_size": 269}
        return files, libraries.TikTokenTokenizer(str(files.model), **options)
    if kind == "hf":
        pytest.importorskip("transformers")
        files = make_hf(folder)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return files, libraries.HuggingFaceTokenizer(str(folder))
    return TokenizerFiles("bytes"), libraries.ByteLevelTokenizer()


@pytest.mark.parametrize("is_appending_eod", [True, False])
@pytest.mark.parametrize("kind", ["sentencepiece", "tiktoken", "hf", "bytes"])
def test_the_files_are_those_of_megatron(tmp_path, kind, is_appending_eod):
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    files, theirs = make(kind, tmp_path)
    dtype = DType.optimal_dtype(theirs.vocab_size)
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    for text in TEXTS:
        ids: list[int] = []
        lengths: list[int] = []
        for sentence in text if isinstance(text, list) else [text]:
            piece = theirs.text_to_ids(sentence)
            if len(piece) > 0:
                ids.extend(piece)
                lengths.append(len(piece))
        if ids and is_appending_eod:
            ids.append(theirs.eod)
            lengths[-1] += 1
        builder.add_document(ids, lengths)
    builder.finalize(str(tmp_path / "theirs.idx"))

    source = tmp_path / "a.jsonl"
    source.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    settings = Settings(files, Keys(), is_appending_eod=is_appending_eod)
    tokenize(cut([source], shard_bytes=100), tmp_path / "ours", settings)
    for suffix in (".bin", ".idx"):
        expected = (tmp_path / f"theirs{suffix}").read_bytes()
        assert (tmp_path / f"ours{suffix}").read_bytes() == expected
