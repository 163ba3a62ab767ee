"""`megatron-d3 score`: give every document of a corpus a score, computed or from a file."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import numpy as np

from megatron_d3.cli.tokenize import add_tokenizer_arguments, tokenizer_of
from megatron_d3.corpus.encoders import open_encoder
from megatron_d3.corpus.index import Index, read_index, suffixed
from megatron_d3.corpus.publish import Publication
from megatron_d3.corpus.rewrite import index_hash
from megatron_d3.corpus.score import METHODS, score
from megatron_d3.corpus.score_join import join
from megatron_d3.corpus.scores import SUFFIXES, read_scores, score_files
from megatron_d3.errors import ConfigError

NAME = "score"
HELP = "score documents by length, zlib, unigram or bigram surprisal, or from a file"
EXAMPLE = """\
megatron-d3 score --prefix corpus/web --method zlib bigram --reference corpus/wiki
megatron-d3 score --prefix corpus/web --from quality.parquet --key score"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the verb."""
    add = parser.add_argument
    add("--prefix", required=True, type=Path, metavar="IN",
        help="corpus: path of the .bin/.idx pair without suffix")  # fmt: skip
    add("--method", nargs="+", default=[], choices=METHODS,
        help="scores to compute: tokens, compressed size / size, nats a token")  # fmt: skip
    add("--from", nargs="+", default=[], dest="sources", metavar="FILE",
        help="take scores from .jsonl or .parquet, a row a document")  # fmt: skip
    add("--key", nargs="+", default=[], metavar="KEY", help="keys or columns of the scores there")
    add("--id-key", metavar="KEY", help="join by this key instead of by order; with --documents")
    add("--documents", nargs="+", default=[], metavar="FILE",
        help="the files the corpus was tokenized from, to know the ids")  # fmt: skip
    add("--reference", type=Path, metavar="PREFIX",
        help="unigram, bigram: corpus to count on (default: a sample of IN)")  # fmt: skip
    add("--fit-tokens", type=int, default=10_000_000, metavar="T",
        help="unigram, bigram: tokens counted (default 10000000)")  # fmt: skip
    add("--seed", type=int, default=0, help="of the sample (default 0)")
    add("--add", action="store_true", help="keep the scores that are there and add to them")
    add("--overwrite", action="store_true", help="replace existing scores")
    add("--workers", type=int, default=len(os.sched_getaffinity(0)), metavar="N",
        help="zlib: threads (default: one a core)")  # fmt: skip
    add("--json", action="store_true", help="report as JSON")
    add_tokenizer_arguments(parser, is_required=False)


def run(args: argparse.Namespace) -> int:
    """Carry out the verb; see `megatron-d3 score --help`."""
    if bool(args.method) == bool(args.sources):
        raise ConfigError("score: give either --method or --from")
    if bool(args.sources) != bool(args.key):
        raise ConfigError("--from and --key: give both; --key names the scores in the file")
    if args.workers < 1:
        raise ConfigError(f"--workers: got {args.workers}, expected at least 1")
    index = read_index(args.prefix)
    names = list(args.method or args.key)
    old_names, old_values = _old(args, index)
    for name in names:
        if (names + old_names).count(name) > 1:
            raise ConfigError(f"--{'method' if args.method else 'key'}: two scores named {name!r}")
    values = _values(args, index)
    is_replacing = args.overwrite or args.add
    with Publication(args.prefix, SUFFIXES, is_overwriting=is_replacing) as new:
        chunks, text = score_files(
            np.concatenate([*old_values, values]),
            names=[*old_names, *names],
            index=index_hash(index),
        )
        new.write(SUFFIXES[0], chunks)
        new.write(SUFFIXES[1], [text])
    _print(args, names, values)
    return 0


def _old(args: argparse.Namespace, index: Index) -> tuple[list[str], list[np.ndarray]]:
    """Return the scores to keep."""
    path = suffixed(args.prefix, SUFFIXES[0])
    if not (args.add and path.is_file()):
        return [], []
    scores = read_scores(path, index=index)
    return list(scores.names), [np.array(scores.values, np.float64)]


def _values(args: argparse.Namespace, index: Index) -> np.ndarray:
    """Return the new scores, (M, D) float64."""
    if args.sources:
        return join(index, args.sources, args.key, id_key=args.id_key, documents=args.documents)
    reference = read_index(args.reference) if args.reference else None
    decode = open_encoder(tokenizer_of(args)).decode if args.tokenizer_type else None
    rows = [
        score(
            index,
            method,
            reference=reference,
            fit_tokens=args.fit_tokens,
            seed=args.seed,
            decode=decode,
            threads=args.workers,
        )
        for method in args.method
    ]
    return np.array(rows).reshape(len(rows), index.num_documents)


def _print(args: argparse.Namespace, names: list[str], values: np.ndarray) -> None:
    marks = (0, 10, 50, 90, 100)
    rows = [np.percentile(row, marks).tolist() if len(row) else [] for row in values]
    if args.json:
        report = [
            dict(zip(("min", "p10", "median", "p90", "max"), row, strict=False)) for row in rows
        ]
        print(json.dumps(dict(zip(names, report, strict=True)), indent=2))
        return
    print(f"{args.prefix}{SUFFIXES[0]}: {values.shape[1]:,} documents")
    width = max(map(len, names))
    for name, row in zip(names, rows, strict=True):
        text = " ".join(f"{value:10.4g}" for value in row)
        print(f"{name:<{width}}  min 10% median 90% max  {text}")
