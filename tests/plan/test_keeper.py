"""What the training loop calls."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_d3.errors import PlanError
from megatron_d3.plan.keeper import PlanFollower, PlanKeeper
from megatron_d3.plan.reader import PlanReader
from tests.plan_helpers import Trainer, files_of, header, losses_of, make_decider

HEAD = header(total=40)


def test_followers_compute_what_the_keeper_writes(tmp_path: Path) -> None:
    Trainer(tmp_path / "d3", HEAD).run(stop_at=3)
    keeper = PlanKeeper.open(tmp_path / "d3", HEAD, make_decider, iteration=3, consumed=12)
    arrays = {name: array.copy() for name, array in keeper.state_arrays().items()}
    follower = PlanFollower.from_arrays(HEAD, make_decider, arrays)
    for iteration in range(3, 10):
        one, two = keeper.advance(4 * iteration + 12), follower.advance(4 * iteration + 12)
        assert [s.records.tobytes() for s in one] == [s.records.tobytes() for s in two]
        assert keeper.chain == follower.chain
        signals = replace(losses_of(iteration, keeper.positions(4 * iteration, 4 * iteration + 4),
                                    keeper.decider.table_ids), consumed=4 * iteration + 4)
        keeper.observe(signals)
        follower.observe(signals)
    assert keeper.state.position == 40
    # A rank that measured something else comes apart, and the chain tells.
    follower = PlanFollower.from_arrays(HEAD, make_decider, arrays)
    follower.observe(replace(losses_of(3, keeper.positions(12, 16), (0, 1, 2)), consumed=16,
                             loss_sums=np.array([900.0, 0, 0])))
    follower.advance(40)
    assert keeper.chain != follower.chain


def test_advance_decides_only_what_is_asked_for(tmp_path: Path) -> None:
    keeper = PlanKeeper.open(tmp_path / "d3", HEAD, make_decider)
    assert [s.stop for s in keeper.advance(5)] == [4, 8]
    assert keeper.advance(8) == []
    assert [s.stop for s in keeper.advance(10**9)][-1] == 40
    assert keeper.advance(10**9) == []
    assert len(keeper.positions(33)) == 7
    with pytest.raises(PlanError, match="position 40 was asked for, decided are those below 40"):
        keeper.positions(39, 41)


def test_stop_leaves_the_frontier_behind(tmp_path: Path) -> None:
    head = replace(HEAD, config={**HEAD.config, "mix": {
        "type": "0.5,0.5,0", "max_samples": [5, 100, 100], "exhausted": "stop"}})
    keeper = PlanKeeper.open(tmp_path / "d3", head, make_decider)
    keeper.advance(40)
    assert keeper.state.position == 8


def test_steps_must_come_in_order(tmp_path: Path) -> None:
    keeper = PlanKeeper.open(tmp_path / "d3", HEAD, make_decider)
    signals = losses_of(0, np.zeros(0), (0, 1, 2))
    keeper.observe(signals)
    with pytest.raises(PlanError, match="training step 1 was observed after step 1"):
        keeper.observe(signals)
    assert len(list(PlanReader(tmp_path / "d3").ledger())) == 1


def test_evaluations_are_noted_at_the_present_iteration(tmp_path: Path) -> None:
    keeper = PlanKeeper.open(tmp_path / "d3", HEAD, make_decider)
    keeper.note_eval(np.array([1.0, np.nan, 0.0]), np.array([4, 4, 0]))
    keeper.note_eval(np.array([2.0, 1.0, 0.0]), np.array([4, 4, 0]), split="test")
    keeper.close()
    rows = [(row.iteration, row.split, dict(row.losses))
            for row, _, _ in PlanReader(tmp_path / "d3").evals()]
    assert rows == [(0, "valid", {"a": (1.0, 4), "b": (None, 4)}),
                    (0, "test", {"a": (2.0, 4), "b": (1.0, 4)})]


def test_a_plan_is_copied_from_beside_the_loaded_checkpoint(tmp_path: Path) -> None:
    Trainer(tmp_path / "old/d3", HEAD).run(stop_at=8)
    Trainer(tmp_path / "old/d3", HEAD).run(7, 28, stop_at=8)  # leaves an abandoned-0001
    before = files_of(tmp_path / "old/d3")
    directory = tmp_path / "new/d3"
    keeper = PlanKeeper.open(directory, HEAD, make_decider, iteration=6, consumed=24,
                             copy_from=tmp_path / "old/d3")
    keeper.close()
    assert files_of(tmp_path / "old/d3") == before
    Trainer(tmp_path / "whole", HEAD).run()
    Trainer(directory, HEAD).run(6, 24)
    assert files_of(directory) == files_of(tmp_path / "whole")
    # A plan that is there is not replaced.
    PlanKeeper.open(directory, HEAD, make_decider, iteration=10, consumed=40,
                    copy_from=tmp_path / "old/d3").close()
    assert files_of(directory) == files_of(tmp_path / "whole")


def test_nothing_to_copy_is_a_new_plan(tmp_path: Path) -> None:
    PlanKeeper.open(tmp_path / "d3", HEAD, make_decider, copy_from=tmp_path / "none").close()
    assert PlanReader(tmp_path / "d3").frontier == 0


def test_a_copy_does_not_go_over_other_files(tmp_path: Path) -> None:
    Trainer(tmp_path / "old", HEAD).run(stop_at=2)
    (tmp_path / "new").mkdir()
    (tmp_path / "new/mine").write_bytes(b"")
    with pytest.raises(PlanError, match="new: cannot copy the plan: Directory not empty"):
        PlanKeeper.open(tmp_path / "new", HEAD, make_decider, copy_from=tmp_path / "old")
