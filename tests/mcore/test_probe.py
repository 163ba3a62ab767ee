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
LAYOUTS = {
    "tp2": (2, ["--tensor-model-parallel-size", "2"]),
    "tp2-sequence-parallel": (2, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
    "pp2": (2, ["--pipeline-model-parallel-size", "2"]),
    "tp2-pp2": (4, ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]),
    "pp2-interleaved": (
        2, ["--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1"]),
    "dp2": (2, ["--overlap-grad-reduce", "--overlap-param-gather"]),
    "dp2-dropout": (2, ["--attention-dropout", "0.1", "--hidden-dropout", "0.1"]),
}


def probed(run: Run, rank: int = 0) -> dict[str, np.ndarray]:
    with np.load(run.folder / f"probe{rank}.npz") as file:
        return dict(file)


def run_at(
    launcher: Launcher, folder: Path, flags: list[str], probe_at: int, **kwargs: Any
) -> Run:
    return launcher.run(
        folder, flags, timeout=200, setup="tests.mcore.probing:probe_once",
        environment={"D3_TEST_PROBE_AT": str(probe_at)}, **kwargs).require_success()


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def single(
    request: pytest.FixtureRequest, launcher: Launcher, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[str], Run]:
    """A run of one process, with a checkpoint at step 2 and a probe before step 3."""
    folder = tmp_path_factory.mktemp(request.param)
    shape = LLAMA if request.param == "llama" else []
    flags = [*TINY, "--num-layers", "4", *BATCH, *blend(folder), *shape, "--use-distributed-optimizer",
             "--dist-ckpt-optim-fully-reshardable", "--load", str(folder / "checkpoint")]
    save = ["--save", str(folder / "checkpoint"), "--save-interval", "2", "--ckpt-format",
            "torch_dist"]
    first = run_at(launcher, folder / "single", [*flags, *save], 3)
    return [*flags, "--ckpt-step", "2"], first


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_measures_the_same_and_trains_as_if_it_had_not(
    launcher: Launcher, tmp_path: Path, single: tuple[list[str], Run], layout: str
) -> None:
    flags, first = single
    world_size, layout_flags = LAYOUTS[layout]
    flags = [*flags, *layout_flags]
    run = run_at(launcher, tmp_path / "probed", flags, 3, world_size=world_size)
    plain = run_at(launcher, tmp_path / "plain", flags, 0, world_size=world_size)
    assert run.losses() == plain.losses()
    assert run.grad_norms() == plain.grad_norms()

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


@pytest.mark.parametrize("optimizer", [[], ["--use-distributed-optimizer"]])
def test_gradients_of_the_step_before_are_no_part_of_a_probe(
    launcher: Launcher, tmp_path: Path, optimizer: list[str]
) -> None:
    flags = [*TINY, "--num-layers", "2", *BATCH, *blend(tmp_path), *optimizer]
    found = probed(run_at(launcher, tmp_path / "run", flags, 3))
    for kind in ("rotation", "none"):
        np.testing.assert_array_equal(found[f"gradient/{kind}"], found[f"again/{kind}"])


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
    assert probed_run.losses() == plain.losses()
    assert probed_run.grad_norms() == plain.grad_norms()
    s = probed(probed_run)["projected-1-sgd"]
    assert np.abs(s).max() > 0
