"""Every mixer of this folder against the oracle, its errors, and what all have in common."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from megatron_d3.errors import ConfigError
from megatron_d3.mix import MIXERS, Natural, Schedule, Static, Temperature, UniMax
from megatron_d3.mix.unimax import spend
from megatron_d3.types import DomainInfo, MixContext, StepSignals

ORACLE = json.loads((Path(__file__).parents[1] / "oracles" / "mixers.json").read_text())
CASES, NAMES = ORACLE["cases"], ORACLE["domains"]


def domains(*sizes: float, names=("web", "code", "books", "wiki")) -> list[DomainInfo]:
    return [
        DomainInfo(name, int(size), int(size)) for name, size in zip(names, sizes, strict=False)
    ]


def context(step: int = 0, num_domains: int = 4) -> MixContext:
    return MixContext(
        step, position=step * 8, total_samples=10_000, consumed=np.zeros(num_domains, np.int64)
    )


def weights_of(mixer, step: int = 0, num_domains: int = 4) -> np.ndarray:
    return mixer.weights(mixer.init(), context(step, num_domains))


THREE = domains(600, 100, 20)
EXAMPLES = {
    "static": Static.Config({"web": 1, "code": 2, "books": 1}),
    "natural": Natural.Config(),
    "temperature": Temperature.Config(2.0),
    "unimax": UniMax.Config(4),
    "schedule": Schedule.Config(((0, {"web": 1, "code": 2, "books": 1}),)),
}


# ---------------------------------------------------------------- what all have in common


@pytest.mark.parametrize("name", [name for name, mixer in MIXERS.items() if not mixer.is_online])
def test_every_offline_mixer_gives_a_simplex_and_changes_nothing_it_was_given(name):
    mixer = MIXERS[name](EXAMPLES[name], THREE, total_samples=1000)
    assert mixer.VERSION >= 1
    state = mixer.init()
    signals = StepSignals(1, 8, np.ones(3), np.ones(3, np.int64))
    assert mixer.update(state, signals) == state
    weights = mixer.weights(state, context(5, 3))
    assert weights.dtype == np.float64 and weights.shape == (3,)
    assert (weights >= 0).all() and weights.sum() == pytest.approx(1, abs=1e-12)
    weights[:] = 0  # the caller's copy
    assert mixer.weights(state, context(5, 3)).sum() == pytest.approx(1, abs=1e-12)


def test_only_unimax_depends_on_the_length_of_the_run():
    assert [name for name, mixer in MIXERS.items() if mixer.uses_total_samples] == ["unimax"]


# ---------------------------------------------------------------- static


def test_static_weights_are_divided_by_their_sum():
    mixer = Static(Static.Config({"code": 1, "web": 3}), domains(1, 1), total_samples=9)
    assert weights_of(mixer, num_domains=2).tolist() == [0.75, 0.25]


def test_static_without_weights_is_uniform():
    mixer = Static(Static.Config(), domains(600, 100, 20, 5), total_samples=9)
    assert weights_of(mixer).tolist() == [0.25] * 4


def test_static_weights_of_zero_and_of_any_size_are_allowed():
    mixer = Static(Static.Config({"web": 1e308, "code": 1e308, "books": 0}), THREE, total_samples=9)
    assert weights_of(mixer, num_domains=3).tolist() == [0.5, 0.5, 0.0]


def test_static_reads_a_weights_file(tmp_path):
    path = tmp_path / "weights.json"
    path.write_text('{"version": 1, "weights": {"web": 0.25, "code": 0.75}}')
    mixer = Static(Static.Config(path), domains(1, 1), total_samples=9)
    assert weights_of(mixer, num_domains=2).tolist() == [0.25, 0.75]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"weights.json is not JSON"),
        ("[1]", r'weights.json holds no {"weights": {name: number}}'),
        ('{"weights": {"web": "x"}}', r'weights.json holds no {"weights": {name: number}}'),
        ('{"weights": {"web": true}}', r'weights.json holds no {"weights": {name: number}}'),
        ('{"weights": {"web": 1}}', r"d3.mix.weights: no weight for domain code"),
    ],
)
def test_static_refuses_a_bad_weights_file(tmp_path, content, message):
    path = tmp_path / "weights.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        Static(Static.Config(path), domains(1, 1), total_samples=9)


def test_static_refuses_a_missing_weights_file(tmp_path):
    with pytest.raises(ConfigError, match=r"d3.mix.weights: cannot read .*none.json: No such file"):
        Static(Static.Config(tmp_path / "none.json"), domains(1, 1), total_samples=9)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"web": -1, "code": 2}, r"^d3.mix.weights.web: got -1, expected a finite number >= 0$"),
        (
            {"web": float("nan"), "code": 2},
            r"^d3.mix.weights.web: got nan, expected a finite number >= 0$",
        ),
        (
            {"web": float("inf"), "code": 2},
            r"^d3.mix.weights.web: got inf, expected a finite number >= 0$",
        ),
        (
            {"web": 0, "code": 0},
            r"^d3.mix.weights: all weights are 0, expected at least one above 0$",
        ),
        (
            {"web": 1, "code": 1, "cod": 1},
            r"^d3.mix.weights.cod: no such domain, did you mean code\?$",
        ),
        (
            {"web": 1, "code": 1, "xyz": 1},
            r"^d3.mix.weights.xyz: no such domain; known: web, code$",
        ),
        (
            {"web": 1},
            r"^d3.mix.weights: no weight for domain code; give it one, 0 to leave it out$",
        ),
        (
            {"pile": 1, "books": 1, "web": 1},
            r"^d3.mix.weights: not those .*; no such domains: pile, books; no weight for: code$",
        ),
        (
            {},
            r"^d3.mix.weights: not those of this run's domains; no weight for: web, code$",
        ),
    ],
)
def test_weights_that_are_no_weights_are_refused(weights, message):
    with pytest.raises(ConfigError, match=message):
        Static(Static.Config(weights), domains(1, 1), total_samples=9)


# ---------------------------------------------------------------- natural, temperature


def test_natural_follows_tokens_not_samples():
    sources = [DomainInfo("web", 1, 300), DomainInfo("code", 1, 100)]
    assert weights_of(Natural(Natural.Config(), sources, total_samples=9)).tolist() == [0.75, 0.25]


def test_temperature_matches_the_oracle():
    case = CASES["temperature"]
    sources = domains(*case["inputs"]["sizes"])
    for temperature, expected in zip(case["inputs"]["T"], case["outputs"]["weights"], strict=True):
        mixer = Temperature(Temperature.Config(temperature), sources, total_samples=9)
        assert_allclose(weights_of(mixer), expected, rtol=1e-9)


def test_temperature_one_is_natural_and_infinite_is_uniform():
    sources = domains(600, 100, 20, 5)
    natural = weights_of(Natural(Natural.Config(), sources, total_samples=9))
    one = weights_of(Temperature(Temperature.Config(1.0), sources, total_samples=9))
    infinite = weights_of(Temperature(Temperature.Config(np.inf), sources, total_samples=9))
    assert_allclose(one, natural, rtol=1e-12)
    assert infinite.tolist() == [0.25] * 4


def test_a_low_temperature_favours_the_largest_without_overflow():
    mixer = Temperature(Temperature.Config(1e-3), domains(600, 100, 20, 5), total_samples=9)
    assert weights_of(mixer).tolist() == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("mixer", "config"),
    [
        (Natural, Natural.Config()),
        (Temperature, Temperature.Config(2.0)),
        (UniMax, UniMax.Config(4)),
    ],
)
def test_domains_that_are_all_empty_are_refused(mixer, config):
    with pytest.raises(ConfigError, match=r"^d3.mix: all weights are 0"):
        mixer(config, domains(0, 0), total_samples=9)


# ---------------------------------------------------------------- unimax


@pytest.mark.parametrize("index", [0, 1])
def test_unimax_matches_the_oracle(index):
    case = CASES["unimax"]
    sizes, outputs = case["inputs"]["sizes"], case["outputs"]
    mixer = UniMax(
        UniMax.Config(case["hyper"]["max_epochs"]),
        domains(*sizes),
        total_samples=int(case["inputs"]["budgets"][index]),
    )
    assert_allclose(mixer.budgets, outputs["tokens"][index], rtol=1e-9)
    assert_allclose(weights_of(mixer), outputs["weights"][index], rtol=1e-9)
    assert_allclose(mixer.unspent_samples, outputs["unspent"][index], rtol=1e-9)
    assert_allclose(mixer.budgets / np.array(sizes), outputs["epochs"][index], rtol=1e-9)


def test_unimax_with_a_limit_by_domain():
    mixer = UniMax(UniMax.Config({"code": 1}), domains(600, 100, 20), total_samples=900)
    assert mixer.budgets.tolist() == [400, 100, 400]  # 20 times over books: it has no limit
    assert mixer.unspent_samples == 0


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=8), st.floats(0, 1e7))
def test_unimax_spends_the_budget_or_reaches_every_limit(limits, budget):
    taken, left = spend(np.array(limits), budget)
    assert (taken <= np.array(limits)).all()
    assert_allclose(taken.sum() + left, budget, rtol=1e-9, atol=1e-6)
    below = taken < np.array(limits)
    if below.any():  # those below their limit share alike, and nobody takes more
        assert_allclose(taken[below], taken.max(), rtol=1e-9, atol=1e-300)


# ---------------------------------------------------------------- schedule


@pytest.mark.parametrize("interpolation", ["step", "linear", "cosine"])
def test_schedule_matches_the_oracle(interpolation):
    case = CASES["schedule"]
    knots = tuple(
        (step, dict(zip(NAMES, weights, strict=True))) for step, weights in case["inputs"]["knots"]
    )
    mixer = Schedule(Schedule.Config(knots, interpolation), domains(1, 1, 1, 1), total_samples=9)
    got = [weights_of(mixer, step) for step in case["inputs"]["query_steps"]]
    assert_allclose(got, case["outputs"][interpolation], rtol=1e-9)


def test_schedule_divides_every_knot_by_its_sum():
    knots = ((0, {"web": 1, "code": 3}), (10, {"web": 30, "code": 10}))
    mixer = Schedule(Schedule.Config(knots, "linear"), domains(1, 1), total_samples=9)
    assert weights_of(mixer, 0).tolist() == [0.25, 0.75]
    assert weights_of(mixer, 5).tolist() == [0.5, 0.5]
    assert weights_of(mixer, 10).tolist() == [0.75, 0.25]


BOTH = {"web": 1.0, "code": 1.0}


@pytest.mark.parametrize(
    ("knots", "message"),
    [
        ((), r"^d3.mix.knots: got none, expected at least \[0, weights\]$"),
        (((5, BOTH),), r"^d3.mix.knots\[0\]: got step 5, expected 0"),
        (
            ((0, BOTH), (10, BOTH), (10, BOTH)),
            r"^d3.mix.knots\[2\]: got step 10, expected one after 10$",
        ),
        (
            ((0, BOTH), (10, BOTH), (9, BOTH)),
            r"^d3.mix.knots\[2\]: got step 9, expected one after 10$",
        ),
        (((0, BOTH), (10, {"web": 1})), r"^d3.mix.knots\[1\]\[1\]: no weight for domain code"),
        (
            ((0, {"web": 1, "code": -1}),),
            r"^d3.mix.knots\[0\]\[1\].code: got -1, expected a finite",
        ),
        (
            ((0, {"web": 1, "code": 1, "wbe": 1}),),
            r"^d3.mix.knots\[0\]\[1\].wbe: no such domain, did",
        ),
    ],
)
def test_a_bad_schedule_is_refused(knots, message):
    with pytest.raises(ConfigError, match=message):
        Schedule(Schedule.Config(knots), domains(1, 1), total_samples=9)
