"""`megatron-d3 index check|show|merge|split|sample`: work on `.bin`/`.idx` pairs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np

from megatron_d3.cli.tokenize import add_tokenizer_arguments, tokenizer_of
from megatron_d3.corpus.check import check_index, repair
from megatron_d3.corpus.choose import VERSION, sample, split_by_content
from megatron_d3.corpus.derive import derive, origin, scores_beside
from megatron_d3.corpus.describe import describe, first_tokens, table
from megatron_d3.corpus.encoders import open_encoder
from megatron_d3.corpus.index import read_index
from megatron_d3.corpus.publish import Publication
from megatron_d3.corpus.rewrite import Source, open_source
from megatron_d3.errors import ConfigError

NAME = "index"
HELP = "check, show, merge, split or sample Megatron indexes"
EXAMPLE = """\
megatron-d3 index check corpus/web --vocab-size 32000
megatron-d3 index merge corpus/web corpus/code --output-prefix corpus/all
megatron-d3 index split corpus/all --train-prefix corpus/train --valid-prefix corpus/valid"""

_SHOWN_TOKENS = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subverbs and their flags."""
    verbs = parser.add_subparsers(dest="subverb", required=True, metavar="check|show|merge|...")
    _add_check(verbs.add_parser("check", help="verify every byte of an index, repair overflow"))
    _add_show(verbs.add_parser("show", help="print a table and the first documents"))
    merge = verbs.add_parser("merge", help="put several corpora one after another into one")
    merge.add_argument("prefix", nargs="+", type=Path, help="corpora without suffix, in order")
    merge.add_argument("--output-prefix", required=True, type=Path, metavar="OUT")
    _add_output(merge)
    _add_split(verbs.add_parser("split", help="hold documents out by a hash of their tokens"))
    _add_sample(verbs.add_parser("sample", help="draw documents at random, kept in their order"))


def run(args: argparse.Namespace) -> int:
    """Carry out the subverb; see `megatron-d3 index --help`."""
    verbs: dict[str, Callable[[argparse.Namespace], int]] = {
        "check": _check,
        "show": _show,
        "merge": _merge,
        "split": _split,
        "sample": _sample,
    }
    return verbs[args.subverb](args)


def _add_output(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--copy", action="store_true", help="write the tokens again instead of linking the .bin")
    add("--overwrite", action="store_true", help="replace existing output")
    add("--json", action="store_true", help="report as JSON")


def _add_check(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("prefix", nargs="+", type=Path, help="corpora without suffix")
    add("--vocab-size", type=int, metavar="V",
        help="also read the .bin: token ids must lie in [0, V)")  # fmt: skip
    add("--fix", type=Path, metavar="OUT",
        help="write a repaired corpus (only pointers that overflowed 32 bits)")  # fmt: skip
    _add_output(parser)


def _add_show(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("prefix", nargs="+", type=Path, help="corpora without suffix")
    add("--documents", type=int, default=3, metavar="N", help="documents shown (default 3)")
    add("--json", action="store_true", help="print the table as JSON")
    add_tokenizer_arguments(parser, is_required=False)


def _add_split(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("prefix", type=Path, help="corpus without suffix")
    add("--train-prefix", required=True, type=Path, metavar="OUT")
    add("--valid-prefix", required=True, type=Path, metavar="OUT")
    add("--valid-fraction", type=float, default=0.01, metavar="F",
        help="expected share of documents held out (default 0.01)")  # fmt: skip
    add("--seed", type=int, default=0, help="of the hash (default 0)")
    _add_output(parser)


def _add_sample(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("prefix", type=Path, help="corpus without suffix")
    add("--output-prefix", required=True, type=Path, metavar="OUT")
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--documents", type=int, metavar="N", help="this many documents")
    size.add_argument("--tokens", type=int, metavar="T", help="at least this many tokens")
    size.add_argument("--fraction", type=float, metavar="F", help="this share of the documents")
    add("--seed", type=int, default=0, help="of the draw (default 0)")
    _add_output(parser)


def _check(args: argparse.Namespace) -> int:
    if args.vocab_size is not None and args.vocab_size < 1:
        raise ConfigError(f"--vocab-size: got {args.vocab_size}, expected at least 1")
    if args.fix:
        if len(args.prefix) != 1:
            raise ConfigError(f"--fix: got {len(args.prefix)} corpora, expected one")
        suffixes = [".bin", ".idx"]
        with Publication(args.fix, suffixes, is_overwriting=args.overwrite) as new:
            repair(args.prefix[0], new, is_copying=args.copy)
        print(f"{args.prefix[0]}: repaired as {args.fix}", file=sys.stderr)
        args.prefix = [args.fix]
    reports = [check_index(prefix, vocab_size=args.vocab_size) for prefix in args.prefix]
    if args.json:
        print(json.dumps([asdict(report) for report in reports], indent=2))
    else:
        for report in reports:
            counts = report.counts
            size = ""
            if "num_tokens" in counts:
                size = (
                    f", {counts['num_documents']:,} documents, {counts['num_tokens']:,} tokens of "
                    f"{counts['dtype']}"
                )
            print(f"{report.prefix}: {'broken' if report.errors else 'ok'}{size}")
            for error in report.errors:
                print(f"  error: {error}")
            for note in report.notes:
                print(f"  note: {note}")
    return 1 if any(report.errors for report in reports) else 0


def _show(args: argparse.Namespace) -> int:
    indexes = [read_index(prefix) for prefix in args.prefix]
    rows = [describe(index) for index in indexes]
    if args.json:
        print(json.dumps([row.to_dict() for row in rows], indent=2))
        return 0
    decode = open_encoder(tokenizer_of(args)).decode if args.tokenizer_type else None
    print(table(rows))
    for index in indexes:
        for document in range(min(args.documents, index.num_documents)):
            tokens = first_tokens(index, document, limit=_SHOWN_TOKENS + 1).tolist()
            shown = tokens[:_SHOWN_TOKENS]
            text = (
                json.dumps(decode(shown), ensure_ascii=False)
                if decode
                else " ".join(map(str, shown))
            )
            more = " ..." if len(tokens) > _SHOWN_TOKENS else ""
            print(f"\n{index.prefix} document {document}: {text}{more}")
    return 0


def _merge(args: argparse.Namespace) -> int:
    source = open_source([read_index(prefix) for prefix in args.prefix])
    _derive(args, source, None, args.output_prefix, {"verb": "index merge"})
    return 0


def _split(args: argparse.Namespace) -> int:
    if args.train_prefix == args.valid_prefix:
        raise ConfigError(f"--valid-prefix: {args.valid_prefix} is the --train-prefix as well")
    index = read_index(args.prefix)
    is_valid = split_by_content(index, valid_fraction=args.valid_fraction, seed=args.seed)
    how = {
        "verb": "index split",
        "algorithm_version": VERSION,
        "valid_fraction": args.valid_fraction,
        "seed": args.seed,
    }
    source = open_source([index])
    for prefix, chosen in ((args.valid_prefix, is_valid), (args.train_prefix, ~is_valid)):
        _derive(args, source, np.flatnonzero(chosen), prefix, how)
    return 0


def _sample(args: argparse.Namespace) -> int:
    index = read_index(args.prefix)
    size = {"documents": args.documents, "tokens": args.tokens, "fraction": args.fraction}
    chosen = sample(index, seed=args.seed, **size)
    how = {"verb": "index sample", "algorithm_version": VERSION, "size": size, "seed": args.seed}
    _derive(args, open_source([index]), chosen, args.output_prefix, how)
    return 0


def _derive(
    args: argparse.Namespace,
    source: Source,
    documents: np.ndarray | None,
    prefix: Path,
    how: dict,
) -> None:
    """Write a corpus with the scores that lie beside its sources, and report it."""
    scores, missing = scores_beside(source)
    if missing and len(missing) < len(source.indexes):
        print(f"warning: {missing[0]} is missing, so {prefix} has no scores", file=sys.stderr)
    report = origin(source, documents, is_copying=args.copy, how=how)
    derive(
        source,
        documents,
        prefix,
        scores=scores,
        report=report,
        is_copying=args.copy,
        is_overwriting=args.overwrite,
    )
    row = describe(read_index(prefix, check_bin=False))
    print(json.dumps({**report, "corpus": row.to_dict()}, indent=2) if args.json else table([row]))
