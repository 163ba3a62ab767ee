"""How far a run is, read from its plan: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import TextIO

from megatron_d3.errors import PlanError
from megatron_d3.plan.reader import PLAN, PlanReader
from megatron_d3.plan.summary import last_step

_LINE_SECONDS = 15.0  # between two lines where nobody watches a bar
_NUM_AVERAGED = 10  # newest steps seen that the loss shown is the mean of
_BAR_WIDTH = 24


class Progress:
    """Follows one run.

    Args:
        name: of the run, printed first.
        directory: its plan directory; need not exist yet.
        stream: where to; a bar if it is a terminal.
    """

    def __init__(self, name: str, directory: Path, stream: TextIO) -> None:
        self._name = name
        self._directory = directory
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._num_steps = 0
        self._iteration: int | None = None  # of the newest row
        self._first: tuple[int, float] | None = None  # first step of ours, and when it was seen
        self._losses: deque[tuple[float, int]] = deque(maxlen=_NUM_AVERAGED)
        self._started_at = self._printed_at = time.monotonic()
        self._width = 0

    def poll(self) -> None:
        """Look at the plan and print if there is something new to say."""
        self._read()
        now = time.monotonic()
        if self._is_terminal:
            self._print(self._bar(now), end="")
        elif now - self._printed_at >= _LINE_SECONDS:
            self._printed_at = now
            self._print(self._line(now))

    def finish(self) -> None:
        """Print the last state for good."""
        self._read()
        now = time.monotonic()
        self._print(f"{self._line(now, is_last=True)}  took {_clock(now - self._started_at)}")

    def abandon(self) -> None:
        """Leave the line, so that a message can follow."""
        if self._is_terminal:
            print(file=self._stream, flush=True)

    def _read(self) -> None:
        if not (self._directory / PLAN).exists():
            return
        try:
            reader = PlanReader(self._directory)
            row = last_step(reader)
            self._num_steps = _num_steps(reader)
        except (PlanError, OSError):  # a resume is cutting it right now
            return
        iteration = 0 if row is None else row.iteration
        if self._iteration is None or iteration < self._iteration:
            # What an earlier process trained: only steps beyond it are ours.
            self._iteration, self._first = iteration, None
            self._losses.clear()
        if row is None or iteration == self._iteration:
            return
        self._iteration = iteration
        self._first = self._first or (iteration, time.monotonic())
        sums = [total for total, _ in row.losses.values() if total is not None]
        tokens = [number for total, number in row.losses.values() if total is not None]
        self._losses.append((sum(sums), sum(tokens)))

    def _seconds_per_step(self, now: float) -> float | None:
        if self._first is None or self._iteration is None or self._iteration <= self._first[0]:
            return None
        return (now - self._first[1]) / (self._iteration - self._first[0])

    def _state(self, now: float, *, is_last: bool = False) -> str:
        if self._first is None and not is_last:
            return f"starting, {now - self._started_at:.0f} s"
        iteration = self._iteration or 0
        parts = [f"step {iteration:,}/{self._num_steps:,}"]
        tokens = sum(number for _, number in self._losses)
        if tokens:
            parts.append(f"loss {sum(total for total, _ in self._losses) / tokens:.3f}")
        pace = self._seconds_per_step(now)
        if pace is not None:
            parts.append(f"{pace:.2f} s/step")
            left = self._num_steps - iteration
            if left > 0 and not is_last:
                parts.append(f"{_clock(pace * left)} left")
            elif not is_last:
                parts.append("evaluating and saving")
        return "  ".join(parts)

    def _line(self, now: float, *, is_last: bool = False) -> str:
        return f"{self._name:<10}{self._state(now, is_last=is_last)}"

    def _bar(self, now: float) -> str:
        done = (self._iteration or 0) / self._num_steps if self._num_steps else 0.0
        filled = round(min(1.0, done) * _BAR_WIDTH)
        bar = "#" * filled + "-" * (_BAR_WIDTH - filled)
        return f"{self._name:<10}[{bar}] {self._state(now)}"

    def _print(self, text: str, end: str = "\n") -> None:
        if self._is_terminal:
            print("\r" + text.ljust(self._width), end=end, file=self._stream, flush=True)
            self._width = len(text)
        else:
            print(text, file=self._stream, flush=True)


def _num_steps(reader: PlanReader) -> int:
    """Return the steps of the whole run, by its settings."""
    header = reader.plan.generations[-1].header
    steps, position = 0, 0
    for index, (threshold, size) in enumerate(header.batch_schedule.steps):
        later = header.batch_schedule.steps[index + 1:]
        stop = min(later[0][0] if later else header.total_samples, header.total_samples)
        num = max(0, -(-(stop - max(position, threshold)) // size))
        steps, position = steps + num, max(position, threshold) + num * size
    return steps


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
