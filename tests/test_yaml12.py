"""YAML 1.2 values, duplicate keys, overrides."""

from __future__ import annotations

import math

import pytest

from megatron_d3.errors import ConfigError
from megatron_d3.yaml12 import override, parse_yaml, read_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E5", 1e5),
        ("-2.5", -2.5),
        ("+.5", 0.5),
        ("1.", 1.0),
        ("3", 3),
        ("-3", -3),
        ("010", 10),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("no", "no"),
        ("on", "on"),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("2024-01-01", "2024-01-01"),
        ("'5'", "5"),
        ("inf", "inf"),
        (".", "."),
        ("[1, x]", [1, "x"]),
        ("{a: {b: 1e2}}", {"a": {"b": 100.0}}),
    ],
)
def test_values_are_those_of_yaml_1_2(text, value):
    got = parse_yaml(text, "f")
    assert got == value and type(got) is type(value)


def test_nan_is_a_number():
    assert math.isnan(parse_yaml(".nan", "f"))


def test_anchors_repeat_a_value():
    assert parse_yaml("a: &x {b: 1}\nc: *x", "f") == {"a": {"b": 1}, "c": {"b": 1}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", r"^f, line 3: the key a is given twice$"),
        ("x:\n  web: p\n  web: q", r"^f, line 3: the key web is given twice$"),
        ("a: 1\n2024: x", r"^f, line 2: got the key 2024, expected a text; put it in quotes$"),
        ("no value: [", r"^f, line 1: not valid YAML: "),
        (
            "a: !!python/object:x.y {}",
            r"^f, line 1: not valid YAML: could not determine a constructor",
        ),
    ],
)
def test_what_is_no_configuration_is_refused_with_its_line(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_yaml(text, "f")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"^cannot read .*none.yaml: No such file"):
        read_yaml(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9\n")
    with pytest.raises(ConfigError, match=r"latin.yaml is not UTF-8 text"):
        read_yaml(tmp_path / "latin.yaml")


def test_overrides_in_order():
    config = {"mix": {"type": "static", "weights": {"web": 1}}, "seed": 1}
    got = override(
        config,
        [
            "mix.type=natural",
            "seed=1e1",
            "d3.mix.weights={a: 2}",
            "valid_fraction=0",
            "new.deep.x=[1]",
            "mix.weights.b=null",
        ],
    )
    assert got == {
        "mix": {"type": "natural", "weights": {"a": 2, "b": None}},
        "seed": 10.0,
        "valid_fraction": 0,
        "new": {"deep": {"x": [1]}},
    }
    assert config == {"mix": {"type": "static", "weights": {"web": 1}}, "seed": 1}


def test_an_override_finds_keys_that_hold_dots():
    config = {"domains": {"c4.en": {"order": "shuffle"}}}
    assert override(config, ["domains.c4.en.order=stored"]) == {
        "domains": {"c4.en": {"order": "stored"}}
    }
    assert override(config, ["domains.c4.en=p"]) == {"domains": {"c4.en": "p"}}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("seed", r"^--d3-set seed: expected KEY=VALUE"),
        ("=1", r"^--d3-set =1: expected KEY=VALUE"),
        ("a..b=1", r"^--d3-set a..b=1: expected KEY=VALUE"),
        (
            "web.order=stored",
            r"^--d3-set web.order=stored: web is not a mapping, but 'corpus/web'$",
        ),
        ("a=[", r"^--d3-set a=\[, line 1: not valid YAML"),
    ],
)
def test_bad_overrides_are_refused(setting, message):
    with pytest.raises(ConfigError, match=message):
        override({"web": "corpus/web"}, [setting])
