"""Stock Megatron on a CPU: every layout that DESIGN claims, and checkpoints between them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.mcore.launcher import LLAMA, TINY, Launcher, Run
from tests.mcore.test_stock import blend

pytestmark = pytest.mark.mcore

BATCH = ["--micro-batch-size", "2", "--global-batch-size", "8", "--train-iters", "4"]
# name -> (processes, flags)
LAYOUTS = {
    "tp2": (2, ["--tensor-model-parallel-size", "2"]),
    "tp2-sequence-parallel": (2, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
    "pp2": (2, ["--pipeline-model-parallel-size", "2"]),
    "tp2-pp2": (4, ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]),
    "dp2-distributed-optimizer": (
        2, ["--overlap-grad-reduce", "--overlap-param-gather"]),
}


def numbers(values: list[str]) -> np.ndarray:
    return np.array([float.fromhex(value) for value in values])


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def single(
    request: pytest.FixtureRequest, launcher: Launcher, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[str], Path, Run]:
    """A run of one process with a checkpoint at step 2: its flags, checkpoint and record."""
    folder = tmp_path_factory.mktemp(request.param)
    shape = LLAMA if request.param == "llama" else []
    flags = [*TINY, *BATCH, *blend(folder), *shape, "--use-distributed-optimizer",
             "--dist-ckpt-optim-fully-reshardable"]
    checkpoint = folder / "checkpoint"
    first = launcher.run(
        folder / "single",
        [*flags, "--save", str(checkpoint), "--save-interval", "2", "--ckpt-format", "torch_dist"])
    return flags, checkpoint, first.require_success()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_continues_under_another_layout(
    launcher: Launcher, tmp_path: Path, single: tuple[list[str], Path, Run], layout: str
) -> None:
    """Loads step 2 of the one-process run and repeats its steps 3 and 4."""
    flags, checkpoint, first = single
    world_size, layout_flags = LAYOUTS[layout]
    second = launcher.run(
        tmp_path / "run",
        [*flags, *layout_flags, "--load", str(checkpoint), "--ckpt-step", "2"],
        world_size=world_size).require_success()

    assert [row["iteration"] for row in second.steps()] == [3, 4]
    # float32 sums in another order; observed differences are below 1e-6
    np.testing.assert_allclose(numbers(second.losses()), numbers(first.losses()[2:]), rtol=1e-5)
    np.testing.assert_allclose(
        numbers(second.grad_norms()), numbers(first.grad_norms()[2:]), rtol=1e-4)
    assert [sorted(step) for step in second.samples()] == [
        sorted(step) for step in first.samples()[2:]]


RECOMPUTED = {
    "dense": (
        ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--attention-dropout", "0.1",
         "--hidden-dropout", "0.1"],
        ["full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]),
    "experts": (
        ["--num-experts", "4", "--moe-router-topk", "2", "--disable-bias-linear",
         "--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "alltoall"],
        ["selective", "--recompute-modules", "moe", "core_attn"]),
}


@pytest.mark.parametrize("model", RECOMPUTED)
def test_recomputed_activations_are_those_that_were_dropped(
    launcher: Launcher, tmp_path: Path, model: str
) -> None:
    """Within the backward pass Python runs again, and with it what Megatron asks of CUDA."""
    flags, recompute = RECOMPUTED[model]
    flags = [*TINY, *BATCH, *blend(tmp_path), *flags]
    kept = launcher.run(tmp_path / "kept", flags, world_size=2).require_success()
    again = launcher.run(
        tmp_path / "again", [*flags, "--recompute-granularity", *recompute], world_size=2
    ).require_success()
    assert again.losses() == kept.losses()
    assert again.grad_norms() == kept.grad_norms()


def test_bfloat16_trains_with_float32_master_weights(launcher: Launcher, tmp_path: Path) -> None:
    flags = [*TINY, *BATCH, *blend(tmp_path)]
    full = launcher.run(tmp_path / "full", flags).require_success()
    half = launcher.run(
        tmp_path / "half", [*flags, "--bf16", "--use-distributed-optimizer"], world_size=2
    ).require_success()
    np.testing.assert_allclose(numbers(half.losses()), numbers(full.losses()), rtol=1e-2)
    assert half.losses() != full.losses()


@pytest.mark.parametrize(("flags", "message"), [
    (["--context-parallel-size", "2"], "--context-parallel-size: not possible on a CPU"),
    (["--transformer-impl", "transformer_engine"], "needs Transformer Engine; leave it out"),
    (["--distributed-backend", "nccl"], "needs CUDA; leave it out or use gloo"),
])
def test_what_needs_a_gpu_is_refused(
    launcher: Launcher, tmp_path: Path, flags: list[str], message: str
) -> None:
    run = launcher.run(
        tmp_path / "run", [*TINY, *BATCH, "--mock-data", *flags], world_size=2)
    assert run.codes == [1, 1]
    assert message in run.output
