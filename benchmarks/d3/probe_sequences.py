"""How many sequences must stand for a unit, and which? What a sample of them says of the whole.

    python -m benchmarks.d3.probe_sequences --out runs/d3-probes             # about 25 CPU-minutes
    python -m benchmarks.d3.probe_sequences --out runs/d3-probes --report    # the tables again

One small GPT (plain torch) is trained by Adam on the demo corpus. At each checkpoint windows of units
of N sequences are ordered by S from n of them, those that a window takes (`influence/probe_choice.py`),
of which m have their curvature measured,

in units that hold

    even      every domain in the same share, dealt out in turns
    shares    shares of their own (Dirichlet of 1), dealt out in turns
    pure      one domain

Regret of an order: its cost under S by look-ahead (the definition) on all sequences in float64, 0 for
the best order, 1 for the mean of random ones. Agreement: the correlation of S with that of all N
sequences by the same estimator, beside what a window's reliability makes expect. Cost: sequences passed
forwards and backwards for each unit.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks._table import print_machine, print_table
from benchmarks.d3.estimators import VOCAB_SIZE, Bench, Checkpoint
from megatron_d3.corpus.demo import build_demo_corpus
from megatron_d3.influence import graph
from megatron_d3.influence.estimators import estimate
from megatron_d3.influence.probe_choice import choose_probes
from megatron_d3.influence.settings import D3Config, SketchConfig
from megatron_d3.influence.sketch import make_sketch
from megatron_d3.influence.source import Influence, StepModel
from megatron_d3.influence.study import best_order, regret
from megatron_d3.plan.apportion import apportion
from tests.influence.plain_source import PlainSource
from tests.influence.tiny_gpt import Units

KINDS = ("even", "shares", "pure")
STEPS = {"SGD": StepModel(0.05), "Adam": StepModel(3e-4, uses_root=True)}
WAYS: dict[str, dict[str, Any]] = {
    "projected:mean": {"basis": "mean"}, "projected:1": {"directions": 1}, "projected": {},
    "hutchinson_diagonal": {"estimator": "hutchinson_diagonal"}}
CASES = (  # n, m, way
    (4, 2, "projected"), (8, 8, "hutchinson_diagonal"), (8, 8, "projected:mean"),
    (8, 4, "projected:1"), (8, 2, "projected"), (8, 4, "projected"), (8, 8, "projected"),
    (12, 4, "projected"), (16, 16, "projected:mean"), (16, 8, "projected:1"), (16, 4, "projected"),
    (16, 8, "projected"), (32, 32, "hutchinson_diagonal"), (32, 32, "projected:mean"),
    (32, 16, "projected:1"), (32, 32, "projected:1"), (32, 8, "projected"), (32, 16, "projected"),
    (32, 32, "projected"))

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of the corpus and of the results")
    add("--steps", type=int, nargs="+", default=[200, 400], help="checkpoints (default 200 400)")
    add("--seeds", type=int, nargs="+", default=[1, 2, 3], help="models (default 1 2 3)")
    add("--windows", type=int, default=2, help="of each kind at each checkpoint (default 2)")
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="of units (default all)")
    add("--units", type=int, default=10, help="of a window (default 10)")
    add("--sequences", type=int, default=32, help="of a unit (default 32)")
    add("--seq-length", type=int, default=32)
    add("--width", type=int, default=48)
    add("--report", action="store_true", help="print the tables of what is there, measure nothing")
    options = parser.parse_args()
    print_machine()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    results = options.out / "results.jsonl"
    if not options.report:
        with results.open("w") as file:
            for seed in options.seeds:
                for row in measured(options, seed):
                    file.write(json.dumps(row) + "\n")
                    file.flush()
    report([json.loads(line) for line in results.read_text().splitlines()])


def measured(options: argparse.Namespace, seed: int) -> Iterator[Row]:
    """Train one model, and yield a row for each window, step and case."""
    options.seed = seed
    corpus = build_demo_corpus(
        options.out / "corpus", max_bytes_per_domain=400_000, vocab_size=VOCAB_SIZE)
    bench = Bench.prepare(corpus, options)
    print(f"seed {seed}: {bench.num_parameters:,} parameters", flush=True)
    for checkpoint in bench.checkpoints(options.steps):
        for window in range(options.windows):
            for kind in options.kinds:
                domains = drawn_domains(kind, options, len(bench.domains), [seed, window])
                ids = [bench.tokens(int(domain), 100_000 * (1 + window) + place)
                       for place, domain in enumerate(domains.reshape(-1))]
                units = torch.stack(ids).view(*domains.shape, -1)
                for name, step in STEPS.items():
                    about = {"seed": seed, "checkpoint": checkpoint.step, "kind": kind,
                             "window": window, "step": name}
                    for row in compared(checkpoint, units, domains, step, [seed, window]):
                        yield about | row


def drawn_domains(
    kind: str, options: argparse.Namespace, num_domains: int, key: list[int]
) -> np.ndarray:
    """Return (L, N) domains of a window's sequences."""
    count, size = options.units, options.sequences
    even = np.full(num_domains, 1 / num_domains)
    if kind == "even":
        return apportion(even, count * size, np.zeros(num_domains))[0].reshape(count, size)
    if kind == "pure":
        return np.repeat(np.arange(count)[:, None] % num_domains, size, 1)
    rng = np.random.default_rng([*key, 3])
    return np.stack([apportion(weights, size, np.zeros(num_domains))[0]
                     for weights in rng.dirichlet(np.ones(num_domains), count)])


def compared(
    checkpoint: Checkpoint, units: torch.Tensor, domains: np.ndarray, step: StepModel,
    key: list[int],
) -> Iterator[Row]:
    """Yield what came of each case in a window."""
    count, size = domains.shape
    truth = measure(checkpoint, units, step, is_double=True, estimator="look_ahead").advantage
    least = graph.violation_cost(truth, best_order(truth, 0))
    whole = {way: measure(checkpoint, units, step, curvature_sequences=size, **keys).advantage
             for way, keys in WAYS.items()}
    for n, m, way in CASES:
        places = choose_probes(domains, n, num_curved=m, seed=key)
        probed = torch.take_along_dim(units, torch.from_numpy(places)[..., None], 1)
        found = measure(checkpoint, probed, step, curvature_sequences=m, **WAYS[way])
        assert found.halves is not None
        reliability = graph.split_half_reliability(*found.halves)
        yield {
            "n": n, "m": m, "way": way, "cost": found.num_gradients * n / count,
            "regret": regret(truth, best_order(found.advantage, 0), least),
            "reliability": reliability,
            "expected": graph.expected_agreement(reliability, m, size),
            "agreement": graph.split_half_reliability(found.advantage, whole[way])}


def measure(
    checkpoint: Checkpoint, units: torch.Tensor, step: StepModel, *, is_double: bool = False,
    **keys: Any,
) -> Influence:
    """Return what an estimator finds of a window, (L, n, T + 1) token ids."""
    count, n, _ = units.shape
    settings = D3Config(window=count, probe_sequences=n, sketch=SketchConfig(type="none"), **keys)
    model = checkpoint.model.double() if is_double else checkpoint.model.float()
    root = {name: x.double() if is_double else x.float() for name, x in checkpoint.root.items()}
    source = PlainSource(model, Units(units), num_units=count, num_sequences=n,
                         root=root if step.uses_root else None)
    return estimate(source, make_sketch(settings.sketch, source.layout), settings, step)


def report(rows: list[Row]) -> None:
    """Print a table for each kind of units and step, and one of both kinds of mixed units."""
    for kind, step in {(row["kind"], row["step"]): None for row in rows}:
        table(f"{kind} units, {step}",
              [row for row in rows if (row["kind"], row["step"]) == (kind, step)])
    table("units of many domains (even and shares), both steps",
          [row for row in rows if row["kind"] != "pure"])


def table(title: str, rows: list[Row]) -> None:
    """Print means over windows."""
    keys = ("regret", "reliability", "expected", "agreement")
    num_windows = len({(row["seed"], row["checkpoint"], row["window"], row["kind"], row["step"])
                       for row in rows})
    print(f"\n{title}; {num_windows} windows: regret with its standard error")
    lines = []
    for n, m, way in CASES:
        these = [row for row in rows if (row["n"], row["m"], row["way"]) == (n, m, way)]
        lines.append([way, n, m, f"{these[0]['cost']:g}", *(cell(these, key) for key in keys)])
    print_table(["estimator", "n", "m", "cost", *keys], lines)


def cell(rows: list[Row], key: str) -> str:
    values = np.array([row[key] for row in rows])
    if key != "regret":
        return f"{values.mean():.2f}"
    error = values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else np.nan
    return f"{values.mean():.2f} ± {error:.2f}"


if __name__ == "__main__":
    main()
