"""`megatron-d3 demo` from nothing to the plots, on a recipe of 12 steps."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatron_d3.cli import demo_runs
from megatron_d3.cli.demo_runs import RECIPE, RUNS
from megatron_d3.cli.main import main
from megatron_d3.config import load_config
from megatron_d3.plan.reader import PlanReader
from megatron_d3.plan.windows import read_windows

pytestmark = pytest.mark.mcore
pytest.importorskip("matplotlib")

MODEL = """\
--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32  # comments are left out
--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 4 --train-samples 48
--lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --attention-dropout 0 --hidden-dropout 0
--num-workers 0 --eval-interval 6 --eval-iters 4 --save-interval 6 --log-interval 1
"""
# One process: importing Megatron is most of the time. `make demo` uses two.
SIZE = ["--num-processes", "1", "--max-mb-per-domain", "0.2", "--vocab-size", "512"]


def write_recipe(folder: Path) -> Path:
    folder.mkdir()
    (folder / "model.args").write_text(MODEL)
    for run in RUNS:
        text = (RECIPE / f"{run}.yaml").read_text()
        (folder / f"{run}.yaml").write_text(
            text.replace("[160,", "[6,").replace("window: 20", "window: 6"))
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished demo, its recipe in recipe/."""
    folder = tmp_path_factory.mktemp("demo")
    recipe = write_recipe(folder / "recipe")
    assert main(["demo", "--out", str(folder), "--recipe", str(recipe), *SIZE]) == 0
    return folder


def again(folder: Path, *more: str, recipe: Path | None = None) -> int:
    return main(["demo", "--out", str(folder), "--recipe", str(recipe or folder / "recipe"), *SIZE,
                 *more])


def test_the_recipes_runs_differ_in_their_mixture_only() -> None:
    uniform, shift, odm, d3 = (load_config(RECIPE / f"{run}.yaml") for run in RUNS)
    assert uniform.domains == shift.domains == odm.domains == d3.domains
    assert d3.mix == uniform.mix
    steps = [step for step, _ in shift.mix.params.knots]
    flags = demo_runs._flags(RECIPE / "model.args")
    value = {flag: flags[flags.index(flag) + 1] for flag in
             ("--train-samples", "--global-batch-size")}
    assert steps == [0, int(value["--train-samples"]) // int(value["--global-batch-size"]) // 2]


def test_all_runs_train_on_equal_tokens_and_their_own_mixture(finished: Path) -> None:
    weights = []
    for run in RUNS:
        reader = PlanReader(finished / run / "d3")
        assert reader.frontier == 48
        rows = [row for row, _, _ in reader.ledger()]
        assert sum(tokens for row in rows for _, tokens in row.losses.values()) == 48 * 32
        assert [row.iteration for row, _, _ in reader.evals()] == [6, 12]
        weights.append([row.weights for row, _ in reader.rounds() if row.weights])
        assert (finished / run / "latest_checkpointed_iteration.txt").read_text() == "12"
    assert len(weights[0]) == 1 and len(weights[1]) == 2
    assert weights[1][0]["prose"] == weights[1][1]["python"] == pytest.approx(4 / 13)
    # ODM explores uniformly while t <= K ln K, here 13.6 steps; tests/mcore/test_online.py goes on.
    assert weights[2] == weights[3] == weights[0]
    mixers = [PlanReader(finished / run / "d3").plan.generations[0].header.config["mix"]["type"]
              for run in RUNS]
    assert mixers == ["static", "schedule", "odm", "static"]
    rows = [row for row, _, _ in read_windows(finished / "d3/d3")]
    assert [row.num_units for row in rows] == [6, 6]
    assert all(row.reason is None and row.reliability is not None for row in rows)


def test_the_result_is_printed_and_drawn_again_without_training(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.glob("*/d3/ledger.jsonl")}
    for name in ("weights.png", "losses.png", "graph.png"):
        (finished / name).unlink()
    assert again(finished) == 0
    out, err = capsys.readouterr()
    assert out.startswith("held-out loss, nats per token (* best), after 12 steps, 1,536 tokens\n")
    table = out[: out.index("\n\n")].splitlines()
    assert [line.split()[0] for line in table[3:]] == [
        "python", "c", "prose", "stubs", "markup", "data", "unicode", "mean"]
    assert f"plots: {finished}/weights.png  {finished}/losses.png  {finished}/graph.png" in out
    assert "uniform   finished before, reused" in err
    assert (finished / "weights.png").stat().st_size > 10_000
    assert (finished / "graph.png").stat().st_size > 10_000
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_another_recipe_is_refused_until_the_runs_are_set_aside(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    changed = write_recipe(tmp_path / "changed")
    with (changed / "shift.yaml").open("a") as file:
        file.write("round_steps: 2\n")
    assert again(folder, recipe=changed) == 1
    assert "shift.yaml: differs from" in capsys.readouterr().err

    (folder / "shift.yaml").write_text((changed / "shift.yaml").read_text())
    assert again(folder, recipe=changed) == 1
    assert "shift: was trained from another config; start anew" in capsys.readouterr().err

    aside = demo_runs.set_aside(demo_runs.Demo(folder))
    assert aside == folder / "abandoned-0001"
    assert {path.name for path in folder.iterdir()} == {"corpus", "recipe", "abandoned-0001"}
    assert {"uniform", "shift", "shift.log", "shift.yaml", "weights.png"} <= {
        path.name for path in aside.iterdir()}
    assert demo_runs.set_aside(demo_runs.Demo(folder)) is None


def test_a_domain_without_text_here_is_named(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(finished / "corpus", folder / "corpus")
    recipe = write_recipe(tmp_path / "recipe")
    text = (recipe / "uniform.yaml").read_text()
    (recipe / "uniform.yaml").write_text(text.replace("  python: ", "  latin:  "))
    assert again(folder, recipe=recipe) == 1
    assert "uniform.yaml: names the domain latin, but this Python installation has too little " \
        "text of it (it has python, c," in capsys.readouterr().err


def test_a_recipe_without_its_files_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert again(tmp_path / "out", recipe=tmp_path) == 1
    assert f"{tmp_path}/uniform.yaml: cannot be read: No such file" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
