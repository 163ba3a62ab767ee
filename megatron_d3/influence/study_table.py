"""A study as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from megatron_d3.influence.study import Row, Study

_TRUSTED = 0.5
"""Reliability of the judge below which its noise decides."""

_LOOK_AHEAD_NOTE = (
    "S of the same steps backwards agrees to {:.2f} only. If steps are too small for the precision, "
    "regrets are rounding: raise d3.order.gamma, or take --judge exact. If they are too large, no "
    "curvature tells what they do: lower d3.order.gamma")
_HALVES_NOTE = (
    "two halves of the judge's sequences agree to {:.2f} only: S hangs on single sequences, or on the "
    "precision of the weights")

_ESTIMATOR_HEAD = ("estimator", "sequences", "gradients", "forwards", "seconds", "regret",
                   "reliability", "agreement", "curl")
_SOLVER_HEAD = ("solver", "regret", "ms")


def to_json(studies: Sequence[Study], **about: Any) -> dict[str, Any]:
    """Return the studies as plain values, with what else is worth knowing of them."""
    return {"version": 1, **about, "steps": [asdict(study) for study in studies]}


def to_text(studies: Sequence[Study], *, solver: str, num_units: int) -> str:
    """Return the tables.

    Args:
        studies: one for each kind of step.
        solver: that orders the units by each estimator's S.
        num_units: L.
    """
    parts = ["gradients, forwards: passes over the probe sequences of a unit, for each unit",
             f"regret: of the order that {solver} finds; 0 the best, 1 as good as random",
             "agreement: expected correlation of S with that of all sequences, by the reliability"]
    for study in studies:
        parts.append("\n".join(_of_step(study, num_units)))
    return "\n".join(parts)


def _of_step(study: Study, num_units: int) -> Iterator[str]:
    judge = study.judge
    yield ""
    yield (f"step: {study.step}, gamma {study.gamma:.3g}; {num_units} units; best order "
           f"{study.best_cost:.3f} of a random one's cost")
    rows = [_cells(row) for row in study.estimators]
    yield from _aligned([_ESTIMATOR_HEAD, _cells(judge, f"judge: {judge.name}"), *rows])
    for row in study.estimators:
        if row.reason is not None:
            yield f"{row.name}: {row.reason}"
    yield ""
    yield from _aligned([_SOLVER_HEAD, *(
        (row.name, _number(row.regret), f"{row.milliseconds:.2f}") for row in study.solvers)])
    if judge.reliability is not None and judge.reliability < _TRUSTED:
        yield ("NOTE: " + (_LOOK_AHEAD_NOTE if judge.name == "look_ahead" else _HALVES_NOTE).format(
            judge.reliability))


def _cells(row: Row, name: str | None = None) -> tuple[str, ...]:
    costs = ("-",) * 4
    if row.num_sequences:
        costs = (str(row.num_sequences), f"{row.num_gradients:.3g}", f"{row.num_forwards:.3g}",
                 f"{row.seconds:.2f}")
    return (name or row.name, *costs, _number(row.regret, 3), _number(row.reliability),
            _number(row.expected_agreement), _number(row.curl))


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) if i == 0 else cell.rjust(width)
                 for i, (cell, width) in enumerate(zip(row, widths, strict=True))]
        yield "  ".join(cells).rstrip()
