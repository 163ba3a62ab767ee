"""The plots are drawn: what is in them is checked on the figure, how they look by eye."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_d3 import plots
from megatron_d3.curves import RunCurves, Windows
from megatron_d3.errors import ConfigError
from megatron_d3.plan.windows import WindowRow

pytest.importorskip("matplotlib")


def run_of(name: str, num_domains: int, *, num_evals: int = 2, first: int = 0) -> RunCurves:
    """A run of 20 steps in 4 windows; later domains have the larger shares."""
    weights = np.arange(1, num_domains + 1) / np.arange(1, num_domains + 1).sum()
    losses = np.linspace(8, 3, 4)[:, None] + np.arange(num_domains) / 10
    edges = np.linspace(0, 20, 5)
    return RunCurves(
        name=name, domains=tuple(f"d{i}" for i in range(first, first + num_domains)), num_steps=20,
        num_tokens=640, weights=Windows(edges, np.tile(weights, (4, 1))),
        shares=Windows(edges, np.tile(weights, (4, 1))), train=Windows(edges, losses),
        eval_steps=np.arange(1, num_evals + 1) * 10, held_out=losses[:num_evals])


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are saved."""
    figures: list[Any] = []
    save = plots._save

    def remember(figure: Any, path: Path) -> None:
        figures.append(figure)
        save(figure, path)

    monkeypatch.setattr(plots, "_save", remember)
    return figures


def titles(figure: Any) -> list[str]:
    return [axes.get_title() for axes in figure.axes if axes.get_title()]


def legend(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_weights_have_a_column_a_run(tmp_path: Path, drawn: list[Any], suffix: str) -> None:
    path = tmp_path / "new" / f"weights.{suffix}"
    plots.plot_weights([run_of("one", 3), run_of("two", 3, first=1)], path)
    assert path.stat().st_size > 1000
    assert titles(drawn[0]) == ["one", "two"]
    assert legend(drawn[0]) == ["d3", "d2", "d1", "d0"]


def test_losses_have_a_panel_a_domain_and_one_for_the_mean(
    tmp_path: Path, drawn: list[Any]
) -> None:
    path = tmp_path / "losses.png"
    plots.plot_losses([run_of("one", 2), run_of("two", 3)], path)
    assert titles(drawn[0]) == ["d0", "d1", "d2", "mean of all domains, held out"]
    assert legend(drawn[0]) == ["one", "two", "held out", "training"]
    third = drawn[0].axes[2]
    assert len(third.lines) == 2  # training and held-out loss of the only run that has it
    low, high = third.get_ylim()
    assert low < 3.2 and 8.2 < high  # window 0 of 4 is not cut: there is no warm-up to hide


def test_a_run_without_evaluations_is_drawn(tmp_path: Path, drawn: list[Any]) -> None:
    plots.plot_losses([run_of("one", 1, num_evals=0)], tmp_path / "losses.png")
    assert titles(drawn[0]) == ["d0", "mean of all domains, held out"]


def test_of_many_domains_the_largest_are_shown(tmp_path: Path, drawn: list[Any]) -> None:
    runs = [run_of("one", 30)]
    plots.plot_weights(runs, tmp_path / "weights.png")
    plots.plot_losses(runs, tmp_path / "losses.png")
    shown = [f"d{i}" for i in range(11, 30)]
    assert legend(drawn[0]) == ["11 others", *shown[::-1]]
    assert titles(drawn[1]) == [*shown, "mean of all domains, held out"]


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no image format '\.bmpx'; end the name with .png"):
        plots.plot_weights([run_of("one", 2)], tmp_path / "weights.bmpx")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="weights.png: cannot be written"):
        plots.plot_weights([run_of("one", 2)], tmp_path / "file" / "weights.png")


def test_a_missing_matplotlib_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'megatron-d3\[plot\]'"):
        plots.plot_losses([run_of("one", 2)], tmp_path / "losses.png")


def test_the_graph_is_drawn_in_stored_and_in_found_order(tmp_path: Path, drawn: list[Any]) -> None:
    advantage = np.array([[0.0, -1.0, 3.0], [1.0, 0.0, -4.0], [-3.0, 4.0, 0.0]])
    row = WindowRow(round=6, iteration=5, step=7, num_units=3, cost={"found": 0.25, "stored": None},
                    curl=0.875, seconds={"sketch": 0.5}, reason="bad units: 2")
    plots.plot_graph("run", row, {"advantage": advantage, "order": np.array([0, 2, 1])},
                     tmp_path / "graph.png")
    left, right, below, text = drawn[0].axes[:4]
    assert left.images[0].get_array().tolist() == advantage.tolist()
    assert right.images[0].get_array().tolist() == [[0, 3, -1], [-3, 0, 4], [1, -4, 0]]
    assert left.images[0].get_clim() == right.images[0].get_clim() == (-4, 4)
    assert below.lines[0].get_ydata().tolist() == [0, 2, 1]
    assert [line.split() for line in text.texts[0].get_text().splitlines()] == [
        ["cost", "of", "orders,", "1", "=", "random,", "less", "is", "better"],
        ["found", "0.250"], ["stored", "not", "measured"], [],
        ["curl", "0.875"], ["reliability", "not", "measured"],
        ["expected", "agreement", "not", "measured"], [], ["sketch", "0.5", "s"], [],
        ["trained", "in", "the", "stored", "order:", "bad", "units:", "2"]]
    assert drawn[0].get_suptitle() == (
        "run: influence of 3 units, window of round 6, from training step 7")


@pytest.mark.parametrize("advantage", [np.zeros((2, 2)), np.full((2, 2), np.nan)])
def test_a_graph_without_numbers_is_drawn(
    tmp_path: Path, drawn: list[Any], advantage: np.ndarray
) -> None:
    row = WindowRow(round=0, iteration=0, step=0, num_units=2)
    plots.plot_graph("run", row, {"advantage": advantage, "order": np.arange(2)},
                     tmp_path / "graph.png")
    assert drawn[0].axes[0].images[0].get_clim() == (-1, 1)
