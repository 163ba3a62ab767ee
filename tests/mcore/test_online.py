"""Online mixers in real runs: the same weights on every rank, in every life, under every layout."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_d3.mix import ODM
from megatron_d3.plan.audit import audit
from megatron_d3.plan.reader import PlanReader
from megatron_d3.planning import decider_factory
from megatron_d3.types import MixContext, StepSignals
from tests.mcore.launcher import Launcher, Run
from tests.mcore.plans import (
    expected_samples,
    flags,
    flat,
    ledger,
    plan_bytes,
    write_config,
)

pytestmark = pytest.mark.mcore

STEPS, NAMES = 6, ("web", "code", "wiki")
WEIGHTS = {"web": 0.6, "code": 0.3, "wiki": 0.1}
# A warm-up of 2 steps and a read-ahead of 1: kills fall into both, and between rounds of 2 steps.
ODM_MIX = {"type": "odm", "warmup_steps": 2, "weights": WEIGHTS, "max_epochs": 4}
EXTRA = {"read_ahead_steps": 1}


@pytest.fixture(scope="module")
def config(corpora: Path) -> Path:
    return write_config(corpora / "odm.yaml", mix=ODM_MIX, **EXTRA)


@pytest.fixture(scope="module")
def whole(launcher: Launcher, corpora: Path, config: Path) -> tuple[Path, Run]:
    """Two data-parallel ranks, a checkpoint every step, never interrupted."""
    save = corpora / "whole"
    run = launcher.run(
        save / "run", flags(config, save, steps=STEPS, save_interval=1), world_size=2,
        setup="tests.mcore.faults:record_state")
    return save, run.require_success()


def states(run: Run) -> list[list[str]]:
    """Hashes of the mixer's and the decider's state after each step, by rank."""
    return [(run.folder / f"rank{rank}.states").read_text().split()
            for rank in range(len(run.codes))]


def weights_of(plan_dir: Path) -> list[list[float]]:
    """Target weights of every round."""
    found: list[list[float]] = []
    for row, _ in PlanReader(plan_dir).rounds():
        found.append(list(row.weights.values()) if row.weights else found[-1])
    return found


def replayed(plan_dir: Path, *, read_ahead: int, **config: object) -> list[list[float]]:
    """What a mixer of our own says of each step, from the ledger's rows alone."""
    mixer = ODM(ODM.Config(**config), [r.info for r in PlanReader(plan_dir).plan.table],  # type: ignore[arg-type]
                total_samples=STEPS * 8)
    context = MixContext(0, 0, STEPS * 8, np.zeros(3, np.int64))
    state = mixer.init()
    per_step = [mixer.weights(state, context).tolist()] * (1 + read_ahead)
    for row in ledger(plan_dir):
        sums = np.array([row["loss"].get(name, [0, 0])[0] for name in NAMES], np.float64)
        tokens = np.array([row["loss"].get(name, [0, 0])[1] for name in NAMES], np.int64)
        state = mixer.update(state, StepSignals(row["iteration"], row["consumed"], sums, tokens))
        per_step.append(mixer.weights(state, context).tolist())
    return per_step[:STEPS]


def test_weights_follow_the_ledger_from_beyond_the_read_ahead(
    whole: tuple[Path, Run], config: Path
) -> None:
    save, run = whole
    expected = replayed(save / "d3", read_ahead=1, warmup_steps=2, weights=WEIGHTS)
    np.testing.assert_allclose(weights_of(save / "d3"), expected, rtol=1e-12)
    np.testing.assert_allclose(expected[:4], [list(WEIGHTS.values())] * 4)  # warm-up 2, ahead 1
    assert expected[4] != expected[3] != expected[5]
    assert flat(run.samples()) == expected_samples(config, save / "d3")
    assert "the losses of step t act on the weights from step t + 2 on" in run.output
    assert "d3 round 4 | iteration 3 | positions 32-39 | weights web" in run.output
    assert "d3 round 1 |" not in run.output.replace("d3 round 1 | iteration 0", "?")


def test_all_ranks_hold_the_same_mixer(whole: tuple[Path, Run]) -> None:
    first, second = states(whole[1])
    assert first == second and len(first) == STEPS == len(set(first))


def test_a_mixed_batch_credits_every_domain_with_its_own_tokens(whole: tuple[Path, Run]) -> None:
    """In a public peer the first sample's domain got the loss of the whole batch."""
    save, run = whole
    records = PlanReader(save / "d3").stored(0, STEPS * 8)["domain"].reshape(STEPS, 8)
    for row, domains, loss in zip(ledger(save / "d3"), records, run.losses(), strict=True):
        assert {name: tokens for name, (_, tokens) in row["loss"].items()} == {
            NAMES[i]: 32 * n for i, n in enumerate(np.bincount(domains, minlength=3)) if n}
        means = {name: total / tokens for name, (total, tokens) in row["loss"].items()}
        assert len(set(means.values())) == len(means)
        total = sum(total for total, _ in row["loss"].values())
        assert total / (8 * 32) == pytest.approx(float.fromhex(loss), rel=1e-6)


def test_the_plan_audits(whole: tuple[Path, Run]) -> None:
    found = audit(whole[0] / "d3", decider_factory())
    assert found.is_sound, found.findings
    assert (found.num_rounds, found.num_steps) == (STEPS, STEPS)


@pytest.mark.parametrize("kill_at", range(1, STEPS))
def test_killed_at_any_step_weights_state_and_plan_go_on_as_before(
    launcher: Launcher, config: Path, whole: tuple[Path, Run], tmp_path: Path, kill_at: int
) -> None:
    save, run = whole
    arguments = flags(config, tmp_path, steps=STEPS, save_interval=1)
    launcher.run(
        tmp_path / "a", arguments, world_size=2, setup="tests.mcore.faults:kill_after_ledger",
        environment={"D3_TEST_KILL_AT": str(kill_at)})
    resumed = launcher.run(
        tmp_path / "b", arguments, world_size=2, setup="tests.mcore.faults:record_state")
    resumed.require_success()
    assert plan_bytes(tmp_path / "d3") == plan_bytes(save / "d3")
    for rank in (0, 1):
        assert states(resumed)[rank] == states(run)[rank][kill_at - 1:]
        assert resumed.steps(rank) == run.steps(rank)[kill_at - 1:]


def test_another_layout_continues_the_trajectory_up_to_float_order(
    launcher: Launcher, config: Path, whole: tuple[Path, Run], tmp_path: Path
) -> None:
    """One rank for two steps, then two with a worker that reads ahead, then four."""
    for world_size, until, extra in ((1, 2, []), (2, 4, ["--num-workers", "1"]), (4, STEPS, [])):
        run = launcher.run(
            tmp_path / str(world_size),
            [*flags(config, tmp_path, steps=STEPS, save_interval=1),
             "--exit-interval", str(until), *extra], world_size=world_size).require_success()
    assert "resumed with data-parallel size 4 and micro-batch size 2: the same weights" in run.output
    assert "up to the order of float sums under another" in run.output
    np.testing.assert_allclose(
        weights_of(tmp_path / "d3"), weights_of(whole[0] / "d3"), rtol=1e-4)
    assert [(row.iteration, row.step, row.start) for row, _ in PlanReader(tmp_path / "d3").rounds()
            ] == [(row.iteration, row.step, row.start)
                  for row, _ in PlanReader(whole[0] / "d3").rounds()]
    assert audit(tmp_path / "d3", decider_factory()).is_sound


# Rounds of 2 steps, a warm-up of 3, which ends inside a round, and a step read ahead.
ROUNDS_OF_TWO = {"round_steps": 2, "mix": {**ODM_MIX, "warmup_steps": 3}}


@pytest.fixture(scope="module")
def by_twos(corpora: Path) -> Path:
    return write_config(corpora / "twos.yaml", **ROUNDS_OF_TWO, **EXTRA)


@pytest.fixture(scope="module")
def whole_by_twos(launcher: Launcher, corpora: Path, by_twos: Path) -> tuple[Path, Run]:
    save = corpora / "twos"
    run = launcher.run(
        save / "run", flags(by_twos, save, steps=STEPS + 2, save_interval=1), world_size=2,
        setup="tests.mcore.faults:record_state").require_success()
    rounds = [(row.iteration, row.step, row.stop) for row, _ in PlanReader(save / "d3").rounds()]
    assert rounds == [(0, 0, 16), (1, 2, 32), (3, 4, 48), (5, 6, 64)]
    weights = weights_of(save / "d3")
    assert weights[0] == weights[1] == weights[2]  # of the warm-up: no loss before step 4 counts
    assert weights[3] != weights[2]
    return save, run


@pytest.mark.parametrize("kill_at", [1, 2, 3, 5])
def test_killed_between_rounds_inside_one_and_inside_the_warm_up(
    launcher: Launcher, by_twos: Path, whole_by_twos: tuple[Path, Run], tmp_path: Path,
    kill_at: int,
) -> None:
    """1: in a round and the warm-up; 2: between rounds; 3: the warm-up ends; 5: after it."""
    save, run = whole_by_twos
    arguments = flags(by_twos, tmp_path, steps=STEPS + 2, save_interval=1)
    killed = launcher.run(
        tmp_path / "a", arguments, world_size=2, setup="tests.mcore.faults:kill_after_ledger",
        environment={"D3_TEST_KILL_AT": str(kill_at)})
    assert -9 in killed.codes
    resumed = launcher.run(
        tmp_path / "b", arguments, world_size=2, setup="tests.mcore.faults:record_state")
    resumed.require_success()
    assert plan_bytes(tmp_path / "d3") == plan_bytes(save / "d3")
    for rank in (0, 1):
        assert states(resumed)[rank] == states(run)[rank][kill_at - 1:]
        assert resumed.steps(rank) == run.steps(rank)[kill_at - 1:]


def test_rounds_of_two_steps_under_other_data_parallel_sizes(
    launcher: Launcher, by_twos: Path, whole_by_twos: tuple[Path, Run], tmp_path: Path
) -> None:
    """One rank stops in the warm-up and inside a round; four go on from there."""
    for world_size, until in ((1, 3), (4, STEPS + 2)):
        run = launcher.run(
            tmp_path / str(world_size),
            [*flags(by_twos, tmp_path, steps=STEPS + 2, save_interval=1),
             "--exit-interval", str(until)], world_size=world_size).require_success()
    assert "resumed with data-parallel size 4 and micro-batch size 2: the same weights" in run.output
    save = whole_by_twos[0]
    np.testing.assert_allclose(
        weights_of(tmp_path / "d3"), weights_of(save / "d3"), rtol=1e-4)
    found, expected = ([(row.iteration, row.step, row.start, row.stop)
                        for row, _ in PlanReader(folder / "d3").rounds()]
                       for folder in (tmp_path, save))
    assert found == expected
    assert audit(tmp_path / "d3", decider_factory()).is_sound


def test_the_lag_is_that_of_the_plans_start_and_more_is_refused(
    launcher: Launcher, corpora: Path, tmp_path: Path
) -> None:
    config = write_config(corpora / "lag.yaml", mix={"type": "odm"}, round_steps=2)
    arguments = flags(config, tmp_path, steps=STEPS, save_interval=1)
    workers = ["--num-workers", "1"]  # 2 x 1 x 2 = 4 samples: 1 step
    launcher.run(tmp_path / "a", [*arguments, *workers, "--exit-interval", "2"]).require_success()
    plan = json.loads((tmp_path / "d3/plan.json").read_text())
    assert [g["read_ahead_steps"] for g in plan["generations"]] == [1]

    refused = launcher.run(
        tmp_path / "b", [*arguments, "--num-workers", "2"], world_size=2)  # 16 samples: 2 steps
    assert refused.codes == [1, 1]
    assert "made with read_ahead_steps 1, now 2" in refused.output
    assert "use fewer --num-workers" in refused.output and "--d3-resume fork" in refused.output
    assert "Traceback" not in refused.output

    launcher.run(tmp_path / "c", arguments, world_size=2).require_success()
    rounds = [(row.iteration, row.step) for row, _ in PlanReader(tmp_path / "d3").rounds()]
    assert rounds == [(0, 0), (1, 2), (3, 4)]  # whatever the workers: one step ahead
    assert audit(tmp_path / "d3", decider_factory()).is_sound


def test_a_rank_with_another_mixer_stops_the_run(
    launcher: Launcher, config: Path, tmp_path: Path
) -> None:
    run = launcher.run(
        tmp_path / "run", flags(config, tmp_path, steps=STEPS), world_size=2,
        setup="tests.mcore.faults:another_mixer_on_rank_1")
    assert run.codes == [1, 1]
    assert run.output.count("the ranks disagree, so the plan is not the same on all") == 2


def test_opposite_smoothings_train_different_weights_and_another_seed_reads_no_state(
    launcher: Launcher, corpora: Path, tmp_path: Path
) -> None:
    config = write_config(corpora / "smooth.yaml", mix={"type": "odm", "first_update": "observation"})
    found = {}
    for name, extra in (("a", ["--d3-set", "mix.smoothing=0.05"]),
                        ("b", ["--d3-set", "mix.smoothing=0.95"])):
        launcher.run(tmp_path / name / "run", [*flags(config, tmp_path / name, steps=5), *extra]
                     ).require_success()
        found[name] = weights_of(tmp_path / name / "d3")
    # Little yet: exploration holds almost all of the weight in the first K ln K steps.
    assert np.abs(np.array(found["a"]) - np.array(found["b"])).max() > 1e-4
    other = launcher.run(
        tmp_path / "run", [*flags(config, tmp_path / "a", steps=6), "--d3-set", "seed=9",
                           "--d3-set", "mix.smoothing=0.05"])
    assert other.codes == [1]
    assert "made with seed 1234, now 9; keep the old one" in other.output


def test_a_misspelt_parameter_stops_the_run(
    launcher: Launcher, config: Path, tmp_path: Path
) -> None:
    run = launcher.run(
        tmp_path / "run", [*flags(config, tmp_path, steps=2), "--d3-set", "mix.smoothin=0.9"])
    assert run.codes == [1]
    assert "d3.mix.smoothin: unknown key for type odm, did you mean smoothing?" in run.output
    assert not (tmp_path / "d3").exists()


OTHERS = {
    "ado": {"type": "ado", "ignore_steps": 0, "start_step": 2, "fit_steps": 1},
    "reference_loss": {"type": "reference_loss", "update_steps": 2,
                       "losses": {"web": 5.4, "code": 5.3, "wiki": 5.5}},
    "odm paper": {"type": "odm", "variant": "paper", "max_epochs": {"wiki": 0.1}},
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_others_plan_the_same_on_all_ranks_and_audit(
    launcher: Launcher, corpora: Path, tmp_path: Path, name: str
) -> None:
    config = write_config(corpora / f"{name}.yaml", mix=OTHERS[name])
    run = launcher.run(
        tmp_path / "run", flags(config, tmp_path, steps=STEPS), world_size=2,
        setup="tests.mcore.faults:record_state").require_success()
    first, second = states(run)
    assert first == second and len(set(first)) == STEPS
    found = audit(tmp_path / "d3", decider_factory())
    assert found.is_sound, found.findings
    assert flat(run.samples()) == expected_samples(config, tmp_path / "d3")
    if "max_epochs" in OTHERS[name]:  # 49 samples * 0.1
        assert np.bincount(PlanReader(tmp_path / "d3").stored(0, STEPS * 8)["domain"])[2] == 4
    if name == "reference_loss":
        weights = weights_of(tmp_path / "d3")
        assert weights[1] == weights[0] != weights[2] == weights[3] != weights[4]


def test_a_static_run_goes_over_to_odm_by_a_fork(
    launcher: Launcher, corpora: Path, tmp_path: Path
) -> None:
    static = write_config(corpora / "before.yaml", mix={"type": "static", "weights": WEIGHTS})
    arguments = flags(static, tmp_path, steps=STEPS, save_interval=1)
    launcher.run(tmp_path / "a", [*arguments, "--exit-interval", "2"]).require_success()
    change = ["--d3-set", "mix.type=odm"]
    refused = launcher.run(tmp_path / "b", [*arguments, *change])
    assert refused.codes == [1] and "made with mix.type static, now odm" in refused.output
    launcher.run(
        tmp_path / "c", [*arguments, *change, "--d3-resume", "fork"], world_size=2
    ).require_success()
    weights = weights_of(tmp_path / "d3")
    np.testing.assert_allclose(weights[:3], [list(WEIGHTS.values())] * 3)
    assert weights[3] != weights[2]
    assert audit(tmp_path / "d3", decider_factory()).is_sound


def test_under_tensor_and_pipeline_parallelism_all_ranks_hold_the_mixer_of_the_ledger(
    launcher: Launcher, config: Path, tmp_path: Path
) -> None:
    run = launcher.run(
        tmp_path / "run",
        [*flags(config, tmp_path, steps=STEPS), "--tensor-model-parallel-size", "2",
         "--pipeline-model-parallel-size", "2"],
        world_size=4, setup="tests.mcore.faults:record_state").require_success()
    assert len(set(map(tuple, states(run)))) == 1
    np.testing.assert_allclose(
        weights_of(tmp_path / "d3"),
        replayed(tmp_path / "d3", read_ahead=1, warmup_steps=2, weights=WEIGHTS), rtol=1e-12)
    for row, loss in zip(ledger(tmp_path / "d3"), run.losses(), strict=True):
        sums = np.array(list(row["loss"].values()))
        assert sums[:, 0].sum() / sums[:, 1].sum() == pytest.approx(float.fromhex(loss), rel=1e-6)
