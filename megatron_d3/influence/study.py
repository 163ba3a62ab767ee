"""Which estimator and solver find the order that exact look-ahead asks for? Regrets and costs.

    judge       S by look-ahead, the definition of influence, on all sequences of every unit; its
                reliability is 1 - |S - B|^2 / |S|^2, B being S of the same steps backwards, which
                has another rounding and the opposite odd orders. (Halves of the sequences differ by
                first-order parts that cancel in the whole: their S may well have correlation -1.)
    regret      (cost of an order under that S - least) / (random order's - least):
                0 the best order, 1 no better than random, above 1 worse than random
    estimators  each orders the units by its own S, with the configured solver
    solvers     each orders them by the judge's S

The least cost is that of the best order known: of the exact solver where it can, else of a long
iterated local search, and of every order in the tables.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from megatron_d3.errors import ProbeError
from megatron_d3.influence.estimators.algebra import advantage_of
from megatron_d3.influence.graph import (
    curl,
    how_far_it_holds,
    random_cost,
    row_sum_potential,
    violation_cost,
)
from megatron_d3.influence.settings import MAX_EXACT_UNITS, D3Config
from megatron_d3.influence.solvers import SOLVERS, solve
from megatron_d3.influence.source import UNUSABLE, Influence, StepModel
from megatron_d3.influence.study_cases import Case

BEST_ROUNDS = 2000
"""Rounds of the search for the best order, where there are too many units for the exact one."""

_NUM_TIMED = 3  # runs of a solver, of which the fastest counts

Judge = Literal["look_ahead", "look_ahead_even", "exact"]
Seed = int | Sequence[int]
# Measures the window with some settings, for a step; the same on all ranks.
Measure = Callable[[D3Config, StepModel], Influence]


@dataclass(frozen=True)
class Row:
    """An estimator, or another source of an order.

    Attributes:
        name: of the estimator with its number.
        regret: of the order found; None where no order is better than another, or none was found.
        num_sequences: probe sequences of a unit; 0 where nothing was measured for it.
        num_gradients: forward and backward passes over a unit's probe sequences, for each unit.
        num_forwards: the same without backward.
        seconds: taken for the window.
        reliability: correlation of S from two halves of the sequences, None without halves; for a
            judge by look-ahead see above.
        expected_agreement: correlation to expect of S with that of all sequences by the same
            estimator; None without halves, and where they share steps (`COMMON_STEPS`).
        curl: share of S that no sort by one number explains; None without S.
        reason: why there is no order.
    """

    name: str
    regret: float | None
    num_sequences: int = 0
    num_gradients: float = 0.0
    num_forwards: float = 0.0
    seconds: float = 0.0
    reliability: float | None = None
    expected_agreement: float | None = None
    curl: float | None = None
    reason: str | None = None


@dataclass(frozen=True)
class SolverRow:
    """A solver on the judge's S.

    Attributes:
        name: of the solver.
        regret: gap to the best order known, as a share of random minus best; None as in `Row`.
        milliseconds: of the fastest of three runs.
    """

    name: str
    regret: float | None
    milliseconds: float


@dataclass(frozen=True)
class Study:
    """What came of one kind of step.

    Attributes:
        step: `sgd` or `optimizer`.
        gamma: step size.
        judge: what regrets are measured by; its own regret is that of the configured solver.
        estimators: in the order of the cases, then orders by other means.
        solvers: on the judge's S.
        best_cost: of the best order known, relative to a random one.
    """

    step: str
    gamma: float
    judge: Row
    estimators: tuple[Row, ...]
    solvers: tuple[SolverRow, ...]
    best_cost: float


def regret(advantage: np.ndarray, order: np.ndarray, least: float) -> float | None:
    """Return the regret of an order; None where random orders are as good as the best.

    Args:
        advantage: (L, L) the judge's S.
        order: (L,) units.
        least: cost of the best order.

    >>> S = np.array([[0.0, 2.0, 1.0], [-2.0, 0.0, 4.0], [-1.0, -4.0, 0.0]])
    >>> [regret(S, np.array(order), 0.0) for order in ([0, 1, 2], [2, 1, 0], [0, 2, 1])]
    [0.0, 2.0, 1.1428571428571428]
    """
    span = random_cost(advantage) - least
    return float((violation_cost(advantage, order) - least) / span) if span > 0 else None


def agreement(forwards: np.ndarray, backwards: np.ndarray) -> float:
    """Return 1 - |S - B|^2 / |S|^2, at least 0: the share of S that is no rounding and no odd order.

    Of the four losses in S_ij two are those of the present weights, whose rounding S and B share: for
    nothing but rounding |S - B| is on average as large as |S|, while their correlation is 1/2.

    >>> S = np.array([[0.0, 2.0], [-2.0, 0.0]])
    >>> agreement(S, S), agreement(S, 0.5 * S), agreement(S, -S), agreement(0 * S, 0 * S)
    (1.0, 0.75, 0.0, 0.0)
    """
    total = float((forwards**2).sum())
    difference = float(((forwards - backwards) ** 2).sum())
    return max(0.0, 1.0 - difference / total) if total else 0.0


def best_order(advantage: np.ndarray, seed: Seed) -> np.ndarray:
    """Return the best order that can be found: the exact one for up to `MAX_EXACT_UNITS` units."""
    count = len(advantage)
    settings = D3Config(solver_rounds=BEST_ROUNDS, window=max(1, count))
    if count <= MAX_EXACT_UNITS:
        settings = replace(settings, solver="exact")
    return solve(advantage, settings=settings, seed=seed)


def judge_settings(config: D3Config, estimator: Judge, num_sequences: int) -> D3Config:
    """Return the settings that measure the judge's S: on all sequences of a unit."""
    return replace(config, estimator=estimator, probe_sequences=num_sequences,
                   curvature_sequences=None, min_agreement=None)


def study(
    measure: Measure, cases: Sequence[Case], step: StepModel, *, judge: D3Config, seed: Seed,
    report: Callable[[str], None] = lambda text: None,
) -> Study:
    """Compare estimators and solvers for one kind of step.

    Args:
        measure: measures the window; collective.
        cases: what to compare; the first is the configured estimator, and its settings name the
            solver.
        step: whose influence is measured.
        judge: settings of the judge.
        seed: of the solvers.
        report: told what is done.

    Raises:
        ProbeError: the judge finds a unit whose loss or gradient is not finite.
    """
    truth, judge_row = _judge(measure, judge, step)
    report(f"judge ({judge.estimator}, all {judge.probe_sequences} sequences): "
           f"{judge_row.seconds:.1f} s")
    S, config = truth.advantage, cases[0].settings
    orders = {"judge": solve(S, settings=config, seed=seed)}
    rows: list[Row] = []
    first: Influence | None = None
    for case in cases:
        try:
            found, seconds = _timed(measure, case.settings, step)
        except ProbeError as error:
            rows.append(Row(case.name, None, reason=str(error)))
            continue
        report(f"{case.name}: {seconds:.1f} s")
        rows.append(_row(case.name, case.settings, found, seconds, judge.probe_sequences))
        if not found.bad_units:
            first = first or found
            orders[case.name] = solve(found.advantage, settings=config, seed=seed)
    others = _other_orders(S, first, step, config, seed)
    rows += [Row(name, None) for name in others]
    solvers = {name: _solved(S, config, name, seed) for name in SOLVERS
               if name != "exact" or len(S) <= MAX_EXACT_UNITS}
    orders |= others
    known = [best_order(S, seed), *orders.values(), *(order for order, _ in solvers.values())]
    least = min(violation_cost(S, order) for order in known)
    random = random_cost(S)
    return Study(
        step="optimizer" if step.uses_root else "sgd", gamma=step.gamma,
        judge=replace(judge_row, regret=regret(S, orders["judge"], least)),
        estimators=tuple(replace(row, regret=regret(S, orders[row.name], least))
                         if row.name in orders else row for row in rows),
        solvers=tuple(SolverRow(name, regret(S, order, least), milliseconds)
                      for name, (order, milliseconds) in solvers.items()),
        best_cost=least / random if random else 1.0)


def _judge(measure: Measure, settings: D3Config, step: StepModel) -> tuple[Influence, Row]:
    """Return the judge's S and its row.

    Raises:
        ProbeError: a unit's loss or gradient is not finite, or none of its tokens counts.
    """
    truth, seconds = _timed(measure, settings, step)
    if truth.bad_units:
        units = ", ".join(map(str, truth.bad_units))
        raise ProbeError(f"{UNUSABLE} in unit {units} of the window")
    row = _row(settings.estimator, settings, truth, seconds, settings.probe_sequences)
    if settings.estimator != "look_ahead":
        return truth, row
    backwards = measure(settings, replace(step, gamma=-step.gamma)).advantage
    first = _first_order(truth, step)
    return truth, replace(row, reliability=agreement(truth.advantage - first, backwards + first))


def _first_order(found: Influence, step: StepModel) -> np.ndarray:
    """Return the part of S that unequal clipping leaves of the first order, (L, L)."""
    norms, clip = found.gradient_norms, step.clip
    if clip is None:
        return np.zeros_like(found.gram)
    return advantage_of(
        found.gram, np.zeros_like(found.gram), clip / np.maximum(norms, clip), step.gamma)


def _timed(measure: Measure, settings: D3Config, step: StepModel) -> tuple[Influence, float]:
    started = time.perf_counter()
    found = measure(settings, step)
    return found, time.perf_counter() - started


def _row(
    name: str, settings: D3Config, found: Influence, seconds: float, unit_size: int
) -> Row:
    """Return a row without its regret."""
    count = len(found.losses)
    reliability, expected = how_far_it_holds(found.halves, settings, unit_size)
    reason = None
    if found.bad_units:
        reason = f"{UNUSABLE} in unit {', '.join(map(str, found.bad_units))}"
    return Row(
        name, None, num_sequences=settings.probe_sequences,
        num_gradients=found.num_gradients / count, num_forwards=found.num_forwards / count,
        seconds=seconds, curl=None if reason else curl(found.advantage), reason=reason,
        reliability=reliability, expected_agreement=expected)


def _other_orders(
    S: np.ndarray, found: Influence | None, step: StepModel, config: D3Config, seed: Seed
) -> dict[str, np.ndarray]:
    """Return orders that need no curvature, by name, and that of the judge's row sums."""
    orders = {}
    if found is not None:
        first = _first_order(found, step)
        if first.any():
            orders["first order"] = solve(first, settings=config, seed=seed)
        orders["sort by gradient norm"] = np.argsort(found.gradient_norms, kind="stable")
    orders["row sums of the judge's S"] = np.argsort(row_sum_potential(S), kind="stable")
    orders["order of the plan"] = np.arange(len(S))
    return orders


def _solved(S: np.ndarray, config: D3Config, name: str, seed: Seed) -> tuple[np.ndarray, float]:
    """Return a solver's order, and the milliseconds it takes."""
    chosen: Any = name
    settings = replace(config, solver=chosen)
    times = []
    for _ in range(_NUM_TIMED):
        started = time.perf_counter()
        order = solve(S, settings=settings, seed=seed)
        times.append(time.perf_counter() - started)
    return order, 1000 * min(times)
