"""Curves and final numbers of runs, read from their plan directories alone.

A run of 10^6 steps is read once, row by row, into a fixed number of windows of steps: memory does
not grow with it. `plots.py` draws the curves, `held_out_table` prints where they end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_d3.errors import PlanError
from megatron_d3.plan.batch_schedule import BatchSchedule
from megatron_d3.plan.reader import ROUNDS, PlanReader
from megatron_d3.plan.rows import RoundRow, last_line, parsed
from megatron_d3.plan.summary import count_domains, iter_rounds

NUM_WINDOWS = 40
"""Windows of steps over which losses and realised shares are averaged, unless told otherwise."""

_MAX_BINS = 960  # finest resolution of a curve: about one bin a pixel


@dataclass(frozen=True)
class Windows:
    """A quantity of every domain over windows of steps.

    Attributes:
        edges: (N+1,) float64, window n holds the 0-based steps [edges[n], edges[n+1]).
        values: (N, K) float64, NaN where a domain has none.
    """

    edges: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class RunCurves:
    """What one run did.

    Attributes:
        name: how the run is called in tables and plots.
        domains: (K,) names, in the order in which they came up.
        num_steps: trained steps.
        num_tokens: tokens with a finite loss, over all trained steps.
        weights: target weights, at the finest resolution.
        shares: realised shares of the decided positions.
        train: training loss in nats per token, each window's tokens weighted alike; losses that
            were not finite are left out.
        eval_steps: (E,) int64, steps trained before each evaluation.
        held_out: (E, K) float64, held-out loss in nats per token, NaN where none was measured.
    """

    name: str
    domains: tuple[str, ...]
    num_steps: int
    num_tokens: int
    weights: Windows
    shares: Windows
    train: Windows
    eval_steps: np.ndarray
    held_out: np.ndarray

    def column(self, domain: str) -> int | None:
        """Return the column of a domain, None if the run does not have it."""
        return self.domains.index(domain) if domain in self.domains else None


def read_curves(directory: Path, *, name: str, window_steps: int | None = None) -> RunCurves:
    """Read the curves of a run, also of one that is training.

    Args:
        directory: its plan directory.
        name: how to call it.
        window_steps: steps that a loss or a realised share is averaged over; default a fortieth of
            the run.

    Raises:
        PlanError: there is no plan, or it cannot be read.
    """
    reader = PlanReader(directory)
    headers = [generation.header for generation in reader.plan.generations]
    domains = tuple(dict.fromkeys(name for header in headers for name in header.names))
    num_steps = max(1, _decided_steps(reader))
    width = max(1, math.ceil(num_steps / _MAX_BINS))  # steps in a bin
    num_bins = -(-num_steps // width)
    window = max(1, round((window_steps or num_steps / NUM_WINDOWS) / width))  # bins in a window
    target_sums, counts = _read_rounds(reader, domains, num_bins, width)
    loss_sums, num_tokens, last_iteration = _read_ledger(reader, domains, num_bins, width)
    eval_steps, held_out = _read_evals(reader, domains)
    edges = np.minimum(np.arange(num_bins + 1) * width, num_steps).astype(np.float64)
    coarse = np.append(edges[:-1:window], edges[-1])
    counts, loss_sums = _coarser(counts, window), _coarser(loss_sums, window)
    return RunCurves(
        name=name, domains=domains, num_steps=last_iteration, num_tokens=int(num_tokens.sum()),
        weights=Windows(edges, _ratio(target_sums, target_sums.sum(axis=1, keepdims=True))),
        shares=Windows(coarse, _ratio(counts, counts.sum(axis=1, keepdims=True))),
        train=Windows(coarse, _ratio(loss_sums, _coarser(num_tokens, window))),
        eval_steps=eval_steps, held_out=held_out)


def _decided_steps(reader: PlanReader) -> int:
    """Return how many steps the decided positions suffice for."""
    path = reader.directory / ROUNDS
    found = last_line(path)
    if found is None:
        return 0
    row = parsed(path, found[0], RoundRow)
    schedule = reader.plan.generations[reader.generation_of(row.round)].header.batch_schedule
    step, position = row.step, row.start
    while position < row.stop:
        step, position = step + 1, schedule.stop_after(position, 1)
    return step


def _read_rounds(
    reader: PlanReader, domains: Sequence[str], num_bins: int, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return (N, K) samples that the weights asked for, and (N, K) that were drawn."""
    targets, counts = np.zeros((num_bins, len(domains))), np.zeros((num_bins, len(domains)))
    generations = reader.plan.generations
    column = {name: k for k, name in enumerate(domains)}
    columns = [[column[name] for name in g.header.names] for g in generations]
    column_of_id = [column[record.name] for record in reader.plan.table]
    drawn = (-1, 0, 0)  # bin, start, stop: neighbouring rounds are counted in one go

    def count(bin_number: int, start: int, stop: int) -> None:
        # Two ids have one name where a domain changed: add.at, not +=.
        np.add.at(counts[bin_number], column_of_id, count_domains(reader, start, stop))

    for use in iter_rounds(reader):
        schedule = generations[use.generation].header.batch_schedule
        for bin_number, start, stop in _bins_of(
            use.row.step, use.row.start, use.stop, width, schedule
        ):
            bin_number = min(bin_number, num_bins - 1)
            targets[bin_number, columns[use.generation]] += use.weights * (stop - start)
            if drawn[0] == bin_number and drawn[2] == start:
                drawn = (bin_number, drawn[1], stop)
                continue
            count(*drawn)
            drawn = (bin_number, start, stop)
    count(*drawn)
    return targets, counts


def _bins_of(
    step: int, position: int, stop: int, width: int, schedule: BatchSchedule
) -> list[tuple[int, int, int]]:
    """Split positions [position, stop), used from `step` on, into (bin, start, stop)."""
    parts = []
    while position < stop:
        bin_number = step // width
        end = min(stop, schedule.stop_after(position, (bin_number + 1) * width - step))
        parts.append((bin_number, position, end))
        step, position = (bin_number + 1) * width, end
    return parts


def _read_ledger(
    reader: PlanReader, domains: Sequence[str], num_bins: int, width: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return (N, K) loss sums, (N, K) tokens, and the last iteration."""
    sums, tokens = np.zeros((num_bins, len(domains))), np.zeros((num_bins, len(domains)))
    column = {name: k for k, name in enumerate(domains)}
    iteration = 0
    for row, _, _ in reader.ledger():
        iteration = row.iteration
        bin_number = min((iteration - 1) // width, num_bins - 1)
        for name, (total, num_tokens) in row.losses.items():
            if total is not None:
                sums[bin_number, column[name]] += total
                tokens[bin_number, column[name]] += num_tokens
    return sums, tokens, iteration


def _read_evals(reader: PlanReader, domains: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return (E,) steps and (E, K) losses of the evaluations on held-out samples."""
    rows = {row.iteration: row for row, _, _ in reader.evals() if row.split == "valid"}
    column = {name: k for k, name in enumerate(domains)}
    losses = np.full((len(rows), len(domains)), np.nan)
    for values, row in zip(losses, rows.values(), strict=True):
        for name, (total, num_tokens) in row.losses.items():
            values[column[name]] = np.nan if total is None else total / num_tokens
    return np.array(list(rows), np.int64), losses


def _coarser(values: np.ndarray, factor: int) -> np.ndarray:
    """Add `factor` rows at a time: (N, K) to (ceil(N / factor), K)."""
    return np.add.reduceat(values, np.arange(0, len(values), factor), axis=0)


def _ratio(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    counts = np.broadcast_to(counts, sums.shape)
    return np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)


# --- tables ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeldOut:
    """The last evaluations of several runs, side by side.

    Attributes:
        domains: (K,) names of the domains that every run evaluated.
        runs: (R,) names.
        steps: (R,) step of each run's last evaluation.
        losses: (K, R) float64, nats per token.
        shares: (K, R) float64, share of each domain in what the run trained on.
    """

    domains: tuple[str, ...]
    runs: tuple[str, ...]
    steps: tuple[int, ...]
    losses: np.ndarray
    shares: np.ndarray

    @property
    def means(self) -> np.ndarray:
        """(R,) float64, unweighted mean over the domains."""
        return np.asarray(self.losses.mean(axis=0))


def last_held_out(runs: Sequence[RunCurves]) -> HeldOut:
    """Collect the last evaluation of every run.

    Raises:
        PlanError: a run has no evaluation, or no domain was evaluated in all of them.
    """
    for run in runs:
        if len(run.eval_steps) == 0:
            raise PlanError(f"{run.name}: no evaluation yet; see --eval-interval and --eval-iters")
    common = [d for d in runs[0].domains if all(_has_loss(run, d) for run in runs)]
    if not common:
        raise PlanError(f"{', '.join(run.name for run in runs)}: no domain was evaluated in all")
    columns = [[run.domains.index(domain) for domain in common] for run in runs]
    losses = [run.held_out[-1][c] for run, c in zip(runs, columns, strict=True)]
    shares = [_overall_share(run)[c] for run, c in zip(runs, columns, strict=True)]
    return HeldOut(
        domains=tuple(common), runs=tuple(run.name for run in runs),
        steps=tuple(int(run.eval_steps[-1]) for run in runs),
        losses=np.array(losses).T, shares=np.array(shares).T)


def held_out_table(runs: Sequence[RunCurves]) -> str:
    """Return the table of the runs' last held-out losses, the best of each row marked.

    Raises:
        PlanError: a run has no evaluation.
    """
    found = last_held_out(runs)
    width = max(9, *(len(name) + 2 for name in found.runs))
    first = max(len("mean (unweighted)"), *(len(name) for name in found.domains))
    lines = [
        "held-out loss, nats per token (* best)" + _ends(runs, found),
        " " * (first + (width + 1) * len(found.runs)) + "   share of training samples",
        " " * first + "".join(f"{name:>{width}} " for name in found.runs)
        + "".join(f"{name:>{width}}" for name in found.runs),
    ]
    rows = zip(found.domains, found.losses, found.shares, strict=True)
    for name, losses, shares in rows:
        percent = "".join(f"{100 * share:{width - 2}.1f} %" for share in shares)
        lines.append(f"{name:<{first}}{_marked(losses, width)}{percent}")
    lines.append(f"{'mean (unweighted)':<{first}}{_marked(found.means, width)}")
    return "\n".join(line.rstrip() for line in lines)


def _marked(losses: np.ndarray, width: int) -> str:
    # Compared as printed: a difference that the table does not show is none.
    texts = [f"{loss:.3f}" for loss in losses]
    best = min(texts, key=float)
    is_tie = all(text == best for text in texts)
    return "".join(
        f"{text:>{width}}{'*' if text == best and not is_tie else ' '}" for text in texts)


def _ends(runs: Sequence[RunCurves], found: HeldOut) -> str:
    ends = [f"{step:,} steps, {run.num_tokens:,} tokens"
            for run, step in zip(runs, found.steps, strict=True)]
    if len(set(ends)) == 1:
        return f", after {ends[0]}"
    return "".join(f"\n  {run.name}: after {end}" for run, end in zip(runs, ends, strict=True))


def _has_loss(run: RunCurves, domain: str) -> bool:
    column = run.column(domain)
    return column is not None and bool(np.isfinite(run.held_out[-1, column]))


def _overall_share(run: RunCurves) -> np.ndarray:
    sizes = np.diff(run.shares.edges)[:, None]  # steps; a window's share times its length
    shares: np.ndarray = np.nansum(run.shares.values * sizes, axis=0) / sizes.sum()
    return shares
