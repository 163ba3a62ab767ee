"""Settings that change inside a window: no sample twice, and the log says what is passed over."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_d3.errors import ResumeError
from megatron_d3.plan import draft
from megatron_d3.plan.audit import audit
from megatron_d3.plan.batch_schedule import BatchSchedule
from megatron_d3.plan.header import RunHeader
from megatron_d3.plan.keeper import PlanKeeper
from megatron_d3.plan.reader import PlanReader
from tests.plan.test_windows_resume import HEADS, draws, train, with_order
from tests.plan_helpers import (
    Trainer,
    domains,
    files_of,
    header,
    make_decider,
    random_order,
    reverse_order,
)

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
