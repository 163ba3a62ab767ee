"""The units after a checkpoint, drawn without touching the plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_d3.errors import ConfigError, ResumeError
from megatron_d3.plan.batch_schedule import BatchSchedule
from megatron_d3.plan.header import RunHeader
from megatron_d3.plan.next_units import next_units
from megatron_d3.plan.reach import Checkpoint
from megatron_d3.plan.reader import PlanReader
from tests.plan_helpers import Trainer, files_of, header, make_decider, reverse_order

FIXED = header(mix="0.5,0.3,0.2")
AT_6 = Checkpoint(6, 24)


def with_order(head: RunHeader, *, overlap: bool = False) -> RunHeader:
    return replace(head, config={**head.config, "order": {"length": 4, "overlap": overlap}})


def train(directory: Path, head: RunHeader, *, stop_at: int | None = None) -> None:
    Trainer(directory, head, orderer=reverse_order, read_ahead=0).run(stop_at=stop_at)


def records(directory: Path, start: int, stop: int) -> list[list[list[int]]]:
    found = np.array(PlanReader(directory).positions(start, stop)).reshape(-1, 4)
    return [[list(record) for record in unit] for unit in found.tolist()]


@pytest.mark.parametrize("directory", ["plan", "beside"])
def test_units_are_those_that_the_run_trained_on_next(tmp_path: Path, directory: str) -> None:
    path = tmp_path / directory
    train(path, FIXED)
    before = files_of(path)
    found = next_units([tmp_path / "plan", tmp_path / "beside"], FIXED, make_decider,
                       checkpoint=AT_6, num_units=5)
    assert [[list(r) for r in unit] for unit in found.records.tolist()] == records(path, 24, 44)
    assert (found.plan, found.table_ids) == (path, (0, 1, 2))
    assert files_of(path) == before


def test_inside_a_window_its_rest_comes_first(tmp_path: Path) -> None:
    head = with_order(FIXED)
    train(tmp_path, head)
    found = next_units([tmp_path], head, make_decider, checkpoint=AT_6, num_units=6)
    drawn = [[list(r) for r in unit] for unit in found.records.tolist()]
    assert drawn[:2] == records(tmp_path, 24, 32)  # the order of this window is decided
    assert drawn[2:] == records(tmp_path, 32, 48)[::-1]  # of the next one it is not


def test_pending_units_come_before_new_ones(tmp_path: Path) -> None:
    head = with_order(FIXED, overlap=True)
    train(tmp_path, head, stop_at=6)
    found = next_units([tmp_path], head, make_decider, checkpoint=AT_6, num_units=18)
    drawn = found.records.reshape(-1)
    trained = np.array(PlanReader(tmp_path).positions(0, 24))
    for number in range(3):  # no sample twice, none left out
        samples = [*trained["sample"][trained["domain"] == number],
                   *drawn["sample"][drawn["domain"] == number]]
        assert sorted(samples) == list(range(len(samples)))


def test_another_configuration_continues_from_the_same_cursors(tmp_path: Path) -> None:
    train(tmp_path, FIXED)
    found = next_units([tmp_path], with_order(header(mix="0,0,1")), make_decider,
                       checkpoint=AT_6, num_units=3)
    past = np.array(PlanReader(tmp_path).positions(0, 24))
    first = int((past["domain"] == 2).sum())
    assert found.records["domain"].tolist() == [[2] * 4] * 3
    assert found.records["sample"].reshape(-1).tolist() == list(range(first, first + 12))
    assert any("mix.type" in message for message in found.messages)


def test_without_a_plan_what_the_run_consumed_is_passed_over(tmp_path: Path) -> None:
    train(tmp_path / "plan", FIXED)
    found = next_units([tmp_path / "none"], FIXED, make_decider, checkpoint=AT_6, num_units=5)
    assert [[list(r) for r in unit] for unit in found.records.tolist()] == records(
        tmp_path / "plan", 24, 44)
    assert (found.plan, found.messages) == (None, ())
    assert not (tmp_path / "none").exists()


def test_long_rounds_are_cut_into_units() -> None:
    long = replace(FIXED, config={**FIXED.config, "round_steps": 4})
    found, short = (next_units([], head, make_decider, checkpoint=AT_6, num_units=5)
                    for head in (long, FIXED))
    np.testing.assert_array_equal(found.records, short.records)


@pytest.mark.parametrize(("head", "message"), [
    (FIXED, "--units: got 19, but the run has 18 global batches left at iteration 6"),
    (replace(FIXED, batch_schedule=BatchSchedule(((0, 4), (40, 8)))),
     "--units: got 19, but the run has 11 global batches left"),
    (replace(FIXED, batch_schedule=BatchSchedule(((0, 4), (40, 8))), total_samples=400),
     "the global batch of 4 samples changes after 4 steps, .* expected at most 4"),
    (replace(FIXED, total_samples=400, config={
        **FIXED.config, "mix": {"type": "0,0,1", "max_samples": [9, 9, 44], "exhausted": "stop"}}),
     "--units: got 19, but the run has 5 global batches left"),
], ids=["end", "end-of-larger-batches", "another-size", "exhausted"])
def test_what_cannot_be_had_is_refused(head: RunHeader, message: str) -> None:
    head = replace(head, config={**head.config, "mix": {"type": "0,0,1", **head.config["mix"]}})
    with pytest.raises(ConfigError, match=message):
        next_units([], head, make_decider, checkpoint=AT_6, num_units=19)


def test_a_checkpoint_of_another_run_is_refused_by_the_plans_own_name(tmp_path: Path) -> None:
    train(tmp_path, FIXED)
    with pytest.raises(ResumeError, match=f"plan {tmp_path}: had consumed 24 samples"):
        next_units([tmp_path], FIXED, make_decider, checkpoint=Checkpoint(6, 48), num_units=3)
