"""The units that a run would train on next, without touching its plan.

The plan is copied to a temporary folder and continued there from the checkpoint as the run would
continue it. Changes of the configuration are taken as `--d3-resume fork` takes them: a run that has
no `order` yet can be looked at with one. Units come as they are decided, in no order of influence.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megatron_d3.errors import ConfigError, PlanError
from megatron_d3.plan.decide import Decider
from megatron_d3.plan.files import is_there
from megatron_d3.plan.header import RunHeader
from megatron_d3.plan.keeper import PlanKeeper
from megatron_d3.plan.reach import Checkpoint
from megatron_d3.plan.reader import PLAN
from megatron_d3.plan.replay import DeciderFactory
from megatron_d3.plan.state import DeciderState

WHERE = "--units"


@dataclass(frozen=True, eq=False)
class NextUnits:
    """Some units after a checkpoint.

    Attributes:
        records: (L, G) of `RECORD`, the samples of each unit.
        table_ids: (K,) ids under which `records` knows the run's domains.
        plan: the plan directory that they continue; None for a plan from the configuration alone.
        messages: what continuing it would log.
    """

    records: np.ndarray
    table_ids: tuple[int, ...]
    plan: Path | None
    messages: tuple[str, ...]


def next_units(
    directories: Sequence[Path], header: RunHeader, make_decider: DeciderFactory, *,
    checkpoint: Checkpoint, num_units: int,
) -> NextUnits:
    """Decide the next units after a checkpoint.

    Args:
        directories: plan directories, the first that holds a plan is continued. Without any the run
            is decided anew from the header, and what it had consumed is passed over.
        header: of the run.
        make_decider: builds the decider of a header.
        checkpoint: where the run is.
        num_units: L.

    Raises:
        ConfigError: the run has fewer units left, or not all of one size.
        ResumeError: the plan does not belong to the checkpoint.
        PlanError: the plan cannot be read.
    """
    size = _common_size(header, checkpoint, num_units)
    directory = next((d for d in directories if is_there(d / PLAN)), None)
    if directory is None:
        decider = make_decider(header, tuple(range(len(header.domains))))
        drawn = _drawn(decider, decider.init(), num_skipped=checkpoint.consumed)
        records = _first(drawn, num_units * size, size, checkpoint)
        return NextUnits(records, tuple(decider.table_ids), None, ())
    with tempfile.TemporaryDirectory(prefix="megatron-d3-") as folder:
        copy = Path(folder) / "d3"
        try:
            keeper = PlanKeeper.open(
                copy, header, make_decider, iteration=checkpoint.iteration,
                consumed=checkpoint.consumed, mode="fork", copy_from=directory)
        except PlanError as error:  # which names the copy
            raise type(error)(str(error).replace(str(copy), str(directory))) from error
        try:
            decided = np.array(keeper.positions(checkpoint.consumed))
            drawn = _drawn(keeper.decider, keeper.state, decided)
            records = _first(drawn, num_units * size, size, checkpoint)
        finally:
            keeper.close()
    messages = tuple(m for m in keeper.messages if str(copy) not in m)
    return NextUnits(records, tuple(keeper.decider.table_ids), directory, messages)


def _common_size(header: RunHeader, checkpoint: Checkpoint, num_units: int) -> int:
    """Return G, samples of each of the units.

    Raises:
        ConfigError: the run ends before, or its global batch changes.
    """
    schedule, consumed = header.batch_schedule, checkpoint.consumed
    size = schedule.size_at(consumed)
    stops = [schedule.stop_after(consumed, n) for n in range(num_units + 1)]
    num_left = sum(stop <= header.total_samples for stop in stops[1:])
    if num_left < num_units:
        raise _too_few(num_units, num_left, checkpoint)
    num_alike = sum(stop == consumed + (n + 1) * size for n, stop in enumerate(stops[1:]))
    if num_alike < num_units:
        raise ConfigError(
            f"{WHERE}: got {num_units}, but the global batch of {size} samples changes after "
            f"{num_alike} steps, and units must be equally large; expected at most {num_alike}")
    return size


def _drawn(
    decider: Decider, state: DeciderState, decided: np.ndarray | None = None, *,
    num_skipped: int = 0,
) -> Iterator[np.ndarray]:
    """Yield the records from here on, part by part; the first `num_skipped` of them are left out."""
    if decided is not None:
        yield decided
    if state.pending is not None:  # drawn, and without a position yet
        num_pending, size = state.pending.records.shape
        yield state.pending.records.reshape(-1)
        state = replace(
            state, round=state.round + num_pending, step=state.step + num_pending,
            position=state.position + num_pending * size, pending=None)
    while (following := decider.decide(state)) is not None:
        state, segment = following
        yield segment.records[max(0, num_skipped - segment.start):]


def _first(
    parts: Iterator[np.ndarray], num_records: int, size: int, checkpoint: Checkpoint
) -> np.ndarray:
    """Return the first records as (L, G).

    Raises:
        ConfigError: the plan ends before.
    """
    found: list[np.ndarray] = []
    missing = num_records
    while missing > 0:
        part = next(parts, None)
        if part is None:
            raise _too_few(num_records // size, (num_records - missing) // size, checkpoint)
        found.append(part[:missing])
        missing -= len(found[-1])
    return np.concatenate(found).reshape(-1, size)


def _too_few(num_units: int, num_left: int, checkpoint: Checkpoint) -> ConfigError:
    return ConfigError(
        f"{WHERE}: got {num_units}, but the run has {num_left} global batches left at iteration "
        f"{checkpoint.iteration}; load an earlier checkpoint (--ckpt-step), or make the run longer "
        "(--train-iters, --train-samples)")
