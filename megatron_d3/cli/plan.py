"""`megatron-d3 plan show|diff|audit`: what a model saw, in which order, and why. No training."""

from __future__ import annotations

import argparse
import json
import sys
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_d3.errors import PlanError
from megatron_d3.plan.audit import audit
from megatron_d3.plan.compare import Parting, compare
from megatron_d3.plan.reader import PLAN, PlanReader
from megatron_d3.plan.summary import (
    GenerationUse,
    RoundUse,
    decoded,
    iter_rounds,
    last_step,
    summarise,
)
from megatron_d3.plan.windows import WindowsUse, summarise_windows
from megatron_d3.planning import decider_factory
from megatron_d3.registry import load_plugins

NAME = "plan"
HELP = "show, compare or audit the plan of a run: which sample at which position, and why"
EXAMPLE = """\
megatron-d3 plan show runs/demo
megatron-d3 plan show runs/demo --positions 4096:4104
megatron-d3 plan diff runs/uniform runs/demo
megatron-d3 plan audit runs/demo"""

_NUM_ROUNDS = 6
_NUM_WEIGHTS = 12  # shown of a round; --json has all


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subverbs and their flags."""
    verbs = parser.add_subparsers(dest="subverb", required=True, metavar="show|diff|audit")
    show = verbs.add_parser("show", help="print the tree of a run: generations, domains, rounds")
    _add_run(show, "run")
    show.add_argument(
        "--rounds", type=_rounds, default=_NUM_ROUNDS, metavar="N|all",
        help=f"rounds shown, half of them the first, half the last (default {_NUM_ROUNDS})")
    show.add_argument(
        "--positions", type=_span, metavar="A:B",
        help="list positions A to B-1 instead: domain, epoch, sample within the epoch before its "
             "shuffle, ordinal; with --json a line each")
    diff = verbs.add_parser(
        "diff", help="name the first position at which two runs differ, and why; exit 1 if they do")
    _add_run(diff, "a")
    _add_run(diff, "b")
    check = verbs.add_parser(
        "audit", help="compute the plan again and verify every row, hash and position; exit 1 if "
                      "anything is wrong. Not while the run is training")
    _add_run(check, "run")
    check.add_argument(
        "--plugin", action="append", default=[], metavar="MODULE",
        help="import MODULE, as the run did with --d3-plugin; may be repeated")
    for verb in (show, diff, check):
        verb.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Carry out the subverb; see `megatron-d3 plan --help`."""
    verbs: dict[str, Callable[[argparse.Namespace], int]] = {
        "show": _show, "diff": _diff, "audit": _audit}
    return verbs[args.subverb](args)


def plan_directory(run: Path) -> Path:
    """Return the plan directory of a run: itself, or the `d3/` in it.

    Raises:
        PlanError: neither holds a plan.
    """
    for directory in (run, run / "d3"):
        if (directory / PLAN).exists():
            return directory
    raise PlanError(f"{run}: no plan here, nor in {run / 'd3'}; give the --save directory of a run "
                    "made with --d3-config, or its --d3-plan-dir")


def _add_run(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument(name, type=Path, metavar=name.upper(),
                        help="a run's --save directory, or its plan directory")


def _rounds(text: str) -> int | None:
    """Parse `--rounds`: a number, or None for all."""
    if text == "all":
        return None
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number or `all`")
    return int(text)


def _span(text: str) -> tuple[int | None, int | None]:
    """Parse `--positions`: A:B, either end may be left out."""
    first, colon, last = text.partition(":")
    if not colon or not all(end == "" or end.isdecimal() for end in (first, last)):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected A:B, e.g. 0:100")
    return int(first) if first else None, int(last) if last else None


# --- show ------------------------------------------------------------------------------------------


def _show(args: argparse.Namespace) -> int:
    reader = PlanReader(plan_directory(args.run))
    if args.positions is not None:
        _show_positions(reader, args.positions, is_json=args.json)
        return 0
    uses = summarise(reader)
    rounds, num_left_out = _chosen_rounds(reader, args.rounds)
    if args.json:
        print(json.dumps(_as_json(reader, uses, rounds), indent=2))
        return 0
    print(_headline(reader, uses))
    for use in uses:
        print(f"├── {_generation_line(use)}")
        rows = _domain_table(use)
        for i, row in enumerate(rows):
            print(f"│   {'└──' if i == len(rows) - 1 else '├──'} {row}")
    windows = summarise_windows(reader.directory)
    if windows is not None:
        print(f"├── {_windows_line(windows)}")
    print("└── rounds")
    lines: list[str] = [_round_line(reader, use) for use in rounds]
    if num_left_out:
        lines.insert((len(rounds) + 1) // 2, f"... {num_left_out:,} more (--rounds all)")
    for i, line in enumerate(lines):
        print(f"    {'└──' if i == len(lines) - 1 else '├──'} {line}")
    return 0


def _show_positions(
    reader: PlanReader, span: tuple[int | None, int | None], *, is_json: bool
) -> None:
    start = reader.first_position if span[0] is None else span[0]
    stop = reader.frontier if span[1] is None else span[1]
    fields = ("position", "domain", "epoch", "sample", "ordinal")
    if not is_json:
        print("\t".join(fields))
    for values in decoded(reader, start, stop):
        if is_json:
            print(json.dumps(dict(zip(fields, values, strict=True))))
        else:
            print("\t".join(str(value) for value in values))


def _chosen_rounds(reader: PlanReader, limit: int | None) -> tuple[list[RoundUse], int]:
    """Return the first and last rounds, and how many lie between."""
    rounds = iter_rounds(reader)
    if limit is None:
        return list(rounds), 0
    first = list(islice(rounds, (limit + 1) // 2))
    last: deque[RoundUse] = deque(maxlen=limit // 2)
    num_more = 0
    for use in rounds:
        last.append(use)
        num_more += 1
    return [*first, *last], num_more - len(last)


def _headline(reader: PlanReader, uses: Sequence[GenerationUse]) -> str:
    step = last_step(reader)
    total = uses[-1].generation.header.total_samples
    trained = "no training step yet"
    if step is not None:
        trained = f"trained to iteration {step.iteration:,}, {step.consumed:,} samples"
    return (f"{reader.directory} | {_positions(reader.first_position, reader.frontier)} of {total:,} "
            f"decided | {trained}")


def _generation_line(use: GenerationUse) -> str:
    header = use.generation.header
    sizes = " ".join(f"{threshold:,}:{size:,}" for threshold, size in header.batch_schedule.steps)
    if len(header.batch_schedule.steps) == 1:
        sizes = f"{header.batch_schedule.steps[0][1]:,}"
    mix = header.config.get("mix", {}).get("type")
    order = header.config.get("order")
    windows = "" if order is None else (
        f"order {order['type']}, windows of {order['window']:,}"
        f"{', overlapping' if order['overlap'] else ''} | ")
    return (f"generation {use.index} | iteration {use.generation.iteration:,} | "
            f"{_positions(use.generation.position, use.stop)} | {use.num_rounds:,} rounds | mix {mix} "
            f"| {windows}global batch {sizes} | seq_length {header.seq_length:,} | seed {header.seed}")


def _windows_line(windows: WindowsUse) -> str:
    costs = ", ".join(f"{name} {cost:.3f}" for name, cost in windows.cost.items())
    parts = [f"windows {windows.num_windows:,}"]
    if costs:
        parts.append(f"mean cost of orders (random 1): {costs}")
    if windows.curl is not None:
        parts.append(f"curl {windows.curl:.3f}")
    if windows.reliability is not None:
        parts.append(f"reliability {windows.reliability:.3f}")
    if windows.expected_agreement is not None:
        parts.append(f"expected agreement {windows.expected_agreement:.3f}")
    if windows.num_stored:
        parts.append(f"{windows.num_stored:,} kept the stored order")
    return " | ".join(parts)


def _domain_table(use: GenerationUse) -> list[str]:
    rows = [("domain", "samples", "drawn", "epochs", "share", "target")]
    rows += [(d.name, f"{d.num_samples:,}", f"{d.num_drawn:,}", f"{d.epochs:.3f}", f"{d.share:.5f}",
              f"{d.target:.5f}") for d in use.domains]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) if i == 0 else cell.rjust(width)
                      for i, (cell, width) in enumerate(zip(row, widths, strict=True)))
            for row in rows]


def _round_line(reader: PlanReader, use: RoundUse) -> str:
    names = reader.plan.generations[use.generation].header.names
    pairs = list(zip(names, use.weights.tolist(), strict=True))
    weights = " ".join(f"{name} {weight:.4g}" for name, weight in pairs[:_NUM_WEIGHTS])
    if len(pairs) > _NUM_WEIGHTS:
        weights += f" ... ({len(pairs)} domains)"
    note = "" if use.stop == use.row.stop else f" (of {_positions(use.row.start, use.row.stop)})"
    unit = "" if use.row.unit is None else f" | unit {use.row.unit:,}"
    return (f"round {use.row.round:,} | iteration {use.row.iteration:,} | step {use.row.step:,}"
            f"{unit} | {_positions(use.row.start, use.stop)}{note} | weights {weights}")


def _positions(start: int, stop: int) -> str:
    return f"positions {start:,}-{stop - 1:,}" if stop > start else "no positions"


def _as_json(
    reader: PlanReader, uses: Sequence[GenerationUse], rounds: Sequence[RoundUse]
) -> dict[str, Any]:
    step, windows = last_step(reader), summarise_windows(reader.directory)
    return {
        "plan": str(reader.directory),
        "first_position": reader.first_position,
        "frontier": reader.frontier,
        "total_samples": uses[-1].generation.header.total_samples,
        "iteration": None if step is None else step.iteration,
        "consumed": None if step is None else step.consumed,
        "generations": [
            {
                "iteration": use.generation.iteration,
                "position": use.generation.position,
                "stop": use.stop,
                "num_rounds": use.num_rounds,
                "config": use.generation.header.config,
                "domains": [{**vars(d), "epochs": d.epochs} for d in use.domains],
            }
            for use in uses],
        "windows": None if windows is None else vars(windows),
        "rounds": [
            {**vars(use.row), "stop": use.stop, "chain": f"{use.row.chain:016x}",
             "generation": use.generation,
             "weights": dict(zip(reader.plan.generations[use.generation].header.names,
                                 use.weights.tolist(), strict=True))}
            for use in rounds],
    }


# --- diff, audit -----------------------------------------------------------------------------------


def _diff(args: argparse.Namespace) -> int:
    a, b = (PlanReader(plan_directory(run)) for run in (args.a, args.b))
    parting = compare(a, b)
    if args.json:
        print(json.dumps(None if parting is None else vars(parting), indent=2))
    elif parting is None:
        print(f"same: {_positions(a.first_position, a.frontier)} hold the same samples in both")
    else:
        print(f"position {parting.position}: A has {_sample(parting.a)}, B has "
              f"{_sample(parting.b)}")
        for reason in parting.reasons or (_no_reason(parting),):
            print(f"  {reason}")
    return 0 if parting is None else 1


def _sample(sample: tuple[str, int] | None) -> str:
    return "none (not decided there)" if sample is None else f"{sample[0]} {sample[1]}"


def _no_reason(parting: Parting) -> str:
    if parting.a is None or parting.b is None:
        return "settings, rounds and ledgers agree up to there: one run is longer than the other"
    return ("settings, rounds and ledgers agree up to there: one of the plans was changed; see "
            "`megatron-d3 plan audit`")


def _audit(args: argparse.Namespace) -> int:
    directory = plan_directory(args.run)
    print(f"auditing {directory}", file=sys.stderr)
    result = audit(directory, decider_factory(load_plugins(args.plugin)))
    if args.json:
        print(json.dumps({**vars(result), "is_sound": result.is_sound}, indent=2))
    else:
        for finding in result.findings:
            print(finding)
        verdict = "sound" if result.is_sound else "NOT sound"
        windows = f" in {result.num_windows:,} windows" if result.num_windows else ""
        print(f"{verdict}: {result.num_rounds:,} rounds{windows}, {result.num_positions:,} positions, "
              f"{result.num_steps:,} steps, {result.num_states:,} stored states checked")
    return 0 if result.is_sound else 1
