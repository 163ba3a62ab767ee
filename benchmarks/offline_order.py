"""Order a corpus by score: time and memory of `megatron-d3 order`, against lists in Python.

    python -m benchmarks.offline_order --documents 1000000 10000000

The corpus is synthetic: random lengths and scores, a `.bin` without content (a sparse file). The
peer is the least one can write for the usual way: read a JSON line a document, sort a list, cut it
into sections and layers, shuffle windows, write JSON lines. It is measured at `--peer` documents
of 4,000 characters (the index has 1,000 tokens a document) and extrapolated by its cost a document.
What it writes still has to be tokenized again; that is not counted. Processor time (of all threads)
suffers less from other work on the machine than time by the clock. Peak bytes are anonymous memory
above that of the started program, with the 8 bytes of the scores themselves.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks._table import print_machine, print_table
from megatron_d3.corpus.index import HEADER, MAGIC

_BLOCK = 1 << 20

# Runs the verb and watches its anonymous memory: pages of mapped files are the system's to drop.
_CHILD = """
import sys, threading, time
from megatron_d3.cli.main import main

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))

import megatron_d3.cli.order
base, peak, is_done = anonymous(), 0, False

def watch():
    global peak
    while not is_done:
        peak = max(peak, anonymous())
        time.sleep(0.01)

thread = threading.Thread(target=watch)
thread.start()
start, used = time.perf_counter(), time.process_time()
code = main(sys.argv[1:])
seconds, used = time.perf_counter() - start, time.process_time() - used
is_done = True
thread.join()
print("measured", code, seconds, used, peak - base)
"""


def make_corpus(prefix: Path, num_documents: int) -> None:
    """Write an index of random lengths, its scores, and a `.bin` that takes no space."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(50, 2000, num_documents, dtype="<i4")
    end = 0
    with open(f"{prefix}.idx", "wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, num_documents, num_documents + 1))
        file.write(lengths)
        for start in range(0, num_documents, _BLOCK):
            sizes = lengths[start : start + _BLOCK].astype("<i8") * 2
            ends = end + np.cumsum(sizes)
            file.write((ends - sizes).astype("<i8"))
            end = int(ends[-1])
        for start in range(0, num_documents + 1, _BLOCK):
            file.write(np.arange(start, min(start + _BLOCK, num_documents + 1), dtype="<i8"))
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(end)
    np.save(f"{prefix}.scores.npy", rng.random(num_documents))


def time_order(prefix: Path, jitter: str) -> tuple[float, float, int]:
    """Return seconds, processor seconds and peak bytes of the verb, in a process of its own."""
    words = ["order", "--prefix", prefix, "--output-prefix", f"{prefix}-saw", "--overwrite",
             "--preset", "saw-pretrain", "--ascending", "--jitter", jitter]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, *map(str, words)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    _, code, seconds, used, peak = done.stdout.splitlines()[-1].split()
    assert code == "0", done.stderr
    return float(seconds), float(used), int(peak)


def time_peer(folder: Path, num_documents: int, window: int) -> tuple[float, float]:
    """Return seconds and processor seconds of the usual way: SAW with 3 sections, ratio 0.1, 3 layers, and jitter."""
    rng = random.Random(0)
    text = "x" * 4000  # as long as the documents of the index: 1,000 tokens
    with open(folder / "in.jsonl", "w") as file:
        file.writelines(
            json.dumps({"text": text, "score": rng.random()}) + "\n" for _ in range(num_documents)
        )
    start, used = time.perf_counter(), time.process_time()
    with open(folder / "in.jsonl") as file:
        rows = [json.loads(line) for line in file]
    rows.sort(key=lambda row: row["score"])
    total, out, cursor = len(rows), [], 0
    radius = round(total * 0.1)
    for section in (1, 2):
        middle = round(total * section / 3)
        low, high = max(cursor, middle - radius), min(total, middle + radius)
        out += rows[cursor:low]
        for layer in range(3):
            part = rows[low:high][layer::3]
            out += part[::-1] if layer % 2 else part
        cursor = high
    out += rows[cursor:]
    for begin in range(0, total, window):
        part = out[begin : begin + window]
        rng.shuffle(part)
        out[begin : begin + window] = part
    with open(folder / "out.jsonl", "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in out)
    return time.perf_counter() - start, time.process_time() - used


def main() -> None:
    """Run the benchmark; see the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, nargs="+", default=[1_000_000])
    parser.add_argument("--peer", type=int, default=100_000, help="documents of the usual way")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary one)")
    args = parser.parse_args()
    print_machine()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        peer, peer_used = time_peer(folder, args.peer, args.peer // 20)
        for path in folder.iterdir():
            path.unlink()
        rows: list[list[object]] = []
        for num_documents in args.documents:
            make_corpus(folder / "web", num_documents)
            seconds, used, peak = time_order(folder / "web", "5%")
            scale = num_documents / args.peer
            rows.append([
                f"{num_documents:,}", f"{seconds:.2f} s", f"{used:.2f} s",
                f"{peak / num_documents:.0f}", f"{peer * scale:,.0f} s",
                f"{peer_used * scale:,.0f} s", f"{peer * scale / seconds:.0f}x",
                f"{peer_used * scale / used:.0f}x",
            ])  # fmt: skip
            for path in folder.iterdir():
                path.unlink()
    print(f"the usual way at {args.peer:,} documents: {peer:.2f} s, processor {peer_used:.2f} s\n")
    print_table(
        ["documents", "order saw, jitter 5 %", "processor", "peak bytes a document",
         "the usual way", "processor", "faster", "by processor"],
        rows,
    )  # fmt: skip


if __name__ == "__main__":
    main()
