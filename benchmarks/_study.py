"""A study: many short training runs, a cell each, and a line in a file for each finished one.

    OUT/recipe.json      what the cells were made from; another recipe needs another folder
    OUT/results.jsonl    a row for each finished cell
    OUT/<cell>.yaml, <cell>.log, <cell>/    its configuration, output and plan

A finished cell is never run again, so a study may be stopped and started, and be given more cells.
Runs are forked from one process that has imported Megatron, one thread each.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

type Cell = tuple[str | int, ...]

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MEGATRON_D3_DEVICE": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
"""Of a process that runs a study; to be set before torch is imported."""


def demo_corpus(out: Path, max_mb_per_domain: float) -> tuple[Any, dict[str, Any]]:
    """Build OUT/corpus or find it.

    Returns:
        The corpus, and its domains as in a `--d3-config`.
    """
    from megatron_d3.corpus.demo import build_demo_corpus

    corpus = build_demo_corpus(
        out / "corpus", max_bytes_per_domain=int(max_mb_per_domain * 1e6), vocab_size=1024)
    domains = {
        d.name: {"paths": [str(out / "corpus" / d.train.prefix)],
                 "valid_paths": [str(out / "corpus" / d.valid.prefix)]} for d in corpus.domains}
    return corpus, domains


class Study:
    """A folder of finished and unfinished cells.

    Attributes:
        out: the folder.
        keys: the entries of a row that name its cell, e.g. mixer and seed.
        results: a row for each finished cell.
    """

    def __init__(self, out: Path, keys: Sequence[str], *, recipe: Mapping[str, Any]) -> None:
        """Read what is finished; refuse a folder of another recipe."""
        self.out = out
        self.keys = tuple(keys)
        self.results: dict[Cell, dict[str, Any]] = {}
        path, text = out / "recipe.json", json.dumps(recipe)
        if path.exists() and path.read_text() != text:
            raise SystemExit(f"{path}: these runs were made from another recipe or corpus; give "
                             "another --out")
        path.write_text(text)
        if (out / "results.jsonl").exists():
            for line in (out / "results.jsonl").read_text().splitlines():
                row = json.loads(line)
                self.results[tuple(row[key] for key in self.keys)] = row

    def arguments(self, cell: Cell) -> list[str]:
        """Write what the cell's run reads, and return its flags."""
        raise NotImplementedError

    def read(self, cell: Cell) -> dict[str, Any]:
        """Return what a run came to; time and names are added."""
        raise NotImplementedError

    def needs(self, cell: Cell) -> Cell | None:
        """Return the cell that must be finished before this one, if any."""
        return None

    def folder(self, cell: Cell) -> Path:
        """Where the cell's run writes."""
        return self.out / "-".join(str(part).replace(" ", "-") for part in cell)

    def log(self, cell: Cell) -> Path:
        """The output of the cell's run."""
        folder = self.folder(cell)
        return folder.with_name(folder.name + ".log")

    def config(self, cell: Cell, content: Mapping[str, Any]) -> Path:
        """Write the cell's configuration."""
        folder = self.folder(cell)
        path = folder.with_name(folder.name + ".yaml")
        path.write_text(json.dumps(content, indent=1))
        return path

    def run(self, wanted: Sequence[Cell], jobs: int = 1) -> None:
        """Run what is not finished, as many at a time as there are jobs."""
        todo = [cell for cell in wanted if cell not in self.results]
        if not todo:
            return
        from benchmarks import _forked

        _forked.import_megatron()
        running: dict[int, tuple[Cell, float]] = {}
        while todo or running:
            ready = [cell for cell in todo
                     if self.needs(cell) is None or self.needs(cell) in self.results]
            for cell in ready[:jobs - len(running)]:
                todo.remove(cell)
                shutil.rmtree(self.folder(cell), ignore_errors=True)  # of a run that was stopped
                running[_forked.start(self.arguments(cell), log=self.log(cell))] = (
                    cell, time.monotonic())
            pid, status, usage = os.wait4(-1, 0)
            cell, started_at = running.pop(pid)
            if status:
                raise SystemExit(f"{cell} failed; see {self.log(cell)}")
            seconds = time.monotonic() - started_at
            self._finish(cell, {"processor_seconds": round(usage.ru_utime + usage.ru_stime, 1),
                                "wall_seconds": round(seconds, 1)})
            print(f"{', '.join(map(str, cell))}: {seconds:.0f} s, {len(todo) + len(running)} left",
                  file=sys.stderr, flush=True)

    def _finish(self, cell: Cell, times: Mapping[str, float]) -> None:
        row = {**dict(zip(self.keys, cell, strict=True)), **times, **self.read(cell)}
        with (self.out / "results.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        self.results[cell] = row


_T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571}  # two-sided 95 %, by degrees of freedom


def interval(numbers: np.ndarray, digits: int = 4) -> str:
    """Return mean and half width of the 95 % interval of (n,), Student's t with n - 1 degrees.

    >>> interval(np.array([1.0, 2.0, 3.0]), digits=2)
    '+2.00 +- 2.48'
    """
    text = f"{numbers.mean():+.{digits}f}"
    freedom = len(numbers) - 1
    if freedom < 1:
        return text
    # Above 5 the first terms of its expansion in 1 / freedom: 2.446 for 2.447 at 6.
    t = _T.get(freedom, 1.960 + 2.372 / freedom + 2.823 / freedom**2)
    return f"{text} +- {t * numbers.std(ddof=1) / len(numbers)**0.5:.{digits}f}"
