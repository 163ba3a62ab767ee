"""`megatron-d3 simulate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_d3.cli.main import main
from tests.plan_helpers import Trainer, header

CONFIG = "domains: {a: x, b: y, c: z}\nmix: {type: odm, warmup_steps: 2}\n"
SIZES = ["--samples", "a=100", "b=50", "c=4"]
SHAPE = ["--seq-length", "8", "--global-batch-size", "4"]


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    return str(path)


@pytest.fixture
def table(tmp_path: Path) -> str:
    path = tmp_path / "losses.csv"
    path.write_text("step,a,b,c\n1,4,2,3\n30,2,2,3\n")
    return str(path)


def test_a_csv_is_played_to_its_last_row(
    config: str, table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", config, "--losses", table, *SIZES, *SHAPE]) == 0
    out = capsys.readouterr().out
    assert out.startswith("odm: 30 of 30 steps, 120 samples of 8 tokens, read-ahead 0 steps\n")
    assert "first exhaustion: c, after step" in out


def test_json_has_the_trajectory_and_settings_may_be_replaced(
    config: str, table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {}
    for smoothing in ("0.1", "0.9"):
        assert main(["simulate", config, "--losses", table, *SIZES, *SHAPE, "--json", "--steps",
                     "40", "--set", f"mix.smoothing={smoothing}", "--read-ahead-steps", "1"]) == 0
        found[smoothing] = json.loads(capsys.readouterr().out)
    one = found["0.1"]
    assert (one["steps"], one["samples"], one["read_ahead_steps"]) == (40, 160, 1)
    assert sum(d["samples"] for d in one["domains"].values()) == 160
    assert [row["step"] for row in one["weights"]] == list(range(1, 41))
    assert one["weights"][3]["a"] == pytest.approx(1 / 3)  # warm-up 2, read-ahead 1
    assert one["weights"][-1]["a"] != found["0.9"]["weights"][-1]["a"]


def test_an_order_is_played_as_stored_and_that_is_said(
    config: str, table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["simulate", config, "--losses", table, *SIZES, *SHAPE, "--set",
             "order={type: d3, window: 5}"]
    assert main(words) == 0
    title = capsys.readouterr().out.splitlines()[0]
    assert title.endswith(
        "; windows of 5 steps, in the stored order (that of d3 needs the model)")
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["order"] == {"window": 5, "simulated": "stored"}
    weights = [row["a"] for row in found["weights"]]
    assert all(len(set(weights[at:at + 5])) == 1 for at in range(0, 30, 5))
    assert len(set(weights)) > 3


def test_a_run_brings_its_losses_sizes_and_shape(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Trainer(tmp_path / "run/d3", header(total=40)).run()
    assert main(["simulate", config, "--losses", str(tmp_path / "run"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["steps"], found["samples"]) == (10, 40)
    assert found["domains"]["a"]["epochs"] == found["domains"]["a"]["samples"] / 100


@pytest.mark.parametrize(("extra", "message"), [
    ([*SHAPE, "--samples", "a=1", "b=1"], "--samples: none given of c"),
    ([*SHAPE, "--samples", "a=1", "b=1", "d=1"], "--samples d=1: no such domain"),
    ([*SHAPE, "--samples", "a=x", "b=1"], "--samples a=x: expected NAME=N, N >= 1"),
    (SHAPE[:2], "--global-batch-size: missing"),
    (SHAPE[2:], "--seq-length: missing"),
    ([*SHAPE, *SIZES, "--set", "mix.smoothin=1"], "did you mean smoothing?"),
    ([*SHAPE, *SIZES, "--set", "mix.max_epochs=0.1"], "the largest feasible run has"),
    ([*SHAPE, *SIZES, "--set", "mix={type: doremi, reference: x}"], "d3.mix.type: got doremi, which"),
])
def test_what_is_missing_or_infeasible_is_refused(
    config: str, table: str, capsys: pytest.CaptureFixture[str], extra: list[str], message: str
) -> None:
    assert main(["simulate", config, "--losses", table, *extra]) == 1
    assert message in capsys.readouterr().err
