"""The picture of an order: score against position, with the running mean. Needs matplotlib."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np

from megatron_d3.errors import ConfigError

_MAX_POINTS = 20_000  # single documents drawn, evenly spaced; more are one grey area
_NUM_WINDOWS = 200  # of the running mean


def running_mean(scores: np.ndarray, order: np.ndarray, *, num_windows: int) -> tuple:
    """Return (centre, mean) of equal windows along the order.

    Args:
        scores: (N,) a score a document.
        order: (N,) documents in their order.
        num_windows: at most this many.

    Returns:
        two (n,) float64 arrays: position of each window's centre, mean score in it.
    """
    bounds = np.linspace(0, len(order), min(num_windows, len(order)) + 1).astype(np.int64)
    means = [
        float(np.mean(scores[order[start:stop]], dtype=np.float64))
        for start, stop in itertools.pairwise(bounds)
    ]
    return (bounds[:-1] + bounds[1:]) / 2, np.array(means)


def plot_order(
    path: Path, *, scores: np.ndarray, order: np.ndarray, title: str, score_name: str, kind: str
) -> None:
    """Draw the order into an image file.

    Args:
        path: where the image is written.
        scores: (N,) a score a document.
        order: (N,) documents in their order.
        title: one line above the picture.
        score_name: label of the vertical axis.
        kind: format of the file, for example "png".

    Raises:
        ConfigError: matplotlib is not installed, or it cannot write this format.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "--plot: needs matplotlib; install it with `pip install megatron-d3[plot]`"
        ) from error
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    if kind not in figure.canvas.get_supported_filetypes():
        raise ConfigError(f"--plot: no image format called {kind!r}; end the name with .png")
    axes = figure.subplots()
    places = np.linspace(0, len(order) - 1, min(_MAX_POINTS, len(order))).astype(np.int64)
    axes.plot(places, scores[order[places]], ".", color="0.6", markersize=1.5, label="document")
    if len(order):
        centres, means = running_mean(scores, order, num_windows=_NUM_WINDOWS)
        axes.plot(centres, means, color="tab:red", linewidth=1.5, label="running mean")
    axes.set(xlabel="position in the order (documents)", ylabel=score_name, title=title)
    axes.legend(loc="best", markerscale=6)
    figure.savefig(path, dpi=120, format=kind)
