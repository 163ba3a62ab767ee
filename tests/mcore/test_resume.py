"""Killed anywhere, resumed exactly: samples, losses, gradient norms and plan, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_d3.plan.reader import PlanReader
from tests.mcore.launcher import Launcher, Run
from tests.mcore.plans import (
    BATCH,
    expected_samples,
    flags,
    flat,
    ordinals,
    plan_bytes,
    write_config,
)

pytestmark = pytest.mark.mcore

STEPS = 5
SCHEDULE = {"type": "schedule", "interpolation": "cosine", "max_epochs": {"wiki": 0.6},
            "knots": [[0, {"web": 0.8, "code": 0.1, "wiki": 0.1}],
                      [4, {"web": 0.1, "code": 0.4, "wiki": 0.5}]]}
KILLED = -9


@pytest.fixture(scope="module")
def whole(launcher: Launcher, corpora: Path) -> tuple[Path, Path, Run]:
    """A run of two data-parallel ranks that nothing interrupts."""
    config = write_config(corpora / "schedule.yaml", mix=SCHEDULE)
    save = corpora / "whole"
    run = launcher.run(save / "run", arguments(config, save), world_size=2)
    return config, save, run.require_success()


def arguments(config: Path, save: Path, *extra: str, steps: int = STEPS) -> list[str]:
    """Checkpoints every second step, evaluations too; the run's length is part of the plan."""
    return [*flags(config, save, steps=steps, save_interval=2), "--eval-interval", "2",
            "--eval-iters", "1", *extra]


def require_same(save: Path, whole: tuple[Path, Path, Run], last: Run, first_step: int) -> None:
    """The resumed run repeats the uninterrupted one from `first_step` (1-based) on."""
    _, whole_save, whole_run = whole
    last.require_success()
    for rank in (0, 1):
        assert last.steps(rank) == whole_run.steps(rank)[first_step - 1:]
    assert plan_bytes(save / "d3") == plan_bytes(whole_save / "d3")


@pytest.mark.parametrize("fault", ["in_the_step", "after_the_ledger"])
@pytest.mark.parametrize("kill_at", range(1, STEPS))
def test_killed_at_any_step_the_run_continues_bit_for_bit(
    launcher: Launcher, whole: tuple[Path, Path, Run], tmp_path: Path, kill_at: int, fault: str
) -> None:
    config = whole[0]
    if fault == "in_the_step":  # trained, but not in the ledger
        killed = launcher.run(
            tmp_path / "a", arguments(config, tmp_path), world_size=2, kill_at=kill_at)
    else:
        killed = launcher.run(
            tmp_path / "a", arguments(config, tmp_path), world_size=2,
            setup="tests.mcore.faults:kill_after_ledger",
            environment={"D3_TEST_KILL_AT": str(kill_at)})
    assert KILLED in killed.codes
    assert len(killed.steps()) == kill_at
    resumed = launcher.run(tmp_path / "b", arguments(config, tmp_path), world_size=2)
    checkpoint = (kill_at - 1) // 2 * 2  # the kill comes before the checkpoint of its own step
    require_same(tmp_path, whole, resumed, checkpoint + 1)


@pytest.mark.parametrize("layout", [[], ["--tensor-model-parallel-size", "2"]])
def test_dropout_continues_where_it_was(
    launcher: Launcher, corpora: Path, tmp_path: Path, layout: list[str]
) -> None:
    config = write_config(corpora / "dropout.yaml")
    dropout = ["--hidden-dropout", "0.1", "--attention-dropout", "0.1", *layout]
    whole_run = launcher.run(
        tmp_path / "a", arguments(config, tmp_path / "whole", *dropout), world_size=2)
    launcher.run(
        tmp_path / "b", arguments(config, tmp_path / "cut", *dropout, "--exit-interval", "2"),
        world_size=2).require_success()
    resumed = launcher.run(
        tmp_path / "c", arguments(config, tmp_path / "cut", *dropout), world_size=2)
    assert resumed.require_success().losses() == whole_run.require_success().losses()[2:]
    plain = launcher.run(
        tmp_path / "d", arguments(config, tmp_path / "plain", *layout), world_size=2)
    assert plain.losses()[0] != whole_run.losses()[0]  # dropout was on


def test_an_older_checkpoint_sets_the_later_plan_aside(
    launcher: Launcher, whole: tuple[Path, Path, Run], tmp_path: Path
) -> None:
    config = whole[0]
    launcher.run(tmp_path / "a", arguments(config, tmp_path), world_size=2).require_success()
    again = launcher.run(
        tmp_path / "b", arguments(config, tmp_path, "--ckpt-step", "2"), world_size=2)
    require_same(tmp_path, whole, again, 3)
    aside = list((tmp_path / "d3").glob("abandoned-*"))
    assert len(aside) == 1
    assert "resumed at iteration 2, what came later is in" in again.output


def test_other_data_parallel_sizes_micro_batches_and_workers_give_the_same_order(
    launcher: Launcher, whole: tuple[Path, Path, Run], tmp_path: Path
) -> None:
    """DP 1, then 2 with workers, then 4 with another micro-batch: one order of samples."""
    config, whole_save, whole_run = whole
    lives = (
        (1, 2, ["--micro-batch-size", "8"]),
        (2, 4, ["--num-workers", "2", "--micro-batch-size", "1"]),
        (4, STEPS, ["--num-workers", "1", "--micro-batch-size", "2"]),
    )
    samples = []
    for world_size, until, extra in lives:
        run = launcher.run(
            tmp_path / f"dp{world_size}",
            arguments(config, tmp_path, "--exit-interval", str(until), *extra),
            world_size=world_size).require_success()
        samples += run.samples()
    assert samples == whole_run.samples()
    assert (tmp_path / "d3/positions.bin").read_bytes() == (
        whole_save / "d3/positions.bin").read_bytes()


def test_a_fork_adds_a_domain_and_keeps_every_cursor(
    launcher: Launcher, corpora: Path, tmp_path: Path
) -> None:
    """No sample of any domain is lost or comes twice within its epoch, across two forks."""
    before = write_config(corpora / "before.yaml")
    after = write_config(
        corpora / "after.yaml", domains=("web", "math", "code", "wiki"),
        mix={"type": "static", "weights": {"web": 0.2, "math": 0.5, "code": 0.2, "wiki": 0.1}})
    first = launcher.run(
        tmp_path / "a", flags(before, tmp_path, steps=3, save_interval=3)).require_success()

    refused = launcher.run(tmp_path / "b", flags(after, tmp_path, steps=6, save_interval=3))
    assert refused.codes == [1]
    assert "made with domains" in refused.output
    assert "--d3-resume fork" in refused.output
    assert "Traceback" not in refused.output

    forked = launcher.run(
        tmp_path / "c",
        [*flags(after, tmp_path, steps=6, save_interval=3), "--d3-resume", "fork"],
        world_size=2).require_success()
    again = launcher.run(
        tmp_path / "d", flags(after, tmp_path, steps=8, save_interval=3), world_size=2)
    again.require_success()

    drawn = ordinals(tmp_path / "d3")
    assert list(drawn) == ["0:web", "1:code", "2:wiki", "3:math"]
    for ordinal_list in drawn.values():
        assert sorted(ordinal_list) == list(range(len(ordinal_list)))
    assert abs(len(drawn["3:math"]) - 0.5 * 5 * 8) <= 1
    reader = PlanReader(tmp_path / "d3")
    assert [g.position for g in reader.plan.generations] == [0, 24, 48]
    trained = flat(first.samples()) + flat(forked.samples()) + flat(again.samples())
    assert trained == expected_samples(after, tmp_path / "d3")


@pytest.mark.parametrize(("extra", "message"), [
    (["--d3-set", "seed=7"], "made with seed 1234, now 7; keep the old one"),
    (["--seq-length", "16", "--max-position-embeddings", "32"], "made with seq_length 32, now 16"),
    (["--vocab-size", "300"], "made with tokenizer NullTokenizer"),
    (["--d3-set", "mix.weights={web: 1, code: 1, wiki: 1}"], "made with mix.weights"),
])
def test_a_change_of_the_data_is_refused_by_field_and_value(
    launcher: Launcher, corpora: Path, tmp_path: Path, extra: list[str], message: str
) -> None:
    config = write_config(corpora / "changed.yaml")
    # Without a checkpoint: the plan alone tells that this is another run.
    launcher.run(tmp_path / "a", flags(config, tmp_path, steps=2), kill_at=1)
    refused = launcher.run(
        tmp_path / "b", [*flags(config, tmp_path, steps=2), *extra], world_size=2)
    assert refused.codes == [1, 1]
    assert message in refused.output
    assert "--d3-resume fork" in refused.output
    assert "Traceback" not in refused.output


def test_a_stock_checkpoint_is_adopted_by_a_fork_only(
    launcher: Launcher, corpora: Path, tmp_path: Path
) -> None:
    from tests.mcore.launcher import TINY
    from tests.mcore.test_stock import blend

    config = write_config(corpora / "adopt.yaml")
    launcher.run(tmp_path / "stock", [
        *TINY, *BATCH, *blend(tmp_path), "--train-iters", "2", "--lr-decay-iters", "100",
        "--save", str(tmp_path), "--save-interval", "2"]).require_success()

    refused = launcher.run(tmp_path / "a", flags(config, tmp_path, steps=4))
    assert refused.codes == [1]
    assert "there is none, but the checkpoint is of iteration 2" in refused.output

    adopted = launcher.run(
        tmp_path / "b", [*flags(config, tmp_path, steps=4), "--d3-resume", "fork"])
    adopted.require_success()
    assert [row["positions"][0] for row in adopted.steps()] == [16, 24]
    assert flat(adopted.samples()) == expected_samples(config, tmp_path / "d3")


def test_an_evaluation_of_an_old_checkpoint_leaves_the_plan_alone(
    launcher: Launcher, whole: tuple[Path, Path, Run], tmp_path: Path
) -> None:
    config = whole[0]
    launcher.run(tmp_path / "a", arguments(config, tmp_path), world_size=2).require_success()
    before = plan_bytes(tmp_path / "d3")
    evaluated = launcher.run(
        tmp_path / "b", arguments(config, tmp_path, "--ckpt-step", "2", "--skip-train"),
        world_size=2).require_success()
    assert "d3 validation at iteration 2 | loss web" in evaluated.output
    assert plan_bytes(tmp_path / "d3") == before
    assert not list((tmp_path / "d3").glob("abandoned-*"))


def test_a_refused_branch_leaves_no_copy_of_the_plan(
    launcher: Launcher, corpora: Path, tmp_path: Path
) -> None:
    config = write_config(corpora / "branch.yaml")
    old, new = tmp_path / "old", tmp_path / "new"
    launcher.run(
        tmp_path / "a", flags(config, old, steps=2, save_interval=2)).require_success()
    branch = [*flags(config, new, steps=4), "--load", str(old)]
    refused = launcher.run(tmp_path / "b", [*branch, "--d3-set", "seed=7"])
    assert refused.codes == [1]
    assert not (new / "d3").exists()
    launcher.run(tmp_path / "c", branch).require_success()
    assert (new / "d3/ledger.jsonl").read_bytes().startswith(
        (old / "d3/ledger.jsonl").read_bytes())


def test_a_run_that_its_caps_end_at_once_says_so_and_can_be_corrected(
    launcher: Launcher, corpora: Path, tmp_path: Path
) -> None:
    config = write_config(corpora / "at_once.yaml")
    arguments_ = flags(config, tmp_path, steps=2)
    ended = launcher.run(tmp_path / "a", [
        *arguments_, "--d3-set", "mix.max_epochs=0.01", "--d3-set", "mix.exhausted=stop"])
    assert ended.codes == [0]
    assert "the plan ends at position 0" in ended.output
    launcher.run(tmp_path / "b", arguments_).require_success()
