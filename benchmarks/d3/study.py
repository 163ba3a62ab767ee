"""Does the order of D3 train better? One small model under every order, with the controls.

    nice python -m benchmarks.d3.study --out runs/d3             # about 75 minutes of one core
    python -m benchmarks.d3.study --out runs/d3 --report         # the tables again

A cell is a setting (model, optimizer, kind of units), an arm (what orders the windows) and a seed.
Cells of one setting and seed share first weights and data: the units of each window are the same,
only their order differs, so arms are compared seed by seed. Units hold all domains in equal parts
(mixed), or each one domain, drawn at random (pure). A unit is probed on all its sequences: S is that
of the very units that are trained on, the best case for the method and a costly one.

The first window keeps its stored order in every arm but random, since the learning rate is 0 before
step 1, and S is measured for that of the moment.

| arm | order of a window |
|---|---|
| stored | as drawn |
| random | any |
| projected | best by S from projected curvature; `row sums`: sorted by the row sums of that S |
| reverse, group, spread | the best order backwards; similar units adjacent; similar units apart |
| others | best by S from that estimator; `optimizer's step`: S of the preconditioned, clipped step |
| stored, 3x steps | stored order and three times the steps: what the time of probing could buy |
"""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._study import ENVIRONMENT, Cell, Study, demo_corpus
from benchmarks._table import print_machine
from benchmarks.d3.study_report import LONGER, STORED, report

BATCH, SEQ_LENGTH, WINDOW = 8, 64, 20
COMMON = shlex.split(f"""
--num-layers 5 --hidden-size 128 --num-attention-heads 4 --seq-length {SEQ_LENGTH}
--max-position-embeddings {SEQ_LENGTH} --attention-dropout 0 --hidden-dropout 0
--init-method-std 0.02 --micro-batch-size {BATCH} --global-batch-size {BATCH}
--lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0 --num-workers 0 --log-interval 20
--tokenizer-type SentencePieceTokenizer
""")
GPT2: list[str] = []
LLAMA = shlex.split("""
--normalization RMSNorm --position-embedding-type rope --swiglu --disable-bias-linear
--ffn-hidden-size 344 --untie-embeddings-and-output-weights
""")
ADAM = shlex.split("--lr 3e-3 --min-lr 3e-4 --adam-beta1 0.9 --adam-beta2 0.95")
SGD = shlex.split("--optimizer sgd --sgd-momentum 0 --lr 0.3 --min-lr 0.03")

SETTINGS: dict[str, tuple[list[str], bool]] = {  # flags, whether units are of one domain
    "GPT-2 Adam": (GPT2 + ADAM, False),
    "GPT-2 SGD": (GPT2 + SGD, False),
    "LLaMA Adam": (LLAMA + ADAM, False),
    "LLaMA SGD": (LLAMA + SGD, False),
    "GPT-2 Adam pure": (GPT2 + ADAM, True),
    "GPT-2 SGD pure": (GPT2 + SGD, True),
}
CONTROLS: dict[str, dict[str, Any]] = {
    STORED: {"every": 10**9},
    "random": {"objective": "random"},
    "projected": {},
    "reverse": {"objective": "reverse"},
    "group": {"objective": "group"},
    "spread": {"objective": "spread"},
}
OPTIMIZER = "projected, optimizer's step"
OTHERS: dict[str, dict[str, Any]] = {
    "row sums": {"solver": "row_sum"},
    "projected, 4 directions": {"directions": 4},
    "projected, mean direction": {"basis": "mean"},
    "hutchinson_diagonal": {"estimator": "hutchinson_diagonal"},
    "gnb_diagonal": {"estimator": "gnb_diagonal"},
    "fisher": {"estimator": "fisher"},
    "shared_hessian": {"estimator": "shared_hessian"},
    "look_ahead": {"estimator": "look_ahead", "curvature_sequences": 2},
    "look_ahead_even": {"estimator": "look_ahead_even", "curvature_sequences": 2},
    OPTIMIZER: {"step": "optimizer"},
    LONGER: {"every": 10**9},
}
ARMS = CONTROLS | OTHERS
ALL_ESTIMATORS = ("GPT-2 Adam", "GPT-2 SGD", "LLaMA Adam")  # elsewhere the paper's and these controls


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of the corpus, the runs and the results")
    add("--seeds", type=int, nargs="+", default=[1, 2, 3])
    add("--steps", type=int, default=100, help="of every run (default 100)")
    add("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="SETTING")
    add("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM")
    add("--jobs", type=int, default=1, help="runs at a time, one thread each (default 1)")
    add("--max-mb-per-domain", type=float, default=2.0)
    add("--eval-iters", type=int, default=28, help="held-out batches of 8 samples (default 28)")
    add("--report", action="store_true", help="print the tables of what is finished, run nothing")
    options = parser.parse_args()
    print_machine()
    os.environ |= ENVIRONMENT
    study = D3Study(options)
    if not options.report:
        study.run(cells(options), options.jobs)
    report(study.results, options.settings, list(ARMS), steps=options.steps)


def cells(options: argparse.Namespace) -> list[Cell]:
    """Return all cells: the controls of every setting and seed first."""
    return [
        (setting, arm, seed)
        for arms in (CONTROLS, OTHERS) for seed in options.seeds for setting in options.settings
        for arm in arms if arm in options.arms and is_sensible(setting, arm)]


def is_sensible(setting: str, arm: str) -> bool:
    """Whether a cell is run: SGD takes plain steps, and not every setting has every estimator."""
    if arm == OPTIMIZER:
        return "Adam" in setting
    return setting in ALL_ESTIMATORS or arm in CONTROLS or arm == "hutchinson_diagonal"


class D3Study(Study):
    """The cells of this study."""

    def __init__(self, options: argparse.Namespace) -> None:
        out = options.out.absolute()
        corpus, self.domains = demo_corpus(out, options.max_mb_per_domain)
        self.steps = options.steps
        self.flags = [
            *COMMON, "--tokenizer-model", str(corpus.tokenizer_model), "--lr-warmup-samples",
            str(self.steps * BATCH // 10), "--eval-iters", str(options.eval_iters)]
        super().__init__(out, ("setting", "arm", "seed"), recipe={
            "flags": self.flags, "settings": SETTINGS, "steps": self.steps,
            "corpus": [d.train.hash for d in corpus.domains]})

    def arguments(self, cell: Cell) -> list[str]:
        """See `Study`. Nothing is saved: the writer of checkpoints leaves a process behind."""
        setting, arm, seed = cell
        factor = 3 if arm == LONGER else 1
        flags, is_pure = SETTINGS[str(setting)]
        order = {"type": "d3", "window": WINDOW, "probe_sequences": BATCH,
                 "curvature_sequences": BATCH, **ARMS[str(arm)]}
        if str(arm).startswith("look_ahead") and "Adam" in str(setting):
            order["step"] = "optimizer"  # plain gradients times Adam's rate would hardly move it
        config = self.config(cell, {
            "domains": self.domains, "mix": self._mix(int(seed), factor, is_pure=is_pure),
            "order": order})
        return [
            *self.flags, *flags, "--train-samples", str(factor * self.steps * BATCH),
            "--eval-interval", str(2 * WINDOW * factor), "--seed", str(seed),
            "--d3-config", str(config), "--d3-plan-dir", str(self.folder(cell) / "d3")]

    def _mix(self, seed: int, factor: int, *, is_pure: bool) -> dict[str, Any]:
        if not is_pure:
            return {"type": "static"}
        names = list(self.domains)
        drawn = np.random.default_rng([seed, 1]).integers(len(names), size=factor * self.steps)
        return {"type": "schedule", "knots": [
            [step, {name: int(name == names[k]) for name in names}]
            for step, k in enumerate(drawn)]}

    def read(self, cell: Cell) -> dict[str, Any]:
        """See `Study`. Losses in nats per token, a list entry for each window or evaluation."""
        from megatron_d3.influence.graph import violation_cost
        from megatron_d3.plan.reader import PlanReader
        from megatron_d3.plan.windows import read_arrays

        reader = PlanReader(self.folder(cell) / "d3")
        online = np.array([_token_mean(row.losses) for row, _, _ in reader.ledger()])  # (steps,)
        evals = {row.iteration: row.losses for row, _, _ in reader.evals()}
        windows = [row for row, _, _ in reader.windows()]
        predicted = []
        for window in windows:
            change = None
            if window.cost:
                arrays = read_arrays(reader.directory, window.round)
                S, order = arrays["advantage"], arrays["order"]
                change = (violation_cost(S, order)
                          - violation_cost(S, np.arange(len(S)))) / len(S)
            predicted.append(change)
        return {
            "online": [float(online[at:at + WINDOW].mean())
                       for at in range(0, len(online), WINDOW)],
            "held_out": [
                [step, float(np.mean([total / count for total, count in losses.values()])),
                 _token_mean(losses)] for step, losses in evals.items()],
            "predicted": predicted,
            "reliability": [window.reliability for window in windows],
            "curl": [window.curl for window in windows],
            "cost": [dict(window.cost) for window in windows],
            "reasons": [window.reason for window in windows],
            "probe_seconds": sum(window.seconds["total"] or 0.0 for window in windows),
            "units": self._units(reader),
        }

    def _units(self, reader: Any) -> list[str]:
        """Return a hash of the samples of each window, whatever their order."""
        from hashlib import blake2b

        size = WINDOW * BATCH
        records = reader.positions(0, self.steps * BATCH)
        return [blake2b(np.sort(records[at:at + size]).tobytes(), digest_size=8).hexdigest()
                for at in range(0, len(records), size)]


def _token_mean(losses: Any) -> float:
    total, count = np.array(list(losses.values()), np.float64).sum(axis=0)
    return float(total / count)


if __name__ == "__main__":
    main()
