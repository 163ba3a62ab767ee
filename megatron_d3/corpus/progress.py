"""How far a long job is: a bar on a terminal, a line a minute elsewhere, always on stderr."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import TextIO

_BAR_SECONDS = 0.2
_LINE_SECONDS = 60.0
_WIDTH = 24


class Progress:
    """Counts bytes of input and tokens, and shows them now and then.

    Args:
        total_bytes: of the input.
        label: first word of every line.
        is_silent: show nothing.
        stream: default stderr.
        clock: seconds; for tests.
    """

    def __init__(
        self,
        total_bytes: int,
        *,
        label: str,
        is_silent: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_bytes = total_bytes
        self.done_bytes = 0
        self.num_tokens = 0
        self._label = label
        self._is_silent = is_silent
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._clock = clock
        self._start = self._shown = self._now()

    def add(self, num_bytes: int, num_tokens: int) -> None:
        """Count work done, and show it if it is time."""
        self.done_bytes += num_bytes
        self.num_tokens += num_tokens
        every = _BAR_SECONDS if self._is_terminal else _LINE_SECONDS
        if self._now() - self._shown >= every:
            self._show()

    def close(self) -> None:
        """Leave the terminal on a new line."""
        if self._is_terminal and not self._is_silent:
            self._show()
            self._stream.write("\n")
            self._stream.flush()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return self._now() - self._start

    def line(self) -> str:
        """Return the state in one line."""
        share = min(self.done_bytes / self.total_bytes, 1.0) if self.total_bytes else 1.0
        seconds = max(self.seconds, 1e-9)
        left = seconds / share - seconds if share else float("nan")
        return (
            f"{self._label} {share:4.0%} | {self.done_bytes / 1e9:.2f} of "
            f"{self.total_bytes / 1e9:.2f} GB | {self.num_tokens:,} tokens | "
            f"{self.num_tokens / seconds:,.0f} tokens/s | {_clock(left)} left"
        )

    def _show(self) -> None:
        self._shown = self._now()
        if self._is_silent:
            return
        if self._is_terminal:
            share = min(self.done_bytes / self.total_bytes, 1.0) if self.total_bytes else 1.0
            bar = "#" * round(share * _WIDTH)
            self._stream.write(f"\r[{bar:<{_WIDTH}}] {self.line()}\x1b[K")
        else:
            self._stream.write(self.line() + "\n")
        self._stream.flush()

    def _now(self) -> float:
        return self._clock()


def _clock(seconds: float) -> str:
    if math.isnan(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
