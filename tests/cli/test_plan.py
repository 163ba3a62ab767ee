"""`megatron-d3 plan`: with the real mixers, on plans of a few dozen positions."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_d3.cli import plan as cli
from megatron_d3.config import parse_config
from megatron_d3.errors import PlanError
from megatron_d3.plan.compare import compare
from megatron_d3.plan.header import RunHeader
from megatron_d3.plan.keeper import PlanKeeper
from megatron_d3.plan.reader import PlanReader
from megatron_d3.plan.segment import RECORD
from megatron_d3.plan.windows import WindowRow
from megatron_d3.planning import decider_factory
from megatron_d3.types import StepSignals
from tests.plan_helpers import Trainer, domains, header, make_decider, reverse_order

STATIC = {"type": "static", "weights": {"a": 0.5, "b": 0.3, "c": 0.2}}
SCHEDULE = {"type": "schedule", "interpolation": "linear", "knots": [
    [0, {"a": 1, "b": 0, "c": 0}], [8, {"a": 0, "b": 0.5, "c": 0.5}]]}


def head(
    mix: dict[str, Any] = STATIC, order: dict[str, Any] | None = None, **changes: Any
) -> RunHeader:
    config = parse_config({"domains": {"a": "x/a", "b": "x/b", "c": "x/c"}, "mix": mix,
                           "order": order}, folder=Path("/corpora"))
    made = header(sizes=(20, 10, 5), total=40, config=config.to_dict(), versions={"static": 1})
    return replace(made, **changes)


def train(run: Path, wanted: RunHeader, *args: Any, **kwargs: Any) -> Path:
    Trainer(run / "d3", wanted, factory=decider_factory()).run(*args, **kwargs)
    return run


def call(*words: object) -> int:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.run(parser.parse_args([str(word) for word in words]))


def test_show_prints_the_tree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(tmp_path, head(), stop_at=7)
    train(run, head({**STATIC, "weights": {"a": 0, "b": 0.5, "c": 0.5}}), 5, 20, mode="fork")
    capsys.readouterr()
    assert call("show", run) == 0
    assert capsys.readouterr().out == f"""\
{run}/d3 | positions 0-39 of 40 decided | trained to iteration 10, 40 samples
├── generation 0 | iteration 0 | positions 0-19 | 5 rounds | mix static | global batch 4 | \
seq_length 8 | seed 7
│   ├── domain  samples  drawn  epochs    share   target
│   ├── a            20     10   0.500  0.50000  0.50000
│   ├── b            10      6   0.600  0.30000  0.30000
│   └── c             5      4   0.800  0.20000  0.20000
├── generation 1 | iteration 5 | positions 20-39 | 5 rounds | mix static | global batch 4 | \
seq_length 8 | seed 7
│   ├── domain  samples  drawn  epochs    share   target
│   ├── a            20      0   0.500  0.00000  0.00000
│   ├── b            10     10   1.600  0.50000  0.50000
│   └── c             5     10   2.800  0.50000  0.50000
└── rounds
    ├── round 0 | iteration 0 | step 0 | positions 0-3 | weights a 0.5 b 0.3 c 0.2
    ├── round 1 | iteration 0 | step 1 | positions 4-7 | weights a 0.5 b 0.3 c 0.2
    ├── round 2 | iteration 0 | step 2 | positions 8-11 | weights a 0.5 b 0.3 c 0.2
    ├── ... 6 more (--rounds all)
    ├── round 9 | iteration 5 | step 7 | positions 28-31 | weights a 0 b 0.5 c 0.5
    ├── round 10 | iteration 6 | step 8 | positions 32-35 | weights a 0 b 0.5 c 0.5
    └── round 11 | iteration 7 | step 9 | positions 36-39 | weights a 0 b 0.5 c 0.5
"""
    assert call("show", run / "d3", "--rounds", "all") == 0
    lines = capsys.readouterr().out.splitlines()
    # Rounds 5 and 6 were read ahead and given up at the fork.
    assert [line for line in lines if "round 5 |" in line or "round 6 |" in line] == [
        ("    ├── round 5 | iteration 3 | step 5 | no positions (of positions 20-23) | weights a 0.5 "
        "b 0.3 c 0.2"),
        ("    ├── round 6 | iteration 4 | step 6 | no positions (of positions 24-27) | weights a 0.5 "
        "b 0.3 c 0.2")]
    assert call("show", run, "--rounds", "0") == 0
    assert capsys.readouterr().out.endswith("└── rounds\n    └── ... 12 more (--rounds all)\n")


def test_show_json_has_every_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(tmp_path, head(SCHEDULE))
    capsys.readouterr()
    assert call("show", run, "--json", "--rounds", "all") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["first_position"], shown["frontier"], shown["iteration"], shown["consumed"]) == (
        0, 40, 10, 40)
    assert len(shown["rounds"]) == 10
    assert shown["rounds"][4]["weights"] == {"a": 0.5, "b": 0.25, "c": 0.25}
    domain = shown["generations"][0]["domains"][0]
    target = sum(4 * r["weights"]["a"] for r in shown["rounds"]) / 40
    assert domain == {"name": "a", "id": 0, "num_samples": 20, "num_drawn": 18,
                      "num_drawn_before": 0, "share": 0.45, "target": pytest.approx(target),
                      "epochs": 0.9}


def test_show_of_a_plan_that_has_not_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, head(), stop_at=0)
    assert call("show", tmp_path) == 0
    assert "no positions of 40 decided | no training step yet" in capsys.readouterr().out
    assert call("audit", tmp_path) == 0


def test_show_tells_of_windows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = head(order={"type": "d3", "window": 4, "overlap": True})
    Trainer(tmp_path / "d3", wanted, factory=decider_factory(), orderer=reverse_order).run(stop_at=3)
    assert call("show", tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "| mix static | order d3, windows of 4, overlapping | global batch 4 |" in lines[1]
    assert "| step 0 | unit 3 | positions 0-3 | weights a 0.5" in lines[7]
    keeper = PlanKeeper.open(tmp_path / "d3", wanted, decider_factory(), iteration=3, consumed=12)
    keeper.note_window(WindowRow(6, 3, 6, 4, cost={"found": 0.5, "stored": 1.25}, curl=0.125,
                                 reliability=0.75, expected_agreement=0.875), {})
    keeper.note_window(WindowRow(8, 3, 8, 4, reason="a unit's loss is not finite"), {})
    keeper.close()
    assert call("show", tmp_path) == 0
    assert ("├── windows 2 | mean cost of orders (random 1): found 0.500, stored 1.250 | curl "
            "0.125 | reliability 0.750 | expected agreement 0.875 | 1 kept the stored order"
            ) in capsys.readouterr().out.splitlines()
    assert call("show", tmp_path, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["windows"]["cost"] == {"found": 0.5, "stored": 1.25}
    assert shown["rounds"][0]["unit"] == 3
    assert call("audit", tmp_path) == 0
    assert re.search(r"^sound: 6 rounds in 3 windows, 24 positions", capsys.readouterr().out)


def test_show_positions_decodes_epochs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, head())
    capsys.readouterr()
    assert call("show", tmp_path, "--positions", "0:3") == 0
    assert capsys.readouterr().out == (
        "position\tdomain\tepoch\tsample\tordinal\n"
        "0\ta\t0\t0\t0\n1\tb\t0\t0\t0\n2\tc\t0\t0\t0\n")
    assert call("show", tmp_path, "--positions", "38:", "--json") == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"position": 38, "domain": "b", "epoch": 1, "sample": 1, "ordinal": 11},
        {"position": 39, "domain": "a", "epoch": 0, "sample": 19, "ordinal": 19}]
    with pytest.raises(PlanError, match="position 40 was asked for, decided are those below 40"):
        call("show", tmp_path, "--positions", "39:41")


@pytest.mark.parametrize(("flag", "value", "message"), [
    ("--positions", "7", "got '7', expected A:B, e.g. 0:100"),
    ("--positions", "a:b", "got 'a:b', expected A:B"),
    ("--rounds", "some", "got 'some', expected a number or `all`")])
def test_usage_errors(
    flag: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        call("show", "run", flag, value)
    assert message in capsys.readouterr().err


def test_no_plan(tmp_path: Path) -> None:
    for words in (("show", tmp_path), ("audit", tmp_path), ("diff", tmp_path, tmp_path)):
        with pytest.raises(PlanError, match=r"no plan here, nor in .*d3; give the --save directory"):
            call(*words)


def test_diff_of_the_same_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "a", head())
    Trainer(tmp_path / "b", head(), factory=decider_factory(), read_ahead=0).run()
    assert call("diff", tmp_path / "a", tmp_path / "b") == 0
    assert capsys.readouterr().out == "same: positions 0-39 hold the same samples in both\n"
    assert call("diff", tmp_path / "a", tmp_path / "b", "--json") == 0
    assert json.loads(capsys.readouterr().out) is None


def test_diff_names_the_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "a", head())
    train(tmp_path / "b", head({**STATIC, "weights": {"a": 0.4, "b": 0.4, "c": 0.2}}))
    capsys.readouterr()
    assert call("diff", tmp_path / "a", tmp_path / "b") == 1
    out = capsys.readouterr().out
    assert re.match(r"position \d+: A has \w \d+, B has \w \d+\n", out)
    assert "  generation 0: mix.weights.a 0.5 in A, 0.4 in B\n" in out
    assert "  round 0: weights [0.5, 0.3, 0.2] in A, [0.4, 0.4, 0.2] in B\n" in out


def test_diff_names_the_fork_and_the_shorter_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "a", head())
    train(tmp_path / "b", head(), stop_at=5)
    assert call("diff", tmp_path / "a", tmp_path / "b") == 1
    assert capsys.readouterr().out == (
        "position 28: A has b 8, B has none (not decided there)\n"
        "  settings, rounds and ledgers agree up to there: one run is longer than the other\n")
    train(tmp_path / "b", head({"type": "natural"}), 5, 20, mode="fork")
    capsys.readouterr()
    assert call("diff", tmp_path / "a", tmp_path / "b", "--json") == 1
    parting = json.loads(capsys.readouterr().out)
    assert 20 <= parting["position"] < 40
    assert parting["reasons"][:2] == [
        "generation 1: only B has it, from position 20 on",
        "generation 1: mix.type static before, natural in B"]


def test_diff_names_the_ledger_row(tmp_path: Path) -> None:
    """An online mixer: same settings, one loss differs, so the order does later on."""
    Trainer(tmp_path / "a", header(total=40)).run()

    class Noisy(Trainer):
        def measure(self, step: int, records: np.ndarray, ids: Sequence[int]) -> StepSignals:
            signals = super().measure(step, records, ids)
            factors = np.array([5, 5, 15]) if step == 2 else np.ones(3)
            return replace(signals, loss_sums=signals.loss_sums * factors)

    Noisy(tmp_path / "b", header(total=40)).run()
    parting = compare(PlanReader(tmp_path / "a"), PlanReader(tmp_path / "b"))
    assert parting is not None
    assert parting.reasons[0].startswith("ledger: iteration 3: loss of a (")
    assert parting.reasons[1].startswith("round 5: weights [")


def test_diff_of_different_starts_and_of_a_damaged_plan(tmp_path: Path) -> None:
    train(tmp_path / "a", head())
    train(tmp_path / "b", head(), 5, 20, mode="fork")
    parting = compare(PlanReader(tmp_path / "a/d3"), PlanReader(tmp_path / "b/d3"))
    assert parting is not None and (parting.position, parting.a, parting.b) == (0, ("a", 0), None)
    train(tmp_path / "c", head())
    records = np.fromfile(tmp_path / "c/d3/positions.bin", RECORD)
    records[[30, 31]] = records[[31, 30]]
    records.tofile(tmp_path / "c/d3/positions.bin")
    parting = compare(PlanReader(tmp_path / "a/d3"), PlanReader(tmp_path / "c/d3"))
    assert parting is not None and (parting.position, parting.reasons) == (30, ())


def test_diff_compares_domains_by_name(tmp_path: Path) -> None:
    """Another table id is no difference."""
    one = header(sizes=(50, 50), total=20, mix="0.5,0.5")
    Trainer(tmp_path / "a", one).run()
    other = replace(one, domains=tuple(
        replace(d, fingerprint="old") for d in domains(50, 50)))
    Trainer(tmp_path / "b", other).run(stop_at=0)
    PlanKeeper.open(tmp_path / "b", one, make_decider, mode="fork").close()
    Trainer(tmp_path / "b", one).run()
    assert compare(PlanReader(tmp_path / "a"), PlanReader(tmp_path / "b")) is None


@pytest.mark.parametrize(("field", "value"), [
    ("fingerprint", "another corpus"), ("seq_length", 16), ("seed", 8)])
def test_diff_sees_other_samples_behind_the_same_ordinals(
    tmp_path: Path, field: str, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights that follow no loss give the same domains and ordinals on any corpus."""
    one = header(sizes=(50, 50), total=20, mix="0.5,0.5")
    changed = tuple(replace(d, **{field: value}) for d in one.domains)  # type: ignore[arg-type]
    other = replace(one, domains=changed)
    Trainer(tmp_path / "a", one).run()
    Trainer(tmp_path / "b", other).run()
    assert call("diff", tmp_path / "a", tmp_path / "b") == 1
    old = getattr(one.domains[0], field)
    assert capsys.readouterr().out.splitlines()[:2] == [
        "position 0: A has a 0, B has a 0", f"  domain a: {field} {old} in A, {value} in B"]


@pytest.mark.parametrize("mix", [
    STATIC, SCHEDULE, {"type": "natural"}, {"type": "temperature", "temperature": 2.0},
    {"type": "unimax", "max_epochs": 3}, {**STATIC, "max_epochs": 2},
    {**STATIC, "max_epochs": {"c": 1}, "exhausted": "repeat"}])
def test_audit_rebuilds_every_mixer_from_the_plan(
    tmp_path: Path, mix: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, head(mix))
    capsys.readouterr()
    assert call("audit", tmp_path) == 0
    assert capsys.readouterr().out == (
        "sound: 10 rounds, 40 positions, 10 steps, 2 stored states checked\n")


def test_caps_hold_to_the_last_sample(tmp_path: Path) -> None:
    """Every domain within floor(max_epochs * size), the run filled."""
    train(tmp_path, head({**STATIC, "max_epochs": {"a": 0.76, "b": 1.55, "c": 2}}))
    records = PlanReader(tmp_path / "d3").positions(0, 40)
    assert np.bincount(records["domain"]).tolist() == [15, 15, 10]


def test_audit_finds_one_swapped_sample(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, head())
    path = tmp_path / "d3/positions.bin"
    records = np.fromfile(path, RECORD)
    records[[20, 21]] = records[[21, 20]]
    records.tofile(path)
    assert call("audit", tmp_path) == 1
    out = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"position 20 \(round 5\): positions.bin has \w \d+, expected \w \d+", out[0])
    assert out[1:] == ["NOT sound: 10 rounds, 40 positions, 10 steps, 2 stored states checked"]
    assert call("audit", tmp_path, "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["is_sound"] is False and len(report["findings"]) == 1
