"""The rows of `rounds.jsonl`, `ledger.jsonl` and `evals.jsonl`: one line of JSON each.

Numbers round-trip exactly (`repr` of a float64) and the files are standard JSON: a loss that is not
finite is `null`. A line without its newline is torn: the process died while writing it.

    rounds.jsonl  {"round":0,"iteration":0,"step":0,"start":0,"stop":8,"weights":{"web":0.5,"code":0.5},"hash":"..."}
    ledger.jsonl  {"iteration":1,"consumed":4,"loss":{"web":[41.5,12]},"skipped":false,"hash":"..."}
    evals.jsonl   {"iteration":1,"split":"valid","loss":{"web":[41.5,12]},"hash":"..."}

With a reference model a row of the ledger also has `"excess":{"web":3.25}`; with windows a row of
a round has `"unit":7`.

The hash of a round is its segment's (`segment.chain_hash`); that of the other rows covers the text
of the row and the hash of the row before, so that a changed, missing or moved row shows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from megatron_d3.errors import PlanError
from megatron_d3.plan.segment import Segment
from megatron_d3.types import StepSignals

NO_HASH = "0" * 16


@dataclass(frozen=True)
class RoundRow:
    """A line of `rounds.jsonl`: the commit record of a segment.

    Attributes:
        round: number of the decision.
        iteration: training steps done when it was taken.
        step: 0-based step that consumes `start`.
        start: first position.
        stop: position after the last.
        weights: by domain name, where they differ from those of the round before.
        chain: hash over this and all earlier segments.
        unit: which unit of its window fills the positions; None without windows. The rounds of a
            window have the same `iteration`.
    """

    round: int
    iteration: int
    step: int
    start: int
    stop: int
    weights: Mapping[str, float] | None
    chain: int
    unit: int | None = None

    @classmethod
    def of(cls, segment: Segment, iteration: int, names: Sequence[str]) -> RoundRow:
        """Return the row of a segment that was decided at `iteration`."""
        weights = None
        if segment.has_new_weights:
            weights = dict(zip(names, segment.weights.tolist(), strict=True))
        return cls(segment.round, iteration, segment.step, segment.start, segment.stop, weights,
                   segment.chain, segment.unit)

    def to_line(self) -> bytes:
        """Return the line, newline included."""
        row: dict[str, Any] = {
            "round": self.round, "iteration": self.iteration, "step": self.step,
            "start": self.start, "stop": self.stop}
        if self.unit is not None:
            row["unit"] = self.unit
        if self.weights is not None:
            row["weights"] = self.weights
        row["hash"] = f"{self.chain:016x}"
        return _encode(row) + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> RoundRow:
        """Read a line."""
        row = json.loads(line)
        return cls(row["round"], row["iteration"], row["step"], row["start"], row["stop"],
                   row.get("weights"), int(row["hash"], 16), row.get("unit"))


@dataclass(frozen=True)
class LossRow:
    """A line of `ledger.jsonl` or `evals.jsonl`.

    Attributes:
        iteration: training steps done.
        consumed: samples consumed by then; None in `evals.jsonl`.
        losses: (sum in nats, tokens) by name of the domains that had tokens; a sum that is not
            finite is None.
        is_skipped: the optimizer skipped the step.
        split: `valid` or `test` in `evals.jsonl`, None in the ledger.
        excess: sum over tokens of max(loss - reference loss, 0) by name, as `losses`; None where the
            run has no reference model.
    """

    iteration: int
    consumed: int | None
    losses: Mapping[str, tuple[float | None, int]]
    is_skipped: bool
    split: str | None
    excess: Mapping[str, float | None] | None = None

    @classmethod
    def of_step(cls, signals: StepSignals, names: Sequence[str]) -> LossRow:
        """Return the ledger row of a training step."""
        losses = _losses(signals.loss_sums, signals.num_tokens, names)
        excess = None
        if signals.excess_sums is not None:
            sums = _losses(signals.excess_sums, signals.num_tokens, names)
            excess = {name: total for name, (total, _) in sums.items()}
        return cls(signals.iteration, signals.consumed, losses, signals.is_skipped, None, excess)

    @classmethod
    def of_eval(
        cls, iteration: int, split: str, loss_sums: np.ndarray, num_tokens: np.ndarray,
        names: Sequence[str],
    ) -> LossRow:
        """Return the row of an evaluation."""
        return cls(iteration, None, _losses(loss_sums, num_tokens, names), False, split)

    def to_body(self) -> bytes:
        """Return the row's JSON without the hash."""
        row: dict[str, Any] = {"iteration": self.iteration}
        if self.split is None:
            row |= {"consumed": self.consumed, "loss": self.losses, "skipped": self.is_skipped}
            if self.excess is not None:
                row["excess"] = self.excess
        else:
            row |= {"split": self.split, "loss": self.losses}
        return _encode(row)

    @classmethod
    def from_line(cls, line: bytes) -> LossRow:
        """Read a line."""
        row = json.loads(line)
        losses = {name: (total, tokens) for name, (total, tokens) in row["loss"].items()}
        return cls(row["iteration"], row.get("consumed"), losses, row.get("skipped", False),
                   row.get("split"), row.get("excess"))

    def to_signals(self, names: Sequence[str]) -> StepSignals:
        """Return what the decider observes, in the order of `names`.

        Raises:
            KeyError: the row has a domain that `names` lacks.
        """
        index = {name: i for i, name in enumerate(names)}
        loss_sums, num_tokens = np.zeros(len(names)), np.zeros(len(names), np.int64)
        for name, (total, tokens) in self.losses.items():
            loss_sums[index[name]] = np.nan if total is None else total
            num_tokens[index[name]] = tokens
        excess_sums = None
        if self.excess is not None:
            excess_sums = np.zeros(len(names))
            for name, sum_ in self.excess.items():
                excess_sums[index[name]] = np.nan if sum_ is None else sum_
        return StepSignals(
            iteration=self.iteration, consumed=self.consumed or 0, loss_sums=loss_sums,
            num_tokens=num_tokens, is_skipped=self.is_skipped, excess_sums=excess_sums)


def _losses(
    loss_sums: np.ndarray, num_tokens: np.ndarray, names: Sequence[str]
) -> dict[str, tuple[float | None, int]]:
    losses = {}
    for name, total, tokens in zip(names, loss_sums.tolist(), num_tokens.tolist(), strict=True):
        if tokens > 0:
            losses[name] = (total if np.isfinite(total) else None, int(tokens))
    return losses


def sealed(body: bytes, previous: str) -> tuple[bytes, str]:
    """Return the line of a row chained to the row before, and its hash."""
    digest = _seal(body, previous)
    return body[:-1] + b',"hash":"' + digest.encode() + b'"}\n', digest


def unseal(line: bytes, previous: str) -> str | None:
    """Return the hash of a chained line, or None if the line or the chain was changed."""
    body, found, tail = line.rstrip(b"\n").rpartition(b',"hash":"')
    digest = _seal(body + b"}", previous)
    return digest if found and tail == digest.encode() + b'"}' else None


def seal_of(path: Path, line: bytes) -> str:
    """Return the hash that a chained line of a file carries.

    Raises:
        PlanError: it carries none; names the file and the line.
    """
    try:
        return str(json.loads(line)["hash"])
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, line) from error


def _seal(body: bytes, previous: str) -> str:
    return blake2b(previous.encode() + body, digest_size=8).hexdigest()


def _encode(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, separators=(",", ":"), allow_nan=False).encode()


def iter_lines(path: Path, offset: int = 0) -> Iterator[tuple[bytes, int]]:
    """Yield the complete lines of a file from a byte offset on, each with the offset of its end.

    A file that is missing has no lines; a last line without newline is not complete.
    """
    if not path.exists():
        return
    with open(path, "rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            yield line, offset


def last_line(path: Path, *, before: int | None = None) -> tuple[bytes, int] | None:
    """Return the last complete line of a file and the offset of its end; None if there is none.

    Args:
        path: the file.
        before: look only at the first so many bytes.
    """
    if not path.exists():
        return None
    with open(path, "rb") as file:
        end = file.seek(0, 2) if before is None else before
        tail, start = b"", end
        while start > 0 and tail.count(b"\n") < 2:
            size = min(1 << 16, start)
            start -= size
            file.seek(start)
            tail = file.read(size) + tail
    complete = tail[:tail.rfind(b"\n") + 1]
    if not complete:
        return None
    return complete[complete.rfind(b"\n", 0, -1) + 1:], start + len(complete)


class Parsable(Protocol):
    """A kind of row."""

    @classmethod
    def from_line(cls, line: bytes) -> Self: ...


def parsed[Row: Parsable](path: Path, line: bytes, kind: type[Row]) -> Row:
    """Read a line of a file.

    Raises:
        PlanError: the line is not a row of that kind; names the file and the line.
    """
    try:
        return kind.from_line(line)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, line) from error


def _damaged(path: Path, line: bytes) -> PlanError:
    return PlanError(
        f"{path}: damaged row {line[:80]!r}; restore the file from a backup, or start a new "
        "plan with --d3-resume fork in another --d3-plan-dir")
