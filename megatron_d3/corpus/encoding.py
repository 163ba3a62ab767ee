"""Text to tokens: one chunk at a time, in this process or in a crew of them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache
from types import TracebackType
from typing import Self

import numpy as np

from megatron_d3.corpus.encoders import Encoder, TokenizerFiles, open_encoder
from megatron_d3.corpus.index import dtype_for_vocab
from megatron_d3.corpus.parts import Encoded, Tally
from megatron_d3.corpus.records import Keys, read_rows
from megatron_d3.corpus.sources import Chunk
from megatron_d3.errors import ConfigError, CorpusError

_IN_FLIGHT = 4  # chunks a worker: one being done, the others hide the time of the pipes


@dataclass(frozen=True)
class Settings:
    """What decides the bytes of the corpus, besides the text.

    Attributes:
        tokenizer: its files.
        keys: of text and scores.
        is_appending_eod: end every document that has tokens with the tokenizer's end of document.
        on_error: "fail" at the first row that is no document, or "skip" it and list it.
        empty: "keep" a document without tokens, as Megatron does, or "skip" it.
    """

    tokenizer: TokenizerFiles
    keys: Keys
    is_appending_eod: bool = False
    on_error: str = "fail"
    empty: str = "keep"


def open_settings(settings: Settings) -> Encoder:
    """Open the tokenizer and check the settings against it.

    Raises:
        ConfigError: an end of document is wanted and the tokenizer has none.
        CorpusError: as `open_encoder`.
    """
    encoder = open_encoder(settings.tokenizer)
    if settings.is_appending_eod and encoder.eod_id is None:
        raise ConfigError(
            "--append-eod: the tokenizer names no end of document; give --eod-token TOKEN"
        )
    return encoder


class Worker:
    """Turns chunks into tokens."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._encoder = open_settings(settings)
        self._dtype = dtype_for_vocab(self._encoder.vocab_size)
        self._typecode = "H" if self._dtype.itemsize == 2 else "i"
        self._nothing = np.empty(0, self._dtype)
        self._eod: np.ndarray | None = None
        if settings.is_appending_eod:
            self._eod = np.array([self._encoder.eod_id], self._dtype)

    def __call__(self, chunk: Chunk) -> Encoded:
        """Return the documents of a chunk as tokens.

        Raises:
            CorpusError: a token that the dtype of the vocabulary does not hold.
        """
        rows = read_rows(chunk, self._settings.keys)
        pieces = iter(self._encoder.encode([text for texts in rows.texts for text in texts]))
        tokens: list[np.ndarray] = []
        lengths, counts = array("i"), array("i")
        tally = Tally(num_bytes=rows.num_bytes, num_blank=rows.num_blank, problems=rows.problems)
        scores: list[tuple[float, ...]] = []
        for texts, score in zip(rows.texts, rows.scores, strict=True):
            before = len(lengths)
            for _ in texts:
                if len(piece := next(pieces)):
                    tokens.append(self._array(piece, chunk))
                    lengths.append(len(piece))
            if len(lengths) == before:
                tally.num_empty += 1
                if self._settings.empty == "skip":
                    continue
            elif self._eod is not None:
                tokens.append(self._eod)
                lengths[-1] += 1
            counts.append(len(lengths) - before)
            scores.append(score)
        tally.num_documents, tally.num_sequences = len(counts), len(lengths)
        tally.num_tokens = sum(lengths)
        tally.num_rows[chunk.span] = chunk.data.count(b"\n")
        return Encoded(
            tokens=np.concatenate([self._nothing, *tokens]).astype(self._dtype, copy=False),
            lengths=np.array(lengths, "<i4"),
            counts=np.array(counts, "<i4"),
            scores=np.array(scores, "<f8").reshape(len(scores), len(self._settings.keys.scores)),
            tally=tally,
        )

    def _array(self, piece: list[int] | np.ndarray, chunk: Chunk) -> np.ndarray:
        """Return the tokens of a text as an array, not necessarily of the corpus's dtype."""
        if isinstance(piece, np.ndarray):
            return piece
        try:
            # `array` takes a list of ints in a third of the time NumPy needs, and checks its range.
            return np.frombuffer(array(self._typecode, piece), self._dtype)
        except OverflowError as error:
            raise CorpusError(
                f"{chunk.path}: the tokenizer gives token {max(piece):,}, but its vocabulary of "
                f"{self._encoder.vocab_size:,} is stored as {self._dtype.name}; "
                "the tokenizer contradicts itself"
            ) from error


class Crew:
    """A context manager: worker processes, or this process where one is enough."""

    def __init__(self, settings: Settings, workers: int) -> None:
        self._settings = settings
        self._workers = workers
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        if self._workers > 1:
            # NOTE: not forked: the libraries of tokenizers have threads, and so has MPI.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._workers, context, initializer=_start_worker)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def encode(
        self, stream: Iterable[Chunk | None]
    ) -> Iterator[tuple[Chunk | None, Encoded | None]]:
        """Yield every chunk with its tokens, in order; None passes through.

        Raises:
            CorpusError: a worker was killed, or as `Worker`.
        """
        if self._pool is None:
            worker = Worker(self._settings)
            for chunk in stream:
                yield chunk, None if chunk is None else worker(chunk)
            return
        waiting: deque[tuple[Chunk | None, Future[Encoded] | None]] = deque()
        num_waiting = 0
        try:
            for chunk in stream:
                future = None
                if chunk is not None:
                    future = self._pool.submit(_encode, self._settings, chunk)
                    num_waiting += 1
                waiting.append((chunk, future))
                while waiting and (num_waiting >= _IN_FLIGHT * self._workers or not waiting[0][1]):
                    chunk, future = waiting.popleft()
                    num_waiting -= future is not None
                    yield chunk, None if future is None else future.result()
            for chunk, future in waiting:
                yield chunk, None if future is None else future.result()
        except BrokenProcessPool as error:
            raise CorpusError(
                "a worker process was killed; where memory is short, give fewer --workers; shards "
                "that are done are kept, run the same command again"
            ) from error


@lru_cache(maxsize=1)
def _worker(settings: Settings) -> Worker:
    return Worker(settings)


def _encode(settings: Settings, chunk: Chunk) -> Encoded:
    return _worker(settings)(chunk)


def _start_worker() -> None:
    """Leave Ctrl-C to the parent, and end with it however it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
