"""How near to the best order each solver comes, and how long it takes, beside RSR's 10^4 swaps.

Two kinds of S: `dense noise`, independent normal entries, and `structured`, the second order of units
whose gradients share a mean and whose Hessians H_i = F_i^T F_i are of low rank and share a part:
S_ij = g_j^T H_i g_j - g_i^T H_j g_i. The gap is (cost - best) / (random - best), where `best` is the
least cost that any run here found, long iterated searches included, and `random` the mean of all
orders. Times are those of `solve`, from a float64 S to an order.

    python -m benchmarks.solvers --graphs 10 --turns 3
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field

import numpy as np

from benchmarks._table import print_machine, print_table
from megatron_d3.influence.graph import advantage, random_cost, violation_cost
from megatron_d3.influence.settings import D3Config
from megatron_d3.influence.solvers import is_compiled, kernels, solve

CASES: list[tuple[str, D3Config]] = [
    ("row_sum", D3Config(solver="row_sum")),
    ("greedy_insertion", D3Config(solver="greedy_insertion")),
    ("rsr, 10^4 swaps (paper)", D3Config(solver="rsr", swaps=10_000)),
    ("rsr, 10^5 swaps", D3Config(solver="rsr", swaps=100_000)),
    ("insertion", D3Config(solver="insertion")),
    ("ils, 50 rounds", D3Config(solver="ils", solver_rounds=50)),
    ("ils, 200 rounds (default)", D3Config(solver="ils", solver_rounds=200)),
    ("ils, 2000 rounds", D3Config(solver="ils", solver_rounds=2000)),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--units", type=int, nargs="+", default=[60, 240])
    parser.add_argument("--graphs", type=int, default=10, help="of each kind and size")
    parser.add_argument("--turns", type=int, default=3, help="seeds of each solver on a graph")
    parser.add_argument("--best-rounds", type=int, default=5000, help="of the search for the best")
    parser.add_argument("--python", action="store_true", help="without the C extension")
    options = parser.parse_args()
    if options.python:
        kernels._compiled = None
    print_machine()
    print(f"C extension: {'in use' if is_compiled() else 'not in use'}\n")
    for num_units in options.units:
        for kind, make in (("dense noise", dense), ("structured", structured)):
            print(f"{kind} S, L = {num_units}, {options.graphs} graphs x {options.turns} seeds")
            report([make(num_units, seed) for seed in range(options.graphs)], options)


def dense(num_units: int, seed: int) -> np.ndarray:
    """Return S of independent normal entries."""
    return advantage(np.random.default_rng([seed, 0]).standard_normal((num_units, num_units)))


def structured(num_units: int, seed: int, *, width: int = 64, rank: int = 8) -> np.ndarray:
    """Return S of gradients in `width` dimensions with a common mean, and Hessians of low rank."""
    rng = np.random.default_rng([seed, 1])
    gradients = rng.standard_normal((num_units, width)) + 0.5 * rng.standard_normal(width)
    shared = rng.standard_normal((rank, width))
    roots = rng.standard_normal((num_units, rank, width)) + shared  # F_j
    along = np.einsum("jrd,id->ijr", roots, gradients)
    return advantage((along**2).sum(axis=-1))  # of g_i^T H_j g_i


@dataclass
class Runs:
    """Costs (graphs, turns) and seconds of one solver."""

    costs: list[list[float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def report(graphs: list[np.ndarray], options: argparse.Namespace) -> None:
    runs = {name: Runs() for name, _ in CASES}
    best, random = [], []
    for graph in graphs:
        for name, settings in CASES:
            runs[name].costs.append([timed(graph, settings, turn, runs[name])
                                     for turn in range(options.turns)])
        long = D3Config(solver="ils", solver_rounds=options.best_rounds)
        searched = [violation_cost(graph, solve(graph, settings=long, seed=seed))
                    for seed in (101, 102)]
        best.append(min(*searched, *(min(runs[name].costs[-1]) for name, _ in CASES)))
        random.append(random_cost(graph))
    lowest, spread = np.array(best)[:, None], np.array(random)[:, None] - np.array(best)[:, None]
    print(f"best / random: {np.mean(np.array(best) / np.array(random)):.3f}")
    rows = []
    for name, _ in CASES:
        gaps = 100 * (np.array(runs[name].costs) - lowest) / spread
        milliseconds = 1e3 * np.array(runs[name].seconds)
        rows.append((name, f"{gaps.mean():.3f}", f"{gaps.max():.3f}",
                     f"{np.median(milliseconds):.2f}", f"{np.quantile(milliseconds, 0.9):.2f}"))
    print_table(("solver", "mean gap, %", "largest gap, %", "median ms", "90 % ms"), rows)


def timed(graph: np.ndarray, settings: D3Config, seed: int, runs: Runs) -> float:
    """Return the cost of the order found; its seconds are added to `runs`."""
    start = time.perf_counter()
    order = solve(graph, settings=settings, seed=seed)
    runs.seconds.append(time.perf_counter() - start)
    return violation_cost(graph, order)


if __name__ == "__main__":
    main()
