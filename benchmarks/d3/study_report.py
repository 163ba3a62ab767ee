"""Tables of `benchmarks/d3/study.py`: losses beside the stored order's, what S was worth, its cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks._study import Cell, interval
from benchmarks._table import print_table

STORED, LONGER, RANDOM = "stored", "stored, 3x steps", "random"
Rows = dict[int, dict[str, Any]]  # by seed


def report(
    results: Mapping[Cell, dict[str, Any]], settings: Sequence[str], arms: Sequence[str], *,
    steps: int,
) -> None:
    """Print all tables of the cells that are finished."""
    require_same_units(results)
    print("Differences are to the stored order, seed by seed: mean +- half width of the 95 % interval "
          "over the seeds\n(Student's t with n - 1 degrees). Losses in nats per token; held-out: mean of "
          f"domains. The token mean differs from it by at most {token_mean_gap(results):.4f}.\n")
    pooled: dict[str, list[np.ndarray]] = {arm: [] for arm in arms}
    for setting in settings:
        found: dict[str, Rows] = {
            arm: {int(seed): row for (name, other, seed), row in results.items()
                  if (name, other) == (setting, arm)} for arm in arms}
        if not found[STORED]:
            continue
        print(f"### {setting}\n")
        losses, costs = [], []
        for arm in arms:
            pairs = [(row, found[STORED][seed]) for seed, row in sorted(found[arm].items())
                     if seed in found[STORED]]
            if not pairs:
                continue
            losses.append(loss_row(arm, pairs))
            costs.append(cost_row(arm, pairs, found, steps))
            if arm not in (STORED, LONGER):
                pooled[arm] += [differences(*pair) for pair in pairs]
        print_table(
            ("order", "seeds", "online", "less stored's", "S foretold", "held-out, end",
             "less stored's", "midway, less stored's"), losses)
        print_table(
            ("order", "reliability", "curl", "cost found", "row sums", "stored", "probing / run",
             "processor time / stored", "held-out of stored in that time", "less that"), costs)
        along(found)
    for index, what in enumerate(
            ("online loss", "held-out loss at the end", "held-out loss midway")):
        print(f"### {what}, less the stored order's\n")
        by_setting(results, settings, arms, index)
    print("### All settings together (the interval is over settings and seeds)\n")
    print_table(("order", "pairs", "online", "held-out, end", "held-out, midway"), [
        (arm, len(pairs), *(interval(column) for column in np.array(pairs).T))
        for arm, pairs in pooled.items() if pairs])
    seconds = sum(row["processor_seconds"] for row in results.values())
    print(f"{len(results)} runs, {seconds / 60:.1f} minutes of one core")


def require_same_units(results: Mapping[Cell, dict[str, Any]]) -> None:
    """Every arm of a setting and seed has the same samples in each window."""
    seen: dict[tuple[Any, Any], list[str]] = {}
    for (setting, arm, seed), row in results.items():
        first = seen.setdefault((setting, seed), row["units"])
        if first != row["units"]:
            raise SystemExit(f"{setting}, {arm}, seed {seed}: other samples than the other arms")


def by_setting(
    results: Mapping[Cell, dict[str, Any]], settings: Sequence[str], arms: Sequence[str], index: int
) -> None:
    """Print one difference (see `differences`) of all arms, a column a setting."""
    rows = []
    for arm in arms:
        cells = []
        for setting in settings:
            pairs = [(row, results[setting, STORED, seed])
                     for (name, other, seed), row in sorted(results.items())
                     if (name, other) == (setting, arm) and (setting, STORED, seed) in results]
            values = np.array([differences(*pair)[index] for pair in pairs])
            cells.append(f"{interval(values, 3)} ({len(pairs)})" if pairs else "")
        if arm not in (STORED, LONGER) and any(cells):
            rows.append([arm, *cells])
    print_table(("order (seeds)", *settings), rows)


def token_mean_gap(results: Mapping[Cell, dict[str, Any]]) -> float:
    """Return the largest difference of the two means in any evaluation."""
    return max((abs(mean - token_mean) for row in results.values()
                for _, mean, token_mean in row["held_out"]), default=0.0)


def online(row: Mapping[str, Any]) -> float:
    """Mean loss of the units just before they are trained on, without the first window."""
    return float(np.mean(row["online"][1:]))


def differences(row: Mapping[str, Any], stored: Mapping[str, Any]) -> np.ndarray:
    """Return what this run has more than the stored order's: online loss, held-out loss at the end
    and midway."""
    middle = len(stored["held_out"]) // 2 - 1
    return np.array([
        online(row) - online(stored), row["held_out"][-1][1] - stored["held_out"][-1][1],
        row["held_out"][middle][1] - stored["held_out"][middle][1]])


def loss_row(arm: str, pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> list[Any]:
    ends = np.mean([[online(row), row["held_out"][-1][1]] for row, _ in pairs], axis=0)
    if arm == STORED:
        return [arm, len(pairs), f"{ends[0]:.4f}", "", "", f"{ends[1]:.4f}", "", ""]
    if arm == LONGER:  # other windows, other units
        return [arm, len(pairs), "", "", "", f"{ends[1]:.4f}", _columns(pairs)[1], ""]
    online_loss, end, middle = _columns(pairs)
    foretold = _mean(pairs, "predicted", "+.4f") if arm != RANDOM else ""
    return [arm, len(pairs), f"{ends[0]:.4f}", online_loss, foretold, f"{ends[1]:.4f}", end, middle]


def _columns(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    return [interval(column) for column in np.array([differences(*pair) for pair in pairs]).T]


def cost_row(
    arm: str, pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]], found: Mapping[str, Rows],
    steps: int,
) -> list[Any]:
    costs = [_mean([({"cost": [c.get(name) for c in row["cost"]]}, other) for row, other in pairs],
                   "cost", ".2f") for name in ("found", "row_sum", "stored")]
    share = np.mean([row["probe_seconds"] / row["wall_seconds"] for row, _ in pairs])
    ratio = np.mean([row["processor_seconds"] / stored["processor_seconds"]
                     for row, stored in pairs])
    found_in_S = [_mean(pairs, "reliability", ".2f"), _mean(pairs, "curl", ".2f"), *costs]
    if arm == RANDOM:  # nothing is measured for it
        found_in_S = [""] * len(found_in_S)
    row = [arm, *found_in_S, f"{share:.0%}", f"{ratio:.2f}"]
    triples = [(run, stored, found[LONGER][run["seed"]]) for run, stored in pairs
               if run["seed"] in found.get(LONGER, {})]
    if arm in (STORED, LONGER) or not triples:
        return [*row, "", ""]
    equal = np.array([loss_in_time(*triple, steps=steps) for triple in triples])
    own = np.array([run["held_out"][-1][1] for run, _, _ in triples])
    return [*row, f"{equal.mean():.4f}", interval(own - equal)]


def loss_in_time(
    run: Mapping[str, Any], stored: Mapping[str, Any], longer: Mapping[str, Any], *, steps: int
) -> float:
    """Return the last held-out loss of the stored order had it trained as long as `run` took.

    Two whole runs of the stored order, of n and 3 n steps, each with its own schedule to the end;
    between them the loss is taken as linear in the logarithm of the steps, and not beyond 3 n. Time
    is that of the processor.
    """
    seconds = [float(row["processor_seconds"]) for row in (run, stored, longer)]
    per_step = max(1e-9, (seconds[2] - seconds[1]) / (2 * steps))
    bought = np.clip(1 + (seconds[0] - seconds[1]) / per_step / steps, 1, 3)
    share = np.log(bought) / np.log(3)
    return float((1 - share) * stored["held_out"][-1][1] + share * longer["held_out"][-1][1])


def along(found: Mapping[str, Rows]) -> None:
    """Print reliability and curl window by window, means over the seeds."""
    rows = []
    for arm in ("projected", "hutchinson_diagonal", "gnb_diagonal", "look_ahead"):
        for key in ("reliability", "curl"):
            values = [row[key] for row in found.get(arm, {}).values()]
            if values:
                rows.append([arm, key, *(_text(column, ".2f") for column in zip(
                    *values, strict=True))])
    if rows:
        print_table(["S of", "", *(f"window {w + 1}" for w in range(len(rows[0]) - 2))], rows)


def _mean(
    pairs: Sequence[tuple[Mapping[str, Any], Any]], key: str, form: str
) -> str:
    return _text([value for row, _ in pairs for value in row[key]], form)


def _text(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    return format(float(np.mean(known)), form) if known else ""

