"""The flags of `megatron-d3 order`, and the recipe they ask for."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_d3.errors import ConfigError
from megatron_d3.order import METHODS, PRESETS, Recipe, preset

_PARAMETERS = sorted({name for defaults in METHODS.values() for name in defaults})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the verb."""
    add = parser.add_argument
    add(
        "--prefix",
        nargs="+",
        required=True,
        type=Path,
        metavar="IN",
        help="corpus: path of the .bin/.idx pair without suffix; several need --merge",
    )
    add(
        "--output-prefix",
        required=True,
        type=Path,
        metavar="OUT",
        help="the ordered corpus; the folder must exist",
    )
    add(
        "--scores",
        nargs="+",
        type=Path,
        metavar="NPY",
        help="score file of each corpus (default: IN.scores.npy)",
    )
    add("--score", metavar="NAME", help="which score, where a file holds several")
    add("--method", choices=list(METHODS), help="the order (or --preset)")
    add(
        "--preset",
        metavar="NAME",
        help=f"a method with its documented parameters: {', '.join(PRESETS)}",
    )
    direction = parser.add_mutually_exclusive_group()
    direction.add_argument(
        "--ascending",
        action="store_const",
        const=True,
        dest="ascending",
        help="lowest score first; one of the two has to be given",
    )
    direction.add_argument(
        "--descending",
        action="store_const",
        const=False,
        dest="ascending",
        help="highest score first; equal scores stay in document order",
    )
    add("--sections", type=int, metavar="K", help="str, saw: sections (default 3)")
    add(
        "--ratio",
        type=float,
        metavar="RHO",
        help="str, saw: radius of a transition region as a share of all documents (default 0.1)",
    )
    add(
        "--layers",
        type=int,
        metavar="L",
        help="fold, zigzag, saw: passes (default 3; str 2); even ones make saw and zigzag jump",
    )
    add("--first-percent", type=float, metavar="X", help="segment: first part (default 10)")
    add("--last-percent", type=float, metavar="Y", help="segment: last part (default 10)")
    add("--first-tail", choices=("low", "high"), help="segment: scores first (default low)")
    add("--last-tail", choices=("low", "high"), help="segment: scores last (default high)")
    add(
        "--temperature",
        type=float,
        metavar="TAU",
        help="sort: Gumbel noise on the ranks, in ranks (default 0)",
    )
    add(
        "--jitter",
        type=_jitter,
        metavar="W",
        help="shuffle windows of W documents at the end: a count (5000), a share (0.05) or a "
        "percentage (5%%); default 0, off",
    )
    add("--seed", type=int, default=42, help="of every random step (default 42)")
    add(
        "--merge",
        action="store_true",
        help="order several corpora as one; their .bin files are copied into one",
    )
    add(
        "--copy",
        action="store_true",
        help="write the tokens again in the new order instead of linking the .bin: as much disk "
        "as the corpus, but sequential reads in training",
    )
    add(
        "--permutation-out",
        type=Path,
        metavar="NPY",
        help="also write the permutation: int64, place -> document",
    )
    add("--plot", type=Path, metavar="PNG", help="also draw score against position")
    add("--overwrite", action="store_true", help="replace existing output")
    add("--dry-run", action="store_true", help="compute and report, write nothing")
    add("--json", action="store_true", help="report as JSON")


def recipe_of(args: argparse.Namespace) -> Recipe:
    """Return the recipe that the flags ask for."""
    fields: dict[str, Any] = preset(args.preset) if args.preset else {"parameters": {}}
    if args.method and fields.setdefault("method", args.method) != args.method:
        raise ConfigError(
            f"--method: got {args.method}, but preset {args.preset} is {fields['method']}"
        )
    if "method" not in fields:
        raise ConfigError("order: give --method or --preset")
    for name in _PARAMETERS:
        if (value := getattr(args, name)) is not None:
            fields["parameters"][name] = value
    if args.jitter is not None:
        fields["jitter"] = args.jitter
    return Recipe(**fields, ascending=args.ascending, seed=args.seed)


def _jitter(text: str) -> int | float:
    """Parse a jitter window: "5000" is a count, "0.05" a share, "5%" a percentage."""
    try:
        if text.endswith("%"):
            return float(text[:-1]) / 100
        return int(text) if text.lstrip("+-").isdigit() else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected a count (5000), a share (0.05) or a percentage (5%)"
        ) from None
