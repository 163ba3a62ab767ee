"""`plan.json` and the comparison of what runs want."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megatron_d3.errors import PlanError
from megatron_d3.plan.batch_schedule import BatchSchedule
from megatron_d3.plan.header import Generation, PlanFile, RunHeader, differences
from tests.plan_helpers import domains, header


def test_plan_json_round_trips() -> None:
    plan = PlanFile.begin(header(), iteration=3, position=12)
    other = header(domains=domains(100, 50, 20, 5)[::-1], batch_schedule=BatchSchedule(
        ((0, 4), (20, 8))))
    table, ids = plan.table_with(other)
    assert ids == (3, 2, 1, 0)
    plan = plan.with_generation(Generation(9, 36, 9, ids, (1, 2, 3, 0), other))
    assert plan.table == table == domains(100, 50, 20, 5)
    assert PlanFile.from_text(plan.to_text(), where="x") == plan
    assert plan.before(8) == PlanFile.begin(header(), iteration=3, position=12)
    assert plan.before(9) == plan


def test_a_header_round_trips_as_json() -> None:
    head = header(config={"mix": {"knots": ((0, 1.5),)}, "paths": None})
    assert head.config == {"mix": {"knots": [[0, 1.5]]}, "paths": None}
    assert RunHeader.from_json(json.loads(json.dumps(head.to_json()))) == head


@pytest.mark.parametrize(("text", "message"), [
    ("nonsense", r"p/plan.json: not JSON"),
    ("[]", r"p/plan.json: plan version None, expected 1"),
    ('{"version": 7}', r"p/plan.json: plan version 7, expected 1; use the Megatron-D3 that wrote"),
    ('{"version": 1}', r"p/plan.json: damaged, KeyError 'domains'"),
    ('{"version": 1, "domains": [{"name": "a"}], "generations": []}', r"damaged, TypeError"),
    ('{"version": 1, "domains": [], "generations": [{"domains": [3]}]}', r"damaged, IndexError"),
])
def test_bad_plan_files_are_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        PlanFile.from_text(text, where="p/plan.json")


def test_a_full_domain_table_is_refused() -> None:
    domain = domains(5)[0]
    table = tuple(replace(domain, name=str(i)) for i in range((1 << 15) + 1))
    assert len(PlanFile(table[:-1], ()).table) == 1 << 15
    with pytest.raises(PlanError, match=r"table has 32769 domains, at most 32768 fit"):
        PlanFile(table, ())


def test_differences_are_named_most_basic_first() -> None:
    old = header(config={"mix": {"type": "static", "weights": {"a": 1, "b": 2}}, "round_steps": 1})
    new = replace(
        old, seed=8, domains=domains(100, 50, 20)[::-1], total_samples=9, versions={"toy": 2},
        config={"mix": {"weights": {"b": 3, "a": 1}, "type": "static"}, "round_steps": 1, "x": 1},
        batch_schedule=BatchSchedule.constant(5))
    assert [(d.field, d.old, d.new) for d in differences(old, new)] == [
        ("seed", 7, 8), ("domain order", ["a", "b", "c"], ["c", "b", "a"]),
        ("mix.weights.b", 2, 3), ("versions.toy", 1, 2), ("total_samples", 96, 9),
        ("batch_schedule", [[0, 4]], [[0, 5]])]
    assert differences(old, old) == []


def test_long_values_are_cut_in_messages() -> None:
    one, two = header(tokenizer="x" * 500), header(tokenizer="y")
    assert len(str(differences(one, two)[0])) < 250
