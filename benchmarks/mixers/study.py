"""One small model on the demo corpus under every mixer: equal tokens, several seeds, held-out loss.

    python -m benchmarks.mixers.study --out runs/mixers                # about 25 minutes of one core
    python -m benchmarks.mixers.study --out runs/mixers --report       # the tables again

Each cell, a mixer and a seed, is one training run; a finished one is a line of OUT/results.jsonl and
is never run again, so the script may be stopped and started, and be given more seeds. A seed's cells
share the model's first weights; all cells are evaluated on the same samples.

Two cells need another one of their seed: `reference_loss` takes the last held-out losses of
`uniform`, and `doremi` the weights of a proxy (a cell of its own, not in the tables) whose reference
model is `natural`. That is one more run for the first and two more for the second.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._study import ENVIRONMENT, Cell, Study, demo_corpus
from benchmarks._table import print_machine, print_table

MODEL = Path(__file__).with_name("model.args")
MIXERS = ("uniform", "natural", "odm official", "odm paper", "ado", "reference_loss", "doremi")
PROXY = "doremi proxy"
NEEDS = {"reference_loss": "uniform", PROXY: "natural", "doremi": PROXY}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of the corpus, the runs and the results")
    add("--seeds", type=int, nargs="+", default=[1, 2, 3])
    add("--steps", type=int, default=400, help="of every run (default 400)")
    add("--only", nargs="+", choices=MIXERS, default=MIXERS, metavar="MIXER")
    add("--jobs", type=int, default=1, help="runs at a time, one thread each (default 1)")
    add("--max-mb-per-domain", type=float, default=20.0)
    add("--eval-iters", type=int, default=56, help="held-out batches of 16 samples (default 56)")
    add("--report", action="store_true", help="print the tables of what is finished, run nothing")
    options = parser.parse_args()
    print_machine()
    os.environ |= ENVIRONMENT
    study = MixerStudy(options)
    if not options.report:
        study.run(cells(options.only, options.seeds), options.jobs)
    report(study.results, [name for name in MIXERS if name in options.only], options.seeds)


def cells(mixers: Sequence[str], seeds: Sequence[int]) -> list[Cell]:
    """Return all cells that are needed, each after the one that it needs."""
    found: dict[Cell, None] = {}
    for seed in seeds:
        for name in mixers:
            chain = [name]
            while chain[-1] in NEEDS:
                chain.append(NEEDS[chain[-1]])
            found |= dict.fromkeys((link, seed) for link in reversed(chain))
    return list(found)


class MixerStudy(Study):
    """A cell is a mixer and a seed."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Build the corpus or find it; read what is finished; refuse another recipe's folder."""
        out = options.out.absolute()
        corpus, self.domains = demo_corpus(out, options.max_mb_per_domain)
        model = shlex.split(MODEL.read_text(encoding="utf-8"), comments=True)
        batch = int(model[model.index("--global-batch-size") + 1])
        self.steps = steps = options.steps
        self.flags = [
            *model, "--train-samples", str(steps * batch), "--lr-warmup-samples",
            str(steps * batch // 20), "--eval-interval", str(2 * steps), "--save-interval", str(steps),
            "--eval-iters", str(options.eval_iters), "--tokenizer-type", "SentencePieceTokenizer",
            "--tokenizer-model", str(corpus.tokenizer_model)]
        super().__init__(out, ("mixer", "seed"), recipe={
            "flags": self.flags, "corpus": [d.train.hash for d in corpus.domains]})

    def needs(self, cell: Cell) -> Cell | None:
        """See `Study`."""
        needed = NEEDS.get(str(cell[0]))
        return None if needed is None else (needed, cell[1])

    def arguments(self, cell: Cell) -> list[str]:
        """See `Study`."""
        save = str(self.folder(cell))
        config = self.config(cell, {"domains": self.domains, "mix": self.mix(cell)})
        return [*self.flags, "--seed", str(cell[1]), "--save", save, "--load", save,
                "--d3-config", str(config)]

    def mix(self, cell: Cell) -> dict[str, Any]:
        """Return the entry `mix`; a warm-up of a twentieth of the run where there is one."""
        name, seed = str(cell[0]), int(cell[1])
        warmup = self.steps // 20
        if name == "reference_loss":
            losses = self.results["uniform", seed]["loss"]
            return {"type": name, "losses": losses, "update_steps": warmup}
        if name == "doremi":
            return {"type": "static", "weights": self.results[PROXY, seed]["alpha_mean"]}
        others: dict[str, dict[str, Any]] = {
            "uniform": {"type": "static"},
            "natural": {"type": "natural"},
            "odm official": {"type": "odm", "smoothing": 0.9, "warmup_steps": warmup},
            "odm paper": {"type": "odm", "variant": "paper", "warmup_steps": warmup},
            "ado": {"type": "ado", "ignore_steps": warmup, "start_step": 2 * warmup,
                    "fit_steps": warmup},
            PROXY: {"type": "doremi", "reference": str(self.folder(("natural", seed)))},
        }
        return others[name]

    def read(self, cell: Cell) -> dict[str, Any]:
        """See `Study`: losses and shares by domain, and what a proxy found."""
        from megatron_d3.cli.doremi_result import read_proxy
        from megatron_d3.curves import last_held_out, read_curves

        plan = self.folder(cell) / "d3"
        last = last_held_out([read_curves(plan, name=str(cell[0]))])
        row: dict[str, Any] = {
            "steps": self.steps,
            "loss": dict(zip(last.domains, last.losses[:, 0].tolist(), strict=True)),
            "share": dict(zip(last.domains, last.shares[:, 0].tolist(), strict=True))}
        if cell[0] == PROXY:
            found = read_proxy(plan)
            row["alpha_mean"] = dict(zip(found.names, found.mean.tolist(), strict=True))
        return row


def report(
    results: Mapping[Cell, dict[str, Any]], mixers: Sequence[str], seeds: Sequence[int]
) -> None:
    """Print a table of losses and one of shares, over the seeds that are finished."""
    rows, by_domain, shares = [], [], []
    domains: list[str] = []
    for name in mixers:
        done = [seed for seed in seeds if (name, seed) in results]
        if not done:
            continue
        domains = list(results[name, done[0]]["loss"])
        losses = values(results, name, done, "loss")  # (seeds, K)
        mean = losses.mean(axis=1)  # (seeds,)
        paired = [seed for seed in done if ("uniform", seed) in results]
        against = spread(mean[[done.index(seed) for seed in paired]]
                         - values(results, "uniform", paired, "loss").mean(axis=1)
                         ) if paired and name != "uniform" else ""
        rows.append((name, len(done), spread(mean), against, spread(losses.max(axis=1)),
                     domains[int(losses.mean(axis=0).argmax())]))
        by_domain.append((name, *(f"{loss:.3f}" for loss in losses.mean(axis=0))))
        share = values(results, name, done, "share").mean(axis=0)
        shares.append((name, *(f"{x:.3f}" for x in share)))
    print("held-out loss, nats per token: mean +- standard deviation over the seeds")
    print_table(
        ("mixer", "seeds", "mean of domains", "less uniform's, by seed", "worst domain", "which"),
        rows)
    print("held-out loss by domain, mean over the seeds")
    print_table(("mixer", *domains), by_domain)
    print("shares of the training samples, mean over the seeds")
    print_table(("mixer", *domains), shares)
    seconds = sum(row["processor_seconds"] for row in results.values())
    print(f"{len(results)} runs, {seconds / 60:.1f} minutes of one core")


def values(
    results: Mapping[Cell, dict[str, Any]], name: str, seeds: Sequence[int], key: str
) -> np.ndarray:
    """Return (seeds, K)."""
    return np.array([list(results[name, seed][key].values()) for seed in seeds])


def spread(numbers: np.ndarray) -> str:
    """Return mean and standard deviation of (seeds,)."""
    deviation = f" +- {numbers.std(ddof=1):.3f}" if len(numbers) > 1 else ""
    return f"{numbers.mean():.3f}{deviation}"


if __name__ == "__main__":
    main()
