"""`megatron-d3 plot weights|losses|table RUN...`: what runs did, side by side, from their plans.

`megatron-d3 plot graph RUN`: the influence graph of one of its windows, and the order found.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from megatron_d3.cli.plan import plan_directory
from megatron_d3.curves import RunCurves, held_out_table, last_held_out, read_curves
from megatron_d3.errors import PlanError
from megatron_d3.plan.windows import (
    WindowRow,
    arrays_path,
    read_arrays,
    read_windows,
    stored_arrays,
)
from megatron_d3.plots import plot_graph, plot_losses, plot_weights

NAME = "plot"
HELP = "draw weights, shares and losses of runs, or a window's influence graph; print last losses"
EXAMPLE = """\
megatron-d3 plot weights runs/demo/uniform runs/demo/shift --out weights.png
megatron-d3 plot losses runs/demo/uniform runs/demo/shift --out losses.svg
megatron-d3 plot table runs/demo/uniform runs/demo/shift
megatron-d3 plot graph runs/d3 --round 120 --out graph.png"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subverbs and their flags."""
    verbs = parser.add_subparsers(dest="subverb", required=True, metavar="weights|losses|table|graph")
    weights = verbs.add_parser("weights", help="target weights and realised shares over steps")
    losses = verbs.add_parser("losses", help="training and held-out loss over steps, per domain")
    table = verbs.add_parser("table", help="print the last held-out loss of each domain and run")
    graph = verbs.add_parser("graph", help="influence of the units of a window, and their order")
    for verb in (weights, losses, graph):
        verb.add_argument("--out", required=True, type=Path, metavar="FILE",
                          help="image to write; its suffix (.png, .svg, .pdf) is its format")
    for verb in (weights, losses):
        verb.add_argument("--window", type=_positive, metavar="STEPS",
                          help="steps that losses and shares are averaged over (default: a "
                               "fortieth of the run)")
    table.add_argument("--json", action="store_true", help="print JSON, a line a run")
    graph.add_argument("--round", type=int, metavar="N",
                       help="the first round of the window (default: the last window's)")
    for verb, number in ((weights, "+"), (losses, "+"), (table, "+"), (graph, 1)):
        verb.add_argument("runs", type=Path, nargs=number, metavar="RUN",
                          help="a run's --save directory, or its plan directory")


def run(args: argparse.Namespace) -> int:
    """Carry out the subverb; see `megatron-d3 plot --help`."""
    if args.subverb == "graph":
        draw_graph(plan_directory(args.runs[0]), args.round, args.out)
        print(args.out)
        return 0
    curves = _read(args.runs, getattr(args, "window", None))
    if args.subverb == "table":
        print(_json(curves) if args.json else held_out_table(curves))
        return 0
    draw = {"weights": plot_weights, "losses": plot_losses}[args.subverb]
    draw(curves, args.out)
    print(args.out)
    return 0


def draw_graph(folder: Path, round_number: int | None, out: Path) -> None:
    """Draw the window that begins with a round, or the last one.

    Raises:
        PlanError: there is none, or nothing is known of it.
        ConfigError: the image cannot be drawn.
    """
    if round_number is None:
        stored = stored_arrays(folder)
        if not stored:
            raise PlanError(f"{folder}: no windows here; runs with order: {{type: d3}} write them")
        round_number = int(stored[-1].stem)
    arrays = read_arrays(folder, round_number)
    missing = [key for key in ("advantage", "order") if key not in arrays]
    if missing:
        raise PlanError(f"{arrays_path(folder, round_number)}: holds no {' and no '.join(missing)}; "
                        "nothing to draw")
    plot_graph(names_of([folder])[0], _row(folder, round_number), arrays, out)


def _row(folder: Path, round_number: int) -> WindowRow:
    for row, _, _ in read_windows(folder):
        if row.round == round_number:
            return row
    raise PlanError(f"{folder}: has arrays of the window of round {round_number} but no line about "
                    "it; the run stopped while it was written, a resume writes it again")


def _read(runs: Sequence[Path], window: int | None) -> list[RunCurves]:
    folders = [plan_directory(run) for run in runs]
    return [read_curves(folder, name=name, window_steps=window)
            for folder, name in zip(folders, names_of(folders), strict=True)]


def names_of(folders: Sequence[Path]) -> list[str]:
    """Name runs by as many trailing parts of their plan directories as tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    parts = [part[:-1] if part[-1] == "d3" else part for part in parts]
    for number in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-number:]) for part in parts]
        if len(set(names)) == len(set(parts)):
            break
    return names


def _json(curves: Sequence[RunCurves]) -> str:
    """Return an object a run, a line each: that of one run is a JSON file of its own."""
    found = last_held_out(curves)
    rows = zip(found.runs, found.steps, found.means, found.losses.T, found.shares.T, strict=True)
    return "\n".join(
        json.dumps({
            "run": name, "step": step, "mean": float(mean),
            "loss": dict(zip(found.domains, losses.tolist(), strict=True)),
            "share": dict(zip(found.domains, shares.tolist(), strict=True)),
        }) for name, step, mean, losses, shares in rows)  # fmt: skip


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number of steps >= 1")
    return int(text)
