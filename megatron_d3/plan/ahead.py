"""The target weights of positions that were decided before a resume and are yet to be trained on.

A resumed run is handed the state after the last round; a step that an earlier round decided needs
that round's weights: for the log, and as part of a loss (DoReMi, `variant: official`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_d3.plan.reader import ROUNDS
from megatron_d3.plan.rows import RoundRow, parsed

_BLOCK_BYTES = 1 << 16


@dataclass(frozen=True, eq=False)
class Target:
    """What the positions [start, stop) were asked to be: (K,) weights."""

    start: int
    stop: int
    weights: np.ndarray


def targets_ahead(
    directory: Path, names: Sequence[str], *, consumed: int, frontier: int
) -> list[Target]:
    """Read the rounds that hold the positions [consumed, frontier), from the end of the file.

    Args:
        directory: the plan directory.
        names: domains, in the order of the weights.
        consumed: first position to be trained on.
        frontier: first position not decided.

    Returns:
        In order of positions; empty where nothing is decided ahead.

    Raises:
        PlanError: a row is damaged.
    """
    targets: list[Target] = []
    waiting: list[tuple[int, int]] = []  # (start, stop) of rounds whose weights an earlier row has
    lowest = frontier
    for line in _lines_backward(directory / ROUNDS) if consumed < frontier else ():
        has_weights = b'"weights"' in line
        if lowest <= consumed and not has_weights:
            continue
        row = parsed(directory / ROUNDS, line, RoundRow)
        if row.start >= frontier:
            continue
        if lowest > consumed:
            waiting.append((row.start, min(row.stop, frontier)))
            lowest = row.start
        if row.weights is not None:
            weights = np.array([row.weights[name] for name in names], np.float64)
            targets += [Target(start, stop, weights) for start, stop in waiting]
            waiting = []
            if lowest <= consumed:
                break
    return targets[::-1]


def _lines_backward(path: Path) -> Iterator[bytes]:
    """Yield the complete lines of a file, the last one first."""
    with open(path, "rb") as file:
        start, tail = file.seek(0, 2), b""
        is_end = True
        while start > 0:
            size = min(_BLOCK_BYTES, start)
            start -= size
            file.seek(start)
            lines = (file.read(size) + tail).split(b"\n")
            tail = lines.pop(0)  # complete only with the block before
            if is_end and lines:
                lines.pop()  # nothing, or a line that was torn
                is_end = False
            yield from reversed(lines)
        if not is_end and tail:
            yield tail
