"""What a proxy run found: alpha after each step, from its plan directory alone."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_d3.errors import PlanError
from megatron_d3.mix.doremi import DoReMi, convergence
from megatron_d3.plan.reader import PlanReader
from megatron_d3.plan.replay import Replay
from megatron_d3.plan.state import DeciderState
from megatron_d3.planning import decider_factory


@dataclass(frozen=True, eq=False)
class ProxyResult:
    """The weights of a proxy run.

    Attributes:
        names: K domains.
        iterations: (T,) 1-based steps that moved the weights.
        alphas: (T, K) alpha after each.
        mean: (K,) alpha_bar, the result.
    """

    names: tuple[str, ...]
    iterations: np.ndarray
    alphas: np.ndarray
    mean: np.ndarray

    def to_dict(self, alpha_ref: dict[str, float], *, trajectory: str) -> dict[str, Any]:
        """Return the content of `weights.json`.

        Args:
            alpha_ref: the reference's weights by name.
            trajectory: name of the file beside it that holds every alpha.
        """
        reference = np.array([alpha_ref[name] for name in self.names])
        half = self.alphas[:max(1, len(self.alphas) // 2)].mean(axis=0)
        return {
            "version": 1,
            "weights": self._named(self.mean),
            "final": self._named(self.alphas[-1]),
            "reference": self._named(reference),
            # The stop rule's measure, and how far the mean still moved in the run's second half.
            "max_change_from_reference": convergence(self.mean, reference),
            "max_change_since_half": convergence(self.mean, half),
            "num_steps": len(self.alphas),
            "trajectory": trajectory,
        }

    def to_csv(self) -> str:
        """Return `iteration,<domain>,...` and a row a step."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["iteration", *self.names])
        for iteration, alpha in zip(self.iterations.tolist(), self.alphas.tolist(), strict=True):
            writer.writerow([iteration, *alpha])
        return out.getvalue()

    def _named(self, weights: np.ndarray) -> dict[str, float]:
        return dict(zip(self.names, weights.tolist(), strict=True))


def read_proxy(plan_dir: Path) -> ProxyResult:
    """Compute a proxy's weights again from the excess losses in its ledger.

    Raises:
        PlanError: there is no plan, it is no proxy's, no step was trained, or it was changed.
    """
    reader = PlanReader(plan_dir)
    states: dict[int, DeciderState] = {}

    def visit(state: DeciderState) -> None:
        states.setdefault(int(state.mixer.get("num_steps", 0)), state)

    replay = Replay(reader, decider_factory(), visit=visit)
    if not isinstance(replay.decider.mixer, DoReMi):
        raise PlanError(f"{plan_dir}: not the plan of a DoReMi proxy; its mix.type is "
                        f"{replay.current.header.config['mix']['type']}")
    for _ in replay.rounds():
        pass
    mixer = replay.decider.mixer
    assert isinstance(mixer, DoReMi)
    trained = [states[n] for n in sorted(states) if n > 0]
    if not trained:
        raise PlanError(f"{plan_dir}: no step was trained yet")
    return ProxyResult(
        names=tuple(replay.current.header.names),
        iterations=np.array([state.iteration for state in trained]),
        alphas=np.array([mixer.loss_weights(state.mixer) for state in trained]),
        mean=mixer.mean_weights(trained[-1].mixer))


def first_weights(plan_dir: Path) -> dict[str, float]:
    """Return the weights by name that a run's first round was drawn with.

    Raises:
        PlanError: there is no plan, or nothing was decided.
    """
    for row, _ in PlanReader(plan_dir).rounds(0):
        if row.weights is not None:
            return dict(row.weights)
    raise PlanError(f"{plan_dir}: nothing was decided yet")
