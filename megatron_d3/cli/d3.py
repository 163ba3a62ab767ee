"""`megatron-d3 d3 study`: estimators and solvers against exact look-ahead, on the user's own model.

It needs Megatron's processes. Started by `torchrun` (or `srun`), the verb is one of them; started by
itself, it calls `torchrun` with its own command line and waits.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from megatron_d3.cli.torchrun import launch_environment, require_training_packages, train
from megatron_d3.errors import ConfigError, D3Error
from megatron_d3.plan.files import write_atomically

NAME = "d3"
HELP = "compare D3's estimators and solvers with exact look-ahead at a checkpoint"
EXAMPLE = """\
megatron-d3 d3 study --num-processes 2 --units 20 --estimators projected,projected:4,exact \\
    -- @model.args --d3-config run.yaml --load runs/a --ckpt-step 2000
torchrun --nproc-per-node 8 -m megatron_d3 d3 study --out study.json \\
    -- @model.args --d3-config run.yaml --load runs/a"""

_JUDGES = ("look_ahead", "look_ahead_even", "exact")
_DEFAULT_UNITS = 12
_RANK_0_SECONDS = 2.0  # until other ranks say what rank 0 most likely says too


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subverb and its flags."""
    verbs = parser.add_subparsers(dest="subverb", required=True, metavar="study")
    study = verbs.add_parser(
        "study", help="print regrets and costs of all estimators and solvers",
        description="Load a checkpoint as training would, take the next units of its plan, measure "
                    "the influence graph by exact look-ahead on all sequences, and compare what "
                    "cheaper estimators and each solver make of it. Trains nothing, writes nothing "
                    "beside the run. Costs about 2 units^2 forward passes over a "
                    "global batch for each kind of step.")
    add = study.add_argument
    add("--units", type=int, default=_DEFAULT_UNITS, metavar="L",
        help=f"global batches to look at (default {_DEFAULT_UNITS})")  # fmt: skip
    add("--estimators", metavar="NAME[:N],...",
        help="e.g. projected, projected:4 (directions), projected:mean, hutchinson_diagonal:4 "
             "(probes), gnb_diagonal:4, fisher, shared_hessian, look_ahead:2 (sequences), "
             "look_ahead_even:2, exact; default: all but exact, which costs 2 L gradients a unit. "
             "The configured one is always compared")  # fmt: skip
    add("--judge", choices=_JUDGES, default="look_ahead",
        help="what is believed, on all sequences (default look_ahead; exact where steps are too "
             "small for the precision of the weights)")  # fmt: skip
    add("--out", type=Path, metavar="FILE", help="write the numbers here, as JSON")
    add("--json", action="store_true", help="print them as JSON")
    add("--num-processes", type=int, default=1, metavar="N",
        help="processes to start where torchrun has not (default 1)")  # fmt: skip
    add("flags", nargs="*", metavar="...",
        help="-- and the flags of the run, with --d3-config and --load")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Study; tables or JSON to stdout, everything else to stderr."""
    require_training_packages()
    if args.num_processes < 1:
        raise ConfigError(f"--num-processes: got {args.num_processes}, expected at least 1")
    if not args.flags:
        raise ConfigError("megatron-d3 d3 study: give the run's flags after --, with --d3-config "
                          "and --load")
    if not ("RANK" in os.environ and "WORLD_SIZE" in os.environ):
        return _launch(args)
    try:
        return _study(args)
    except D3Error:
        if os.environ["RANK"] != "0":
            time.sleep(_RANK_0_SECONDS)
        raise


def _study(args: argparse.Namespace) -> int:
    """Take part as one of Megatron's processes."""
    from megatron_d3.mcore.study import StudyJob, run_study

    names = None if args.estimators is None else tuple(args.estimators.split(","))
    report = run_study(StudyJob(args.units, names, args.judge, tuple(args.flags)))
    if report is None:
        return 0
    content = json.dumps(report.content | {"text": report.text}, indent=1) + "\n"
    if args.out is not None:
        write_atomically(args.out, content.encode())
    print(content if args.json else report.text, end="" if args.json else "\n", flush=True)
    return 0


def _launch(args: argparse.Namespace) -> int:
    """Run the same command in processes of Megatron, and print what they found."""
    descriptor, name = tempfile.mkstemp(prefix="megatron-d3-study-", suffix=".log")
    os.close(descriptor)
    log, found = Path(name), Path(name).with_suffix(".json")
    words = ["d3", "study", "--units", str(args.units), "--judge", args.judge, "--out", str(found)]
    if args.estimators is not None:
        words += ["--estimators", args.estimators]
    print(f"what Megatron says goes to {log}", file=sys.stderr)
    train([*words, "--", *args.flags], log=log, num_processes=args.num_processes,
          module="megatron_d3", environment=launch_environment(args.num_processes))
    text = found.read_text(encoding="utf-8")
    if args.out is not None:
        write_atomically(args.out, text.encode())
    print(text if args.json else json.loads(text)["text"], end="" if args.json else "\n")
    log.unlink()
    found.unlink()
    return 0
