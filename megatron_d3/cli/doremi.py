"""`megatron-d3 doremi`: domain weights by DoReMi, from reference and proxy to the final model."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
from pathlib import Path

from megatron_d3.cli.doremi_file import read_doremi_file
from megatron_d3.cli.doremi_marker import StoppedEarlyError
from megatron_d3.cli.doremi_runs import STEPS, Doremi, store_losses
from megatron_d3.cli.torchrun import require_training_packages
from megatron_d3.errors import ConfigError

NAME = "doremi"
HELP = "find domain weights with a reference and a proxy model (DoReMi), then train on them"
EXAMPLE = """\
megatron-d3 doremi examples/doremi/doremi.yaml
megatron-d3 doremi doremi.yaml --iterate
megatron-d3 doremi doremi.yaml --step reference       # and proxy, final: each a job of its own
megatron-d3 doremi losses runs/losses --num-processes 2 -- @model.args --d3-config proxy.yaml ..."""

_LOSSES = "losses"
_AGAIN = 75  # EX_TEMPFAIL of sysexits.h: nothing is wrong, run the same command again


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    add("file", metavar="FILE",
        help="doremi.yaml; or the word `losses`: store the token losses of a proxy's reference once, "
             "for mix: {type: doremi, losses: DIR}")  # fmt: skip
    add("--iterate", action="store_true",
        help="repeat reference and proxy until no weight moves by the file's tolerance")  # fmt: skip
    add("--step", choices=STEPS,
        help="train this step only, for jobs that depend on each other; nothing to do if it is "
             "finished, refused if the step before it is not")  # fmt: skip
    add("--round", type=int, metavar="N", help="with --step: of --iterate (default 1)")
    add("--launcher", metavar="WORDS",
        help="command that starts the `-m MODULE FLAGS` that follow it in all processes of a run, "
             "e.g. 'srun torchrun --nnodes 4 ...' (default: torchrun on this machine)")  # fmt: skip
    add("--json", action="store_true", help="print weights.json instead of a table")
    add("--num-processes", type=int, default=1, metavar="N",
        help="with losses: processes on this machine (default 1)")  # fmt: skip
    add("rest", nargs="*", metavar="...",
        help="with losses: DIR to make, then -- and all flags of the proxy's run")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Train what is missing; the weights go to stdout, progress to stderr."""
    require_training_packages()
    _check(args)
    try:
        if args.file == _LOSSES:
            return _store(args)
        file, config = read_doremi_file(Path(args.file))
        doremi = Doremi(file, config, sys.stderr, shlex.split(args.launcher or ""))
        if args.step is not None:
            doremi.step(args.step, number=args.round or 1)
            return 0
        weights = doremi.run(is_iterated=args.iterate)
    except StoppedEarlyError as error:
        print(f"megatron-d3 doremi: {error}", file=sys.stderr)
        return _AGAIN
    except KeyboardInterrupt:
        print("stopped; the same command continues from the last checkpoint", file=sys.stderr)
        return 128 + signal.SIGINT
    text = weights.read_text(encoding="utf-8")
    print(text if args.json else _table(json.loads(text), weights))
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.rest and args.file != _LOSSES:
        raise ConfigError(f"megatron-d3 doremi: what is {args.rest[0]}? One file is enough")
    if args.step is not None and args.iterate:
        raise ConfigError("--iterate: not with --step; name the round of the step with --round")
    if args.round is not None and (args.step is None or args.round < 1):
        raise ConfigError(f"--round: got {args.round}, expected at least 1, together with --step")
    if args.step == "final" and args.round is not None:
        raise ConfigError("--round: not with --step final, which takes the weights of the last round")


def _store(args: argparse.Namespace) -> int:
    if not args.rest:
        raise ConfigError("megatron-d3 doremi losses: which folder to make? See --help")
    store_losses(Path(args.rest[0]), args.rest[1:], num_processes=args.num_processes)
    print(args.rest[0])
    return 0


def _table(content: dict[str, dict[str, float]], path: Path) -> str:
    width = max(map(len, content["weights"]))
    lines = [f"{'domain':<{width}} {'reference':>10} {'mean':>10} {'final':>10}"]
    lines += [
        f"{name:<{width}} {content['reference'][name]:10.4f} {mean:10.4f} "
        f"{content['final'][name]:10.4f}" for name, mean in content["weights"].items()]
    return "\n".join([*lines, "", f"use it: mix: {{type: static, weights: {path}}}"])
