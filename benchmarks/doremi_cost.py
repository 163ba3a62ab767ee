"""What a DoReMi proxy step costs: beside a reference model, and with its losses read from disk.

One model, one corpus, uniform samples; the reference has the proxy's own shape. The three runs take
turns step by step (`benchmarks/_interleaved.py`); ratios are the medians of those of neighbouring
steps, with their 95 % interval. The reference's forward pass runs in the hook before the step and
counts.

    python -m benchmarks.doremi_cost --steps 40 --turns 4           # 6 minutes on an idle core
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

import numpy as np

from benchmarks import _forked
from benchmarks._interleaved import WARM_UP, Steps, measure, ratio, shown
from benchmarks._table import print_machine, print_table
from benchmarks.step_overhead import MODEL

AIMS = {"static": "", "stored losses": "1.02", "reference model": "1.40"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40, help="of each run and turn")
    parser.add_argument("--turns", type=int, default=4, help="each with fresh processes")
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--global-batch-size", type=int, default=4)
    options = parser.parse_args()
    print_machine()
    os.environ |= {"OMP_NUM_THREADS": "1", "MEGATRON_D3_DEVICE": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
    _forked.import_megatron()
    found: dict[str, list[Steps]] = {kind: [] for kind in AIMS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mixes = prepare(folder, options)
        for turn in range(options.turns):
            kinds = list(AIMS)[turn % len(AIMS):] + list(AIMS)[:turn % len(AIMS)]
            runs = {kind: [*flags(folder, options), "--d3-config", str(mixes[kind]),
                           "--d3-plan-dir", str(folder / f"{turn}-{kind}")] for kind in kinds}
            steps = measure(runs, folder / f"turn{turn}", num_steps=options.steps)
            for kind, parts in found.items():
                parts.append(steps[kind])
    report({kind: Steps.joined(parts) for kind, parts in found.items()})


def report(found: dict[str, Steps]) -> None:
    rows = []
    for kind, steps in found.items():
        medians = [float(np.median(x)) * 1e3 for x in (steps.wall, steps.processor, steps.hooks)]
        ratios = [shown(ratio(steps, found["static"], of), 3) if AIMS[kind] else "1"
                  for of in ("wall", "processor")]
        rows.append((kind, len(steps.wall), f"{medians[0]:.1f}", ratios[0], f"{medians[1]:.1f}",
                     ratios[1], f"{medians[2]:.1f}", AIMS[kind]))
    print_table(("step", "steps", "wall ms", "ratio", "processor ms", "ratio", "of it in hooks",
                 "aim"), rows)


def prepare(folder: Path, options: argparse.Namespace) -> dict[str, Path]:
    """Build a corpus, a reference and its stored losses; return the configurations."""
    from megatron_d3.corpus.demo import build_demo_corpus

    corpus = build_demo_corpus(folder / "corpus", max_bytes_per_domain=500_000, vocab_size=2048)
    domains = {domain.name: str(folder / "corpus" / domain.name) for domain in corpus.domains}
    reference = folder / "reference"
    count = options.steps + WARM_UP + 1  # as `measure` trains
    mixes: dict[str, dict[str, str]] = {
        "static": {"type": "static"},
        "stored losses": {"type": "doremi", "losses": str(folder / "losses")},
        "reference model": {"type": "doremi", "reference": str(reference)},
    }
    configs = {}
    for kind, mix in mixes.items():
        configs[kind] = folder / f"{kind.replace(' ', '-')}.yaml"
        configs[kind].write_text(json.dumps({"domains": domains, "valid_fraction": 0, "mix": mix}))
    log = folder / "log"
    first = [*flags(folder, options), "--train-iters", str(count), "--exit-interval", "1"]
    _forked.wait([_forked.start(
        [*first, "--d3-config", str(configs["static"]), "--save", str(reference),
         "--save-interval", "1"], log=log)], log=log)
    _forked.wait([_forked.start(
        [*first, "--d3-config", str(configs["reference model"]), "--d3-plan-dir",
         str(folder / "losses")], log=log, entry=_forked.STORE_LOSSES)], log=log)
    return configs


def flags(folder: Path, options: argparse.Namespace) -> list[str]:
    """Flags that all runs share."""
    return [
        *MODEL, "--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model",
        str(folder / "corpus" / "tokenizer.model"), "--seq-length", str(options.seq_length),
        "--max-position-embeddings", str(options.seq_length),
        "--micro-batch-size", str(options.micro_batch_size),
        "--global-batch-size", str(options.global_batch_size), "--num-workers", "0"]


if __name__ == "__main__":
    main()
