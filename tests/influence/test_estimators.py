"""Estimators against autograd in float64: values, costs, halves, ranks and what can go wrong."""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
from numpy.testing import assert_allclose

from megatron_d3.errors import ProbeError
from megatron_d3.influence.settings import D3Config, SketchConfig
from megatron_d3.influence.source import Influence, StepModel

torch = pytest.importorskip("torch")

from megatron_d3.influence.estimators import ESTIMATORS, estimate
from megatron_d3.influence.sketch import make_sketch
from tests.influence.brute_force import BruteForce
from tests.influence.plain_source import PlainSource, in_world
from tests.influence.tiny_gpt import TinyGPT, Units, make_units, train

pytestmark = pytest.mark.usefixtures("one_thread")

L, N = 5, 4
NONE = SketchConfig(type="none")
SGD = StepModel(gamma=0.1)
CLIPPED = StepModel(gamma=0.1, clip=1.5, uses_root=True)

# (settings, gradients a unit, forwards a unit)
CASES: dict[str, tuple[dict[str, Any], float, float]] = {
    "projected": ({}, 4, 0),
    "principal 1": ({"estimator": "projected", "directions": 1}, 3, 0),
    "mean": ({"estimator": "projected", "basis": "mean"}, 2, 0),
    "principal 3": ({"estimator": "projected", "directions": 3}, 5, 0),
    "hutchinson_diagonal": ({}, 3, 0),
    "hutchinson, 3 probes": ({"estimator": "hutchinson_diagonal", "probes": 3}, 7, 0),
    "gnb_diagonal": ({}, 2, 0),
    "gnb, 3 draws": ({"estimator": "gnb_diagonal", "probes": 3}, 4, 0),
    "fisher": ({}, 1, 0),
    "shared_hessian": ({}, 3, 0),
    "look_ahead": ({}, 1, L),
    "look_ahead_even": ({}, 1, 2 * L - 1),
    "exact": ({}, 1 + 2 * L, 0),
}
EXPANSIONS = ["projected", "hutchinson_diagonal", "gnb_diagonal", "fisher", "exact"]


def config(case: str, **changes: Any) -> D3Config:
    given = {"estimator": case, "sketch": NONE, "probe_sequences": N, "window": L}
    given = {**given, **CASES[case][0], **changes}
    return D3Config(**{"curvature_sequences": given["probe_sequences"], **given})


def run(source: PlainSource, settings: D3Config, step: StepModel = SGD) -> Influence:
    return estimate(source, make_sketch(settings.sketch, source.layout), settings, step)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return train(TinyGPT(width=8, seq_length=12).double(), steps=40, seq_length=12)


UNITS = make_units(L, N, 12, seed=3)


def source_of(model: torch.nn.Module, task: Any = UNITS, **options: Any) -> PlainSource:
    size = {"num_units": L, "num_sequences": N}
    return PlainSource(model, task, **{**size, **options})


def root_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(8)
    return {name: torch.from_numpy(rng.uniform(0.3, 2, p.shape)).to(p.dtype)
            for name, p in model.named_parameters()}


# ---------------------------------------------------------------- what is measured


@pytest.mark.parametrize("step", [SGD, CLIPPED], ids=["sgd", "optimizer"])
@pytest.mark.parametrize("case", CASES)
def test_every_estimator_measures_what_it_says(model, case, step):
    source = source_of(model, root=root_of(model))
    found = run(source, config(case), step)
    reference = BruteForce(source, step)
    expected = reference.advantage(config(case))
    scale = np.abs(expected).max()
    # Forward differences along gradients are the least exact: 5e-8 of the weights' norm.
    assert_allclose(found.advantage, expected, rtol=0, atol=2e-5 * scale)
    assert_allclose(found.advantage, -found.advantage.T, rtol=0, atol=0)
    assert_allclose(found.gram, (reference.w @ reference.w.T).numpy(), rtol=1e-6, atol=1e-9)
    assert_allclose(found.gradient_norms, reference.g.norm(dim=1).numpy(), rtol=1e-9)
    losses = [float(reference._mean_loss(u, 0, N).detach()) for u in range(L)]
    assert_allclose(found.losses, losses, rtol=1e-12)
    assert found.bad_units == ()


@pytest.mark.parametrize("case", CASES)
def test_the_cost_is_the_stated_one_and_every_call_is_counted(model, case):
    source = source_of(model)
    _, gradients, forwards = CASES[case]
    found = run(source, config(case))
    assert (found.num_gradients, found.num_forwards) == (gradients * L, forwards * L)
    calls = [sum(call[3] - call[2] for call in source.calls if call[0] == kind)
             for kind in ("gradient", "loss")]
    assert calls == [gradients * L * N, forwards * L * N]
    assert set(found.seconds) == {"gradients", "sketch", "reduce"}
    assert min(found.seconds.values()) >= 0 and found.seconds["gradients"] > 0


@pytest.mark.parametrize("case", CASES)
def test_weights_are_left_as_they_were_to_the_last_bit(model, case):
    source = source_of(model)
    run(source, config(case), replace(SGD, gamma=0.3))
    for p, q in zip(source.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize(("case", "tolerance"), [
    ("projected", 0.02), ("hutchinson_diagonal", 0.005), ("exact", 0.02)])  # fmt: skip
def test_differences_hold_in_single_precision(model, case, tolerance):
    exact = run(source_of(model), config(case)).advantage
    single = run(source_of(copy.deepcopy(model).float()), config(case)).advantage
    assert_allclose(single, exact, rtol=0, atol=tolerance * np.abs(exact).max())


def test_curvature_sequences_are_the_first_of_each_half(model):
    source = source_of(model)
    found = run(source, config("mean", curvature_sequences=2))
    assert found.num_gradients == L * 1.5
    ranges = {call[2:4] for call in source.calls}
    assert ranges == {(0, 1), (1, 2), (2, 3), (3, 4)}
    assert source.calls[-1][2:4] == (2, 3) and source.calls[-2][2:4] == (0, 1)
    # Where all sequences of a half are alike, half of them are as good as all.
    twins = Units(UNITS.ids[:, [0, 0, 2, 2]])
    for case in ("projected", "mean"):
        few = run(source_of(model, twins), config(case, curvature_sequences=2))
        all_ = run(source_of(model, twins), config(case))
        assert_allclose(few.advantage, all_.advantage, rtol=1e-6, atol=1e-12)


def test_a_quarter_of_the_sequences_or_two_are_for_curvature_unless_told_otherwise(model):
    source = source_of(model)
    found = run(source, config("projected", curvature_sequences=None))
    assert found.num_gradients == L * (1 + 3 * 0.5)
    half = run(source_of(model), config("projected", curvature_sequences=N // 2))
    assert_allclose(found.advantage, half.advantage, rtol=0, atol=0)
    ranges = [call[2:4] for call in source.calls]
    assert ranges == [(0, 1), (1, 2), (2, 3), (3, 4)] * L + [(0, 1), (2, 3)] * (3 * L)


@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 2), (3, 2), (8, 2), (9, 3), (16, 4)])
def test_each_half_has_a_sequence_for_curvature(n, m):
    assert D3Config(probe_sequences=n).num_curved == m
    assert D3Config(probe_sequences=n, estimator="hutchinson_diagonal").num_curved == n
    assert D3Config(probe_sequences=n, curvature_sequences=1).num_curved == 1


@pytest.mark.parametrize("case", CASES)
def test_one_curvature_sequence_leaves_no_halves(model, case):
    found = run(source_of(model), config(case, curvature_sequences=1))
    assert found.halves is None
    assert np.isfinite(found.advantage).all() and np.abs(found.advantage).max() > 0


# ---------------------------------------------------------------- the expansion (statements 1, 2)


def test_look_ahead_is_the_expansion_up_to_third_order(model):
    errors = []
    for gamma in (0.02, 0.01):
        step = StepModel(gamma)
        true = run(source_of(model), config("look_ahead"), step).advantage
        expansion = run(source_of(model), config("exact"), step).advantage
        errors.append(np.abs(true - expansion).max() / gamma**2)
    assert 0.4 < errors[1] / errors[0] < 0.6  # gamma^3 beside gamma^2
    assert errors[1] < 0.1 * np.abs(expansion).max() / gamma**2


@pytest.mark.parametrize("case", EXPANSIONS)
def test_the_first_order_cancels_and_gamma_scales_only(model, case):
    one, three = (run(source_of(model), config(case), StepModel(g)).advantage for g in (0.1, 0.3))
    assert_allclose(three, 9 * one, rtol=1e-12, atol=1e-25)


def test_unequal_clip_factors_leave_a_first_order_part(model):
    source = source_of(model)
    norms = run(source, config("fisher")).gradient_norms
    clip = float(np.median(norms))
    small = StepModel(1e-7, clip=clip)
    found = run(source, config("projected"), small)
    c = np.minimum(1, clip / norms)
    expected = 1e-7 * (c[:, None] - c) * found.gram
    assert_allclose(found.advantage, expected, rtol=1e-4, atol=1e-14)
    assert np.abs(expected).max() > 0


# ---------------------------------------------------------------- halves


@pytest.mark.parametrize("case", ["look_ahead", "look_ahead_even", "exact"])
def test_halves_that_share_their_steps_average_to_the_whole(model, case):
    found = run(source_of(model), config(case))
    first, second = found.halves
    scale = np.abs(found.advantage).max()
    assert_allclose((first + second) / 2, found.advantage, rtol=0, atol=1e-9 * scale)
    assert not np.allclose(first, second)


@pytest.mark.parametrize("case", ["hutchinson_diagonal", "gnb_diagonal", "fisher"])
def test_a_half_is_what_its_own_sequences_give(model, case):
    """A source of half the sequences, whose two quarters stand for its two probes or draws."""
    twins = Units(UNITS.ids[:, [0, 0, 2, 2]])
    first, second = run(source_of(model, twins), config(case)).halves
    alone = Units(UNITS.ids[:, [2, 2]])
    if case == "gnb_diagonal":  # labels belong to a sequence's number
        assert not np.allclose(first, second)
        return
    found = run(source_of(model, alone, num_sequences=2), config(case, probe_sequences=2))
    if case == "fisher":
        assert_allclose(second, found.advantage, rtol=1e-9, atol=1e-20)
        assert np.abs(second).max() < 1e-12  # both sequences alike: the Fisher trap
    else:
        assert_allclose(second, found.halves[1], rtol=1e-6, atol=1e-12)  # probe 1 of the same


@pytest.mark.parametrize("case", CASES)
def test_halves_are_antisymmetric_and_differ(model, case):
    first, second = run(source_of(model), config(case)).halves
    for half in (first, second):
        assert half.shape == (L, L) and np.array_equal(half, -half.T)
    assert not np.array_equal(first, second)


# ---------------------------------------------------------------- ranks


@pytest.mark.parametrize(("case", "num_groups", "num_shards"), [
    *((case, 2, 2) for case in CASES), ("projected", 1, 3), ("hutchinson_diagonal", 1, 3),
    *((case, L + 1, 1) for case in ("projected", "fisher", "look_ahead")),  # a group is idle
])  # fmt: skip
def test_ranks_agree_with_each_other_and_with_one_process(model, case, num_groups, num_shards):
    settings = config(case, sketch=SketchConfig(dim=600))
    alone = run(source_of(model, root=root_of(model)), settings, CLIPPED)
    results = in_world(
        num_groups, num_shards, lambda source: run(source, settings, CLIPPED), model, UNITS,
        num_units=L, num_sequences=N, root=root_of(model))
    for found in results:
        for field in fields(Influence):
            if field.name == "seconds":
                continue
            ours, first, one = (getattr(x, field.name) for x in (found, results[0], alone))
            assert_same_bits(ours, first)
            assert_allclose(ours, one, rtol=1e-6, atol=1e-6 * float(np.abs(one).max(initial=0)))


def assert_same_bits(x: Any, y: Any) -> None:
    for a, b in zip(x, y, strict=True) if isinstance(x, tuple) else [(x, y)]:
        assert np.array_equal(a, b)


# ---------------------------------------------------------------- edges


@pytest.mark.parametrize("case", CASES)
def test_a_window_of_one_unit(model, case):
    found = run(source_of(model, num_units=1), config(case))
    assert found.advantage.tolist() == [[0.0]]
    assert found.losses.shape == found.gradient_norms.shape == (1,)


@pytest.mark.parametrize("case", [case for case in CASES if "gnb" not in case])
def test_identical_units_ask_for_no_order(model, case):  # (for gnb each draws labels of its own)
    same = Units(UNITS.ids[[2] * L])
    found = run(source_of(model, same), config(case))
    assert not found.advantage.any() and found.gram.any()


@pytest.mark.parametrize("case", CASES)
def test_one_probe_sequence_leaves_no_halves(model, case):
    found = run(source_of(model, num_sequences=1), config(case, probe_sequences=1))
    assert found.halves is None and np.isfinite(found.advantage).all()


class Flat(torch.nn.Module):
    """Losses that do not depend on the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.x = torch.nn.Parameter(torch.ones(30, dtype=torch.float64))


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_zero_ask_for_no_order(case):
    def task(model, unit, start, stop, key):
        return 0 * model.x.sum() + 3.0 * (stop - start), stop - start

    found = run(source_of(Flat(), task), config(case))
    assert not found.advantage.any() and not found.gradient_norms.any()
    assert found.losses.tolist() == [3.0] * L and found.bad_units == ()


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("case", CASES)
def test_a_unit_without_a_number_is_named(model, case, value):
    def task(model, unit, start, stop, key):
        total, num_tokens = UNITS(model, unit, start, stop, key)
        return total * (value if unit == 3 and start <= 2 < stop else 1), num_tokens

    for found in in_world(2, 1, lambda source: run(source, config(case)), model, task,
                          num_units=L, num_sequences=N):
        assert_refused(found, (3,))


def assert_refused(found: Influence, units: tuple[int, ...]) -> None:
    assert found.bad_units == units
    assert found.halves is None and not found.advantage.any()
    for array in (found.advantage, found.gram, found.losses, found.gradient_norms):
        assert np.isfinite(array).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e200])
@pytest.mark.parametrize("case", ["projected", "hutchinson_diagonal", "look_ahead", "fisher"])
def test_a_gradient_without_a_number_is_named(model, case, value):
    class Broken(PlainSource):
        def gradient(self, unit, start, stop, *, sample_key=None):
            loss = super().gradient(unit, start, stop, sample_key=sample_key)
            if unit == 1:
                self.gradients[0][-1] = value
            return loss

    source = Broken(model, UNITS, num_units=L, num_sequences=N)
    assert_refused(run(source, config(case)), (1,))


@pytest.mark.parametrize("case", [
    "projected", "principal 3", "hutchinson_diagonal", "shared_hessian", "look_ahead",
    "look_ahead_even", "exact"])  # fmt: skip
def test_a_number_lost_after_displacement_is_named(model, case):
    start = copy.deepcopy(model)

    def task(model, unit, first, stop, key):
        total, num_tokens = UNITS(model, unit, first, stop, key)
        moved = not torch.equal(next(model.parameters()), next(start.parameters()))
        return total * (np.nan if moved and unit == 4 else 1), num_tokens

    found = run(source_of(model, task), config(case))
    assert found.halves is None and not found.advantage.any()
    # A step that breaks another's loss is to blame itself: every unit breaks that of 4.
    expected = {"look_ahead": (0, 1, 2, 3), "look_ahead_even": (0, 1, 2, 3), "exact": (0, 1, 2, 3, 4)}
    assert found.bad_units == expected.get(case, (4,))


@pytest.mark.parametrize("case", CASES)
def test_a_step_of_the_optimizer_needs_its_root(model, case):
    with pytest.raises(ProbeError, match=r"d3\.order\.step: .* use `step: sgd`"):
        run(source_of(model), config(case), StepModel(0.1, uses_root=True))


def test_differences_that_do_not_move_the_weights_are_refused(model):
    source = source_of(copy.deepcopy(model).float())
    with pytest.raises(ProbeError, match=r"d3\.order\.difference: 1e-15 .* choose a larger"):
        run(source, config("projected", difference=1e-15))


def test_every_estimator_of_the_settings_is_there():
    assert tuple(ESTIMATORS) == get_args(get_type_hints(D3Config)["estimator"])
