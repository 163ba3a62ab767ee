"""D3 inside a planned run: probe the drafted units, find their order, say what it is worth.

    draft ── probe sequences ── estimator ── S ── rank 0: objective, solver ── order ── all ranks
                                              └── reliability, costs, curl ── windows.jsonl, metrics

Every rank measures its share; rank 0 solves and tells the others, since two machines' linear algebra
may differ in the last digit. Where S cannot be trusted the window keeps its stored order, and the
row says why. A random order (`objective: random`) needs no S, and nothing is measured for it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import numpy as np

from megatron_d3.corpus.domain import Domain
from megatron_d3.influence.estimators import estimate
from megatron_d3.influence.graph import curl, how_far_it_holds, relative_cost
from megatron_d3.influence.objectives import order_window, random_order
from megatron_d3.influence.probe_choice import choose_probes
from megatron_d3.influence.settings import D3Config
from megatron_d3.influence.sketch import make_sketch
from megatron_d3.influence.solvers import solve
from megatron_d3.influence.source import UNUSABLE, Influence, StepModel
from megatron_d3.mcore import collective
from megatron_d3.mcore.datasets import SampleMaker
from megatron_d3.mcore.probe import Probe, ProbeSettings, UnitSamples
from megatron_d3.mcore.step_root import clip_of, learning_rate_of, steps_taken
from megatron_d3.plan.draft import Draft, stored_order
from megatron_d3.plan.windows import WindowRow

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Finding:
    """What came of a window.

    Attributes:
        order: (n,) int64, slot s gets unit order[s].
        row: for `windows.jsonl` and the metrics.
        arrays: `order`, and where something was measured S and what belongs to it.
    """

    order: np.ndarray
    row: WindowRow
    arrays: Arrays


class StepClock:
    """Mean seconds of the training steps since it was last asked."""

    def __init__(self) -> None:
        self._started = 0.0
        self._total = 0.0
        self._count = 0

    def start(self) -> None:
        """A step begins."""
        self._started = time.perf_counter()

    def stop(self) -> None:
        """It ended."""
        self._total += time.perf_counter() - self._started
        self._count += 1

    def mean(self) -> float | None:
        """Return the mean since the last call; None where no step was taken."""
        mean = self._total / self._count if self._count else None
        self._total, self._count = 0.0, 0
        return mean


class WindowOrderer:
    """Finds the order of each window of a run, on every rank.

    Args:
        config: `order` of the run's configuration.
        domains: opened, in domain order.
        maker: makes the fields of a sample.
        settings: of the probe; None where nothing is to be measured (`objective: random`).
        seed: of the run.
    """

    def __init__(
        self, config: D3Config, domains: Sequence[Domain], *, maker: SampleMaker,
        settings: ProbeSettings | None, seed: int,
    ) -> None:
        self.config = config
        self.step_seconds: float | None = None  # of the training steps since the last window
        self._domains = domains
        self._maker = maker
        self._settings = settings
        self._seed = seed
        self._probe: Probe | None = None

    def attach(self, chunks: list[Any], optimizer: Any) -> None:
        """Take the model that trains, once it is built; collective.

        Raises:
            ProbeError: its parameters cannot be placed, or the sketch is larger than the model.
        """
        if self._settings is None:
            return
        self._probe = Probe(chunks, optimizer, self._settings)
        self._sketch = make_sketch(self.config.sketch, self._probe.layout)
        self._optimizer = optimizer

    def find(self, draft: Draft, table_ids: Sequence[int]) -> Finding | None:
        """Measure a window and find its order; None where it keeps the stored order as configured.

        Args:
            draft: the window's units.
            table_ids: (K,) ids under which the plan knows the domains.
        """
        is_turn = draft.step // self.config.window % self.config.every == 0
        if draft.num_units < 2 or not is_turn:
            return None
        started = time.perf_counter()
        influence = reason = None
        if self._settings is not None:
            reason, step = self._step_model()
            if reason is None:
                influence = self._measure(draft, table_ids, step)
                reason = _distrust(influence, draft, self.config)
        measured = time.perf_counter()
        solved = collective.on_rank_0(lambda: self._solve(draft, influence, reason))
        now = time.perf_counter()
        seconds = {} if influence is None else dict(influence.seconds)
        seconds |= {"probe": measured - started, "solve": now - measured, "total": now - started}
        return self._finding(draft, influence, solved, seconds)

    def _step_model(self) -> tuple[str | None, StepModel]:
        """Return the step that is assumed, or why none can be."""
        gamma = self.config.gamma
        if gamma == "lr":
            gamma = learning_rate_of(self._optimizer)
        if gamma == 0:
            return "the learning rate is 0, no step has an influence", StepModel(0.0)
        if self.config.step == "sgd":
            return None, StepModel(float(gamma))
        clip = clip_of(self._optimizer)
        if steps_taken(self._optimizer) == 0:
            return "the optimizer has taken no step, so it has no second moments", StepModel(0.0)
        return None, StepModel(float(gamma), clip=clip, uses_root=True)

    def _measure(self, draft: Draft, table_ids: Sequence[int], step: StepModel) -> Influence:
        assert self._probe is not None, "attach() comes before the first window"
        number_of = {table_id: i for i, table_id in enumerate(table_ids)}
        num_sequences = self.config.probe_sequences
        places = choose_probes(
            draft.records["domain"], num_sequences, num_curved=self.config.num_curved,
            seed=[self._seed, draft.round])

        def read(unit: int, sequence: int) -> dict[str, Any]:
            record = draft.records[unit, places[unit, sequence]]
            domain = self._domains[number_of[int(record["domain"])]]
            return self._maker.fields(domain.train_tokens(int(record["sample"])))

        samples = UnitSamples(draft.num_units, num_sequences, read)
        with self._probe.measuring(samples) as source:
            return estimate(source, self._sketch, self.config, step)

    def _solve(
        self, draft: Draft, influence: Influence | None, reason: str | None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """On rank 0: the order, and what is worth knowing of S."""
        seed = [self._seed, draft.round, crc32(b"d3 order")]
        if self._settings is None:
            return random_order(draft.num_units, seed), {}
        stored = stored_order(draft)
        if influence is None or influence.bad_units:
            return stored, {"reason": reason}
        S = influence.advantage
        found = stored
        if reason is None:
            found = order_window(S, influence.gram, self.config, seed)
        row_sum = solve(S, settings=replace(self.config, solver="row_sum"), seed=seed)
        cost = {name: relative_cost(S, order) for name, order in
                (("found", found), ("row_sum", row_sum), ("stored", stored))}
        reliability, agreement = how_far_it_holds(
            influence.halves, self.config, draft.unit_size)
        return found, {
            "reason": reason, "cost": cost, "curl": curl(S), "reliability": reliability,
            "expected_agreement": agreement}

    def _finding(
        self, draft: Draft, influence: Influence | None, solved: tuple[np.ndarray, dict[str, Any]],
        seconds: dict[str, float],
    ) -> Finding:
        order, values = solved
        details: dict[str, Any] = {
            "objective": self.config.objective, "num_steps": draft.num_slots,
            "step_seconds": self.step_seconds}
        arrays: Arrays = {"order": order}
        if influence is not None:
            details |= {"estimator": self.config.estimator,
                        "num_gradients": influence.num_gradients,
                        "num_forwards": influence.num_forwards}
            arrays |= {"advantage": influence.advantage, "losses": influence.losses,
                       "gradient_norms": influence.gradient_norms, "gram": influence.gram}
        row = WindowRow(
            round=draft.round, iteration=draft.iteration, step=draft.step,
            num_units=draft.num_units, seconds=seconds, details=details, **values)
        return Finding(order, row, arrays)


def _distrust(influence: Influence, draft: Draft, config: D3Config) -> str | None:
    """Return why S must not decide, if so."""
    if influence.bad_units:
        units = ", ".join(f"{unit} (drafted for step {draft.step + unit + 1})"
                          for unit in influence.bad_units)
        return f"{UNUSABLE} in unit {units}"
    if config.min_agreement is None:
        return None
    _, agreement = how_far_it_holds(influence.halves, config, draft.unit_size)
    assert agreement is not None, "settings without agreement have no min_agreement"
    if agreement < config.min_agreement:
        return (f"expected agreement {agreement:.3g} is below d3.order.min_agreement "
                f"{config.min_agreement:g}")
    return None
