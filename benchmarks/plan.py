"""How fast positions are decided and written, what they take on disk, and the memory of a long run.

    python -m benchmarks.plan --positions 1e8
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks._table import print_machine, print_table
from megatron_d3.mix import Schedule, Static
from megatron_d3.plan import apportion
from megatron_d3.plan.batch_schedule import BatchSchedule
from megatron_d3.plan.decide import Decider
from megatron_d3.plan.header import DomainRecord, RunHeader
from megatron_d3.plan.keeper import PlanKeeper


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--positions", type=float, default=1e8,
                        help="positions of the long run (default 1e8; 1e9 takes 10 GB of disk)")
    options = parser.parse_args()
    print_machine()
    print(f"apportionment: {'compiled' if apportion._compiled else 'Python'}\n")
    rows = [speed(num_domains, batch_size, kind)
            for num_domains in (2, 8, 64, 1000)
            for batch_size in (1024, 1 << 20)
            for kind in ("static", "schedule")]
    print_table(("domains", "positions a round", "mixer", "ms a round", "10^6 positions/s"), rows)
    long_run(int(options.positions))


def decider(num_domains: int, batch_size: int, kind: str, total_samples: int) -> Decider:
    domains = [DomainRecord(f"d{i}", "", 1, 1, 10**6 * (i + 1), 10**9).info
               for i in range(num_domains)]
    weights = {domain.name: float(i + 1) for i, domain in enumerate(domains)}
    if kind == "static":
        mixer: Any = Static(Static.Config(weights), domains, total_samples=total_samples)
    else:
        uniform = dict.fromkeys(weights, 1.0)
        config = Schedule.Config(knots=((0, weights), (10**6, uniform)), interpolation="linear")
        mixer = Schedule(config, domains, total_samples=total_samples)
    return Decider(
        domains=domains, table_ids=range(num_domains), mixer=mixer, cap=None,
        total_samples=total_samples, batch_schedule=BatchSchedule.constant(batch_size), seed=1)


def speed(num_domains: int, batch_size: int, kind: str) -> tuple[str, ...]:
    """Decide rounds for about a second, in memory."""
    subject = decider(num_domains, batch_size, kind, 10**12)
    state, num_rounds, start = subject.init(), 0, time.perf_counter()
    while time.perf_counter() - start < 1 or num_rounds < 2:
        decided = subject.decide(state)
        assert decided is not None
        state, num_rounds = decided[0], num_rounds + 1
    seconds = (time.perf_counter() - start) / num_rounds
    return (f"{num_domains:,}", f"{batch_size:,}", kind, f"{seconds * 1e3:.3f}",
            f"{batch_size / seconds / 1e6:.1f}")


def long_run(total_samples: int, batch_size: int = 1 << 16, num_domains: int = 8) -> None:
    """Decide and write a whole run."""
    subject = decider(num_domains, batch_size, "static", total_samples)
    header = RunHeader(
        seq_length=1, seed=1, tokenizer="t", total_samples=total_samples,
        batch_schedule=subject.batch_schedule, config={}, versions={},
        domains=tuple(DomainRecord(d.name, "", 1, 1, d.num_samples, d.num_tokens)
                      for d in subject.domains))
    with tempfile.TemporaryDirectory() as folder:
        start, memory = time.perf_counter(), _peak_megabytes()
        keeper = PlanKeeper.open(Path(folder) / "plan", header, lambda h, ids: subject)
        for until in range(batch_size, total_samples + batch_size, batch_size):
            keeper.advance(min(until, total_samples))
        keeper.close()
        seconds = time.perf_counter() - start
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    print_table(
        ("positions", "rounds", "10^6 positions/s written", "bytes a position", "memory growth MB"),
        [(f"{total_samples:,}", f"{-(-total_samples // batch_size):,}",
          f"{total_samples / seconds / 1e6:.1f}", f"{size / total_samples:.3f}",
          f"{_peak_megabytes() - memory:.0f}")])


def _peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
