"""Writing so that a crash, a full disk or a second writer leaves nothing half-written behind."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_d3.errors import PlanError

_ADVICE = {
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "raise the quota or free some space there",
    errno.EFBIG: "raise the file size limit (ulimit -f)",
    errno.EACCES: "make it writable for the user that trains",
    errno.EPERM: "make it writable for the user that trains",
    errno.EROFS: "it is on a read-only file system",
    errno.ENOTDIR: "a part of the path is a file, not a directory",
}


@contextmanager
def explained(path: Path, doing: str) -> Iterator[None]:
    """Turn an `OSError` of the block into a `PlanError` that names the path and what to do.

    Args:
        path: the file or directory that the block works on.
        doing: what it does, e.g. "write".
    """
    try:
        yield
    except OSError as error:
        raise PlanError(
            f"{path}: cannot {doing} the plan: {error.strerror or error}; {advice_on(error)}, or put the plan "
            "elsewhere with --d3-plan-dir, and resume from the last checkpoint") from error


def advice_on(error: OSError) -> str:
    """Say in a few words what to do about a file that cannot be written."""
    return _ADVICE.get(error.errno or 0, "check the path")


def is_there(path: Path) -> bool:
    """Whether a file exists.

    Raises:
        PlanError: nobody can tell: a directory on the way is closed to this user.
    """
    with explained(path, "read"):
        return path.exists()


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file that is either the old one or the new one, whatever happens meanwhile.

    Raises:
        PlanError: the file cannot be written; nothing is left under `path` that was not there.
    """
    aside = path.with_name(f"{path.name}.tmp")
    with explained(path, "write"):
        try:
            with open(aside, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
        except OSError:
            aside.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make renames and new names in a directory durable."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class AppendFile:
    """A file that only grows, by whole records.

    Args:
        path: opened for appending, made if missing.

    Raises:
        PlanError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with explained(path, "open"):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self.size = os.fstat(self._fd).st_size

    def append(self, content: bytes | memoryview) -> None:
        """Append all of `content`, or nothing.

        Raises:
            PlanError: disk full, quota or file size limit exceeded, ...
        """
        before = self.size
        with explained(self.path, "write"):
            try:
                left = memoryview(content)
                while left:
                    left = left[os.write(self._fd, left):]
            except OSError:
                os.ftruncate(self._fd, before)
                raise
        self.size = before + len(content)

    def truncate(self, size: int) -> None:
        """Cut the file to `size` bytes. Copy the rest aside first."""
        with explained(self.path, "cut"):
            os.ftruncate(self._fd, size)
        self.size = size

    def sync(self) -> None:
        """Make everything appended so far durable."""
        with explained(self.path, "write"):
            os.fsync(self._fd)

    def close(self) -> None:
        """Close the file; further calls do nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def lock(directory: Path) -> int:
    """Claim a plan directory for this process until the file descriptor returned is closed.

    The lock ends with the process, however it ends, and is not inherited by its children: a run
    can be resumed at once while DataLoader workers of a killed one are still going.

    Raises:
        PlanError: another process writes to the plan.
    """
    path = directory / "lock"
    with explained(path, "open"):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Some network file systems have no locks (ENOLCK, ENOTSUP): the plan works without.
        if error.errno in (errno.EACCES, errno.EAGAIN):
            os.close(fd)
            raise PlanError(
                f"{directory}: another process is writing this plan; wait for that run to end or "
                "stop it, or give this run another --save or --d3-plan-dir") from error
    return fd
