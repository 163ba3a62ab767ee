"""Which estimator finds the order that exact look-ahead asks for? Regret and cost of each.

    python -m benchmarks.d3.estimators --out runs/d3-estimators               # about 5 CPU-minutes
    python -m benchmarks.d3.estimators --out runs/d3-estimators --units 20 --steps 100 300 1000

One small GPT (plain torch, float32) is trained by Adam on the demo corpus. At each checkpoint (a
table each) every estimator orders the same windows of units, of one domain each (pure) or of mixed
domains (m), for SGD steps of two sizes and for Adam's. Judge: S by look-ahead (the definition) on
all sequences of all units in float64. Regret of an order: its cost under that S, 0 for the best
order that is known, 1 for the mean of random ones.
for the mean of random ones.

Costs are in passes over a unit's sequences, for each unit: gradients (forward and backward) and
forwards. An expansion's order does not depend on the size of an SGD step; look-ahead's does.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks._table import print_machine, print_table
from megatron_d3.corpus.demo import DemoCorpus, build_demo_corpus
from megatron_d3.corpus.domain import Domain, open_domain
from megatron_d3.influence import graph
from megatron_d3.influence.adam import step_root_
from megatron_d3.influence.estimators import estimate
from megatron_d3.influence.settings import D3Config, SketchConfig
from megatron_d3.influence.sketch import make_sketch
from megatron_d3.influence.solvers import solve
from megatron_d3.influence.source import Influence, StepModel
from tests.influence.plain_source import PlainSource
from tests.influence.tiny_gpt import TinyGPT, Units

VOCAB_SIZE, BATCH = 512, 16
BETA2, ADAM_EPS = 0.99, 1e-8
EXACT = {"type": "none"}
SKETCHED = {"type": "rotation", "dim": 3584}

WHOLE = {"estimator": "projected", "curvature_sequences": 1.0}

# Row of the table -> settings; curvature sequences as a share of n, the sequences of a unit.
ROWS: dict[str, dict[str, Any]] = {
    "projected, mean direction, exact dot": {"basis": "mean", **WHOLE},
    "projected, mean direction, k=3584": {"basis": "mean", "sketch": SKETCHED, **WHOLE},
    "projected, top-1 direction": {"directions": 1, **WHOLE},
    "projected, top-2": WHOLE,
    "projected, top-4": {"directions": 4, **WHOLE},
    "diagonal Hutchinson, 1 probe": {"estimator": "hutchinson_diagonal"},
    "diagonal Hutchinson, 4 probes": {"estimator": "hutchinson_diagonal", "probes": 4},
    "diagonal Hutchinson, 1 probe, k=3584": {
        "estimator": "hutchinson_diagonal", "sketch": SKETCHED},
    "shared Hutchinson, 1 probe": {"estimator": "shared_hessian"},
    "Gauss-Newton-Bartlett, 4 draws": {"estimator": "gnb_diagonal", "probes": 4},
    "empirical Fisher": {"estimator": "fisher"},
    "look-ahead on n / 4": {"estimator": "look_ahead", "curvature_sequences": 0.25},
    "look-ahead on n / 2": {"estimator": "look_ahead", "curvature_sequences": 0.5},
    "its even part on n / 4": {"estimator": "look_ahead_even", "curvature_sequences": 0.25},
    "its even part on n / 2": {"estimator": "look_ahead_even", "curvature_sequences": 0.5},
    "full second order": {"estimator": "exact"},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of the corpus")
    add("--steps", type=int, nargs="+", default=[100, 300], help="checkpoints (default 100 300)")
    add("--units", type=int, default=12, help="of a window (default 12)")
    add("--sequences", type=int, default=8, help="of a unit (default 8)")
    add("--seq-length", type=int, default=32)
    add("--width", type=int, default=80)
    add("--seed", type=int, default=0)
    options = parser.parse_args()
    print_machine()
    torch.set_num_threads(1)
    corpus = build_demo_corpus(
        options.out / "corpus", max_bytes_per_domain=400_000, vocab_size=VOCAB_SIZE)
    bench = Bench.prepare(corpus, options)
    print(f"{bench.num_parameters:,} parameters; windows of {options.units} units of "
          f"{options.sequences} sequences of {options.seq_length} tokens", flush=True)
    for checkpoint in bench.checkpoints(options.steps):
        columns = list(bench.columns(checkpoint))
        print_table(["estimator", "gradients", "forwards", *(name for name, _, _ in columns)],
                    list(_rows(columns)))


@dataclass(frozen=True)
class Checkpoint:
    """The model after some steps, and P^(1/2) of Adam."""

    step: int
    model: torch.nn.Module
    root: dict[str, torch.Tensor]


type Column = tuple[str, dict[str, float], dict[str, Influence]]


@dataclass(frozen=True)
class Bench:
    """A model to train and the domains to train it on."""

    domains: list[Domain]
    model: torch.nn.Module
    options: argparse.Namespace

    @classmethod
    def prepare(cls, corpus: DemoCorpus, options: argparse.Namespace) -> Bench:
        domains = [
            open_domain(d.name, paths=[corpus.path / d.train.prefix],
                        valid_paths=[corpus.path / d.valid.prefix],
                        seq_length=options.seq_length, seed=options.seed)
            for d in corpus.domains]
        model = TinyGPT(
            vocab_size=corpus.vocab_size, seq_length=options.seq_length, width=options.width,
            num_layers=2, num_heads=4, seed=options.seed)
        return cls(domains, model, options)

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def tokens(self, domain: int, ordinal: int) -> torch.Tensor:
        row = self.domains[domain % len(self.domains)].train_tokens(ordinal)
        return torch.from_numpy(row.astype(np.int64))

    def checkpoints(self, steps: list[int]) -> Iterator[Checkpoint]:
        """Train, and yield the model at each of the steps."""
        rng = np.random.default_rng([self.options.seed, 1])
        optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3, betas=(0.9, BETA2))
        for step in range(1, max(steps) + 1):
            ids = torch.stack([self.tokens(int(rng.integers(len(self.domains))), step * BATCH + b)
                               for b in range(BATCH)])
            total, num_tokens = Units(ids[None])(self.model, 0, 0, BATCH, None)
            optimizer.zero_grad()
            (total / num_tokens).backward()
            optimizer.step()
            if step in steps:
                print(f"step {step}: loss {float(total.detach()) / num_tokens:.3f}", flush=True)
                moments = {name: optimizer.state[p]["exp_avg_sq"] / (1 - BETA2**step)
                           for name, p in self.model.named_parameters()}
                root = {name: step_root_(moment, float(moment.mean()), beta2=BETA2, num_steps=step,
                                         eps=ADAM_EPS)
                        for name, moment in moments.items()}
                yield Checkpoint(step, copy.deepcopy(self.model), root)

    def units(self, *, is_mixed: bool) -> Units:
        """Return units of samples that training does not reach."""
        rng = np.random.default_rng([self.options.seed, 2])
        n = self.options.sequences
        ids = [self.tokens(int(rng.integers(len(self.domains))) if is_mixed else unit,
                           100_000 + unit * n + s)
               for unit in range(self.options.units) for s in range(n)]
        return Units(torch.stack(ids).view(self.options.units, n, -1))

    def columns(self, checkpoint: Checkpoint) -> Iterator[Column]:
        """Yield the name, regrets and influences of each kind of unit and step."""
        for is_mixed in (False, True):
            units = self.units(is_mixed=is_mixed)
            steps = [("sgd", StepModel(g)) for g in (0.02, 0.1)]
            if not is_mixed:
                steps.append(("adam", StepModel(1e-4, uses_root=True)))
            expansions: dict[str, Influence] = {}
            for kind, step in steps:
                name = f"{checkpoint.step}{'m' if is_mixed else ''} {kind} {step.gamma:g}"
                if kind == "adam":
                    expansions = {}
                found = self._measure(checkpoint, units, step, expansions)
                truth = self._estimate(
                    checkpoint, units, step, {"estimator": "look_ahead"}, is_double=True).advantage
                yield name, self._regrets(truth, found), found

    def _measure(
        self, checkpoint: Checkpoint, units: Units, step: StepModel,
        expansions: dict[str, Influence],
    ) -> dict[str, Influence]:
        """Return every row's influence; `expansions` holds those that another gamma gave."""
        found = {}
        for row, keys in ROWS.items():
            if row not in expansions or keys["estimator"].startswith("look_ahead"):
                expansions[row] = self._estimate(checkpoint, units, step, keys)
            found[row] = expansions[row]
        return found

    def _estimate(
        self, checkpoint: Checkpoint, units: Units, step: StepModel, keys: dict[str, Any],
        *, is_double: bool = False,
    ) -> Influence:
        n, keys = self.options.sequences, dict(keys)
        if "curvature_sequences" in keys:
            keys["curvature_sequences"] = max(1, round(n * keys["curvature_sequences"]))
        settings = D3Config(**{
            "window": self.options.units, "probe_sequences": n, **keys,
            "sketch": SketchConfig(**keys.get("sketch", EXACT))})
        model, root = checkpoint.model, checkpoint.root
        if is_double:
            model = copy.deepcopy(model).double()
            root = {name: x.double() for name, x in root.items()}
        source = PlainSource(
            model, units, num_units=self.options.units, num_sequences=n,
            root=root if step.uses_root else None)
        return estimate(source, make_sketch(settings.sketch, source.layout), settings, step)

    def _regrets(self, truth: np.ndarray, found: dict[str, Influence]) -> dict[str, float]:
        """Return the regret of each row's order, and of two sorts by one number."""
        settings = D3Config(solver="ils", solver_rounds=2000)
        orders = {row: solve(f.advantage, settings=settings, seed=0) for row, f in found.items()}
        norms = next(iter(found.values())).gradient_norms
        orders["sort by gradient norm, ascending"] = np.argsort(norms, kind="stable")
        orders["row sums of the judge's S"] = np.argsort(
            graph.row_sum_potential(truth), kind="stable")
        best = solve(truth, settings=settings, seed=1)
        lowest = graph.violation_cost(truth, best)
        span = graph.random_cost(truth) - lowest
        return {row: (graph.violation_cost(truth, order) - lowest) / span
                for row, order in orders.items()}


def _rows(columns: list[Column]) -> Iterator[list[str]]:
    for row in columns[0][1]:
        found = columns[0][2].get(row)
        count = len(found.losses) if found else 1
        costs = ([f"{found.num_gradients / count:.3g}", f"{found.num_forwards / count:.3g}"]
                 if found else ["1" if "norm" in row else "-", "0" if "norm" in row else "-"])
        yield [row, *costs, *(f"{regrets[row]:.2f}" for _, regrets, _ in columns)]


if __name__ == "__main__":
    main()
