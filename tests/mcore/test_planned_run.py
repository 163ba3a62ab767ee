"""A planned run trains on what the plan says, under every layout, and reports every domain."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.mcore.launcher import TINY, Launcher, Run
from tests.mcore.plans import (
    BATCH,
    expected_samples,
    flags,
    flat,
    ledger,
    ordinals,
    plan_bytes,
    scalars,
    write_config,
)

pytestmark = pytest.mark.mcore

SCHEDULE = {"type": "schedule", "interpolation": "linear",
            "knots": [[0, {"web": 0.8, "code": 0.2, "wiki": 0.0}],
                      [4, {"web": 0.1, "code": 0.5, "wiki": 0.4}]]}
LAYOUTS = {
    "dp2": (2, []),
    "dp2-workers": (2, ["--num-workers", "2"]),
    "dp2-distributed-optimizer-bf16": (2, ["--use-distributed-optimizer", "--overlap-grad-reduce",
                                           "--overlap-param-gather", "--bf16"]),
    "tp2": (2, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
    "pp2": (2, ["--pipeline-model-parallel-size", "2"]),
    "tp2-pp2": (4, ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]),
    "pp2-interleaved": (2, ["--pipeline-model-parallel-size", "2", "--num-layers", "4",
                            "--num-virtual-stages-per-pipeline-rank", "2"]),
}


@pytest.fixture(scope="module")
def single(launcher: Launcher, corpora: Path) -> tuple[Path, Path, Run]:
    """Six steps of one process under a schedule, with two evaluations."""
    config = write_config(corpora / "schedule.yaml", mix=SCHEDULE)
    save = corpora / "single"
    run = launcher.run(save / "run", [
        *flags(config, save, steps=6), "--eval-iters", "2", "--eval-interval", "3",
        "--tensorboard-dir", str(save / "tensorboard")])
    return config, save, run.require_success()


def test_every_position_is_the_planned_sample(single: tuple[Path, Path, Run]) -> None:
    config, save, run = single
    assert flat(run.samples()) == expected_samples(config, save / "d3")
    assert [row["positions"] for row in run.steps()] == [
        list(range(8 * step, 8 * step + 8)) for step in range(6)]


def test_a_schedule_moves_the_counts_with_the_weights(single: tuple[Path, Path, Run]) -> None:
    _, save, _ = single
    rows = ledger(save / "d3")
    tokens = {name: [row["loss"].get(name, [0, 0])[1] / 32 for row in rows]
              for name in ("web", "code", "wiki")}
    assert tokens["wiki"][0] == 0
    # cumulative targets of 8 samples a step: knots at steps 0 and 4, constant after
    web = np.array([0.8, 0.625, 0.45, 0.275, 0.1, 0.1]) * 8
    wiki = np.array([0, 0.1, 0.2, 0.3, 0.4, 0.4]) * 8
    assert np.abs(np.cumsum(tokens["web"]) - np.cumsum(web)).max() < 1
    assert np.abs(np.cumsum(tokens["wiki"]) - np.cumsum(wiki)).max() < 1


def test_ledger_sums_are_the_loss_that_megatron_reports(single: tuple[Path, Path, Run]) -> None:
    _, save, run = single
    for row, loss in zip(ledger(save / "d3"), run.losses(), strict=True):
        sums = np.array(list(row["loss"].values()))  # (K, 2)
        assert sums[:, 1].sum() == 8 * 32
        np.testing.assert_allclose(
            sums[:, 0].sum() / sums[:, 1].sum(), float.fromhex(loss), rtol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_plan_and_sums_do_not_depend_on_the_layout(
    launcher: Launcher, single: tuple[Path, Path, Run], tmp_path: Path, layout: str
) -> None:
    config, save, first = single
    world_size, extra = LAYOUTS[layout]
    run = launcher.run(
        tmp_path / "run", [*flags(config, tmp_path, steps=6), *extra], world_size=world_size
    ).require_success()
    assert run.samples() == first.samples()
    ours, theirs = plan_bytes(tmp_path / "d3"), plan_bytes(save / "d3")
    assert ours["positions.bin"] == theirs["positions.bin"]
    for row, loss in zip(ledger(tmp_path / "d3"), run.losses(), strict=True):
        sums = np.array(list(row["loss"].values()))
        assert sums[:, 1].sum() == 8 * 32
        np.testing.assert_allclose(
            sums[:, 0].sum() / sums[:, 1].sum(), float.fromhex(loss), rtol=1e-6)


def test_one_process_and_two_agree_on_each_domains_sums(
    launcher: Launcher, single: tuple[Path, Path, Run], tmp_path: Path
) -> None:
    config, save, _ = single
    launcher.run(
        tmp_path / "run", flags(config, tmp_path, steps=6), world_size=2).require_success()
    for ours, theirs in zip(ledger(tmp_path / "d3"), ledger(save / "d3"), strict=True):
        assert list(ours["loss"]) == list(theirs["loss"])
        for name, (loss_sum, num_tokens) in ours["loss"].items():
            assert num_tokens == theirs["loss"][name][1]
            np.testing.assert_allclose(loss_sum, theirs["loss"][name][0], rtol=1e-5)


def test_evaluations_report_every_domain_on_the_same_samples(
    single: tuple[Path, Path, Run]
) -> None:
    _, save, run = single
    rows = [json.loads(line) for line in (save / "d3" / "evals.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [3, 6]
    for row in rows:
        # 16 samples in turns over three domains
        assert {name: n / 32 for name, (_, n) in row["loss"].items()} == {
            "web": 6, "code": 5, "wiki": 5}
    assert "d3 validation at iteration 6 | loss web" in run.output
    assert "d3 iteration 6 | loss web" in run.output


def test_tensorboard_holds_losses_weights_and_shares(single: tuple[Path, Path, Run]) -> None:
    found = scalars(single[1] / "tensorboard")
    rows = ledger(single[1] / "d3")
    for name in ("web", "code"):
        assert found[f"d3/loss/{name}"] == {
            row["iteration"]: pytest.approx(row["loss"][name][0] / row["loss"][name][1], rel=1e-6)
            for row in rows}
    assert found["d3/weight/web"][1] == pytest.approx(0.8)
    assert found["d3/weight/web"][3] == pytest.approx(0.45)
    assert set(found["d3/valid_loss/wiki"]) == {3, 6}
    assert found["d3/share/web"][6] == pytest.approx(18.8 / 48, abs=1 / 48)


def test_wandb_gets_the_same_names(launcher: Launcher, corpora: Path, tmp_path: Path) -> None:
    config = write_config(corpora / "wandb.yaml")
    notes = tmp_path / "wandb.jsonl"
    launcher.run(
        tmp_path / "run", [*TINY, *BATCH, "--train-iters", "2", "--d3-config", str(config),
                           "--d3-plan-dir", str(tmp_path / "plan")],
        setup="tests.mcore.faults:record_wandb", environment={"D3_TEST_WANDB": str(notes)}
    ).require_success()
    rows = [json.loads(line) for line in notes.read_text().splitlines()]
    names = {name for row in rows if row["iteration"] == 2 for name in row["names"]}
    assert names == {f"d3/{thing}/{domain}" for thing in ("loss", "weight", "share")
                     for domain in ("web", "code", "wiki")}


def test_gradient_accumulation_and_a_growing_batch(
    launcher: Launcher, corpora: Path, tmp_path: Path
) -> None:
    config = write_config(corpora / "growing.yaml")
    arguments = [*TINY, "--micro-batch-size", "1", "--train-samples", "32",
                 "--step-batch-size-schedule", "0:4 384:8", "--lr-decay-samples", "800",
                 "--d3-config", str(config), "--d3-plan-dir", str(tmp_path / "plan")]
    run = launcher.run(tmp_path / "run", arguments, world_size=2).require_success()
    assert [len(step) for step in run.samples()] == [4, 4, 4, 8, 8, 8]  # filled up to 36
    assert flat(run.samples()) == expected_samples(config, tmp_path / "plan")
    assert [row["consumed"] for row in ledger(tmp_path / "plan")] == [4, 8, 12, 20, 28, 36]


def test_skipped_iterations_pass_over_their_positions(
    launcher: Launcher, corpora: Path, tmp_path: Path
) -> None:
    config = write_config(corpora / "skip.yaml")
    run = launcher.run(
        tmp_path / "run",
        [*flags(config, tmp_path, steps=6), "--iterations-to-skip", "2", "3"]).require_success()
    assert [row["positions"][0] for row in run.steps()] == [0, 24, 32, 40]
    assert flat(run.samples()) == [
        s for i, s in enumerate(expected_samples(config, tmp_path / "d3")) if not 8 <= i < 24]
    rows = ledger(tmp_path / "d3")
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["skipped"] for row in rows] == [False, True, True, False, False, False]
    assert [row["consumed"] for row in rows] == [8, 16, 24, 32, 40, 48]


def test_stop_saves_a_checkpoint_where_a_domain_is_exhausted(
    launcher: Launcher, corpora: Path, tmp_path: Path
) -> None:
    config = write_config(
        corpora / "stop.yaml", mix={"type": "static", "max_epochs": {"wiki": 0.25},
                                    "weights": {"web": 0.5, "code": 0.25, "wiki": 0.25},
                                    "exhausted": "stop"})
    run = launcher.run(tmp_path / "run", flags(config, tmp_path, steps=20), world_size=2)
    assert run.codes == [0, 0]
    assert "the plan ends at position 48" in run.output  # 49 samples * 0.25 = 12, 2 a step
    assert len(run.losses()) == 6
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "6"
    assert len(ordinals(tmp_path / "d3")["2:wiki"]) == 12


def test_a_rank_that_disagrees_stops_the_run(
    launcher: Launcher, corpora: Path, tmp_path: Path
) -> None:
    config = write_config(corpora / "disagree.yaml")
    run = launcher.run(
        tmp_path / "run", flags(config, tmp_path, steps=6, save_interval=1), world_size=2,
        setup="tests.mcore.faults:disagree_on_rank_1")
    assert run.codes == [1, 1]
    assert run.output.count("the ranks disagree, so the plan is not the same on all") == 2
    assert [row["iteration"] for row in ledger(tmp_path / "d3")] == [1, 2]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"


@pytest.mark.parametrize(("extra", "message"), [
    (["--data-path", "x"], "--data-path: not possible with --d3-config: the domains of"),
    (["--dataloader-type", "cyclic"], "the plan is the order; leave it out or use single"),
    (["--rampup-batch-size", "2", "2", "8"], "this Megatron ignores it; use --step-batch-size"),
    (["--sft"], "--sft: not possible with megatron_d3.pretrain: packing for fine-tuning changes"),
    (["--perform-rl-step"], "--perform-rl-step: not possible with megatron_d3.pretrain: RL makes its own"),
    (["--phase-transition-iterations", "1"], "use a schedule (mix.type: schedule) for phases"),
    (["--hybrid-context-parallel"], "--hybrid-context-parallel: not possible with megatron_d3.pretrain"),
    (["--dataloader-inter-document-masking"], "use --reset-attention-mask"),
    (["--multiple-validation-sets"], "every evaluation reports each domain by itself"),
    (["--full-validation"], "set --eval-iters to cover the held-out samples"),
    (["--mtp-num-layers", "1"], "multi-token prediction has a loss of its own"),
    (["--mock-data"], "--mock-data: not possible with --d3-config: mock data has no domains"),
    (["--fim-data", "--fim-eod-token", "e"], "--fim-data: not possible with megatron_d3.pretrain"),
    (["--d3-set", "mix.tyep=natural"], "d3.mix.tyep"),
    (["--d3-plugin", "no.such.module"], "--d3-plugin no.such.module: cannot be imported"),
    (["--eval-iters", "1", "--d3-set", "valid_fraction=0"], "no domain has a held-out part"),
])
def test_what_contradicts_the_plan_is_refused_by_name(
    launcher: Launcher, corpora: Path, tmp_path: Path, extra: list[str], message: str
) -> None:
    config = write_config(corpora / "refused.yaml")
    run = launcher.run(tmp_path / "run", [*flags(config, tmp_path, steps=2), *extra])
    assert run.codes == [1]
    assert message in run.output
    assert "Traceback" not in run.output
    assert not (tmp_path / "d3").exists()


@pytest.mark.parametrize(("left_out", "message"), [
    ("--eval-interval", "--eval-interval: missing, expected the number of steps between two eval"),
    ("--save-interval", "--save-interval: missing, expected the number of steps between two check"),
])
def test_intervals_that_megatron_fails_without(
    launcher: Launcher, corpora: Path, tmp_path: Path, left_out: str, message: str
) -> None:
    config = write_config(corpora / "intervals.yaml")
    arguments = flags(config, tmp_path, steps=2)
    at = arguments.index(left_out)
    run = launcher.run(tmp_path / "run", arguments[:at] + arguments[at + 2:])
    assert run.codes == [1]
    assert message in run.output
    assert "Traceback" not in run.output


@pytest.mark.parametrize(("arguments", "message"), [
    (["--d3-set", "mix.type=natural"], "--d3-* flags were given without --d3-config PATH"),
    (["--d3-config", "run.yaml"], "the plan needs a place; give --save DIR"),
])
def test_flags_that_lack_another(
    launcher: Launcher, tmp_path: Path, arguments: list[str], message: str
) -> None:
    run = launcher.run(
        tmp_path / "run", [*TINY, *BATCH, "--train-iters", "1", *arguments])
    assert run.codes == [1]
    assert message in run.output


def test_dry_run_prints_domains_and_first_segment_and_writes_nothing(
    launcher: Launcher, corpora: Path, tmp_path: Path
) -> None:
    config = write_config(corpora / "dry.yaml")
    run = launcher.run(
        tmp_path / "run",
        [*flags(config, tmp_path, steps=2), "--d3-dry-run", "--d3-set", "mix.max_epochs=0.01",
         "--d3-set", "mix.exhausted=repeat"], world_size=2)
    assert run.codes == [0, 0]
    assert run.output.count("samples repeat beyond max_epochs") == 1
    assert "first segment: positions 0-7 of 16, round 0, step 0" in run.output
    assert '"round_steps": 1' in run.output
    assert run.output.count("configuration:") == 1
    assert not (tmp_path / "d3").exists()
