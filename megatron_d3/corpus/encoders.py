"""Every tokenizer a Megatron run can name, behind `encode` and `decode`.

| kind | `--tokenizer-type` in Megatron | files |
|---|---|---|
| sentencepiece | SentencePieceTokenizer, GPTSentencePieceTokenizer, Llama2Tokenizer | a `.model` |
| hf | HuggingFaceTokenizer | a `tokenizer.json`, or the folder it is in |
| gpt2 | GPT2BPETokenizer | `vocab.json` and `merges.txt` |
| tiktoken | TikTokenizer | a `.json` of Megatron's, or a `.tiktoken` |
| bytes | (the library "byte-level") | none |

Token ids, vocabulary size and end-of-document id are those of Megatron's classes in
`megatron.core.tokenizers` with their default options, so that a corpus fits the run that names the
same tokenizer. Difference: the `hf` kind follows `tokenizer.json` alone; an `add_bos_token` in
`tokenizer_config.json` that contradicts it, or Python code of a model, is not carried out.
Libraries are imported when a tokenizer is opened.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import importlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatron_d3.corpus.tokenizer import Tokenizer
from megatron_d3.errors import ConfigError, CorpusError

KINDS: dict[str, tuple[str, ...]] = {
    "sentencepiece": ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"),
    "hf": ("HuggingFaceTokenizer",),
    "gpt2": ("GPT2BPETokenizer",),
    "tiktoken": ("TikTokenizer",),
    "bytes": (),
}
"""Kind of tokenizer -> Megatron's names for it."""

# The first special tokens of every tiktoken vocabulary in Megatron; "<SPECIAL_n>" fill the rest.
_TIKTOKEN_SPECIALS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
_TIKTOKEN_PATTERNS = {
    "v1": (r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"),
    "v2": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}


class Encoder(Protocol):
    """What every tokenizer offers.

    Attributes:
        vocab_size: number of ids; decides the dtype of the corpus.
        eod_id: end of document, or None where the tokenizer names none.
    """

    vocab_size: int
    eod_id: int | None

    def encode(self, texts: Sequence[str]) -> Sequence[list[int] | np.ndarray]:
        """Return the ids of each text, without end of document."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ids."""


@dataclass(frozen=True)
class TokenizerFiles:
    """A tokenizer by its kind and files: small, comparable, sent to worker processes.

    Attributes:
        kind: a key of `KINDS`.
        model: file of sentencepiece, hf and tiktoken.
        vocab_file: `vocab.json` of gpt2.
        merge_file: `merges.txt` of gpt2.
        eod_token: end of document by its text instead of the tokenizer's own; hf and gpt2.
        pattern: of tiktoken, "v1" or "v2".
        num_special_tokens: of tiktoken, ids before the first ordinary one.
        vocab_size: of tiktoken; further entries of the file are not used.
    """

    kind: str
    model: Path | None = None
    vocab_file: Path | None = None
    merge_file: Path | None = None
    eod_token: str | None = None
    pattern: str = "v2"
    num_special_tokens: int = 1000
    vocab_size: int = 131_072

    def fingerprint(self) -> str:
        """Return a hash of the files' contents and of the options, not of their paths."""
        options: tuple[object, ...] = (self.kind, self.eod_token)
        if self.kind == "tiktoken":
            options += (self.pattern, self.num_special_tokens, self.vocab_size)
        state = hashlib.blake2b(repr(options).encode(), digest_size=16)
        for path in (self.model, self.vocab_file, self.merge_file):
            state.update(b"\0" if path is None else _hash(_tokenizer_json(path)))
        return state.hexdigest()


def kind_of(name: str) -> str:
    """Return the kind for one of our names or Megatron's.

    Raises:
        ConfigError: neither.
    """
    for kind, names in KINDS.items():
        if name == kind or name in names:
            return kind
    known = ", ".join([*KINDS, *(name for names in KINDS.values() for name in names)])
    raise ConfigError(f"--tokenizer-type: got {name!r}, expected one of {known}")


def open_encoder(files: TokenizerFiles) -> Encoder:
    """Open a tokenizer.

    Raises:
        ConfigError: a file that its kind needs is not named.
        CorpusError: a file is missing or broken, or the library is not installed.
    """
    return _OPENERS[files.kind](files)


class _SentencePiece:
    def __init__(self, files: TokenizerFiles) -> None:
        self._tokenizer = Tokenizer(_required(files.model, "--tokenizer-model", files.kind))
        self.vocab_size = self._tokenizer.vocab_size
        self.eod_id = self._tokenizer.eod_id if self._tokenizer.eod_id >= 0 else None

    def encode(self, texts: Sequence[str]) -> Sequence[list[int] | np.ndarray]:
        return self._tokenizer.encode(texts, num_threads=1)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens)


class _HuggingFace:
    """Of `tokenizer.json`, or of GPT-2's two files, by the package `tokenizers`."""

    def __init__(self, tokenizer: Any, *, eod_token: str | None, where: Path) -> None:
        # Saved truncation or padding would change documents; transformers switches both off too.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self.eod_id: int | None = None
        if eod_token is not None:
            self.eod_id = tokenizer.token_to_id(eod_token)
            if self.eod_id is None:
                raise CorpusError(f"{where}: has no token {eod_token!r} to end documents with")

    def encode(self, texts: Sequence[str]) -> Sequence[list[int] | np.ndarray]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=True)
        return [encoding.ids for encoding in encodings]

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(map(int, tokens)), skip_special_tokens=False)
        return text


class _TikToken:
    def __init__(self, files: TokenizerFiles) -> None:
        tiktoken = _library("tiktoken", "tiktoken")
        path = _required(files.model, "--tokenizer-model", files.kind)
        if files.pattern not in _TIKTOKEN_PATTERNS:
            raise ConfigError(f"--tiktoken-pattern: got {files.pattern!r}, expected v1 or v2")
        first = files.num_special_tokens
        if not len(_TIKTOKEN_SPECIALS) <= first < files.vocab_size:
            raise ConfigError(
                f"--tiktoken-num-special-tokens: got {first}, expected "
                f"{len(_TIKTOKEN_SPECIALS)} or more and less than the vocabulary"
            )
        pieces = _tiktoken_pieces(path)[: files.vocab_size - first]
        if len(pieces) < files.vocab_size - first:
            raise CorpusError(
                f"{path}: {len(pieces):,} tokens and {first:,} special ones, expected "
                f"{files.vocab_size:,} together; give --vocab-size {len(pieces) + first}"
            )
        fillers = (f"<SPECIAL_{number}>" for number in range(len(_TIKTOKEN_SPECIALS), first))
        specials = {name: number for number, name in enumerate((*_TIKTOKEN_SPECIALS, *fillers))}
        self._encoding = tiktoken.Encoding(
            path.parent.name,
            pat_str=_TIKTOKEN_PATTERNS[files.pattern],
            mergeable_ranks={piece: first + rank for rank, piece in enumerate(pieces)},
            special_tokens=specials,
        )
        self.vocab_size = files.vocab_size
        self.eod_id: int | None = specials["</s>"]

    def encode(self, texts: Sequence[str]) -> Sequence[list[int] | np.ndarray]:
        return [self._encoding.encode(text, allowed_special="all") for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._encoding.decode(list(map(int, tokens)))
        return text


class _Bytes:
    """UTF-8 bytes as ids; Megatron's class has 512 ids and ends documents with 0."""

    vocab_size = 512
    eod_id: int | None = 0

    def __init__(self, files: TokenizerFiles) -> None:
        del files

    def encode(self, texts: Sequence[str]) -> Sequence[list[int] | np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


def _open_hf(files: TokenizerFiles) -> Encoder:
    path = _tokenizer_json(_required(files.model, "--tokenizer-model", files.kind))
    tokenizers = _library("tokenizers", "tokenizers")
    if not path.is_file():
        raise CorpusError(f"{path}: no such file; expected a tokenizer.json")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more exact
        raise CorpusError(f"{path}: not a tokenizer.json: {error}") from error
    return _HuggingFace(tokenizer, eod_token=files.eod_token or _eos_token(path), where=path)


def _open_gpt2(files: TokenizerFiles) -> Encoder:
    vocab = _required(files.vocab_file, "--vocab-file", files.kind)
    merges = _required(files.merge_file, "--merge-file", files.kind)
    tokenizers = _library("tokenizers", "tokenizers")
    for path in (vocab, merges):
        if not path.is_file():
            raise CorpusError(f"{path}: no such file; gpt2 needs vocab.json and merges.txt")
    try:
        model = tokenizers.models.BPE.from_file(str(vocab), str(merges))
    except Exception as error:  # the library raises nothing more exact
        raise CorpusError(f"{vocab}, {merges}: not a BPE vocabulary: {error}") from error
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    eod_token = files.eod_token or "<|endoftext|>"
    if tokenizer.token_to_id(eod_token) is not None:
        # As in GPT2TokenizerFast: in a text, the mark of an end is that one token.
        tokenizer.add_special_tokens([eod_token])
    return _HuggingFace(tokenizer, eod_token=eod_token, where=vocab)


def _tiktoken_pieces(path: Path) -> list[bytes]:
    """Read the byte strings of a vocabulary in the order of their ranks."""
    if not path.is_file():
        raise CorpusError(f"{path}: no such file; expected a tiktoken vocabulary")
    try:
        if path.suffix == ".json":
            entries = [
                (entry["rank"], entry["token_bytes"]) for entry in json.loads(path.read_bytes())
            ]
        else:
            lines = [line.split() for line in path.read_bytes().splitlines() if line]
            entries = [(int(rank), text) for text, rank in lines]
        pieces = [base64.b64decode(text, validate=True) for _, text in entries]
    except (ValueError, KeyError, TypeError, binascii.Error) as error:
        raise CorpusError(f"{path}: not a tiktoken vocabulary: {error!r}") from error
    if [rank for rank, _ in entries] != list(range(len(entries))):
        raise CorpusError(f"{path}: not a tiktoken vocabulary: ranks are not 0, 1, 2, ...")
    return pieces


def _eos_token(path: Path) -> str | None:
    """Return the end-of-sentence token that the files beside a tokenizer.json name."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        beside = path.with_name(name)
        if beside.is_file():
            try:
                token = json.loads(beside.read_bytes()).get("eos_token")
            except (ValueError, AttributeError) as error:
                raise CorpusError(f"{beside}: not a JSON object: {error}") from error
            if isinstance(token, dict):
                token = token.get("content")
            if isinstance(token, str):
                return token
    return None


def _tokenizer_json(path: Path) -> Path:
    return path / "tokenizer.json" if path.is_dir() else path


def _required(path: Path | None, flag: str, kind: str) -> Path:
    if path is None:
        raise ConfigError(f"{flag}: missing; the {kind} tokenizer needs it")
    return path


def _hash(path: Path) -> bytes:
    try:
        return hashlib.blake2b(path.read_bytes(), digest_size=16).digest()
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read: {error.strerror}") from error


def _library(name: str, extra: str) -> Any:
    # Workers are processes of one thread each; the library's own threads would be one too many.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CorpusError(
            f"this tokenizer needs the package {name}: pip install megatron-d3[{extra}]"
        ) from error


_OPENERS: dict[str, Any] = {
    "sentencepiece": _SentencePiece,
    "hf": _open_hf,
    "gpt2": _open_gpt2,
    "tiktoken": _TikToken,
    "bytes": _Bytes,
}
