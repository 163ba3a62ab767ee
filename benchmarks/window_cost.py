"""What a window of D3 costs beside the training steps of the same run, part by part; and memory.

    python -m benchmarks.window_cost                          # 5 minutes of an idle core
    python -m benchmarks.window_cost --units 60 --seq-length 64 --width 96 --num-layers 2

One process trains a small model. Between its first and second window every case measures and orders
the same window on the same weights (nothing of it is used: training keeps the stored order); plain
steps are timed before and after. Overhead: seconds of a whole window over seconds of its L steps.

The last columns scale the measured parts to a larger global batch G on R data-parallel ranks,

    overhead = (busiest * unit + reduce + solve) / (L * step * (G / R) / G_measured),

where `unit` is what one unit takes in all parts but reduce and solve, and `busiest` how many units
fall to the rank that has most: ceil(L / R), but where ranks share units (`projected`) as little as
one sequence in each pass (influence/estimators/deal.py). Assumed: time in proportion to sequences,
in a rank's step as in its probe; nothing for the network, neither in a step (whose all-reduce of
gradients would lower the overhead) nor in a window (all-reduces of r directions
and of some 4 L (1 + r / 2) k numbers, as much as a few steps' in 60).
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import shlex
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import _forked
from benchmarks._study import ENVIRONMENT
from benchmarks._table import print_machine, print_table
from benchmarks.step_overhead import prepare
from megatron_d3.influence.settings import D3Config, SketchConfig

DIM = 3500
CASES: dict[str, dict[str, Any]] = {
    "projected": {},  # the default: 2 directions, curvature on 2 of 8
    "... curvature on 4": {"curvature_sequences": 4},
    "... curvature on all": {"curvature_sequences": 8},
    "... 4 directions": {"directions": 4},
    "projected, mean direction, all": {"basis": "mean", "curvature_sequences": 8},
    "hutchinson_diagonal, 1 probe": {"estimator": "hutchinson_diagonal"},
    "hutchinson_diagonal, 4 probes": {"estimator": "hutchinson_diagonal", "probes": 4},
}
DEFAULT = "projected"
MEMORY_CASES = (DEFAULT, "... curvature on all", "projected, mean direction, all",
                "hutchinson_diagonal, 1 probe")
MEMORY_ROWS = 8
MEMORY_UNITS = (2, 4, 8)
MEMORY_DIM = 64  # small: the L k numbers of the sketches are no part of the question

Found = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--units", type=int, default=12, help="of a window, L (default 12)")
    add("--rows", type=int, nargs="+", default=[8],
        help="probe sequences of a unit (default 8); without --full for the default estimator only")
    add("--full", action="store_true",
        help="all --rows with every case that names no number of curvature sequences")
    add("--global-batch-size", type=int, default=64)
    add("--micro-batch-size", type=int, default=8)
    add("--seq-length", type=int, default=256)
    add("--width", type=int, default=128, help="hidden size (default 128)")
    add("--num-layers", type=int, default=5, help="(default 5: 1.1 M parameters)")
    add("--scaled-batch", type=int, nargs="+", default=[512, 2048],
        help="G of the last columns (default 512 2048)")
    add("--scaled-ranks", type=int, nargs="+", default=[64, 2048],
        help="R of the last columns (default 64 2048)")
    options = parser.parse_args()
    if options.units < max(MEMORY_UNITS):
        parser.error(f"--units: got {options.units}, expected {max(MEMORY_UNITS)} or more")
    if len(options.scaled_batch) != len(options.scaled_ranks):
        parser.error("--scaled-batch and --scaled-ranks: expected as many of one as of the other")
    print_machine()
    os.environ |= ENVIRONMENT
    _forked.import_megatron()
    with tempfile.TemporaryDirectory() as folder:
        found = run(Path(folder), options)
    report(found, options)


def run(folder: Path, options: argparse.Namespace) -> Found:
    """Train two windows with all cases in between; return what was measured."""
    data = prepare(folder)["planned"]
    config = json.loads((folder / "run.yaml").read_text())
    config["order"] = {"type": "d3", "window": options.units}
    (folder / "run.yaml").write_text(json.dumps(config))
    flags = shlex.split(f"""
        --num-layers {options.num_layers} --hidden-size {options.width} --num-attention-heads 4
        --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
        --attention-dropout 0 --hidden-dropout 0 --lr 1e-3 --num-workers 0 --log-interval 1000
        --seq-length {options.seq_length} --max-position-embeddings {options.seq_length}
        --micro-batch-size {options.micro_batch_size}
        --global-batch-size {options.global_batch_size} --train-iters {2 * options.units}
        --eval-iters 0 --eval-interval 1000000 --d3-plan-dir {folder / "plan"}""")
    log, result = folder / "log", folder / "found.json"
    pid = _forked.start(
        [*flags, *data], log=log, setup=lambda: install(Cases(options, result)))
    _forked.wait([pid], log=log)
    found: Found = json.loads(result.read_text())
    return found


class Cases:
    """Stands in for the orderer of a run: measures all cases once, leaves the order as stored."""

    def __init__(self, options: argparse.Namespace, result: Path) -> None:
        self.options = options
        self.result = result
        self.found: Found = {"windows": [], "memory": [], "steps": []}

    def order(self, run: Any, draft: Any) -> Any:
        """Take the place of `PlannedRun._order`."""
        from megatron_d3.plan.draft import stored_order

        if draft.step > 0:
            run._clock.mean()
            self._measure(run, draft)
        return stored_order(draft)

    def step_done(self, seconds: float) -> None:
        """Note a training step, hooks left out."""
        self.found["steps"].append(seconds)
        self.result.write_text(json.dumps(self.found))

    def _measure(self, run: Any, draft: Any) -> None:
        for case, keys in CASES.items():
            # A number of curvature sequences belongs to the 8 it is part of.
            takes_all = self.options.full and "curvature_sequences" not in keys
            for num_sequences in self.options.rows if case == DEFAULT or takes_all else (8,):
                row = self._find(run, draft, keys, num_sequences, DIM).row
                self.found["windows"].append(
                    {"case": case, "rows": num_sequences, "seconds": dict(row.seconds),
                     "num_gradients": row.details["num_gradients"]})
        for case in MEMORY_CASES:
            for units in MEMORY_UNITS:
                self.found["memory"].append(
                    {"case": case, "units": units, **self._memory(run, draft, case, units)})

    def _find(self, run: Any, draft: Any, keys: dict[str, Any], rows: int, dim: int) -> Any:
        from megatron_d3.mcore.window import WindowOrderer

        stock = run.orderer
        orderer = WindowOrderer(
            D3Config(window=self.options.units, probe_sequences=rows,
                     sketch=SketchConfig(dim=dim), **keys),
            stock._domains, maker=stock._maker, settings=stock._settings, seed=1)
        orderer.attach(stock._probe.chunks, stock._optimizer)
        return orderer.find(draft, run.plan.decider.table_ids)

    def _memory(self, run: Any, draft: Any, case: str, units: int) -> dict[str, float]:
        """Peaks of allocated bytes: of a window, and of the largest pass through the model in it."""
        from megatron_d3.influence.estimators.pieces import cut_halves

        short = replace(draft, records=draft.records[:units], weights=draft.weights[:units],
                        num_slots=units)
        probe = run.orderer._probe
        window = peak_bytes(lambda: self._find(run, short, CASES[case], MEMORY_ROWS, MEMORY_DIM))
        settings = D3Config(probe_sequences=MEMORY_ROWS, **CASES[case])
        pieces = cut_halves(MEMORY_ROWS, settings.num_curved)
        largest = max(piece.stop - piece.start for piece in pieces)
        pass_bytes = peak_bytes(lambda: self._one_gradient(run, short, largest))
        gradients = sum(p.main_grad.numel() * p.main_grad.element_size() for p in probe.parameters)
        return {"peak": window, "pass": pass_bytes, "gradients": gradients}

    def _one_gradient(self, run: Any, draft: Any, num_sequences: int) -> None:
        from megatron_d3.mcore.probe import UnitSamples

        stock = run.orderer
        number_of = {table_id: i for i, table_id in enumerate(run.plan.decider.table_ids)}

        def read(unit: int, sequence: int) -> Any:
            record = draft.records[unit, sequence]
            domain = stock._domains[number_of[int(record["domain"])]]
            return stock._maker.fields(domain.train_tokens(int(record["sample"])))

        samples = UnitSamples(draft.num_units, num_sequences, read)
        with stock._probe.measuring(samples) as source:
            source.gradient(0, 0, num_sequences)


def peak_bytes(work: Callable[[], Any]) -> int:
    """Return the most bytes that torch holds during `work` above those it held before."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        work()
    held = peak = 0
    for event in prof.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def install(cases: Cases) -> None:
    """In the run's process: replace the order of windows, and time the stock training step."""
    from megatron.training import training

    from megatron_d3.mcore.planned_run import PlannedRun

    PlannedRun._order = lambda run, draft: cases.order(run, draft)  # type: ignore[method-assign]
    stock = training.train_step

    @functools.wraps(stock)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = stock(*args, **kwargs)
        cases.step_done(time.perf_counter() - started)
        return result

    training.train_step = train_step


def busiest(case: str, num_units: int, num_sequences: int, num_ranks: int) -> float:
    """Return what the rank that has most measures, as a share of what one unit takes."""
    # This imports torch, which reads `ENVIRONMENT` when it is.
    from benchmarks._projected import busiest_sequences

    if CASES[case].get("estimator"):  # whole units
        return math.ceil(num_units / num_ranks)
    settings = D3Config(probe_sequences=num_sequences, **CASES[case])
    alone = busiest_sequences(settings, 1, 1)  # one unit on one rank
    return busiest_sequences(settings, num_units, num_ranks) / alone


def report(found: Found, options: argparse.Namespace) -> None:
    L = options.units
    layouts = list(zip(options.scaled_batch, options.scaled_ranks, strict=True))  # (G, R)
    steps = sorted(found["steps"][2:])  # the first ones warm up
    step = sum(steps) / len(steps)
    at = options.global_batch_size
    print(f"plain step of {at} sequences of {options.seq_length} tokens: mean {step * 1e3:.1f} ms, "
          f"median {steps[len(steps) // 2] * 1e3:.1f} ms over {len(steps)} steps; L = {L}, "
          f"k = {DIM}, micro-batches of {options.micro_batch_size}\n")
    rows = []
    for window in found["windows"]:
        seconds = window["seconds"]
        parts = {key: seconds.get(key, 0.0) for key in ("gradients", "sketch", "reduce", "solve")}
        rest = seconds["total"] - sum(parts.values())
        unit = (parts["gradients"] + parts["sketch"] + rest) / L
        fixed = parts["reduce"] + parts["solve"]
        scaled = [
            (busiest(window["case"], L, window["rows"], R) * unit + fixed)
            / (L * step * (G / R) / at) for G, R in layouts]
        share = [f"{100 * part / (L * step):.2f}" for part in (*parts.values(), rest)]
        rows.append((window["case"], window["rows"], f"{window['num_gradients'] / L:.2f}",
                     f"{100 * seconds['total'] / (L * step):.1f} %", *share,
                     *(f"{100 * share:.1f} %" for share in scaled)))
    print("overhead in percent of the window's L training steps, and its parts")
    print_table(
        ("estimator", "probe_sequences", "gradients a unit", "overhead", "gradients", "sketch",
         "reduce", "solve", "rest", *(f"batch {G} on {R} ranks" for G, R in layouts)), rows)
    print("memory: most bytes held in a window beyond those of one pass through the model, in copies "
          "of the local gradients")
    print_table(("estimator", *(f"L = {units}" for units in MEMORY_UNITS)), [
        (case, *(f"{(row['peak'] - row['pass']) / row['gradients']:.2f}"
                 for row in found["memory"] if row["case"] == case)) for case in MEMORY_CASES])


if __name__ == "__main__":
    main()
