"""Tokens a second: `megatron-d3 tokenize`, Megatron's tools/preprocess_data.py, the library alone.

    python -m benchmarks.tokenization --megatron ~/Megatron-LM

The text is Python code as `.jsonl`, a document every 2,000 characters, and a SentencePiece model
trained on a part of it. "Library alone" is the same number of processes that do nothing but call
SentencePiece on texts in memory. Times of the two programs are those of whole processes; Megatron's
is also given as it prints it itself, without its start. Processor time, of all processes together,
suffers less from other work on the machine.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from benchmarks._table import print_machine, print_table, processor_seconds
from megatron_d3.corpus.tokenizer import Tokenizer, train_tokenizer


def make_text(folder: Path, num_bytes: int) -> list[str]:
    """Write `a.jsonl` and train a tokenizer; return the texts."""
    texts: list[str] = []
    size = 0
    roots = (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"])
    for path in (path for root in roots for path in sorted(Path(root).rglob("*.py"))):
        content = path.read_text(encoding="utf-8", errors="ignore")
        texts += [content[start : start + 2000] for start in range(0, len(content), 2000)]
        size += len(content)
        if size >= num_bytes:
            break
    with open(folder / "a.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    train_tokenizer(texts[:: max(1, len(texts) // 1000)], folder / "sp.model", vocab_size=8000)
    return texts


def encode_alone(
    model: str, source: str, number: int, workers: int
) -> tuple[int, float, float]:
    """Return tokens, seconds and processor seconds of one process that only encodes its share."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=model)
    with open(source, encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file][number::workers]
    start, used = time.perf_counter(), time.process_time()
    count = sum(len(ids) for ids in processor.encode(texts, num_threads=1))
    return count, time.perf_counter() - start, time.process_time() - used


def time_library(folder: Path, workers: int) -> tuple[int, float, float]:
    """Return all tokens, the seconds of the slowest process and the processor seconds of all."""
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        jobs = [
            (str(folder / "sp.model"), str(folder / "a.jsonl"), number, workers)
            for number in range(workers)
        ]
        found = pool.starmap(encode_alone, jobs, chunksize=1)
    counts, seconds, used = zip(*found, strict=True)
    return sum(counts), max(seconds), sum(used)


def time_ours(folder: Path, workers: int) -> tuple[float, float]:
    """Return seconds and processor seconds of the verb as a process."""
    words = ["-m", "megatron_d3.cli.main", "tokenize", "--input", folder / "a.jsonl",
             "--output-prefix", folder / "ours", "--tokenizer-type", "sentencepiece",
             "--tokenizer-model", folder / "sp.model", "--append-eod", "--overwrite",
             "--workers", workers]  # fmt: skip
    start, used = time.perf_counter(), processor_seconds()
    subprocess.run([sys.executable, *map(str, words)], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start, processor_seconds() - used


def time_megatron(
    folder: Path, workers: int, checkout: Path, count: int
) -> tuple[float, float, float]:
    """Return seconds and processor seconds of Megatron's script, and seconds by its last line."""
    words = [checkout / "tools/preprocess_data.py", "--input", folder / "a.jsonl",
             "--output-prefix", folder / "theirs", "--tokenizer-type", "GPTSentencePieceTokenizer",
             "--tokenizer-model", folder / "sp.model", "--append-eod", "--workers", workers,
             "--log-interval", 1000]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(checkout), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    start, used = time.perf_counter(), processor_seconds()
    done = subprocess.run(
        [sys.executable, *map(str, words)], env=env, capture_output=True, text=True, check=True
    )
    seconds, used = time.perf_counter() - start, processor_seconds() - used
    rate = float(re.findall(r"\(([\d.]+) docs/s", done.stderr)[-1])
    for suffix in (".bin", ".idx"):
        theirs = (folder / f"theirs_text_document{suffix}").read_bytes()
        assert theirs == (folder / f"ours{suffix}").read_bytes(), "the files differ"
    return seconds, used, count / rate


def main() -> None:
    """Run the benchmark; see the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=50, help="of text")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--megatron", type=Path, default=os.environ.get("MEGATRON_LM_PATH"),
                        help="a Megatron-LM checkout (default: $MEGATRON_LM_PATH)")  # fmt: skip
    args = parser.parse_args()
    print_machine()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = make_text(folder, args.megabytes * 10**6)
        num_tokens, library, library_used = time_library(folder, args.workers)
        num_tokens += len(texts)  # ends of documents, the library gives none
        timed: list[tuple[str, float, float | None]] = [
            ("megatron-d3 tokenize", *time_ours(folder, args.workers)),
            ("the library alone", library, library_used),
        ]
        if args.megatron:
            whole, used, own = time_megatron(
                folder, args.workers, Path(args.megatron), len(texts))
            timed += [("Megatron's preprocess_data.py", whole, used),
                      ("the same, without its start", own, None)]  # fmt: skip
        vocab_size = Tokenizer(folder / "sp.model").vocab_size
    ours = timed[0][1]
    print(f"{len(texts):,} documents, {num_tokens:,} tokens, vocabulary {vocab_size:,}, "
          f"{args.workers} workers\n")  # fmt: skip
    rows = [[what, f"{seconds:.1f} s", f"{num_tokens / seconds:,.0f}", f"{seconds / ours:.2f}",
             "" if used is None else f"{used:.1f} s"]
            for what, seconds, used in timed]  # fmt: skip
    print_table(["", "time", "tokens/s", "time / ours", "processor"], rows)


if __name__ == "__main__":
    main()
