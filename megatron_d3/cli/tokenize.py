"""`megatron-d3 tokenize`: text files to one `.bin`/`.idx`, with the scores they carry."""

from __future__ import annotations

import argparse
import json
import os
import re
from dataclasses import asdict
from pathlib import Path

from megatron_d3.corpus.encoders import KINDS, TokenizerFiles, kind_of
from megatron_d3.corpus.encoding import Settings
from megatron_d3.corpus.mpi import Ranks, on_all_ranks
from megatron_d3.corpus.records import Keys
from megatron_d3.corpus.sources import cut, find_files
from megatron_d3.corpus.tokenization import SKIPPED_SUFFIX, Summary, tokenize

NAME = "tokenize"
HELP = "tokenize .jsonl, .parquet or .txt into one .bin/.idx, keeping quality scores"
EXAMPLE = """\
megatron-d3 tokenize --input data/*.jsonl.zst --output-prefix corpus/web \\
    --tokenizer-type hf --tokenizer-model tokenizer.json --append-eod \\
    --score-key meta.quality --workers 8
mpirun -n 16 megatron-d3 tokenize --input data --output-prefix corpus/web ..."""

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the verb."""
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="PATH",
        help="files, folders or globs: .jsonl, .json, .txt (each also .gz, .zst), .parquet; "
        "documents keep this order")  # fmt: skip
    add("--output-prefix", required=True, type=Path, metavar="OUT",
        help="writes OUT.bin and OUT.idx; the folder must exist")  # fmt: skip
    add_tokenizer_arguments(parser, is_required=True)
    add("--append-eod", action="store_true", help="end every document with end-of-document")
    add("--text-key", default="text", metavar="KEY",
        help="key or column of the text; dots lead into objects (default text)")  # fmt: skip
    add("--score-key", nargs="+", default=[], metavar="KEY",
        help="keys or columns of scores to keep in OUT.scores.npy, e.g. meta.quality")  # fmt: skip
    add("--txt", choices=("file", "line"), help="a .txt is one document, or one a line")
    add("--on-error", choices=("fail", "skip"), default="fail",
        help=f"a row that is no document: stop, or list it in OUT{SKIPPED_SUFFIX} "
        "(default fail)")  # fmt: skip
    add("--empty", choices=("keep", "skip"), default="keep",
        help="a document without tokens (default keep, as Megatron does)")  # fmt: skip
    add("--workers", type=int, metavar="N",
        help="processes that tokenize (default: one a core; under mpirun 1 a rank)")  # fmt: skip
    add("--shard-size", type=_size, default=256 * 10**6, metavar="BYTES",
        help="input between two points an interrupted run can go on from, and the least a rank "
        "works on, e.g. 64M (default 256M)")  # fmt: skip
    add("--overwrite", action="store_true", help="replace existing output")
    add("--json", action="store_true", help="report as JSON")


def add_tokenizer_arguments(parser: argparse.ArgumentParser, *, is_required: bool) -> None:
    """Declare the flags that name a tokenizer; spelled as Megatron's."""
    group = parser.add_argument_group("tokenizer")
    add = group.add_argument
    add("--tokenizer-type", required=is_required, metavar="TYPE",
        help=f"{', '.join(KINDS)}, or Megatron's name of it, e.g. HuggingFaceTokenizer")  # fmt: skip
    add("--tokenizer-model", type=Path, metavar="FILE",
        help="sentencepiece: .model; hf: tokenizer.json or its folder; tiktoken: .json or "
        ".tiktoken")  # fmt: skip
    add("--vocab-file", type=Path, metavar="FILE", help="gpt2: vocab.json")
    add("--merge-file", type=Path, metavar="FILE", help="gpt2: merges.txt")
    add("--eod-token", metavar="TOKEN",
        help="hf, gpt2: end of document (default: eos_token of tokenizer_config.json; gpt2: "
        "<|endoftext|>)")  # fmt: skip
    add("--vocab-size", type=int, default=131_072, metavar="V",
        help="tiktoken: size of the vocabulary (default 131072)")  # fmt: skip
    add("--tiktoken-pattern", choices=("v1", "v2"), default="v2",
        help="tiktoken: how text is split (default v2)")  # fmt: skip
    add("--tiktoken-num-special-tokens", type=int, default=1000, metavar="N",
        help="tiktoken: ids before the first ordinary token (default 1000)")  # fmt: skip


def tokenizer_of(args: argparse.Namespace) -> TokenizerFiles:
    """Return the tokenizer that the flags name."""
    return TokenizerFiles(
        kind=kind_of(args.tokenizer_type),
        model=args.tokenizer_model,
        vocab_file=args.vocab_file,
        merge_file=args.merge_file,
        eod_token=args.eod_token,
        pattern=args.tiktoken_pattern,
        num_special_tokens=args.tiktoken_num_special_tokens,
        vocab_size=args.vocab_size,
    )


def run(args: argparse.Namespace) -> int:
    """Carry out the verb; see `megatron-d3 tokenize --help`."""
    return on_all_ranks(lambda ranks: _run(args, ranks))


def _run(args: argparse.Namespace, ranks: Ranks) -> int:
    settings = Settings(
        tokenizer=tokenizer_of(args),
        keys=Keys(args.text_key, tuple(args.score_key)),
        is_appending_eod=args.append_eod,
        on_error=args.on_error,
        empty=args.empty,
    )
    workers = args.workers
    if workers is None:
        workers = 1 if ranks.size > 1 else len(os.sched_getaffinity(0))
    shards = cut(find_files(args.input), shard_bytes=args.shard_size, txt=args.txt)
    summary = tokenize(
        shards,
        args.output_prefix,
        settings,
        workers=workers,
        ranks=ranks,
        is_overwriting=args.overwrite,
    )
    if summary:
        print(json.dumps(_to_dict(summary), indent=2) if args.json else _text(summary, args))
    return 0


def _to_dict(summary: Summary) -> dict[str, object]:
    numbers = asdict(summary)
    tally = numbers.pop("tally")
    del tally["problems"], tally["num_rows"]
    return {**numbers, **tally}


def _text(summary: Summary, args: argparse.Namespace) -> str:
    tally = summary.tally
    seconds = max(summary.seconds, 1e-9)
    per_token = tally.num_bytes / max(tally.num_tokens, 1)
    counts = f"{tally.num_documents:,} documents, {tally.num_tokens:,} tokens"
    size = f"{tally.num_bytes:,} bytes of text ({per_token:.2f} bytes a token)"
    lines = [f"{summary.prefix}: {counts} from {size}"]
    if summary.num_resumed:
        lines.append(f"resumed: {summary.num_resumed} of {summary.num_shards} shards were done")
    else:
        lines.append(f"{seconds:.1f} s, {tally.num_tokens / seconds:,.0f} tokens/s")
    if tally.num_empty:
        done = "kept" if args.empty == "keep" else "skipped"
        lines.append(f"empty documents {done}: {tally.num_empty:,}")
    if tally.num_blank:
        lines.append(f"blank lines passed over: {tally.num_blank:,}")
    for reason, count in summary.skipped.items():
        lines.append(f"skipped, {reason}: {count:,}")
    if summary.skipped:
        lines.append(f"skipped rows are listed in {summary.prefix}{SKIPPED_SUFFIX}")
    if args.score_key:
        lines.append(f"scores: {', '.join(args.score_key)} in {summary.prefix}.scores.npy")
    return "\n".join(lines)


def _size(text: str) -> int:
    """Parse a number of bytes: 1000000, 64M, 1G."""
    match = re.fullmatch(r"(\d+)([kmg]?)b?", text.lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected bytes, for example 64M")
    return int(match[1]) * _UNITS[match[2]]
