"""Plots of one or several runs: weights and realised shares, losses per domain, and the influence
graph of a window. Needs matplotlib.

All are drawn from plan directories alone, the first two by :class:`~megatron_d3.curves.RunCurves`.
"""

from __future__ import annotations

import importlib.util
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_d3.curves import RunCurves, Windows
from megatron_d3.errors import ConfigError
from megatron_d3.influence.graph import in_order
from megatron_d3.plan.windows import WindowRow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_SHOWN = 20  # domains with an area, or a panel, of their own
_NUM_COLUMNS = 4  # panels side by side


def require_matplotlib() -> None:
    """Look whether plots can be drawn.

    Raises:
        ConfigError: matplotlib is missing; says how to install it.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "plots need matplotlib; install it with `pip install 'megatron-d3[plot]'`")


def plot_weights(runs: Sequence[RunCurves], path: Path) -> None:
    """Draw target weights and realised shares over steps, a column a run, as stacked areas.

    Args:
        runs: at least one.
        path: image file; its suffix names the format (.png, .svg, .pdf).

    Raises:
        ConfigError: matplotlib is missing, or it does not know the suffix.
    """
    figure = _figure(4.2 * len(runs) + 1.8, 5.2)
    axes = figure.subplots(2, len(runs), sharex="col", sharey=True, squeeze=False)
    names = _largest(runs)
    colors = _colors(len(names) + 1)
    for run, (upper, lower) in zip(runs, axes.T, strict=True):
        _stack(upper, run, run.weights, names, colors)
        _stack(lower, run, run.shares, names, colors)
        upper.set_title(run.name)
        lower.set_xlabel("training step")
    axes[0, 0].set_ylabel("target weight")
    axes[1, 0].set_ylabel("realised share of samples")
    figure.suptitle("target weights and realised shares of the domains")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    # The topmost area first, as the eye meets them.
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", frameon=False)
    _save(figure, path)


def plot_losses(runs: Sequence[RunCurves], path: Path) -> None:
    """Draw training and held-out loss over steps, a panel a domain and one for their mean.

    Args:
        runs: at least one; each has a colour.
        path: image file; its suffix names the format (.png, .svg, .pdf).

    Raises:
        ConfigError: matplotlib is missing, or it does not know the suffix.
    """
    names = _largest(runs)
    num_panels = len(names) + 1
    columns = min(_NUM_COLUMNS, num_panels)
    rows = math.ceil(num_panels / columns)
    figure = _figure(3.1 * columns + 0.4, 2.5 * rows + 0.7)
    axes = figure.subplots(rows, columns, sharex=True, squeeze=False).ravel()
    for panel, name in zip(axes, names, strict=False):
        for color, run in zip(_colors(len(runs)), runs, strict=True):
            column = run.column(name)
            if column is not None:
                _training(panel, run.train, column, color)
                _held_out(panel, run.eval_steps, run.held_out[:, column], color, run.name)
        panel.set_title(name, fontsize="medium")
        _cut_warmup(panel, runs, name)
    _mean_panel(axes[len(names)], runs)
    for panel in axes[num_panels:]:
        panel.set_axis_off()
    for number in range(num_panels):
        axes[number].grid(alpha=0.25)
        if number % columns == 0:
            axes[number].set_ylabel("nats per token")
        if number + columns >= num_panels:
            axes[number].set_xlabel("training step")
            axes[number].tick_params(labelbottom=True)
    figure.suptitle("loss per domain")
    _legend(figure, runs)
    _save(figure, path)


def plot_graph(name: str, row: WindowRow, arrays: Mapping[str, np.ndarray], path: Path) -> None:
    """Draw a window's advantage S in stored and in found order, the order, and what it costs.

    Args:
        name: of the run.
        row: the window's line of `windows.jsonl`.
        arrays: of the window: `advantage` (L, L) and `order` (L,), the unit at each position.
        path: image file; its suffix names the format (.png, .svg, .pdf).

    Raises:
        ConfigError: matplotlib is missing, or it does not know the suffix.
    """
    figure = _figure(10.5, 8.0)
    (left, right), (below, text) = figure.subplots(2, 2, height_ratios=(5, 3))
    advantage, order = arrays["advantage"], arrays["order"]
    finite = np.abs(advantage[np.isfinite(advantage)])
    limit = float(finite.max(initial=0.0)) or 1.0
    for axes, entries, title in (
        (left, advantage, "stored order"), (right, in_order(advantage, order), "order found"),
    ):  # fmt: skip
        image = axes.imshow(entries, cmap="RdBu_r", vmin=-limit, vmax=limit,
                            interpolation="nearest")
        axes.set(title=f"S, {title}", xlabel="position", ylabel="position")
        axes.locator_params(integer=True)
    figure.colorbar(image, ax=[left, right], shrink=0.8,
                    label="S: > 0 (red), row had better come before column")
    below.plot(np.arange(len(order)), order, "o", color="tab:blue", markersize=3)
    below.set(xlabel="position in the order found", ylabel="unit, by stored position",
              title="order")
    below.locator_params(integer=True)
    below.grid(alpha=0.25)
    text.set_axis_off()
    text.text(0.0, 1.0, "\n".join(_window_lines(row)), va="top", family="monospace",
              fontsize="small", transform=text.transAxes, wrap=True)
    figure.suptitle(f"{name}: influence of {row.num_units} units, window of round {row.round}, "
                    f"from training step {row.step}")
    _save(figure, path)


def _window_lines(row: WindowRow) -> list[str]:
    """Say in lines what a window's order costs and how far S can be trusted."""
    def number(value: float | None, form: str) -> str:
        return "not measured" if value is None else format(value, form)

    lines = ["cost of orders, 1 = random, less is better"]
    lines += [f"  {name:<18} {number(cost, '.3f')}" for name, cost in row.cost.items()]
    lines += ["", f"{'curl':<20} {number(row.curl, '.3f')}",
              f"{'reliability':<20} {number(row.reliability, '.3f')}",
              f"{'expected agreement':<20} {number(row.expected_agreement, '.3f')}", ""]
    lines += [f"{name:<20} {number(value, '.3g')} s" for name, value in row.seconds.items()]
    if row.reason is not None:
        lines += ["", *textwrap.wrap(f"trained in the stored order: {row.reason}", 52)]
    return lines


def _legend(figure: Figure, runs: Sequence[RunCurves]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=color, linewidth=2, label=run.name)
               for color, run in zip(_colors(len(runs)), runs, strict=True)]
    handles += [Line2D([], [], color="0.3", marker="o", markersize=4, label="held out"),
                Line2D([], [], color="0.3", alpha=0.45, linewidth=1, label="training")]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)


def _stack(
    axes: Any, run: RunCurves, curve: Windows, names: Sequence[str], colors: Sequence[Any]
) -> None:
    """Draw the shares of `names`, and those of all other domains together, one above another."""
    values = np.nan_to_num(curve.values)
    columns = [run.column(name) for name in names]
    layers = [np.zeros(len(values)) if c is None else values[:, c] for c in columns]
    rest = [c for c, name in enumerate(run.domains) if name not in names]
    labels = list(names)
    if rest:
        layers.append(values[:, rest].sum(axis=1))
        labels.append(f"{len(rest)} others")
    # step="post" holds a value up to the next edge; the last edge needs it once more.
    heights = [np.append(layer, layer[-1:]) for layer in layers]
    axes.stackplot(curve.edges, heights, labels=labels, colors=colors, step="post",
                   edgecolor="white", linewidth=0.4)
    axes.set(xlim=(0, curve.edges[-1]), ylim=(0, 1))


def _training(axes: Any, curve: Windows, column: int, color: Any) -> None:
    middle = (curve.edges[:-1] + curve.edges[1:]) / 2
    values = curve.values[:, column]
    drawn = np.isfinite(values)
    axes.plot(middle[drawn], values[drawn], color=color, alpha=0.45, linewidth=1)


def _held_out(axes: Any, steps: np.ndarray, losses: np.ndarray, color: Any, label: str) -> None:
    axes.plot(steps, losses, color=color, marker="o", markersize=3.5, linewidth=1.6, label=label)


def _mean_panel(axes: Any, runs: Sequence[RunCurves]) -> None:
    for color, run in zip(_colors(len(runs)), runs, strict=True):
        if len(run.eval_steps):
            _held_out(axes, run.eval_steps, run.held_out.mean(axis=1), color, run.name)
    axes.set_title("mean of all domains, held out", fontsize="medium", fontweight="bold")


def _cut_warmup(axes: Any, runs: Sequence[RunCurves], name: str) -> None:
    """Let the first steps, where every loss falls from ln(vocabulary), leave the picture."""
    tops, bottoms = [], []
    for run in runs:
        column = run.column(name)
        if column is None:
            continue
        values = run.train.values[:, column]
        late = values[len(values) // 10:]
        for part in (late, run.held_out[:, column]):
            if np.isfinite(part).any():
                tops.append(float(np.nanmax(part)))
                bottoms.append(float(np.nanmin(part)))
    if tops:
        margin = 0.04 * (max(tops) - min(bottoms)) or 0.1
        axes.set_ylim(min(bottoms) - margin, max(tops) + margin)


def _largest(runs: Sequence[RunCurves]) -> list[str]:
    """Return the domains of all runs in their order; of too many, those drawn most."""
    names = list(dict.fromkeys(name for run in runs for name in run.domains))
    if len(names) <= _MAX_SHOWN:
        return names
    drawn = {name: 0.0 for name in names}
    for run in runs:
        shares = np.nansum(run.shares.values * np.diff(run.shares.edges)[:, None], axis=0)
        for name, share in zip(run.domains, shares.tolist(), strict=True):
            drawn[name] += share
    kept = sorted(names, key=lambda name: -drawn[name])[:_MAX_SHOWN - 1]
    return [name for name in names if name in kept]


def _colors(number: int) -> list[Any]:
    from matplotlib import colormaps

    palette = colormaps["tab10" if number <= 10 else "tab20"]
    return [palette(i % palette.N) for i in range(number)]


def _figure(width: float, height: float) -> Figure:
    require_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Figure, path: Path) -> None:
    kind = path.suffix.lstrip(".").lower()
    known = figure.canvas.get_supported_filetypes()
    if kind not in known:
        raise ConfigError(f"{path}: no image format {path.suffix!r}; end the name with .png, .svg "
                          "or .pdf")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
