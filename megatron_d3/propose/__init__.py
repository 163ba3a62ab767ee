"""Propose a mixture from finished small runs: fit loss against mixture, then minimise the fit.

    runs.csv -> Runs -> one fit a loss column -> the mixture of least mean loss within Limits

    runs       the CSV, limits, and the refusal of a fit no better than the mean
    loglinear  c + exp(t . x), leave-one-out error, exact optimum (minimise)
    regmix     gradient boosting over simulated mixtures (needs scikit-learn)
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_d3.propose.loglinear import propose_loglinear
from megatron_d3.propose.regmix import propose_regmix
from megatron_d3.propose.runs import Limits, Proposal, Runs, limits_of, read_runs

BACK_ENDS: dict[str, Callable[[Runs, Limits], Proposal]] = {
    "loglinear": propose_loglinear,
    "regmix": propose_regmix,
}

__all__ = ["BACK_ENDS", "Limits", "Proposal", "Runs", "limits_of", "read_runs"]
