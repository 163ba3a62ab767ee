"""How fast the verbs of `index` are, against reading (and writing) the same files once.

    python -m benchmarks.index_speed --documents 10000000

Two synthetic corpora of half the documents each, about 16 tokens a document: small documents, so
that it is the index that costs. Files are in the page cache, for both sides. "Once" is the plain
reading of what the verb reads, in blocks of 16 MB, and for `merge` also writing and flushing what it
writes. Seconds of processor time stand beside those by the clock: they suffer less from other work.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks._table import print_machine, print_table
from megatron_d3.cli.main import main as megatron_d3
from megatron_d3.corpus.index import HEADER, MAGIC

_BLOCK_BYTES = 1 << 24
_VOCABULARY = 50_000


def make_corpus(prefix: Path, num_documents: int, seed: int) -> None:
    """Write documents of 1 to 31 tokens, uint16."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 32, num_documents, dtype="<i4")
    ends = np.cumsum(lengths, dtype="<i8") * 2
    with open(f"{prefix}.idx", "wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, num_documents, num_documents + 1))
        file.write(lengths)
        file.write(ends - lengths * 2)
        file.write(np.arange(num_documents + 1, dtype="<i8"))
    rng.integers(0, _VOCABULARY, int(ends[-1]) // 2, dtype="<u2").tofile(f"{prefix}.bin")


def once(sources: Sequence[Path], target: Path | None = None) -> None:
    """Read files, and write their bytes to another if there is one."""
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(open(target, "wb")) if target else None
        for source in sources:
            with open(source, "rb") as file:
                while block := file.read(_BLOCK_BYTES):
                    if out:
                        out.write(block)
        if out:
            out.flush()
            os.fsync(out.fileno())


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Return seconds by the clock and of processor time."""
    start, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - used


def verb(*words: object) -> Callable[[], None]:
    """Return a call of `megatron-d3 WORDS` that says nothing."""

    def run() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            assert megatron_d3([str(word) for word in words]) == 0

    return run


def main() -> None:
    """Run the benchmark; see the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary one)")
    args = parser.parse_args()
    print_machine()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        for seed, part in enumerate("ab"):
            make_corpus(folder / part, args.documents // 2, seed)
        halves = [folder / "a", folder / "b"]
        inputs = [Path(f"{half}{suffix}") for half in halves for suffix in (".bin", ".idx")]
        whole, copy = folder / "whole", folder / "copy"
        both = [Path(f"{whole}.bin"), Path(f"{whole}.idx")]
        merge = verb("index", "merge", *halves, "--output-prefix", whole)
        split = verb("index", "split", whole, "--train-prefix", folder / "train",
                     "--valid-prefix", folder / "valid", "--valid-fraction", "0.01")  # fmt: skip
        cases: list[tuple[str, Callable[[], None], list[Path], Path | None]] = [
            ("merge", merge, inputs, copy),
            ("check", verb("index", "check", whole), both[1:], None),
            ("check --vocab-size",
             verb("index", "check", whole, "--vocab-size", _VOCABULARY), both, None),
            ("split", split, both, None),
        ]  # fmt: skip
        rows = []
        for label, work, files, target in cases:
            seconds, used = timed(work)
            size = sum(path.stat().st_size for path in files)
            plain, plain_used = timed(lambda files=files, to=target: once(files, to))
            rows.append([
                f"`index {label}`", f"{size / 1e6:,.0f} MB", f"{seconds:.2f} s", f"{used:.2f} s",
                f"{plain:.2f} s", f"{plain_used:.2f} s",
            ])  # fmt: skip
    print(f"{args.documents:,} documents\n")
    print_table(["", "files", "time", "processor", "once", "processor"], rows)


if __name__ == "__main__":
    main()
