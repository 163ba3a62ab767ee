"""Losses of every domain over training steps, from a CSV or from a run's ledger."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_d3.errors import ConfigError
from megatron_d3.fields import did_you_mean
from megatron_d3.plan.reader import PlanReader

STEP = "step"


@dataclass(frozen=True)
class LossTable:
    """Losses where they were measured.

    Attributes:
        steps: (T,) int64, 1-based training steps, rising.
        losses: (T, K) float64, nats per token; NaN where a domain has none, but not everywhere.
    """

    steps: np.ndarray
    losses: np.ndarray

    def until(self, num_steps: int) -> np.ndarray:
        """Return (num_steps, K) losses of the steps 1 to `num_steps`.

        Between two that were measured they lie on a straight line, outside they stay.
        """
        wanted = np.arange(1, num_steps + 1)
        columns = []
        for losses in self.losses.T:
            known = np.isfinite(losses)
            columns.append(np.interp(wanted, self.steps[known], losses[known]))
        return np.stack(columns, axis=1)


def read_losses(path: Path, names: Sequence[str]) -> LossTable:
    """Read a CSV: a column `step` (1-based), and one of losses a domain; cells may be empty.

    Args:
        path: of the file.
        names: (K,) domains in order.

    Raises:
        ConfigError: naming the file and line: no such file, other columns, a cell that is no
            number, steps that do not rise, or a domain without a loss.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give a CSV of losses or a run") from error
    header = [cell.strip() for cell in rows[0]] if rows else []
    _check_columns(path, header, names)
    steps: list[int] = []
    losses = []
    for number, row in enumerate(rows[1:], start=2):
        if not row:
            continue
        if len(row) != len(header):
            raise ConfigError(f"{path}:{number}: got {len(row)} cells, expected {len(header)}")
        values = {name: _number(cell, f"{path}:{number}: {name}")
                  for name, cell in zip(header, row, strict=True)}
        step = values[STEP]
        if not (step >= 1 and step == int(step) and step > (steps[-1] if steps else 0)):
            raise ConfigError(f"{path}:{number}: got step {row[header.index(STEP)]!r}, expected "
                              "whole numbers that rise from 1")
        steps.append(int(step))
        losses.append([values[name] for name in names])
    return _checked(str(path), steps, losses, names)


def recorded_losses(reader: PlanReader, names: Sequence[str]) -> LossTable:
    """Return the training losses that a run's ledger holds; skipped steps are left out.

    Raises:
        ConfigError: a domain has none.
    """
    steps, losses = [], []
    for row, _, _ in reader.ledger():
        if row.is_skipped:
            continue
        means = {name: total / tokens for name, (total, tokens) in row.losses.items()
                 if total is not None}
        steps.append(row.iteration)
        losses.append([means.get(name, math.nan) for name in names])
    return _checked(str(reader.directory), steps, losses, names)


def _check_columns(path: Path, header: Sequence[str], names: Sequence[str]) -> None:
    known = [STEP, *names]
    for name in header:
        if name not in known:
            raise ConfigError(f"{path}: column {name!r} is no domain{did_you_mean(name, known)}")
    if len(set(header)) < len(header):
        raise ConfigError(f"{path}: a column is there twice")
    for name in known:
        if name not in header:
            raise ConfigError(f"{path}: no column {name}; expected {', '.join(known)}")


def _number(cell: str, where: str) -> float:
    if not cell.strip():
        return math.nan
    try:
        return float(cell)
    except ValueError:
        raise ConfigError(f"{where}: got {cell!r}, expected a number") from None


def _checked(
    where: str, steps: Sequence[int], losses: Sequence[Sequence[float]], names: Sequence[str]
) -> LossTable:
    table = LossTable(np.array(steps, np.int64), np.array(losses).reshape(-1, len(names)))
    for name, column in zip(names, table.losses.T, strict=True):
        if not np.isfinite(column).any():
            raise ConfigError(f"{where}: no loss of domain {name}")
    return table
