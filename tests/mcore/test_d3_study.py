"""`megatron-d3 d3 study` under real Megatron."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.mcore.launcher import Launcher, Run
from tests.mcore.plans import flags, write_config

pytestmark = pytest.mark.mcore

# SGD's steps of this size are above the rounding of the losses and still small; Adam's are large.
D3 = {"type": "d3", "window": 4, "probe_sequences": 8, "sketch": {"type": "none"}, "gamma": 0.05}
UNITS = ["--units", "6"]
TIMES = ("seconds", "milliseconds")


@pytest.fixture(scope="module")
def trained(launcher: Launcher, corpora: Path) -> tuple[Path, Path]:
    """A run of 16 steps in windows of 4, with a checkpoint inside a window and one at the end."""
    config = write_config(corpora / "study.yaml", order=D3)
    save = corpora / "study"
    launcher.run(corpora / "study.run", arguments(config, save, steps=16)).require_success()
    return config, save


def arguments(config: Path, save: Path, *, steps: int) -> list[str]:
    return [*flags(config, save, steps=steps, save_interval=6), "--lr", "1e-2",
            "--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable",
            "--ckpt-format", "torch_dist"]


def study(
    launcher: Launcher, folder: Path, words: list[str], run_flags: list[str], *,
    world_size: int = 2,
) -> Run:
    return launcher.run(
        folder, ["d3", "study", *words, "--out", str(folder / "study.json"), "--", *run_flags],
        entry="tests.mcore.naive_losses:score", world_size=world_size)


def result(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "study.json").read_text())
    return content


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if k not in (*TIMES, "text")}
    return [without_times(v) for v in value] if isinstance(value, list) else value


def tree(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns)
            for path in sorted(folder.rglob("*")) if path.is_file()}


def without_plan(save: Path, folder: Path) -> Path:
    """The checkpoints of a run in a folder of their own, without its plan."""
    bare = folder / "bare"
    bare.mkdir()
    for path in save.iterdir():
        if path.name != "d3":
            (bare / path.name).symlink_to(path)
    return bare


def test_a_study_compares_estimators_and_solvers_and_leaves_the_run_alone(
    launcher: Launcher, tmp_path: Path, trained: tuple[Path, Path]
) -> None:
    config, save = trained
    before = tree(save)
    run_flags = [*arguments(config, save, steps=16), "--ckpt-step", "6"]
    words = [*UNITS, "--estimators", "projected,projected:mean,fisher,exact"]
    first = study(launcher, tmp_path / "first", words, run_flags).require_success()
    assert tree(save) == before
    found = result(tmp_path / "first")
    assert (found["iteration"], found["plan"]) == (6, str(save / "d3"))
    assert [step["step"] for step in found["steps"]] == ["sgd", "optimizer"]
    for step in found["steps"]:
        rows = {row["name"]: row for row in step["estimators"]}
        assert list(rows)[:4] == ["projected", "projected:mean", "fisher", "exact"]
        assert rows["exact"]["num_gradients"] == 1 + 2 * 6
        assert (rows["projected"]["num_gradients"], rows["projected"]["num_sequences"]) == (1.75, 8)
        assert (step["judge"]["num_forwards"], step["judge"]["num_sequences"]) == (6, 8)
        assert all(row["reason"] is None for row in rows.values())
        solvers = {row["name"]: row["regret"] for row in step["solvers"]}
        assert solvers["exact"] == 0
        assert solvers["ils"] <= solvers["row_sum"]
    sgd = {row["name"]: row["regret"] for row in found["steps"][0]["estimators"]}
    assert found["steps"][0]["judge"]["reliability"] > 0.9
    assert sgd["exact"] < 0.1
    assert sgd["exact"] < sgd["order of the plan"]  # what a first order, S = 0, leaves; noise has 1
    assert "judge: look_ahead" in first.output
    elsewhere = ["--save", str(tmp_path / "elsewhere")]
    study(launcher, tmp_path / "again", words, [*run_flags, *elsewhere]).require_success()
    assert not (tmp_path / "elsewhere").exists()
    assert without_times(result(tmp_path / "again")) == without_times(found)


def test_a_run_without_an_order_or_a_plan_can_be_looked_at_under_another_layout(
    launcher: Launcher, corpora: Path, tmp_path: Path, trained: tuple[Path, Path]
) -> None:
    """Also with the default number of probe sequences."""
    bare = without_plan(trained[1], tmp_path)
    config = write_config(corpora / "bare.yaml")
    order = "order={type: d3, window: 4, sketch: {type: none}, gamma: 0.05}"
    run = study(
        launcher, tmp_path / "run", ["--units", "4", "--estimators", "exact"],
        [*arguments(config, bare, steps=16), "--ckpt-step", "6", "--pipeline-model-parallel-size", "2",
         "--d3-set", order])
    run.require_success()
    found = result(tmp_path / "run")
    assert (found["iteration"], found["plan"]) == (6, None)
    assert not (bare / "d3").exists()
    sgd = found["steps"][0]
    rows = {row["name"]: row for row in sgd["estimators"]}
    assert sgd["judge"]["reliability"] > 0.9
    assert rows["exact"]["regret"] < 0.1
    assert rows["projected"]["num_sequences"] == 8


def test_units_that_were_smaller_once_are_judged_by_all_sequences_that_they_have_now(
    launcher: Launcher, corpora: Path, tmp_path: Path, trained: tuple[Path, Path]
) -> None:
    config = write_config(corpora / "grown.yaml", order=D3 | {"probe_sequences": 4})
    run_flags = arguments(config, without_plan(trained[1], tmp_path), steps=16)
    for flag, in_samples in (("--train-iters", "--train-samples"),
                             ("--lr-decay-iters", "--lr-decay-samples")):
        at = run_flags.index(flag)
        run_flags[at:at + 2] = [in_samples, str(8 * int(run_flags[at + 1]))]
    at = run_flags.index("--global-batch-size")
    run_flags[at:at + 2] = ["--step-batch-size-schedule", "0:4 384:8"]
    study(launcher, tmp_path / "run", ["--units", "4", "--estimators", "exact"],
          [*run_flags, "--ckpt-step", "6"], world_size=1).require_success()
    found = result(tmp_path / "run")
    assert found["sequences_per_unit"] == 8
    sgd = found["steps"][0]
    rows = {row["name"]: row for row in sgd["estimators"]}
    assert sgd["judge"]["num_sequences"] == 8
    assert (rows["exact"]["num_sequences"], rows["exact"]["num_gradients"]) == (4, 1 + 2 * 4)
    assert rows["exact"]["regret"] < 0.6 * rows["order of the plan"]["regret"]


@pytest.mark.parametrize(("words", "extra", "message"), [
    (["--units", "11"], ["--ckpt-step", "6"],
     "--units: got 11, but the run has 10 global batches left at iteration 6"),
    (["--units", "2"], [], "--units: got 2, expected at least 3"),
    (["--estimators", "projekted"], [],
     "--estimators: no estimator 'projekted', did you mean projected"),
    ([], ["--load", "/nowhere"], "--load: no checkpoint in /nowhere"),
    ([], ["--ckpt-step", "5"], "iter_0000005; expected"),
    ([], ["--hidden-size", "64"], "is of a model with hidden_size 32, the flags say 64"),
    ([], ["--skip-train"], "--skip-train: not possible with d3 study"),
    ([], ["--finetune", "--lr-warmup-iters", "4", "--d3-set", "order.gamma=lr"],
     "d3.order.gamma: lr, but the learning rate is 0 at this checkpoint"),
], ids=["too-many", "too-few", "estimator", "checkpoint", "step", "shape", "no-optimizer", "gamma"])
def test_what_cannot_be_studied_is_refused(
    launcher: Launcher, tmp_path: Path, trained: tuple[Path, Path], words: list[str],
    extra: list[str], message: str,
) -> None:
    config, save = trained
    run = study(launcher, tmp_path / "run", words, [*arguments(config, save, steps=16), *extra],
                world_size=1)
    assert run.codes == [1]
    assert message in run.output
    assert not (tmp_path / "run/study.json").exists()
