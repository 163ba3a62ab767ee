"""`megatron-d3 score`: give every document of a corpus a score, computed or from a file.

`--loss-of` needs Megatron's processes. Started by `torchrun` (or `srun`), the verb is one of them;
started by itself, it calls `torchrun` with its own command line and waits.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from megatron_d3.cli.tokenize import add_tokenizer_arguments, tokenizer_of
from megatron_d3.cli.torchrun import launch_environment, require_training_packages, train
from megatron_d3.corpus.encoders import open_encoder
from megatron_d3.corpus.index import Index, read_index, suffixed
from megatron_d3.corpus.parts import LOSS_PARTS, finished
from megatron_d3.corpus.progress import Progress
from megatron_d3.corpus.publish import Publication
from megatron_d3.corpus.score import METHODS, score
from megatron_d3.corpus.score_join import join
from megatron_d3.corpus.scores import SUFFIXES, read_scores, score_files
from megatron_d3.corpus.windows import cut_shards
from megatron_d3.errors import ConfigError, D3Error

NAME = "score"
HELP = "score documents by length, zlib, n-gram surprisal or a model's loss, or from a file"
EXAMPLE = """\
megatron-d3 score --prefix corpus/web --method zlib bigram --reference corpus/wiki
megatron-d3 score --prefix corpus/web --from quality.parquet --key score
megatron-d3 score --prefix corpus/web --loss-of runs/small --num-processes 2
torchrun --nproc-per-node 8 -m megatron_d3 score --prefix corpus/web --loss-of runs/small \\
    -- --tensor-model-parallel-size 2 --micro-batch-size 16"""

_RANK_0_SECONDS = 2.0  # until other ranks say what rank 0 most likely says too


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
    add("--loss-of", type=Path, metavar="CKPT",
        help="mean token loss under a Megatron checkpoint: a --save folder, format torch_dist; "
        "Megatron's flags, e.g. for parallelism, come after --")  # fmt: skip
    add("--loss-name", default="loss", metavar="NAME", help="of that score (default loss)")
    add("--num-processes", type=int, default=1, metavar="N",
        help="loss: processes to start where torchrun has not (default 1)")  # fmt: skip
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
    add("megatron_flags", nargs="*", metavar="...", help="loss: -- and Megatron's flags")
    add_tokenizer_arguments(parser, is_required=False)


def run(args: argparse.Namespace) -> int:
    """Carry out the verb; see `megatron-d3 score --help`."""
    _check(args)
    if args.loss_of is not None and not _is_launched():
        return _launch(args)
    rank = int(os.environ["RANK"]) if args.loss_of is not None else 0
    try:
        return _score(args, rank)
    except D3Error:
        if rank:
            time.sleep(_RANK_0_SECONDS)
        raise


def _check(args: argparse.Namespace) -> None:
    if sum(map(bool, (args.method, args.sources, args.loss_of))) != 1:
        raise ConfigError("score: give either --method or --from or --loss-of")
    if bool(args.sources) != bool(args.key):
        raise ConfigError("--from and --key: give both; --key names the scores in the file")
    for flag, value in (("--workers", args.workers), ("--num-processes", args.num_processes)):
        if value < 1:
            raise ConfigError(f"{flag}: got {value}, expected at least 1")
    if args.megatron_flags and args.loss_of is None:
        raise ConfigError(f"score: what is {args.megatron_flags[0]}? See --help")


def _score(args: argparse.Namespace, rank: int) -> int:
    index = read_index(args.prefix)
    names = list(args.method or args.key or [args.loss_name])
    old_names, old_values = _old(args, index)
    for name in names:
        if (names + old_names).count(name) > 1:
            flag = "method" if args.method else "key" if args.key else "loss-name"
            raise ConfigError(f"--{flag}: two scores named {name!r}")
    is_replacing = args.overwrite or args.add
    new = Publication(args.prefix, SUFFIXES, is_overwriting=is_replacing)
    new.refuse_existing()  # before hours are spent on scores that may not be written
    with _values(args, index) as values:
        if values is None:
            return 0  # rank 0 does the rest
        with new:
            chunks, text = score_files(
                np.concatenate([*old_values, values]),
                names=[*old_names, *names],
                index=index.digest,
            )
            new.write(SUFFIXES[0], chunks)
            new.write(SUFFIXES[1], [text])
    _print(args, names, values)
    return 0


def _is_launched() -> bool:
    """Whether torchrun, or a job that does the same, has started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _launch(args: argparse.Namespace) -> int:
    """Run the same command in processes of Megatron, and report what they wrote."""
    require_training_packages()
    log = suffixed(args.prefix, ".loss.log")
    flags = [flag for flag in ("add", "overwrite") if getattr(args, flag)]
    words = ["score", "--prefix", str(args.prefix), "--loss-of", str(args.loss_of),
             "--loss-name", args.loss_name, *(f"--{flag}" for flag in flags),
             "--", *args.megatron_flags]  # fmt: skip
    index = read_index(args.prefix)
    Publication(args.prefix, SUFFIXES, is_overwriting=args.add or args.overwrite).refuse_existing()
    print(f"what Megatron says goes to {log}", file=sys.stderr)
    with _watching(index) as poll:
        train(words, log=log, num_processes=args.num_processes, module="megatron_d3", poll=poll,
              environment=launch_environment(args.num_processes))  # fmt: skip
    log.unlink()
    scores = read_scores(suffixed(args.prefix, SUFFIXES[0]), index=index)
    _print(args, [args.loss_name], scores.row(args.loss_name)[np.newaxis])
    return 0


@contextlib.contextmanager
def _watching(index: Index) -> Iterator[Callable[[], None]]:
    """Yield a function that shows how many shards the processes have finished."""
    folder = suffixed(index.prefix, LOSS_PARTS)
    num_shards = max(len(cut_shards(index)) - 1, 1)
    progress = Progress(index.bin_bytes, label="score")
    size = index.bin_bytes // num_shards

    def poll() -> None:
        with contextlib.suppress(OSError):  # not there yet, or no longer
            new = len(finished(folder)) * size - progress.done_bytes
            progress.add(new, new // index.dtype.itemsize)

    yield poll
    progress.close()


def _old(args: argparse.Namespace, index: Index) -> tuple[list[str], list[np.ndarray]]:
    """Return the scores to keep."""
    path = suffixed(args.prefix, SUFFIXES[0])
    if not (args.add and path.is_file()):
        return [], []
    scores = read_scores(path, index=index)
    return list(scores.names), [np.array(scores.values, np.float64)]


@contextlib.contextmanager
def _values(args: argparse.Namespace, index: Index) -> Iterator[np.ndarray | None]:
    """Yield the new scores, (M, D) float64; None on ranks that do not write them."""
    if args.loss_of is not None:
        from megatron_d3.mcore.score_losses import LossJob, document_losses

        job = LossJob(args.prefix, args.loss_of, tuple(args.megatron_flags), args.overwrite)
        with document_losses(job) as losses:
            yield None if losses is None else losses[np.newaxis]
    elif args.sources:
        yield join(index, args.sources, args.key, id_key=args.id_key, documents=args.documents)
    else:
        yield _computed(args, index)


def _computed(args: argparse.Namespace, index: Index) -> np.ndarray:
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
