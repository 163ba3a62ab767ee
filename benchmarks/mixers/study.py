"""One small model on the demo corpus under every mixer, equal tokens, several seeds.

Prints the mean over the domains and the worst domain of the last held-out loss, each with its mean
and its standard deviation over the seeds. Runs that are finished are reused: the script may be
interrupted and started again, or be given more seeds.

    python -m benchmarks.mixers.study --out runs/mixers --seeds 1 2 3 --steps 320
    python -m benchmarks.mixers.study --out runs/mixers --doremi runs/doremi/weights.json

The reference losses of `reference_loss` are the last held-out losses of the uniform run of the same
seed. It, and the weights of DoReMi, cost runs that the others do not need.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._table import print_machine, print_table
from megatron_d3.cli.demo_runs import MODEL, RECIPE
from megatron_d3.cli.torchrun import train
from megatron_d3.corpus.demo import DemoCorpus, build_demo_corpus
from megatron_d3.curves import last_held_out, read_curves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--only", nargs="+", metavar="MIXER", help="of the table's first column")
    parser.add_argument("--doremi", type=Path, metavar="WEIGHTS.json")
    parser.add_argument("--max-bytes-per-domain", type=int, default=5_000_000)
    options = parser.parse_args()
    print_machine()
    corpus = build_demo_corpus(
        options.out / "corpus", max_bytes_per_domain=options.max_bytes_per_domain, vocab_size=4096)
    results: dict[str, list[np.ndarray]] = {}
    for seed in options.seeds:
        for name, mix in mixers(options, seed).items():
            if options.only and name not in ("uniform", *options.only):
                continue
            run_one(options, corpus, name, mix, seed)
            results.setdefault(name, []).append(held_out(options.out, name, seed))
    report(results, [domain.name for domain in corpus.domains])


def mixers(options: argparse.Namespace, seed: int) -> dict[str, dict[str, Any]]:
    """Return the entry `mix` of each run; a warm-up of a twentieth of it where there is one."""
    warmup, reference = options.steps // 20, folder(options.out, "uniform", seed) / "held_out.json"
    found: dict[str, dict[str, Any]] = {
        "uniform": {"type": "static"},
        "natural": {"type": "natural"},
        "odm official": {"type": "odm", "smoothing": 0.9, "warmup_steps": warmup},
        "odm paper": {"type": "odm", "variant": "paper", "warmup_steps": warmup},
        "ado": {"type": "ado", "ignore_steps": warmup, "start_step": 2 * warmup,
                "fit_steps": warmup},
        "reference_loss": {"type": "reference_loss", "losses": str(reference.absolute()),
                           "update_steps": 2 * warmup},
    }
    if options.doremi is not None:
        found["doremi"] = {"type": "static", "weights": str(options.doremi.absolute())}
    return found


def folder(out: Path, name: str, seed: int) -> Path:
    return out / f"{name.replace(' ', '-')}-{seed}"


def run_one(
    options: argparse.Namespace, corpus: DemoCorpus, name: str, mix: dict[str, Any], seed: int
) -> None:
    """Train a run unless it is finished, and note its last held-out losses."""
    save = folder(options.out, name, seed)
    if (save / "held_out.json").exists():
        return
    save.mkdir(parents=True, exist_ok=True)
    domains = {
        domain.name: {"paths": [str((options.out / "corpus" / domain.name).absolute())],
                      "valid_paths": [str((options.out / "corpus" / f"{domain.name}_valid")
                                          .absolute())]}
        for domain in corpus.domains}
    (save / "run.yaml").write_text(json.dumps({"domains": domains, "mix": mix}))
    model = shlex.split((RECIPE / MODEL).read_text(), comments=True)
    batch = int(model[model.index("--global-batch-size") + 1])
    num_samples = str(options.steps * batch)
    print(f"{name}, seed {seed}", file=sys.stderr, flush=True)
    train(
        [*model, "--train-samples", num_samples, "--seed", str(seed), "--eval-interval",
         str(options.steps), "--save-interval", str(options.steps), "--tokenizer-type",
         "SentencePieceTokenizer", "--tokenizer-model", str(corpus.tokenizer_model), "--save",
         str(save), "--load", str(save), "--d3-config", str(save / "run.yaml")],
        log=save / "log", num_processes=1)
    last = last_held_out([read_curves(save / "d3", name=name)])
    losses = dict(zip(last.domains, last.losses[:, 0].tolist(), strict=True))
    shares = dict(zip(last.domains, last.shares[:, 0].tolist(), strict=True))
    (save / "held_out.json").write_text(json.dumps({"loss": losses, "share": shares}))


def held_out(out: Path, name: str, seed: int) -> np.ndarray:
    """Return (2, K): losses and shares."""
    found = json.loads((folder(out, name, seed) / "held_out.json").read_text())
    return np.array([list(found["loss"].values()), list(found["share"].values())])


def report(results: dict[str, list[np.ndarray]], domains: list[str]) -> None:
    def spread(values: np.ndarray) -> str:
        deviation = f" +- {values.std(ddof=1):.3f}" if len(values) > 1 else ""
        return f"{values.mean():.3f}{deviation}"

    rows, shares = [], []
    for name, runs in results.items():
        losses = np.array([run[0] for run in runs])  # (seeds, K)
        worst = domains[int(losses.mean(axis=0).argmax())]
        rows.append((name, len(runs), spread(losses.mean(axis=1)), spread(losses.max(axis=1)), worst))
        mean = np.array([run[1] for run in runs]).mean(axis=0)
        shares.append((name, *(f"{share:.3f}" for share in mean)))
    print("held-out loss, nats per token, mean and standard deviation over the seeds")
    print_table(("mixer", "seeds", "mean of domains", "worst domain", "which"), rows)
    print("realised shares")
    print_table(("mixer", *domains), shares)


if __name__ == "__main__":
    main()
