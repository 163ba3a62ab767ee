"""`megatron-d3 demo`: real text, four ways to give it to one model; then a table and three plots."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import time
from pathlib import Path

from megatron_d3.cli.demo_runs import RECIPE, RUNS, Demo, draw, prepare, set_aside, train_all
from megatron_d3.curves import held_out_table

NAME = "demo"
HELP = "train one small model on real text in four ways on this machine's CPU, and compare"
EXAMPLE = """\
megatron-d3 demo
megatron-d3 demo --fresh --recipe my_recipe"""


_OUT = Path("runs/demo")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    defaults = Demo(Path())
    add = parser.add_argument
    add("--out", type=Path, default=_OUT, metavar="DIR",
        help="folder of corpus, runs and plots; what is finished in it is reused, what is not is "
             "continued (default runs/demo)")  # fmt: skip
    add("--fresh", action="store_true",
        help="train anew; earlier runs move to DIR/abandoned-NNNN, the corpus stays")  # fmt: skip
    add("--recipe", type=Path, default=RECIPE, metavar="DIR",
        help="folder with uniform.yaml, shift.yaml, odm.yaml, d3.yaml and model.args (default "
             "examples/demo of the repository)")  # fmt: skip
    add("--num-processes", type=int, default=defaults.num_processes, metavar="N",
        help="data-parallel processes (default 2)")  # fmt: skip
    add("--max-mb-per-domain", type=float, default=defaults.max_bytes_per_domain / 1e6,
        metavar="MB", help="text at which a domain is full, in 10^6 bytes (default 5)")  # fmt: skip
    add("--vocab-size", type=int, default=defaults.vocab_size, metavar="N",
        help="pieces of the tokenizer (default 4096)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Run the demo; the table goes to stdout, progress to stderr."""
    started_at = time.monotonic()
    demo = Demo(
        out_dir=args.out, recipe=args.recipe, num_processes=args.num_processes,
        max_bytes_per_domain=round(args.max_mb_per_domain * 1e6), vocab_size=args.vocab_size)
    try:
        if args.fresh and (aside := set_aside(demo)):
            print(f"earlier runs are now in {aside}", file=sys.stderr)
        train_all(demo, prepare(demo, sys.stderr), sys.stderr)
    except KeyboardInterrupt:
        print("stopped; the same command continues from the last checkpoint", file=sys.stderr)
        return 128 + signal.SIGINT
    curves, plots = draw(demo)
    seconds = time.monotonic() - started_at
    print(f"done in {int(seconds) // 60}:{int(seconds) % 60:02d} (min:s)\n", file=sys.stderr)
    print(held_out_table(curves))
    print("\nplots: " + "  ".join(map(str, plots)))
    print("\nnext:\n" + _next_commands(demo))
    return 0


def _next_commands(demo: Demo) -> str:
    first, second, *_ = (demo.folder(run) for run in RUNS)
    again = "" if demo.out_dir == _OUT else f" --out {demo.out_dir}"
    commands = {
        f"{_program()} plan show {second}": "which domain filled which positions",
        f"{_program()} plan diff {first} {second}": "where the two part, and why",
        f"{_program()} plan show {demo.folder('d3')}": "what D3's windows cost and were worth",
        f"$EDITOR {_short(demo.recipe)}/{RUNS[1]}.yaml && {_program()} demo --fresh{again}":
            "another mixture",
    }
    width = max(map(len, commands))
    return "\n".join(f"  {command:<{width}}  # {why}" for command, why in commands.items())


def _program() -> str:
    """Return what to type for `megatron-d3`: `make` does not activate its environment."""
    beside = Path(sys.executable).parent / "megatron-d3"
    found = shutil.which("megatron-d3")
    if beside.exists() and (found is None or not Path(found).samefile(beside)):
        return str(_short(beside))
    return "megatron-d3"


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
