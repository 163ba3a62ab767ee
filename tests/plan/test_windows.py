"""`windows.jsonl` and `windows/*.npz`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_d3.errors import PlanError
from megatron_d3.plan.audit import audit
from megatron_d3.plan.draft import Draft
from megatron_d3.plan.header import RunHeader
from megatron_d3.plan.keeper import PlanKeeper, copy_plan
from megatron_d3.plan.reader import PlanReader
from megatron_d3.plan.windows import (
    WindowRow,
    WindowsUse,
    arrays_path,
    read_arrays,
    read_windows,
    summarise_windows,
)
from tests.plan_helpers import (
    files_of,
    header,
    losses_of,
    make_decider,
    reverse_order,
)

HEAD = replace(header(total=40), config={
    **header(total=40).config, "order": {"length": 4, "overlap": False}})


def row(number: int = 0, **changes: object) -> WindowRow:
    made = WindowRow(
        round=number, iteration=2, step=number, num_units=4,
        cost={"found": 0.25, "row_sum": 0.5, "stored": 1.0}, curl=0.5, reliability=0.75,
        expected_agreement=0.875, seconds={"gradients": 1.5})
    return replace(made, **changes)  # type: ignore[arg-type]


def train(
    directory: Path, iteration: int = 0, *, stop: int = 10, head: RunHeader = HEAD,
    is_noted_first: bool = True,
) -> None:
    """Steps of 4 samples, no read-ahead; each window is noted."""
    keeper = PlanKeeper.open(directory, head, make_decider, iteration=iteration,
                             consumed=4 * iteration, mode="fork", snapshot_every=4)
    noted: list[WindowRow] = []

    def orderer(draft: Draft) -> np.ndarray:
        order = reverse_order(draft)
        noted.append(row(draft.round, iteration=draft.iteration, num_units=draft.num_units))
        if is_noted_first:
            keeper.note_window(noted[-1], {"order": order, "advantage": np.eye(draft.num_units)})
        return order

    for step in range(iteration, stop):
        keeper.advance(4 * step + 4, orderer)
        if not is_noted_first and noted:
            keeper.note_window(noted.pop(), {})
        records = keeper.positions(4 * step, 4 * step + 4)
        signals = losses_of(step, records, keeper.decider.table_ids)
        keeper.observe(replace(signals, consumed=4 * step + 4))
    keeper.close()


def test_a_row_round_trips() -> None:
    full = row(reason="reliability 0.1 is below 0.5", details={"bad_units": [3], "curl": {"x": 1}})
    assert WindowRow.from_line(full.to_body()) == full
    assert json.loads(full.to_body())["cost"] == {"found": 0.25, "row_sum": 0.5, "stored": 1.0}
    assert WindowRow.from_line(  # as they were written before there was an expected agreement
        full.to_body().replace(b'"expected_agreement":0.875,', b"")
    ) == replace(full, expected_agreement=None)
    least = WindowRow(5, 2, 5, 3)
    assert WindowRow.from_line(least.to_body()) == least


def test_what_is_not_finite_becomes_null() -> None:
    odd = row(cost={"found": np.float64("nan"), "stored": np.float32(0.5)}, curl=float("inf"),
              details={"losses": [np.nan, np.int64(3)], "shape": (2, 2)})
    back = json.loads(odd.to_body())
    assert back["cost"] == {"found": None, "stored": 0.5} and back["curl"] is None
    assert back["details"] == {"losses": [None, 3], "shape": [2, 2]}


def test_a_run_notes_its_windows(tmp_path: Path) -> None:
    train(tmp_path / "d3")
    reader = PlanReader(tmp_path / "d3")
    rows = [found for found, _, _ in reader.windows()]
    assert [(r.round, r.iteration, r.num_units) for r in rows] == [(0, 0, 4), (4, 4, 4), (8, 8, 2)]
    assert read_arrays(tmp_path / "d3", 8)["order"].tolist() == [1, 0]
    assert read_arrays(tmp_path / "d3", 4)["advantage"].shape == (4, 4)
    assert arrays_path(tmp_path / "d3", 4).name == "00000004.npz"
    result = audit(tmp_path / "d3", make_decider)
    assert result.is_sound, result.findings


@pytest.mark.parametrize("checkpoint", range(1, 10))
@pytest.mark.parametrize("is_noted_first", [True, False])
def test_a_resume_sets_aside_the_windows_it_drops(
    tmp_path: Path, checkpoint: int, is_noted_first: bool
) -> None:
    train(tmp_path / "whole", is_noted_first=is_noted_first)
    train(tmp_path / "stopped", stop=checkpoint, is_noted_first=is_noted_first)
    train(tmp_path / "d3", is_noted_first=is_noted_first)
    before = files_of(tmp_path / "d3")
    PlanKeeper.open(tmp_path / "d3", HEAD, make_decider, iteration=checkpoint,
                    consumed=4 * checkpoint).close()
    kept = files_of(tmp_path / "d3")
    assert kept == files_of(tmp_path / "stopped")
    aside = files_of(tmp_path / "d3/abandoned-0001")
    for name in before:  # nothing is lost
        if name != "plan.json":
            assert kept.get(name, b"") + aside.get(name, b"") == before[name]
    train(tmp_path / "d3", checkpoint, is_noted_first=is_noted_first)
    assert files_of(tmp_path / "d3") == before == files_of(tmp_path / "whole")


def test_a_start_over_leaves_no_windows(tmp_path: Path) -> None:
    train(tmp_path / "d3", stop=5)
    plain = header(total=40)
    train(tmp_path / "d3", head=plain)
    train(tmp_path / "plain", head=plain)
    assert files_of(tmp_path / "d3") == files_of(tmp_path / "plain")
    assert sum(1 for _ in read_windows(tmp_path / "d3/abandoned-0001")) == 2
    assert read_arrays(tmp_path / "d3/abandoned-0001", 4)["order"].tolist() == [3, 2, 1, 0]


def test_a_torn_row_does_not_count_and_is_set_aside(tmp_path: Path) -> None:
    train(tmp_path / "whole")
    train(tmp_path / "d3", stop=9)
    path = tmp_path / "d3/windows.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    assert len(list(PlanReader(tmp_path / "d3").windows())) == 2
    findings = audit(tmp_path / "d3", make_decider).findings
    assert findings == (("windows.jsonl: its last row is torn: the run was killed while writing (a "
                         "resume sets it aside)"),)
    train(tmp_path / "d3", 8)
    assert files_of(tmp_path / "d3") == files_of(tmp_path / "whole")


def test_a_changed_row_is_found(tmp_path: Path) -> None:
    train(tmp_path / "d3")
    path = tmp_path / "d3/windows.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"found":0.25', b'"found":0.15', 1))
    findings = audit(tmp_path / "d3", make_decider).findings
    assert findings == (("windows.jsonl: the row of iteration 0 was changed, or rows before it are "
                         "missing"),)
    path.write_bytes(b"[]\n")
    assert "windows.jsonl: damaged row b'[]" in audit(tmp_path / "d3", make_decider).findings[0]
    with pytest.raises(PlanError, match=r"windows.jsonl: damaged row"):
        list(read_windows(tmp_path / "d3"))


def test_arrays_that_are_not_there_or_damaged_are_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"no window with arrays begins with round 3; the plan has "
                                        r"none"):
        read_arrays(tmp_path, 3)
    train(tmp_path / "d3")
    with pytest.raises(PlanError, match=r"begins with round 3, the nearest with 4"):
        read_arrays(tmp_path / "d3", 3)
    arrays_path(tmp_path / "d3", 4).write_bytes(b"PK nonsense")
    with pytest.raises(PlanError, match=r"00000004.npz: cannot be read .*; move it away, training"):
        read_arrays(tmp_path / "d3", 4)


def test_windows_that_cannot_be_written_stop_the_run_with_a_reason(tmp_path: Path) -> None:
    keeper = PlanKeeper.open(tmp_path / "d3", HEAD, make_decider)
    (tmp_path / "d3/windows").write_bytes(b"")
    with pytest.raises(PlanError, match=r"windows: cannot make the plan: File exists"):
        keeper.note_window(row(), {"order": np.arange(4)})
    keeper.close()


def test_a_copy_takes_the_windows_along(tmp_path: Path) -> None:
    train(tmp_path / "old", stop=7)
    assert copy_plan(tmp_path / "old", tmp_path / "new")
    assert files_of(tmp_path / "new").keys() | {"lock"} == files_of(tmp_path / "old").keys()
    train(tmp_path / "new", 7)
    train(tmp_path / "whole")
    assert files_of(tmp_path / "new") == files_of(tmp_path / "whole")


def test_half_written_arrays_are_removed(tmp_path: Path) -> None:
    train(tmp_path / "d3", stop=5)
    stray = tmp_path / "d3/windows/00000008.npz.tmp"
    stray.write_bytes(b"half")
    train(tmp_path / "d3", 5)
    assert not stray.exists()


def test_the_summary_is_of_what_was_measured(tmp_path: Path) -> None:
    train(tmp_path / "d3", stop=1)
    assert summarise_windows(tmp_path) is None
    keeper = PlanKeeper.open(tmp_path / "d3", HEAD, make_decider, iteration=1, consumed=4)
    keeper.note_window(row(4, cost={"found": 0.75}, curl=None, reason="noise"), {})
    keeper.note_window(WindowRow(8, 8, 8, 2, reason="a unit is not finite"), {})
    keeper.close()
    assert summarise_windows(tmp_path / "d3") == WindowsUse(
        num_windows=3, num_stored=2, cost={"found": 0.5, "row_sum": 0.5, "stored": 1.0}, curl=0.5,
        reliability=0.75, expected_agreement=0.875)
