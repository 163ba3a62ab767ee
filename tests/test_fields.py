"""The strict loader: every kind of value, every error in full."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest

from megatron_d3.errors import ConfigError
from megatron_d3.fields import (
    Range,
    describe,
    did_you_mean,
    field_docs,
    from_mapping,
    parse,
    show,
    to_plain,
)

HERE = Path("/data")


@dataclass(frozen=True)
class Inner:
    """A part."""

    size: int
    """How large,
    in tokens."""

    name: str = "x"


@dataclass(frozen=True)
class Outer:
    """The whole."""

    alpha: Annotated[float, Range("[0, 1)")] = 0.5
    """Kept share."""

    inner: Inner | None = None
    paths: tuple[Path, ...] = ()


def load(mapping):
    return from_mapping(Outer, mapping, "d3.x", folder=HERE)


def test_defaults_and_nested_values():
    assert load({}) == Outer()
    got = load({"alpha": 0, "inner": {"size": 1e3}, "paths": ["a", "/b"]})
    assert got == Outer(0.0, Inner(1000), (Path("/data/a"), Path("/b")))
    assert type(got.alpha) is float and type(got.inner.size) is int


def test_plain_values_load_back():
    outer = Outer(0.25, Inner(3), (Path("/b"),))
    plain = {"alpha": 0.25, "inner": {"size": 3, "name": "x"}, "paths": ["/b"]}
    assert to_plain(outer) == plain
    assert load(plain) == outer
    assert to_plain(float("inf")) == "inf" and parse(float, "inf", "w", folder=HERE) == float("inf")
    assert to_plain({"a": (1, None)}) == {"a": [1, None]}


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ([1], "d3.x: got [1], expected a mapping of settings"),
        ({"alpah": 1}, "d3.x.alpah: unknown key, did you mean alpha?"),
        ({"zzzzz": 1}, "d3.x.zzzzz: unknown key; known: alpha, inner, paths"),
        ({"alpha": 1.5}, "d3.x.alpha: got 1.5, expected a number in [0, 1)"),
        ({"alpha": float("nan")}, "d3.x.alpha: got nan, expected a number in [0, 1)"),
        ({"alpha": "1"}, "d3.x.alpha: got '1', expected a number in [0, 1)"),
        ({"alpha": True}, "d3.x.alpha: got true, expected a number in [0, 1)"),
        ({"alpha": None}, "d3.x.alpha: got null, expected a number in [0, 1)"),
        ({"inner": 3}, "d3.x.inner: got 3, expected a mapping of settings or null"),
        ({"inner": {}}, "d3.x.inner.size: missing, expected an integer"),
        ({"inner": {"size": 1.5}}, "d3.x.inner.size: got 1.5, expected an integer"),
        ({"inner": {"size": False}}, "d3.x.inner.size: got false, expected an integer"),
        ({"inner": {"size": 1, "name": 2}}, "d3.x.inner.name: got 2, expected a text"),
        ({"paths": [1]}, "d3.x.paths[0]: got 1, expected a path"),
        ({"paths": {}}, "d3.x.paths: got {}, expected a list, each a path"),
    ],
)
def test_what_does_not_fit_is_refused(mapping, message):
    with pytest.raises(ConfigError) as caught:
        load(mapping)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("annotation", "value", "expected"),
    [
        (bool, True, True),
        (Literal["a", "b"], "b", "b"),
        (tuple[int, dict[str, float]], [3, {"x": 1}], (3, {"x": 1.0})),
        (dict[str, float] | Path | None, "w.json", Path("/data/w.json")),
        (dict[str, float] | Path | None, None, None),
        (tuple[Path, ...], "one", (Path("/data/one"),)),
        (float | dict[str, float], {"x": 2}, {"x": 2.0}),
    ],
)
def test_each_kind_of_value(annotation, value, expected):
    assert parse(annotation, value, "w", folder=HERE) == expected


@pytest.mark.parametrize(
    ("annotation", "value", "message"),
    [
        (bool, 1, "w: got 1, expected true or false"),
        (Literal["a", "b"], "c", "w: got 'c', expected a or b"),
        (
            tuple[int, dict[str, float]],
            [3],
            ("w: got [3], expected a list of an integer and a mapping of names, each to a number"),
        ),
        (tuple[int, dict[str, float]], [3, {"x": "y"}], "w[1].x: got 'y', expected a number"),
        (dict[str, float], {1: 2}, "w: got {1: 2}, expected a mapping of names, each to a number"),
        (float | dict[str, float], {"x": None}, "w.x: got null, expected a number"),
        (float | None, "x", "w: got 'x', expected a number or null"),
    ],
)
def test_each_kind_of_error(annotation, value, message):
    with pytest.raises(ConfigError) as caught:
        parse(annotation, value, "w", folder=HERE)
    assert str(caught.value) == message


def test_an_annotation_without_a_rule_is_our_bug():
    with pytest.raises(TypeError, match="no rule to load a"):
        parse(bytes, b"", "w", folder=HERE)


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("[0, 1)", [0, 0.5], [-1, 1]),
        ("(0, inf]", [1e-9, float("inf")], [0]),
        ("[1, inf)", [1], [0.9]),
    ],
)
def test_ranges(text, inside, outside):
    assert all(Range(text).contains(number) for number in inside)
    assert not any(Range(text).contains(number) for number in [*outside, float("nan")])


def test_words_for_messages():
    assert did_you_mean("x", []) == "; there is none to set"
    assert show(None) == "null" and show(1) == "1" and show("y" * 200).endswith("...")
    assert describe(None) == "null"


def test_field_docstrings_are_found():
    assert field_docs(Inner) == {"size": "How large, in tokens.", "name": ""}
