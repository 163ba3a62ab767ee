"""Runs with windows: killed, resumed, forked inside a window, audited."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest

from megatron_d3.config import parse_config
from megatron_d3.errors import PlanError, ResumeError
from megatron_d3.mix import MIXERS
from megatron_d3.plan import draft
from megatron_d3.plan.audit import audit
from megatron_d3.plan.batch_schedule import BatchSchedule
from megatron_d3.plan.compare import compare
from megatron_d3.plan.decide import Decider
from megatron_d3.plan.draft import Orderer, stored_order
from megatron_d3.plan.header import RunHeader
from megatron_d3.plan.keeper import PlanFollower, PlanKeeper
from megatron_d3.plan.reader import PlanReader
from megatron_d3.plan.segment import RECORD
from megatron_d3.planning import decider_factory
from megatron_d3.types import StepSignals
from tests.plan.test_resume import CrashingCalls
from tests.plan_helpers import (
    Crash,
    Trainer,
    domains,
    files_of,
    header,
    losses_of,
    make_decider,
    random_order,
    reverse_order,
)


def with_order(head: RunHeader, length: int = 4, *, overlap: bool = False) -> RunHeader:
    order = {"length": length, "overlap": overlap}
    return replace(head, config={**head.config, "order": order})


HEADS = {
    "windows": with_order(header(total=46)),  # 12 steps, the last of 2 samples
    "overlap": with_order(header(total=46), 5, overlap=True),
    "one": with_order(header(total=46), 1),
    "growing": with_order(header(total=44, batch_schedule=BatchSchedule(((0, 2), (14, 6))))),
}


def consumed_at(head: RunHeader, iteration: int) -> int:
    return min(head.batch_schedule.stop_after(0, iteration), head.total_samples)


def train(
    directory: Path, head: RunHeader, start: int = 0, stop: int | None = None, **options: object
) -> None:
    orderer: Orderer = options.pop("orderer", random_order)  # type: ignore[assignment]
    Trainer(directory, head, orderer=orderer).run(
        start, consumed_at(head, start), stop_at=stop, **options)  # type: ignore[arg-type]


def draws(directory: Path) -> np.ndarray:
    reader = PlanReader(directory)
    return np.array(reader.positions(reader.first_position, reader.frontier))


@pytest.fixture(scope="module", params=HEADS)
def whole(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[RunHeader, dict[str, bytes]]:
    head = HEADS[request.param]
    directory = tmp_path_factory.mktemp("whole") / "d3"
    train(directory, head)
    result = audit(directory, make_decider)
    assert result.is_sound, result.findings
    return head, files_of(directory)


# --- resume ----------------------------------------------------------------------------------------


def test_the_rows_of_a_window_say_which_unit_they_are(tmp_path: Path) -> None:
    train(tmp_path / "d3", HEADS["windows"], orderer=reverse_order)
    rows = [json.loads(line) for line in files_of(tmp_path / "d3")["rounds.jsonl"].splitlines()]
    assert [row["unit"] for row in rows] == [3, 2, 1, 0, 3, 2, 1, 0, 2, 1, 0, 0]
    # Decided at once: with the read-ahead of two steps, when the step before the window began.
    assert [row["iteration"] for row in rows] == [0, 0, 0, 0, 2, 2, 2, 2, 6, 6, 6, 9]
    assert list(rows[0]) == ["round", "iteration", "step", "start", "stop", "unit", "weights", "hash"]
    result = audit(tmp_path / "d3", make_decider)
    assert (result.num_rounds, result.num_windows, result.num_positions) == (12, 4, 46)


@pytest.mark.parametrize("killed_at", range(1, 13))
def test_resume_from_the_last_checkpoint(
    tmp_path: Path, whole: tuple[RunHeader, dict[str, bytes]], killed_at: int
) -> None:
    head, files = whole
    train(tmp_path / "d3", head, stop=killed_at)
    stopped = files_of(tmp_path / "d3")
    PlanKeeper.open(tmp_path / "d3", head, make_decider, iteration=killed_at,
                    consumed=consumed_at(head, killed_at)).close()
    assert files_of(tmp_path / "d3") == stopped  # a resume where it stopped changes nothing
    train(tmp_path / "d3", head, killed_at)
    assert files_of(tmp_path / "d3") == files
    assert not list((tmp_path / "d3").glob("abandoned-*"))


@pytest.mark.parametrize("checkpoint", range(10))
def test_resume_from_an_older_checkpoint(
    tmp_path: Path, whole: tuple[RunHeader, dict[str, bytes]], checkpoint: int
) -> None:
    head, files = whole
    train(tmp_path / "stopped", head, stop=checkpoint)
    train(tmp_path / "d3", head, stop=9)
    PlanKeeper.open(tmp_path / "d3", head, make_decider, iteration=checkpoint,
                    consumed=consumed_at(head, checkpoint)).close()
    assert files_of(tmp_path / "d3") == files_of(tmp_path / "stopped")
    train(tmp_path / "d3", head, checkpoint)
    assert files_of(tmp_path / "d3") == files


def test_a_crash_at_any_write_is_survived(
    tmp_path: Path, whole: tuple[RunHeader, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window that was torn by it is dropped by the resume."""
    head, files = whole
    calls = CrashingCalls(monkeypatch, "write", "replace")
    train(tmp_path / "count", head)
    num_calls, num_torn = calls.count, 0
    for at in range(2, num_calls + 1, 2):
        for when in ("before", "middle", "after"):
            directory = tmp_path / f"{at}{when}"
            calls.count, calls.crash_at = 0, (at, when)
            with pytest.raises(Crash):
                train(directory, head)
            calls.crash_at = None
            num_torn += any("a window of which" in f for f in audit(directory, make_decider).findings)
            done = sum(1 for _ in PlanReader(directory).ledger())
            train(directory, head, done // 3 * 3)
            assert files_of(directory) == files, (at, when)
            shutil.rmtree(directory)
    assert num_torn or head is HEADS["one"]


def test_followers_compute_what_the_keeper_writes(
    tmp_path: Path, whole: tuple[RunHeader, dict[str, bytes]]
) -> None:
    head, _ = whole
    train(tmp_path / "d3", head, stop=3)
    keeper = PlanKeeper.open(tmp_path / "d3", head, make_decider, iteration=3,
                             consumed=consumed_at(head, 3))
    arrays = {name: array.copy() for name, array in keeper.state_arrays().items()}
    follower = PlanFollower.from_arrays(head, make_decider, arrays)
    for iteration in range(3, 12):
        start, stop = consumed_at(head, iteration), consumed_at(head, iteration + 1)
        one, two = (plan.advance(stop, random_order) for plan in (keeper, follower))
        assert [s.records.tobytes() for s in one] == [s.records.tobytes() for s in two]
        assert keeper.fingerprint == follower.fingerprint
        signals = losses_of(iteration, keeper.positions(start, stop), keeper.decider.table_ids)
        for plan in (keeper, follower):
            plan.observe(replace(signals, consumed=stop))
    assert keeper.state.position == follower.state.position == head.total_samples
    keeper.close()


def test_ranks_that_found_different_orders_come_apart(tmp_path: Path) -> None:
    for head in (HEADS["windows"], HEADS["overlap"]):
        keeper = PlanKeeper.open(tmp_path / head.config["order"]["overlap"].__repr__(), head,
                                 make_decider)
        follower = PlanFollower.from_arrays(head, make_decider, keeper.state_arrays())
        keeper.advance(1, stored_order)
        follower.advance(1, reverse_order)
        assert keeper.fingerprint != follower.fingerprint
        keeper.close()


def test_snapshots_are_of_window_ends(tmp_path: Path) -> None:
    head = with_order(header(total=400), 6)
    train(tmp_path / "d3", head, snapshot_every=4)
    rounds = [int(path.stem.partition("-")[0]) for path in sorted((tmp_path / "d3/state").iterdir())]
    assert rounds == [*range(5, 96, 6), 99]  # the last round of each window
    assert audit(tmp_path / "d3", make_decider).num_states == 17


def test_the_order_of_an_offline_mixer_depends_on_the_order_alone(tmp_path: Path) -> None:
    """With windows and the stored order the positions are those of a run without windows."""
    plain = header(total=46, mix="0.5,0.3,0.2")
    train(tmp_path / "plain", plain)
    for overlap in (False, True):
        head = with_order(plain, 5, overlap=overlap)
        train(tmp_path / f"{overlap}", head, orderer=stored_order)
        assert files_of(tmp_path / f"{overlap}")["positions.bin"] == (
            files_of(tmp_path / "plain")["positions.bin"])


# --- without windows -------------------------------------------------------------------------------


@pytest.mark.parametrize(("mix", "digest"), [
    ("online", "95ac349e48b58516"), ("0.5,0.3,0.2", "5dc306e12016341f")])
def test_a_run_without_windows_is_what_it_was_before_there_were_any(
    tmp_path: Path, mix: str, digest: str
) -> None:
    head = header(total=40, mix=mix)
    train(tmp_path / "d3", head, stop=8)
    other = replace(head, seed=8, domains=domains(100, 50, 20, seed=8))
    train(tmp_path / "d3", other, 5, mode="fork")
    files = files_of(tmp_path / "d3")
    sums = blake2b(digest_size=8)
    for name in ("plan.json", "positions.bin", "rounds.jsonl", "ledger.jsonl", "evals.jsonl"):
        sums.update(files[name])
    assert sums.hexdigest() == digest  # frozen: computed by the release before
    with np.load(min((tmp_path / "d3/state").iterdir())) as state:
        assert "pending.records" not in state and int(state["version"]) == 1
    assert not {"windows.jsonl", "windows"} & {path.name for path in (tmp_path / "d3").iterdir()}


# --- forks -----------------------------------------------------------------------------------------

FORKS = {
    "mix": header(total=60, mix="0.2,0.2,0.6"),
    "none": header(total=60),
    "other windows": with_order(header(total=60), 7),
    "overlap": with_order(header(total=60), 6, overlap=True),
    "batch": with_order(header(total=60, batch_schedule=BatchSchedule.constant(6))),
    "domains": with_order(header(total=60, domains=domains(100, 50, 20, 30)[1:])),
}


@pytest.mark.parametrize("name", FORKS)
@pytest.mark.parametrize("overlap", [False, True])
def test_a_fork_inside_a_window_gives_no_sample_twice(
    tmp_path: Path, name: str, overlap: bool
) -> None:
    old, new = with_order(header(total=60), 5, overlap=overlap), FORKS[name]
    for checkpoint in range(1, 12):
        for orderer in (reverse_order, random_order):
            directory = tmp_path / f"{checkpoint}{orderer.__name__}"
            train(directory, old, stop=checkpoint, orderer=orderer)
            kept = draws(directory)[:4 * checkpoint]
            trainer = Trainer(directory, new, orderer=orderer)
            trainer.run(checkpoint, 4 * checkpoint, mode="fork", stop_at=checkpoint + 2)
            consumed = new.batch_schedule.stop_after(4 * checkpoint, 2)
            trainer.run(checkpoint + 2, consumed)
            records = draws(directory)
            assert len(records) == 60
            assert records[:4 * checkpoint].tobytes() == kept.tobytes()
            assert len(np.unique(records)) == 60
            result = audit(directory, make_decider)
            assert result.is_sound, result.findings


def test_a_fork_says_how_much_it_passes_over(tmp_path: Path) -> None:
    old, new = with_order(header(total=60), 5), header(total=60, mix="0.5,0.3,0.2")
    for checkpoint, num_passed in ((1, 16), (3, 8), (5, 0), (6, 16), (10, 0)):
        directory = tmp_path / f"{checkpoint}"
        train(directory, old, stop=checkpoint, orderer=reverse_order)
        keeper = PlanKeeper.open(directory, new, make_decider, iteration=checkpoint,
                                 consumed=4 * checkpoint, mode="fork")
        keeper.close()
        said = [message for message in keeper.messages if "passed over" in message]
        expected = (f"d3 plan: {num_passed} samples are passed over: their units were decided for "
                    "later steps of a window than those trained")
        assert said == ([expected] if num_passed else [])
        cursors = PlanReader(directory).plan.generations[1].cursors
        assert sum(cursors) == 4 * checkpoint + num_passed


def test_a_fork_that_would_leave_too_few_samples_is_refused(tmp_path: Path) -> None:
    def capped(*budgets: int, exhausted: str = "redistribute") -> RunHeader:
        mix = {"type": "0.5,0.3,0.2", "max_samples": budgets, "exhausted": exhausted}
        plain = header(total=60)
        return replace(plain, config={**plain.config, "mix": mix})

    old = with_order(header(total=60, mix="0.5,0.3,0.2"), 5)
    train(tmp_path / "d3", old, stop=6, orderer=reverse_order)  # the last unit of its window
    before = files_of(tmp_path / "d3")
    with pytest.raises(ResumeError, match=(
            r"a change inside a window passes over 16 samples; the run then needs 36 more, but "
            r"d3.mix.max_epochs leaves 35: load a checkpoint at the end of a window, raise")):
        train(tmp_path / "d3", capped(30, 25, 20), 6, mode="fork")
    assert files_of(tmp_path / "d3") == before
    assert not list((tmp_path / "d3").glob("abandoned-*"))
    for number, head in enumerate((capped(31, 25, 20), capped(9, 9, 9, exhausted="repeat"))):
        shutil.copytree(tmp_path / "d3", tmp_path / f"{number}")
        train(tmp_path / f"{number}", head, 6, mode="fork")
        assert len(draws(tmp_path / f"{number}")) == 60
    train(tmp_path / "d3", capped(25, 20, 15), 5, mode="fork")  # nothing is passed over there


def test_a_change_of_the_order_is_refused_without_fork(tmp_path: Path) -> None:
    train(tmp_path / "d3", HEADS["windows"], stop=5)
    for head, message in (
            (with_order(header(total=46), 5), r"made with order.length 4, now 5; keep the old value"),
            (header(total=46), r"made with order \{.*\}, now null; keep the old value"),
            (replace(HEADS["windows"], versions={"toy": 1, "solvers": 2}), None)):
        if message is None:  # the plan does not know it: nothing to compare with
            PlanKeeper.open(tmp_path / "d3", head, make_decider, iteration=5, consumed=20).close()
            continue
        with pytest.raises(ResumeError, match=message + r".*--d3-resume fork"):
            PlanKeeper.open(tmp_path / "d3", head, make_decider, iteration=5, consumed=20)
    train(tmp_path / "plain", header(total=46), stop=5)
    with pytest.raises(ResumeError, match=r"made with order null, now \{"):
        PlanKeeper.open(tmp_path / "plain", HEADS["windows"], make_decider, iteration=5, consumed=20)


def test_a_fork_can_be_taken_back(tmp_path: Path) -> None:
    head = HEADS["windows"]
    train(tmp_path / "whole", head)
    for checkpoint in range(1, 6):
        directory = tmp_path / f"{checkpoint}"
        train(directory, head, stop=6)
        train(directory, with_order(head, 3), 6, 8, mode="fork")
        train(directory, head, checkpoint)
        assert files_of(directory) == files_of(tmp_path / "whole")


def test_another_order_search_keeps_what_can_be_replayed(tmp_path: Path) -> None:
    """A new solver is refused by its version, but the plan can still be computed again."""
    old = replace(HEADS["windows"], versions={"toy": 1, "windows": 1, "solvers": 1})
    new = replace(old, versions={"toy": 1, "windows": 1, "solvers": 2})
    train(tmp_path / "d3", old, stop=6)
    with pytest.raises(ResumeError, match=r"made with versions.solvers 1, now 2; use the Megatron-D3"):
        train(tmp_path / "d3", new, 6)
    train(tmp_path / "d3", new, 6, mode="fork")
    assert audit(tmp_path / "d3", make_decider).is_sound


@pytest.mark.parametrize("name", ["windows", "overlap"])
def test_another_version_of_windows_goes_on_by_fork(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old windows cannot be computed again: what was drawn is read from the files."""
    old = replace(HEADS[name], versions={"windows": draft.VERSION})
    for checkpoint in range(1, 10):
        with monkeypatch.context() as patch:
            directory = tmp_path / f"{checkpoint}"
            train(directory, old, stop=checkpoint)
            patch.setattr(draft, "VERSION", draft.VERSION + 1)
            new = replace(old, versions={"windows": draft.VERSION})
            with pytest.raises(ResumeError, match=r"made with versions.windows 1, now 2"):
                train(directory, new, checkpoint)
            with pytest.raises(ResumeError, match=r"decided by version 1 of windows, this is 2"):
                train(directory, old, checkpoint)
            train(directory, new, checkpoint, mode="fork")
            records = draws(directory)
            assert len(np.unique(records)) == len(records) == 46


def test_a_domain_that_rests_keeps_its_cursor_through_another_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = replace(HEADS["windows"], versions={"windows": draft.VERSION})
    resting = replace(old, config={**old.config, "mix": {"type": "0,0.5,0.5"}})
    train(tmp_path / "d3", old, stop=4)
    train(tmp_path / "d3", resting, 4, 7, mode="fork")
    monkeypatch.setattr(draft, "VERSION", draft.VERSION + 1)
    train(tmp_path / "d3", replace(old, versions={"windows": draft.VERSION}), 7, mode="fork")
    records = draws(tmp_path / "d3")
    assert len(np.unique(records)) == len(records) == 46
    cursors = [generation.cursors[0] for generation in PlanReader(tmp_path / "d3").plan.generations]
    assert cursors[0] == 0 and cursors[1] == cursors[2] > 0


# --- every mixer -----------------------------------------------------------------------------------

MIXES = {
    "static": {"weights": {"a": 0.5, "b": 0.3, "c": 0.2}},
    "natural": {},
    "temperature": {"temperature": 2},
    "unimax": {"max_epochs": 2},
    "schedule": {"interpolation": "linear", "knots": [
        [0, {"a": 1, "b": 0, "c": 0}], [8, {"a": 0, "b": 0.5, "c": 0.5}]]},
    "doremi": {"losses": "/losses"},
    "odm": {},
    "ado": {},
    "reference_loss": {"losses": {"a": 1.0, "b": 1.5, "c": 2.0}},
}


class ExcessTrainer(Trainer):
    """Measures an excess over a reference too, for DoReMi."""

    def measure(self, step: int, records: np.ndarray, table_ids: object) -> StepSignals:
        signals = losses_of(step, records, table_ids)  # type: ignore[arg-type]
        return replace(signals, excess_sums=0.5 * signals.loss_sums)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", MIXERS)
def test_every_mixer_runs_resumes_and_is_audited_with_windows(
    tmp_path: Path, name: str, overlap: bool
) -> None:
    config = parse_config({
        "domains": {"a": "x/a", "b": "x/b", "c": "x/c"}, "mix": {"type": name, **MIXES[name]},
        "order": {"type": "d3", "window": 5, "overlap": overlap}}, folder=Path("/corpora"))
    head = header(sizes=(40, 20, 10), total=48, config=config.to_dict(), read_ahead_steps=2,
                  versions={name: MIXERS[name].VERSION})  # type: ignore[attr-defined]

    def run(folder: str, *args: int, **options: int) -> None:
        ExcessTrainer(tmp_path / folder, head, factory=decider_factory(), orderer=random_order).run(
            *args, **options)

    run("whole")
    run("d3", stop_at=8)
    run("d3", 4, 16, stop_at=7)
    run("d3", 7, 28)
    assert files_of(tmp_path / "d3") == files_of(tmp_path / "whole")
    result = audit(tmp_path / "d3", decider_factory())
    assert result.is_sound, result.findings
    records = draws(tmp_path / "d3")
    assert len(np.unique(records)) == len(records) == 48


# --- audit -----------------------------------------------------------------------------------------


def rewrite_rows(directory: Path, change: Callable[[list[dict[str, object]]], None]) -> None:
    path = directory / "rounds.jsonl"
    rows = [json.loads(line) for line in path.read_bytes().splitlines()]
    change(rows)
    path.write_bytes(b"".join(
        json.dumps(row, separators=(",", ":")).encode() + b"\n" for row in rows))


def set_units(*units: int | None) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        def change(rows: list[dict[str, object]]) -> None:
            for row, unit in zip(rows[4:8], units, strict=True):
                row["unit"] = unit
        rewrite_rows(directory, change)
    return damage


def swap_positions(directory: Path) -> None:
    """Exchange two samples of different units of one window."""
    records = np.fromfile(directory / "positions.bin", RECORD)
    records[[17, 21]] = records[[21, 17]]
    records.tofile(directory / "positions.bin")


def set_iteration(directory: Path) -> None:
    rewrite_rows(directory, lambda rows: rows[5].update(iteration=3))


def drop_unit(directory: Path) -> None:
    rewrite_rows(directory, lambda rows: rows[4].pop("unit") and None)


def drop_last_row(directory: Path) -> None:
    def change(rows: list[dict[str, object]]) -> None:
        del rows[10:]
    rewrite_rows(directory, change)


# Rounds 4-7 of this run hold the units 3, 2, 1, 0.
DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "two units exchanged": (set_units(3, 1, 2, 0),
                            r"round 5 \(positions 20-23\): hash .* in rounds.jsonl, .* again"),
    "a unit twice": (set_units(3, 2, 2, 0), (
        r"rounds 4-7 \(steps 4-7\): a window of 4 units, but rounds.jsonl has the order "
        r"\[3, 2, 2, 0\]: not each unit once")),
    "a unit too large": (set_units(3, 2, 1, 4), r"the order \[3, 2, 1, 4\]: not each unit once"),
    "no unit": (drop_unit, r"the order \[None, 2, 1, 0\]: not each unit once"),
    "another iteration": (set_iteration, (
        r"rounds 4-7 \(steps 4-7\): a window, decided at iteration 2, but rounds.jsonl says 3 at "
        r"round 5")),
    "two samples exchanged": (swap_positions, r"position 17 \(round 4\): positions.bin has"),
    "rows missing": (drop_last_row, (
        r"rounds 8-10 \(steps 8-10\): a window of which rounds.jsonl has 2 of 3 rows: its end is "
        r"missing, or the run was killed while writing \(a resume sets that aside\)")),
}


@pytest.fixture(scope="module")
def reversed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("reversed") / "d3"
    train(directory, HEADS["windows"], orderer=reverse_order)
    return directory


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_and_named(tmp_path: Path, reversed_run: Path, name: str) -> None:
    damage, message = DAMAGE[name]
    shutil.copytree(reversed_run, tmp_path / "d3")
    damage(tmp_path / "d3")
    findings = audit(tmp_path / "d3", make_decider).findings
    assert any(re.search(message, finding) for finding in findings), findings
    shutil.rmtree(tmp_path / "d3/state")
    with pytest.raises(ResumeError, match="restore it from a backup"):
        train(tmp_path / "d3", HEADS["windows"], 9)


def test_a_run_without_windows_may_have_no_units(tmp_path: Path) -> None:
    train(tmp_path / "d3", header(total=46))
    rewrite_rows(tmp_path / "d3", lambda rows: rows[3].update(unit=0))
    findings = audit(tmp_path / "d3", make_decider).findings
    assert any("round 3 (positions 12-15): unit 0 in rounds.jsonl, None when computed again" in f
               for f in findings), findings


def test_a_window_after_the_end_is_found(tmp_path: Path, reversed_run: Path) -> None:
    shutil.copytree(reversed_run, tmp_path / "d3")
    rewrite_rows(tmp_path / "d3", lambda rows: rows.append({
        **rows[-1], "round": 12, "start": 46, "stop": 48}))
    findings = audit(tmp_path / "d3", make_decider).findings
    assert "round 12 should not exist: the plan is complete before it" in findings


def test_a_generation_that_gives_samples_again_is_found(tmp_path: Path) -> None:
    train(tmp_path / "d3", HEADS["windows"], stop=6, orderer=reverse_order)
    train(tmp_path / "d3", header(total=46), 6, mode="fork", orderer=reverse_order)
    path = tmp_path / "d3/plan.json"
    plan = json.loads(path.read_text())
    plan["generations"][1]["cursors"][0] -= 1
    path.write_text(json.dumps(plan))
    findings = audit(tmp_path / "d3", make_decider).findings
    assert any("its cursors or ids are not those that the plan leads to" in f for f in findings)


def test_going_back_too_far_is_found_although_the_replay_agrees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if units of the window's rest were given back although later ones were trained."""
    monkeypatch.setattr(draft, "rewind", lambda state, made, units, position: replace(
        state, position=position))
    train(tmp_path / "d3", HEADS["windows"], stop=6, orderer=reverse_order)
    train(tmp_path / "d3", header(total=46), 6, mode="fork", orderer=reverse_order)
    findings = audit(tmp_path / "d3", make_decider).findings
    assert re.search(r"generation 1 \(from position 24\): draws a again from \d+ on, which was trained "
                     r"on before", findings[0])


@pytest.mark.parametrize(("shift", "message"), [
    (1, r"round 3: its window ends before . \d+, but a sample drawn earlier is missing"),
    (-1, r"position \d+ \(round \d\): . \d+ was drawn before")])
def test_a_decider_that_loses_or_repeats_samples_is_found(
    tmp_path: Path, shift: int, message: str
) -> None:
    """The count of draws does not trust the replay."""
    class Shifted(Decider):
        def decide(self, state, *, limit=None):  # type: ignore[no-untyped-def]
            decided = super().decide(state, limit=limit)
            return decided and (replace(decided[0], cursors=decided[0].cursors + shift), decided[1])

    def make(head: RunHeader, ids: tuple[int, ...]) -> Decider:
        return Shifted(**vars(make_decider(head, ids)))

    keeper = PlanKeeper.open(tmp_path / "d3", HEADS["windows"], make)
    keeper.advance(32, random_order)
    keeper.close()
    assert re.search(message, audit(tmp_path / "d3", make).findings[0])


def test_an_orderer_that_is_no_permutation_leaves_the_plan_as_it_was(tmp_path: Path) -> None:
    keeper = PlanKeeper.open(tmp_path / "d3", HEADS["windows"], make_decider)
    keeper.advance(1, random_order)
    before = files_of(tmp_path / "d3")
    with pytest.raises(PlanError, match="expected a permutation of 0 to 3"):
        keeper.advance(17, lambda draft: np.zeros(draft.num_units, int))
    keeper.close()
    assert files_of(tmp_path / "d3") == before


def test_two_orders_part_where_the_units_do(tmp_path: Path) -> None:
    for name, orderer in (("a", stored_order), ("b", reverse_order)):
        train(tmp_path / name, HEADS["windows"], orderer=orderer)
    parting = compare(PlanReader(tmp_path / "a"), PlanReader(tmp_path / "b"))
    assert parting is not None and parting.position == 0
    assert "round 0: unit 0 in A, 3 in B" in parting.reasons


def test_a_power_failure_loses_no_more_than_the_rows_vouch_for(tmp_path: Path) -> None:
    head = HEADS["windows"]
    train(tmp_path / "whole", head)
    train(tmp_path / "d3", head, stop=9)
    os.truncate(tmp_path / "d3/positions.bin", 10 * 17 + 3)
    train(tmp_path / "d3", head, 9)
    assert files_of(tmp_path / "d3") == files_of(tmp_path / "whole")
