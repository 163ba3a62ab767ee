"""Tokenizers of every kind: ids, vocabulary, end of document, and what is refused."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

import pytest

from megatron_d3.corpus.encoders import TokenizerFiles, kind_of, open_encoder
from megatron_d3.errors import ConfigError, CorpusError

TEXTS = ["low lower lowest", "", "naïve 北京", "<|endoftext|> low"]


def ids(encoder, texts=TEXTS) -> list[list[int]]:
    return [list(map(int, piece)) for piece in encoder.encode(texts)]


def make_gpt2(folder: Path) -> TokenizerFiles:
    """Byte-level BPE with three merges, in GPT-2's two files."""
    tokenizers = pytest.importorskip("tokenizers")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    pieces = [*letters, "lo", "low", "er", "<|endoftext|>"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\nl o\nlo w\ne r\n")
    return TokenizerFiles(
        "gpt2", vocab_file=folder / "vocab.json", merge_file=folder / "merges.txt"
    )


def make_hf(folder: Path) -> TokenizerFiles:
    """The same as one tokenizer.json, with saved truncation, and its end in the file beside it."""
    tokenizers = pytest.importorskip("tokenizers")
    files = make_gpt2(folder)
    model = tokenizers.models.BPE.from_file(str(files.vocab_file), str(files.merge_file))
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.enable_truncation(2)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": {"content": "<|endoftext|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return TokenizerFiles("hf", model=folder)


def make_tiktoken(folder: Path, *, is_json: bool) -> TokenizerFiles:
    pytest.importorskip("tiktoken")
    pieces = [bytes([number]) for number in range(256)] + [b"lo", b"low", b"er"]
    texts = [base64.b64encode(piece).decode() for piece in pieces]
    path = folder / ("vocab.json" if is_json else "vocab.tiktoken")
    if is_json:
        entries = [
            {"rank": rank, "token_bytes": text, "token_str": ""} for rank, text in enumerate(texts)
        ]
        path.write_text(json.dumps(entries))
    else:
        path.write_text("".join(f"{text} {rank}\n" for rank, text in enumerate(texts)))
    return TokenizerFiles("tiktoken", model=path, num_special_tokens=10, vocab_size=269)


def test_names_of_megatron_and_ours():
    assert kind_of("Llama2Tokenizer") == "sentencepiece"
    assert kind_of("GPT2BPETokenizer") == kind_of("gpt2") == "gpt2"
    with pytest.raises(ConfigError, match=r"--tokenizer-type: got 'bert', expected one of senten"):
        kind_of("bert")


def test_bytes_are_ids():
    encoder = open_encoder(TokenizerFiles("bytes"))
    assert ids(encoder, ["aé", ""]) == [[97, 195, 169], []]
    assert encoder.decode([97, 195, 169, 300]) == "aé"
    assert (encoder.vocab_size, encoder.eod_id) == (512, 0)


@pytest.mark.parametrize("make", [make_gpt2, make_hf])
def test_byte_level_bpe_reads_both_forms_alike(tmp_path, make):
    encoder = open_encoder(make(tmp_path))
    space, low, er, end = encoder.encode([" "])[0][0], 257, 258, 259
    first = [low, space, low, er, space, low, *encoder.encode(["est"])[0]]
    assert ids(encoder)[:2] == [first, []]
    assert ids(encoder)[3] == [end, space, low]
    assert [encoder.decode(piece) for piece in ids(encoder)] == TEXTS
    assert (encoder.vocab_size, encoder.eod_id) == (260, end)


def test_the_end_of_documents_may_be_named_or_missing(tmp_path):
    files = make_hf(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert open_encoder(files).eod_id is None
    named = TokenizerFiles("hf", model=tmp_path / "tokenizer.json", eod_token="low")
    assert open_encoder(named).eod_id == 257
    with pytest.raises(CorpusError, match=r"tokenizer\.json: has no token '</s>' to end documents"):
        open_encoder(TokenizerFiles("hf", model=tmp_path, eod_token="</s>"))
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CorpusError, match=r"tokenizer_config\.json: not a JSON object"):
        open_encoder(files)


@pytest.mark.parametrize("is_json", [True, False])
def test_tiktoken_is_laid_out_as_megatron_does(tmp_path, is_json):
    encoder = open_encoder(make_tiktoken(tmp_path, is_json=is_json))
    assert ids(encoder, ["lower", "</s>"]) == [[267, 268], [2]]
    assert encoder.decode([267, 268]) == "lower"
    assert (encoder.vocab_size, encoder.eod_id) == (269, 2)


def test_tiktoken_refuses_what_does_not_fit(tmp_path):
    files = make_tiktoken(tmp_path, is_json=False)

    def opened(**changes):
        return open_encoder(TokenizerFiles("tiktoken", **{"model": files.model, **changes}))

    with pytest.raises(CorpusError, match=r"259 tokens and 10 special ones.*--vocab-size 269"):
        opened(num_special_tokens=10, vocab_size=300)
    with pytest.raises(ConfigError, match=r"num-special-tokens: got 3, expected 7 or more"):
        opened(num_special_tokens=3)
    with pytest.raises(ConfigError, match=r"--tiktoken-pattern: got 'v3', expected v1 or v2"):
        opened(pattern="v3")
    with pytest.raises(CorpusError, match=r"none\.tiktoken: no such file; expected a tiktoken"):
        opened(model=tmp_path / "none.tiktoken")
    for content in ("YQ== 1\n", "YQ==\n", "Y 0\n"):
        files.model.write_text(content)
        with pytest.raises(CorpusError, match=r"vocab\.tiktoken: not a tiktoken vocabulary"):
            opened(num_special_tokens=10, vocab_size=11)


def test_files_that_are_missing_or_broken_are_named(tmp_path):
    pytest.importorskip("tokenizers")
    broken = tmp_path / "tokenizer.json"
    with pytest.raises(CorpusError, match=r"tokenizer\.json: no such file; expected"):
        open_encoder(TokenizerFiles("hf", model=tmp_path))
    broken.write_text("{}")
    with pytest.raises(CorpusError, match=r"tokenizer\.json: not a tokenizer\.json"):
        open_encoder(TokenizerFiles("hf", model=broken))
    with pytest.raises(ConfigError, match=r"--merge-file: missing; the gpt2 tokenizer needs it"):
        open_encoder(TokenizerFiles("gpt2", vocab_file=broken))
    gone = TokenizerFiles("gpt2", vocab_file=broken, merge_file=tmp_path / "none.txt")
    with pytest.raises(CorpusError, match=r"none\.txt: no such file; gpt2 needs vocab\.json"):
        open_encoder(gone)
    with pytest.raises(CorpusError, match=r"none\.txt: cannot be read: No such file"):
        gone.fingerprint()
    with pytest.raises(CorpusError, match=r"not a BPE vocabulary"):
        open_encoder(TokenizerFiles("gpt2", vocab_file=broken, merge_file=broken))


def test_missing_libraries_are_named_with_their_extra(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("{}")
    for kind in ("tokenizers", "tiktoken"):
        monkeypatch.setitem(sys.modules, kind, None)
        files = TokenizerFiles("hf" if kind == "tokenizers" else kind, model=tmp_path)
        with pytest.raises(CorpusError, match=rf"pip install megatron-d3\[{kind}\]"):
            open_encoder(files)


def test_a_fingerprint_follows_content_and_options_not_paths(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"same")
    first, second = (TokenizerFiles("hf", model=tmp_path / name) for name in ("a", "b"))
    assert first.fingerprint() == second.fingerprint()
    assert TokenizerFiles("hf", model=tmp_path / "a", eod_token="x").fingerprint() not in (
        first.fingerprint(),
        TokenizerFiles("hf", vocab_file=tmp_path / "a", eod_token="x").fingerprint(),
    )
