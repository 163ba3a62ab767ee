"""Who may write a run directory: one life of one job, which says so and is seen to be alive.

A file lock ends with its process, but does not reach every node on every file system, and where a
node loses its network the scheduler starts the job again elsewhere while the old processes go on.
So each life that writes a plan owns a numbered file, and the highest number owns the plan:

    run/d3.lives/0001.json    job 4711, restart 0, on node1  (its time of change: the last renewal)
    run/d3.lives/0002.json    job 4711, restart 1, on node3  <- the owner

* A new life takes the next number by creating that file, which only one can.
* The owner touches its file six times a lease. Once it sees a higher number it stops: the write
  that follows is refused, and a thread ends a process that hangs in a collective.
* A life that could not renew for a whole lease takes the next number itself before it writes again,
  or learns that another has it.
* Who comes while the owner lives is refused, except the next start of the same job: the scheduler
  has given the old one up. It takes the number at once, and waits until the old life says that it
  has stopped, or its lease has run out one and a half times.

Clocks of the nodes need not agree: a file's age is measured against a file just written beside it.
What remains is a process that is stopped between its look at the lease and its write.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_d3.errors import PlanError
from megatron_d3.plan.files import explained, write_atomically
from megatron_d3.plan.life import Life

_RENEWALS = 6  # a lease
_PATIENCE = 1.5  # leases until a silent owner counts as dead
_RUNNING, _ENDED, _SUPERSEDED = "running", "ended", "superseded"


@dataclass(frozen=True)
class _Entry:
    """A file of `lives/`."""

    path: Path
    life: Life
    state: str
    renewed: float  # the file's time of change

    @property
    def number(self) -> int:
        return int(self.path.stem)

    def is_over(self) -> bool:
        """Whether this life will not write again."""
        if self.state != _RUNNING or self.life.is_known_dead():
            return True
        now = _now(self.path.parent, self.renewed)
        return now - self.renewed > _PATIENCE * self.life.seconds


class Lease:
    """The right to write a plan directory. :meth:`claim` makes one.

    Args:
        directory: the plan directory.
        life: this process.
        number: of its file.
    """

    def __init__(self, directory: Path, life: Life, number: int) -> None:
        self.directory = directory
        self.life = life
        self.number = number
        self._renewed = time.monotonic()
        self._lock = threading.Lock()
        self._state = _RUNNING
        self._is_over = threading.Event()

    @classmethod
    def claim(
        cls, directory: Path, life: Life, *, say: Callable[[str], None] = lambda text: None,
        poll_seconds: float = 0.2,
    ) -> Lease:
        """Become the writer of a plan directory, which need not exist yet.

        Args:
            directory: the plan directory.
            life: this process.
            say: hears what is waited for.
            poll_seconds: between two looks at a life that may still write.

        Raises:
            PlanError: another job writes the plan, or the directory cannot be written.
        """
        with explained(directory, "claim"):
            lives_of(directory).mkdir(parents=True, exist_ok=True)
        newest = cls._wait_for_the_dead(directory, life, say, poll_seconds)
        while True:
            number = newest.number + 1 if newest else 1
            if _create(directory, number, life):
                break
            newest = cls._wait_for_the_dead(directory, life, say, poll_seconds)
        lease = cls(directory, life, number)
        if newest is not None:
            lease._outlive(newest, say, poll_seconds)
        return lease

    @staticmethod
    def _wait_for_the_dead(
        directory: Path, life: Life, say: Callable[[str], None], poll_seconds: float
    ) -> _Entry | None:
        """Return the newest life once it is over, or to be fenced off; None if there is none."""
        first = newest = _newest(directory)
        while newest is not None and not newest.is_over() and not life.is_next_start_of(newest.life):
            assert first is not None
            if newest.renewed != first.renewed or newest.number != first.number:
                raise PlanError(
                    f"{directory}: {newest.life} writes this plan, and is alive; wait for that run "
                    "to end or stop it, or give this run another --save or --d3-plan-dir")
            if newest is first:
                say(f"d3 plan: {newest.life} wrote this plan and did not say that it stopped; "
                    "looking whether it is alive")
            time.sleep(poll_seconds)
            newest = _newest(directory)
        return newest

    def _outlive(self, old: _Entry, say: Callable[[str], None], poll_seconds: float) -> None:
        """Wait until the life before this one cannot write any more."""
        entry = old
        if not entry.is_over():
            say(f"d3 plan: waiting until {old.life} has stopped")
        while not entry.is_over():
            time.sleep(poll_seconds)
            self.require()
            entry = _read(old.path)
        if old.life.machine != self.life.machine:
            # A process of that node may hold the file lock for ever, or until it sees the new number.
            (self.directory / "lock").unlink(missing_ok=True)

    def require(self) -> None:
        """Return if this life may write now. Costs nothing between two renewals.

        Raises:
            PlanError: another life has taken over.
        """
        if time.monotonic() - self._renewed > self.life.seconds / 2:
            self.renew()

    def renew(self) -> None:
        """Look for a newer life, and say that this one is alive.

        Raises:
            PlanError: another life has taken over, or the directory cannot be written.
        """
        with self._lock, explained(self.directory, "renew the lease of"):
            if self._state == _ENDED:  # while the thread was about to look
                return
            asked = time.monotonic()
            self._refuse_if_superseded()
            if asked - self._renewed > self.life.seconds:
                # Too late: others may count this life as dead. Whoever creates the file has it.
                if not _create(self.directory, self.number + 1, self.life):
                    self._refuse_if_superseded()
                self.number += 1
            else:
                os.utime(_path(self.directory, self.number))
            self._renewed = asked

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Renew the lease in a thread, also while the process hangs in a collective.

        Args:
            on_lost: is called with the reason in that thread once another life has taken over. It
                must end the process.
        """
        _every(self.life.seconds / _RENEWALS, self.renew, on_lost, until=self._is_over)

    def release(self) -> None:
        """Say that this life will not write again. What cannot be written is left to run out."""
        with self._lock:
            if self._state == _RUNNING:
                self._end(_ENDED)

    def _end(self, state: str) -> None:
        self._state = state
        self._is_over.set()
        with contextlib.suppress(PlanError):
            write_atomically(_path(self.directory, self.number), _text(self.life, state))

    def _refuse_if_superseded(self) -> None:
        newest = _newest(self.directory)
        if newest is not None and newest.number > self.number:
            self._end(_SUPERSEDED)
            raise PlanError(f"{self.directory}: {newest.life} has taken over this plan; this life, "
                            f"{self.life}, stops without writing")


def watch(directory: Path, owner: Life, on_lost: Callable[[str], None]) -> None:
    """Look in a thread whether a newer life has taken over; for one rank of each other node.

    Args:
        directory: the plan directory. Where this node does not see it, nothing is looked for.
        owner: the life that this process belongs to.
        on_lost: as in :meth:`Lease.watch`.
    """
    is_over = threading.Event()

    def look() -> None:
        entries = _entries(directory)
        # NOTE: the owner moves on to the next number by itself where a renewal came too late.
        if not entries or entries[-1].life == owner:
            return
        if any(entry.life == owner and entry.state == _ENDED for entry in entries):
            is_over.set()  # the run ended in good order; so will this process
            return
        raise PlanError(f"{directory}: {entries[-1].life} has taken over this plan; what "
                        f"{owner} runs on {socket.gethostname()} stops")

    if lives_of(directory).is_dir():
        _every(owner.seconds / _RENEWALS, look, on_lost, until=is_over)


def _every(
    seconds: float, look: Callable[[], None], on_lost: Callable[[str], None],
    *, until: threading.Event,
) -> None:
    def run() -> None:
        while not until.wait(seconds):
            try:
                look()
            except PlanError as error:
                # A disk that cannot be written: the training's next write will say so.
                if not isinstance(error.__cause__, OSError):
                    on_lost(str(error))
                    return

    threading.Thread(target=run, name="d3-lease", daemon=True).start()


def lives_of(directory: Path) -> Path:
    """Return the folder of a plan's lives: beside the plan, which may be copied there whole."""
    return directory.with_name(f"{directory.name}.lives")


def _path(directory: Path, number: int) -> Path:
    return lives_of(directory) / f"{number:04d}.json"


def _text(life: Life, state: str) -> bytes:
    return json.dumps({"version": 1, "state": state, **asdict(life)}).encode() + b"\n"


def _create(directory: Path, number: int, life: Life) -> bool:
    """Create a life's file; False if another life has done so."""
    aside = lives_of(directory) / f"{life.host}-{life.pid}.tmp"
    path = _path(directory, number)
    with explained(directory, "claim"):
        with open(aside, "wb") as file:
            file.write(_text(life, _RUNNING))
            file.flush()
            os.fsync(file.fileno())  # after a power failure it must still say who it was
        try:
            os.link(aside, path)  # whole, or not at all; also on NFS
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
                raise
            with contextlib.suppress(FileExistsError), open(path, "xb") as file:
                file.write(_text(life, _RUNNING))  # a file system without links
                return True
            return False
        finally:
            aside.unlink()
    return True


def _newest(directory: Path) -> _Entry | None:
    numbers = _numbers(directory)
    return _read(_path(directory, numbers[-1])) if numbers else None


def _entries(directory: Path) -> list[_Entry]:
    return [_read(_path(directory, number)) for number in _numbers(directory)]


def _numbers(directory: Path) -> list[int]:
    with explained(directory, "read the lives of"):
        names = os.listdir(lives_of(directory))
    return sorted(int(name[:-5]) for name in names if name.endswith(".json"))


def _read(path: Path) -> _Entry:
    with explained(path, "read"):
        text = path.read_bytes()
        renewed = path.stat().st_mtime
    try:
        content = json.loads(text)
        state, restart = content["state"], tuple(content["restart"])
        fields = {name: content[name] for name in Life.__dataclass_fields__}
    except (ValueError, KeyError, TypeError) as error:
        raise PlanError(f"{path}: does not say who writes this plan ({error}); if no run does, "
                        "remove it") from error
    return _Entry(path, Life(**fields | {"restart": restart}), state, renewed)


def _now(folder: Path, default: float) -> float:
    """Return the time by the clock that stamps the files in this folder."""
    probe = folder / f"{socket.gethostname()}-{os.getpid()}-{threading.get_ident()}.now"
    try:
        probe.write_bytes(b"")
        now = probe.stat().st_mtime
        probe.unlink()
    except OSError:  # full or read-only: nobody is judged dead, and nobody can take over
        return default
    return now
