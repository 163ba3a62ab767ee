"""What a row of the ledger keeps of a step."""

from __future__ import annotations

import numpy as np

from megatron_d3.plan.decide import canonical
from megatron_d3.plan.rows import LossRow
from megatron_d3.types import StepSignals


def test_the_excess_over_a_reference_survives_the_ledger() -> None:
    signals = canonical(StepSignals(
        3, 24, np.array([8.0, 0.0, 4.0]), np.array([4, 0, 2]), False,
        np.array([0.1, 0.0, np.inf])))
    row = LossRow.of_step(signals, ["a", "b", "c"])
    assert row.to_body() == (
        b'{"iteration":3,"consumed":24,"loss":{"a":[8.0,4],"c":[4.0,2]},"skipped":false,'
        b'"excess":{"a":0.1,"c":null}}')
    back = LossRow.from_line(row.to_body()).to_signals(["a", "b", "c"])
    np.testing.assert_array_equal(back.excess_sums, [0.1, 0.0, np.nan])


def test_a_run_without_reference_has_no_excess() -> None:
    row = LossRow.of_step(StepSignals(1, 8, np.ones(1), np.ones(1, np.int64)), ["a"])
    assert b"excess" not in row.to_body()
    assert LossRow.from_line(row.to_body()).to_signals(["a"]).excess_sums is None
