"""`megatron-d3 VERB`: finds the verb's module, parses its flags, turns errors into exit codes.

A verb is a module with `NAME`, `HELP`, `EXAMPLE` (texts), `add_arguments(parser)` and
`run(args) -> int`; to add one, add a line to `VERBS`. Only the module of the chosen verb is
imported, and no verb imports torch or Megatron at module level.

Exit codes: 0 done, 1 refused (a :class:`D3Error`, printed without a traceback), 2 wrong usage.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol, cast

from megatron_d3 import __version__
from megatron_d3.errors import D3Error

VERBS: dict[str, str] = {
    "demo": "megatron_d3.cli.demo",
    "launch": "megatron_d3.cli.launch",
    "plan": "megatron_d3.cli.plan",
    "plot": "megatron_d3.cli.plot",
    "simulate": "megatron_d3.cli.simulate",
    "mix": "megatron_d3.cli.mix",
    "doremi": "megatron_d3.cli.doremi",
    "d3": "megatron_d3.cli.d3",
    "demo-corpus": "megatron_d3.cli.demo_corpus",
    "tokenize": "megatron_d3.cli.tokenize",
    "score": "megatron_d3.cli.score",
    "index": "megatron_d3.cli.index",
    "order": "megatron_d3.cli.order",
}
"""The verbs in the order of `--help`, each with the module that carries it out."""

PROGRAM = "megatron-d3"


class Verb(Protocol):
    """What `main` asks of a verb's module."""

    NAME: str
    HELP: str
    EXAMPLE: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, args: argparse.Namespace) -> int: ...


def main(argv: Sequence[str] | None = None, *, verbs: Mapping[str, str] = VERBS) -> int:
    """Run one verb and return the exit code.

    Args:
        argv: the command line after the program's name; that of the process by default.
        verbs: module paths by name.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] not in verbs:
        _top_parser(verbs).parse_args(argv)  # --help, --version, or usage and exit code 2
        _top_parser(verbs).error("which verb?")
    verb = _load(verbs[argv[0]])
    parser = _verb_parser(verb)
    args = parser.parse_args(argv[1:])
    try:
        code = verb.run(args)
        sys.stdout.flush()
        return code
    except D3Error as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader of a pipe (`| head`) has had enough. Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _load(module: str) -> Verb:
    return cast(Verb, importlib.import_module(module))


def _verb_parser(verb: Verb) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} {verb.NAME}",
        description=verb.HELP,
        epilog="example:\n" + "".join(f"  {line}\n" for line in verb.EXAMPLE.splitlines()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_arguments(parser)
    return parser


def _top_parser(verbs: Mapping[str, str]) -> argparse.ArgumentParser:
    """Return the parser of `megatron-d3` itself; looks every verb's line of help up."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Decide the mixture and the order of pretraining data on Megatron-Core.",
        epilog=f"`{PROGRAM} VERB --help` explains a verb. Training itself is started with\n"
        "`torchrun ... -m megatron_d3.pretrain <Megatron's flags> --d3-config run.yaml`.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    actions = parser.add_subparsers(metavar="VERB", required=True)
    for name, module in verbs.items():
        actions.add_parser(name, help=_load(module).HELP, add_help=False)
    return parser


if __name__ == "__main__":
    sys.exit(main())
