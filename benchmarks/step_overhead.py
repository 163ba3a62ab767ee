"""What a planned step costs: our dataset and hooks against Megatron's blended dataset.

Same model, same corpora, same weights; runs of both kinds take turns, so that a machine that slows
down slows down both. A step ends where Megatron logs it.

    python -m benchmarks.step_overhead --steps 200 --turns 2 --processes 2
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks._table import print_machine, print_table

MODEL = ["--num-layers", "4", "--hidden-size", "256", "--num-attention-heads", "4", "--swiglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope", "--disable-bias-linear", "--untie-embeddings-and-output-weights", "--attention-dropout", "0", "--hidden-dropout", "0", "--lr", "1e-4", "--eval-iters", "0", "--eval-interval", "1000000", "--log-interval", "50", "--num-workers", "1"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--global-batch-size", type=int, default=16)
    options = parser.parse_args()
    print_machine()
    with tempfile.TemporaryDirectory() as folder:
        times = {"BlendedDataset": [], "planned": []}
        in_hooks: list[np.ndarray] = []  # (wall, processor) seconds a step
        sides = prepare(Path(folder))
        for turn in range(options.turns):
            for name, data in sides.items():
                result = run(Path(folder) / f"{name}{turn}", data, options)
                times[name] += np.diff(result["done_at"])[5:].tolist()  # after warming up
                hooks = np.array(result["in_hooks"])  # before and after each step
                in_hooks += list((hooks[0::2] + hooks[1::2])[5:])
    report(times, in_hooks)


def prepare(folder: Path) -> dict[str, list[str]]:
    """Build a small demo corpus; return the data flags of both sides."""
    from megatron_d3.corpus.demo import build_demo_corpus

    corpus = build_demo_corpus(folder / "corpus", max_bytes_per_domain=1_000_000, vocab_size=2048)
    tokenizer = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model",
                 str(corpus.tokenizer_model)]
    names = [domain.name for domain in corpus.domains]
    (folder / "run.yaml").write_text(json.dumps({
        "domains": {name: str(folder / "corpus" / name) for name in names}, "valid_fraction": 0}))
    blend = [x for name in names for x in ("1", str(folder / "corpus" / name))]
    return {
        "BlendedDataset": [*tokenizer, "--data-path", *blend, "--split", "100,0,0",
                           "--data-cache-path", str(folder / "cache")],
        "planned": [*tokenizer, "--d3-config", str(folder / "run.yaml")],
    }


def run(folder: Path, data: list[str], options: argparse.Namespace) -> dict[str, list[float]]:
    """Train once and return the clock's readings of rank 0."""
    folder.mkdir()
    flags = [
        *MODEL, *data, "--seq-length", options.seq_length,
        "--max-position-embeddings", options.seq_length,
        "--micro-batch-size", options.micro_batch_size,
        "--global-batch-size", options.global_batch_size, "--train-iters", options.steps + 6]
    if "--d3-config" in data:
        flags += ["--d3-plan-dir", folder / "plan"]
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with (folder / "log").open("w") as log:
        subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--master-port", str(port),
             "--nproc-per-node", str(options.processes), "-m", "benchmarks._timed_pretrain",
             str(folder / "times.json"), *map(str, flags)],
            check=True, stdout=log, stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"})
    result: dict[str, list[float]] = json.loads((folder / "times.json").read_text())
    return result


def report(times: dict[str, list[float]], in_hooks: list[np.ndarray]) -> None:
    stock, planned = (np.array(times[name]) * 1e3 for name in ("BlendedDataset", "planned"))
    rows = [
        (name, len(ms), f"{np.median(ms):.2f}", f"{np.quantile(ms, 0.1):.2f}",
         f"{np.quantile(ms, 0.9):.2f}")
        for name, ms in (("BlendedDataset", stock), ("planned", planned))]
    print_table(("dataset", "steps", "median ms", "10 %", "90 %"), rows)
    wall, processor = np.median(in_hooks, axis=0) * 1e3
    print(f"median ratio planned / BlendedDataset: {np.median(planned) / np.median(stock):.4f}")
    print(f"hooks: {processor:.3f} ms of processor time a step, {processor / np.median(planned):.2%}"
          f" of it; {wall:.3f} ms by the clock, in which ranks wait for the slowest")


if __name__ == "__main__":
    main()
