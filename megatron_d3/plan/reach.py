"""What a plan had come to at a checkpoint: replayed from a stored state, or counted from its files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megatron_d3.errors import ResumeError
from megatron_d3.plan.reader import LEDGER, POSITIONS, ROUNDS, PlanReader
from megatron_d3.plan.replay import DeciderFactory, Replay, ReplayError, VersionError
from megatron_d3.plan.snapshot import Snapshot
from megatron_d3.plan.state import DeciderState
from megatron_d3.plan.summary import next_ordinals


@dataclass(frozen=True)
class Checkpoint:
    """What Megatron's checkpoint says.

    Attributes:
        iteration: training steps done.
        consumed: training samples consumed.
    """

    iteration: int
    consumed: int


@dataclass(frozen=True)
class Start:
    """Where a replay starts, and what the checkpoint has not seen.

    Attributes:
        snapshot: the last usable one, or None for the plan's start.
        stale: snapshots later than the checkpoint.
        valid_end: positions below this one are on disk and belong to what is kept.
    """

    snapshot: Snapshot | None
    stale: tuple[Path, ...]
    valid_end: int


def choose_start(reader: PlanReader, checkpoint: Checkpoint, valid_end: int) -> Start:
    """Choose the stored state to replay from.

    Args:
        reader: the plan, with the generations to keep.
        checkpoint: where training goes on.
        valid_end: see :class:`Start`.

    Raises:
        PlanError: a stored state cannot be read.
    """
    generations = reader.plan.generations
    stale = []
    for snapshot in reader.snapshots():
        if snapshot.iteration > checkpoint.iteration:  # known from its name, without reading it
            stale.append(snapshot.path)
            continue
        state, index = snapshot.state, snapshot.generation
        if state.decided_at >= checkpoint.iteration or index >= len(generations):
            stale.append(snapshot.path)
            continue
        later = [generation.position for generation in generations[index + 1:]]
        # NOTE: it must lie before every position to which the replay may have to go back.
        if state.position <= min([checkpoint.consumed, valid_end, *later]):
            return Start(snapshot, tuple(stale), valid_end)
    return Start(None, tuple(stale), valid_end)


@dataclass(frozen=True)
class Reached:
    """What a plan had come to at the checkpoint.

    Attributes:
        state: after everything that the checkpoint has seen, rounds read ahead included.
        rewound: the same at the checkpoint's consumed samples: its cursors and carry count.
        rounds_end: bytes of `rounds.jsonl` up to there.
        ledger_end: bytes of `ledger.jsonl` up to there.
        missing: (start, records) of positions that `positions.bin` lacks.
    """

    state: DeciderState
    rewound: DeciderState
    rounds_end: int
    ledger_end: int
    missing: tuple[tuple[int, np.ndarray], ...] = ()


def reach(
    reader: PlanReader, checkpoint: Checkpoint, make_decider: DeciderFactory, start_at: Start
) -> Reached:
    """Compute the plan again up to the checkpoint, and compare it with what is on disk.

    Raises:
        ResumeError: they differ, or the plan does not reach to the checkpoint.
    """
    missing = []
    try:
        replay = Replay(reader, make_decider, until=checkpoint.iteration,
                        position=checkpoint.consumed, snapshot=start_at.snapshot)
        for row, segment in replay.rounds():
            stop = reader.stop_of(row)
            middle = max(segment.start, min(stop, start_at.valid_end))
            stored = reader.stored(segment.start, middle)
            if stored.tobytes() != segment.records[:middle - segment.start].tobytes():
                raise ReplayError(f"round {row.round}: positions {segment.start}-{middle - 1} of "
                                  f"{POSITIONS} are not those that the round decided")
            if middle < stop:
                missing.append((middle, segment.records[middle - segment.start:
                                                        stop - segment.start]))
    except VersionError as error:
        raise ResumeError(f"plan {reader.directory}: {error}") from error
    except ReplayError as error:
        raise ResumeError(
            f"plan {reader.directory}: {error}; the plan was changed or damaged: restore it from a "
            "backup (`megatron-d3 plan audit` says more)") from error
    state = replay.state
    _check_reached(reader, checkpoint, state)
    return Reached(state, replay.rewound or state, replay.rounds_end, replay.ledger_end,
                   tuple(missing))


def recount(reader: PlanReader, checkpoint: Checkpoint) -> Reached:
    """Take what was decided from the files, where it cannot be computed again.

    Another version of an algorithm begins here: cursors go on, carries and the mixer's state not.

    Raises:
        ResumeError: the plan does not reach to the checkpoint.
    """
    generation = reader.plan.generations[-1]
    rounds_end = ledger_end = 0
    last, step = None, None
    for round_row, offset in reader.rounds():
        if round_row.iteration >= checkpoint.iteration:
            break
        last, rounds_end = round_row, offset
    for loss_row, offset, _ in reader.ledger():
        if loss_row.iteration > checkpoint.iteration:
            break
        step, ledger_end = loss_row, offset
    assert last is not None and step is not None, "an iteration after the first has both"
    ids = list(generation.domain_ids)
    # Not counted: inside a window, samples of untrained units may be passed over.
    drawn = next_ordinals(reader, generation.position, checkpoint.consumed)[ids]
    cursors = np.maximum(drawn, [generation.cursors[i] for i in ids])
    num_domains = len(ids)
    state = DeciderState(
        round=last.round + 1, position=reader.stop_of(last), step=checkpoint.iteration,
        iteration=step.iteration, consumed=step.consumed or 0, decided_at=last.iteration,
        chain=last.chain, cursors=cursors, carry=np.zeros(num_domains),
        weights=np.full(num_domains, np.nan), mixer={})
    _check_reached(reader, checkpoint, state)
    return Reached(state, replace(state, position=checkpoint.consumed), rounds_end, ledger_end)


def _check_reached(reader: PlanReader, checkpoint: Checkpoint, state: DeciderState) -> None:
    if state.iteration != checkpoint.iteration:
        raise ResumeError(f"plan {reader.directory}: {LEDGER} has no row of iteration "
                          f"{checkpoint.iteration}; load another checkpoint")
    check_consumed(reader.directory, checkpoint, state.consumed)
    if state.position < checkpoint.consumed:
        raise ResumeError(
            f"plan {reader.directory}: {ROUNDS} decides positions up to {state.position}, the "
            f"checkpoint has consumed {checkpoint.consumed}; restore the plan from a backup")


def check_consumed(directory: Path, checkpoint: Checkpoint, recorded: int) -> None:
    """Compare the checkpoint's consumed samples with the plan's.

    Raises:
        ResumeError: they differ.
    """
    if checkpoint.consumed != recorded:
        raise ResumeError(
            f"plan {directory}: had consumed {recorded} samples at iteration {checkpoint.iteration}, "
            f"the checkpoint {checkpoint.consumed}; it is a checkpoint of another run: give the "
            "--load and --save of one run")
