"""A mixer played over known losses decides as a run with the same losses did."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_d3.errors import ConfigError
from megatron_d3.loss_table import LossTable, read_losses, recorded_losses
from megatron_d3.mix import EpochCap, Static
from megatron_d3.plan.batch_schedule import BatchSchedule
from megatron_d3.plan.decide import Decider
from megatron_d3.plan.reader import PlanReader
from megatron_d3.plan.summary import iter_rounds
from megatron_d3.simulate import report, simulate
from megatron_d3.types import DomainInfo, StepSignals
from tests.plan_helpers import Trainer, header, losses_of, make_decider

NAMES = ("web", "code")


class Calm(Trainer):
    """Without the overflow that the toy run has in one step."""

    def measure(self, step, records, table_ids) -> StepSignals:
        signals = losses_of(step if step != 6 else 60, records, table_ids)
        return replace(signals, iteration=step + 1)


def test_playing_a_runs_own_losses_draws_the_same_samples(tmp_path: Path) -> None:
    head = header(total=80)
    Calm(tmp_path / "d3", head, read_ahead=8).run()
    reader = PlanReader(tmp_path / "d3")
    losses = recorded_losses(reader, head.names).until(20)
    played = simulate(make_decider(head, (0, 1, 2)), losses, seq_length=8, read_ahead_steps=2)
    drawn = np.bincount(reader.stored(0, 80)["domain"], minlength=3)
    assert played.samples.tolist() == drawn.tolist()
    weights = [list(row.weights.values()) for row, _ in reader.rounds() if row.weights]
    distinct = [w for w, before in zip(played.weights, [None, *played.weights[:-1]], strict=True)
                if before is None or (w != before).any()]
    np.testing.assert_allclose(distinct, weights, rtol=1e-12)


@pytest.mark.parametrize("overlap", [False, True])
def test_windows_are_played_in_the_stored_order(tmp_path: Path, overlap: bool) -> None:
    head = header(total=80)
    head = replace(head, config={**head.config, "order": {"length": 5, "overlap": overlap}})
    Calm(tmp_path / "d3", head, read_ahead=8).run()
    reader = PlanReader(tmp_path / "d3")
    losses = recorded_losses(reader, head.names).until(20)
    played = simulate(make_decider(head, (0, 1, 2)), losses, seq_length=8, read_ahead_steps=2)
    weights = [use.weights for use in iter_rounds(reader)]
    np.testing.assert_allclose(played.weights, weights, rtol=1e-12)
    drawn = np.bincount(reader.stored(0, 80)["domain"], minlength=3)
    assert played.samples.tolist() == drawn.tolist()


def decider(*sizes: int, weights=(0.75, 0.25), exhausted=None, total=80) -> Decider:
    domains = [DomainInfo(name, size, size * 4) for name, size in zip(NAMES, sizes, strict=True)]
    config = Static.Config(dict(zip(NAMES, weights, strict=True)))
    cap = EpochCap(2, exhausted, domains) if exhausted else None
    return Decider(domains, (0, 1), Static(config, domains, total_samples=total), cap, total,
                   BatchSchedule.constant(8), 1)


def test_samples_and_the_step_at_which_a_domain_is_used_up() -> None:
    played = simulate(decider(100, 5), np.ones((10, 2)), seq_length=4, read_ahead_steps=0)
    assert played.samples.tolist() == [60, 20]
    assert played.used_up_at.tolist() == [0, 3]  # 2 a step, 5 in an epoch
    assert played.first_exhaustion == 1
    assert report(played, decider(100, 5).domains, title="T").splitlines() == [
        "T", "",
        "domain      samples   share   epochs last weight  used up after step",
        "web              60  0.7500    0.600      0.7500  -",
        "code             20  0.2500    4.000      0.2500  3",
        "", "first exhaustion: code, after step 3"]


def test_a_run_that_stops_at_its_limit_is_played_so_far() -> None:
    played = simulate(decider(100, 5, exhausted="stop"), np.ones((10, 2)), seq_length=4,
                      read_ahead_steps=1)
    assert played.num_steps == len(played.weights) == 5
    assert played.samples.tolist() == [30, 10] and played.used_up_at.tolist() == [0, 5]


def test_nothing_used_up() -> None:
    played = simulate(decider(100, 100), np.ones((2, 2)), seq_length=4, read_ahead_steps=0)
    assert played.first_exhaustion is None
    assert report(played, decider(100, 100).domains, title="T").endswith("first exhaustion: none")


def test_losses_between_rows_lie_on_a_line() -> None:
    table = LossTable(np.array([2, 4, 6]), np.array([[4.0, np.nan], [3.0, 1.0], [2.0, 3.0]]))
    assert table.until(7).tolist() == [
        [4, 1], [4, 1], [3.5, 1], [3, 1], [2.5, 2], [2, 3], [2, 3]]


def test_a_csv_may_name_its_columns_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "l.csv"
    path.write_text("code,step, web\n1.5,1,3\n,5,2\n\n")
    table = read_losses(path, NAMES)
    assert table.steps.tolist() == [1, 5]
    np.testing.assert_array_equal(table.losses, [[3, 1.5], [2, np.nan]])


@pytest.mark.parametrize(("text", "message"), [
    ("", r"l.csv: no column step; expected step, web, code"),
    ("step,web\n", r"l.csv: no column code; expected step, web, code"),
    ("step,web,cod\n", r"l.csv: column 'cod' is no domain, did you mean code\?"),
    ("step,web,web,code\n", r"l.csv: a column is there twice"),
    ("step,web,code\n1,2\n", r"l.csv:2: got 2 cells, expected 3"),
    ("step,web,code\n1,2,x\n", r"l.csv:2: code: got 'x', expected a number"),
    ("step,web,code\n0,2,2\n", r"l.csv:2: got step '0', expected whole numbers that rise from 1"),
    ("step,web,code\n2,2,2\n2,2,2\n", r"l.csv:3: got step '2'"),
    ("step,web,code\n1.5,2,2\n", r"l.csv:2: got step '1.5'"),
    ("step,web,code\n,2,2\n", r"l.csv:2: got step ''"),
    ("step,web,code\n1,2,\n", r"l.csv: no loss of domain code"),
])
def test_what_cannot_be_read_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "l.csv").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_losses(tmp_path / "l.csv", NAMES)


def test_a_missing_csv_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.csv: No such file or directory; give a CSV"):
        read_losses(tmp_path / "none.csv", NAMES)
