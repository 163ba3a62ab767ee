"""Counts follow the cumulative weights; the numbers in the module's text are measured here."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_d3.errors import PlanError
from megatron_d3.plan import apportion as module
from megatron_d3.plan.apportion import ONE, apportion, multinomial

KERNELS = [
    "python",
    pytest.param(
        "c",
        marks=pytest.mark.skipif(not module.is_compiled(), reason="built without the C extension"),
    ),
]


@pytest.fixture(params=KERNELS)
def kernel(request, monkeypatch):
    if request.param == "python":
        monkeypatch.setattr(module, "_compiled", None)
    return request.param


def deviations(domains: np.ndarray, weights: np.ndarray, carry: np.ndarray | None = None):
    """Return the (n, K) carry after every position, exactly: weights as the module rounds them."""
    units = module._weights_in_units(weights).astype(object)
    one_hot = np.zeros((len(domains), len(weights)), object)
    one_hot[np.arange(len(domains)), domains] = ONE
    start = 0 if carry is None else np.rint(carry * ONE).astype(np.int64).astype(object)
    return start + np.cumsum(units - one_hot, axis=0)


def is_within_quota(domains: np.ndarray, weights: np.ndarray) -> bool:
    carries = deviations(domains, weights)
    return bool(len(domains) == 0 or (abs(carries) < ONE).all())


def simplex(min_domains: int = 1, max_domains: int = 12):
    number = st.one_of(st.just(0.0), st.floats(1e-12, 1.0), st.integers(1, 9).map(float))
    return (
        st.lists(number, min_size=min_domains, max_size=max_domains)
        .filter(any)
        .map(lambda numbers: np.array(numbers) / np.sum(numbers))
    )


def test_small_example_in_full(kernel):
    domains, carry = apportion(np.array([0.5, 0.25, 0.25]), 6, np.zeros(3))
    assert domains.dtype == np.int16
    assert domains.tolist() == [0, 1, 2, 0, 0, 1]
    assert carry.dtype == np.float64
    assert carry.tolist() == [0.0, -0.5, 0.5]


def test_equal_weights_take_turns_in_domain_order(kernel):
    domains, _ = apportion(np.full(3, 1 / 3), 7, np.zeros(3))
    assert domains.tolist() == [0, 1, 2, 0, 1, 2, 0]


@settings(max_examples=150, deadline=None)
@given(weights=simplex(), num_positions=st.integers(0, 400))
def test_constant_weights_stay_strictly_within_one_of_their_share(weights, num_positions):
    domains, carry = apportion(weights, num_positions, np.zeros(len(weights)))
    assert is_within_quota(domains, weights)
    assert not np.isin(domains, np.flatnonzero(weights == 0)).any()
    assert abs(carry.sum()) == 0
    counts = np.bincount(domains, minlength=len(weights))
    np.testing.assert_allclose(carry, num_positions * weights - counts, atol=1e-9)


def test_constant_weights_stay_within_one_for_many_domains(kernel):
    rng = np.random.default_rng(0)
    for num_domains in (2, 16, 64):
        for concentration in (0.05, 0.3, 1.0):
            weights = rng.dirichlet(np.full(num_domains, concentration))
            domains, _ = apportion(weights, 6000, np.zeros(num_domains))
            assert is_within_quota(domains, weights)


def test_rare_domain_is_not_overdrawn(kernel):
    domains, _ = apportion(np.array([0.001, 0.999]), 10_000, np.zeros(2))
    counts = np.cumsum(domains == 0)
    shares = np.arange(1, 10_001) / 1000
    assert counts[-1] == 10
    assert np.abs(counts - shares).max() < 1


@settings(max_examples=100, deadline=None)
@given(
    weights=simplex(),
    num_positions=st.integers(0, 300),
    cut=st.integers(0, 300),
    carry=st.lists(st.floats(-3, 3), min_size=12, max_size=12),
)
def test_a_segment_cut_in_two_is_the_same_segment(weights, num_positions, cut, carry):
    cut = min(cut, num_positions)
    start = np.array(carry)[: len(weights)]
    whole, whole_carry = apportion(weights, num_positions, start)
    first, middle_carry = apportion(weights, cut, start)
    second, last_carry = apportion(weights, num_positions - cut, middle_carry)
    assert np.concatenate([first, second]).tolist() == whole.tolist()
    assert last_carry.tobytes() == whole_carry.tobytes()


def test_blocks_leave_no_trace():
    weights = np.array([0.61, 0.27, 0.0, 0.12])
    units = module._weights_in_units(weights)
    results = []
    for block in (1, 7, 64, 4096):
        lag, domains = np.zeros(4, np.int64), np.empty(500, np.int16)
        module._fill_python(units, lag, domains, module.HORIZON, block)
        results.append((lag.tolist(), domains.tolist()))
    assert all(result == results[0] for result in results)


@pytest.mark.skipif(not module.is_compiled(), reason="built without the C extension")
@settings(max_examples=150, deadline=None)
@given(
    weights=simplex(max_domains=40),
    num_positions=st.integers(0, 300),
    carry=st.lists(st.floats(-4, 4), min_size=40, max_size=40),
    horizon=st.sampled_from([0, 5, 256]),
    block=st.sampled_from([1, 50, 4096]),
)
def test_the_c_version_gives_the_same_bits(weights, num_positions, carry, horizon, block):
    units = module._weights_in_units(weights)
    results = []
    for fill in (module._fill_python, module._compiled.fill):
        lag = module._carry_in_units(np.array(carry)[: len(weights)], len(weights))
        domains = np.full(num_positions, -1, np.int16)
        fill(units, lag, domains, horizon, block)
        results.append((lag.tolist(), domains.tolist()))
    assert results[0] == results[1]


@pytest.mark.skipif(not module.is_compiled(), reason="built without the C extension")
def test_the_c_version_refuses_buffers_that_do_not_fit():
    units, domains = np.full(2, ONE // 2), np.empty(4, np.int16)
    with pytest.raises(ValueError, match="sizes do not fit"):
        module._compiled.fill(units, np.zeros(3, np.int64), domains, 256, 4096)
    with pytest.raises(ValueError, match="sizes do not fit"):
        module._compiled.fill(units, np.zeros(2, np.int64), domains, 256, 0)
    with pytest.raises(ValueError, match="or no weight"):
        module._compiled.fill(units * 0, np.zeros(2, np.int64), domains, 256, 4096)


def test_no_online_rule_stays_within_one_for_four_domains(kernel):
    """Whoever is served, the adversary then shares the weight among the others."""
    carry, worst = np.zeros(4), 0.0
    waiting = [0, 1, 2, 3]
    while len(waiting) > 1:
        weights = np.zeros(4)
        weights[waiting] = 1 / len(waiting)
        domains, carry = apportion(weights, 1, carry)
        waiting.remove(int(domains[0]))
        worst = max(worst, carry[waiting].max())
    assert worst == pytest.approx(1 / 4 + 1 / 3 + 1 / 2)


def test_weights_that_leave_only_domains_ahead_of_their_share(kernel):
    """0 and 1 are behind and get no weight: one of those ahead must go further ahead."""
    domains, carry = apportion(np.array([0, 0, 0.5, 0.5]), 1, np.array([0.6, 0.6, -0.6, -0.6]))
    assert domains.tolist() == [2]
    np.testing.assert_allclose(carry, [0.6, 0.6, -1.1, -0.1], atol=1e-12)


def changing(rng, num_domains: int, concentration: float, num_changes: int, every: int) -> float:
    """Return the largest |carry| at any position while the weights are drawn anew."""
    carry, worst = np.zeros(num_domains), 0.0
    for _ in range(num_changes):
        weights = rng.dirichlet(np.full(num_domains, concentration))
        before = carry
        domains, carry = apportion(weights, every, before)
        worst = max(worst, float(abs(deviations(domains, weights, before)).max() / ONE))
    return worst


@pytest.mark.parametrize("num_domains", [2, 3, 4, 16, 64])
@pytest.mark.parametrize("every", [1, 8, 256])
def test_weights_drawn_anew_without_notice_stay_near_one(num_domains, every):
    """The bound is measured, not proved: see the counterexample above."""
    rng = np.random.default_rng([num_domains, every])
    num_changes = 1600 // every + 4
    assert changing(rng, num_domains, 1.0, num_changes, every) < 1.0
    assert changing(rng, num_domains, 0.1, num_changes, every) < 1.25


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_weights_that_move_along_a_schedule_stay_within_one(shape):
    a, b = np.array([0.7, 0.15, 0.1, 0.05]), np.array([0.1, 0.2, 0.3, 0.4])
    carry = np.zeros(4)
    for fraction in np.linspace(0, 1, 101):
        share = fraction if shape == "linear" else (1 - np.cos(np.pi * fraction)) / 2
        before, weights = carry, a + share * (b - a)
        domains, carry = apportion(weights, 32, before)
        assert (abs(deviations(domains, weights, before)) < ONE).all()


def test_shares_hold_after_a_billion_positions():
    """Carries are exact: 10**9 positions in 1,000 calls are as near as the first call."""
    weights = np.array([0.7, 0.2, 0.1])
    units = module._weights_in_units(weights)
    for weight, unit in zip(weights, units.tolist(), strict=True):
        assert abs(Fraction(unit, ONE) - Fraction(weight)) * 10**9 < Fraction(1, 1000)
    assert units.sum() == ONE


def test_tiny_weights_give_nothing_and_break_nothing(kernel):
    domains, _ = apportion(np.array([1e-18, 1.0, 1e-13]), 50, np.zeros(3))
    assert domains.tolist() == [1] * 50


def test_no_positions(kernel):
    domains, carry = apportion(np.array([0.5, 0.5]), 0, np.array([0.25, -0.25]))
    assert domains.tolist() == [] and carry.tolist() == [0.25, -0.25]


def test_arguments_are_left_alone(kernel):
    weights, carry = np.array([0.5, 0.5]), np.zeros(2)
    apportion(weights, 3, carry)
    assert weights.tolist() == [0.5, 0.5] and carry.tolist() == [0, 0]


@pytest.mark.parametrize("weights", [[0.5, 0.6], [1.5, -0.5], [np.nan, 1.0], [0.0, 0.0]])
@pytest.mark.parametrize(
    "draw", [lambda w: apportion(w, 3, np.zeros(2)), lambda w: multinomial(w, 3, key=[1])]
)
def test_weights_off_the_simplex_are_refused(weights, draw):
    with pytest.raises(PlanError, match="expected numbers >= 0 with sum 1"):
        draw(np.array(weights))


def test_weights_of_another_shape_are_refused():
    with pytest.raises(PlanError, match=r"got weights of shape \(2, 2\)"):
        apportion(np.full((2, 2), 0.25), 3, np.zeros(2))
    with pytest.raises(PlanError, match=r"got weights of shape \(0,\)"):
        apportion(np.zeros(0), 3, np.zeros(0))


def test_carries_that_cannot_be_are_refused():
    with pytest.raises(PlanError, match=r"got a carry of shape \(3,\) for 2 domains"):
        apportion(np.full(2, 0.5), 3, np.zeros(3))
    for bad in (17.0, np.nan):
        with pytest.raises(PlanError, match=r"expected numbers in \[-16, 16\] samples"):
            apportion(np.full(2, 0.5), 3, np.array([bad, 0.0]))


def test_a_negative_number_of_positions_is_refused():
    with pytest.raises(PlanError, match="got -1 positions"):
        apportion(np.full(2, 0.5), -1, np.zeros(2))


def test_multinomial_repeats_with_its_key_and_follows_the_weights():
    weights = np.array([0.6, 0.0, 0.4, 0.0])
    draws = multinomial(weights, 20_000, key=[7, 3])
    assert draws.dtype == np.int16
    assert draws.tolist() == multinomial(weights, 20_000, key=[7, 3]).tolist()
    assert draws.tolist() != multinomial(weights, 20_000, key=[7, 4]).tolist()
    shares = np.bincount(draws, minlength=4) / 20_000
    np.testing.assert_allclose(shares, weights, atol=0.015)  # 4 standard deviations
    assert shares[1] == shares[3] == 0


def test_multinomial_draws_are_frozen():
    draws = multinomial(np.array([0.25, 0.5, 0.25]), 12, key=[1, 2])
    assert draws.tolist() == [1, 1, 1, 1, 2, 0, 0, 2, 1, 0, 1, 2]
