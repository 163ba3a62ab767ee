"""An audit finds what was changed in a plan with windows."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_d3.errors import PlanError, ResumeError
from megatron_d3.plan import draft
from megatron_d3.plan.audit import audit
from megatron_d3.plan.compare import compare
from megatron_d3.plan.decide import Decider
from megatron_d3.plan.draft import stored_order
from megatron_d3.plan.header import RunHeader
from megatron_d3.plan.keeper import PlanKeeper
from megatron_d3.plan.reader import PlanReader
from megatron_d3.plan.segment import RECORD
from tests.plan.test_windows_resume import HEADS, train
from tests.plan_helpers import (
    files_of,
    header,
    make_decider,
    random_order,
    reverse_order,
)


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
