"""Solvers against brute force, against each other, and with the compiled loops against NumPy's."""

from __future__ import annotations

import doctest
import importlib
import itertools
import pkgutil
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_d3.errors import ConfigError, ProbeError
from megatron_d3.influence import solvers
from megatron_d3.influence.graph import (
    insertion_deltas,
    potential_advantage,
    relative_cost,
    violation_cost,
)
from megatron_d3.influence.settings import MAX_EXACT_UNITS, D3Config
from megatron_d3.influence.solvers import SOLVERS, kernels, solve
from megatron_d3.influence.solvers.random_pairs import random_pairs

NAMES = tuple(SOLVERS)
SEARCHES = ("rsr", "insertion", "ils")
FEW = {"swaps": 100, "solver_rounds": 10}  # enough for few units, quick in Python
KERNELS = [
    "python",
    pytest.param("c", marks=pytest.mark.skipif(
        not solvers.is_compiled(), reason="built without the C extension")),
]  # fmt: skip


@pytest.fixture(params=KERNELS)
def kernel(request, monkeypatch):
    if request.param == "python":
        monkeypatch.setattr(kernels, "_compiled", None)
    return request.param


def noise(num_units: int, seed: int) -> np.ndarray:
    entries = np.random.default_rng(seed).standard_normal((num_units, num_units))
    return entries - entries.T


def few_values(num_units: int, seed: int) -> np.ndarray:
    """S with many ties: entries -1, 0 and 1."""
    entries = np.random.default_rng(seed).integers(-1, 2, (num_units, num_units))
    return np.triu(entries, 1) - np.triu(entries, 1).T.astype(np.float64)


def run(advantage: np.ndarray, name: str, *, seed: int = 0, **keys: int) -> np.ndarray:
    return solve(advantage, settings=replace(D3Config(window=10, solver=name), **keys), seed=seed)


def best_by_trying_all(advantage: np.ndarray) -> tuple[float, list[int]]:
    """The least cost, and of its orders the first in dictionary order."""
    orders = itertools.permutations(range(len(advantage)))
    return min((violation_cost(advantage, np.array(o, int)), list(o)) for o in orders)


def test_the_examples_in_the_text():
    for module in pkgutil.iter_modules(solvers.__path__):
        if not module.name.startswith("_"):
            loaded = importlib.import_module(f"{solvers.__name__}.{module.name}")
            assert doctest.testmod(loaded).failed == 0
    assert doctest.testmod(solvers).failed == 0


@pytest.mark.parametrize("make", [noise, few_values])
@pytest.mark.parametrize("num_units", range(8))
def test_exact_finds_the_first_of_the_best_orders(make, num_units):
    # Whole entries: equal costs are then equal for the oracle, too.
    advantage = np.rint(100 * make(num_units, num_units))
    cost, order = best_by_trying_all(advantage)
    found = solvers.exact(advantage, settings=D3Config(), seed=0)
    assert found.tolist() == order
    assert violation_cost(advantage, found) == cost


@pytest.mark.parametrize("num_units", range(8))
def test_iterated_search_finds_the_best_order_of_few_units(kernel, num_units):
    advantage = noise(num_units, num_units)
    cost, _ = best_by_trying_all(advantage)
    np.testing.assert_allclose(
        violation_cost(advantage, run(advantage, "ils", solver_rounds=50)), cost, rtol=1e-12)


@settings(max_examples=25)
@given(num_units=st.integers(8, 12), seed=st.integers(0, 10**6))
def test_no_solver_beats_exact(num_units, seed):
    advantage = noise(num_units, seed)
    costs = {name: violation_cost(advantage, solve(
        advantage, settings=D3Config(window=18, solver=name), seed=seed)) for name in NAMES}
    assert min(costs.values()) >= costs["exact"] - 1e-9
    assert costs["insertion"] <= costs["greedy_insertion"] + 1e-9
    assert costs["ils"] <= costs["insertion"] + 1e-9
    assert costs["rsr"] <= costs["row_sum"] + 1e-9


@settings(max_examples=60)
@given(
    make=st.sampled_from([noise, few_values]), num_units=st.integers(0, 9),
    seed=st.integers(0, 10**6), name=st.sampled_from(NAMES),
)  # fmt: skip
def test_every_solver_returns_a_permutation_and_the_same_again(make, num_units, seed, name):
    advantage = make(num_units, seed)
    before = advantage.copy()
    order = run(advantage, name, seed=seed, solver_rounds=10)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(num_units))
    assert order.tolist() == run(advantage, name, seed=seed, solver_rounds=10).tolist()
    assert (advantage == before).all()


@pytest.mark.skipif(not solvers.is_compiled(), reason="built without the C extension")
@settings(max_examples=40, deadline=None)
@given(
    make=st.sampled_from([noise, few_values]), num_units=st.integers(0, 24),
    seed=st.integers(0, 10**6), name=st.sampled_from(SEARCHES),
)  # fmt: skip
def test_compiled_and_python_loops_give_the_same_order(make, num_units, seed, name):
    advantage = make(num_units, seed)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for compiled in (kernels._compiled, None):
            patch.setattr(kernels, "_compiled", compiled)
            found.append(run(advantage, name, seed=seed, solver_rounds=15, swaps=300).tolist())
    assert found[0] == found[1]


def test_no_unit_has_a_better_place_after_the_search(kernel):
    advantage = noise(20, 5)
    for name in ("insertion", "ils"):
        order = run(advantage, name, solver_rounds=20)
        deltas = [insertion_deltas(advantage, order, p).min() for p in range(20)]
        assert min(deltas) > -1e-9


def test_quality_comes_in_the_order_of_the_effort():
    advantage = noise(60, 1)
    costs = [relative_cost(advantage, run(advantage, name, swaps=10_000))
             for name in ("row_sum", "rsr", "insertion", "ils")]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > costs[-1] + 0.1


@pytest.mark.parametrize("name", NAMES)
def test_row_sums_and_all_others_solve_a_scalar_curriculum(kernel, name):
    # Statement 4: S_ij = c_j - c_i, e.g. of a Hessian that the units share.
    potential = np.random.default_rng(0).standard_normal(10)
    advantage = potential_advantage(potential)
    assert run(advantage, name, **FEW).tolist() == np.argsort(potential).tolist()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_units", [0, 1, 2, 9])
def test_a_zero_graph_keeps_the_stored_order(kernel, name, num_units):
    assert run(np.zeros((num_units, num_units)), name, **FEW).tolist() == list(range(num_units))


@pytest.mark.parametrize("name", NAMES)
def test_two_units(kernel, name):
    assert run(np.array([[0.0, -1.0], [1.0, 0.0]]), name, **FEW).tolist() == [1, 0]
    assert run(np.array([[0.0, 1.0], [-1.0, 0.0]]), name, **FEW).tolist() == [0, 1]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(5))
def test_identical_units_keep_their_sequence(kernel, name, seed):
    # Units 1, 4 and 6 are one unit three times.
    units = np.array([0, 1, 2, 3, 1, 4, 1, 5])
    order = run(noise(6, seed)[np.ix_(units, units)], name, seed=seed, **FEW)
    twins = [unit for unit in order.tolist() if unit in (1, 4, 6)]
    assert twins == [1, 4, 6]


def test_equal_row_sums_go_by_index():
    cycle = np.array([[0.0, 1.0, -1.0], [-1.0, 0.0, 1.0], [1.0, -1.0, 0.0]])
    assert run(cycle, "row_sum").tolist() == [0, 1, 2]


@settings(max_examples=30)
@given(exponent=st.integers(-900, 900), name=st.sampled_from(NAMES), seed=st.integers(0, 100))
def test_the_scale_of_the_graph_does_not_matter(exponent, name, seed):
    advantage = noise(9, seed)
    scaled = np.ldexp(advantage, exponent)
    assert run(scaled, name, seed=seed).tolist() == run(advantage, name, seed=seed).tolist()


def test_swaps_and_seed_are_used(kernel):
    advantage = noise(40, 2)
    assert run(advantage, "rsr", swaps=0).tolist() == run(advantage, "row_sum").tolist()
    few, many = (violation_cost(advantage, run(advantage, "rsr", swaps=n)) for n in (50, 1000))
    assert many < few
    assert run(advantage, "rsr", seed=1, swaps=100).tolist() != run(
        advantage, "rsr", seed=2, swaps=100).tolist()
    assert run(advantage, "ils", solver_rounds=0).tolist() == run(advantage, "insertion").tolist()


def test_the_seed_may_have_several_parts():
    advantage, settings = noise(30, 2), D3Config(solver="rsr", swaps=100)
    found = [solve(advantage, settings=settings, seed=seed).tolist()
             for seed in ([1, 2], [1, 2], [1, 3], 1)]
    assert found[0] == found[1]
    assert len({tuple(order) for order in found}) == 3


def test_the_whole_result_for_one_input(kernel):
    # A change here is a change of VERSION.
    assert solvers.VERSION == 1
    advantage = few_values(12, 0)
    assert run(advantage, "ils", seed=3).tolist() == EXPECTED["ils"]
    assert run(advantage, "rsr", seed=3, swaps=200).tolist() == EXPECTED["rsr"]


EXPECTED: dict[str, list[int]] = {
    "ils": [4, 10, 11, 5, 6, 8, 1, 7, 3, 2, 0, 9],
    "rsr": [4, 11, 5, 8, 1, 10, 2, 6, 7, 3, 0, 9],
}


def test_whole_numbers_are_the_graph_to_49_bits():
    advantage = noise(60, 0)
    whole = kernels.whole_numbers(advantage)
    assert 2**48 <= np.abs(whole).max() <= 2**49
    assert (whole == -whole.T).all()
    ratio = whole / np.abs(whole).max() - advantage / np.abs(advantage).max()
    assert np.abs(ratio).max() < 2.0**-48


@pytest.mark.parametrize("num_units", [60, 1000, 30_000])
def test_no_sum_of_whole_numbers_overflows(num_units):
    bits = min(52, 61 - 2 * num_units.bit_length())
    assert num_units**2 * 2**bits < 2**62
    assert bits > 30


def test_random_pairs_are_pairs_alike():
    pairs = random_pairs(4, (12_000,), seed=0, name="x")
    assert (pairs[:, 0] != pairs[:, 1]).all()
    counts = np.bincount(pairs @ [4, 1], minlength=16).reshape(4, 4)
    assert counts[~np.eye(4, dtype=bool)].min() > 900
    assert counts.sum() == 12_000
    assert random_pairs(1, (5, 3), seed=0, name="x").shape == (0, 3, 2)
    assert (random_pairs(9, (50,), seed=0, name="x") != random_pairs(
        9, (50,), seed=0, name="y")).any()


def test_exact_refuses_a_long_window():
    # The settings refuse a window like this; a shorter one may still meet a longer S.
    count = MAX_EXACT_UNITS + 1
    with pytest.raises(ConfigError, match=rf"d3.order.solver: got exact for {count} units"):
        run(np.zeros((count, count)), "exact")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_graph_that_is_not_finite_is_refused(bad):
    advantage = noise(4, 0)
    advantage[1, 2] = bad
    advantage[2, 1] = -bad
    with pytest.raises(ProbeError, match=r"for units 1 and 2, expected finite numbers"):
        run(advantage, "ils")


def test_a_graph_of_integers_is_checked_as_well():
    assert run(np.array([[0, -1], [1, 0]]), "ils").tolist() == [1, 0]
    with pytest.raises(ProbeError, match="expected opposite numbers"):
        run(np.array([[0, 1], [1, 0]]), "ils")


@pytest.mark.skipif(not solvers.is_compiled(), reason="built without the C extension")
def test_the_extension_refuses_what_does_not_fit():
    compiled = kernels._compiled
    assert compiled is not None
    weights, order = np.zeros((3, 3), np.int64), np.arange(3)
    with pytest.raises(ValueError, match="sizes do not fit"):
        compiled.swap(weights[:2], order, np.array([0, 1]))
    with pytest.raises(ValueError, match="a number out of range"):
        compiled.swap(weights, order, np.array([0, 3]))
    with pytest.raises(ValueError, match="a number out of range"):
        compiled.search(weights, np.array([0, 1, -1]), np.array([0, 1]), order[:1])
    with pytest.raises(ValueError, match="no whole number of pairs in a round"):
        compiled.search(weights, order, np.array([0, 1]), order)
    with pytest.raises(ValueError, match="no whole number of pairs in a round"):
        compiled.search(weights, order, np.array([0, 1]), order[:0])
    assert order.tolist() == [0, 1, 2]
