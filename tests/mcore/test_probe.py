"""Probes inside a running Megatron: the same numbers under every layout, training untouched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.mcore.launcher import LLAMA, TINY, Launcher, Run
from tests.mcore.test_stock import blend

pytestmark = pytest.mark.mcore

BATCH = ["--micro-batch-size", "2", "--global-batch-size", "8", "--train-iters", "4"]
RECOMPUTE = ["--recompute-granularity", "full", "--recompute-method", "uniform",
             "--recompute-num-layers", "1"]
LAYOUTS = {
    "tp2": (2, ["--tensor-model-parallel-size", "2"]),
    "tp2-sequence-parallel": (
        2, ["--tensor-model-parallel-size", "2", "--sequence-parallel", *RECOMPUTE]),
    "pp2": (2, ["--pipeline-model-parallel-size", "2"]),
    "tp2-pp2": (4, ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]),
    "pp2-interleaved": (
        2, ["--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1",
            "--microbatch-group-size-per-virtual-pipeline-stage", "4"]),
    "dp2": (2, ["--overlap-grad-reduce", "--overlap-param-gather"]),
    "dp2-dropout": (2, ["--attention-dropout", "0.1", "--hidden-dropout", "0.1"]),
}


def probed(run: Run, rank: int = 0) -> dict[str, np.ndarray]:
    with np.load(run.folder / f"probe{rank}.npz") as file:
        return dict(file)


def run_at(
    launcher: Launcher, folder: Path, flags: list[str], probe_at: int,
    setup: str = "probe_once", **kwargs: Any
) -> Run:
    return launcher.run(
        folder, flags, timeout=300, setup=f"tests.mcore.probing:{setup}",
        environment={"D3_TEST_PROBE_AT": str(probe_at)}, **kwargs).require_success()

AT_STEP_2 = ["--save-interval", "2", "--ckpt-format", "torch_dist"]


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def single(
    request: pytest.FixtureRequest, launcher: Launcher, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[str], Run]:
    """A run of one process, with a checkpoint at step 2 and a probe before step 3."""
    folder = tmp_path_factory.mktemp(request.param)
    shape = LLAMA if request.param == "llama" else []
    flags = [*TINY, "--num-layers", "4", *BATCH, *blend(folder), *shape, "--use-distributed-optimizer",
             "--dist-ckpt-optim-fully-reshardable", "--load", str(folder / "checkpoint")]
    save = ["--save", str(folder / "checkpoint"), *AT_STEP_2]
    first = run_at(launcher, folder / "single", [*flags, *save], 3)
    return [*flags, "--ckpt-step", "2"], first


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_measures_the_same_and_trains_as_if_it_had_not(
    launcher: Launcher, tmp_path: Path, single: tuple[list[str], Run], layout: str
) -> None:
    flags, first = single
    world_size, layout_flags = LAYOUTS[layout]
    require_the_same(launcher, tmp_path, first, [*flags, *layout_flags], world_size)


def require_untouched(run: Run, plain: Run) -> None:
    """Training with a probe in it ends where training without it does, to the last bit."""
    assert run.losses() == plain.losses()
    assert run.grad_norms() == plain.grad_norms()
    for rank in range(len(run.codes)):
        name = f"state{rank}.txt"
        assert (run.folder / name).read_text() == (plain.folder / name).read_text()


def require_the_same(
    launcher: Launcher, folder: Path, first: Run, flags: list[str], world_size: int,
    **kwargs: Any
) -> None:
    """Every rank measures what the run of one process did, and trains as if it had not."""
    kwargs["world_size"] = world_size
    run = run_at(launcher, folder / "probed", flags, 3, **kwargs)
    require_untouched(run, run_at(launcher, folder / "plain", flags, 0, **kwargs))

    expected = probed(first)
    for rank in range(world_size):
        found = probed(run, rank)
        assert found.keys() == expected.keys()
        for name, wanted in expected.items():
            got = found[name]
            known = ~np.isnan(got)
            assert known.all() or name == "scales"
            # float32 in another order; weights + displacement are rounded, 1e-7 / 0.01, and
            # differences of gradients lose digits, in S
            bound = 1e-4 if "-" in name else 2e-5 if name.startswith("applied") else 1e-6
            error = np.abs(got[known] - wanted[known]).max() / np.abs(wanted).max()
            assert error < bound, f"{name} on rank {rank}: {error:.2g}"


def test_groups_share_units_where_there_are_more_of_them(
    launcher: Launcher, tmp_path: Path, single: tuple[list[str], Run]
) -> None:
    """Four data-parallel groups, two units: each group measures half a unit."""
    flags, first = single
    setup = "probe_two_units_once"
    alone = run_at(launcher, tmp_path / "alone", flags, 3, setup=setup)
    overlap = ["--overlap-grad-reduce", "--overlap-param-gather"]
    run = run_at(launcher, tmp_path / "dp4", [*flags, *overlap], 3, world_size=4, setup=setup)
    assert alone.losses() == first.losses()[2:]
    expected, ranks = probed(alone), [probed(run, rank) for rank in range(4)]
    names = [f"projected-{r}-{step}" for r in (1, 2) for step in ("sgd", "optimizer")]
    assert {name for name in expected if name.count("-") == 2} == set(names)
    for name, wanted in expected.items():
        assert np.abs(wanted).max() > 0
        error = np.abs(ranks[0][name] - wanted).max() / np.abs(wanted).max()
        assert error < 1e-4, f"{name}: {error:.2g}"
        for found in ranks[1:]:
            np.testing.assert_array_equal(found[name], ranks[0][name])


@pytest.mark.parametrize("optimizer", [[], ["--use-distributed-optimizer"]])
def test_gradients_of_the_step_before_are_no_part_of_a_probe(
    launcher: Launcher, tmp_path: Path, optimizer: list[str]
) -> None:
    flags = [*TINY, "--num-layers", "2", *BATCH, *blend(tmp_path), *optimizer]
    found = probed(run_at(launcher, tmp_path / "run", flags, 3))
    for kind in ("rotation", "none"):
        np.testing.assert_array_equal(found[f"gradient/{kind}"], found[f"again/{kind}"])


def test_bfloat16_weights_are_put_back_to_the_last_bit(
    launcher: Launcher, tmp_path: Path
) -> None:
    flags = [*TINY, *BATCH, *blend(tmp_path), *LLAMA, "--bf16", "--use-distributed-optimizer"]
    setup = "probe_projected_once"
    run = run_at(launcher, tmp_path / "probed", flags, 3, setup=setup)
    require_untouched(run, run_at(launcher, tmp_path / "plain", flags, 0, setup=setup))
    found = probed(run)
    assert {name for name in found if name.count("-") == 2} == {
        f"projected-{r}-{step}" for r in (1, 2) for step in ("sgd", "optimizer")}
    assert all(np.abs(values).max() > 0 for values in found.values())


def test_a_mixture_of_experts_is_probed_and_its_routers_forget_it(
    launcher: Launcher, tmp_path: Path
) -> None:
    """Routers count tokens per expert for their bias, also while a probe runs."""
    flags = [*TINY, *BATCH, *blend(tmp_path), "--num-experts", "2", "--moe-router-topk", "1",
             "--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid",
             "--moe-router-load-balancing-type", "none", "--moe-token-dispatcher-type", "allgather",
             "--disable-bias-linear", "--use-distributed-optimizer"]
    probed_run = run_at(launcher, tmp_path / "probed", flags, 3)
    plain = run_at(launcher, tmp_path / "plain", flags, 0)
    require_untouched(probed_run, plain)
    s = probed(probed_run)["projected-1-sgd"]
    assert np.abs(s).max() > 0


# A dense layer, and one with a router of several auxiliary losses and a shared expert.
EXPERTS = [
    "--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "32",
    "--moe-layer-freq", "[0,1]", "--moe-shared-expert-intermediate-size", "32",
    "--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias",
    "--moe-router-load-balancing-type", "seq_aux_loss", "--moe-aux-loss-coeff", "0.01",
    "--moe-z-loss-coeff", "0.001"]
ALLTOALL = ["--moe-token-dispatcher-type", "alltoall"]
ALLGATHER = ["--moe-token-dispatcher-type", "allgather"]
TP2 = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
EP2 = ["--expert-model-parallel-size", "2"]
PP2 = ["--pipeline-model-parallel-size", "2"]
SPLIT = ["--use-distributed-optimizer"]
# Where gloo takes part, tensor parallelism of experts needs the dispatcher that sends all tokens.
EXPERT_LAYOUTS = {
    "ep2-allgather": (2, [*EP2, *ALLGATHER, *SPLIT, "--overlap-grad-reduce",
                          "--overlap-param-gather"]),
    "ep2-dp2": (4, [*EP2, *ALLTOALL, *SPLIT]),
    "ep2-dp2-whole-optimizer": (
        4, [*EP2, *ALLTOALL, "--recompute-granularity", "selective", "--recompute-modules", "moe"]),
    "ep2-pp2": (4, [*EP2, *PP2, *ALLTOALL, *SPLIT]),
    "tp2": (2, [*TP2, *ALLGATHER, *SPLIT]),
    "tp2-ep2": (4, [*TP2, *EP2, *ALLGATHER, *SPLIT]),
    "tp2-ep2-within": (4, [*TP2, *EP2, *ALLTOALL, *SPLIT, "--expert-tensor-parallel-size", "1"]),
    "tp2-ep4": (4, [*TP2, "--expert-model-parallel-size", "4", *ALLTOALL, *SPLIT,
                    "--expert-tensor-parallel-size", "1"]),
}


@pytest.fixture(scope="module")
def mixture(
    launcher: Launcher, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[str], Run]:
    """The same of a mixture of experts: flags that load its weights, and its own probe."""
    folder = tmp_path_factory.mktemp("experts")
    flags = [*TINY, *BATCH, *blend(folder), *LLAMA, *EXPERTS]
    save = ["--save", str(folder / "checkpoint"), *AT_STEP_2]
    run_at(launcher, folder / "save", [*flags, *save], 0)
    flags += ["--load", str(folder / "checkpoint"), "--ckpt-step", "2", "--no-load-optim",
              "--no-load-rng"]
    return flags, run_at(launcher, folder / "single", flags, 3, "probe_with_made_up_moments")


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_every_layout_of_experts_measures_the_same(
    launcher: Launcher, tmp_path: Path, mixture: tuple[list[str], Run], layout: str
) -> None:
    flags, first = mixture
    world_size, layout_flags = EXPERT_LAYOUTS[layout]
    require_the_same(launcher, tmp_path, first, [*flags, *layout_flags], world_size,
                     setup="probe_with_made_up_moments")


def test_losses_that_balance_experts_are_no_part_of_a_probe(
    launcher: Launcher, tmp_path: Path, mixture: tuple[list[str], Run]
) -> None:
    flags, first = mixture
    flags = [*flags, "--moe-aux-loss-coeff", "10", "--moe-z-loss-coeff", "1"]
    found = probed(run_at(launcher, tmp_path / "run", flags, 3, "probe_with_made_up_moments"))
    for name, expected in probed(first).items():
        np.testing.assert_array_equal(found[name], expected, err_msg=name)
