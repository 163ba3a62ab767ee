"""max_epochs: the projection, the budgets, and the run rehearsed before it starts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from megatron_d3.errors import ConfigError
from megatron_d3.mix import EpochCap, Schedule, Static, project, rehearse
from megatron_d3.mix.caps import UNLIMITED
from megatron_d3.plan.apportion import apportion
from megatron_d3.types import DomainInfo, MixContext

CASE = json.loads((Path(__file__).parents[1] / "oracles" / "mixers.json").read_text())["cases"][
    "repetition_cap"
]


def domains(*sizes: int) -> list[DomainInfo]:
    return [DomainInfo(name, size, size) for name, size in zip("abcd", sizes, strict=False)]


def at(position: int, total: int, consumed) -> MixContext:
    return MixContext(0, position, total, np.array(consumed, np.int64))


# ---------------------------------------------------------------- project


def test_projection_matches_the_oracle():
    inputs, outputs = CASE["inputs"], CASE["outputs"]
    weights, upper = np.array(inputs["weights"]), np.array(outputs["upper"])
    projected, tau = project(weights, upper)
    assert_allclose(projected, outputs["projected"], rtol=1e-9)
    assert_allclose(tau, outputs["tau"], rtol=1e-9)
    upper = np.minimum(upper, inputs["extra_cap"])
    assert_allclose(upper, outputs["upper_extra"], rtol=1e-9)
    projected, tau = project(weights, upper)
    assert_allclose(projected, outputs["projected_extra"], rtol=1e-9)
    assert_allclose(tau, outputs["tau_extra"], rtol=1e-9)


def test_cap_matches_the_oracle():
    inputs, sizes = CASE["inputs"], [int(size) for size in CASE["inputs"]["sizes"]]
    consumed = np.array(inputs["consumed"], np.int64)
    position = int(consumed.sum())
    total = position + int(inputs["remaining_budget"])
    cap = EpochCap(CASE["hyper"]["max_epochs"], "redistribute", domains(*sizes))
    capped = cap.cap(np.array(inputs["weights"]), MixContext(0, position, total, consumed))
    assert_allclose(capped, CASE["outputs"]["projected"], rtol=1e-9)


def test_projection_leaves_weights_below_their_limits_alone():
    weights = np.array([0.5, 0.5, 0.0])
    projected, tau = project(weights, np.array([0.9, np.inf, 0.0]))
    assert projected.tolist() == [0.5, 0.5, 0.0] and tau == 1


def test_projection_at_limits_that_just_suffice():
    projected, _ = project(np.array([0.2, 0.8]), np.array([0.7, 0.3]))
    assert_allclose(projected, [0.7, 0.3], rtol=1e-12)


def test_projection_out_of_reach_shares_in_proportion_to_the_limits():
    projected, tau = project(np.array([0.5, 0.5, 0.0]), np.array([0.3, 0.1, 9.0]))
    assert_allclose(projected, [0.75, 0.25, 0.0], rtol=1e-12)
    assert tau == np.inf


def test_projection_without_any_room_keeps_the_weights():
    assert project(np.array([0.5, 0.5, 0.0]), np.array([0.0, 0.0, 1.0]))[0].tolist() == [
        0.5,
        0.5,
        0,
    ]


@settings(max_examples=200)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 3)), min_size=1, max_size=8))
def test_projection_is_on_the_simplex_below_the_limits_and_proportional(pairs):
    weights, upper = np.array(pairs).T
    if weights.sum() < 1e-3:
        return
    weights = weights / weights.sum()
    if upper[weights > 0].sum() <= 1 + 1e-9:
        return
    projected, tau = project(weights, upper)
    assert projected.sum() == pytest.approx(1, abs=1e-9)
    assert (projected <= upper).all() and (projected[weights == 0] == 0).all()
    assert tau >= 1 - 1e-9
    if tau < 1e300:
        assert_allclose(projected, np.minimum(upper, tau * weights), rtol=1e-9, atol=1e-300)


def test_projection_onto_a_vanishing_weight():
    projected, _ = project(np.array([1.0, 5e-324]), np.array([0.5, 1.0]))
    assert projected.tolist() == [0.5, 0.5]


# ---------------------------------------------------------------- EpochCap


def test_budgets_are_whole_samples():
    cap = EpochCap({"a": 1.5, "c": 0.29, "d": np.inf}, "stop", domains(3, 7, 100, 5))
    assert cap.budgets.dtype == np.int64
    assert cap.budgets.tolist() == [4, UNLIMITED, 29, UNLIMITED]  # 0.29 * 100 = 28.999...
    assert cap.exhausted == "stop"


def test_one_number_holds_for_every_domain():
    assert EpochCap(2, "stop", domains(3, 7)).budgets.tolist() == [6, 14]


@pytest.mark.parametrize("exhausted", ["repeat", "stop"])
def test_repeat_and_stop_leave_the_weights_alone(exhausted):
    cap, weights = EpochCap(1, exhausted, domains(1, 100)), np.array([0.9, 0.1])
    assert cap.cap(weights, at(0, 50, [0, 0])).tolist() == [0.9, 0.1]


def test_an_exhausted_domain_gets_nothing_more():
    cap = EpochCap(1, "redistribute", domains(5, 100))
    assert cap.cap(np.array([0.5, 0.5]), at(10, 50, [5, 5])).tolist() == [0.0, 1.0]


def test_weights_stay_after_the_last_position():
    cap = EpochCap(1, "redistribute", domains(5, 100))
    assert cap.cap(np.array([0.5, 0.5]), at(50, 50, [5, 45])).tolist() == [0.5, 0.5]


def test_a_whole_run_uses_the_budgets_and_never_exceeds_them():
    cap = EpochCap(2, "redistribute", domains(10, 37, 400))
    total, consumed, carry = 800, np.zeros(3, np.int64), np.zeros(3)
    for position in range(0, total, 16):
        weights = cap.cap(np.array([0.3, 0.3, 0.4]), at(position, total, consumed))
        drawn, carry = apportion(weights, 16, carry)
        consumed += np.bincount(drawn, minlength=3)
    assert consumed.tolist() == [20, 74, 706]


@pytest.mark.parametrize(
    ("max_epochs", "message"),
    [
        ({"e": 1}, r"^d3.mix.max_epochs.e: no such domain; known: a, b$"),
        ({"a": 0}, r"^d3.mix.max_epochs: got 0, expected a number > 0$"),
        (float("nan"), r"^d3.mix.max_epochs: got nan, expected a number > 0$"),
    ],
)
def test_a_bad_limit_is_refused(max_epochs, message):
    with pytest.raises(ConfigError, match=message):
        EpochCap(max_epochs, "redistribute", domains(1, 1))


def test_a_run_longer_than_the_budgets_is_refused_or_announced():
    run = {how: EpochCap(4, how, domains(10, 20)) for how in ("redistribute", "repeat", "stop")}
    assert [cap.check(120) for cap in run.values()] == [None, None, None]
    with pytest.raises(
        ConfigError,
        match=r"d3.mix.max_epochs: the run has 130 samples, 10 more .*"
        r"the largest feasible run has 120 samples",
    ):
        run["redistribute"].check(130)
    assert run["repeat"].check(130) == (
        "d3.mix.max_epochs: 10 of 130 samples repeat beyond max_epochs"
    )
    assert run["stop"].check(130) == (
        "d3.mix.max_epochs: the run will stop after 120 of 130 samples at the latest"
    )


# ---------------------------------------------------------------- rehearse


def run_through(knots, sizes, total=100, how="redistribute"):
    sources = domains(*sizes)
    mixer = Schedule(Schedule.Config(knots), sources, total_samples=total)
    cap = EpochCap(1, how, sources)
    cap.check(total)
    rehearse(mixer, cap, total_samples=total, step_at=lambda position: position // 10)


ONLY_A, ONLY_B = {"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}


def test_rehearsal_passes_domains_used_one_after_the_other():
    run_through(((0, ONLY_A), (5, ONLY_B)), (50, 50))


def test_rehearsal_refuses_budgets_out_of_reach():
    with pytest.raises(
        ConfigError,
        match=r"from step \d on, the domains that have a weight cannot "
        r"fill .* the largest feasible run has about 40 of the 100",
    ):
        run_through(((0, ONLY_A), (5, ONLY_B)), (40, 60))
    with pytest.raises(ConfigError, match=r"from step 9 on, .* about 90 of the 100 samples"):
        run_through(((0, ONLY_A), (5, ONLY_B)), (60, 40))


def test_rehearsal_follows_only_what_it_can():
    run_through(((0, ONLY_A), (5, ONLY_B)), (40, 60), how="stop")
    sources = domains(40, 60)
    mixer = Static(Static.Config(ONLY_A), sources, total_samples=100)
    mixer.is_online = True  # nobody knows its weights yet
    rehearse(mixer, EpochCap(1, "redistribute", sources), total_samples=100, step_at=lambda p: p)
