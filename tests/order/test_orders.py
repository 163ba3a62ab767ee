"""Each order against hand-computed results, the source's own, and a slow version of the spec."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_d3.errors import ConfigError
from megatron_d3.order import (
    Recipe,
    fold,
    permutation,
    saw_order,
    segment,
    str_order,
    transitions,
    zigzag,
)

ORACLES = json.loads((Path(__file__).parents[1] / "oracles" / "orders.json").read_text())["cases"]
OUR_NAME = {
    "num_sections": "sections",
    "folding_ratio": "ratio",
    "folding_layer": "layers",
    "zigzag_layer": "layers",
}


def slow_layers(items: list[int], layers: int, is_zigzag: bool) -> list[int]:
    out: list[int] = []
    for layer in range(layers):
        part = items[layer::layers]
        out += part[::-1] if is_zigzag and layer % 2 else part
    return out


def slow_sections(n: int, k: int, rho: float, layers: int, is_zigzag: bool) -> list[int]:
    out, cursor = [], 0
    for section in range(1, k):
        split = round(n * section / k)
        start, stop = max(cursor, split - round(n * rho)), min(n, split + round(n * rho))
        if start >= stop:
            continue
        out += list(range(cursor, start))
        out += slow_layers(list(range(start, stop)), layers, is_zigzag)
        cursor = stop
    return out + list(range(cursor, n))


@pytest.mark.parametrize("case", ORACLES, ids=lambda case: case["method"])
def test_order_equals_the_released_code(case):
    values = {OUR_NAME.get(key, key): value for key, value in case["params"].items()}
    recipe = Recipe(case["method"], ascending=values.pop("ascending", True), parameters=values)
    scores = np.array(case["scores"])
    assert permutation(scores, recipe, num_items=len(scores)).tolist() == case["permutation"]


def test_fold_concatenates_strided_slices():
    assert fold(np.arange(8), layers=3).tolist() == [0, 3, 6, 1, 4, 7, 2, 5]


def test_zigzag_reverses_odd_layers():
    assert zigzag(np.arange(9), layers=3).tolist() == [0, 3, 6, 7, 4, 1, 2, 5, 8]


def test_str_folds_around_the_split_points_only():
    assert str_order(np.arange(12), sections=3, ratio=0.1, layers=2).tolist() == [
        *(0, 1, 2), *(3, 4), *(5, 6), *(7, 8), *(9, 10, 11),
    ]  # fmt: skip
    assert str_order(np.arange(12), sections=3, ratio=0.16, layers=2).tolist() == [
        *(0, 1), *(2, 4, 3, 5), *(6, 8, 7, 9), *(10, 11),
    ]  # fmt: skip


def test_overlapping_regions_are_clamped_to_where_the_last_one_ended():
    assert transitions(30, sections=3, ratio=0.2) == [(4, 16), (16, 26)]
    assert transitions(10, sections=2, ratio=0.5) == [(0, 10)]
    assert transitions(10, sections=10, ratio=0.5) == [(0, 6), (6, 7), (7, 8), (8, 9), (9, 10)]


def test_saw_with_odd_layers_moves_by_at_most_the_layer_count():
    order = saw_order(np.arange(300), sections=3, ratio=0.1, layers=3)
    assert np.abs(np.diff(order)).max() == 3


def test_saw_with_even_layers_warns_and_names_the_jump():
    with pytest.warns(UserWarning, match=r"2 layers \(even\).* up to 19 ranks higher"):
        order = saw_order(np.arange(100), sections=2, ratio=0.1, layers=2)
    assert np.diff(order).max() == 19


def test_zigzag_with_even_layers_warns_and_names_the_jump():
    with pytest.warns(UserWarning, match=r"4 layers \(even\).*rank 3 of 99, a jump of 96 ranks"):
        zigzag(np.arange(100), layers=4)


def test_even_layers_without_a_jump_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saw_order(np.arange(100), sections=1, ratio=0.1, layers=2)
        zigzag(np.arange(4), layers=4)
        fold(np.arange(100), layers=4)


@given(n=st.integers(0, 60), layers=st.integers(1, 70), is_zigzag=st.booleans())
def test_layers_equal_the_slow_version(n, layers, is_zigzag):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = (zigzag if is_zigzag else fold)(np.arange(n), layers=layers)
    assert got.tolist() == slow_layers(list(range(n)), layers, is_zigzag)


@given(
    n=st.integers(0, 80),
    k=st.integers(1, 90),
    rho=st.floats(0, 0.5),
    layers=st.integers(1, 9),
    is_zigzag=st.booleans(),
)
def test_sections_equal_the_slow_version(n, k, rho, layers, is_zigzag):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        order = saw_order if is_zigzag else str_order
        got = order(np.arange(n), sections=k, ratio=rho, layers=layers)
    assert got.tolist() == slow_sections(n, k, rho, layers, is_zigzag)


@pytest.mark.parametrize("first", ["low", "high"])
@pytest.mark.parametrize("last", ["low", "high"])
@settings(max_examples=40)
@given(n=st.integers(0, 60), x=st.integers(0, 50), y=st.integers(0, 50))
def test_segment_takes_its_ends_from_the_named_tails(first, last, n, x, y):
    got = segment(
        np.arange(n),
        first_percent=x,
        last_percent=y,
        first_tail=first,
        last_tail=last,
        rng=np.random.default_rng(0),
    ).tolist()
    a, b = n * x // 100, n * y // 100
    assert sorted(got) == list(range(n))
    low = set(range(a + b)), set(range(a)), set(range(b))
    high = set(range(n - a - b, n)), set(range(n - a, n)), set(range(n - b, n))
    front, back = set(got[:a]), set(got[n - b :])
    if first == last:
        assert front | back == (low if first == "low" else high)[0]
    else:
        assert front == (low if first == "low" else high)[1]
        assert back == (low if last == "low" else high)[2]


def test_segment_beyond_all_documents_is_scaled_with_a_warning():
    with pytest.warns(UserWarning, match=r"90 \+ 60 percent is more than all; scaled to 60 \+ 40"):
        got = segment(
            np.arange(10), first_percent=90, last_percent=60, rng=np.random.default_rng(1)
        )
    assert sorted(got[:6].tolist()) == [0, 1, 2, 3, 4, 5]
    assert sorted(got[6:].tolist()) == [6, 7, 8, 9]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fold(np.arange(3), layers=0), r"order.layers: got 0, expected at least 1"),
        (lambda: zigzag(np.arange(3), layers=-1), r"order.layers: got -1"),
        (lambda: transitions(3, sections=0, ratio=0.1), r"order.sections: got 0"),
        (lambda: transitions(3, sections=2, ratio=0.51), r"order.ratio: got 0.51.*\[0, 0.5\]"),
        (lambda: transitions(3, sections=2, ratio=-0.1), r"order.ratio: got -0.1"),
        (lambda: transitions(3, sections=2, ratio=float("nan")), r"order.ratio: got nan"),
        (
            lambda: saw_order(np.arange(3), sections=2, ratio=0.1, layers=0),
            r"order.layers: got 0",
        ),
    ],
)
def test_parameters_out_of_range_are_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"first_percent": 101, "last_percent": 0}, r"first_percent: got 101"),
        ({"first_percent": 0, "last_percent": float("nan")}, r"last_percent: got nan"),
        ({"first_percent": 1, "last_percent": 1, "last_tail": "top"}, r"last_tail: got 'top'"),
    ],
)
def test_segment_refuses_bad_values(values, message):
    with pytest.raises(ConfigError, match=message):
        segment(np.arange(3), **values, rng=np.random.default_rng(0))
