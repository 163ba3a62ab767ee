"""`megatron-d3 order`: give a corpus another order, as a new `.idx` over the same `.bin`."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from typing import Any

import numpy as np

from megatron_d3.cli.order_flags import add_arguments, recipe_of
from megatron_d3.cli.order_plot import plot_order, running_mean
from megatron_d3.corpus.copying import Copiers
from megatron_d3.corpus.derive import derive, origin
from megatron_d3.corpus.index import read_index, suffixed
from megatron_d3.corpus.mpi import Ranks, on_all_ranks
from megatron_d3.corpus.publish import Publication
from megatron_d3.corpus.rewrite import Source, open_source
from megatron_d3.corpus.scores import (
    SUFFIXES,
    Scores,
    array_hash,
    join_scores,
    npy_chunks,
    read_scores,
    require_made_for,
)
from megatron_d3.errors import ConfigError
from megatron_d3.order import Recipe, permutation, rank_together

__all__ = ["EXAMPLE", "HELP", "NAME", "add_arguments", "run"]

NAME = "order"
HELP = "order a corpus by score (sort, fold, zigzag, segment, str, saw, shuffle)"
EXAMPLE = """\
megatron-d3 order --prefix corpus/web --preset saw-pretrain --ascending \\
    --output-prefix corpus/web-saw --plot web-saw.png"""


def run(args: argparse.Namespace) -> int:
    """Carry out the verb; see `megatron-d3 order --help`."""
    return on_all_ranks(lambda ranks: _run(args, ranks))


def _run(args: argparse.Namespace, ranks: Ranks) -> int:
    recipe = recipe_of(args)
    if len(args.prefix) > 1 and not args.merge:
        raise ConfigError(
            f"--prefix: got {len(args.prefix)} corpora; give --merge to order them as one, or "
            "order each by itself"
        )
    source = open_source([read_index(prefix) for prefix in args.prefix])
    # One core hashes what is read while the other sorts: both take about as long.
    with ThreadPoolExecutor(1) as background:
        background.submit(lambda: [index.digest for index in source.indexes])
        parts = _read_scores(args, source, is_needed=recipe.needs_scores)
        scores = join_scores(parts) if parts else None
        if args.plot and scores is None:
            raise ConfigError("--plot: there are no scores to draw; give --scores")
        row = hashed = None
        if scores and recipe.needs_scores:
            row = scores.row(args.score)
            if not ranks.rank:
                # In memory: it is read in no order, and a mapped file has small pages.
                row = np.array(row)
                hashed = background.submit(array_hash, row)
        copiers = Copiers(source, ranks) if _is_copying_together(args, ranks) else None
        if ranks.rank:
            if row is not None:
                rank_together(row, ascending=recipe.ascending is not False, ranks=ranks)
            return copiers.help() if copiers else 0  # rank 0 does the rest
        with copiers.dismiss() if copiers else nullcontext():
            order = _order(recipe, row, source, ranks, copiers)
            score_hash = hashed.result() if hashed else None  # and with it the digests
            for part, index in zip(parts, source.indexes, strict=False):
                require_made_for(part, index)
            how = _how(args, recipe, scores, score_hash)
            report = origin(source, order, is_copying=args.copy, how=how)
            if not args.dry_run:
                _write(args, source, scores, order, report, copiers)
    _print(args, recipe, report, row, order)
    return 0


def _is_copying_together(args: argparse.Namespace, ranks: Ranks) -> bool:
    return bool(args.copy) and not args.dry_run and ranks.size > 1


def _order(
    recipe: Recipe,
    row: np.ndarray | None,
    source: Source,
    ranks: Ranks,
    copiers: Copiers | None,
) -> np.ndarray:
    """Return the permutation, on rank 0; warnings go to stderr."""

    def ranking(scores: np.ndarray, *, ascending: bool) -> np.ndarray:
        ranked = rank_together(scores, ascending=ascending, ranks=ranks)
        if copiers is not None:
            copiers.are_waiting = True  # what is refused from here on is refused on rank 0 alone
        return ranked

    if copiers is not None and row is None:
        copiers.are_waiting = True
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        order = permutation(row, recipe, num_items=source.num_documents, ranking=ranking)
    for warning in caught:
        print(f"warning: {warning.message}", file=sys.stderr)
    return order


def _read_scores(args: argparse.Namespace, source: Source, *, is_needed: bool) -> list[Scores]:
    """Open the scores of each corpus, if there are any; their digests have yet to be compared."""
    paths = args.scores or [suffixed(prefix, SUFFIXES[0]) for prefix in args.prefix]
    if len(paths) != len(args.prefix):
        raise ConfigError(f"--scores: got {len(paths)} files for {len(args.prefix)} corpora")
    if not (is_needed or args.scores or all(path.is_file() for path in paths)):
        return []
    return [
        read_scores(path, index=index, is_digest_checked=False)
        for path, index in zip(paths, source.indexes, strict=True)
    ]


def _how(
    args: argparse.Namespace, recipe: Recipe, scores: Scores | None, score_hash: str | None
) -> dict[str, Any]:
    """Return what this verb adds to the origin of its output."""
    score = None
    if scores and recipe.needs_scores:
        name = args.score or scores.names[0]
        paths = args.scores or [suffixed(prefix, SUFFIXES[0]) for prefix in args.prefix]
        files = [str(path) for path in paths]
        score = {"name": name, "files": files, "hash": score_hash}
    return {"verb": NAME, "recipe": recipe.to_dict(), "preset": args.preset, "score": score}


def _write(
    args: argparse.Namespace,
    source: Source,
    scores: Scores | None,
    order: np.ndarray,
    report: dict[str, Any],
    copiers: Copiers | None,
) -> None:
    """Write everything the flags ask for, or nothing."""
    with ExitStack() as stack:
        if args.permutation_out:
            new = Publication(args.permutation_out, [""], is_overwriting=args.overwrite)
            stack.enter_context(new).write("", npy_chunks(order))
        if args.plot:
            assert scores is not None  # refused before
            name = args.score or scores.names[0]
            new = Publication(args.plot, [""], is_overwriting=args.overwrite)
            plot_order(
                stack.enter_context(new).aside(""),
                scores=scores.row(name),
                order=order,
                title=_headline(report["recipe"]),
                score_name=name,
                kind=args.plot.suffix.lstrip(".") or "png",
            )
        derive(
            source,
            order,
            args.output_prefix,
            scores=scores,
            report=report,
            is_copying=args.copy,
            is_overwriting=args.overwrite,
            copy=copiers.write if copiers else None,
        )


def _print(
    args: argparse.Namespace,
    recipe: Recipe,
    report: dict[str, Any],
    row: np.ndarray | None,
    order: np.ndarray,
) -> None:
    tenths: list[float] = []
    if row is not None and len(order):
        tenths = running_mean(row, order, num_windows=10)[1].tolist()
    if args.json:
        print(json.dumps({**report, "mean_score_by_tenth": tenths}, indent=2))
        return
    print(_headline(report["recipe"]))
    for entry in report["inputs"]:
        print(
            f"in   {entry['prefix']}  {entry['num_documents']:,} documents  "
            f"{entry['num_tokens']:,} tokens"
        )
    state = "would be " if args.dry_run else ""
    print(f"out  {args.output_prefix}  .bin {state}{report['bin']}")
    if tenths:
        print("mean score by tenth  " + " ".join(f"{mean:.4g}" for mean in tenths))


def _headline(recipe: dict[str, Any]) -> str:
    """Return a recipe as one line."""
    words = [
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in recipe["parameters"].items()
    ]
    if recipe["ascending"] is not None:
        words.insert(0, "ascending" if recipe["ascending"] else "descending")
    words.append(f"jitter {recipe['jitter']:g}")
    words.append(f"seed {recipe['seed']}")
    return f"{recipe['method']}: {', '.join(words)}"
