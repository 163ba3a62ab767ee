"""Make a set of files appear under their final names, all or none.

A corpus is several files that only mean something together (`.bin`, `.idx`, scores, provenance).
They are written under names of their own, flushed, and renamed with the `.idx` last: a `.bin`
without an `.idx` is recognised as unfinished by every reader. What stood there before is first
moved out of the way and removed only when the new files stand, so that a kill at any moment leaves
the old files intact, under their own names or with `.replaced-<pid>` appended, and never a `.bin`
beside the `.idx` of another.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from megatron_d3.corpus.index import suffixed
from megatron_d3.errors import CorpusError

COPY_BYTES = 1 << 24  # bytes copied at a time
_CHUNKS_AHEAD = 2  # written before they are hashed: bounds memory


class Publication:
    """A context manager; files written to `aside(...)` get their names when the block ends well.

    >>> with Publication(prefix, [".bin", ".idx"]) as new:  # doctest: +SKIP
    ...     new.link(".bin", other)
    ...     new.write(".idx", arrays)

    Args:
        prefix: path of all files without suffix.
        suffixes: every file that may be published, in order of appearance; the one that commits
            comes last.
        is_overwriting: replace existing files instead of refusing.

    Raises:
        CorpusError: a file exists already, a folder is missing, no permission, no space left.
    """

    def __init__(
        self, prefix: str | Path, suffixes: Sequence[str], *, is_overwriting: bool = False
    ) -> None:
        self.prefix = Path(prefix)
        self._suffixes = tuple(suffixes)
        self._is_overwriting = is_overwriting

    def __enter__(self) -> Self:
        self.refuse_existing()
        clear_up(self.prefix, self._suffixes)
        return self

    def refuse_existing(self) -> None:
        """Check, touching nothing, that the files may be written.

        Raises:
            CorpusError: one exists already, or the folder is missing.
        """
        if not self.prefix.parent.is_dir():
            raise CorpusError(f"{self.prefix.parent}: no such folder; create it first")
        for suffix in self._suffixes:
            path = self.final(suffix)
            if path.exists() and not self._is_overwriting:
                raise CorpusError(f"{path}: exists; choose another name or give --overwrite")

    def final(self, suffix: str) -> Path:
        """Return the name a file will have."""
        return suffixed(self.prefix, suffix)

    def aside(self, suffix: str) -> Path:
        """Return the name a file has until everything is written."""
        assert suffix in self._suffixes, suffix
        return aside(self.prefix, suffix)

    def write(self, suffix: str, chunks: Iterable[np.ndarray | bytes]) -> None:
        """Write bytes and C-contiguous arrays one after another and flush to disk."""
        with open(self.aside(suffix), "wb") as file:
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())

    def write_hashed(self, suffix: str, chunks: Iterable[np.ndarray | bytes]) -> str:
        """Write as `write` does; return BLAKE2b of it all, 16 bytes in hexadecimal.

        A thread computes it, since it takes as long as everything else.
        """
        state = hashlib.blake2b(digest_size=16)
        with ThreadPoolExecutor(1) as pool:
            self.write(suffix, _hashed(chunks, state.update, pool))
        return state.hexdigest()

    def link(self, suffix: str, source: Path) -> None:
        """Give the file `source` a second name (a hard link): no bytes are copied.

        Raises:
            CorpusError: `source` is on another file system, or its file system has no hard links.
        """
        try:
            os.link(os.path.realpath(source), self.aside(suffix))
        except OSError as error:
            if error.errno in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
                raise CorpusError(
                    f"{self.final(suffix)}: cannot be linked to {source} ({error.strerror}); "
                    "give an output on the same file system, or --copy to write the tokens again"
                ) from error
            raise

    def concatenate(self, suffix: str, sources: Iterable[Path]) -> None:
        """Copy whole files one after another and flush to disk; O(1) memory."""
        self.write(suffix, _pieces(sources))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._publish()
        except OSError as problem:
            raise self._refusal(problem) from problem
        finally:
            for suffix in self._suffixes:
                self.aside(suffix).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise self._refusal(error) from error

    def _publish(self) -> None:
        # The committing file leaves first and arrives last.
        replaced = []
        for suffix in reversed(self._suffixes):
            path = self.final(suffix)
            if path.exists():
                old = suffixed(self.prefix, f"{suffix}.replaced-{os.getpid()}")
                os.replace(path, old)
                replaced.append(old)
        for suffix in self._suffixes:
            if self.aside(suffix).exists():
                os.replace(self.aside(suffix), self.final(suffix))
        flush_folder(self.prefix.parent)
        for old in replaced:
            old.unlink()

    def _refusal(self, error: OSError) -> CorpusError:
        hint = ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "; nothing was changed, free some space and run it again"
        where = error.filename or self.prefix
        return CorpusError(f"{where}: cannot be written: {error.strerror}{hint}")


def _hashed(
    chunks: Iterable[np.ndarray | bytes], update: Callable[..., None], pool: ThreadPoolExecutor
) -> Iterator[np.ndarray | bytes]:
    """Pass chunks on, and to `update` in the pool, few of them waiting at a time."""
    waiting: deque[Future[None]] = deque()
    for chunk in chunks:
        waiting.append(pool.submit(update, chunk))
        yield chunk
        if len(waiting) > _CHUNKS_AHEAD:
            waiting.popleft().result()
    for future in waiting:
        future.result()


def aside(prefix: Path, suffix: str) -> Path:
    """Return the name a file has while this process writes it; `clear_up` knows it."""
    return suffixed(prefix, f"{suffix}.tmp-{socket.gethostname()}-{os.getpid()}")


def clear_up(prefix: Path, suffixes: Sequence[str]) -> None:
    """Remove what dead processes of this host were writing; refuse what they had put aside.

    Raises:
        CorpusError: a killed run had moved an old file away to replace it.
    """
    here = [
        path
        for path in prefix.parent.iterdir()
        if ".tmp-" in path.name or ".replaced-" in path.name
    ]
    for suffix in suffixes:
        name = f"{prefix.name}{suffix}"
        start = f"{name}.tmp-{socket.gethostname()}-"
        for path in here:
            if path.name.startswith(start) and not _is_running(path.name[len(start) :]):
                path.unlink(missing_ok=True)
            if path.name.startswith(f"{name}.replaced-"):
                raise CorpusError(
                    f"{path}: put aside by a run that was killed while it replaced {name}; "
                    f"rename it back to {name}, or remove it"
                )


def _is_running(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        pass  # it runs, for another user
    return True


def flush_folder(folder: Path) -> None:
    """Flush the names in a folder, so that a rename survives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _pieces(sources: Iterable[Path]) -> Iterable[bytes]:
    for source in sources:
        with open(source, "rb") as file:
            while piece := file.read(COPY_BYTES):
                yield piece
