"""A DoReMi proxy beside its frozen reference: its loss, its weights, on every layout, resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from tests.mcore.launcher import Launcher, Run
from tests.mcore.naive_doremi import alphas_from
from tests.mcore.plans import (
    expected_samples,
    flags,
    flat,
    ledger,
    ordinals,
    plan_bytes,
    write_config,
)

pytestmark = pytest.mark.mcore

NAMES = ["web", "code", "wiki"]
STEPS = 4
FAULTS = "tests.mcore.naive_doremi:"
# The padded vocabulary must not depend on tensor parallelism; no clipping.
COMMON = ["--make-vocab-size-divisible-by", "64", "--clip-grad", "1000"]
TP2 = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
PP2 = ["--pipeline-model-parallel-size", "2"]
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one": (1, []),
    "dp2": (2, []),
    "dp2-micro-batches-of-one": (2, ["--micro-batch-size", "1"]),
    "dp2-per-token-loss": (2, ["--calculate-per-token-loss"]),
    "dp2-distributed-optimizer": (2, ["--use-distributed-optimizer", "--overlap-grad-reduce",
                                      "--overlap-param-gather", "--num-workers", "1"]),
    "tp2": (2, TP2),
    "pp2": (2, PP2),
    "tp2-pp2": (4, [*TP2, *PP2]),
    "dp2-tp2-pp2": (8, [*TP2, *PP2]),
    "pp2-interleaved": (2, [*PP2, "--num-virtual-stages-per-pipeline-rank", "2"]),
}


def train(
    launcher: Launcher, folder: Path, config: Path, extra: list[str] | None = None, *,
    steps: int = STEPS, world_size: int = 1, name: str = "run", **how: Any,
) -> Run:
    arguments = [*flags(config, folder, steps=steps, save_interval=2), *COMMON, "--num-layers", "4",
                 "--d3-plan-dir", str(folder / "d3"), *(extra or [])]
    return launcher.run(folder / name, arguments, world_size=world_size, **how)


@pytest.fixture(scope="module")
def reference(launcher: Launcher, corpora: Path) -> Path:
    """Checkpoint of a small model, of another shape than the proxy's, after four steps."""
    config = write_config(corpora / "reference.yaml")
    extra = ["--num-layers", "4", "--hidden-size", "16", "--ffn-hidden-size", "48",
             "--num-attention-heads", "2", "--lr", "1e-2", "--seed", "77"]
    train(launcher, corpora / "reference", config, extra).require_success()
    return corpora / "reference"


@pytest.fixture(scope="module")
def start(launcher: Launcher, corpora: Path) -> Path:
    """The proxy's first weights, which all layouts must share."""
    config = write_config(corpora / "start.yaml")
    train(launcher, corpora / "start", config, steps=2).require_success()
    return corpora / "start"


@pytest.fixture(scope="module")
def proxy(corpora: Path, reference: Path) -> Path:
    return write_config(
        corpora / "proxy.yaml", mix={"type": "doremi", "reference": str(reference), "eta": 4.0})


def from_start(start: Path, *extra: str) -> list[str]:
    return ["--load", str(start), "--finetune", *extra]


@pytest.fixture(scope="module")
def single(launcher: Launcher, corpora: Path, proxy: Path, start: Path) -> tuple[Path, Run]:
    """The proxy in one process, with naive losses and gradients beside each step."""
    folder = corpora / "single"
    folder.mkdir()
    run = train(launcher, folder, proxy, from_start(start), setup=FAULTS + "compare_gradients",
                environment={"D3_TEST_GRADIENTS": str(folder)})
    return folder, run.require_success()


def alphas(plan_dir: Path) -> list[np.ndarray]:
    return alphas_from(ledger(plan_dir), NAMES, eta=4.0)


def gradients(folder: Path, kind: str) -> list[Any]:
    return [np.load(folder / f"{kind}-{step}.npz") for step in range(STEPS)]


def test_loss_and_gradient_are_the_papers(single: tuple[Path, Run]) -> None:
    folder, run = single
    for step, (naive, real) in enumerate(
            zip(gradients(folder, "naive"), gradients(folder, "real"), strict=True)):
        assert_allclose(real["loss"], naive["loss"], rtol=1e-5)
        scale = np.abs(naive["gradient"]).max()
        assert_allclose(real["gradient"], naive["gradient"], rtol=1e-5, atol=1e-6 * scale)
        norm = np.linalg.norm(naive["gradient"])
        assert_allclose(float.fromhex(run.grad_norms()[step]), norm, rtol=1e-5)
    # it is not the stock loss
    assert abs(alphas(folder / "d3")[STEPS - 1] - 1 / 3).max() > 0.01


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one"])
def test_every_layout_gives_the_same_loss_gradient_and_weights(
    launcher: Launcher, proxy: Path, start: Path, single: tuple[Path, Run], tmp_path: Path,
    layout: str,
) -> None:
    world_size, extra = LAYOUTS[layout]
    run = train(
        launcher, tmp_path, proxy, from_start(start, *extra), world_size=world_size,
        setup=FAULTS + "record_alpha",
        environment={"D3_TEST_ALPHA_FILE": str(tmp_path / "alpha")}, timeout=300).require_success()
    folder, one = single
    assert run.samples() == one.samples()
    for ours, theirs in zip(run.grad_norms(), one.grad_norms(), strict=True):
        assert_allclose(float.fromhex(ours), float.fromhex(theirs), rtol=1e-5)
    for ours, theirs in zip(run.losses(), one.losses(), strict=True):
        assert_allclose(float.fromhex(ours), float.fromhex(theirs), rtol=1e-5)
    expected = alphas(tmp_path / "d3")
    for rank in range(world_size):
        text = (tmp_path / f"alpha{rank}").read_text().splitlines()
        used = [json.loads(line) for line in text]
        assert_allclose(used, expected[:-1], rtol=1e-12)  # alpha_{t-1} in step t
    assert_allclose(expected, alphas(folder / "d3"), rtol=1e-4)


def test_samples_are_uniform_and_the_log_shows_alpha(single: tuple[Path, Run], proxy: Path) -> None:
    folder, run = single
    assert flat(run.samples()) == expected_samples(proxy, folder / "d3")
    counts = [len(draws) for draws in ordinals(folder / "d3").values()]
    assert sum(counts) == 8 * STEPS and max(counts) - min(counts) <= 1
    last = dict(zip(NAMES, alphas(folder / "d3")[-1], strict=True))
    shown = " ".join(f"{name} {value:.4f}" for name, value in last.items())
    assert f"d3 iteration {STEPS} | loss web" in run.output
    assert f" | alpha {shown} | alpha_mean web" in run.output
    assert "act on the loss weights alpha from step t + 1 on" in run.output


def test_opposite_weights_train_opposite_models(
    launcher: Launcher, proxy: Path, start: Path, tmp_path: Path
) -> None:
    """In a public port alpha never reached the loss: all weights trained the same model."""
    losses = {}
    for name, alpha in (("web", [0.98, 0.01, 0.01]), ("wiki", [0.01, 0.01, 0.98]),
                        ("web again", [0.98, 0.01, 0.01])):
        folder = tmp_path / name
        train(launcher, folder, proxy, from_start(start, "--lr", "1e-2"),
              setup=FAULTS + "force_alpha", environment={"D3_TEST_ALPHA": json.dumps(alpha)}
              ).require_success()
        row = ledger(folder / "d3")[-1]["loss"]
        losses[name] = {domain: total / tokens for domain, (total, tokens) in row.items()}
    assert losses["web"] == losses["web again"]
    assert losses["web"]["web"] < losses["wiki"]["web"] - 0.01
    assert losses["wiki"]["wiki"] < losses["web"]["wiki"] - 0.01


def test_the_released_codes_variant(
    launcher: Launcher, corpora: Path, reference: Path, start: Path, tmp_path: Path
) -> None:
    config = write_config(corpora / "official.yaml", mix={
        "type": "doremi", "reference": str(reference), "eta": 4.0, "variant": "official"})
    run = train(launcher, tmp_path, config, from_start(start), world_size=2).require_success()
    last, alpha = ledger(tmp_path / "d3")[-1]["loss"], alphas(tmp_path / "d3")[-2]
    sums, counts = np.array([last[name] for name in NAMES]).T
    weighted_mean = (alpha * sums).sum() / (alpha * counts).sum()
    assert f"doremi loss: {weighted_mean:.4f}"[:-1] in run.output


def test_a_domain_that_is_absent_from_batches(
    launcher: Launcher, proxy: Path, start: Path, tmp_path: Path
) -> None:
    """Two samples a step, three domains: one is always absent and keeps its last excess."""
    train(launcher, tmp_path, proxy, from_start(
        start, "--global-batch-size", "2", "--micro-batch-size", "1"), world_size=2, steps=6,
        setup=FAULTS + "record_alpha",
        environment={"D3_TEST_ALPHA_FILE": str(tmp_path / "alpha")}).require_success()
    rows = ledger(tmp_path / "d3")
    assert all(len(row["loss"]) < 3 for row in rows)
    used = [json.loads(line) for line in (tmp_path / "alpha1").read_text().splitlines()]
    assert_allclose(used, alphas(tmp_path / "d3")[:-1], rtol=1e-12)


def test_ranks_that_hold_different_mixers_stop(
    launcher: Launcher, proxy: Path, start: Path, tmp_path: Path
) -> None:
    run = train(launcher, tmp_path, proxy, from_start(start), world_size=2,
                setup=FAULTS + "change_alpha_on_rank_1")
    assert run.codes == [1, 1]
    assert "the ranks disagree" in run.output
    assert len(ledger(tmp_path / "d3")) == 2


@pytest.fixture(scope="module")
def whole(launcher: Launcher, proxy: Path, corpora: Path) -> tuple[Path, Run]:
    folder = corpora / "whole"
    return folder, train(launcher, folder, proxy, world_size=2).require_success()


@pytest.mark.parametrize("kill_at", range(1, STEPS))
def test_killed_and_resumed_bit_for_bit(
    launcher: Launcher, proxy: Path, corpora: Path, tmp_path: Path, kill_at: int,
    whole: tuple[Path, Run],
) -> None:
    killed = train(launcher, tmp_path, proxy, world_size=2, kill_at=kill_at)
    assert -9 in killed.codes
    resumed = train(launcher, tmp_path, proxy, world_size=2, name="again").require_success()
    first = (kill_at - 1) // 2 * 2
    for rank in (0, 1):
        assert resumed.steps(rank) == whole[1].steps(rank)[first:]
    assert plan_bytes(tmp_path / "d3") == plan_bytes(whole[0] / "d3")


def test_building_the_reference_leaves_the_random_states_alone(
    launcher: Launcher, corpora: Path, proxy: Path, tmp_path: Path
) -> None:
    """A resumed run builds it again, and must draw the dropout that an unbroken one draws."""
    uniform = write_config(corpora / "uniform.yaml")
    first = [
        train(launcher, tmp_path / name, config, ["--hidden-dropout", "0.1"], steps=1
              ).require_success().losses()
        for name, config in (("uniform", uniform), ("proxy", proxy))]
    assert first[0] == first[1]


def test_another_data_parallel_size_continues_the_trajectory(
    launcher: Launcher, proxy: Path, start: Path, single: tuple[Path, Run], tmp_path: Path
) -> None:
    train(launcher, tmp_path, proxy, from_start(start, "--exit-interval", "2")).require_success()
    train(launcher, tmp_path, proxy, world_size=2, name="b").require_success()
    assert_allclose(alphas(tmp_path / "d3"), alphas(single[0] / "d3"), rtol=1e-4)
    ours, theirs = plan_bytes(tmp_path / "d3"), plan_bytes(single[0] / "d3")
    assert ours["positions.bin"] == theirs["positions.bin"]


def test_a_reference_trained_further_is_another_one(
    launcher: Launcher, corpora: Path, reference: Path, start: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path / "first.yaml", mix={
        "type": "doremi", "reference": str(reference / "iter_0000002")})
    domains = ["--d3-set", f"domains={{web: {corpora}/web, code: {corpora}/code, wiki: {corpora}/wiki}}"]
    train(launcher, tmp_path, config, [*from_start(start), *domains], steps=2).require_success()
    later = write_config(tmp_path / "first.yaml", mix={
        "type": "doremi", "reference": str(reference)})  # whose latest is iteration 4
    run = train(launcher, tmp_path, later, domains, steps=2, name="again")
    assert run.codes == [1]
    assert "iter_0000002" in run.output and "iter_0000004" in run.output
    assert "--d3-resume fork" in run.output


@pytest.mark.parametrize(("changes", "extra", "message"), [
    ({"reference": "nowhere"}, [], "nowhere; expected the --save folder of its run"),
    ({"reference": None}, [], "got neither of reference and losses"),
    ({}, ["--vocab-size", "300"], "was trained with tokenizer NullTokenizer::"),
    ({}, ["--seq-length", "16"], "was trained with --seq-length 32, this run has 16"),
    ({}, ["--eod-mask-loss"], "--eod-mask-loss: not possible with d3.mix.type doremi"),
    ({"eta": 0}, [], "d3.mix.eta: got 0, expected a number in (0, inf)"),
    ({"c": 1.5}, [], "d3.mix.c: got 1.5, expected a number in [0, 1]"),
    ({"variant": "oficial"}, [], "d3.mix.variant: got 'oficial', expected paper or official"),
])
def test_what_cannot_work_stops_at_the_start(
    launcher: Launcher, corpora: Path, reference: Path, tmp_path: Path, changes: dict[str, Any],
    extra: list[str], message: str,
) -> None:
    mix = {"type": "doremi", "reference": str(reference)} | changes
    config = write_config(corpora / "refused.yaml", mix=mix)
    run = train(launcher, tmp_path, config, extra)
    assert run.codes == [1]
    assert message in run.output
    assert "Traceback" not in run.output
    assert not (tmp_path / "d3").exists()


@pytest.fixture(scope="module")
def stored(launcher: Launcher, proxy: Path, corpora: Path) -> Path:
    """Configuration of a proxy that reads the reference's losses from disk."""
    folder = corpora / "losses"
    run = train(launcher, corpora / "store", proxy, ["--d3-plan-dir", str(folder)], world_size=2,
                entry="megatron_d3.mcore.store_losses:main")
    run.require_success()
    return write_config(
        corpora / "stored.yaml", mix={"type": "doremi", "losses": str(folder), "eta": 4.0})


class TestStoredLosses:
    """The reference's losses from disk in place of the model."""

    @pytest.mark.parametrize("layout", ["one", "tp2-pp2"])
    def test_give_the_same_run_as_the_model(
        self, launcher: Launcher, stored: Path, start: Path, single: tuple[Path, Run],
        tmp_path: Path, layout: str,
    ) -> None:
        world_size, extra = LAYOUTS[layout]
        run = train(launcher, tmp_path, stored, from_start(start, *extra), world_size=world_size)
        run.require_success()
        assert run.samples() == single[1].samples()
        for ours, theirs in zip(run.grad_norms(), single[1].grad_norms(), strict=True):
            assert_allclose(float.fromhex(ours), float.fromhex(theirs), rtol=1e-5)
        assert_allclose(alphas(tmp_path / "d3"), alphas(single[0] / "d3"), rtol=1e-4)

    @pytest.mark.parametrize(("change", "message"), [
        (["--d3-set", "seed=5"], "was made with another seed: 1234, this run has 5"),
        (["--seq-length", "16"], "was made with another seq_length: 32, this run has 16"),
        (["--vocab-size", "300"], "was made with another tokenizer"),
        (["--d3-set", "domains.wiki=code"], "was made with another domains"),
        (["--d3-set", "mix.losses=nowhere"], "no stored losses in"),
    ])
    def test_of_other_samples_are_refused(
        self, launcher: Launcher, stored: Path, tmp_path: Path, change: list[str], message: str
    ) -> None:
        run = train(launcher, tmp_path, stored, change)
        assert run.codes == [1]
        assert message in run.output
        assert not (tmp_path / "d3").exists()

    def test_end_where_the_run_that_stored_them_ends(
        self, launcher: Launcher, stored: Path, tmp_path: Path
    ) -> None:
        run = train(launcher, tmp_path, stored, steps=STEPS + 2)
        assert run.codes == [1]
        assert "this run needs draw" in run.output
        assert len(ledger(tmp_path / "d3")) == STEPS
