"""Regrets and costs of estimators and solvers, from made-up measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from megatron_d3.errors import ConfigError, ProbeError
from megatron_d3.influence.graph import random_cost, violation_cost
from megatron_d3.influence.settings import D3Config
from megatron_d3.influence.source import UNUSABLE, Influence, StepModel
from megatron_d3.influence.study import (
    Row,
    SolverRow,
    Study,
    agreement,
    best_order,
    judge_settings,
    regret,
    study,
)
from megatron_d3.influence.study_cases import DEFAULT, Case, make_cases, name_of
from megatron_d3.influence.study_table import to_json, to_text

# Unit 0 before 1 before 2: 2 + 1 + 4 above the diagonal.
S = np.array([[0.0, 2.0, 1.0], [-2.0, 0.0, 4.0], [-1.0, -4.0, 0.0]])
SGD = StepModel(0.5)
CONFIG = D3Config(window=3, probe_sequences=4)
JUDGE = judge_settings(CONFIG, "look_ahead", 8)


def influence(advantage: np.ndarray = S, **changes: object) -> Influence:
    made = Influence(
        advantage=advantage, halves=(advantage, advantage), gram=np.eye(3), losses=np.ones(3),
        gradient_norms=np.array([3.0, 1.0, 2.0]), num_gradients=6.0, num_forwards=1.5, seconds={})
    return replace(made, **changes)  # type: ignore[arg-type]


class Measured:
    """Answers by the estimator's name; errors are raised."""

    def __init__(self, answers: Mapping[str, Influence | ProbeError]) -> None:
        self.answers = {"look_ahead": influence(), **answers}
        self.asked: list[tuple[str, int, float]] = []

    def __call__(self, settings: D3Config, step: StepModel) -> Influence:
        self.asked.append((settings.estimator, settings.probe_sequences, step.gamma))
        answer = self.answers[settings.estimator]
        if isinstance(answer, ProbeError):
            raise answer
        return answer


def cases(*names: str, config: D3Config = CONFIG) -> list[Case]:
    return make_cases(names, config)


def rows(found: Study) -> dict[str, Row]:
    return {row.name: row for row in found.estimators}


def antisymmetric(count: int) -> st.SearchStrategy[np.ndarray]:
    numbers = st.integers(-50, 50).map(float)
    return hnp.arrays(np.float64, (count, count), elements=numbers).map(lambda m: m - m.T)


def test_every_order_is_judged_by_the_judges_s() -> None:
    measured = Measured({"projected": influence(), "fisher": influence(-S), "exact": influence(0 * S)})
    found = study(measured, cases("projected", "fisher", "exact"), SGD, judge=JUDGE, seed=0)
    assert {name: row.regret for name, row in rows(found).items()} == {
        "projected": 0.0, "fisher": 2.0, "exact": 0.0, "sort by gradient norm": 3 / 3.5,
        "row sums of the judge's S": 0.0, "order of the plan": 0.0}
    assert {row.name: row.regret for row in found.solvers} == dict.fromkeys(
        ["row_sum", "greedy_insertion", "rsr", "insertion", "ils", "exact"], 0.0)
    assert (found.step, found.gamma, found.best_cost) == ("sgd", 0.5, 0.0)
    assert all(row.milliseconds > 0 for row in found.solvers)


def test_the_judge_measures_all_sequences_forwards_and_backwards() -> None:
    measured = Measured({"projected": influence(0.5 * S)})
    found = study(measured, cases("projected"), SGD, judge=JUDGE, seed=0)
    assert measured.asked == [
        ("look_ahead", 8, 0.5), ("look_ahead", 8, -0.5), ("projected", 4, 0.5)]
    assert (found.judge.name, found.judge.regret, found.judge.reliability) == ("look_ahead", 0.0, 1.0)


def test_costs_are_for_each_unit() -> None:
    measured = Measured({"projected": influence(halves=(S, -S))})
    row = rows(study(measured, cases("projected"), SGD, judge=JUDGE, seed=0))["projected"]
    assert (row.num_sequences, row.num_gradients, row.num_forwards) == (4, 2.0, 0.5)
    assert row.reliability == -1.0
    assert row.expected_agreement == pytest.approx((2 / 8) ** 0.5)  # 2 of 4 are for curvature
    assert row.curl == pytest.approx((25 / 63) ** 0.5)
    assert row.seconds > 0


def test_unequal_clipping_has_a_first_order_and_is_no_disagreement() -> None:
    """S of steps backwards has the first-order part with the other sign."""
    step = StepModel(0.5, clip=1.0, uses_root=True)
    gram = np.array([[9.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 4.0]])
    factors = np.array([1 / 3, 1.0, 1 / 2])
    first = 0.5 * (factors[:, None] - factors) * gram

    def measure(settings: D3Config, asked: StepModel) -> Influence:
        return influence(S + np.sign(asked.gamma) * first, gram=gram)

    found = study(measure, cases("projected"), step, judge=JUDGE, seed=0)
    assert found.step == "optimizer"
    assert found.judge.reliability == pytest.approx(1.0)
    # Units 1, 2, 0 by descending factor.
    least = violation_cost(S + first, best_order(S + first, 0))
    assert rows(found)["first order"].regret == regret(S + first, np.array([1, 2, 0]), least)


def test_another_judge_is_asked_once_and_trusted_by_its_halves() -> None:
    measured = Measured({"projected": influence(), "exact": influence(halves=(S, -S))})
    found = study(measured, cases("projected"), SGD, judge=judge_settings(CONFIG, "exact", 8), seed=0)
    assert measured.asked[0] == ("exact", 8, 0.5)
    assert len(measured.asked) == 2
    assert found.judge.reliability == -1.0


def test_what_cannot_be_measured_says_why_and_the_rest_goes_on() -> None:
    measured = Measured({
        "projected": ProbeError("too coarse"), "fisher": influence(0 * S, bad_units=(1,)),
        "exact": influence()})
    found = study(measured, cases("projected", "fisher", "exact"), SGD, judge=JUDGE, seed=0)
    assert rows(found)["projected"] == Row("projected", None, reason="too coarse")
    assert rows(found)["fisher"].reason == f"{UNUSABLE} in unit 1"
    assert rows(found)["fisher"].regret is None
    assert rows(found)["exact"].regret == 0.0
    text = to_text([found], solver="ils", num_units=3)
    assert "projected: too coarse" in text.splitlines()


def test_a_judge_without_numbers_is_refused() -> None:
    measured = Measured({"look_ahead": influence(0 * S, bad_units=(0, 2))})
    with pytest.raises(ProbeError, match=f"{UNUSABLE} in unit 0, 2 of the window"):
        study(measured, cases("projected"), SGD, judge=JUDGE, seed=0)


def test_where_all_orders_are_alike_there_is_no_regret() -> None:
    measured = Measured({"look_ahead": influence(0 * S), "projected": influence()})
    found = study(measured, cases("projected"), SGD, judge=JUDGE, seed=0)
    assert {row.regret for row in (*found.estimators, *found.solvers, found.judge)} == {None}
    assert found.best_cost == 1.0


@given(antisymmetric(6), st.permutations(range(6)))
def test_regret_is_0_for_the_best_1_on_average_and_never_below(
    advantage: np.ndarray, order: list[int]
) -> None:
    best = best_order(advantage, seed=0)
    least = violation_cost(advantage, best)
    forwards = regret(advantage, np.array(order), least)
    backwards = regret(advantage, np.array(order[::-1]), least)
    if random_cost(advantage) == least:
        assert forwards is None
        return
    assert regret(advantage, best, least) == 0.0
    assert forwards is not None and forwards >= 0.0
    assert backwards is not None and forwards + backwards == pytest.approx(2.0)


def test_more_units_than_the_exact_solver_takes_are_searched() -> None:
    rng = np.random.default_rng(0)
    potential = rng.permutation(30).astype(float)
    advantage = potential[None, :] - potential[:, None]
    assert best_order(advantage, seed=0).tolist() == np.argsort(potential).tolist()


def test_rounding_alone_has_little_agreement() -> None:
    """Losses of the present weights round alike in both: S and B of noise correlate all the same."""
    rng = np.random.default_rng(0)
    before = rng.normal(size=30)
    noise = [rng.normal(size=(30, 30)) - before[None, :] for _ in range(2)]
    forwards, backwards = (n.T - n for n in noise)
    assert agreement(forwards, backwards) < 0.1
    assert np.corrcoef(forwards.ravel(), backwards.ravel())[0, 1] > 0.3


# --- cases --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "changes"), [
    ("projected", {}),
    ("projected:mean", {"basis": "mean"}),
    ("projected:3", {"directions": 3}),
    ("hutchinson_diagonal:4", {"estimator": "hutchinson_diagonal", "probes": 4}),
    ("fisher", {"estimator": "fisher"}),
    ("look_ahead", {"estimator": "look_ahead"}),
    ("look_ahead_even:2", {"estimator": "look_ahead_even", "curvature_sequences": 2}),
])
def test_a_name_stands_for_settings_and_settings_for_a_name(
    name: str, changes: dict[str, object]
) -> None:
    wanted = replace(CONFIG, **changes)  # type: ignore[arg-type]
    assert name_of(wanted) == name
    start = replace(CONFIG, estimator="exact", directions=3, probes=2)
    (_, case) = cases(name, config=start)
    assert case == Case(name, wanted)


def test_the_configured_estimator_comes_first_and_once() -> None:
    config = replace(CONFIG, estimator="fisher", solver="rsr")
    assert [c.name for c in cases("projected", "fisher", "projected", config=config)] == [
        "fisher", "projected"]
    usual = [c.name for c in make_cases(None, config)]
    assert usual == ["fisher", *(n for n in DEFAULT if n not in ("fisher", "projected:4"))]


@pytest.mark.parametrize(("name", "message"), [
    ("projekted", "--estimators: no estimator 'projekted', did you mean projected"),
    ("", "--estimators: no estimator ''; known: projected"),
    ("fisher:2", "--estimators: got fisher:2, but fisher takes no number"),
    ("projected:", "got projected:, expected a whole number of at least 1 after the colon .directions"),
    ("gnb_diagonal:0", "got gnb_diagonal:0, expected a whole number of at least 1"),
    ("projected:4", "d3.order.directions: got 4, expected at most window = 3"),
    ("look_ahead:5", "d3.order.curvature_sequences: got 5, expected at most probe_sequences = 4"),
])
def test_a_name_that_means_nothing_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cases(name)


# --- tables -------------------------------------------------------------------------------------

FOUND = Study(
    step="sgd", gamma=0.01, best_cost=0.25,
    judge=Row("look_ahead", 0.0, 8, 1.0, 3.0, 1.5, reliability=0.9, expected_agreement=1.0,
              curl=0.5),
    estimators=(Row("projected", 0.0625, 4, 2.0, 0.0, 0.25, reliability=-0.5,
                    expected_agreement=0.75, curl=0.125),
                Row("order of the plan", None)),
    solvers=(SolverRow("ils", 0.0, 1.234),))


def test_the_table() -> None:
    assert to_text([FOUND], solver="ils", num_units=3).splitlines() == [
        "gradients, forwards: passes over the probe sequences of a unit, for each unit",
        "regret: of the order that ils finds; 0 the best, 1 as good as random",
        "agreement: expected correlation of S with that of all sequences, by the reliability",
        "",
        "step: sgd, gamma 0.01; 3 units; best order 0.250 of a random one's cost",
        ("estimator          sequences  gradients  forwards  seconds  regret  reliability  "
         "agreement  curl"),
        ("judge: look_ahead          8          1         3     1.50   0.000         0.90  "
         "     1.00  0.50"),
        ("projected                  4          2         0     0.25   0.062        -0.50  "
         "     0.75  0.12"),
        ("order of the plan          -          -         -        -       -            -  "
         "        -     -"),
        "",
        "solver  regret    ms",
        "ils       0.00  1.23",
    ]


@pytest.mark.parametrize(("judge", "message"), [
    ("look_ahead", "NOTE: S of the same steps backwards agrees to 0.25 only"),
    ("exact", "NOTE: two halves of the judge's sequences agree to 0.25 only"),
])
def test_a_judge_that_is_mostly_noise_is_pointed_out(judge: str, message: str) -> None:
    doubtful = replace(FOUND, judge=replace(FOUND.judge, name=judge, reliability=0.25))
    assert message in to_text([doubtful], solver="ils", num_units=3)


def test_json_has_all_numbers() -> None:
    content = to_json([FOUND], units=3)
    assert (content["version"], content["units"]) == (1, 3)
    assert content["steps"][0]["estimators"][0]["regret"] == 0.0625
    assert list(content["steps"][0]["solvers"]) == [{"name": "ils", "regret": 0.0, "milliseconds": 1.234}]
