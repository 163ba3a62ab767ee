"""What an online mixer costs: alone, and a whole step of a run with ODM beside one with static.

The first table times one decision and one observed step of each mixer. The second trains the same
model on the same corpora under both, one step of each in turns (`benchmarks/_interleaved.py`), and
gives the median ratio of neighbouring steps, by the clock and in processor time.

    python -m benchmarks.mixer_cost --steps 60 --turns 4           # 5 minutes on an idle core
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import _forked
from benchmarks._interleaved import Steps, measure, ratio, shown
from benchmarks._table import print_machine, print_table
from benchmarks.step_overhead import MODEL, prepare
from megatron_d3.mix import MIXERS
from megatron_d3.plan.batch_schedule import BatchSchedule
from megatron_d3.plan.decide import Decider
from megatron_d3.types import DomainInfo, StepSignals

NUM_DOMAINS = (7, 22, 100, 1000)
BATCH = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60, help="of each run and turn; 0: mixers alone")
    parser.add_argument("--turns", type=int, default=4, help="each with fresh processes")
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--global-batch-size", type=int, default=4)
    options = parser.parse_args()
    print_machine()
    print("microseconds of one decision and one observed step, median of 200 "
          f"(global batch {BATCH})")
    print_table(("mixer", *(f"K = {k}" for k in NUM_DOMAINS)), [
        (label, *(f"{alone(name, settings(k), k):.0f}" for k in NUM_DOMAINS))
        for label, name, settings in CASES])
    if options.steps:
        report(trained(options))


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


def trained(options: argparse.Namespace) -> dict[str, Steps]:
    """Return the steps of each mixer's run."""
    os.environ |= {"OMP_NUM_THREADS": "1", "MEGATRON_D3_DEVICE": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
    _forked.import_megatron()
    found: dict[str, list[Steps]] = {"static": [], "odm": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = [
            *MODEL, *prepare(folder)["planned"], "--num-workers", "0", "--seq-length",
            str(options.seq_length), "--max-position-embeddings", str(options.seq_length),
            "--micro-batch-size", str(options.micro_batch_size), "--global-batch-size",
            str(options.global_batch_size)]
        for turn in range(options.turns):
            # Each goes first in every other turn.
            runs = {mixer: [*flags, "--d3-set", f"mix={{type: {mixer}}}", "--d3-plan-dir",
                            str(folder / f"{mixer}{turn}")]
                    for mixer in sorted(found, reverse=turn % 2 == 0)}
            steps = measure(runs, folder / f"turn{turn}", num_steps=options.steps)
            for mixer, parts in found.items():
                parts.append(steps[mixer])
    return {mixer: Steps.joined(parts) for mixer, parts in found.items()}


def report(found: dict[str, Steps]) -> None:
    print_table(
        ("mixer", "steps", "median ms", "10 %", "90 %", "processor ms", "of it in hooks"),
        [(name, len(steps.wall),
          *(f"{np.quantile(steps.wall, q) * 1e3:.2f}" for q in (0.5, 0.1, 0.9)),
          *(f"{np.median(x) * 1e3:.3f}" for x in (steps.processor, steps.hooks)))
         for name, steps in found.items()])
    static, odm = found["static"], found["odm"]
    for of in ("wall", "processor"):
        print(f"odm / static, {of} time: median ratio of neighbouring steps and its 95 % interval "
              f"{shown(ratio(odm, static, of))}")
    more = float(np.median(odm.hooks) - np.median(static.hooks))
    print(f"processor time that odm adds in the hooks: {more * 1e3:.3f} ms a step, "
          f"{more / np.median(static.processor):.3%} of it (the aim is 0.5 %)")


if __name__ == "__main__":
    main()
