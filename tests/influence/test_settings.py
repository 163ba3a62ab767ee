"""Settings are strict, a preset yields to what is given, contradictions are named."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_d3.errors import ConfigError
from megatron_d3.fields import field_docs, to_plain
from megatron_d3.influence.settings import (
    MAX_EXACT_UNITS,
    PRESETS,
    D3Config,
    SketchConfig,
    parse_d3,
)


def test_an_empty_entry_has_the_defaults():
    assert parse_d3({}) == D3Config()
    assert D3Config().sketch == SketchConfig(type="auto", dim=3500, seed=0)


def test_every_field_is_explained():
    for cls in (D3Config, SketchConfig):
        docs = field_docs(cls)
        assert all(docs[field.name] for field in dataclasses.fields(cls))


@given(
    window=st.integers(2, 100),
    directions=st.integers(1, 2),
    gamma=st.one_of(st.just("lr"), st.floats(1e-9, 1e3)),
    probe_sequences=st.integers(2, 64),
    min_agreement=st.one_of(st.none(), st.floats(0, 1)),
    preset=st.sampled_from([None, "paper"]),
)
def test_a_configuration_survives_json(**keys: Any):
    config = parse_d3(keys)
    assert parse_d3(json.loads(json.dumps(to_plain(config)))) == config


def test_the_preset_is_the_published_method():
    config = parse_d3({"preset": "paper"})
    assert (config.estimator, config.probes) == ("hutchinson_diagonal", 1)
    assert (config.solver, config.swaps, config.window) == ("rsr", 10_000, 60)
    assert config.sketch == SketchConfig(type="gaussian", dim=3500, seed=0)
    assert config.preset == "paper"


def test_given_keys_win_over_the_preset():
    config = parse_d3({"preset": "paper", "solver": "ils", "sketch": {"seed": 3}})
    assert config.solver == "ils"
    assert config.sketch == SketchConfig(type="gaussian", dim=3500, seed=3)
    assert config.estimator == "hutchinson_diagonal"
    assert PRESETS["paper"]["sketch"] == {"type": "gaussian", "dim": 3500}  # left as it was


def test_no_preset_is_no_preset():
    assert parse_d3({"preset": None}) == D3Config()


def test_numbers_are_taken_as_numbers():
    config = parse_d3({"gamma": 1, "swaps": 1e4, "difference": 1e-3})
    assert (config.gamma, config.swaps, config.difference) == (1.0, 10_000, 1e-3)
    assert isinstance(config.gamma, float)
    assert isinstance(config.swaps, int)


@pytest.mark.parametrize(("entry", "message"), [
    (3, r"d3\.order: got 3, expected a mapping"),
    ({"windw": 60}, r"d3\.order\.windw: unknown key, did you mean window\?"),
    ({"window": 0}, r"d3\.order\.window: got 0, expected an integer in \[1, inf\)"),
    ({"window": "60"}, r"d3\.order\.window: got '60'"),
    ({"estimator": "hessian"}, r"d3\.order\.estimator: got 'hessian', expected projected or"),
    ({"solver": "milp"}, r"d3\.order\.solver: got 'milp', expected row_sum or"),
    ({"objective": "offline"}, r"d3\.order\.objective: got 'offline', expected online or"),
    ({"preset": "papers"}, r"d3\.order\.preset: got 'papers', expected paper or null"),
    ({"gamma": "rate"}, r"d3\.order\.gamma: got 'rate', expected lr or a number in \(0, inf\)"),
    ({"gamma": 0.0}, r"d3\.order\.gamma: got 0\.0"),
    ({"min_agreement": 1.5}, r"d3\.order\.min_agreement: got 1\.5, expected a number in"),
    ({"min_agreement": "nan"}, r"d3\.order\.min_agreement: got 'nan'"),
    ({"difference": 1.0}, r"d3\.order\.difference: got 1\.0"),
    ({"sketch": 100}, r"d3\.order\.sketch: got 100, expected a mapping"),
    ({"sketch": {"dims": 3}}, r"d3\.order\.sketch\.dims: unknown key, did you mean dim\?"),
    ({"sketch": {"dim": 0}}, r"d3\.order\.sketch\.dim: got 0"),
    ({"preset": "paper", "sketch": 100}, r"d3\.order\.sketch: got 100, expected a mapping"),
    ({"every": 0}, r"d3\.order\.every: got 0"),
])  # fmt: skip
def test_a_value_that_does_not_fit_is_refused(entry: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        parse_d3(entry)


@pytest.mark.parametrize(("keys", "message"), [
    ({"basis": "mean", "directions": 2},
     r"d3\.order\.basis: got mean with 2 directions, expected principal"),
    ({"window": 3, "directions": 4}, r"d3\.order\.directions: got 4, expected at most window = 3"),
    ({"curvature_sequences": 9},
     r"d3\.order\.curvature_sequences: got 9, expected at most probe_sequences = 8"),
    ({"min_agreement": 0.2, "curvature_sequences": 1},
     r"d3\.order\.min_agreement: got 0\.2 with curvature_sequences = 1, expected null, or"),
    ({"min_agreement": 0.2, "probe_sequences": 1},
     r"d3\.order\.min_agreement: got 0\.2 with 1 probe sequence, expected null, or"),
    ({"min_agreement": 0.2, "objective": "random"},
     r"d3\.order\.min_agreement: got 0\.2 with objective = random, expected null \(nothing is"),
    *(({"min_agreement": 0.0, "estimator": name},
       rf"d3\.order\.min_agreement: got 0\.0 with estimator = {name}, expected null, or an estimator")
      for name in ("look_ahead", "look_ahead_even", "exact")),
    ({"solver": "exact", "window": MAX_EXACT_UNITS + 1},
     rf"d3\.order\.solver: got exact with window = {MAX_EXACT_UNITS + 1}, expected window of at"),
    ({"overlap": True, "window": 1}, r"d3\.order\.overlap: got true with window = 1"),
    ({"overlap": True, "every": 2}, r"d3\.order\.overlap: got true with every = 2"),
])  # fmt: skip
def test_contradictions_are_refused(keys: dict[str, Any], message: str):
    for build in (parse_d3, lambda keys: D3Config(**keys)):
        with pytest.raises(ConfigError, match=message):
            build(keys)


@pytest.mark.parametrize("keys", [
    {"basis": "principal", "directions": 1},
    {"basis": "mean", "directions": 1},
    {"curvature_sequences": 8},
    {"probe_sequences": 1},
    {"probe_sequences": 7, "min_agreement": 0.0},
    {"window": 1},
    {"window": MAX_EXACT_UNITS, "solver": "exact"},
    {"window": 2, "overlap": True},
])  # fmt: skip
def test_the_edges_of_what_is_allowed(keys: dict[str, Any]):
    config = parse_d3(keys)
    assert {name: getattr(config, name) for name in keys} == keys


def test_importing_the_package_and_its_settings_is_light():
    code = ("import sys, megatron_d3.influence.settings\n"
            "heavy = {'torch', 'numpy', 'scipy', 'megatron'} & set(sys.modules)\n"
            "assert not heavy, heavy")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
