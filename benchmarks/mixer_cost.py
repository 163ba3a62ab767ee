"""What an online mixer costs: alone, and a whole step of a run with ODM beside one with static.

The first table times one decision and one observed step of each mixer. The second trains the same
model on the same corpora under both, in turns, as `benchmarks.step_overhead` does.

    python -m benchmarks.mixer_cost --steps 100 --turns 3 --processes 1
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._table import print_machine, print_table
from benchmarks.step_overhead import prepare, run
from megatron_d3.mix import MIXERS
from megatron_d3.plan.batch_schedule import BatchSchedule
from megatron_d3.plan.decide import Decider
from megatron_d3.types import DomainInfo, StepSignals

NUM_DOMAINS = (7, 22, 100, 1000)
BATCH = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100, help="of each run; 0: mixers alone")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--global-batch-size", type=int, default=16)
    options = parser.parse_args()
    print_machine()
    print("microseconds of one decision and one observed step, median of 200 "
          f"(global batch {BATCH})")
    print_table(("mixer", *(f"K = {k}" for k in NUM_DOMAINS)), [
        (label, *(f"{alone(name, settings(k), k):.0f}" for k in NUM_DOMAINS))
        for label, name, settings in CASES])
    if options.steps:
        report(*trained(options))


CASES: list[tuple[str, str, Any]] = [
    ("static", "static", lambda k: {}),
    ("odm", "odm", lambda k: {}),
    ("odm paper", "odm", lambda k: {"variant": "paper"}),
    ("ado", "ado", lambda k: {"ignore_steps": 0, "start_step": 50, "fit_steps": 50}),
    ("reference_loss", "reference_loss", lambda k: {"losses": {f"d{i}": 2.0 for i in range(k)}}),
]


def alone(name: str, settings: dict[str, Any], num_domains: int) -> float:
    """Return the median microseconds of one decision and one observed step."""
    domains = [DomainInfo(f"d{i}", 10**6, 10**9) for i in range(num_domains)]
    mixer_class: Any = MIXERS[name]
    mixer = mixer_class(mixer_class.Config(**settings), domains, total_samples=10**6)
    decider = Decider(domains, range(num_domains), mixer, None, 10**7,
                      BatchSchedule.constant(BATCH), 1)
    state, rng, times = decider.init(), np.random.default_rng(0), []
    num_tokens = np.full(num_domains, 1000)
    for step in range(1, 201):
        signals = StepSignals(
            step, BATCH * step, rng.uniform(1, 4, num_domains) * num_tokens, num_tokens)
        start = time.perf_counter()
        decided = decider.decide(state)
        assert decided is not None
        state = decider.observe(decided[0], signals)
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1e6


def trained(options: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return seconds of each step, and processor seconds in its hooks, by mixer."""
    times: dict[str, list[float]] = {"static": [], "odm": []}
    in_hooks: dict[str, list[float]] = {"static": [], "odm": []}
    with tempfile.TemporaryDirectory() as folder:
        planned = prepare(Path(folder))["planned"]
        for turn in range(options.turns):
            # Each goes first in every other turn: what drifts with time hits both.
            for name in sorted(times, reverse=bool(turn % 2)):
                data = [*planned, "--d3-set", f"mix={{type: {name}}}"]
                result = run(Path(folder) / f"{name}{turn}", data, options)
                times[name] += np.diff(result["done_at"])[5:].tolist()  # after warming up
                hooks = np.array(result["in_hooks"])  # before and after each step
                in_hooks[name] += (hooks[0::2, 1] + hooks[1::2, 1])[5:].tolist()
    return times, in_hooks


def report(times: dict[str, list[float]], in_hooks: dict[str, list[float]]) -> None:
    print_table(
        ("mixer", "steps", "median ms", "10 %", "90 %", "hooks, processor ms"),
        [(name, len(seconds), *(f"{np.quantile(seconds, q) * 1e3:.2f}" for q in (0.5, 0.1, 0.9)),
          f"{np.median(in_hooks[name]) * 1e3:.3f}") for name, seconds in times.items()])
    static, odm = (float(np.median(times[name])) for name in ("static", "odm"))
    more = float(np.median(in_hooks["odm"]) - np.median(in_hooks["static"]))
    print(f"median ratio odm / static: {odm / static:.4f} (noise of a shared machine included)")
    print(f"processor time that odm adds to a step: {more * 1e3:.3f} ms, {more / static:.3%}")


if __name__ == "__main__":
    main()
