"""DoReMi's weights against the oracle and its negative controls, its state, its errors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from megatron_d3.errors import ConfigError, PlanError
from megatron_d3.mix.doremi import STOP_TOLERANCE, DoReMi, convergence, token_coefficients
from megatron_d3.types import DomainInfo, MixContext, StepSignals

CASES = json.loads((Path(__file__).parents[1] / "oracles" / "mixers.json").read_text())["cases"]
DOMAINS = [DomainInfo(name, 10, 10) for name in ("web", "code", "books", "wiki")]
RTOL = 1e-9


def doremi(**settings) -> DoReMi:
    config = DoReMi.Config(reference=Path("/reference"), **settings)
    return DoReMi(config, DOMAINS, total_samples=100)


def signals(iteration: int, losses: list[dict], *, is_skipped: bool = False) -> StepSignals:
    excess = [np.maximum(np.subtract(d["proxy"], d["ref"]), 0).sum() for d in losses]
    return StepSignals(
        iteration, iteration * 8, np.array([sum(d["proxy"]) for d in losses]),
        np.array([len(d["proxy"]) for d in losses]), is_skipped, np.array(excess))


def trajectory(mixer: DoReMi, steps: list[list[dict]]) -> tuple[list[np.ndarray], dict]:
    state, alphas = mixer.init(), []
    for iteration, losses in enumerate(steps, start=1):
        state = mixer.update(state, signals(iteration, losses))
        alphas.append(mixer.loss_weights(state))
    return alphas, state


def test_the_papers_update() -> None:
    case = CASES["doremi.paper"]
    mixer = doremi()
    alphas, state = trajectory(mixer, case["inputs"]["token_losses"])
    assert_allclose(alphas, case["outputs"]["weights_after_step"], rtol=RTOL)
    assert_allclose(state["score"], case["outputs"]["lambda"][-1], rtol=RTOL)
    assert_allclose(mixer.mean_weights(state), case["outputs"]["alpha_bar"], rtol=RTOL)


def test_an_absent_domain_keeps_its_last_score_from_zero() -> None:
    steps = CASES["doremi.official.absent"]["inputs"]["token_losses"]
    outputs = CASES["doremi.recommended.absent"]["outputs"]
    mixer = doremi()
    alphas, state = trajectory(mixer, steps)
    assert_allclose(alphas, outputs["weights_after_step"], rtol=RTOL)
    assert_allclose(mixer.mean_weights(state), outputs["alpha_bar"], rtol=RTOL)


def test_the_released_codes_start_gives_one_absent_domain_everything() -> None:
    case = CASES["doremi.official.absent"]
    mixer = doremi(variant="official", initial_score=case["hyper"]["initial_score"])
    alphas, state = trajectory(mixer, case["inputs"]["token_losses"])
    assert_allclose(alphas, case["outputs"]["weights_after_step"], rtol=RTOL)
    assert_allclose(mixer.mean_weights(state), case["outputs"]["alpha_bar_incl_alpha0"], rtol=RTOL)
    paper = doremi(initial_score=case["hyper"]["initial_score"])
    assert_allclose(
        paper.mean_weights(state), case["outputs"]["alpha_bar_excl_alpha0"], rtol=RTOL)


def wrong_sums(port: str) -> np.ndarray:
    """The first step's excess, reduced as a wrong port would; to be divided by the token counts."""
    step = CASES["doremi.paper"]["inputs"]["token_losses"][0]
    differences = [np.subtract(d["proxy"], d["ref"]) for d in step]
    clipped = [np.maximum(d, 0).sum() for d in differences]
    counts = np.array([len(d) for d in differences])
    return np.array({
        "clip per domain": [max(d.sum(), 0) for d in differences],
        "no clip": [d.sum() for d in differences],
        "mean over all tokens": clipped * counts / counts.sum(),
        "proxy loss alone": [sum(d["proxy"]) for d in step],
    }[port])


@pytest.mark.parametrize(
    "port", ["clip per domain", "no clip", "mean over all tokens", "proxy loss alone"])
def test_a_wrong_reduction_fails_the_oracle(port: str) -> None:
    case, mixer = CASES["doremi.paper"], doremi()
    counts = np.array([len(d["proxy"]) for d in case["inputs"]["token_losses"][0]])
    state = mixer.update(
        mixer.init(), StepSignals(1, 8, np.ones(4), counts, False, wrong_sums(port)))
    off = np.abs(mixer.loss_weights(state) - case["outputs"]["weights_after_step"][0]).max()
    assert off > 1e-3


def test_the_stop_rule() -> None:
    case = CASES["doremi.iterate.stop"]
    given_, expected = case["inputs"], case["outputs"]
    for bar, linf, stops in (("alpha_bar", "linf", "stop"),
                             ("alpha_bar_near", "linf_near", "stop_near")):
        alpha_ref = given_["alpha_bar"] if bar == "alpha_bar_near" else given_["alpha_ref"]
        found = convergence(np.array(given_[bar]), np.array(alpha_ref))
        assert_allclose(found, expected[linf], rtol=RTOL)
        assert (found < STOP_TOLERANCE) is expected[stops]


def test_token_coefficients() -> None:
    case = CASES["doremi.proxy_loss"]
    alpha, n = np.array(case["inputs"]["alpha"]), np.array(case["inputs"]["tokens_per_domain"])
    uniform, skewed = np.full(4, 0.25), np.array(case["inputs"]["sampling_weights"])
    step = CASES["doremi.paper"]["inputs"]["token_losses"][0]
    sums = np.array([sum(d["proxy"]) for d in step])
    outputs = case["outputs"]

    paper = token_coefficients(alpha, n, sampling_weights=skewed, variant="paper")
    assert_allclose(paper, outputs["paper_token_coefficient"], rtol=RTOL)
    assert_allclose(paper @ sums, outputs["paper_loss_proxy_only"], rtol=RTOL)
    for sampling, name in ((uniform, "uniform"), (skewed, "nonuniform")):
        official = token_coefficients(alpha, n, sampling_weights=sampling, variant="official")
        assert_allclose(official, outputs[f"official_token_coefficient_{name}_sampling"], rtol=RTOL)
        assert_allclose(official @ sums, outputs[f"official_loss_{name}_sampling"], rtol=RTOL)


@pytest.mark.parametrize("variant", ["paper", "official"])
def test_a_domain_without_tokens_has_no_coefficient(variant) -> None:
    coefficients = token_coefficients(
        np.array([0.9, 0.1]), np.array([0, 4]), sampling_weights=np.array([0.0, 1.0]),
        variant=variant)
    assert coefficients.tolist() == [0.0, 0.025 if variant == "paper" else 0.25]


def test_samples_are_uniform_whatever_alpha_is() -> None:
    mixer = doremi()
    _, state = trajectory(mixer, CASES["doremi.paper"]["inputs"]["token_losses"])
    context = MixContext(step=6, position=48, total_samples=100, consumed=np.zeros(4, np.int64))
    assert mixer.weights(state, context).tolist() == [0.25] * 4


def test_a_skipped_step_changes_nothing() -> None:
    mixer = doremi()
    steps = CASES["doremi.paper"]["inputs"]["token_losses"]
    _, state = trajectory(mixer, steps)
    assert mixer.update(state, signals(7, steps[0], is_skipped=True)) is state


def test_an_excess_that_is_not_finite_counts_as_absent() -> None:
    mixer = doremi()
    state = mixer.update(mixer.init(), StepSignals(
        1, 8, np.ones(4), np.array([4, 4, 4, 4]), False, np.array([np.nan, 4.0, np.inf, 2.0])))
    assert state["score"].tolist() == [0.0, 1.0, 0.0, 0.5]


def test_a_step_without_reference_is_refused() -> None:
    mixer = doremi()
    with pytest.raises(PlanError, match="step 3: no excess loss over a reference was measured"):
        mixer.update(mixer.init(), StepSignals(3, 8, np.ones(4), np.ones(4, np.int64)))


@pytest.mark.parametrize(("sources", "got"), [
    ({}, "neither"), ({"reference": Path("/a"), "losses": Path("/b")}, "both")])
def test_exactly_one_source_of_reference_losses(sources: dict, got: str) -> None:
    with pytest.raises(ConfigError, match=f"d3.mix: got {got} of reference and losses"):
        DoReMi(DoReMi.Config(**sources), DOMAINS, total_samples=1)


@given(
    excess=st.lists(st.lists(st.floats(0, 1e4), min_size=4, max_size=4), max_size=6),
    eta=st.floats(0.01, 100), c=st.sampled_from([0.0, 1e-3, 1.0]))
def test_alpha_stays_on_the_simplex(excess: list[list[float]], eta: float, c: float) -> None:
    mixer = doremi(eta=eta, c=c)
    state = mixer.init()
    for iteration, sums in enumerate(excess, start=1):
        state = mixer.update(state, StepSignals(
            iteration, 8, np.ones(4), np.ones(4, np.int64), False, np.array(sums)))
        alpha = mixer.loss_weights(state)
        assert abs(alpha.sum() - 1) < 1e-12
        assert (alpha >= c / 4).all()
    assert abs(mixer.mean_weights(state).sum() - 1) < 1e-12


def test_the_reference_is_the_checkpoint_that_was_the_latest(tmp_path: Path) -> None:
    config = DoReMi.Config(reference=tmp_path)
    assert config.resolved() == config  # the run refuses it by name
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    for written, name in (("12", "iter_0000012"), ("release", "release")):
        tracker.write_text(written + "\n")
        resolved = config.resolved()
        assert resolved.reference == tmp_path / name
        assert resolved.resolved() == resolved
    assert DoReMi.Config(losses=tmp_path).resolved() == DoReMi.Config(losses=tmp_path)
