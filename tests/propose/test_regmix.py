"""RegMix: boosting finds a better mixture than the prior, within the limits."""

from __future__ import annotations

import builtins

import numpy as np
import pytest

from megatron_d3.errors import ConfigError
from megatron_d3.propose import Limits, Runs
from megatron_d3.propose.regmix import propose_regmix

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def runs(num_runs: int, *, noise: bool = False) -> Runs:
    rng = np.random.default_rng(0)
    weights = rng.dirichlet(np.ones(3), num_runs)
    losses = 1 + np.exp(weights @ np.array([1.0, -1.0, 0.5]))[:, None]
    if noise:
        losses = 3 + 0.1 * rng.normal(size=(num_runs, 1))
    return Runs(("a", "b", "c"), ("x",), weights, losses)


FREE = Limits(np.full(3, 1 / 3), np.full(3, np.inf), np.inf)


def test_the_best_simulated_mixtures_are_averaged() -> None:
    pytest.importorskip("sklearn")
    limits = Limits(FREE.prior, np.array([1, 0.6, 1]), 0.4)
    found = propose_regmix(runs(48), limits, num_simulated=5000)
    assert found.weights.sum() == pytest.approx(1) and 0.45 < found.weights[1] <= 0.6
    assert found.predicted[0] < found.predicted_prior[0]
    again = propose_regmix(runs(48), limits, num_simulated=5000)
    assert found.weights.tolist() == again.weights.tolist()


def test_poor_data_and_limits_are_refused() -> None:
    pytest.importorskip("sklearn")
    with pytest.raises(ConfigError, match=r"15 runs: too few for boosting, expected at least 16"):
        propose_regmix(runs(15), FREE)
    with pytest.raises(ConfigError, match=r"loss x: the fit misses left-out runs by"):
        propose_regmix(runs(32, noise=True), FREE)
    tight = Limits(FREE.prior, np.full(3, 0.34), np.inf)
    with pytest.raises(ConfigError, match=r"only \d+ of 2000 simulated mixtures keep to the caps"):
        propose_regmix(runs(32), tight, num_simulated=2000)


def test_without_scikit_learn_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = builtins.__import__

    def without(name: str, *args: object, **kwargs: object) -> object:
        if name.startswith("sklearn"):
            raise ImportError(name)
        return stock(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"needs scikit-learn: pip install 'megatron-d3\[regmix\]'"):
        propose_regmix(runs(20), FREE)
