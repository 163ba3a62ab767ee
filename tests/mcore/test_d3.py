"""D3 windows under real Megatron: one order on all ranks, exact resume, nothing else changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from megatron_d3.influence.graph import expected_agreement
from megatron_d3.influence.objectives import random_order
from megatron_d3.influence.probe_choice import choose_probes
from megatron_d3.influence.source import UNUSABLE
from megatron_d3.plan.reader import PlanReader
from megatron_d3.plan.windows import WindowRow, read_arrays, read_windows
from tests.mcore.launcher import Launcher, Run
from tests.mcore.plans import (
    SEED,
    expected_samples,
    flags,
    flat,
    plan_bytes,
    scalars,
    write_config,
)

pytestmark = pytest.mark.mcore

D3 = {"type": "d3", "window": 4, "probe_sequences": 4, "sketch": {"dim": 512}}


def config(corpora: Path, name: str, **order: Any) -> Path:
    return write_config(corpora / f"{name}.yaml", order=D3 | order)


def windows(save: Path) -> list[WindowRow]:
    return [row for row, _, _ in read_windows(save / "d3")]


def units(save: Path) -> list[int | None]:
    """Which drafted unit fills each slot."""
    return [row.unit for row, _ in PlanReader(save / "d3").rounds()]


def arguments(path: Path, save: Path, *extra: str) -> list[str]:
    """Ten steps, checkpoints every second one that any layout can load."""
    return [*flags(path, save, steps=10, save_interval=2), "--use-distributed-optimizer",
            "--dist-ckpt-optim-fully-reshardable", "--ckpt-format", "torch_dist", *extra]


@pytest.fixture(scope="module")
def whole(
    launcher: Launcher, corpora: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Run, Path]:
    """A run of one process over two windows and a half: its configuration, record and folder."""
    folder = tmp_path_factory.mktemp("whole")
    path = config(corpora, "whole")
    run = launcher.run(
        folder / "run", arguments(
            path, folder / "save", "--tensorboard-dir", str(folder / "tensorboard")),
        setup="tests.mcore.faults:note_probed_sequences").require_success()
    return path, run, folder / "save"


def test_windows_are_probed_ordered_and_trained_as_planned(whole: tuple[Path, Run, Path]) -> None:
    path, run, save = whole
    rows = windows(save)
    assert [(row.round, row.iteration, row.num_units) for row in rows] == [
        (0, 0, 4), (4, 4, 4), (8, 8, 2)]
    for row in rows:
        assert row.reason is None
        assert 0 <= (row.cost["found"] or 0) <= min(row.cost["row_sum"] or 0, row.cost["stored"] or 0)
        assert row.reliability is not None
        assert row.expected_agreement == expected_agreement(row.reliability, 2, 8)  # 2 of 4 are for curvature
        assert row.curl is not None
        assert {"gradients", "sketch", "reduce", "probe", "solve", "total"} <= row.seconds.keys()
        arrays = read_arrays(save / "d3", row.round)
        s = arrays["advantage"]
        np.testing.assert_array_equal(s, -s.T)
        assert np.abs(s).max() > 0
        order = arrays["order"].tolist()
        assert sorted(order) == list(range(row.num_units))
        assert units(save)[row.round:row.round + row.num_units] == order
    assert any(read_arrays(save / "d3", row.round)["order"].tolist() != sorted(
        read_arrays(save / "d3", row.round)["order"].tolist()) for row in rows), "nothing was moved"
    hashes = expected_samples(path, save / "d3")
    assert run.samples() == [hashes[8 * i:8 * i + 8] for i in range(10)]
    assert "d3 window at round 4 | iteration 4 | 4 units | cost relative to random" in run.output


def test_tensorboard_holds_costs_reliability_and_shares_of_time(
    whole: tuple[Path, Run, Path]
) -> None:
    _, run, save = whole
    found = scalars(save.parent / "tensorboard")
    rows = windows(save)
    for name in ("found", "row_sum", "stored"):
        assert found[f"d3/window/cost_{name}"] == {
            row.iteration: pytest.approx(row.cost[name], rel=1e-6) for row in rows}
    for name in ("reliability", "expected_agreement", "curl"):
        assert found[f"d3/window/{name}"] == {
            row.iteration: pytest.approx(getattr(row, name), rel=1e-6) for row in rows}
    for name in ("gradients", "sketch", "reduce", "probe", "solve", "total"):
        assert found[f"d3/window/{name}_seconds"] == {
            row.iteration: pytest.approx(row.seconds[name], rel=1e-6) for row in rows}
        # Before the first window no step has been timed.
        assert found[f"d3/window/{name}_share"] == {
            row.iteration: pytest.approx(
                (row.seconds[name] or 0) / (row.num_units * row.details["step_seconds"]), rel=1e-6)
            for row in rows[1:]}
    line = next(line for line in run.output.splitlines() if "d3 window at round 4" in line)
    assert line.endswith(" % of its steps)")


def test_a_sample_of_each_unit_is_probed_that_holds_its_domains_in_their_shares(
    whole: tuple[Path, Run, Path]
) -> None:
    path, run, save = whole
    hashes = np.array(expected_samples(path, save / "d3")[:80]).reshape(10, 8)
    reader = PlanReader(save / "d3")
    domains = np.array(reader.stored(0, 80))["domain"].reshape(10, 8)
    probed = [json.loads(line) for line in (run.folder / "probed.jsonl").read_text().splitlines()]
    assert [np.shape(window) for window in probed] == [(4, 4), (4, 4), (2, 4)]
    for row, window in zip(windows(save), probed, strict=True):
        slots = np.argsort(units(save)[row.round:row.round + row.num_units])  # of each unit
        chosen = choose_probes(
            domains[row.round + slots], 4, num_curved=2, seed=[SEED, row.round])
        assert window == np.take_along_axis(hashes[row.round + slots], chosen, 1).tolist()
    assert np.concatenate(probed).tolist() != hashes[:, :4].tolist()


def test_the_same_order_without_probing_trains_digit_for_digit_the_same(
    launcher: Launcher, tmp_path: Path, whole: tuple[Path, Run, Path]
) -> None:
    path, run, save = whole
    replayed = launcher.run(
        tmp_path / "run", arguments(path, tmp_path / "save"),
        setup="tests.mcore.faults:replay_orders",
        environment={"D3_TEST_ORDERS": str(save / "d3")}).require_success()
    assert not any(row.cost for row in windows(tmp_path / "save"))  # nothing was measured
    assert replayed.samples() == run.samples()
    assert replayed.losses() == run.losses()
    assert replayed.grad_norms() == run.grad_norms()


def test_experts_that_two_ranks_share_are_probed_and_train_as_if_they_had_not_been(
    launcher: Launcher, corpora: Path, tmp_path: Path
) -> None:
    extra = ["--num-experts", "4", "--moe-router-topk", "2", "--disable-bias-linear",
             "--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "alltoall"]
    path = config(corpora, "experts")
    run = launcher.run(
        tmp_path / "run", arguments(path, tmp_path / "save", *extra), world_size=2
    ).require_success()
    assert [row.reason for row in windows(tmp_path / "save")] == [None] * 3
    assert sorted(units(tmp_path / "save")[:4]) == [0, 1, 2, 3]
    replayed = launcher.run(
        tmp_path / "replayed", arguments(path, tmp_path / "other", *extra), world_size=2,
        setup="tests.mcore.faults:replay_orders",
        environment={"D3_TEST_ORDERS": str(tmp_path / "save/d3")}).require_success()
    assert not any(row.cost for row in windows(tmp_path / "other"))
    for rank in range(2):
        assert replayed.steps(rank) == run.steps(rank)


@pytest.mark.parametrize(("world_size", "layout"), [
    (2, ["--micro-batch-size", "1", "--overlap-grad-reduce", "--overlap-param-gather"]),
    (4, ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--num-workers", "0"]),
    (2, ["--pipeline-model-parallel-size", "2"]),
], ids=["dp2", "tp2-dp2", "pp2"])  # fmt: skip
@pytest.mark.parametrize("step", [4, 6])
def test_another_layout_continues_the_same_plan(
    launcher: Launcher, tmp_path: Path, whole: tuple[Path, Run, Path], world_size: int,
    layout: list[str], step: int,
) -> None:
    """From a checkpoint between two windows, and from one inside a window."""
    path, run, save = whole
    other = launcher.run(
        tmp_path / "run", [*arguments(path, tmp_path / "save", *layout), "--load", str(save),
                           "--ckpt-step", str(step)], world_size=world_size).require_success()
    assert units(tmp_path / "save") == units(save)
    assert other.samples() == run.samples()[step:]
    expected = {row.round: read_arrays(save / "d3", row.round) for row in windows(save)}
    for row in windows(tmp_path / "save"):
        found, wanted = read_arrays(tmp_path / "save/d3", row.round), expected[row.round]["advantage"]
        error = np.abs(found["advantage"] - wanted).max() / np.abs(wanted).max()
        assert error < 1e-2  # the weights of two layouts come apart, a digit a few steps


@pytest.mark.parametrize("kill_at", range(1, 11))
def test_killed_at_a_step_the_run_continues_bit_for_bit(
    launcher: Launcher, tmp_path: Path, whole: tuple[Path, Run, Path], kill_at: int
) -> None:
    killed = launcher.run(
        tmp_path / "a", arguments(whole[0], tmp_path / "save"), kill_at=kill_at)
    assert killed.codes == [-9]
    require_continued(launcher, tmp_path, whole, (kill_at - 1) // 2 * 2)


def test_killed_processes_of_two_groups_continue_bit_for_bit(
    launcher: Launcher, corpora: Path, tmp_path: Path
) -> None:
    """Overlapping windows, in the middle of one: units that were drafted are drafted again."""
    path = config(corpora, "two-groups", overlap=True)
    run = launcher.run(
        tmp_path / "run", arguments(path, tmp_path / "whole"), world_size=2).require_success()
    killed = launcher.run(
        tmp_path / "a", arguments(path, tmp_path / "save"), world_size=2, kill_at=6)
    assert -9 in killed.codes
    resumed = launcher.run(
        tmp_path / "b", arguments(path, tmp_path / "save"), world_size=2).require_success()
    for rank in range(2):
        assert resumed.steps(rank) == run.steps(rank)[4:]
    assert plan_bytes(tmp_path / "save/d3") == plan_bytes(tmp_path / "whole/d3")


@pytest.mark.parametrize("step", [0, 4, 8])
def test_killed_between_probe_and_segment_the_run_continues_bit_for_bit(
    launcher: Launcher, tmp_path: Path, whole: tuple[Path, Run, Path], step: int
) -> None:
    killed = launcher.run(
        tmp_path / "a", arguments(whole[0], tmp_path / "save"),
        setup="tests.mcore.faults:kill_between_probe_and_segment",
        environment={"D3_TEST_KILL_AT": str(step)})
    assert killed.codes == [-9]
    assert len(killed.steps()) == step
    require_continued(launcher, tmp_path, whole, step)


def require_continued(
    launcher: Launcher, folder: Path, whole: tuple[Path, Run, Path], step: int
) -> None:
    path, run, save = whole
    resumed = launcher.run(folder / "b", arguments(path, folder / "save")).require_success()
    assert resumed.steps() == run.steps()[step:]
    assert plan_bytes(folder / "save/d3") == plan_bytes(save / "d3")
    for row in windows(save):
        found = read_arrays(folder / "save/d3", row.round)
        for name, wanted in read_arrays(save / "d3", row.round).items():
            np.testing.assert_array_equal(found[name], wanted, err_msg=name)


def test_a_random_order_is_not_measured_for(
    launcher: Launcher, corpora: Path, tmp_path: Path
) -> None:
    """Nor does it wait for a learning rate above 0, or refuse what cannot be measured: more probe
    sequences than a unit has, a sketch larger than the model, a router's noise."""
    path = config(corpora, "random", objective="random", probe_sequences=16, sketch={"dim": 10**9})
    run = launcher.run(
        tmp_path / "run", arguments(path, tmp_path / "save", "--lr-warmup-iters", "4",
                                    "--moe-input-jitter-eps", "0.01"),
        setup="tests.mcore.faults:note_probed_sequences").require_success()
    assert not (run.folder / "probed.jsonl").exists()
    rows = windows(tmp_path / "save")
    assert [row.round for row in rows] == [0, 4, 8]
    for row in rows:
        order = random_order(row.num_units, [SEED, row.round, crc32(b"d3 order")]).tolist()
        assert units(tmp_path / "save")[row.round:row.round + row.num_units] == order
        assert (row.reason, row.cost, row.reliability, row.expected_agreement) == (None, {}, None, None)
        assert list(read_arrays(tmp_path / "save/d3", row.round)) == ["order"]


def test_a_unit_without_a_finite_gradient_leaves_the_window_in_its_stored_order(
    launcher: Launcher, corpora: Path, tmp_path: Path
) -> None:
    run = launcher.run(
        tmp_path / "run", arguments(config(corpora, "poisoned"), tmp_path / "save"),
        setup="tests.mcore.faults:poison_a_unit", world_size=2).require_success()
    row = windows(tmp_path / "save")[1]
    assert row.reason == f"{UNUSABLE} in unit 2 (drafted for step 7)"
    assert units(tmp_path / "save")[4:8] == [0, 1, 2, 3]
    assert f"stored order kept: {row.reason}" in run.output
    assert windows(tmp_path / "save")[0].reason is None


def test_noise_and_a_missing_step_keep_the_stored_order_and_say_so(
    launcher: Launcher, corpora: Path, tmp_path: Path
) -> None:
    """Also: each second window only, a run in bfloat16, a learning rate that starts at 0."""
    path = config(corpora, "noise", window=3, every=2, min_agreement=1.0, step="optimizer")
    launcher.run(
        tmp_path / "run", arguments(path, tmp_path / "save", "--bf16"), world_size=2
    ).require_success()
    rows = windows(tmp_path / "save")
    assert [row.step for row in rows] == [0, 6]
    assert units(tmp_path / "save") == [*[0, 1, 2] * 3, 0]
    assert rows[0].reason == "the optimizer has taken no step, so it has no second moments"
    for row in rows[1:]:
        assert row.reason is not None
        assert row.reason.endswith("is below d3.order.min_agreement 1")

    warmup = launcher.run(
        tmp_path / "warmup", arguments(
            config(corpora, "warmup"), tmp_path / "warm", "--lr-warmup-iters", "4")
    ).require_success()
    reasons = [row.reason for row in windows(tmp_path / "warm")]
    assert reasons == ["the learning rate is 0, no step has an influence", None, None]
    assert "stored order kept: the learning rate is 0" in warmup.output


def test_domains_without_samples_leave_windows_as_they_are(
    launcher: Launcher, corpora: Path, tmp_path: Path
) -> None:
    """One has the weight 0; one ends, and one begins, in the middle of a window."""
    path = write_config(
        corpora / "empty.yaml", ("web", "wiki", "math"), order=D3, mix={
            "type": "schedule", "interpolation": "step",
            "knots": [[0, {"web": 0, "wiki": 0, "math": 1}], [6, {"web": 1, "wiki": 0, "math": 0}]]})
    run = launcher.run(tmp_path / "run", arguments(path, tmp_path / "save")).require_success()
    save = tmp_path / "save"
    domains = np.array(PlanReader(save / "d3").stored(0, 80))["domain"].reshape(10, 8)
    drafted = [row.round + (unit or 0) for row in windows(save)
               for unit in units(save)[row.round:row.round + row.num_units]]
    assert [set(step) for step in domains] == [{2} if unit < 6 else {0} for unit in drafted]
    assert [row.reason for row in windows(save)] == [None] * 3
    assert np.abs(read_arrays(save / "d3", 8)["advantage"]).max() > 0
    hashes = expected_samples(path, save / "d3")
    assert run.samples() == [hashes[8 * i:8 * i + 8] for i in range(10)]


def test_a_receding_horizon_measures_half_of_its_units_again(
    launcher: Launcher, corpora: Path, tmp_path: Path
) -> None:
    path = config(corpora, "overlap", overlap=True, estimator="look_ahead")
    run = launcher.run(
        tmp_path / "run", arguments(path, tmp_path / "save"), world_size=2).require_success()
    rows = windows(tmp_path / "save")
    assert [(row.step, row.num_units) for row in rows] == [
        (0, 4), (2, 4), (4, 4), (6, 4), (8, 2)]
    hashes = expected_samples(path, tmp_path / "save/d3")
    assert sorted(flat(run.samples())) == sorted(hashes[:80])


@pytest.mark.parametrize(("order", "extra", "message"), [
    ({"probe_sequences": 16}, [], "d3.order.probe_sequences: got 16, more than the 8 sequences"),
    ({"window": 11}, [], "d3.order.window: got 11 global batches, which are 88 samples, but the run"),
    ({"sketch": {"dim": 10**7}}, [], "d3.order.sketch.dim: got 10000000, more than the model's"),
    ({}, ["--fp16"], "--fp16: not possible with d3.order"),
    ({}, ["--num-experts", "2", "--disable-bias-linear", "--moe-input-jitter-eps", "0.01"],
     "--moe-input-jitter-eps: not possible with d3.order"),
    ({"estimator": "projekted"}, [], "d3.order.estimator"),
    ({"step": "optimizer"}, ["--optimizer", "sgd"],
     "d3.order.step: `optimizer` is the step of --optimizer adam, got sgd"),
])
def test_what_cannot_work_is_refused_before_a_plan_begins(
    launcher: Launcher, corpora: Path, tmp_path: Path, order: dict[str, Any], extra: list[str],
    message: str,
) -> None:
    run = launcher.run(
        tmp_path / "run", arguments(config(corpora, "refused", **order), tmp_path / "save", *extra))
    assert run.codes == [1]
    assert message in run.output
    assert not (tmp_path / "save/d3").exists()
