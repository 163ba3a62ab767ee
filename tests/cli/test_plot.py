"""`megatron-d3 plot`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_d3.cli.main import main
from megatron_d3.cli.plot import names_of
from tests.plan_helpers import Trainer, header


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    """Two finished runs with a plan each."""
    for name, mix in (("even", "0.5,0.25,0.25"), ("skewed", "0.25,0.25,0.5")):
        Trainer(tmp_path / name / "d3", header(mix=mix, total=40)).run()
    return [str(tmp_path / "even"), str(tmp_path / "skewed" / "d3")]


@pytest.mark.parametrize("subverb", ["weights", "losses"])
def test_plots_are_written_where_asked(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], subverb: str
) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "plot.svg"
    assert main(["plot", subverb, *runs, "--out", str(out), "--window", "2"]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert out.read_text().startswith("<?xml")


def test_table(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", "table", *runs]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "held-out loss, nats per token (* best), after 10 steps, 288 tokens"
    assert lines[2].split() == ["even", "skewed", "even", "skewed"]
    assert [line.split()[0] for line in lines[3:]] == ["a", "b", "c", "mean"]


def test_table_as_json(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", "table", "--json", *runs]) == 0
    even, skewed = map(json.loads, capsys.readouterr().out.splitlines())
    assert (even["run"], even["step"], skewed["run"]) == ("even", 10, "skewed")
    assert skewed["share"] == {"a": 0.25, "b": 0.25, "c": 0.5}
    assert even["mean"] == pytest.approx(sum(even["loss"].values()) / 3, rel=1e-15)


def test_runs_are_named_as_briefly_as_tells_them_apart() -> None:
    assert names_of([Path("/x/one/d3"), Path("/x/two/d3")]) == ["one", "two"]
    assert names_of([Path("/x/one/d3"), Path("/y/one/d3"), Path("/y/plan")]) == [
        "x/one", "y/one", "y/plan"]
    assert names_of([Path("/x/one/d3"), Path("/x/one/d3")]) == ["one", "one"]


def test_a_folder_without_a_plan_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plot", "table", str(tmp_path)]) == 1
    assert "no plan here" in capsys.readouterr().err


@pytest.mark.parametrize("window", ["0", "-1", "many"])
def test_a_window_is_a_number_of_steps(
    runs: list[str], capsys: pytest.CaptureFixture[str], window: str
) -> None:
    with pytest.raises(SystemExit):
        main(["plot", "weights", *runs, "--out", "x.png", f"--window={window}"])
    assert "expected a number of steps >= 1" in capsys.readouterr().err
