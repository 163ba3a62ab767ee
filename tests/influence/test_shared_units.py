"""Units shared by data-parallel groups: `projected` finds what one process finds, whatever D is."""

from __future__ import annotations

import copy
import threading
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from megatron_d3.influence.settings import D3Config, SketchConfig
from megatron_d3.influence.source import Influence, StepModel

torch = pytest.importorskip("torch")

from megatron_d3.influence.estimators import estimate
from megatron_d3.influence.estimators.deal import most_sequences
from megatron_d3.influence.estimators.measuring import Measuring
from megatron_d3.influence.estimators.pieces import cut_halves
from megatron_d3.influence.sketch import make_sketch
from tests.influence.plain_source import PlainSource, World, in_world
from tests.influence.tiny_gpt import TinyGPT, make_units, train

pytestmark = pytest.mark.usefixtures("one_thread")

L, N, T = 3, 5, 12
GROUPS = (1, 2, L, 2 * L, 2 * L + 1, N * L, N * L + 2)
UNITS = make_units(L, N, T, seed=3)
SGD = StepModel(gamma=0.1)
CLIPPED = StepModel(gamma=0.1, clip=0.8, uses_root=True)  # clips two units of three
CASES: dict[str, dict[str, Any]] = {
    "default": {"curvature_sequences": None},
    "principal 1": {"directions": 1}, "principal 2": {}, "mean": {"basis": "mean"},
    "curvature of two": {"curvature_sequences": 2}, "curvature of one": {"curvature_sequences": 1},
    "mean, curvature of two": {"basis": "mean", "curvature_sequences": 2}}


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return train(TinyGPT(width=8, seq_length=T), steps=40, seq_length=T)  # in float32


def config(case: str = "mean", kind: str = "rotation") -> D3Config:
    # The difference is larger than by default: rounding of float32 stands out less.
    return D3Config(window=L, probe_sequences=N, difference=3e-3,
                    sketch=SketchConfig(type=kind, dim=600),
                    **{"curvature_sequences": N, **CASES[case]})


def root_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(8)
    return {name: torch.from_numpy(rng.uniform(0.3, 2, p.shape)).to(p.dtype)
            for name, p in model.named_parameters()}


class Masked:
    """Sequence s of `UNITS` counts its first T - s tokens; those of `silent` count none."""

    def __init__(self, *silent: tuple[int, int]) -> None:
        self.silent = silent

    def __call__(self, model, unit, start, stop, sample_key):
        ids = UNITS.ids[unit, start:stop]
        mask = torch.ones(stop - start, T)
        for row, sequence in enumerate(range(start, stop)):
            mask[row, T - sequence :] = 0
            if (unit, sequence) in self.silent:
                mask[row] = 0
        losses = torch.nn.functional.cross_entropy(
            model(ids[:, :-1]).transpose(1, 2), ids[:, 1:], reduction="none")
        return (losses * mask).sum(), int(mask.sum())


def run(source: PlainSource, settings: D3Config, step: StepModel) -> Influence:
    return estimate(source, make_sketch(settings.sketch, source.layout), settings, step)


def found_by(
    model: torch.nn.Module, task: Any, num_groups: int, settings: D3Config, step: StepModel = SGD,
    *, num_shards: int = 1,
) -> list[Influence]:
    return in_world(
        num_groups, num_shards, lambda source: run(source, settings, step), model, task, num_units=L,
        num_sequences=N, root=root_of(model))


def assert_same(found: Influence, first: Influence, *, rtol: float) -> None:
    for field in fields(Influence):
        if field.name == "seconds":
            continue
        ours, others = (getattr(x, field.name) for x in (found, first))
        if ours is None or field.name == "bad_units":
            assert ours == others
            continue
        assert_allclose(ours, others, rtol=0, atol=rtol * np.abs(others).max(), err_msg=field.name)


@pytest.mark.parametrize("num_groups", GROUPS[1:])
@pytest.mark.parametrize("step", [SGD, CLIPPED], ids=["sgd", "optimizer"])
@pytest.mark.parametrize("case", CASES)
def test_any_number_of_groups_finds_what_one_finds(model, case, step, num_groups):
    (alone,) = found_by(model, Masked(), 1, config(case), step)
    if step.clip is not None:
        assert 0 < np.sum(alone.gradient_norms > step.clip) < L
    results = found_by(model, Masked(), num_groups, config(case), step)
    assert (alone.halves is None) == (case == "curvature of one")
    assert np.abs(alone.advantage).max() > 0
    assert_same(results[0], alone, rtol=1e-4)
    for found in results[1:]:
        assert_same(found, results[0], rtol=0)


def test_shards_of_shared_units(model):
    (alone,) = found_by(model, Masked(), 1, config(), CLIPPED)
    results = found_by(model, Masked(), 2 * L, config(), CLIPPED, num_shards=2)
    for found in results:
        assert_same(found, alone, rtol=1e-4)
        assert_same(found, results[0], rtol=0)


@pytest.mark.parametrize("case", ["mean", "principal 2"])
@pytest.mark.parametrize("num_groups", GROUPS)
def test_no_group_measures_more_than_its_share(model, case, num_groups):
    passes = {"mean": 2, "principal 2": 4}[case]

    def calls(source: PlainSource) -> int:
        run(source, config(case), SGD)
        return sum(stop - start for _, _, start, stop, _ in source.calls)

    counts = in_world(num_groups, 1, calls, model, UNITS, num_units=L, num_sequences=N)
    assert sum(counts) == passes * L * N
    assert max(counts) <= passes * most_sequences(cut_halves(N, N), L, num_groups)
    assert num_groups <= N * L or min(counts) == 0


@pytest.mark.parametrize("case", ["mean", "principal 2"])
def test_gradients_whose_difference_is_taken_come_from_the_same_calls(model, case):
    """A model whose losses depend on what else is in the call, as with routers that drop tokens: were
    the displaced pass cut otherwise, its difference over a small step would be enormous.

    With 4 L groups, 5 sequences a unit and 4 for curvature each pass by itself would be cut otherwise.
    """

    def losses(model, unit, start, stop, sample_key):
        total, num_tokens = Masked()(model, unit, start, stop, sample_key)
        return total * (stop - start), num_tokens

    settings = replace(config(case), curvature_sequences=N - 1)
    shared = found_by(model, losses, 4 * L, settings)[0]
    (alone,) = found_by(model, losses, 1, settings)
    assert np.abs(shared.advantage).max() < 2 * np.abs(alone.advantage).max()


def test_groups_take_the_directions_of_one(model, monkeypatch):
    """Another machine's eigenvectors may have other signs, and its rank may be another."""
    stock = np.linalg.eigh
    calls = []

    def of_another_machine(gram):
        calls.append(1)
        values, vectors = stock(gram)
        if threading.current_thread().name.endswith("_0"):
            return values, vectors
        return values * ([0, 1, 1] if len(calls) % 2 else 1), -vectors

    (alone,) = found_by(model, Masked(), 1, config("principal 2"))
    monkeypatch.setattr(np.linalg, "eigh", of_another_machine)
    results = found_by(model, Masked(), 2, config("principal 2"))
    assert len(calls) == 2
    assert_same(results[0], alone, rtol=1e-4)
    assert_same(results[1], results[0], rtol=0)


# ---------------------------------------------------------------- norms


@pytest.mark.parametrize("step", [SGD, CLIPPED], ids=["sgd", "optimizer"])
@pytest.mark.parametrize("num_groups", [1, 2 * L])
def test_norms_are_those_of_plain_gradients_up_to_the_sketch(model, num_groups, step):
    source = PlainSource(model, Masked(), num_units=L, num_sequences=N)
    exact = []
    for unit in range(L):
        source.gradient(unit, 0, N)
        exact.append(source.dot(source.gradients, source.gradients) ** 0.5)
    for kind, rtol in (("none", 1e-5), ("rotation", 4 / (2 * 600) ** 0.5)):
        found = found_by(model, Masked(), num_groups, config(kind=kind), step)[0]
        assert_allclose(found.gradient_norms, exact, rtol=rtol)


def test_sketched_norms_add_little_to_the_error_that_sketches_leave(model, monkeypatch):
    """All units are clipped, so that their norms make most of S."""
    step = StepModel(gamma=1e-3, clip=0.1)
    (exact,) = found_by(model, UNITS, 1, config(kind="none"), step)
    assert (exact.gradient_norms > step.clip).all()

    def error(found: Influence) -> float:
        return float(np.linalg.norm(found.advantage - exact.advantage))

    sketched = error(found_by(model, UNITS, 1, config(), step)[0])
    stock = Measuring.clip_factors
    monkeypatch.setattr(
        Measuring, "clip_factors", lambda self, norms: stock(self, exact.gradient_norms))
    with_exact_norms = error(found_by(model, UNITS, 1, config(), step)[0])
    assert 0 < with_exact_norms and sketched < 1.5 * with_exact_norms


# ---------------------------------------------------------------- what can go wrong


def refused(found: list[Influence], units: tuple[int, ...]) -> None:
    for influence in found:
        assert influence.bad_units == units
        assert influence.halves is None and not influence.advantage.any()
        for name in ("gram", "losses", "gradient_norms"):
            assert np.isfinite(getattr(influence, name)).all()
        assert not influence.losses[list(units)].any()
        assert not influence.gradient_norms[list(units)].any()


@pytest.mark.parametrize("num_groups", GROUPS)
@pytest.mark.parametrize("case", ["mean", "principal 2"])
def test_a_sequence_without_a_number_names_its_unit_on_all_ranks(model, case, num_groups):
    def task(model, unit, start, stop, key):
        total, num_tokens = UNITS(model, unit, start, stop, key)
        return total * (np.nan if unit == 1 and start <= 3 < stop else 1), num_tokens

    refused(found_by(model, task, num_groups, config(case)), (1,))


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e200])
@pytest.mark.parametrize("num_groups", GROUPS)
def test_a_gradient_without_a_number_names_its_unit_on_all_ranks(model, num_groups, value):
    class Broken(PlainSource):
        def gradient(self, unit, start, stop, *, sample_key=None):
            loss = super().gradient(unit, start, stop, sample_key=sample_key)
            if unit == 2 and start == 0:
                self.gradients[0][-1] = value
            return loss

    model = copy.deepcopy(model).double()  # holds 1e200
    groups = [World() for _ in range(num_groups)]
    refused(World(num_groups).run(lambda rank: run(
        Broken(model, UNITS, num_units=L, num_sequences=N, rank=rank,
               group_world=groups[rank.group]), config(), SGD)), (2,))


@pytest.mark.parametrize("num_groups", GROUPS)
def test_a_number_lost_after_displacement_names_its_unit_on_all_ranks(model, num_groups):
    start = [p.detach().clone() for p in model.parameters()]

    def task(model, unit, first, stop, key):
        total, num_tokens = UNITS(model, unit, first, stop, key)
        is_moved = not torch.equal(next(model.parameters()), start[0])
        is_broken = is_moved and unit == 0 and first <= 4 < stop
        return total * (np.nan if is_broken else 1), num_tokens

    refused_ones = found_by(model, task, num_groups, config())
    for influence in refused_ones:
        assert influence.bad_units == (0,) and not influence.advantage.any()


@pytest.mark.parametrize("num_groups", GROUPS)
def test_a_sequence_without_tokens_is_no_fault_but_a_half_without_any_is(model, num_groups):
    task = Masked((1, 0), (2, 4))
    (alone,) = found_by(model, task, 1, config())
    assert alone.bad_units == () and alone.advantage.any()
    assert_same(found_by(model, task, num_groups, config())[-1], alone, rtol=1e-4)
    refused(found_by(model, Masked((1, 0), (1, 1)), num_groups, config()), (1,))
