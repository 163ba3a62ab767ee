"""Curves and tables from plan directories: whole small runs, forks, long runs in few windows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_d3 import curves
from megatron_d3.curves import RunCurves, Windows, held_out_table, last_held_out, read_curves
from megatron_d3.errors import PlanError
from megatron_d3.plan.batch_schedule import BatchSchedule
from megatron_d3.plan.keeper import PlanKeeper
from megatron_d3.plan.reader import PlanReader
from tests.plan_helpers import Trainer, domains, header, make_decider

NAN = float("nan")


def trained(folder: Path) -> Path:
    Trainer(folder, header(mix="0.5,0.25,0.25", total=40)).run()
    return folder


def test_curves_of_a_small_run(tmp_path: Path) -> None:
    run = read_curves(trained(tmp_path / "d3"), name="toy", window_steps=4)

    assert (run.name, run.domains, run.num_steps) == ("toy", ("a", "b", "c"), 10)
    assert run.weights.edges.tolist() == list(range(11))
    assert run.weights.values.tolist() == [[0.5, 0.25, 0.25]] * 10
    assert run.shares.edges.tolist() == run.train.edges.tolist() == [0, 4, 8, 10]
    assert run.shares.values.tolist() == [[0.5, 0.25, 0.25]] * 3
    assert run.eval_steps.tolist() == [5, 10]
    assert run.num_tokens == 9 * 32  # step 7 overflowed


def test_training_loss_weighs_tokens_alike_and_leaves_out_what_is_not_finite(
    tmp_path: Path,
) -> None:
    folder = trained(tmp_path / "d3")
    run = read_curves(folder, name="toy", window_steps=4)

    sums, tokens = np.zeros((3, 3)), np.zeros((3, 3))
    for row, _, _ in PlanReader(folder).ledger():
        for k, name in enumerate("abc"):
            total, count = row.losses.get(name, (0.0, 0))
            if total is not None:
                sums[(row.iteration - 1) // 4, k] += total
                tokens[(row.iteration - 1) // 4, k] += count
    np.testing.assert_allclose(run.train.values, sums / tokens, rtol=1e-15)
    assert np.isfinite(run.train.values).all()


def test_held_out_losses_are_those_of_the_last_row_of_an_iteration(tmp_path: Path) -> None:
    keeper = PlanKeeper.open(tmp_path / "d3", header(mix="0.5,0.25,0.25"), make_decider)
    keeper.advance(8)
    keeper.note_eval(np.array([9.0, 9.0, 9.0]), np.array([1, 1, 1]))
    keeper.note_eval(np.array([4.0, np.inf, 0.0]), np.array([2, 1, 0]))
    keeper.note_eval(np.array([1.0, 1.0, 1.0]), np.array([1, 1, 1]), split="test")
    keeper.close()
    run = read_curves(tmp_path / "d3", name="toy")

    assert run.eval_steps.tolist() == [0]
    np.testing.assert_array_equal(run.held_out, [[2.0, NAN, NAN]])
    assert (run.num_steps, run.num_tokens) == (0, 0)  # decided, not trained


def test_a_plan_without_a_round_has_empty_curves(tmp_path: Path) -> None:
    PlanKeeper.open(tmp_path / "d3", header(), make_decider).close()
    run = read_curves(tmp_path / "d3", name="toy")
    assert np.isnan(run.weights.values).all()
    assert np.isnan(run.shares.values).all()
    assert run.held_out.shape == (0, 3)


def test_a_fork_shows_the_domains_of_both_generations(tmp_path: Path) -> None:
    folder = tmp_path / "d3"
    Trainer(folder, header(mix="0.5,0.25,0.25", total=32)).run(stop_at=4)
    with_d = header(mix="0,0.5,0.5", total=32, domains=domains(9, 100, 50, 20)[1:])
    Trainer(folder, with_d).run(4, 16, mode="fork")
    run = read_curves(folder, name="toy", window_steps=4)

    assert run.domains == ("a", "b", "c", "d")
    assert run.weights.values.tolist() == [[0.5, 0.25, 0.25, 0]] * 4 + [[0, 0, 0.5, 0.5]] * 4
    assert run.shares.values.tolist() == [[0.5, 0.25, 0.25, 0], [0, 0, 0.5, 0.5]]


def test_a_domain_that_changed_keeps_its_column(tmp_path: Path) -> None:
    folder = tmp_path / "d3"
    Trainer(folder, header(mix="0.5,0.25,0.25", total=32)).run(stop_at=4)
    Trainer(folder, header(mix="0.5,0.25,0.25", total=32, sizes=(100, 50, 21))).run(
        4, 16, mode="fork")
    assert len(PlanReader(folder).plan.table) == 4
    run = read_curves(folder, name="toy", window_steps=8)
    assert run.shares.values.tolist() == [[0.5, 0.25, 0.25]]


@settings(max_examples=25, deadline=None)
@given(round_steps=st.integers(1, 5), max_bins=st.integers(1, 9), window=st.integers(1, 12))
def test_windows_never_lose_a_sample(
    tmp_path_factory: pytest.TempPathFactory, round_steps: int, max_bins: int, window: int
) -> None:
    folder = tmp_path_factory.mktemp("run") / "d3"
    schedule = BatchSchedule(((0, 2), (8, 5), (30, 3)))
    config = {"mix": {"type": "online"}, "round_steps": round_steps, "sampling": "apportion"}
    head = header(total=48, batch_schedule=schedule, config=config)
    reached = Trainer(folder, head).run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "_MAX_BINS", max_bins)
        run = read_curves(folder, name="toy", window_steps=window)

    num_steps = reached[-1][0]
    assert run.num_steps == run.weights.edges[-1] == run.shares.edges[-1] == num_steps
    assert len(run.weights.values) <= max_bins
    np.testing.assert_allclose(run.weights.values.sum(axis=1), 1, rtol=1e-12)
    starts = run.shares.edges[:-1].astype(int)
    consumed = [0] + [position for _, position in reached]
    sizes = np.diff([consumed[step] for step in (*starts, num_steps)])  # samples of each window
    records = PlanReader(folder).positions(0, consumed[-1])
    drawn = np.bincount(records["domain"], minlength=3)
    np.testing.assert_allclose(sizes @ np.nan_to_num(run.shares.values), drawn, rtol=1e-12)


def test_a_directory_without_a_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no plan here"):
        read_curves(tmp_path, name="toy")


# --- tables ---------------------------------------------------------------------------------------


def curves_of(
    name: str, held_out: list[list[float]], shares: list[float], names: str = "abc"
) -> RunCurves:
    windows = Windows(np.array([0.0, 20.0]), np.array([shares]))
    return RunCurves(
        name=name, domains=tuple(names), num_steps=20, num_tokens=1280, weights=windows,
        shares=windows, train=windows, eval_steps=np.arange(len(held_out)) * 10 + 10,
        held_out=np.array(held_out).reshape(len(held_out), len(names)))


EVEN = curves_of("even", [[9, 9, 9], [3.0, 2.0, 4.0]], [0.5, 0.25, 0.25])
SKEWED = curves_of("skewed", [[9, 9, 9], [2.5, 2.0004, 5.0]], [0.75, 0.125, 0.125])


def test_table_marks_the_best_of_each_row() -> None:
    assert held_out_table([EVEN, SKEWED]) == """\
held-out loss, nats per token (* best), after 20 steps, 1,280 tokens
                                        share of training samples
                      even    skewed      even   skewed
a                    3.000     2.500*   50.0 %   75.0 %
b                    2.000     2.000    25.0 %   12.5 %
c                    4.000*    5.000    25.0 %   12.5 %
mean (unweighted)    3.000*    3.167"""


def test_table_of_one_run_marks_nothing() -> None:
    assert "*" not in held_out_table([EVEN]).partition("\n")[2]


def test_table_tells_where_runs_of_other_lengths_ended() -> None:
    short = curves_of("short", [[4.0, 3.0, 4.0]], [0.5, 0.25, 0.25])
    assert held_out_table([EVEN, short]).splitlines()[:3] == [
        "held-out loss, nats per token (* best)",
        "  even: after 20 steps, 1,280 tokens",
        "  short: after 10 steps, 1,280 tokens",
    ]


def test_table_has_the_domains_that_all_runs_evaluated() -> None:
    other = curves_of("other", [[1.0, NAN, 3.0]], [0.2, 0.2, 0.6], names="cbd")
    found = last_held_out([EVEN, other])
    assert found.domains == ("c",)
    assert found.losses.tolist() == [[4.0, 1.0]]
    assert found.shares.tolist() == [[0.25, 0.2]]


def test_runs_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(PlanError, match="new: no evaluation yet; see --eval-interval"):
        held_out_table([EVEN, curves_of("new", [], [0.5, 0.25, 0.25])])
    with pytest.raises(PlanError, match="even, other: no domain was evaluated in all"):
        held_out_table([EVEN, curves_of("other", [[1.0]], [1.0], names="z")])
