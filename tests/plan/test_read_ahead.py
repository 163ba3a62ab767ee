"""When losses take effect is part of the plan, whatever a later life's DataLoader needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from megatron_d3.config import RunConfig, parse_config
from megatron_d3.errors import ConfigError, ResumeError
from megatron_d3.plan.audit import audit
from megatron_d3.plan.batch_schedule import BatchSchedule
from megatron_d3.plan.draft import WindowRule
from megatron_d3.plan.header import PlanFile, RunHeader, differences
from megatron_d3.plan.keeper import PlanKeeper
from megatron_d3.planning import plan_header, window_rule
from megatron_d3.types import DomainInfo
from tests.plan_helpers import Trainer, files_of, header, make_decider


def asking(steps: int | None, *, is_fixed: bool = False, **changes: object) -> RunHeader:
    """A run whose DataLoader needs `steps`, or whose configuration fixes them."""
    config = {"mix": {"type": "online"}, "round_steps": 1, "sampling": "apportion",
              "read_ahead_steps": steps if is_fixed else None}
    return header(total=40, config=config, read_ahead_steps=steps, **changes)


def test_a_plan_without_losses_says_nothing_of_it() -> None:
    plan = PlanFile.begin(header(), iteration=0, position=0)
    assert "read_ahead_steps" not in plan.to_text().replace('"config"', "")
    assert PlanFile.from_text(plan.to_text(), where="x") == plan


def test_the_read_ahead_is_written_and_read_back() -> None:
    plan = PlanFile.begin(asking(3), iteration=0, position=0)
    assert PlanFile.from_text(plan.to_text(), where="x") == plan
    assert plan.generations[0].header.read_ahead_steps == 3


@pytest.mark.parametrize(("old", "new", "expected"), [
    (asking(2), asking(0), 2),  # fewer workers: as before
    (asking(2), asking(2), 2),
    (asking(2), asking(5), 5),  # more than the plan has: a difference
    (asking(2), asking(1, is_fixed=True), 1),
    (asking(None), asking(4), 4),
    (asking(2), asking(None), None),
])
def test_a_life_follows_the_plan_where_it_can(
    old: RunHeader, new: RunHeader, expected: int | None
) -> None:
    follows = new.following(old)
    assert follows.read_ahead_steps == expected
    is_different = None not in (expected, old.read_ahead_steps) and expected != old.read_ahead_steps
    found = [d for d in differences(old, follows) if d.field == "read_ahead_steps"]
    assert len(found) == is_different


def test_a_life_with_fewer_workers_continues_the_same_plan(tmp_path: Path) -> None:
    Trainer(tmp_path / "whole", asking(2)).run()
    Trainer(tmp_path / "d3", asking(2)).run(stop_at=4)
    Trainer(tmp_path / "d3", asking(0)).run(4, 16)
    assert files_of(tmp_path / "d3") == files_of(tmp_path / "whole")
    with PlanKeeperOf(tmp_path / "d3", asking(1), 10) as keeper:
        assert keeper.read_ahead_steps == 2


class PlanKeeperOf:
    def __init__(self, directory: Path, head: RunHeader, iteration: int) -> None:
        self.keeper = PlanKeeper.open(
            directory, head, make_decider, iteration=iteration, consumed=4 * iteration)

    def __enter__(self) -> PlanKeeper:
        return self.keeper

    def __exit__(self, *error: object) -> None:
        self.keeper.close()


def test_a_life_that_needs_more_is_refused_by_value_or_forks(tmp_path: Path) -> None:
    Trainer(tmp_path / "d3", asking(1)).run(stop_at=4)
    message = r"made with read_ahead_steps 1, now 3; .* use fewer --num-workers.*--d3-resume fork"
    with pytest.raises(ResumeError, match=message):
        Trainer(tmp_path / "d3", asking(3)).run(4, 16)
    with pytest.raises(ResumeError, match=r"made with read_ahead_steps 1, now 0; .* at the old val"):
        Trainer(tmp_path / "d3", asking(0, is_fixed=True)).run(4, 16)
    Trainer(tmp_path / "d3", asking(3)).run(4, 16, mode="fork")
    assert audit(tmp_path / "d3", make_decider).is_sound
    Trainer(tmp_path / "d3", asking(3)).run(10, 40)  # and goes on from there


# ---------------------------------------------------------------- what a run asks for


@dataclass(frozen=True)
class Corpus:
    name: str
    fingerprint: str = "x"

    @property
    def info(self) -> DomainInfo:
        return DomainInfo(self.name, 10, 320)


def asked(config: RunConfig, num_prefetched: int, schedule: BatchSchedule) -> int | None:
    made = plan_header(
        config, [Corpus("web"), Corpus("code")], seq_length=32, seed=1,  # type: ignore[list-item]
        tokenizer="t", total_samples=80, batch_schedule=schedule, num_prefetched=num_prefetched)
    return made.read_ahead_steps


def config(**changes: object) -> RunConfig:
    return parse_config({"domains": {"web": "a", "code": "b"}, **changes}, folder=Path("/"))


@pytest.mark.parametrize(("num_prefetched", "steps", "expected"), [
    (0, ((0, 8),), 0), (1, ((0, 8),), 1), (8, ((0, 8),), 1), (9, ((0, 8),), 2),
    (16, ((0, 4), (8, 16)), 4),  # of the smallest batch: it must suffice everywhere
])
def test_the_read_ahead_covers_the_data_loader(
    num_prefetched: int, steps: tuple[tuple[int, int], ...], expected: int
) -> None:
    schedule = BatchSchedule(steps)
    assert asked(config(mix={"type": "odm"}), num_prefetched, schedule) == expected
    for consumed in range(0, 40, 4):
        got = schedule.stop_after(consumed, 1 + expected)
        assert got >= schedule.stop_after(consumed, 1) + num_prefetched


def test_offline_mixers_have_none() -> None:
    schedule = BatchSchedule.constant(8)
    assert asked(config(mix={"type": "natural"}), 64, schedule) is None
    assert asked(config(mix={"type": "natural"}, read_ahead_steps=1), 64, schedule) is None


def test_an_order_asks_for_a_read_ahead_whatever_the_mixer() -> None:
    """The weights of the model decide: from when on must not depend on this life's workers."""
    ordered = config(mix={"type": "natural"}, order={"type": "d3", "window": 5})
    assert asked(ordered, 9, BatchSchedule.constant(8)) == 2
    assert asked(ordered, 0, BatchSchedule.constant(8)) == 0


@pytest.mark.parametrize(("window", "steps", "expected"), [
    (10, ((0, 8),), None), (11, ((0, 8),), (88, 10)), (60, ((0, 8),), (480, 10)),
    (12, ((0, 4), (40, 16)), None), (13, ((0, 4), (40, 16)), (88, 12)), (2, ((0, 100),), (200, 0)),
])
def test_a_run_shorter_than_a_window_is_refused(
    window: int, steps: tuple[tuple[int, int], ...], expected: tuple[int, int] | None
) -> None:
    ordered = config(order={"type": "d3", "window": window})  # of a run of 80 samples
    if expected is None:
        asked(ordered, 0, BatchSchedule(steps))
        return
    message = (rf"d3.order.window: got {window} global batches, which are {expected[0]} samples, but "
               rf"the run has 80; expected at most {expected[1]}, or a longer run")
    with pytest.raises(ConfigError, match=message):
        asked(ordered, 0, BatchSchedule(steps))


def test_a_header_names_the_versions_of_the_order() -> None:
    def versions(**changes: object) -> set[str]:
        made = plan_header(
            config(**changes), [Corpus("web"), Corpus("code")],  # type: ignore[list-item]
            seq_length=32, seed=1, tokenizer="t", total_samples=80,
            batch_schedule=BatchSchedule.constant(8))
        return set(made.versions)

    assert versions() == {"static", "apportion", "shuffle"}
    assert versions(order={"type": "d3", "window": 5}) == {
        "static", "apportion", "shuffle", "windows", "estimators", "objectives",
        "probe_choice", "solvers"}


def test_the_decider_has_the_windows_of_the_configuration() -> None:
    assert window_rule(config()) is None
    assert window_rule(config(order={"type": "d3", "window": 5, "overlap": True})) == WindowRule(
        5, overlap=True)


def test_a_configured_read_ahead_must_cover_the_data_loader() -> None:
    schedule, online = BatchSchedule.constant(8), config(mix={"type": "odm"}, read_ahead_steps=3)
    assert asked(online, 24, schedule) == 3
    with pytest.raises(ConfigError, match=r"d3.read_ahead_steps: got 3, expected at least 4: the "
                                          r"DataLoader fetches 25 samples ahead"):
        asked(online, 25, schedule)
    with pytest.raises(ConfigError, match=r"d3.read_ahead_steps: got -1, expected an integer in"):
        config(read_ahead_steps=-1)


def test_headers_compare_equal_whatever_an_offline_run_prefetches() -> None:
    one = header(mix="0.5,0.3,0.2")
    assert differences(one, replace(one).following(one)) == []
