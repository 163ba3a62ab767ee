"""`windows.jsonl` and `windows/*.npz`: what was measured in each window, and how its order came out.

    windows.jsonl  {"round":0,"iteration":0,"step":0,"num_units":60,"cost":{"found":0.31,"row_sum":0.34,
                    "stored":1.02},"curl":0.4,"reliability":0.9,"expected_agreement":0.97,"reason":null,
                    "seconds":{...},"hash":"..."}
    windows/00000000.npz   S, the order, losses, ... of the window whose first round is 0

A replay needs none of it: the order itself is in `rounds.jsonl`.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from megatron_d3.errors import PlanError
from megatron_d3.plan.files import explained, write_atomically
from megatron_d3.plan.rows import iter_lines, parsed

WINDOWS, ARRAYS = "windows.jsonl", "windows"

_MEANS = ("curl", "reliability", "expected_agreement")


@dataclass(frozen=True)
class WindowRow:
    """A line of `windows.jsonl`.

    Attributes:
        round: the window's first round.
        iteration: training steps done when it was decided.
        step: 0-based training step of its first slot.
        num_units: units that were ordered.
        cost: cost of an order relative to that of a random one, by the order's name: `found`,
            `row_sum`, `stored`, ...; None where it is not finite, empty where none was measured.
        curl: share of S that no sorting by one number a unit explains; None if not measured.
        reliability: correlation of two halves' S; None if not measured.
        expected_agreement: correlation to expect of S with that of all sequences of the units; None
            if not measured, and in rows written before there was one.
        reason: why the window kept the stored order; None if it did not.
        seconds: time taken, by part.
        details: anything else worth keeping, JSON-able.
    """

    round: int
    iteration: int
    step: int
    num_units: int
    cost: Mapping[str, float | None] = field(default_factory=dict)
    curl: float | None = None
    reliability: float | None = None
    expected_agreement: float | None = None
    reason: str | None = None
    seconds: Mapping[str, float | None] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_body(self) -> bytes:
        """Return the row's JSON without the hash; numbers that are not finite become null."""
        return json.dumps(_finite(asdict(self)), separators=(",", ":"), allow_nan=False).encode()

    @classmethod
    def from_line(cls, line: bytes) -> WindowRow:
        """Read a line."""
        row = json.loads(line)
        row.pop("hash", None)
        return cls(**row)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_windows(directory: Path) -> Iterator[tuple[WindowRow, int, bytes]]:
    """Yield the windows of a plan in order, each with the end of its line, and the line.

    Raises:
        PlanError: a line is damaged.
    """
    path = directory / WINDOWS
    for line, end in iter_lines(path):
        yield parsed(path, line, WindowRow), end, line


@dataclass(frozen=True)
class WindowsUse:
    """The windows of a plan in numbers.

    Attributes:
        num_windows: rows of `windows.jsonl`.
        num_stored: those that kept the stored order, for a reason that their row gives.
        cost: mean cost by the order's name, over the windows that have it.
        curl: mean curl; None if none was measured.
        reliability: mean reliability; None if none was measured.
        expected_agreement: its mean; None if none was measured.
    """

    num_windows: int
    num_stored: int
    cost: Mapping[str, float]
    curl: float | None
    reliability: float | None
    expected_agreement: float | None


def summarise_windows(directory: Path) -> WindowsUse | None:
    """Return the means over all windows of a plan; None if it has none.

    Raises:
        PlanError: a line is damaged.
    """
    num_windows = num_stored = 0
    sums: dict[str, tuple[float, int]] = {}  # (sum, count) by name
    for row, _, _ in read_windows(directory):
        num_windows += 1
        num_stored += row.reason is not None
        values = {f"cost {name}": cost for name, cost in row.cost.items()}
        values |= {name: getattr(row, name) for name in _MEANS}
        for name, value in values.items():
            if value is not None:
                total, count = sums.get(name, (0.0, 0))
                sums[name] = total + value, count + 1
    if num_windows == 0:
        return None
    means = {name: total / count for name, (total, count) in sums.items()}
    cost = {name.removeprefix("cost "): mean for name, mean in means.items()
            if name.startswith("cost ")}
    return WindowsUse(num_windows, num_stored, cost, *(means.get(name) for name in _MEANS))


def arrays_path(directory: Path, round_number: int) -> Path:
    """Return the file of the arrays of the window that begins with a round."""
    return directory / ARRAYS / f"{round_number:08d}.npz"


def write_arrays(directory: Path, round_number: int, arrays: Mapping[str, np.ndarray]) -> Path:
    """Store a window's arrays.

    Raises:
        PlanError: they cannot be written.
    """
    content = io.BytesIO()
    np.savez(content, allow_pickle=False, **arrays)
    path = arrays_path(directory, round_number)
    with explained(path.parent, "make"):
        path.parent.mkdir(exist_ok=True)
    write_atomically(path, content.getvalue())
    return path


def read_arrays(directory: Path, round_number: int) -> dict[str, np.ndarray]:
    """Return the arrays of the window that begins with a round.

    Raises:
        PlanError: there are none, or they cannot be read.
    """
    path = arrays_path(directory, round_number)
    try:
        with np.load(path, allow_pickle=False) as file:
            return dict(file)
    except FileNotFoundError as error:
        known = [int(other.stem) for other in stored_arrays(directory)]
        near = min(known, key=lambda other: abs(other - round_number), default=None)
        raise PlanError(f"{path}: no window with arrays begins with round {round_number}" + (
            "; the plan has none" if near is None else f", the nearest with {near}")) from error
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise PlanError(f"{path}: cannot be read ({error}); move it away, training does not need "
                        "it") from error


def stored_arrays(directory: Path) -> list[Path]:
    """Return the files of all windows' arrays, in the order of rounds."""
    return sorted((directory / ARRAYS).glob("[0-9]*.npz"))


def kept(directory: Path, *, iteration: int, num_rounds: int) -> tuple[int, tuple[Path, ...]]:
    """Return what a checkpoint has seen: bytes of `windows.jsonl`, and the arrays it has not seen.

    Args:
        directory: the plan directory.
        iteration: training steps done at the checkpoint.
        num_rounds: rounds decided before it.

    Raises:
        PlanError: a line is damaged.
    """
    end = 0
    for row, offset, _ in read_windows(directory):
        if row.iteration >= iteration:
            break
        end = offset
    stale = [path for path in stored_arrays(directory) if int(path.stem) >= num_rounds]
    return end, tuple(stale)
