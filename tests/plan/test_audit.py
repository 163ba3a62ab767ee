"""An audit finds what was changed in a plan."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_d3.errors import PlanError
from megatron_d3.plan.audit import audit
from megatron_d3.plan.batch_schedule import BatchSchedule
from megatron_d3.plan.decide import Decider
from megatron_d3.plan.header import RunHeader
from megatron_d3.plan.keeper import PlanKeeper
from megatron_d3.plan.rows import NO_HASH, RoundRow, sealed
from megatron_d3.plan.segment import RECORD
from megatron_d3.plan.snapshot import Snapshot
from tests.plan_helpers import Trainer, domains, header, make_decider

HEAD = header(total=40)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sound") / "d3"
    Trainer(directory, HEAD).run()
    return directory


def test_a_sound_plan(sound: Path) -> None:
    result = audit(sound, make_decider)
    assert result.is_sound, result.findings
    assert (result.num_rounds, result.num_positions, result.num_steps, result.num_states) == (
        10, 40, 10, 2)


def test_plans_with_a_past_are_sound(tmp_path: Path) -> None:
    """Resumed, forked with other domains, another batch size, a snapshot on request."""
    directory = tmp_path / "d3"
    Trainer(directory, HEAD).run(stop_at=5)
    Trainer(directory, HEAD).run(3, 12, stop_at=6)
    head = replace(HEAD, domains=domains(100, 50, 20, 9)[1:], total_samples=64)
    Trainer(directory, head).run(5, 20, mode="fork", stop_at=8, snapshot_every=1)
    head = replace(head, batch_schedule=BatchSchedule.constant(3))
    Trainer(directory, head).run(7, 28, mode="fork", snapshot_every=2)
    result = audit(directory, make_decider)
    assert result.is_sound, result.findings
    assert result.num_positions == 64


def swap(directory: Path, one: int, two: int) -> None:
    records = np.fromfile(directory / "positions.bin", RECORD)
    records[[one, two]] = records[[two, one]]
    records.tofile(directory / "positions.bin")


def repeat(directory: Path) -> None:
    records = np.fromfile(directory / "positions.bin", RECORD)
    records["sample"][30] -= 1
    records.tofile(directory / "positions.bin")


def edit(name: str, old: bytes, new: bytes) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        content = (directory / name).read_bytes()
        assert old in content
        (directory / name).write_bytes(content.replace(old, new, 1))
    return damage


def cut_bytes(name: str, num_bytes: int) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        content = (directory / name).read_bytes()
        (directory / name).write_bytes(content[:-num_bytes])
    return damage


def cut_lines(name: str, *, keep: slice) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        lines = (directory / name).read_bytes().splitlines(keepends=True)
        (directory / name).write_bytes(b"".join(lines[keep]))
    return damage


def change_state(directory: Path) -> None:
    path = sorted((directory / "state").iterdir())[1]
    with np.load(path) as file:
        arrays = dict(file)
    arrays["carry"] = arrays["carry"] + 1e-12
    np.savez(path, **arrays)
    assert Snapshot(path).state


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "one swapped pair": (lambda d: swap(d, 20, 21),
                         r"position 20 \(round 5\): positions.bin has . \d+, expected . \d+"),
    "a pair swapped within a domain": (
        lambda d: swap(d, 0, 3), r"position 0 \(round 0\): positions.bin has a 1, expected a 0"),
    "a repeated sample": (repeat, r"position 30 \(round 7\): positions.bin has (.) \d+, expected \1"),
    "an unknown domain": (
        lambda d: (d / "positions.bin").write_bytes(
            b"\x09\0" + (d / "positions.bin").read_bytes()[2:]) and None,
        r"position 0 \(round 0\): positions.bin has unknown domain 9 0, expected a 0"),
    "a weight": (edit("rounds.jsonl", b'"weights":{"a":0.33', b'"weights":{"a":0.34'),
                 r"round 0 \(positions 0-3\): weights .* in rounds.jsonl, .* when computed again"),
    "a loss": (edit("ledger.jsonl", b'"consumed":16,"loss":{"a":[', b'"consumed":16,"loss":{"a":[1'),
               r"ledger.jsonl: the row of iteration 4 was changed"),
    "an evaluation": (edit("evals.jsonl", b'"iteration":10', b'"iteration":11'),
                      r"evals.jsonl: the row of iteration 11 was changed"),
    "when a round was decided": (edit("rounds.jsonl", b'"round":4,"iteration":2',
                                      b'"round":4,"iteration":3'),
                                 r"round 5 was decided at iteration 3|weights"),
    "the end of the positions": (cut_bytes("positions.bin", 25),
                                 r"position 37: positions.bin ends before it; its end is missing"),
    "the end of the rounds": (cut_lines("rounds.jsonl", keep=slice(None, -1)),
                              (r"rounds.jsonl: decides positions up to 35, but training has consumed "
                              r"40: its end is missing")),
    "the end of the ledger": (cut_lines("ledger.jsonl", keep=slice(None, 5)),
                              r"round 8 was decided at iteration 6, ledger.jsonl has rows up to 5"),
    "the middle of the ledger": (cut_lines("ledger.jsonl", keep=slice(1, None)),
                                 (r"round 3 was decided at iteration 1, ledger.jsonl has rows up to 0|"
                                 r"the row of iteration 2 was changed")),
    "a torn row": (cut_bytes("evals.jsonl", 3), r"evals.jsonl: its last row is torn"),
    "a stored state": (change_state, r"00000007-00000005.npz: not a state of this plan"),
    "a row that is none": (edit("rounds.jsonl", b'"round":4', b'"round":x'),
                           r"rounds.jsonl: damaged row"),
    "a foreign domain": (edit("ledger.jsonl", b'"a":[', b'"z":['), r"row of iteration 1 was changed"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_and_named(tmp_path: Path, sound: Path, name: str) -> None:
    damage, message = DAMAGE[name]
    shutil.copytree(sound, tmp_path / "d3")
    damage(tmp_path / "d3")
    result = audit(tmp_path / "d3", make_decider)
    assert any(re.search(message, finding) for finding in result.findings), result.findings


def test_every_single_byte_of_the_logs_is_covered(tmp_path: Path, sound: Path) -> None:
    """Change one byte after the other (every 7th, to save time); each is found."""
    shutil.copytree(sound, tmp_path / "d3")
    for name in ("positions.bin", "ledger.jsonl", "evals.jsonl"):
        content = (sound / name).read_bytes()
        for i in range(0, len(content), 7):
            changed = bytes([content[i] ^ 1])
            (tmp_path / "d3" / name).write_bytes(content[:i] + changed + content[i + 1:])
            assert not audit(tmp_path / "d3", make_decider).is_sound, (name, i)
        (tmp_path / "d3" / name).write_bytes(content)


def test_a_row_resealed_with_another_domain_is_found(tmp_path: Path, sound: Path) -> None:
    shutil.copytree(sound, tmp_path / "d3")
    line, _ = sealed(b'{"iteration":1,"consumed":4,"loss":{"z":[1.0,8]},"skipped":false}', NO_HASH)
    cut_lines("ledger.jsonl", keep=slice(1, None))(tmp_path / "d3")
    rest = (tmp_path / "d3/ledger.jsonl").read_bytes()
    (tmp_path / "d3/ledger.jsonl").write_bytes(line + rest)
    findings = audit(tmp_path / "d3", make_decider).findings
    assert "the row of iteration 1 has a domain 'z' that the plan has not" in findings[0]


def test_a_round_after_the_end_is_found(tmp_path: Path, sound: Path) -> None:
    shutil.copytree(sound, tmp_path / "d3")
    row = RoundRow(10, 10, 10, 40, 44, None, 0)
    with (tmp_path / "d3/rounds.jsonl").open("ab") as file:
        file.write(row.to_line())
    findings = audit(tmp_path / "d3", make_decider).findings
    assert findings == ("round 10 should not exist: the plan is complete before it",)


def test_a_wrong_generation_is_found(tmp_path: Path) -> None:
    Trainer(tmp_path / "d3", HEAD).run(stop_at=5)
    Trainer(tmp_path / "d3", header(total=40, mix="0.5,0.3,0.2")).run(5, 20, mode="fork")
    path = tmp_path / "d3/plan.json"
    text = path.read_text()
    at = text.rindex('"cursors": [\n') + len('"cursors": [\n')
    path.write_text(text[:at] + "9" + text[at:].lstrip())
    result = audit(tmp_path / "d3", make_decider)
    assert any("generation 1 (from position 20): its cursors or ids are not those" in finding
               for finding in result.findings), result.findings


def test_another_plans_positions_do_not_fill_the_screen(tmp_path: Path, sound: Path) -> None:
    shutil.copytree(sound, tmp_path / "d3")
    records = np.fromfile(sound / "positions.bin", RECORD)
    records[::-1].tofile(tmp_path / "d3/positions.bin")
    findings = audit(tmp_path / "d3", make_decider).findings
    assert 2 <= len(findings) <= 11


def test_a_decider_that_repeats_a_sample_is_found(tmp_path: Path) -> None:
    """The check within epochs does not trust the replay."""
    class Repeats(Decider):
        def decide(self, state, *, limit=None):  # type: ignore[no-untyped-def]
            decided = super().decide(state, limit=limit)
            return decided and (replace(decided[0], cursors=state.cursors), decided[1])

    def make(head: RunHeader, ids: tuple[int, ...]) -> Decider:
        return Repeats(**vars(make_decider(head, ids)))

    keeper = PlanKeeper.open(tmp_path / "d3", HEAD, make)
    keeper.advance(8)
    keeper.close()
    findings = audit(tmp_path / "d3", make).findings
    assert findings[0] == ("position 4 (round 1): b 0 is not the next sample of its domain, which is "
                           "1")


def test_no_plan_cannot_be_audited(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no plan here"):
        audit(tmp_path, make_decider)
