"""`megatron-d3 plot`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_d3.cli.main import main
from megatron_d3.cli.plot import names_of
from megatron_d3.plan.store import PlanStore
from megatron_d3.plan.windows import WINDOWS, WindowRow
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


@pytest.fixture
def windowed(tmp_path: Path) -> Path:
    """A run with a plan and what was measured in its windows of 4 units, two of them."""
    directory = tmp_path / "windowed" / "d3"
    Trainer(directory, header(total=40)).run()
    store = PlanStore(directory)
    entries = np.random.default_rng(0).standard_normal((4, 4))
    for start, reason in ((0, None), (4, "reliability 0.02 is below 0.10")):
        row = WindowRow(
            round=start, iteration=start, step=start, num_units=4,
            cost={"found": 0.31, "row_sum": 0.4, "stored": 1.02}, curl=0.5, reliability=0.9,
            reason=reason, seconds={"gradients": 1.5, "solve": 0.004})
        store.append_window(row, {"advantage": entries - entries.T, "order": np.array([2, 0, 3, 1]),
                                  "losses": np.arange(4.0)})
    store.close()
    return directory


@pytest.mark.parametrize("where", ["directory", "run"])
@pytest.mark.parametrize("window", [[], ["--round", "0"]])
def test_the_graph_of_a_window_is_drawn(
    windowed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str,
    window: list[str],
) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "graph.svg"
    run = windowed if where == "directory" else windowed.parent
    assert main(["plot", "graph", str(run), *window, "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    content = out.read_text()
    assert content.startswith("<?xml")
    # Text is drawn as paths with the text as a comment before them; each line is an element.
    assert ("trained in the stored order" in content) == (window == [])
    assert f"window of round {0 if window else 4}" in content


def test_a_window_that_is_not_there_is_refused(
    windowed: Path, tmp_path: Path, runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "graph.png")]
    assert main(["plot", "graph", str(windowed), "--round", "3", *out]) == 1
    assert "no window with arrays begins with round 3, the nearest with 4" in (
        capsys.readouterr().err)
    assert main(["plot", "graph", runs[0], *out]) == 1
    assert "no windows here; runs with order: {type: d3} write them" in capsys.readouterr().err


def test_a_window_without_a_graph_or_a_line_is_refused(
    windowed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "graph.png")]
    np.savez(windowed / "windows" / "00000008.npz", losses=np.zeros(4))
    assert main(["plot", "graph", str(windowed), *out]) == 1
    assert "00000008.npz: holds no advantage and no order; nothing" in capsys.readouterr().err
    (windowed / WINDOWS).write_bytes(b"")
    assert main(["plot", "graph", str(windowed), "--round", "4", *out]) == 1
    assert "arrays of the window of round 4 but no line about it" in capsys.readouterr().err
