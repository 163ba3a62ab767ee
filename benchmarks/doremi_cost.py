"""What a DoReMi proxy step costs: beside a reference model, and with its losses read from disk.

One model, one corpus, uniform samples; the reference has the proxy's own shape. Runs take turns, so
that a machine that slows down slows down all. A step ends where Megatron logs it; the reference's
forward pass runs in the hook before the step and counts. On a CPU that others use too, look at the
processor time.

    python -m benchmarks.doremi_cost --steps 60 --turns 3 --processes 1
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
from benchmarks.step_overhead import MODEL

AIMS = {"static": 1.0, "stored losses": 1.02, "reference model": 1.40}
_WARM_UP = 5  # steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--global-batch-size", type=int, default=16)
    options = parser.parse_args()
    print_machine()
    times: dict[str, list[np.ndarray]] = {name: [] for name in AIMS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mixes = prepare(folder, options)
        for turn in range(options.turns):
            for kind, config in mixes.items():
                path = folder / f"{turn}-{kind.replace(' ', '-')}.json"
                torchrun(options, "benchmarks._timed_pretrain", [
                    str(path), *flags(folder, options), "--d3-config", str(config),
                    "--d3-plan-dir", str(path.with_suffix(""))])
                clocks = json.loads(path.read_text())
                steps = np.diff([clocks["done_at"], clocks["used_by"]])  # (2, steps - 1)
                hooks = np.array(clocks["in_hooks"])[:, 1]  # before and after each step
                hooks = (hooks[0::2] + hooks[1::2])[1:]  # of the steps whose length is known
                times[kind].append(np.vstack((steps, hooks))[:, _WARM_UP:])  # (3, n)
    medians = {kind: np.median(np.concatenate(t, axis=1), axis=1) for kind, t in times.items()}
    rows = []
    for kind, (wall, processor, hook) in medians.items():
        ratios = medians[kind] / medians["static"]
        rows.append([kind, f"{wall * 1e3:.1f}", f"{ratios[0]:.3f}", f"{processor * 1e3:.1f}",
                     f"{ratios[1]:.3f}", f"{hook * 1e3:.1f}", AIMS[kind]])
    print_table(
        ["step", "wall ms", "ratio", "processor ms", "ratio", "of it in hooks", "aim"], rows)


def prepare(folder: Path, options: argparse.Namespace) -> dict[str, Path]:
    """Build a corpus, a reference and its stored losses; return the configurations."""
    from megatron_d3.corpus.demo import build_demo_corpus

    corpus = build_demo_corpus(folder / "corpus", max_bytes_per_domain=500_000, vocab_size=2048)
    domains = {domain.name: str(folder / "corpus" / domain.name) for domain in corpus.domains}
    reference = folder / "reference"
    mixes: dict[str, dict[str, str]] = {
        "static": {"type": "static"},
        "stored losses": {"type": "doremi", "losses": str(folder / "losses")},
        "reference model": {"type": "doremi", "reference": str(reference)},
    }
    configs = {}
    for kind, mix in mixes.items():
        configs[kind] = folder / f"{kind.replace(' ', '-')}.yaml"
        configs[kind].write_text(json.dumps({"domains": domains, "valid_fraction": 0, "mix": mix}))
    torchrun(options, "megatron_d3.pretrain", [
        *flags(folder, options), "--d3-config", str(configs["static"]), "--save", str(reference),
        "--exit-interval", "1", "--save-interval", "1"])
    torchrun(options, "megatron_d3.mcore.store_losses", [
        *flags(folder, options), "--d3-config", str(configs["reference model"]),
        "--d3-plan-dir", str(folder / "losses")])
    return configs


def flags(folder: Path, options: argparse.Namespace) -> list[str]:
    """Flags that all runs share."""
    return [
        *MODEL, "--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model",
        str(folder / "corpus" / "tokenizer.model"), "--seq-length", str(options.seq_length),
        "--max-position-embeddings", str(options.seq_length),
        "--micro-batch-size", str(options.micro_batch_size),
        "--global-batch-size", str(options.global_batch_size),
        "--train-iters", str(options.steps + _WARM_UP + 1)]


def torchrun(options: argparse.Namespace, module: str, arguments: list[str]) -> None:
    """Run a module in all processes; what it prints is shown only if it fails."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    environment = os.environ | {
        "MEGATRON_D3_DEVICE": "cpu", "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(options.processes),
         "--master-port", str(port), "-m", module, *arguments],
        env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])


if __name__ == "__main__":
    main()
