"""Print a table as Markdown, after a line that says where it was measured."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version


def print_machine() -> None:
    """Print processor count, Python and the versions that matter."""
    found = []
    for package in ("numpy", "torch", "megatron-core"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} CPUs ({platform.machine()}), load {load:.1f}, Python "
          f"{platform.python_version()}, {', '.join(found)}\n", flush=True)


def processor_seconds() -> float:
    """Return processor time used so far, by this process and by children it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows under a header, columns aligned."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    for i, row in enumerate(cells):
        print("| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |")
        if i == 0:
            print("|" + "|".join("-" * (w + 2) for w in widths) + "|")
    print(flush=True)
