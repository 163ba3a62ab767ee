"""`megatron-d3 doremi --iterate` with runs that train, killed within and between them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from megatron_d3.cli import doremi_runs
from megatron_d3.cli.main import main
from megatron_d3.errors import D3Error
from tests.mcore.launcher import PRODUCT, TINY, Launcher
from tests.mcore.plans import BATCH, ledger, plan_bytes

pytestmark = [pytest.mark.mcore, pytest.mark.slow]

STEPS = 4
RUNS = ["round-1/reference", "round-1/proxy", "round-2/reference", "round-2/proxy", "final"]


class Training:
    """Takes the place of torchrun: the same ranks, forked from a process that has Megatron."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self.runs: list[str] = []
        self.kill_in: str | None = None  # a run, killed after its third step
        self.leave_before: str | None = None
        self.setup: str | None = None

    def __call__(
        self, arguments: Sequence[str], *, log: Path, num_processes: int,
        module: str = "megatron_d3.pretrain", **_: Any,
    ) -> None:
        words = list(arguments)
        flag = "--save" if "--save" in words else "--d3-plan-dir"
        folder = Path(words[words.index(flag) + 1])
        name = str(folder.relative_to(folder.parents[1])) if "round" in str(folder) else folder.name
        if name == self.leave_before:
            raise KeyboardInterrupt
        self.runs.append(name)
        run = self._launcher.run(
            log.with_name(f"{folder.name}-{len(self.runs)}"), words, world_size=num_processes,
            entry=PRODUCT if module == "megatron_d3.pretrain" else f"{module}:main",
            kill_at=3 if name == self.kill_in else None,
            **({} if self.setup is None else {"setup": self.setup}))
        if any(run.codes):
            raise D3Error(f"training ended with {run.codes}: {run.output[-2000:]}")


@pytest.fixture
def training(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> Training:
    training = Training(launcher)
    monkeypatch.setattr(doremi_runs, "train", training)
    monkeypatch.setenv("MEGATRON_D3_DEVICE", "cpu")
    return training


@pytest.fixture
def recipe(corpora: Path) -> Callable[..., Path]:
    """Write a recipe whose runs go to a folder of their own."""
    names = ["web", "code", "wiki"]
    (corpora / "base.yaml").write_text(yaml.safe_dump({
        "domains": {name: name for name in names}, "valid_fraction": 0.1,
        "mix": {"type": "static", "weights": dict(zip(names, (3, 2, 1), strict=True))}},
        sort_keys=False))
    (corpora / "all.args").write_text(" ".join(
        [*TINY, *BATCH, "--train-iters", str(STEPS), "--lr-decay-iters", "100", "--save-interval",
         "2", "--override-opt_param-scheduler"]))

    def write(name: str, **changes: Any) -> Path:
        path = corpora / f"{name}.doremi.yaml"
        path.write_text(yaml.safe_dump({
            "folder": f"doremi-{name}", "config": "base.yaml", "flags": ["all.args"],
            "num_processes": 2, "tolerance": 1e-9, "max_rounds": 2, "proxy": {"eta": 4.0},
            "final": {}} | changes))
        return path

    return write


def results(folder: Path) -> dict[str, Any]:
    """Everything that a recipe's runs decided and found."""
    found: dict[str, Any] = {
        str(path.relative_to(folder)): path.read_text().replace(str(folder), "")
        for path in sorted(folder.rglob("*")) if path.name in ("weights.json", "trajectory.csv")}
    for name in RUNS:
        # Not the settings, which name the folder.
        plan = plan_bytes(folder / name / "d3")
        found |= {f"{name}/{file}": data for file, data in plan.items() if file != "plan.json"}
    return found


def test_two_rounds_and_the_final_model_survive_kills_anywhere(
    training: Training, recipe: Callable[..., Path], corpora: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doremi", str(recipe("whole")), "--iterate"]) == 0
    assert training.runs == RUNS
    whole = corpora / "doremi-whole"
    one, two = (json.loads((whole / f"round-{n}/weights.json").read_text()) for n in (1, 2))
    assert one["reference"] == pytest.approx({"web": 1 / 2, "code": 1 / 3, "wiki": 1 / 6})
    assert two["reference"] == one["weights"]  # what the second reference was trained on
    last = json.loads((whole / "weights.json").read_text())
    assert last["weights"] == two["weights"] != one["weights"] and last["round"] == 2
    final = yaml.safe_load((whole / "final.yaml").read_text())
    assert final["mix"]["weights"] == two["weights"]
    assert [len(ledger(whole / run / "d3")) for run in RUNS] == [STEPS] * 5
    assert np.isclose(sum(last["weights"].values()), 1)

    killed, training.runs = recipe("killed"), []
    command = ["doremi", str(killed), "--iterate"]
    training.kill_in = "round-1/proxy"
    assert main(command) == 1
    training.kill_in, training.leave_before = "round-2/reference", None
    assert main(command) == 1
    training.kill_in, training.leave_before = None, "round-2/proxy"  # between two runs
    assert main(command) == 130
    training.leave_before = "final"
    assert main(command) == 130
    training.leave_before = None
    assert main(command) == 0
    assert training.runs == sorted([*RUNS, "round-1/proxy", "round-2/reference"],
                                   key=RUNS.index)
    errors = capsys.readouterr().err
    assert errors.count("continues from its checkpoint at step 2") == 2
    assert errors.count("the same command continues from the last checkpoint") == 2
    assert results(corpora / "doremi-killed") == results(whole)


def kill_while_storing() -> None:
    """Die after a few rows of stored losses (`setup` of the launcher)."""
    import os
    import signal

    from megatron_d3.plan.token_losses import TokenLossWriter

    stock, rows = TokenLossWriter.write, []

    def write(self: TokenLossWriter, *args: Any) -> None:
        stock(self, *args)
        rows.append(args)
        if len(rows) == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    TokenLossWriter.write = write  # type: ignore[method-assign]


def test_storing_losses_begins_again_after_a_kill(
    training: Training, recipe: Callable[..., Path], corpora: Path
) -> None:
    settings = {"proxy": {"eta": 4.0, "stored_losses": True}, "final": None}
    path = recipe("stored", **settings)
    assert main(["doremi", str(path), "--step", "reference"]) == 0
    training.setup = "tests.mcore.test_doremi_iterate:kill_while_storing"
    assert main(["doremi", str(path), "--step", "losses"]) == 1
    assert main(["doremi", str(path), "--step", "proxy"]) == 1  # without them
    training.setup = None
    assert main(["doremi", str(path)]) == 0
    assert training.runs == ["round-1/reference", *["round-1/losses"] * 2, "round-1/proxy"]
    beside = recipe("beside", final=None)
    assert main(["doremi", str(beside)]) == 0
    ours, theirs = (json.loads((corpora / f"doremi-{name}/weights.json").read_text())
                    for name in ("stored", "beside"))
    assert ours["weights"] == pytest.approx(theirs["weights"], rel=1e-4)
