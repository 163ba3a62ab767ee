"""`megatron-d3 demo-corpus`: a tokenized multi-domain corpus of the text Python itself brings."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path

from megatron_d3.corpus.demo import DemoCorpus, build_demo_corpus

NAME = "demo-corpus"
HELP = "build a real multi-domain corpus and its tokenizer, without a download"
EXAMPLE = "megatron-d3 demo-corpus --out demo/corpus --max-mb-per-domain 5 --vocab-size 4096"


def _megabytes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0.01 <= value < math.inf):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number >= 0.01")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    add("--out", required=True, type=Path, metavar="DIR",
        help="folder to make; a finished corpus of the same size is used as it is")  # fmt: skip
    add("--max-mb-per-domain", type=_megabytes, default=5.0, metavar="MB",
        help="text at which a domain is full, in 10^6 bytes (default 5)")  # fmt: skip
    add("--vocab-size", type=int, default=4096, metavar="N",
        help="pieces of the tokenizer (default 4096)")  # fmt: skip
    add("--json", action="store_true", help="print the table as JSON")


def run(args: argparse.Namespace) -> int:
    """Build the corpus and print what it holds; see `megatron-d3 demo-corpus --help`."""
    corpus = build_demo_corpus(
        args.out,
        max_bytes_per_domain=round(args.max_mb_per_domain * 1e6),
        vocab_size=args.vocab_size,
    )
    print(json.dumps(_to_dict(corpus), indent=2) if args.json else _table(corpus))
    return 0


def _to_dict(corpus: DemoCorpus) -> dict[str, object]:
    return {
        "path": str(corpus.path),
        "tokenizer_model": str(corpus.tokenizer_model),
        "vocab_size": corpus.vocab_size,
        "eod_id": corpus.eod_id,
        "num_bytes": corpus.num_bytes,
        "num_tokens": corpus.num_tokens,
        "domains": [asdict(domain) for domain in corpus.domains],
    }


def _table(corpus: DemoCorpus) -> str:
    lines = [f"{'domain':<10}{'documents':>10}{'bytes':>12}{'tokens':>12}{'held-out tokens':>17}"]
    for domain in corpus.domains:
        train = domain.train
        lines.append(
            f"{domain.name:<10}{train.documents:>10,}{train.bytes:>12,}{train.tokens:>12,}"
            f"{domain.valid.tokens:>17,}"
        )
    lines.append(
        f"{corpus.num_bytes / 1e6:.1f} MB, {corpus.num_tokens:,} tokens, "
        f"vocabulary {corpus.vocab_size:,}, in {corpus.path}"
    )
    return "\n".join(lines)
