"""Random lives of a plan: killed, resumed from any checkpoint, forked, taken back.

Whatever happened, the files are those of a run that did only what is left of its history.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_d3.plan.audit import audit
from megatron_d3.plan.batch_schedule import BatchSchedule
from megatron_d3.plan.header import RunHeader
from tests.plan_helpers import Trainer, domains, files_of, header, make_decider, random_order

ONLINE = header(total=400)
FIXED = header(total=400, mix="0.5,0.3,0.2")
CAPPED = replace(FIXED, config={**FIXED.config, "mix": {
    "type": "0.5,0.3,0.2", "max_samples": [9, 4, 400]}})
VARIANTS = (
    ONLINE, FIXED, CAPPED,
    replace(ONLINE, batch_schedule=BatchSchedule(((0, 3), (20, 5)))),
    replace(ONLINE, domains=domains(100, 50, 20, 9)[1:]),
    replace(ONLINE, config={**ONLINE.config, "round_steps": 3}),
    replace(FIXED, config={**FIXED.config, "sampling": "multinomial"}),
    replace(ONLINE, config={**ONLINE.config, "order": {"length": 4}}),
    replace(ONLINE, config={**ONLINE.config, "order": {"length": 5, "overlap": True}},
            batch_schedule=BatchSchedule(((0, 3), (20, 5)))),
    replace(CAPPED, config={**CAPPED.config, "order": {"length": 3}}),
)


@dataclass
class Stretch:
    """Steps [start, stop) of a history, trained with one header."""

    start: int
    stop: int
    head: RunHeader


def consumed_at(history: list[Stretch], iteration: int) -> int:
    consumed = 0
    for stretch in history:
        for _ in range(stretch.start, min(stretch.stop, iteration)):
            consumed += stretch.head.batch_schedule.size_at(consumed)
    return consumed


def train(directory: Path, history: list[Stretch], stretch: Stretch) -> None:
    Trainer(directory, stretch.head, read_ahead=7, orderer=random_order).run(
        stretch.start, consumed_at(history, stretch.start), stop_at=stretch.stop, mode="fork",
        snapshot_every=2)


@given(st.lists(st.tuples(st.sampled_from(range(len(VARIANTS))), st.integers(0, 8),
                          st.integers(0, 6)), min_size=1, max_size=6))
@settings(max_examples=40, deadline=None)
def test_only_what_is_left_of_the_history_counts(lives: list[tuple[int, int, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "d3"
        history: list[Stretch] = []
        for variant, steps_back, num_steps in lives:
            reached = history[-1].stop if history else 0
            start = max(0, reached - steps_back)
            stretch = Stretch(start, start + num_steps, VARIANTS[variant])
            train(directory, history, stretch)
            history = [Stretch(s.start, min(s.stop, start), s.head)
                       for s in history if s.start <= start and start > 0]
            history.append(stretch)
        for i, stretch in enumerate(history):
            train(Path(folder) / "clean", history[:i], stretch)
        assert files_of(directory) == files_of(Path(folder) / "clean")
        result = audit(directory, make_decider)
        assert result.is_sound, result.findings
