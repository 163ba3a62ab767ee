"""Write the tokens of a new order with the help of other ranks, each a stretch of the same file.

rank 0                       others
  ranks the documents          wait in `help`
  creates the file, hands out stretches of documents
  every rank sums up its bytes; all hear the sums, so each knows where its stretch begins
  every rank writes there and flushes
  raises the first failure     end

Rank 0 may be refused before it comes to this: `dismiss` sends the others home.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from megatron_d3.corpus.mpi import Ranks
from megatron_d3.corpus.rewrite import Source, num_tokens, tokens


class Copiers:
    """The ranks that copy together.

    Args:
        source: the documents, the same on every rank.
        ranks: the processes; more than one.

    Attributes:
        are_waiting: the others have nothing left to do but to wait in `help`.
    """

    def __init__(self, source: Source, ranks: Ranks) -> None:
        self._source = source
        self._ranks = ranks
        self.are_waiting = False

    @contextmanager
    def dismiss(self) -> Iterator[None]:
        """Let the others go at the end of this block on rank 0, if they are still waiting."""
        try:
            yield
        finally:
            if self.are_waiting:
                self._ranks.broadcast(None)

    def write(self, documents: np.ndarray, path: Path) -> None:
        """Write all tokens in the order of (M,) `documents` to `path`; on rank 0.

        Raises:
            OSError: the first that any rank met.
        """
        path.touch()
        size = self._ranks.size
        bounds = [len(documents) * number // size for number in range(size + 1)]
        self._ranks.broadcast(str(path))
        self.are_waiting = False
        parts = [documents[bounds[rank] : bounds[rank + 1]] for rank in range(size)]
        for error in self._stretch(self._ranks.scatter(parts), path):
            raise error

    def help(self) -> int:
        """Write what rank 0 hands out; on every other rank. Return the exit code."""
        path = self._ranks.broadcast(None)
        if path is None:
            return 1  # rank 0 says why
        return 1 if self._stretch(self._ranks.scatter(None), Path(path)) else 0

    def _stretch(self, documents: np.ndarray, path: Path) -> list[OSError]:
        """Write this rank's stretch; return the failures of all ranks."""
        itemsize = self._source.dtype.itemsize
        sizes = self._ranks.gather(num_tokens(self._source, documents) * itemsize)
        failure = None
        try:
            with open(path, "r+b") as file:
                file.seek(sum(sizes[: self._ranks.rank]))
                file.writelines(tokens(self._source, documents))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            failure = OSError(error.errno, error.strerror, str(path))
        return [error for error in self._ranks.gather(failure) if error is not None]
