"""What a collective costs: measured between processes of this machine, modelled for many ranks.

    all-reduce   log2(P) alpha + n / beta             n bytes, P ranks
    in a ring    2 (P - 1) alpha + 2 n / beta         what the model is not: see docs/scaling.md
    broadcast    log2(P) (alpha + n / beta)           a binomial tree, not pipelined
"""

from __future__ import annotations

import math
import multiprocessing
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed

_REPEATS = 100


@dataclass(frozen=True)
class Network:
    """Constants of the model.

    Attributes:
        name: where they come from.
        alpha: seconds for each doubling of the number of ranks.
        beta: bytes a second.
        fixed: seconds of each call besides, e.g. for copies between host and device.
    """

    name: str
    alpha: float
    beta: float
    fixed: float = 0.0

    def all_reduce_seconds(self, num_ranks: int, num_bytes: float) -> float:
        """Time of an all-reduce over a tree."""
        if num_ranks == 1:
            return 0.0
        return self.fixed + math.ceil(math.log2(num_ranks)) * self.alpha + num_bytes / self.beta

    def ring_seconds(self, num_ranks: int, num_bytes: float) -> float:
        """Time of an all-reduce in a ring, with half an alpha for each message."""
        return self.fixed + (num_ranks - 1) * self.alpha + 2 * num_bytes / self.beta

    def broadcast_seconds(self, num_ranks: int, num_bytes: float) -> float:
        """Time of a broadcast down a binomial tree."""
        return math.ceil(math.log2(num_ranks)) * (self.alpha + num_bytes / self.beta)


DATACENTRE = Network("assumed", alpha=20e-6, beta=10e9, fixed=100e-6)
"""Assumed, not measured: a doubling takes two messages (up and down a tree) of 10 us each; of an
all-reduced message 10 GB arrive a second; 0.1 ms for copies to the device and back."""


def measure(num_processes: int, sizes: list[int]) -> dict[int, tuple[float, float]]:
    """Return the best and the median seconds of a gloo all-reduce of float64, by bytes, on rank 0.

    Processes are forked: call it before PyTorch has started threads.
    """
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (num_processes, sizes, f"file://{folder}/store", answers)
        processes = [context.Process(target=_rank, args=(rank, *arguments), daemon=True)
                     for rank in range(num_processes)]
        for process in processes:
            process.start()
        found: dict[int, tuple[float, float]] = answers.get(timeout=300)
        for process in processes:
            process.join()
    return found


def _rank(rank: int, num_processes: int, sizes: list[int], store: str, answers: Any) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=num_processes)
    found = {}
    for size in sizes:
        vector = torch.zeros(size // 8, dtype=torch.float64)
        seconds = []
        for _ in range(_REPEATS):
            torch.distributed.barrier()
            start = time.perf_counter()
            torch.distributed.all_reduce(vector)
            seconds.append(time.perf_counter() - start)
        found[size] = min(seconds), statistics.median(seconds)
    torch.distributed.destroy_process_group()
    if rank == 0:
        answers.put(found)


def fit(num_processes: int, measured: dict[int, tuple[float, float]]) -> Network:
    """Return the constants that give the best times of the smallest and the largest message.

    The best: where processes outnumber free cores, the median is that of the scheduler.
    """
    seconds = {size: best for size, (best, _) in measured.items()}
    small, large = min(seconds), max(seconds)
    beta = (large - small) / max(seconds[large] - seconds[small], 1e-9)
    alpha = seconds[small] / math.ceil(math.log2(num_processes))
    return Network(f"gloo, {num_processes} processes", alpha=alpha, beta=beta)
