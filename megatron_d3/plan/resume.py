"""Continue a plan from a checkpoint: only its iteration and consumed samples are needed.

    read -> refuse what may not change -> last usable snapshot -> replay and verify -> set aside -> go on

What the checkpoint has not seen (rounds decided at or after its iteration, later ledger rows,
evaluations, states and generations) moves to `abandoned-NNNN/`; the files are then those of a run
that was stopped there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_d3.errors import ResumeError
from megatron_d3.plan.decide import Decider
from megatron_d3.plan.draft import num_passed_over
from megatron_d3.plan.files import is_there
from megatron_d3.plan.generations import enter, is_replayable, next_generation
from megatron_d3.plan.header import Difference, Generation, PlanFile, RunHeader, differences
from megatron_d3.plan.reach import (
    Checkpoint,
    Reached,
    Start,
    check_consumed,
    choose_start,
    reach,
    recount,
)
from megatron_d3.plan.reader import EVALS, LEDGER, POSITIONS, ROUNDS, PlanReader
from megatron_d3.plan.replay import DeciderFactory
from megatron_d3.plan.rows import LossRow, last_line, parsed
from megatron_d3.plan.state import DeciderState
from megatron_d3.plan.store import Cut, PlanStore, num_bytes
from megatron_d3.plan.windows import WINDOWS, kept, stored_arrays

_FORK = "or go on with the new value from this checkpoint by --d3-resume fork"
_ADVICE = {
    "seq_length": "keep the old one",
    "seed": "keep the old one",
    "tokenizer": "use the old one",
    "domains": "name the same domains",
    "domain order": "list the domains in the old order",
    "fingerprint": "its files, order, valid_fraction or valid_paths changed: restore them",
    "num_samples": "its files, valid_fraction or valid_paths changed: restore them",
    "num_tokens": "its files, valid_fraction or valid_paths changed: restore them",
    "versions": "use the Megatron-D3 that wrote the plan",
    "read_ahead_steps": "losses would take effect at other steps: keep d3.read_ahead_steps null or "
                        "at the old value, and where the DataLoader needs more, use fewer "
                        "--num-workers, a smaller --micro-batch-size or fewer data-parallel ranks",
    "total_samples": "the weights may depend on it (epoch caps, unimax): keep the old length",
}


@dataclass(frozen=True)
class Resumed:
    """A plan ready to be continued.

    Attributes:
        store: open for writing.
        decider: of the last generation.
        state: as of the checkpoint.
        messages: what happened, for the log; each a line.
    """

    store: PlanStore
    decider: Decider
    state: DeciderState
    messages: tuple[str, ...]


def resume(
    directory: Path, checkpoint: Checkpoint, header: RunHeader, make_decider: DeciderFactory,
    *, is_fork: bool = False,
) -> Resumed:
    """Continue the plan in `directory` from a checkpoint.

    Args:
        directory: holds a plan.
        checkpoint: where training goes on.
        header: what the run wants.
        make_decider: builds the decider of a generation.
        is_fork: change on purpose what may not change otherwise. Without a change it is the same
            as a plain resume, so that the flag may stay in a job script.

    Raises:
        ResumeError: the plan does not belong to the run or the checkpoint; nothing is changed.
        PlanError: the plan cannot be read or written.
    """
    reader = PlanReader(directory)
    first = reader.plan.generations[0]
    if checkpoint.iteration < first.iteration:
        raise ResumeError(
            f"plan {directory}: starts at iteration {first.iteration}, the checkpoint is of "
            f"iteration {checkpoint.iteration}; load a later checkpoint, or give this run another "
            "--d3-plan-dir and --d3-resume fork")
    plan = reader.plan.before(checkpoint.iteration)
    header = header.following(plan.generations[-1].header)
    decider = make_decider(header, plan.table_with(header)[1])
    # A start that failed before its first round left nothing that a change could harm.
    is_fork = is_fork or (
        checkpoint.iteration == first.iteration and last_line(directory / ROUNDS) is None)
    changes = _allowed(directory, plan.generations[-1], header, decider, make_decider, is_fork)
    _check_total(directory, header, checkpoint)
    if checkpoint.iteration == first.iteration:
        check_consumed(directory, checkpoint, first.position)
        return _start_over(directory, reader, header, decider, changes)
    _check_ledger(directory, reader, checkpoint)
    dropped = reader.plan.generations[len(plan.generations):]
    num_valid = min([reader.first_position + reader.num_stored, *(g.position for g in dropped)])
    reader.plan = plan
    start = choose_start(reader, checkpoint, num_valid)
    old = plan.generations[-1]
    if is_replayable(old.header, header):
        reached = reach(reader, checkpoint, make_decider, start)
    else:
        reached = recount(reader, checkpoint)
    if not changes:
        store, messages = _cut(reader, checkpoint, reached, start, reached.state.position)
        return Resumed(store, decider, reached.state, tuple(messages))
    new = next_generation(plan, len(plan.generations) - 1, reached.rewound, header,
                          iteration=checkpoint.iteration, round_number=reached.state.round)
    num_passed = num_passed_over(
        reached.rewound, cursors=[old.cursors[i] for i in old.domain_ids],
        num_positions=checkpoint.consumed - old.position)
    _check_budgets(directory, decider, new, num_passed)
    store, messages = _cut(reader, checkpoint, reached, start, checkpoint.consumed)
    state = enter(reached.state, reached.rewound, old, new, decider)
    # So that no later resume has to go back beyond this point. Before the plan counts it as begun.
    store.snapshot(state, generation=len(plan.generations))
    store.write_plan(plan.with_generation(new))
    return Resumed(store, decider, state, (*messages, *_describe(old, new, changes, num_passed)))


def _allowed(
    directory: Path, old: Generation, header: RunHeader, decider: Decider,
    make_decider: DeciderFactory, is_fork: bool,
) -> list[Difference]:
    """Return the changes of the run against the plan; refuse those that need a fork."""
    changes = differences(old.header, header)
    refused = []
    for change in changes:
        if change.field == "batch_schedule":
            continue
        if change.field == "total_samples" and not (
                decider.depends_on_total
                or make_decider(old.header, old.domain_ids).depends_on_total):
            continue
        refused.append(change)
    if refused and not is_fork:
        lines = [f"plan {directory}: {change}; {_advice(change)}, {_FORK}" for change in refused]
        raise ResumeError("\n".join(lines))
    return changes


def _advice(change: Difference) -> str:
    parts = change.field.split(".")
    for key in (change.field, parts[0], parts[-1]):
        if key in _ADVICE and not (key == "domains" and len(parts) > 1):
            return _ADVICE[key]
    return "keep the old value"


def _check_total(directory: Path, header: RunHeader, checkpoint: Checkpoint) -> None:
    if header.total_samples < checkpoint.consumed:
        raise ResumeError(
            f"plan {directory}: the run ends after {header.total_samples} samples, the checkpoint "
            f"has consumed {checkpoint.consumed}; raise --train-samples or --train-iters, or load "
            "an earlier checkpoint")


def _check_budgets(directory: Path, decider: Decider, new: Generation, num_passed: int) -> None:
    """Refuse what would end in the middle: samples passed over count towards the limits."""
    cap = decider.cap
    if num_passed == 0 or cap is None or cap.exhausted != "redistribute":
        return
    cursors = [new.cursors[i] for i in new.domain_ids]
    num_left = sum(max(0, budget - cursor)
                   for budget, cursor in zip(cap.budgets.tolist(), cursors, strict=True))
    needed = decider.total_samples - new.position
    if needed > num_left:
        raise ResumeError(
            f"plan {directory}: a change inside a window passes over {num_passed} samples; the run "
            f"then needs {needed} more, but d3.mix.max_epochs leaves {num_left}: load a checkpoint at "
            "the end of a window, raise max_epochs, or shorten the run")


def _check_ledger(directory: Path, reader: PlanReader, checkpoint: Checkpoint) -> None:
    path = directory / LEDGER
    found = last_line(path)
    newest = (parsed(path, found[0], LossRow).iteration if found is not None
              else reader.plan.generations[0].iteration)
    if newest < checkpoint.iteration:
        raise ResumeError(
            f"plan {directory}: its ledger ends at iteration {newest}, the checkpoint is newer "
            f"(iteration {checkpoint.iteration}); load a checkpoint of iteration {newest} or before, "
            "or restore the plan that belongs to it")


def _start_over(
    directory: Path, reader: PlanReader, header: RunHeader, decider: Decider,
    changes: Sequence[Difference],
) -> Resumed:
    """Begin again where the plan began: no step of it was kept in a checkpoint."""
    first = reader.plan.generations[0]
    plan = PlanFile.begin(header if changes else first.header, iteration=first.iteration,
                          position=first.position)
    sizes = dict.fromkeys((LEDGER, ROUNDS, POSITIONS, EVALS), 0)
    if is_there(directory / WINDOWS):
        sizes[WINDOWS] = 0
    arrays = (*(snapshot.path for snapshot in reader.snapshots()), *stored_arrays(directory))
    store = PlanStore(directory)
    aside = store.set_aside(Cut(plan, sizes, arrays, first.iteration))
    messages = [_aside_message(aside, first.iteration)] if aside else []
    decider = replace(decider, table_ids=plan.generations[0].domain_ids)
    state = decider.init(position=first.position, iteration=first.iteration)
    return Resumed(store, decider, state, tuple(messages))


def _aside_message(aside: Path, iteration: int) -> str:
    return f"d3 plan: resumed at iteration {iteration}, what came later is in {aside}"


def _cut(
    reader: PlanReader, checkpoint: Checkpoint, reached: Reached, start: Start, end: int
) -> tuple[PlanStore, list[str]]:
    """Cut the files at the checkpoint, and positions at `end` if they reach so far."""
    evals_end = 0
    for row, offset, _ in reader.evals():
        if row.iteration > checkpoint.iteration:
            break
        evals_end = offset
    num_kept = min(start.valid_end, end) - reader.first_position
    sizes = {LEDGER: reached.ledger_end, ROUNDS: reached.rounds_end, EVALS: evals_end,
             POSITIONS: num_bytes(num_kept)}
    windows_end, stale = kept(reader.directory, iteration=checkpoint.iteration,
                              num_rounds=reached.state.round)
    if is_there(reader.directory / WINDOWS):
        sizes[WINDOWS] = windows_end
    store = PlanStore(reader.directory)
    arrays = (*start.stale, *stale)
    aside = store.set_aside(Cut(reader.plan, sizes, arrays, checkpoint.iteration))
    for first, records in reached.missing:
        store.write_missing(records[:max(0, end - first)])
    return store, [_aside_message(aside, checkpoint.iteration)] if aside else []


def _describe(
    old: Generation, new: Generation, changes: Sequence[Difference], num_passed: int
) -> list[str]:
    lines = [f"d3 plan: from position {new.position} on: {change}" for change in changes]
    started = [domain.name for domain, i in zip(new.header.domains, new.domain_ids, strict=True)
               if i >= len(old.cursors)]
    left = [domain.name for domain, i in zip(old.header.domains, old.domain_ids, strict=True)
            if i not in new.domain_ids and domain.name not in new.header.names]
    if num_passed:
        lines.append(f"d3 plan: {num_passed} samples are passed over: their units were decided for later "
                     "steps of a window than those trained")
    if started:
        lines.append(f"d3 plan: new or changed domains, from their first sample: {', '.join(started)}")
    if left:
        lines.append(f"d3 plan: domains no longer used: {', '.join(left)}; carries start from 0")
    return lines
