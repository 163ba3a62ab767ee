"""`megatron-d3 plot weights|losses|table RUN...`: what runs did, side by side, from their plans."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from megatron_d3.cli.plan import plan_directory
from megatron_d3.curves import RunCurves, held_out_table, last_held_out, read_curves
from megatron_d3.plots import plot_losses, plot_weights

NAME = "plot"
HELP = "draw weights, realised shares and losses of runs side by side; print their last losses"
EXAMPLE = """\
megatron-d3 plot weights runs/demo/uniform runs/demo/shift --out weights.png
megatron-d3 plot losses runs/demo/uniform runs/demo/shift --out losses.svg
megatron-d3 plot table runs/demo/uniform runs/demo/shift"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subverbs and their flags."""
    verbs = parser.add_subparsers(dest="subverb", required=True, metavar="weights|losses|table")
    weights = verbs.add_parser("weights", help="target weights and realised shares over steps")
    losses = verbs.add_parser("losses", help="training and held-out loss over steps, per domain")
    table = verbs.add_parser("table", help="print the last held-out loss of each domain and run")
    for verb in (weights, losses):
        verb.add_argument("--out", required=True, type=Path, metavar="FILE",
                          help="image to write; its suffix (.png, .svg, .pdf) is its format")
        verb.add_argument("--window", type=_positive, metavar="STEPS",
                          help="steps that losses and shares are averaged over (default: a "
                               "fortieth of the run)")
    table.add_argument("--json", action="store_true", help="print JSON, a line a run")
    for verb in (weights, losses, table):
        verb.add_argument("runs", type=Path, nargs="+", metavar="RUN",
                          help="a run's --save directory, or its plan directory")


def run(args: argparse.Namespace) -> int:
    """Carry out the subverb; see `megatron-d3 plot --help`."""
    curves = _read(args.runs, getattr(args, "window", None))
    if args.subverb == "table":
        print(_json(curves) if args.json else held_out_table(curves))
        return 0
    draw = {"weights": plot_weights, "losses": plot_losses}[args.subverb]
    draw(curves, args.out)
    print(args.out)
    return 0


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
