"""Progress of a run, followed through its plan."""

from __future__ import annotations

import io
import time
from pathlib import Path

import numpy as np
import pytest

from megatron_d3.cli import progress
from megatron_d3.plan.batch_schedule import BatchSchedule
from megatron_d3.plan.keeper import PlanKeeper
from megatron_d3.plan.reader import PlanReader
from megatron_d3.types import StepSignals
from tests.plan_helpers import header, make_decider


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def train(keeper: PlanKeeper, iteration: int, loss: float) -> None:
    keeper.advance(4 * iteration)
    tokens = np.array([8, 8, 16])
    keeper.observe(StepSignals(iteration, 4 * iteration, loss * tokens, tokens, False))


def test_lines_where_nobody_watches(tmp_path: Path, clock: Clock) -> None:
    out = io.StringIO()
    follower = progress.Progress("toy", tmp_path / "d3", out)
    clock.now += 20
    follower.poll()
    keeper = PlanKeeper.open(tmp_path / "d3", header(total=16), make_decider)
    follower.poll()
    train(keeper, 1, 4.0)
    clock.now += 2
    follower.poll()
    train(keeper, 2, 3.0)
    clock.now += 13
    follower.poll()
    train(keeper, 3, 2.0)
    train(keeper, 4, 2.0)
    clock.now += 15
    follower.poll()
    keeper.close()
    follower.finish()
    assert out.getvalue().splitlines() == [
        "toy       starting, 20 s",
        "toy       step 2/4  loss 3.500  13.00 s/step  0:26 left",
        "toy       step 4/4  loss 3.000  9.33 s/step  evaluating and saving",
        "toy       step 4/4  loss 3.000  9.33 s/step  took 0:50",
    ]


def test_a_bar_on_a_terminal(tmp_path: Path, clock: Clock) -> None:
    out = Terminal()
    keeper = PlanKeeper.open(tmp_path / "d3", header(total=16), make_decider)
    follower = progress.Progress("toy", tmp_path / "d3", out)
    follower.poll()
    train(keeper, 1, 4.0)
    train(keeper, 2, 3.0)
    follower.poll()
    follower.abandon()
    keeper.close()
    assert out.getvalue().split("\r") == [
        "",
        "toy       [------------------------] starting, 0 s",
        "toy       [############------------] step 2/4  loss 3.000\n",
    ]


def test_steps_of_an_earlier_process_do_not_count_as_pace(tmp_path: Path, clock: Clock) -> None:
    keeper = PlanKeeper.open(tmp_path / "d3", header(total=96), make_decider)
    for iteration in range(1, 6):
        train(keeper, iteration, 4.0)
    keeper.close()
    out = io.StringIO()
    follower = progress.Progress("toy", tmp_path / "d3", out)
    clock.now += 16
    follower.poll()  # the resume has not cut the ledger yet
    keeper = PlanKeeper.open(
        tmp_path / "d3", header(total=96), make_decider, iteration=3, consumed=12)
    clock.now += 16
    follower.poll()
    for iteration in (4, 5, 6):
        clock.now += 16
        train(keeper, iteration, 2.0)
        follower.poll()
    keeper.close()
    assert out.getvalue().splitlines() == [
        "toy       starting, 16 s",
        "toy       starting, 32 s",
        "toy       step 4/24  loss 2.000",
        "toy       step 5/24  loss 2.000  16.00 s/step  5:04 left",
        "toy       step 6/24  loss 2.000  16.00 s/step  4:48 left",
    ]


def test_a_damaged_plan_does_not_stop_the_run_it_watches(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "plan.json").write_text("{")
    out = io.StringIO()
    clock.now += 20
    follower = progress.Progress("toy", tmp_path, out)
    clock.now += 20
    follower.poll()
    assert out.getvalue() == "toy       starting, 20 s\n"


@pytest.mark.parametrize("steps", [((0, 4),), ((0, 2), (7, 5), (90, 1))])
def test_steps_of_the_whole_run_follow_the_batch_schedule(
    tmp_path: Path, steps: tuple[tuple[int, int], ...]
) -> None:
    schedule = BatchSchedule(steps)
    keeper = PlanKeeper.open(
        tmp_path / "d3", header(total=96, batch_schedule=schedule), make_decider)
    consumed = expected = 0
    while consumed < 96:
        consumed += schedule.size_at(consumed)
        expected += 1
    assert progress._num_steps(PlanReader(tmp_path / "d3")) == expected
    keeper.close()
