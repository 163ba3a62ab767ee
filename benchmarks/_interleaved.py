"""Times the steps of several runs in turns: one step of the first, one of the second, and so on.

All runs live at once, in processes of one thread, but only the one that holds the token trains. So
whatever slows the machine down slows the neighbouring steps of all runs, and ratios of neighbours
mean something where times do not. Where processes stand in memory also matters, by a per cent or
so: :func:`measure` is called several times, with fresh processes and another order.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import _forked

WARM_UP = 5  # steps that are left out


@dataclass(frozen=True, eq=False)
class Steps:
    """Seconds of each step of a run, (n,) each.

    Attributes:
        wall: by the clock.
        processor: of all threads.
        hooks: of `processor`, spent in Megatron-D3's hooks before and after the step.
    """

    wall: np.ndarray
    processor: np.ndarray
    hooks: np.ndarray

    @classmethod
    def joined(cls, parts: Sequence[Steps]) -> Steps:
        return cls(*(np.concatenate([getattr(part, name) for part in parts])
                     for name in ("wall", "processor", "hooks")))


def measure(
    runs: Mapping[str, Sequence[str]], folder: Path, *, num_steps: int
) -> dict[str, Steps]:
    """Train all runs step by step in turns.

    Args:
        runs: flags of `megatron_d3.pretrain` by name, without the number of steps.
        folder: to make; logs and clocks.
        num_steps: that are measured, after the warm-up.

    Returns:
        The steps of each run after the warm-up.
    """
    folder.mkdir()
    pipes = [os.pipe() for _ in runs]
    pids = []
    count = num_steps + WARM_UP + 1  # the first step ends without having begun with the token
    for i, flags in enumerate(runs.values()):
        clock = _Clock(folder / f"{i}.npy", pipes[i][0], pipes[(i + 1) % len(pipes)][1], count - 1)
        pids.append(_forked.start(
            [*flags, "--train-iters", str(count)], log=folder / "log", setup=clock.install))
    os.write(pipes[0][1], b"x")
    _forked.wait(pids, log=folder / "log")
    for ends in pipes:
        for end in ends:
            os.close(end)
    return {name: Steps(*np.load(folder / f"{i}.npy")[WARM_UP:].T) for i, name in enumerate(runs)}


class _Clock:
    """In a run's process: waits for the token before each step, and passes it on after it."""

    def __init__(self, path: Path, receive: int, send: int, num_rows: int) -> None:
        self._path, self._receive, self._send, self._num_rows = path, receive, send, num_rows
        self._rows: list[tuple[float, float, float]] = []
        self._in_hooks = 0.0
        self._started: tuple[float, float] | None = None

    def install(self) -> None:
        """Wrap the hooks, and Megatron's log function, with which a step ends."""
        from megatron.training import training

        from megatron_d3.mcore import step_hook

        stock_install, stock_log = step_hook.install, training.training_log

        def install(hook: Any) -> None:
            for name in ("before_step", "after_step"):
                setattr(hook, name, self._timed(getattr(hook, name)))
            stock_install(hook)

        @functools.wraps(stock_log)
        def training_log(*args: Any, **kwargs: Any) -> Any:
            result = stock_log(*args, **kwargs)
            self._turn()
            return result

        step_hook.install, training.training_log = install, training_log  # type: ignore[assignment]

    def _turn(self) -> None:
        if self._started is not None:  # the first step holds no token yet
            wall, processor = time.perf_counter(), time.process_time()
            self._rows.append((
                wall - self._started[0], processor - self._started[1], self._in_hooks))
            np.save(self._path, np.array(self._rows))
            os.write(self._send, b"x")
        if len(self._rows) == self._num_rows:
            return
        os.read(self._receive, 1)
        self._in_hooks = 0.0
        self._started = (time.perf_counter(), time.process_time())

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            result = function(*args, **kwargs)
            self._in_hooks += time.thread_time() - start
            return result

        return timed


def ratio(steps: Steps, base: Steps, of: str) -> tuple[float, float, float]:
    """Return the median ratio of neighbouring steps, and the ends of its 95 % interval.

    The interval is that of the median's order statistics (a binomial of 1/2).
    """
    ratios = np.sort(getattr(steps, of) / getattr(base, of))
    count = len(ratios)
    reach = int(np.ceil(0.98 * np.sqrt(count)))  # 1.96 standard deviations of the rank
    low, high = max(0, count // 2 - reach), min(count - 1, count // 2 + reach)
    return float(np.median(ratios)), float(ratios[low]), float(ratios[high])


def shown(found: tuple[float, float, float], digits: int = 4) -> str:
    """Return a ratio with its interval as text."""
    median, low, high = found
    return f"{median:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"
