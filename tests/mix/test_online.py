"""ODM, ADO and reference loss against the oracle; absent, exhausted, NaN and skipped for all."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from megatron_d3.config import parse_config
from megatron_d3.errors import ConfigError
from megatron_d3.mix import ADO, MIXERS, ODM, EpochCap, ReferenceLoss
from megatron_d3.mix.ado import at_least
from megatron_d3.mix.odm import exploration
from megatron_d3.mix.power_law import Bounds, add_losses, empty_sums, fit
from megatron_d3.plan.batch_schedule import BatchSchedule
from megatron_d3.plan.decide import Decider
from megatron_d3.types import DomainInfo, MixContext, StepSignals

ORACLE = json.loads((Path(__file__).parents[1] / "oracles" / "mixers.json").read_text())
CASES, NAMES = ORACLE["cases"], ORACLE["domains"]
FOUR = [DomainInfo(name, 1000, 32_000) for name in NAMES]
CONTEXT = MixContext(step=0, position=0, total_samples=100, consumed=np.zeros(4, np.int64))


def named(values) -> dict[str, float]:
    return dict(zip(NAMES, values, strict=True))


def signals(iteration, losses, num_tokens=None, *, consumed=None, is_skipped=False) -> StepSignals:
    """Mean losses of the domains; None: no tokens."""
    has = np.array([loss is not None for loss in losses])
    num_tokens = np.where(has, 64, 0) if num_tokens is None else np.array(num_tokens)
    means = np.array([0.0 if loss is None else loss for loss in losses])
    return StepSignals(iteration, iteration * 8 if consumed is None else consumed,
                       means * num_tokens, num_tokens.astype(np.int64), is_skipped)


def play(mixer, steps, state=None):
    """Return the state and the weights after each step."""
    state = mixer.init() if state is None else state
    weights = []
    for step in steps:
        state = mixer.update(state, step)
        weights.append(mixer.weights(state, CONTEXT))
    return state, np.array(weights)


# ---------------------------------------------------------------- ODM


def draws_to_signals(draws, first):
    """One turn's (domain, loss) draws as sums and counts: a token a draw."""
    steps = []
    for iteration, turn in enumerate(draws, start=first):
        sums, counts = np.zeros(4), np.zeros(4, np.int64)
        for domain, loss in turn:
            sums[domain] += loss
            counts[domain] += 1
        steps.append(StepSignals(iteration, iteration, sums, counts))
    return steps


@pytest.mark.parametrize("case", ["odm.paper.from_t1", "odm.paper.partial.mean"])
def test_odm_paper_matches_the_oracle(case):
    case = CASES[case]
    first = case["hyper"]["t0"]
    mixer = ODM(ODM.Config("paper", smoothing=case["hyper"]["alpha"], warmup_steps=first - 1),
                FOUR, total_samples=100)
    state, weights = play(mixer, draws_to_signals(case["inputs"]["draws"], first))
    assert_allclose(weights, case["outputs"]["weights_after_step"], rtol=1e-9)
    assert_allclose(state["rewards"], case["outputs"]["R_after"][-1], rtol=1e-9)
    eps = case["outputs"]["eps"]
    start = 0 if first == 1 else first - 1  # the oracle's list starts at eps of t0 - 1
    candidates = [[exploration(4, start + shift + i) for i in range(len(eps))] for shift in (0, 1)]
    assert any(np.allclose(eps, c, rtol=1e-9, atol=0) for c in candidates)


@pytest.mark.parametrize("case", ["odm.official.smoothed.s0.5", "odm.official.smoothed.partial"])
def test_odm_official_matches_the_oracle(case):
    case = CASES[case]
    config = ODM.Config("official", smoothing=case["hyper"]["smoothing"], warmup_steps=2000,
                        weights=named(case["hyper"]["initial_weights"]))
    mixer = ODM(config, FOUR, total_samples=100)
    steps = []
    for iteration, group in enumerate(case["inputs"]["groups"], start=2001):
        losses = [None] * 4
        for domain, loss in zip(group["domains"], group["losses"], strict=True):
            losses[domain] = loss
        steps.append(signals(iteration, losses))
    state, weights = play(mixer, steps)
    assert_allclose(weights, case["outputs"]["weights_after_step"], rtol=1e-9)
    assert_allclose(state["rewards"], case["outputs"]["R_after"][-1], rtol=1e-9)


def test_wrong_ports_of_odm_miss_the_oracle():
    """Negative controls: a counter reset after the warm-up, softmax, reward without exp."""
    case = CASES["odm.official.smoothed.s0.5"]
    expected = np.array(case["outputs"]["weights_after_step"])
    losses = [group["losses"] for group in case["inputs"]["groups"]]

    def weights(config, first):
        mixer = ODM(config, FOUR, total_samples=100)
        return play(mixer, [signals(first + i, step) for i, step in enumerate(losses)])[1]

    right = ODM.Config(smoothing=0.5, warmup_steps=2000)
    assert_allclose(weights(right, 2001), expected, rtol=1e-9)
    for wrong, first in (
        (replace(right, warmup_steps=0), 1),  # t counted from the end of the warm-up
        (replace(right, variant="paper"), 2001),
        (replace(right, smoothing=0.9), 2001),  # the same weights at first: the scale cancels
        (replace(right, first_update="observation"), 2001),
    ):
        assert np.abs(weights(wrong, first) - expected)[1:].max() > 1e-3, wrong


def test_odm_keeps_its_initial_weights_through_the_warm_up():
    initial = [0.5, 0.2, 0.2, 0.1]
    mixer = ODM(ODM.Config(warmup_steps=3, weights=named(initial)), FOUR, total_samples=9)
    _, weights = play(mixer, [signals(i, [3.0, 2.0, 4.0, 1.0]) for i in range(1, 5)])
    assert_allclose(weights[:3], [initial] * 3, rtol=1e-12)
    assert weights[3].tolist() != initial


def test_odm_first_update_takes_the_first_reward_whole_or_smoothed():
    for first_update, expected in (("zero", 0.5 * np.e), ("observation", np.e)):
        mixer = ODM(ODM.Config(first_update=first_update), FOUR, total_samples=9)
        state, _ = play(mixer, [signals(1, [1.0, None, 1.0, 1.0])])
        assert_allclose(state["rewards"], [expected, 0, expected, expected])


def test_odm_gives_an_unseen_domain_the_exploration_share_and_an_absent_one_its_last_reward():
    mixer = ODM(ODM.Config(), FOUR, total_samples=9)
    steps = [signals(100 + i, [3.0, 2.0, 3.5, None]) for i in range(3)]
    state, weights = play(mixer, steps)
    assert weights[-1][3] == pytest.approx(exploration(4, 102))
    _, after = play(mixer, [signals(103, [None, 2.0, 3.5, 2.0])], state)
    later = mixer.update(state, signals(103, [None, 2.0, 3.5, 2.0]))
    assert later["rewards"][0] == state["rewards"][0]
    assert after[0][3] > exploration(4, 103)


def test_a_loss_beyond_float64_counts_as_no_loss():
    mixer = ODM(ODM.Config(), FOUR, total_samples=9)
    state, weights = play(mixer, [signals(1, [800.0, 709.0, 709.5, 2.0])])
    assert state["num_updates"].tolist() == [0, 1, 1, 1]
    assert np.isfinite(weights).all() and weights.sum() == pytest.approx(1)


def test_opposite_smoothings_give_different_weights_and_counts():
    """In a public peer the parameter never reached the mixer."""
    counts = []
    for smoothing in (0.1, 0.9):
        config = ODM.Config(smoothing=smoothing, first_update="observation")
        mixer = ODM(config, FOUR, total_samples=4000)
        decider = Decider(FOUR, range(4), mixer, None, 4000, BatchSchedule.constant(40), 1)
        state = decider.init()
        for step in range(1, 100):
            state, _ = decider.decide(state)
            losses = [4.0 - 0.03 * step, 2.0, 3.0, 2.5]
            state = decider.observe(state, signals(step, losses))
        counts.append(state.cursors)
    assert np.abs(counts[0] - counts[1]).max() > 20


# ---------------------------------------------------------------- ADO


def test_ado_matches_the_oracle():
    case = CASES["ado.official.itr10"]
    inputs, law = case["inputs"], case["inputs"]["scaling_law"]
    config = ADO.Config(weights=named(inputs["mu"]), ignore_steps=10**9, fit_steps=10**9)
    mixer = ADO(config, FOUR, total_samples=10**6)
    state = mixer.init() | {
        "scale": np.exp(law["log_beta"]), "irreducible": np.exp(law["log_epsilon"]),
        "exponent": np.array(law["alpha"])}
    consumed, steps = inputs["n_before"], []
    for iteration, counts in enumerate(inputs["counts_per_step"], case["hyper"]["first_itr"]):
        consumed += sum(counts)
        steps.append(signals(iteration, [2.0] * 4, counts, consumed=consumed))
    for step, outputs in zip(steps, range(6), strict=True):
        state = mixer.update(state, step)
        assert_allclose(state["history"], case["outputs"]["h"][outputs], rtol=1e-9)
        assert_allclose(state["average"], case["outputs"]["pi_bar"][outputs], rtol=1e-9)
        assert_allclose(mixer.weights(state, CONTEXT),
                        case["outputs"]["weights_after_step"][outputs], rtol=1e-9)


def test_ado_floor_matches_the_oracle():
    case = CASES["ado.clip_min_probability"]
    got = at_least(np.array(case["inputs"]["p"]), case["hyper"]["min_prob"])
    assert_allclose(got, case["outputs"]["clipped"], rtol=1e-9)


WIDE = Bounds((0.0, np.inf), (0.0, np.inf), (0.05, 0.8))


def sums_of(laws, bounds, *, noise=0.0):
    rng = np.random.default_rng(1)
    sums = empty_sums(len(laws))
    for n in range(8, 40_000, 80):
        losses = np.array([e + b * n**-a for e, b, a in laws]) + noise * rng.normal(size=len(laws))
        sums = add_losses(sums, n=n, losses=losses, weights=np.ones(len(laws)), bounds=bounds)
    return sums


def test_a_power_law_is_found_again():
    exponents = WIDE.exponents
    laws = [(1.2, 5.0, exponents[10]), (0.3, 2.0, exponents[3]), (2.0, 9.0, exponents[20])]
    e, b, a = fit(sums_of(laws, WIDE), WIDE, min_losses=3)
    assert_allclose(np.stack([e, b, a], axis=1), laws, rtol=1e-4)


def test_a_power_law_between_two_exponents_has_the_right_slope():
    laws = [(1.0, 4.0, 0.3)]
    e, b, a = fit(sums_of(laws, WIDE, noise=0.02), WIDE, min_losses=3)
    n = 40_000
    assert_allclose(a * b * n**-a / n, 0.3 * 4.0 * n**-0.3 / n, rtol=0.25)
    assert_allclose(e + b * n**-a, 1.0 + 4.0 * n**-0.3, atol=0.02)


def test_a_fit_stays_within_its_bounds_and_is_the_best_there():
    bounds = Bounds((1.65, 3.0), (0.5, 2.0), (0.2, 0.5))
    laws = [(0.4, 6.0, 0.3), (5.0, 0.0, 0.3), (2.0, 1.0, bounds.exponents[7])]
    sums = sums_of(laws, bounds)
    found = fit(sums, bounds, min_losses=3)
    for (low, high), values in zip(((1.65, 3.0), (0.5, 2.0), (0.2, 0.5)), found, strict=True):
        assert (values >= low - 1e-12).all() and (values <= high + 1e-12).all()
    assert_allclose([v[2] for v in found], laws[2], rtol=1e-4)

    def error(domain, e, b, m):
        s = {name: value[domain] for name, value in sums.items()}
        return (s["sum_yy"] - 2 * e * s["sum_y"] - 2 * b * s["sum_xy"][m] + e * e * s["sum_w"]
                + 2 * e * b * s["sum_x"][m] + b * b * s["sum_xx"][m])

    for domain in range(3):  # a grid over the box finds nothing better
        m = int(np.argmin(np.abs(bounds.exponents - found[2][domain])))
        best = error(domain, found[0][domain], found[1][domain], m)
        grid = min(error(domain, e, b, k) for e in np.linspace(1.65, 3, 28)
                   for b in np.linspace(0.5, 2, 31) for k in range(len(bounds.exponents)))
        assert best <= grid + 1e-6 * abs(grid) + 1e-9


def test_a_domain_with_too_few_losses_has_no_law():
    sums = empty_sums(2)
    for n in range(1, 6):
        sums = add_losses(sums, n=n, losses=np.array([2.0 + 1 / n, np.nan]),
                          weights=np.array([1.0, 0.0]), bounds=WIDE)
    e, b, a = fit(sums, WIDE, min_losses=5)
    assert np.isfinite([e[0], b[0], a[0]]).all()
    assert np.isnan([e[1], b[1], a[1]]).all()
    assert np.isnan(fit(sums, WIDE, min_losses=6)).all()


def test_ado_prefers_the_domain_whose_loss_falls():
    config = ADO.Config(ignore_steps=0, start_step=50, fit_steps=50)
    mixer = ADO(config, FOUR, total_samples=10**6)
    steps = [signals(t, [1 + 6 * (8 * t) ** -0.3, 2.0, 2 + 0.5 * (8 * t) ** -0.3, 2.5])
             for t in range(1, 200)]
    state, weights = play(mixer, steps)
    assert weights[48].tolist() == [0.25] * 4
    assert weights[-1].argmax() == 0 and weights[-1][0] > 0.4
    assert weights[-1][1] < 0.2
    assert all(array.dtype in (np.float64, np.int64) for array in state.values())


def test_ado_without_any_falling_loss_keeps_the_initial_weights():
    initial = [0.4, 0.3, 0.2, 0.1]
    config = ADO.Config(named(initial), ignore_steps=0, start_step=10, fit_steps=10, floor=0)
    mixer = ADO(config, FOUR, total_samples=100)
    _, weights = play(mixer, [signals(t, [2.0] * 4) for t in range(1, 30)])
    assert_allclose(weights[-1], initial, atol=1e-9)


@pytest.mark.parametrize(("field", "value", "message"), [
    ("exponent", (0.0, 0.8), r"d3.mix.exponent: got \[0.0, 0.8\], expected two numbers that rise"),
    ("exponent", (0.1, np.inf), r"d3.mix.exponent: got \[0.1, inf\]"),
    ("irreducible", (2.0, 1.0), r"d3.mix.irreducible: got \[2.0, 1.0\]"),
    ("scale", (-1.0, 1.0), r"d3.mix.scale: got \[-1.0, 1.0\], expected two numbers .* 0 or more"),
])
def test_bounds_of_ado_that_are_no_interval_are_refused(field, value, message):
    with pytest.raises(ConfigError, match=message):
        ADO(replace(ADO.Config(), **{field: value}), FOUR, total_samples=9)


# ---------------------------------------------------------------- reference loss


def reference(case, **changes):
    config = ReferenceLoss.Config(
        named(case["inputs"]["target_losses"]), named(case["hyper"]["w0"]),
        eta=case["hyper"]["eta"], floor=case["hyper"]["c"], update_steps=1)
    mixer = ReferenceLoss(replace(config, **changes), FOUR, total_samples=9)
    losses = case["inputs"]["val_losses"]
    return play(mixer, [signals(i, step) for i, step in enumerate(losses, 1)])[1]


def test_reference_loss_matches_the_oracle():
    case = CASES["refloss.paper"]
    assert_allclose(reference(case), case["outputs"]["weights_after_step"], rtol=1e-9)


def test_a_reference_loss_that_does_not_clip_misses_the_oracle_once_a_domain_is_below():
    case = CASES["refloss.paper"]
    expected = np.array(case["outputs"]["weights_after_step"])
    unclipped = reference(case, clip=False)
    assert_allclose(unclipped[:3], expected[:3], rtol=1e-9)
    assert np.abs(unclipped[3:] - expected[3:]).max() > 1e-3


def test_reference_loss_updates_with_the_token_mean_since_the_last_update():
    config = ReferenceLoss.Config(named([1.0] * 4), floor=0.0, update_steps=2)
    mixer = ReferenceLoss(config, FOUR, total_samples=9)
    # means over both steps: (10*2 + 30*3) / 40 = 2.75, and 1 for the others
    steps = [signals(1, [2.0, 1, 1, None], [10, 5, 5, 0]), signals(2, [3.0, 1, 1, 1], [30, 5, 5, 1])]
    _, weights = play(mixer, steps)
    assert weights[0].tolist() == [0.25] * 4
    grown = np.exp([1.75, 0, 0, 0])
    assert_allclose(weights[1], grown / grown.sum(), rtol=1e-12)


def test_reference_loss_counts_an_absent_domain_with_its_last_excess():
    config = ReferenceLoss.Config(named([1.0] * 4), floor=0.0, update_steps=1)
    mixer = ReferenceLoss(config, FOUR, total_samples=9)
    state, _ = play(mixer, [signals(1, [2.0, 1, 1, None])])
    state, _ = play(mixer, [signals(2, [None, 1, 1, 1.0])], state)
    grown = np.exp([2.0, 0, 0, 0])
    assert state["excess"].tolist() == [1, 0, 0, 0]
    assert_allclose(state["weights"], grown / grown.sum(), rtol=1e-12)


@pytest.mark.parametrize(("content", "message"), [
    ({"web": 2, "code": 1, "books": 2}, r"^d3.mix.losses: no reference loss for domain wiki$"),
    ({**named([1] * 4), "wkii": 1}, r"^d3.mix.losses.wkii: no such domain, did you mean wiki\?$"),
    ({**named([1] * 4), "web": np.inf}, r"^d3.mix.losses.web: got inf, expected a finite number$"),
])
def test_reference_losses_of_other_domains_are_refused(content, message):
    with pytest.raises(ConfigError, match=message):
        ReferenceLoss(ReferenceLoss.Config(content), FOUR, total_samples=9)


def test_reference_losses_come_from_the_table_of_a_former_run(tmp_path):
    path = tmp_path / "table.json"
    row = {"run": "a", "step": 9, "loss": named([1.0, 2.0, 3.0, 4.0])}
    for content in (row, [row]):
        path.write_text(json.dumps(content))
        entry = {"type": "reference_loss", "losses": "table.json"}
        config = parse_config({"domains": dict.fromkeys(NAMES, "x"), "mix": entry}, folder=tmp_path)
        assert config.mix.params.losses == named([1.0, 2.0, 3.0, 4.0])
    path.write_text(json.dumps([row, row]))
    with pytest.raises(ConfigError, match=r'd3.mix.losses: .*holds no {"loss": {name: number}}'):
        parse_config({"domains": dict.fromkeys(NAMES, "x"), "mix": entry}, folder=tmp_path)
    path.unlink()
    with pytest.raises(ConfigError, match=r"d3.mix.losses: cannot read .*table.json: No such file"):
        parse_config({"domains": dict.fromkeys(NAMES, "x"), "mix": entry}, folder=tmp_path)


# ---------------------------------------------------------------- what all have in common

EXAMPLES = {
    "odm": ODM.Config(warmup_steps=1),
    "odm paper": ODM.Config("paper", warmup_steps=1),
    "odm observation": ODM.Config(first_update="observation"),
    "ado": ADO.Config(ignore_steps=0, start_step=2, fit_steps=2),
    "reference_loss": ReferenceLoss.Config(named([1.0] * 4), update_steps=2),
    "reference_loss unclipped": ReferenceLoss.Config(named([1.0] * 4), clip=False, update_steps=1),
}


def build(name, infos=FOUR):
    return MIXERS[name.split()[0]](EXAMPLES[name], infos, total_samples=1000)


@pytest.mark.parametrize("name", EXAMPLES)
@settings(max_examples=40)
@given(data=st.data())
def test_weights_stay_on_the_simplex_whatever_is_measured(name, data):
    mixer = build(name)
    assert mixer.is_online and mixer.VERSION >= 1 and not mixer.uses_total_samples
    state = mixer.init()
    loss = st.none() | st.floats(0, 1000) | st.sampled_from([np.nan, np.inf])
    for iteration in range(1, data.draw(st.integers(2, 30))):
        step = signals(iteration, data.draw(st.lists(loss, min_size=4, max_size=4)),
                       is_skipped=data.draw(st.booleans()))
        before = {key: array.copy() for key, array in state.items()}
        after = mixer.update(state, step)
        assert after.keys() == state.keys()
        for key, array in before.items():
            np.testing.assert_array_equal(state[key], array)  # pure
            assert after[key].dtype == array.dtype and after[key].shape == array.shape
        state = after
        weights = mixer.weights(state, CONTEXT)
        assert weights.dtype == np.float64 and weights.shape == (4,)
        assert (weights >= 0).all() and weights.sum() == pytest.approx(1, abs=1e-9)
        weights[:] = 0  # the caller's copy
        assert mixer.weights(state, CONTEXT).sum() == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_nan_loss_and_a_skipped_step_teach_nothing(name):
    mixer = build(name)
    first = [signals(i, [3.0, 2.0, 2.5, 1.5]) for i in (1, 2)]
    state, _ = play(mixer, first)
    skipped = mixer.update(state, signals(3, [9.0, 9, 9, np.nan], is_skipped=True))
    nothing = mixer.update(state, signals(3, [None] * 4))
    np.testing.assert_array_equal(mixer.weights(skipped, CONTEXT), mixer.weights(nothing, CONTEXT))
    with_nan = mixer.update(state, signals(3, [3.0, 2.0, np.nan, 1.5]))
    assert np.isfinite(mixer.weights(with_nan, CONTEXT)).all()


@pytest.mark.parametrize("name", EXAMPLES)
def test_one_domain_and_one_sample_are_enough(name):
    config = EXAMPLES[name]
    if isinstance(config, ReferenceLoss.Config):
        config = replace(config, losses={"web": 1.0})
    mixer = MIXERS[name.split()[0]](config, [DomainInfo("web", 1, 32)], total_samples=9)
    context = replace(CONTEXT, consumed=np.zeros(1, np.int64))
    state = mixer.init()
    for iteration in range(1, 6):
        state = mixer.update(state, signals(iteration, [2.0]))
        assert mixer.weights(state, context).tolist() == [1.0]


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_run_goes_on_where_a_domain_is_exhausted(name):
    """A tiny domain, the most rewarded: drawn until its two epochs are over, then no more."""
    infos = [DomainInfo("web", 900, 9), DomainInfo("code", 900, 9), DomainInfo("books", 900, 9),
             DomainInfo("wiki", 3, 9)]
    cap = EpochCap(2, "redistribute", infos)
    decider = Decider(infos, range(4), build(name, infos), cap, 400, BatchSchedule.constant(8), 1)
    state = decider.init()
    for iteration in range(1, 51):
        state, segment = decider.decide(state)
        counts = np.bincount(segment.domains, minlength=4)
        losses = [2.0 if n else None for n in counts[:3]] + [6.0 if counts[3] else None]
        state = decider.observe(state, signals(iteration, losses, 16 * counts))
    assert state.cursors.sum() == 400 and state.cursors[3] == 6


@pytest.mark.parametrize("name", EXAMPLES)
def test_small_domains_get_no_rounding_remainder_of_others(name):
    """In a public peer a domain of 2.8 % got 25 % of the samples."""
    infos = [DomainInfo(f"d{i}", 100, 100) for i in range(36)]
    config = EXAMPLES[name]
    if isinstance(config, ReferenceLoss.Config):
        config = replace(config, losses={info.name: 1.0 for info in infos})
    mixer = MIXERS[name.split()[0]](config, infos, total_samples=4000)
    decider = Decider(infos, range(36), mixer, None, 4000, BatchSchedule.constant(4), 1)
    state, target = decider.init(), np.zeros(36)
    rng = np.random.default_rng(0)
    for iteration in range(1, 1001):
        state, segment = decider.decide(state)
        target += 4 * segment.weights
        counts = np.bincount(segment.domains, minlength=36)
        assert np.abs(state.cursors - target).max() < 2
        sums = counts * 16 * rng.uniform(1, 4, 36)
        state = decider.observe(state, StepSignals(iteration, 4 * iteration, sums, 16 * counts))


def test_one_word_turns_a_static_run_into_an_online_one(tmp_path):
    (tmp_path / "w.json").write_text(json.dumps({"weights": named([4, 3, 2, 1])}))
    for weights in (named([4, 3, 2, 1]), "w.json"):
        for kind in ("static", "odm", "ado"):
            config = parse_config({"domains": dict.fromkeys(NAMES, "x"),
                                   "mix": {"type": kind, "weights": weights}}, folder=tmp_path)
            assert config.mix.params.weights == named([4, 3, 2, 1])
            mixer = MIXERS[kind](config.mix.params, FOUR, total_samples=9)
            assert_allclose(mixer.weights(mixer.init(), CONTEXT), [0.4, 0.3, 0.2, 0.1])
            again = parse_config(config.to_dict(), folder=tmp_path)
            assert again == config


@pytest.mark.parametrize(("entry", "message"), [
    ({"type": "odm", "varient": "paper"}, r"d3.mix.varient: unknown key .* did you mean variant\?"),
    ({"type": "odm", "variant": "papr"}, r"d3.mix.variant: got 'papr', expected official or paper"),
    ({"type": "odm", "smoothing": 1}, r"d3.mix.smoothing: got 1, expected a number in \[0, 1\)"),
    ({"type": "odm", "warmup_steps": -1}, r"d3.mix.warmup_steps: got -1, expected an integer in"),
    ({"type": "odm", "first_update": "one"}, r"d3.mix.first_update: got 'one', expected zero or"),
    ({"type": "ado", "floor": 1}, r"d3.mix.floor: got 1, expected a number in \[0, 1\)"),
    ({"type": "ado", "exponent": 0.1}, r"d3.mix.exponent: got 0.1, expected a list of a number"),
    ({"type": "reference_loss"}, r"d3.mix.losses: missing, expected"),
    ({"type": "reference_loss", "losses": {"web": 1}, "eta": 0}, r"d3.mix.eta: got 0, expected a"),
    ({"type": "reference_loss", "losses": {"web": 1}, "eta": "inf"}, r"d3.mix.eta: got 'inf'"),
])
def test_misspelt_and_unfit_parameters_are_errors(entry, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        parse_config({"domains": {"web": "x"}, "mix": entry}, folder=tmp_path)


@pytest.mark.parametrize("kind", ["odm", "ado"])
def test_initial_weights_of_other_domains_are_refused(kind):
    with pytest.raises(ConfigError, match=r"d3.mix.weights: .*; no weight for: books, wiki"):
        MIXERS[kind](MIXERS[kind].Config(weights={"web": 1, "code": 1}), FOUR, total_samples=9)


def test_every_key_of_an_online_mixer_is_documented():
    from megatron_d3.fields import field_docs

    for name in ("odm", "ado", "reference_loss"):
        docs = field_docs(MIXERS[name].Config)
        assert all(docs[field.name] for field in fields(MIXERS[name].Config)), name
