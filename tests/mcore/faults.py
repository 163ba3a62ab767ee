"""Faults that a test injects into a rank before it starts (`setup=` of the launcher)."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any


def kill_after_ledger() -> None:
    """Die between the ledger row of step D3_TEST_KILL_AT and its checkpoint."""
    from megatron_d3.mcore.planned_run import PlannedRun

    stock = PlannedRun.after_step

    def after_step(self: Any, iteration: int, *, is_skipped: bool) -> None:
        stock(self, iteration, is_skipped=is_skipped)
        if iteration + 1 == int(os.environ["D3_TEST_KILL_AT"]):
            os.kill(os.getpid(), signal.SIGKILL)

    PlannedRun.after_step = after_step  # type: ignore[method-assign]


def disagree_on_rank_1() -> None:
    """Let rank 1 decide another order than the rest from step 3 on."""
    from megatron_d3.mcore.planned_run import PlannedRun

    stock = PlannedRun.before_step

    def before_step(self: Any, iteration: int) -> bool:
        if iteration == 2 and os.environ["RANK"] == "1":
            self.plan.state.cursors[0] += 1
        return stock(self, iteration)

    PlannedRun.before_step = before_step  # type: ignore[method-assign]


def record_wandb() -> None:
    """Put a W&B writer in place that notes what it is given."""
    from megatron.training import global_vars

    class Writer:
        config: Any = type("Config", (), {"update": staticmethod(lambda *a, **k: None)})

        def log(self, values: dict[str, Any], iteration: int | None = None) -> None:
            with Path(os.environ["D3_TEST_WANDB"]).open("a") as file:
                names = [name for name in values if name.startswith("d3/")]
                file.write(json.dumps({"iteration": iteration, "names": names}) + "\n")

        def finish(self) -> None:
            pass

    def set_writer(args: Any) -> None:
        global_vars._GLOBAL_WANDB_WRITER = Writer()

    global_vars._set_wandb_writer = set_writer


def record_state() -> None:
    """Write a hash of the plan's and the mixer's state after each step."""
    from megatron_d3.mcore.planned_run import PlannedRun
    from tests.mcore import recorder

    folder = recorder.folder
    assert folder is not None
    stock = PlannedRun.after_step

    def after_step(self: Any, iteration: int, *, is_skipped: bool) -> None:
        stock(self, iteration, is_skipped=is_skipped)
        digest = hashlib.blake2b(digest_size=8)
        for name, array in self.plan.state_arrays().items():
            digest.update(name.encode() + array.tobytes())
        with (folder / f"rank{os.environ['RANK']}.states").open("a") as file:
            file.write(digest.hexdigest() + "\n")

    PlannedRun.after_step = after_step  # type: ignore[method-assign]


def another_mixer_on_rank_1() -> None:
    """Let the mixer of rank 1 learn another loss than that of the rest in step 3."""
    from megatron_d3.mcore.planned_run import PlannedRun

    stock = PlannedRun.after_step

    def after_step(self: Any, iteration: int, *, is_skipped: bool) -> None:
        stock(self, iteration, is_skipped=is_skipped)
        if iteration == 2 and os.environ["RANK"] == "1":
            self.plan.state.mixer["rewards"][0] *= 1.01

    PlannedRun.after_step = after_step  # type: ignore[method-assign]


def replay_orders() -> None:
    """Take each window's order from the plan in D3_TEST_ORDERS; probe nothing."""
    import numpy as np

    from megatron_d3.mcore.window import Finding, WindowOrderer
    from megatron_d3.plan.draft import Draft
    from megatron_d3.plan.reader import PlanReader
    from megatron_d3.plan.windows import WindowRow

    units = [row.unit for row, _ in PlanReader(Path(os.environ["D3_TEST_ORDERS"])).rounds()]

    def find(self: Any, draft: Draft, table_ids: Any) -> Finding:
        order = np.array(units[draft.round:draft.round + draft.num_units])
        row = WindowRow(draft.round, draft.iteration, draft.step, len(order), seconds={"total": 0})
        return Finding(order, row, {})

    WindowOrderer.find = find  # type: ignore[method-assign,assignment]


def kill_between_probe_and_segment() -> None:
    """Die once the window of step D3_TEST_KILL_AT was measured and solved, before it is written."""
    from megatron_d3.mcore.window import WindowOrderer

    stock = WindowOrderer.find

    def find(self: Any, draft: Any, table_ids: Any) -> Any:
        finding = stock(self, draft, table_ids)
        if draft.step == int(os.environ["D3_TEST_KILL_AT"]):
            os.kill(os.getpid(), signal.SIGKILL)
        return finding

    WindowOrderer.find = find  # type: ignore[method-assign]


def note_probed_sequences() -> None:
    """Write the hashes of each window's probe sequences, (L, n), to a line of probed.jsonl."""
    from hashlib import blake2b

    from megatron_d3.mcore.probe import Probe
    from tests.mcore import recorder

    stock = Probe.measuring

    def measuring(self: Any, samples: Any) -> Any:
        hashes = [[blake2b(fields["tokens"].numpy().tobytes() + fields["labels"].numpy().tobytes(),
                           digest_size=8).hexdigest()
                   for fields in (samples.read(unit, s) for s in range(samples.num_sequences))]
                  for unit in range(samples.num_units)]
        assert recorder.folder is not None
        with (recorder.folder / "probed.jsonl").open("a") as file:
            file.write(json.dumps(hashes) + "\n")
        return stock(self, samples)

    Probe.measuring = measuring  # type: ignore[method-assign]


def poison_a_unit() -> None:
    """Give unit 2 of the window at step 4 (position 32) a gradient that is not a number."""
    from megatron.training import get_args

    from megatron_d3.mcore.probe import Probe

    stock = Probe.run

    def run(self: Any, samples: Any, unit: int, *args: Any, **kwargs: Any) -> Any:
        total, num_tokens = stock(self, samples, unit, *args, **kwargs)
        if unit == 2 and get_args().consumed_train_samples == 32:
            self.parameters[0].main_grad.view(-1)[0] = float("nan")
        return total, num_tokens

    Probe.run = run  # type: ignore[method-assign]
