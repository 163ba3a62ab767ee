"""At any size: ranks share each global batch exactly, over resumes and windows; domains have a limit."""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_d3.config import parse_config
from megatron_d3.errors import ConfigError, PlanError
from megatron_d3.plan.apportion import MAX_DOMAINS, apportion
from megatron_d3.plan.dealing import indices_of_rank
from megatron_d3.plan.header import RunHeader
from megatron_d3.plan.keeper import PlanFollower
from megatron_d3.plan.segment import RECORD, Segment
from tests.plan_helpers import header, losses_of, make_decider, random_order

NUM_STEPS = 7


@dataclass(frozen=True)
class Layout:
    """Ranks of one life of a run, and how far its DataLoaders read ahead."""

    dp_size: int
    micro_batch_size: int
    num_workers: int = 0

    @property
    def read_ahead(self) -> int:
        return 2 * self.num_workers * self.micro_batch_size * self.dp_size

    def deal(self, size: int) -> list[np.ndarray]:
        """What each rank trains on, (M, B)."""
        return [indices_of_rank(size, self.micro_batch_size, dp_size=self.dp_size, dp_rank=rank)
                for rank in range(self.dp_size)]


layouts = st.builds(Layout, dp_size=st.integers(1, 12), micro_batch_size=st.integers(1, 3),
                    num_workers=st.integers(0, 2))


def test_ranks_are_dealt_micro_batches_in_turns() -> None:
    dealt = Layout(dp_size=3, micro_batch_size=2).deal(12)
    assert [rank.tolist() for rank in dealt] == [
        [[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10, 11]]]


def run(head: RunHeader, lives: list[tuple[Layout, int]]) -> tuple[list[np.ndarray], int]:
    """Train lives of so many steps each; every life's ranks begin with what the one before left.

    Returns what the ranks trained on in each step, in the order of ranks, and the plan's hash.
    """
    trained: list[np.ndarray] = []
    size = head.batch_schedule.size_at(0)
    plan = PlanFollower(decider := make_decider(head, (0, 1, 2)), decider.init())
    records = np.zeros(0, RECORD)  # all positions decided so far
    for layout, num_steps in lives:
        plan = PlanFollower.from_arrays(head, make_decider, plan.state_arrays())
        for _ in range(num_steps):
            step = len(trained)
            new: list[Segment] = plan.advance((step + 1) * size + layout.read_ahead, random_order)
            records = np.concatenate([records, *(segment.records for segment in new)])
            batch = records[step * size:(step + 1) * size]
            trained.append(np.concatenate([batch[own].ravel() for own in layout.deal(size)]))
            plan.observe(losses_of(step, batch, range(3)))
    return trained, plan.chain


@settings(max_examples=60, deadline=None)
@given(first=layouts, second=layouts, accumulation=st.integers(1, 3),
       resume_at=st.integers(0, NUM_STEPS), window=st.sampled_from([None, 3, 4]),
       overlap=st.booleans())
def test_ranks_partition_every_batch_of_one_plan_across_resumes(
    first: Layout, second: Layout, accumulation: int, resume_at: int, window: int | None,
    overlap: bool,
) -> None:
    size = accumulation * int(np.lcm(first.dp_size * first.micro_batch_size,
                                     second.dp_size * second.micro_batch_size))
    total = size * (NUM_STEPS + 8)  # more than read-ahead and windows ask for
    head = header(sizes=(total, total, total), total=total, batch=size, mix="0.5,0.3,0.2")
    if window is not None:
        head.config["order"] = {"length": window, "overlap": overlap}
    trained, chain = run(head, [(first, resume_at), (second, NUM_STEPS - resume_at)])
    alone, _ = run(head, [(Layout(1, 1), NUM_STEPS)])

    # Each step: the ranks together have the batch of a run on one rank, each sample once.
    for ours, theirs in zip(trained, alone, strict=True):
        np.testing.assert_array_equal(np.sort(ours), np.sort(theirs))
    everything = np.concatenate(trained)
    assert len(np.unique(everything)) == len(everything) == NUM_STEPS * size
    # All lives continue one plan: as far as it was decided, its hash is that of one life.
    again = PlanFollower(decider := make_decider(head, (0, 1, 2)), decider.init())
    while again.chain != chain:
        assert again.advance(again.state.position + 1, random_order), "the lives came apart"


@cache
def stock_sampler() -> Any:
    """Megatron's sampler, from its source: importing `megatron.training` takes 10 s."""
    spec = importlib.util.find_spec("megatron")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    found = [path for folder in folders for path in Path(folder).rglob("data_samplers.py")]
    if not found:
        pytest.skip("Megatron is not installed")
    (definition,) = [node for node in ast.parse(found[0].read_text()).body
                     if isinstance(node, ast.ClassDef) and node.name == "MegatronPretrainingSampler"]
    names: dict[str, Any] = {}
    exec(compile(ast.Module([definition], []), str(found[0]), "exec"), names)  # noqa: S102
    return names["MegatronPretrainingSampler"]


@settings(max_examples=40, deadline=None)
@given(layout=layouts, accumulation=st.integers(1, 3), steps_done=st.integers(0, 3))
def test_the_rule_is_that_of_megatrons_sampler(
    layout: Layout, accumulation: int, steps_done: int
) -> None:
    sampler = stock_sampler()
    size = accumulation * layout.dp_size * layout.micro_batch_size
    consumed = steps_done * size
    for rank, own in enumerate(layout.deal(size)):
        micro_batches = list(sampler(
            total_samples=consumed + 2 * size, consumed_samples=consumed,
            micro_batch_size=layout.micro_batch_size, data_parallel_rank=rank,
            data_parallel_size=layout.dp_size))
        assert micro_batches == [*(consumed + own).tolist(), *(consumed + size + own).tolist()]


def test_more_domains_than_an_int16_counts_are_refused_by_name() -> None:
    assert MAX_DOMAINS == np.iinfo(RECORD["domain"]).max == 32_767
    settings_ = {"domains": {f"d{i}": f"corpus/{i}" for i in range(MAX_DOMAINS + 1)},
                 "mix": {"type": "static"}}
    with pytest.raises(ConfigError, match=r"domains: got 32768 domains, expected at most 32767"):
        parse_config(settings_, folder=Path("/"))
    uniform = np.full(MAX_DOMAINS + 1, 1 / (MAX_DOMAINS + 1))
    with pytest.raises(PlanError, match=r"weights of shape \(32768,\), expected \(K,\) with 1 to 32767"):
        apportion(uniform, 1, np.zeros(len(uniform)))


def test_as_many_domains_as_an_int16_counts_can_be_drawn_from() -> None:
    uniform = np.full(MAX_DOMAINS, 1 / MAX_DOMAINS)
    domains, _ = apportion(uniform, 4, np.zeros(MAX_DOMAINS))
    assert domains.dtype == np.int16
    assert len(set(domains.tolist())) == 4 and min(domains) >= 0
