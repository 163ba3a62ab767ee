"""What a sketch of one gradient costs, in multiples of the time to read the gradient once.

    python -m benchmarks.sketch --elements 1e8 --dim 3500

All rows are measured in turn, several turns, and the best of each is taken. What would take minutes
is measured on fewer elements and multiplied, as its row says; that favours it, where the smaller
part fits a cache.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks._table import print_machine, print_table
from megatron_d3.influence import sketch
from megatron_d3.influence.layout import Layout, dim_slice, whole_tensor
from megatron_d3.influence.settings import SketchConfig

TRAK_BLOCK = 100
"""Columns that TRAK's BasicProjector draws at a time (`block_size`); dattri's does the same."""


class Row(NamedTuple):
    """One way to sketch, measured on a part of the work."""

    name: str
    call: Callable[[], Any]
    share: float = 1
    """What `call` does, as a part of a whole gradient's sketch."""
    remark: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=float, default=1e8, help="float32 of the gradient")
    parser.add_argument("--dim", type=int, default=3500, help="numbers of a sketch")
    parser.add_argument("--turns", type=int, default=7, help="times each row is measured")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    print_machine()
    print(f"C extension: {'yes' if sketch.is_compiled() else 'no'}\n")
    size, dim = int(options.elements), options.dim
    x = torch.from_numpy(np.random.default_rng(0).standard_normal(size, np.float32))
    for num_threads in options.threads:
        torch.set_num_threads(num_threads)
        rows = [Row("read (torch.sum)", x.sum), *ours(x, dim), *dense(x, dim)]
        seconds = measure(rows, options.turns)
        wall, cpu = seconds[0]
        print(f"{num_threads} thread(s), {size:.3g} float32, dim {dim}: reading once takes "
              f"{wall * 1e3:.1f} ms, {size * 4 / wall / 1e9:.1f} GB/s ({size * 4 / cpu / 1e9:.1f} "
              "GB a CPU second)\n")
        print_table(
            ("kind", "seconds", "x read", "CPU seconds", "x read's CPU", "measured on"),
            [(row.name, f"{s:.3g}", f"{s / wall:.3g}", f"{c:.3g}", f"{c / cpu:.3g}", row.remark)
             for row, (s, c) in zip(rows, seconds, strict=True)])


def ours(x: torch.Tensor, dim: int) -> Iterator[Row]:
    """Yield the package's kinds, in C and in PyTorch."""
    half = x.numel() // 4096 // 2 * 4096
    yield Row("rotation", on(x, "rotation", dim))
    yield Row("rotation, bf16", on(x.bfloat16(), "rotation", dim), remark="a gradient in bf16")
    rows = dim_slice("w", (half // 2048, 4096), 1, 0, 2048)
    yield Row("rotation, row-parallel", on(x[:half], "rotation", dim, Layout(
        ((rows,),), {"w": rows.global_size})), half / x.numel(), "half of a matrix, 2048 columns")
    yield Row("rotation_srht", on(x, "rotation_srht", dim))
    yield Row("count", on(x, "count", dim))
    few = min(x.numel(), 20_000)
    yield Row("gaussian", on(x[:few], "gaussian", dim), few / x.numel(), f"{few:,} elements")
    part = min(x.numel(), 2_000_000)
    for kind in ("rotation", "count"):
        yield Row(f"{kind}, PyTorch", in_torch(on(x[:part], kind, dim)), part / x.numel(),
                  f"{part:,} elements")
    few = min(x.numel(), 400)
    yield Row("gaussian, PyTorch", in_torch(on(x[:few], "gaussian", dim)), few / x.numel(),
              f"{few:,} elements")


def dense(x: torch.Tensor, dim: int) -> Iterator[Row]:
    """Yield a dense projection as TRAK and dattri do it without CUDA kernels of their own."""
    part = min(x.numel(), 200_000)
    generator = torch.Generator()
    matrix = torch.empty(part, TRAK_BLOCK)
    share = part / x.numel() * TRAK_BLOCK / dim

    def project() -> torch.Tensor:
        matrix.normal_(generator=generator.manual_seed(0))
        return x[None, :part] @ matrix

    yield Row("dense, drawn anew", project, share, f"{part:,} elements, {TRAK_BLOCK} columns")
    gigabytes = x.numel() * dim * 4 / 1e9
    yield Row("dense, matrix kept", lambda: x[None, :part] @ matrix, share,
              f"the same; would need {gigabytes:,.0f} GB")


def on(
    x: torch.Tensor, kind: Any, dim: int, layout: Layout | None = None
) -> Callable[[], torch.Tensor]:
    layout = layout or Layout(
        ((whole_tensor("w", x.shape),),), {"w": x.numel(), "other": dim})  # x may be a small part
    made = sketch.make_sketch(SketchConfig(kind, dim), layout)
    return lambda: made([x])


def in_torch(call: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        with without_c():
            return call()

    return run


@contextmanager
def without_c() -> Iterator[None]:
    compiled, sketch._compiled = sketch._compiled, None
    try:
        yield
    finally:
        sketch._compiled = compiled


def measure(rows: list[Row], num_turns: int) -> list[tuple[float, float]]:
    """Return the least (wall, CPU) seconds of each row, for the whole work."""
    best = [(float("inf"), float("inf"))] * len(rows)
    for _ in range(num_turns):
        for i, row in enumerate(rows):
            cpu, wall = time.process_time(), time.perf_counter()
            row.call()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            best[i] = (min(best[i][0], wall / row.share), min(best[i][1], cpu / row.share))
    return best


if __name__ == "__main__":
    main()
