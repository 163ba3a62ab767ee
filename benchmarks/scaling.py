"""What a plan costs with 1 to 16,384 data-parallel ranks and 100 to 30,000 domains; no training.

    python -m benchmarks.scaling                       # all of it, a few minutes of one core
    python -m benchmarks.scaling --stock-ranks 16384   # every rank against Megatron's own sampler

Four kinds of numbers, apart: *counted* (positions that ranks share, bytes), *measured* (CPU time of
one rank, gloo between processes of this machine), *assumed* (constants of a datacentre's network),
and *modelled* from these: nothing here has run on more than four processes.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: processes are forked

from collections.abc import Sequence
from typing import Any

from benchmarks import _network
from benchmarks._constants import (
    Step,
    log_seconds,
    measure_step,
    reduced_bytes,
    tally_seconds,
    window_exchange,
)
from benchmarks._network import DATACENTRE, Network
from benchmarks._partition import Life, odd_rank_is_noticed, prove, stock_seconds
from benchmarks._projected import busiest_sequences
from benchmarks._table import print_machine, print_table
from megatron_d3.influence.settings import D3Config
from megatron_d3.plan.apportion import MAX_DOMAINS, is_compiled

RANKS = (1, 64, 1024, 16_384)
DOMAINS = (100, 1_000, 10_000, 30_000)
SMALLEST_BATCH = 1024
KINDS = (("static", "apportion"), ("static", "multinomial"), ("schedule", "multinomial"))
GOAL = 0.01  # of a step of one second
Steps = dict[tuple[int, int, str, str], Step]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stock-ranks", type=int, default=32,
                        help="ranks compared with the stock sampler in the first case (32 in the others)")
    parser.add_argument("--domains", type=int, nargs="+", default=DOMAINS)
    options = parser.parse_args()
    print_machine()
    print(f"apportionment: {'compiled' if is_compiled() else 'Python'}; "
          f"at most {MAX_DOMAINS:,} domains: a position names its domain by an int16\n")
    networks = [*gloo(), DATACENTRE]
    partition(options.stock_ranks)
    steps = measured(options.domains)
    extras(options.domains)
    sizes(steps, options.domains)
    modelled(steps, networks, options.domains)
    windows()


def batch_size(num_ranks: int, accumulation: int = 1) -> int:
    """Micro-batch 1; few ranks accumulate to a batch worth planning."""
    return max(SMALLEST_BATCH, num_ranks * accumulation)


def gloo() -> list[Network]:
    """Time the all-reduce between processes of this machine; first, while torch has no threads."""
    print("measured: all-reduce by gloo between local processes\n")
    sizes_ = [72, *(reduced_bytes(k) for k in DOMAINS)]
    networks, rows = [], []
    for num_processes in (2, 4):
        found = _network.measure(num_processes, sizes_)
        network = _network.fit(num_processes, found)
        networks.append(network)
        for num_bytes, (best, median) in found.items():
            rows.append((num_processes, f"{num_bytes:,}", f"{best * 1e3:.3f}", f"{median * 1e3:.3f}"))
        print(f"{network.name}: alpha {network.alpha * 1e6:.0f} us, beta {network.beta / 1e9:.2f} GB/s "
              "(from the best)")
    print()
    print_table(("processes", "bytes", "best ms", "median ms"), rows)
    return networks[-1:]  # four processes: more than one doubling


def partition(num_stock_ranks: int) -> None:
    """Count who trains on what at 16,384 ranks."""
    from megatron.training.datasets.data_samplers import MegatronPretrainingSampler

    print("counted: 16,384 ranks, 1,000 domains; `then` is a resume at another layout\n")
    cases: list[tuple[str, int, list[Life], int | None]] = [
        ("16,384 x 1, then 8,192 x 2", 16_384, [Life(16_384, 1, 3), Life(8_192, 2, 4)], None),
        ("the same, windows of 4, resumed inside one", 16_384,
         [Life(16_384, 1, 3), Life(8_192, 2, 4)], 4),
        ("16,384 x 1 x 4, then 4,096 x 1 x 16, then 16,384 x 4", 65_536,
         [Life(16_384, 1, 2), Life(4_096, 1, 2), Life(16_384, 4, 2)], None),
        ("the same, windows of 4, resumed inside one", 65_536,
         [Life(16_384, 1, 2), Life(4_096, 1, 3), Life(16_384, 4, 1)], 4)]
    rows: list[tuple[Any, ...]] = []
    for name, size, lives, window in cases:
        found = prove(size, lives, window=window, sampler=MegatronPretrainingSampler,
                      stock_ranks=min(num_stock_ranks, 32) if rows else num_stock_ranks)
        rows.append((
            name, f"{size:,}", f"{found.num_positions:,}", found.num_missing, found.num_repeated,
            found.num_repeated_samples, "yes" if found.is_one_plan else "NO",
            f"{found.num_differing} of {found.stock_ranks:,}"))
    print_table(("ranks x micro-batch x accumulation", "batch", "positions", "missing", "repeated",
                 "samples repeated", "one plan", "ranks unlike stock"), rows)
    print("one rank of 16,384 with another plan is noticed: "
          f"{'yes' if odd_rank_is_noticed(16_384) else 'NO'}")
    for size in (16_384, 65_536):
        seconds = stock_seconds(MegatronPretrainingSampler, size, 16_384)
        print(f"measured: the stock sampler's own loop over a global batch of {size:,}: "
              f"{seconds * 1e3:.2f} ms of every rank")
    print()


def measured(domains: Sequence[int]) -> Steps:
    """Run the plan's part of a step on rank 0 for every table row."""
    print("measured: CPU ms a step; bytes a step that rank 0 writes\n")
    batches = sorted({batch_size(p) for p in RANKS} | {batch_size(max(RANKS), 4)})
    steps, rows = {}, []
    for k in domains:
        for size in batches:
            for mixer, sampling in KINDS:
                # Ranks accumulate to the smallest batch; more read ahead than a batch otherwise.
                ranks = [p for p in RANKS if batch_size(p) == size]
                step = steps[k, size, mixer, sampling] = measure_step(
                    k, size, mixer=mixer, sampling=sampling, ranks=ranks)
                rows.append((
                    f"{k:,}", f"{size:,}", mixer, sampling, f"{step.decide * 1e3:.2f}",
                    f"{step.rest * 1e3:.2f}", f"{step.write * 1e3:.2f}", f"{step.ledger:,}",
                    f"{step.rounds:,}", f"{step.positions:,}"))
    print_table(("domains", "batch", "mixer", "sampling", "decide", "ring, hash, observe",
                 "write, rank 0", "ledger bytes", "rounds bytes", "positions bytes"), rows)
    return steps


def extras(domains: Sequence[int]) -> None:
    """What comes with a step besides the plan."""
    print("measured: CPU ms, in no sum below\n")
    rows = []
    for k in domains:
        step, line, board = log_seconds(k)
        rows.append((f"{k:,}", f"{tally_seconds(k) * 1e3:.2f}", f"{step * 1e3:.2f}",
                     f"{line * 1e3:.1f}", f"{board * 1e3:.0f}"))
    print_table(("domains", "tally, a micro-batch of 1 (on the CPU)", "metrics, no output",
                 "line in the log", "TensorBoard points of a step"), rows)


def sizes(steps: Steps, domains: Sequence[int]) -> None:
    """Bytes that go between ranks."""
    print("counted: bytes that every rank gives or gets\n")
    rows = []
    for k in domains:
        for p in RANKS:
            size = batch_size(p)
            static, moving = (steps[k, size, *kind] for kind in (KINDS[1], KINDS[2]))
            rows.append((
                f"{p:,}", f"{k:,}", f"{reduced_bytes(k):,}",
                f"{reduced_bytes(k, has_reference=True):,}", f"{static.broadcasts[p]:,}",
                f"{moving.broadcasts[p]:,}", f"{static.snapshot:,}",
                f"{DATACENTRE.broadcast_seconds(p, static.broadcasts[p]) * 1e3:.1f}"))
    print_table(("ranks", "domains", "all-reduce", "with DoReMi", "start-up, static",
                 "start-up, moving weights", "state file", "start-up ms, assumed network"), rows)


def modelled(steps: Steps, networks: Sequence[Network], domains: Sequence[int]) -> None:
    """Put measured times and the network's model together."""
    print("modelled: ms of a step of one second. Rank 0's CPU (measured) + all-reduce (model)")
    for network in networks:
        print(f"  {network.name}: alpha {network.alpha * 1e6:.0f} us, beta {network.beta / 1e9:.2f} GB/s, "
              f"fixed {network.fixed * 1e3:.1f} ms")
    print()
    rows = []
    layouts = [(p, batch_size(p)) for p in RANKS] + [(max(RANKS), batch_size(max(RANKS), 4))]
    for k in domains:
        for p, size in layouts:
            num_bytes = reduced_bytes(k)
            reduced = [network.all_reduce_seconds(p, num_bytes) for network in networks]
            cpu = [_cpu(steps[k, size, *kind]) for kind in KINDS]
            shares = [(seconds + reduced[-1]) / 1.0 for seconds in cpu]
            rows.append((
                f"{p:,}", f"{k:,}", f"{size:,}", *(f"{r * 1e3:.2f}" for r in reduced),
                f"{DATACENTRE.ring_seconds(p, num_bytes) * 1e3:.1f}" if p > 1 else "0.0",
                *(f"{seconds * 1e3:.1f}" for seconds in cpu),
                *(f"{share:.2%}{'' if share <= GOAL else ' NO'}" for share in shares)))
    kinds = [f"{mixer}, {sampling}" for mixer, sampling in KINDS]
    print_table(("ranks", "domains", "batch", *(f"reduce, {n.name}" for n in networks),
                 "reduce, ring of the assumed", *(f"CPU {kind}" for kind in kinds),
                 *(f"share {kind}" for kind in kinds)), rows)


def _cpu(step: Step) -> float:
    return step.decide + step.rest + step.write


def windows() -> None:
    """What D3 exchanges, and how much of a window its probe takes."""
    print("counted: D3 in a window; modelled: time of the exchange, share of the probe\n")
    rows = []
    for name in ("projected", "hutchinson_diagonal", "look_ahead"):
        settings = D3Config(estimator=name)  # type: ignore[arg-type]
        found = window_exchange(settings)
        seconds = (DATACENTRE.all_reduce_seconds(16_384, found.num_bytes)
                   + (found.calls - 1) * DATACENTRE.all_reduce_seconds(16_384, 0))
        rows.append((name, settings.window, settings.sketch.dim, found.calls, f"{found.num_bytes:,}",
                     found.vectors, f"{seconds * 1e3:.1f}", f"{found.gradients:g}"))
    print_table(("estimator", "L", "k", "all-reduces", "bytes", "vectors of the gradient's size",
                 "ms, 16,384 ranks, assumed network", "gradients a unit"), rows)
    settings = D3Config()
    shares = []
    for p in RANKS:
        for size in sorted({batch_size(p), batch_size(p, 4)}):
            probed = busiest_sequences(settings, settings.window, p)
            trained = settings.window * size // p
            shares.append((
                f"{p:,}", f"{size:,}", f"{probed:,}", f"{trained:,}", f"{probed / trained:.1%}"))
    print_table(("ranks", "batch", "sequences probed by the busiest (projected)",
                 "sequences trained by each", "probe / training"), shares)


if __name__ == "__main__":
    main()
