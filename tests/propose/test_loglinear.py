"""The fit finds what made the losses, its optimum is the optimum, and poor data is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_d3.errors import ConfigError
from megatron_d3.mix import project
from megatron_d3.propose import Limits, Runs, limits_of
from megatron_d3.propose import minimise as loglinear_minimise
from megatron_d3.propose.loglinear import _left_out, fit_loglinear, propose_loglinear
from megatron_d3.propose.minimise import minimise
from megatron_d3.propose.runs import divergence

NAMES = ("web", "code", "wiki")
C, T = np.array([1.5, 0.5]), np.array([[0.2, -0.8, 1.0], [1.0, 0.3, -0.6]])
FREE = Limits(np.full(3, 1 / 3), np.full(3, np.inf), np.inf)


def runs(num_runs=20, noise=0.0, seed=0) -> Runs:
    rng = np.random.default_rng(seed)
    weights = rng.dirichlet(np.ones(3), num_runs)
    losses = C + np.exp(weights @ T.T) + noise * rng.normal(size=(num_runs, 2))
    return Runs(NAMES, ("x", "y"), weights, losses)


def test_the_fit_predicts_the_losses_that_made_it() -> None:
    data = runs()
    test = np.random.default_rng(1).dirichlet(np.ones(3), 50)
    for losses, c, t in zip(data.losses.T, C, T, strict=True):
        constant, slopes = fit_loglinear(data.weights, losses)
        found = constant + np.exp(test @ slopes)
        np.testing.assert_allclose(found, c + np.exp(test @ t), atol=0.02)


def test_left_out_errors_are_those_of_refitting() -> None:
    data = runs(8, noise=0.05)
    predicted = _left_out(data.weights, data.losses[:, 0])
    constant, slopes = fit_loglinear(data.weights[1:], data.losses[1:, 0])
    assert predicted[0] == pytest.approx(constant + np.exp(data.weights[0] @ slopes))


def grid(step: float = 0.01) -> np.ndarray:
    ticks = np.arange(0, 1 + step / 2, step)
    a, b = np.meshgrid(ticks, ticks)
    points = np.stack([a.ravel(), b.ravel(), 1 - a.ravel() - b.ravel()], axis=1)
    return points[points[:, 2] >= -1e-12]


@settings(max_examples=25)
@given(st.data())
def test_no_mixture_within_the_limits_is_better(data) -> None:
    slopes = np.array(data.draw(st.lists(st.lists(
        st.floats(-3, 3), min_size=3, max_size=3), min_size=1, max_size=3)))
    prior = np.array(data.draw(st.lists(st.floats(0.1, 1), min_size=3, max_size=3)))
    upper = np.array(data.draw(st.lists(st.floats(0.4, 1), min_size=3, max_size=3)))
    prior /= prior.sum()
    max_kl = data.draw(st.sampled_from([np.inf, 0.5, 1.0]))
    limits = Limits(prior, upper, max_kl)
    assume(divergence(project(prior, upper)[0], prior) < 0.9 * max_kl)
    x, gap = minimise(np.zeros(len(slopes)), slopes, limits)
    assert x.sum() == pytest.approx(1) and (x <= upper + 1e-9).all() and (x >= 0).all()
    points = grid(0.05)
    kl = np.array([divergence(np.maximum(p, 0), prior) for p in points])
    if divergence(x, prior) > max_kl + 1e-6:
        pytest.fail("beyond the largest divergence")
    points = points[(points <= upper + 1e-12).all(axis=1) & (kl <= max_kl)]
    value = np.exp(slopes @ x).mean()
    best = np.exp(points @ slopes.T).mean(axis=1).min()
    assert value <= best + gap + 1e-12 and gap < 1e-5  # what the gap promises


def test_the_divergence_is_used_in_full_where_it_binds() -> None:
    x, gap = minimise(C, T * 3, replace(FREE, max_kl=0.1))
    assert divergence(x, FREE.prior) == pytest.approx(0.1, rel=2e-4)
    assert 0 < gap < 1e-6


def test_the_gap_is_what_is_left_when_the_iterations_end(monkeypatch: pytest.MonkeyPatch) -> None:
    best, _ = minimise(C, T * 3, FREE)
    monkeypatch.setattr(loglinear_minimise, "_MAX_ITERATIONS", 3)
    x, gap = minimise(C, T * 3, FREE)
    lost = np.exp(T @ x * 3).mean() - np.exp(T @ best * 3).mean()
    assert 1e-6 < lost <= gap


def test_a_proposal_says_what_it_predicts_and_how_well() -> None:
    found = propose_loglinear(runs(30, noise=0.01), replace(FREE, upper=np.array([1, 1, 0.3])))
    assert found.weights.sum() == pytest.approx(1) and found.weights[2] <= 0.3 + 1e-12
    assert (found.predicted.mean() < found.predicted_prior.mean())
    assert (found.errors < 0.03).all() and (found.spreads > 0.1).all()
    np.testing.assert_allclose(found.predicted, C + np.exp(T @ found.weights), atol=0.05)


def test_too_few_runs_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"4 runs: too few for 3 domains, expected at least 5"):
        propose_loglinear(runs(4), FREE)


def test_collinear_runs_are_refused_by_name() -> None:
    data = runs(20)
    weights = data.weights.copy()
    weights[:, 2] = 0.5 * weights[:, 1]
    weights /= weights.sum(axis=1, keepdims=True)
    with pytest.raises(ConfigError, match=r"collinear: the weights of code, wiki do not vary indep"):
        propose_loglinear(replace(data, weights=weights), FREE)


def test_losses_that_do_not_depend_on_the_mixture_are_refused() -> None:
    data = runs(20)
    noise = 3 + np.random.default_rng(3).normal(size=(20, 2)) * 0.1
    with pytest.raises(ConfigError, match=r"loss x: the fit misses left-out runs by .*, their mean"):
        propose_loglinear(replace(data, losses=noise), FREE)


@pytest.mark.parametrize(("limits", "message"), [
    (replace(FREE, upper=np.full(3, 0.3)), r"the caps add up to 0.9, expected at least 1"),
    (Limits(np.array([0.8, 0.1, 0.1]), np.array([0.4, 1, 1]), 0.01),
     r"no mixture below the caps is within a KL divergence of 0.01 of the prior; the nearest has"),
])
def test_limits_that_leave_nothing_are_refused(limits: Limits, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        propose_loglinear(runs(), limits)


@pytest.mark.parametrize(("prior", "caps", "message"), [
    ({"web": 1}, {}, r"--prior: none given of code, wiki"),
    ({"wbe": 1}, {}, r"--prior wbe: no such domain; known: web, code, wiki"),
    ({}, {"web": 0}, r"--cap web: got 0, expected a number above 0"),
])
def test_named_limits_are_checked(prior: dict, caps: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        limits_of(NAMES, prior, caps, np.inf)


def test_the_prior_is_divided_by_its_sum() -> None:
    limits = limits_of(NAMES, {"wiki": 1, "web": 2, "code": 1}, {"code": 0.4}, 0.5)
    assert limits.prior.tolist() == [0.5, 0.25, 0.25]
    assert limits.upper.tolist() == [np.inf, 0.4, np.inf]
