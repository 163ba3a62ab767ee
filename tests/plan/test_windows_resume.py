"""Runs with windows: killed, resumed, forked inside a window, audited."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest

from megatron_d3.config import parse_config
from megatron_d3.errors import ResumeError
from megatron_d3.mix import MIXERS
from megatron_d3.plan.audit import audit
from megatron_d3.plan.batch_schedule import BatchSchedule
from megatron_d3.plan.draft import Orderer, stored_order
from megatron_d3.plan.header import RunHeader
from megatron_d3.plan.keeper import PlanFollower, PlanKeeper
from megatron_d3.plan.reader import PlanReader
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


def test_a_power_failure_loses_no_more_than_the_rows_vouch_for(tmp_path: Path) -> None:
    head = HEADS["windows"]
    train(tmp_path / "whole", head)
    train(tmp_path / "d3", head, stop=9)
    os.truncate(tmp_path / "d3/positions.bin", 10 * 17 + 3)
    train(tmp_path / "d3", head, 9)
    assert files_of(tmp_path / "d3") == files_of(tmp_path / "whole")


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


@pytest.mark.parametrize("value", [None, 0.5])
def test_a_plan_that_holds_a_key_that_is_no_more_goes_on(
    tmp_path: Path, value: float | None
) -> None:
    """With a value that key acted on the orders, so that going on without it needs a fork."""
    config = parse_config({
        "domains": {"a": "x/a", "b": "x/b"}, "mix": {"type": "natural"},
        "order": {"type": "d3", "window": 5}}, folder=Path("/corpora")).to_dict()
    now = header(sizes=(40, 20), total=48, config=config, read_ahead_steps=2)
    before = replace(now, config=config | {"order": config["order"] | {"min_reliability": value}})

    def run(folder: str, head: RunHeader, *args: int, **options: object) -> None:
        Trainer(tmp_path / folder, head, factory=decider_factory(), orderer=random_order).run(
            *args, **options)  # type: ignore[arg-type]

    run("whole", now)
    run("d3", before, stop_at=8)
    if value is not None:
        with pytest.raises(ResumeError, match=r"made with order\.min_reliability 0\.5, now null"):
            run("d3", now, 5, 20)
    run("d3", now, 5, 20, mode="fork" if value else "strict")
    assert audit(tmp_path / "d3", decider_factory()).is_sound
    if value is None:
        np.testing.assert_array_equal(draws(tmp_path / "d3"), draws(tmp_path / "whole"))
