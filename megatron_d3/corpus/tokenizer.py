"""A SentencePiece tokenizer: trained on given text, the same bytes every time, applied in batches.

Megatron reads the model with `--tokenizer-type SentencePieceTokenizer --tokenizer-model FILE` and
takes the model's end-of-sentence id, 2, as its end-of-document token; documents are written with
that token at their end, as `tools/preprocess_data.py --append-eod` does.

The model is byte-pair encoding with byte fallback and no normalisation, so that decoding gives the
text back, bar a literal U+2581, SentencePiece's own mark for a space. Special ids are LLaMA's:
unk 0, bos 1, eos 2, no padding. `sentencepiece` is imported when first needed.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_d3.corpus.index import dtype_for_vocab
from megatron_d3.corpus.writer import IndexWriter
from megatron_d3.errors import CorpusError

VERSION = 1
SPACE_MARK = "\u2581"
"""Decodes as a space: the one character that does not survive a round trip."""

# Of a line only so many characters are trained on: merges within a line cost more than linear time.
_MAX_LINE = 2000
# Printable ASCII has pieces of its own; of all other characters those that make up 99% of the text
# together with it, the rest is written in bytes: a table of scripts has more characters than pieces.
_REQUIRED = "".join(map(chr, range(0x21, 0x7F)))
_COVERAGE = 0.99
# Characters encoded at a time: keeps memory flat and gives every thread work.
_BATCH_CHARACTERS = 4_000_000


class Tokenizer:
    """A trained SentencePiece model.

    Args:
        model_path: the `.model` file.

    Raises:
        CorpusError: no `sentencepiece` installed, no such file, or not a model.
    """

    def __init__(self, model_path: str | Path) -> None:
        self.path = Path(model_path)
        if not self.path.is_file():
            raise CorpusError(f"{self.path}: no such file; expected a SentencePiece model")
        try:
            self._processor = _sentencepiece().SentencePieceProcessor(model_file=str(self.path))
        except (RuntimeError, OSError) as error:
            raise CorpusError(f"{self.path}: not a SentencePiece model: {error}") from error
        self.vocab_size: int = self._processor.get_piece_size()
        self.eod_id: int = self._processor.eos_id()

    @property
    def dtype(self) -> np.dtype:
        """Token dtype of a corpus of this vocabulary."""
        return dtype_for_vocab(self.vocab_size)

    def encode(self, texts: Sequence[str], *, num_threads: int = 2) -> list[np.ndarray]:
        """Return the tokens of each text, without end-of-document: (T_i,) of `dtype`."""
        # Lists of Python's integers, all that older versions give, cost a tenth of the time.
        how = {"return_type": "numpy"} if hasattr(self._processor, "EncodeAsNumpy") else {}
        ids = self._processor.encode(list(texts), num_threads=num_threads, **how)
        dtype = self.dtype
        return [np.asarray(part, dtype) for part in ids]

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Return the text of (T,) tokens; special tokens give nothing."""
        text: str = self._processor.decode([int(token) for token in tokens])
        return text

    def write_corpus(self, texts: Iterable[str], prefix: str | Path) -> int:
        """Write one document a text, each ended by `eod_id`; return the number of tokens.

        Raises:
            CorpusError: the corpus exists or cannot be written.
        """
        eod = np.array([self.eod_id], self.dtype)
        with IndexWriter(prefix, dtype=self.dtype) as writer:
            for batch in _batches(texts):
                for tokens in self.encode(batch):
                    writer.add_document(np.concatenate([tokens, eod]))
        return writer.num_tokens


def train_tokenizer(texts: Iterable[str], model_path: str | Path, *, vocab_size: int) -> Tokenizer:
    """Train a model on `texts` and save it; equal texts give an equal file.

    Args:
        texts: documents; newlines divide them into sentences, so none is ever inside a token.
        model_path: file to write; its folder must exist.
        vocab_size: pieces in all, among them 3 special ones, 256 bytes and every frequent
            character of the texts.

    Raises:
        CorpusError: no `sentencepiece` installed, a vocab_size too small or too large for the
            texts, or a file that cannot be written.
    """
    sentencepiece = _sentencepiece()
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            character_coverage=_COVERAGE,
            required_chars=_REQUIRED,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            shuffle_input_sentence=False,
            max_sentence_length=4 * _MAX_LINE,
            num_threads=1,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        raise CorpusError(
            f"tokenizer: vocab_size {vocab_size} cannot be trained on this text: {error}"
        ) from error
    path = Path(model_path)
    aside = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        with open(aside, "wb") as file:
            file.write(model.getvalue())
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise CorpusError(f"{path}: cannot be written: {error.strerror}") from error
    return Tokenizer(path)


def _sentencepiece() -> Any:
    try:
        import sentencepiece
    except ImportError as error:
        raise CorpusError(
            "the tokenizer needs the package sentencepiece: pip install sentencepiece"
        ) from error
    return sentencepiece


def _lines(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for line in text.split("\n"):
            if line:
                yield line[:_MAX_LINE]


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
