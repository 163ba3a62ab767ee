"""Properties that hold for every order, and what a recipe refuses."""

from __future__ import annotations

import tracemalloc
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_d3.errors import ConfigError, CorpusError
from megatron_d3.order import (
    METHODS,
    PRESETS,
    Recipe,
    gumbel_ranks,
    jitter,
    permutation,
    preset,
    rank,
    rank_together,
    refuse_repeats,
    window_size,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*even:UserWarning")


def recipe(method: str, **values) -> Recipe:
    direction = {} if method in ("shuffle", "segment") else {"ascending": True}
    return Recipe(method, **{**direction, **values})


@pytest.mark.parametrize("size", [0, 1, 2, 3, 17, 100_000])
@pytest.mark.parametrize("window", [0, 5, 0.1, 1.0])
@pytest.mark.parametrize("method", METHODS)
def test_every_document_occurs_once_and_the_same_seed_gives_the_same_order(method, window, size):
    scores = np.random.default_rng(size).integers(0, 50, size).astype(np.float64)  # many ties
    first = permutation(scores, recipe(method, jitter=window), num_items=size)
    again = permutation(scores, recipe(method, jitter=window), num_items=size)
    assert first.dtype == np.int64
    assert np.array_equal(np.sort(first), np.arange(size))
    assert np.array_equal(first, again)


@pytest.mark.parametrize("method", ["shuffle", "segment"])
def test_another_seed_gives_another_order(method):
    scores = np.arange(1000.0)
    orders = [permutation(scores, recipe(method, seed=seed), num_items=1000) for seed in (1, 2)]
    assert not np.array_equal(*orders)


@given(st.lists(st.integers(0, 3), max_size=40), st.booleans())
def test_equal_scores_keep_document_order(values, ascending):
    got = rank(np.array(values, dtype=np.float64), ascending=ascending).tolist()
    assert got == sorted(range(len(values)), key=values.__getitem__, reverse=not ascending)


# Neighbours of 1, of 0 and of the largest numbers: scores that differ in their last bits only.
CLOSE = [1 + k * 2.0**-52 for k in range(-3, 4)] + [k * 5e-324 for k in range(-3, 4)]
CLOSE += [-0.0, np.inf, -np.inf, np.finfo(np.float64).max, -1.0, np.nextafter(-1.0, 0)]


@given(st.lists(st.sampled_from(CLOSE), max_size=60), st.booleans())
def test_scores_that_hardly_differ_are_told_apart(values, ascending):
    got = rank(np.array(values, dtype=np.float64), ascending=ascending).tolist()
    assert got == sorted(range(len(values)), key=values.__getitem__, reverse=not ascending)


@pytest.mark.parametrize("ascending", [True, False])
@pytest.mark.parametrize("kind", ["uniform", "some close", "all close", "few values", "f4", "i8",
                                  "u8", "longdouble"])  # fmt: skip
def test_large_arrays_are_ranked_as_by_a_stable_sort(kind, ascending):
    rng = np.random.default_rng(1)
    size = 1_100_000 if kind == "uniform" else 50_000  # sorted by several threads, or by one
    values = {
        "uniform": rng.normal(size=size),
        "some close": np.where(rng.random(size) < 0.02, 1 + rng.random(size) * 1e-13, rng.random()),
        "all close": 1 + rng.random(size) * 1e-13,
        "few values": rng.integers(-3, 3, size) / 7,
        "f4": rng.normal(size=size).astype(np.float32),
        "i8": rng.integers(-(2**62), 2**62, size),
        "u8": rng.integers(0, 2**64 - 1, size, dtype=np.uint64),
        "longdouble": rng.random(size).astype(np.longdouble),
    }[kind]
    expected = np.argsort(values if ascending else values[::-1], kind="stable")
    if not ascending:
        expected = (size - 1 - expected)[::-1]
    assert np.array_equal(rank(values, ascending=ascending), expected)


@pytest.mark.parametrize("method", ["sort", "fold", "zigzag", "str", "saw"])
def test_one_distinct_score_is_ordered_as_the_documents_are(method):
    equal = permutation(np.zeros(50), recipe(method), num_items=50)
    rising = permutation(np.arange(50.0), recipe(method), num_items=50)
    assert np.array_equal(equal, rising)


@given(st.integers(0, 60), st.integers(0, 70), st.integers(0, 5))
def test_jitter_stays_within_its_window(size, window, seed):
    items = np.arange(size)
    jitter(items, window=window, rng=np.random.default_rng(seed))
    width = max(window, 1)
    assert np.array_equal(items // width, np.arange(size) // width)
    assert sorted(items.tolist()) == list(range(size))


def test_jitter_shuffles_every_window_differently():
    items = np.arange(10_000)
    jitter(items, window=100, rng=np.random.default_rng(0))
    rows = items.reshape(100, 100) % 100
    assert len({tuple(row) for row in rows.tolist()}) == 100


def test_jitter_is_uniform_within_a_window():
    items = np.tile(np.arange(3), 60_000)
    jitter(items, window=3, rng=np.random.default_rng(0))
    _, counts = np.unique(items.reshape(-1, 3), axis=0, return_counts=True)
    assert counts == pytest.approx([10_000] * 6, rel=0.05)  # 5 standard deviations


@pytest.mark.parametrize("method", METHODS)
def test_memory_stays_below_40_bytes_a_document(method):
    size = 200_000
    scores = np.random.default_rng(0).random(size)
    parameters = {"temperature": 5.0} if method == "sort" else {}
    made = recipe(method, jitter=0.1, parameters=parameters)
    tracemalloc.start()
    permutation(scores, made, num_items=size)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak / size < 40


def test_adding_jitter_leaves_the_other_random_steps_as_they_are():
    scores = np.arange(200.0)
    plain = permutation(scores, recipe("segment"), num_items=200)
    jittered = permutation(scores, recipe("segment", jitter=10), num_items=200)
    assert np.array_equal(np.sort(plain.reshape(-1, 10)), np.sort(jittered.reshape(-1, 10)))


def test_jitter_window_is_a_count_or_a_share():
    assert window_size(7, 1000) == 7
    assert window_size(0.005, 1000) == 5
    assert window_size(1.0, 1000) == 1000


@pytest.mark.parametrize("window", [-1, -0.1, 1.5, float("nan")])
def test_jitter_window_out_of_range_is_refused(window):
    with pytest.raises(ConfigError, match=r"order.jitter: got"):
        recipe("sort", jitter=window)


def test_gumbel_ranks_move_by_about_the_temperature():
    items = np.arange(20_000)
    moved = gumbel_ranks(items, temperature=50.0, rng=np.random.default_rng(0))
    assert np.array_equal(np.sort(moved), items)
    assert np.array_equal(gumbel_ranks(items, temperature=0.0, rng=np.random.default_rng(0)), items)
    # the standard deviation of Gumbel(0, 1) is pi / sqrt(6) = 1.28
    assert 45 < np.std(moved - items) < 90


def test_gumbel_temperature_out_of_range_is_refused():
    with pytest.raises(ConfigError, match=r"order.temperature: got -1"):
        gumbel_ranks(np.arange(3), temperature=-1.0, rng=np.random.default_rng(0))


def test_infinite_scores_are_sorted_to_the_ends():
    assert rank(np.array([0.0, np.inf, -np.inf]), ascending=True).tolist() == [2, 0, 1]


def test_nan_score_names_the_first_document():
    scores = np.zeros((1 << 20) + 10)
    scores[(1 << 20) + 3 :] = np.nan
    with pytest.raises(CorpusError, match=r"document 1048579 has no score \(NaN\)"):
        rank(scores, ascending=True)


def test_scores_of_two_columns_are_refused():
    with pytest.raises(CorpusError, match=r"got shape \(3, 2\)"):
        rank(np.zeros((3, 2)), ascending=True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([0, 1], r"got shape \(2,\), expected \(3,\)"),
        ([0.0, 1.0, 2.0], r"got dtype float64"),
        ([0, 1, 3], r"holds 3, expected 0 to 2"),
        ([-1, 1, 2], r"holds -1"),
        ([0, 0, 2], r"document 1 is missing and another occurs twice"),
    ],
)
def test_what_is_no_permutation_is_refused(values, message):
    with pytest.raises(CorpusError, match=message):
        refuse_repeats(np.array(values), 3)


def test_a_permutation_passes():
    refuse_repeats(np.array([2, 0, 1]), 3)
    refuse_repeats(np.zeros(0, dtype=np.int64), 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Recipe("saaw", ascending=True), r"got 'saaw', did you mean 'saw'\?"),
        (lambda: Recipe("?", ascending=True), r"expected one of sort, fold, zigzag, segment"),
        (lambda: Recipe("sort"), r"sort needs --ascending"),
        (lambda: Recipe("segment", ascending=False), r"segment has no direction"),
        (
            lambda: Recipe("fold", ascending=True, parameters={"ratio": 0.1}),
            r"order.ratio: not a parameter of fold, which takes layers",
        ),
        (lambda: Recipe("sort", ascending=True, seed=-1), r"order.seed: got -1"),
        (lambda: preset("saw-pretain"), r"did you mean 'saw-pretrain'\?"),
    ],
)
def test_recipe_refuses(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_scores_are_needed_and_counted():
    with pytest.raises(ConfigError, match=r"sort needs a score a document"):
        permutation(None, recipe("sort"), num_items=3)
    with pytest.raises(ConfigError, match=r"order.scores: got 2, expected 3"):
        permutation(np.zeros(2), recipe("sort"), num_items=3)


def test_shuffle_needs_no_scores():
    assert sorted(permutation(None, recipe("shuffle"), num_items=5).tolist()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_recipes(name):
    fields = preset(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = recipe(**fields)
        permutation(np.arange(1000.0), made, num_items=1000)
    assert made.to_dict()["method"] == fields["method"]


def test_recipe_fills_in_the_defaults_of_its_method():
    assert Recipe("saw", ascending=True, parameters={"ratio": 0.2}).to_dict() == {
        "method": "saw",
        "version": 1,
        "ascending": True,
        "parameters": {"sections": 3, "ratio": 0.2, "layers": 3},
        "jitter": 0,
        "jitter_version": 1,
        "seed": 42,
    }


class Shares:
    """Ranks in one process: every rank but the first has already put its share down."""

    def __init__(self, rank, size, put):
        self.rank, self.size, self.put = rank, size, put

    def collect(self, value):
        self.put[self.rank] = value
        return self.put if self.rank == 0 else []


@given(
    scores=st.lists(st.integers(0, 5), max_size=40),
    size=st.integers(1, 5),
    ascending=st.booleans(),
)
def test_ranks_sort_together_as_one_sorts_alone(scores, size, ascending):
    values = np.array(scores, np.float64)
    put: list = [None] * size
    for number in range(size - 1, -1, -1):
        ranks = Shares(number, size, put)
        ranked = rank_together(values, ascending=ascending, ranks=ranks)
    assert ranked.tolist() == rank(values, ascending=ascending).tolist()


def test_a_missing_score_is_named_on_every_rank():
    values = np.array([1.0, 2.0, np.nan])
    for number in range(2):
        with pytest.raises(CorpusError, match=r"document 2 has no score"):
            rank_together(values, ascending=True, ranks=Shares(number, 2, [None, None]))
