"""What each objective orders by, against brute force and on units of known kinds."""

from __future__ import annotations

import doctest
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_d3.errors import ProbeError
from megatron_d3.influence import objectives
from megatron_d3.influence.objectives import cosines, group, order_window, random_order, spread
from megatron_d3.influence.settings import D3Config
from megatron_d3.influence.solvers import solve

OBJECTIVES = ("online", "reverse", "random", "group", "spread")


def arrays(num_units: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """S and the gram of random gradients."""
    rng = np.random.default_rng(seed)
    entries = rng.standard_normal((num_units, num_units))
    gradients = rng.standard_normal((num_units, 5))
    return entries - entries.T, gradients @ gradients.T


def run(advantage: np.ndarray, gram: np.ndarray | None, objective: Any, seed: Any = 0):
    config = D3Config(objective=objective, solver_rounds=10)
    if objective == "random":
        return random_order(len(advantage), seed)
    return order_window(advantage, gram, config, seed)


def nearness_of_similar(similarity: np.ndarray, order: Any) -> float:
    """Sum over p < q of the similarity of the units at p and q, divided by q - p."""
    return sum(
        similarity[order[p], order[q]] / (q - p)
        for p, q in itertools.combinations(range(len(order)), 2)
    )


def by_kind(kinds: list[int]) -> np.ndarray:
    return np.equal.outer(kinds, kinds).astype(np.float64)


def test_the_examples_in_the_text():
    assert doctest.testmod(objectives).failed == 0


@settings(max_examples=40)
@given(num_units=st.integers(0, 9), seed=st.integers(0, 10**6), name=st.sampled_from(OBJECTIVES))
def test_every_objective_gives_a_permutation_and_the_same_again(num_units, seed, name):
    advantage, gram = arrays(num_units, seed)
    order = run(advantage, gram, name, seed)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(num_units))
    assert run(advantage, gram, name, seed).tolist() == order.tolist()


def test_online_is_the_solvers_order_and_reverse_is_that_backwards():
    advantage, gram = arrays(12, 0)
    expected = solve(advantage, settings=D3Config(solver_rounds=10), seed=0).tolist()
    assert run(advantage, gram, "online").tolist() == expected
    assert run(advantage, None, "reverse").tolist() == expected[::-1]


def test_random_depends_on_the_seed_alone_and_is_no_order_of_a_measured_window():
    orders = [random_order(12, seed).tolist() for seed in ([1, 0], [1, 1], [2, 0], [1, 0])]
    assert len(set(map(tuple, orders))) == 3
    assert orders[3] == orders[0]
    with pytest.raises(ProbeError, match="objective random: got measurements, it needs none"):
        order_window(*arrays(12, 0), D3Config(objective="random"), 0)


@pytest.mark.parametrize("num_units", range(8))
def test_group_and_spread_are_near_the_best_order(num_units):
    similarity = cosines(arrays(num_units, num_units)[1])
    values = [nearness_of_similar(similarity, order)
              for order in itertools.permutations(range(num_units))]
    step = 1e-9 + 0.02 * (max(values) - min(values))
    assert nearness_of_similar(similarity, group(similarity, seed=0)) >= max(values) - step
    assert nearness_of_similar(similarity, spread(similarity, seed=0)) <= min(values) + step


def test_group_puts_each_kind_in_one_run():
    rng = np.random.default_rng(0)
    kinds = rng.integers(0, 5, 40)
    gradients = 3 * np.eye(5)[kinds] + 0.2 * rng.standard_normal((40, 5))
    order = run(np.zeros((40, 40)), gradients @ gradients.T, "group")
    num_runs = 1 + np.count_nonzero(np.diff(kinds[order]))
    assert num_runs == 5


def test_spread_never_puts_two_of_a_kind_side_by_side():
    rng = np.random.default_rng(0)
    kinds = rng.permutation(np.arange(40) % 5)
    gradients = 3 * np.eye(5)[kinds] + 0.2 * rng.standard_normal((40, 5))
    order = run(np.zeros((40, 40)), gradients @ gradients.T, "spread")
    apart = [p - q for kind in range(5)
             for q, p in itertools.pairwise(np.flatnonzero(kinds[order] == kind))]
    assert min(apart) >= 3
    assert np.mean(apart) > 4.5


def test_whole_results_on_two_kinds():
    similarity = by_kind([0, 1, 0, 1, 0, 1])
    assert group(similarity, seed=0).tolist() == [0, 2, 4, 1, 3, 5]
    assert spread(by_kind([0, 0, 0, 1, 1, 1]), seed=0).tolist() == [0, 3, 1, 4, 2, 5]


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("num_units", [0, 1, 2])
def test_very_short_windows(name, num_units):
    order = run(np.zeros((num_units, num_units)), np.eye(num_units), name)
    assert sorted(order.tolist()) == list(range(num_units))


@pytest.mark.parametrize("name", ["group", "spread"])
def test_identical_units_and_units_without_gradient_are_ordered(name):
    assert sorted(run(np.zeros((6, 6)), np.ones((6, 6)), name).tolist()) == list(range(6))
    assert run(np.zeros((6, 6)), np.zeros((6, 6)), name).tolist() == list(range(6))


def test_cosines_do_not_depend_on_the_norms():
    gram = arrays(6, 0)[1]
    scale = np.array([1e-150, 1e150, 1.0, 2.0, 3.0, 1e-3])
    np.testing.assert_allclose(
        cosines(gram * scale[:, None] * scale), cosines(gram), rtol=1e-12)
    np.testing.assert_allclose(cosines(gram).diagonal(), 1.0, rtol=1e-12)
    assert cosines(np.diag([4.0, 0.0])).tolist() == [[1, 0], [0, 0]]
    assert cosines(np.array([[1.0, 1.1], [1.1, 1.0]])).max() == 1.0  # noise of a sketch


@pytest.mark.parametrize("sign", [1, -1])
def test_no_pair_swap_improves_what_is_found(sign):
    likeness = np.rint(1e6 * cosines(arrays(9, 4)[1])).astype(np.int64)
    order = objectives._swap_until_best(sign * likeness, np.arange(9))
    total = sign * objectives._total(likeness, order)
    for p, q in itertools.combinations(range(9), 2):
        swapped = order.copy()
        swapped[[p, q]] = order[[q, p]]
        assert sign * objectives._total(likeness, swapped) >= total
    assert total < sign * objectives._total(likeness, np.arange(9))


@pytest.mark.parametrize(("gram", "message"), [
    (None, "gram: got none, expected .* for objective group or spread"),
    (np.zeros((2, 3)), r"gram: got shape \(2, 3\), expected \(L, L\)"),
    (np.array([[1.0, np.nan], [0.0, 1.0]]), "gram: got nan for units 0 and 1, expected finite"),
])  # fmt: skip
def test_what_is_no_gram_is_refused(gram, message):
    for name in ("group", "spread"):
        with pytest.raises(ProbeError, match=message):
            run(np.zeros((2, 2)), gram, name)


def test_an_advantage_that_is_not_finite_is_refused():
    with pytest.raises(ProbeError, match="expected finite numbers"):
        run(np.full((2, 2), np.nan), np.eye(2), "reverse")
