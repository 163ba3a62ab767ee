"""A planned run holds a lease, and its checkpoints are never newer than its plan."""

from __future__ import annotations

import functools
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_d3.mcore.collective import why_it_failed
from megatron_d3.plan.lease import Lease
from megatron_d3.plan.life import Life
from tests.mcore.launcher import Launcher
from tests.mcore.plans import flags, write_config

pytestmark = pytest.mark.mcore


def note_syncs_and_saves() -> None:
    """Let a rank note in $D3_TEST_ORDER when the plan is synced and when a checkpoint is written."""
    from megatron.training import training

    from megatron_d3.plan.store import PlanStore

    def noted(stock, word):  # type: ignore[no-untyped-def]
        @functools.wraps(stock)  # the product checks signatures
        def call(*args, **kwargs):  # type: ignore[no-untyped-def]
            with Path(os.environ["D3_TEST_ORDER"]).open("a") as file:
                file.write(f"{word}\n")
            return stock(*args, **kwargs)
        return call

    PlanStore.sync = noted(PlanStore.sync, "sync")  # type: ignore[method-assign]
    training.save_checkpoint = noted(training.save_checkpoint, "save")


def test_the_plan_is_on_disk_before_any_checkpoint(
    launcher: Launcher, corpora: Path, tmp_path: Path
) -> None:
    config = write_config(corpora / "lease.yaml")
    order = tmp_path / "order"
    run = launcher.run(
        tmp_path / "run", [*flags(config, tmp_path, steps=5, save_interval=2), "--exit-interval", "3"],
        setup="tests.mcore.test_lease_run:note_syncs_and_saves",
        environment={"D3_TEST_ORDER": str(order)})
    run.require_success()
    words = order.read_text().split()
    assert words.count("save") == 2  # after step 2, and where --exit-interval ends the run
    assert all(words[i - 1] == "sync" for i, word in enumerate(words) if word == "save")
    (life,) = (tmp_path / "d3.lives").iterdir()
    assert json.loads(life.read_text())["state"] == "ended"


def test_a_second_writer_is_refused_before_it_loads_anything(
    launcher: Launcher, corpora: Path, tmp_path: Path
) -> None:
    config = write_config(corpora / "lease2.yaml")
    here = Life.here({"SLURM_JOB_ID": "77"})
    lease = Lease.claim(
        tmp_path / "d3", replace(here, host="node9", machine="elsewhere", seconds=1.5))
    lease.watch(pytest.fail)
    run = launcher.run(tmp_path / "run", flags(config, tmp_path, steps=2), world_size=2)
    lease.release()
    assert run.codes[0] == 1 and run.codes[1] != 0
    assert "did not say that it stopped; looking whether it is alive" in run.output
    refusal = next(line for line in run.output.splitlines() if "rank 0: PlanError: " in line)
    assert "job 77 (start 1) on node9, process" in refusal
    assert "could not find the metadata file" not in run.output  # no checkpoint was looked for
    assert not (tmp_path / "d3").exists()
    launcher.run(tmp_path / "again", flags(config, tmp_path, steps=2)).require_success()


@pytest.mark.parametrize(("text", "expected"), [
    ("[../gloo/unbound_buffer.cc:81] Timed out waiting 20000ms for recv operation to complete",
     "a collective did not end within 20 s, the time-out of --distributed-timeout-seconds-after"),
    ("Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE, Timeout(ms)=1500)",
     "a collective did not end within 1.5 s"),
    ("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.99.0.2]:30021",
     "another rank is gone in the middle of a collective"),
    ("Read error [10.0.0.1]:3: Connection reset by peer", "another rank is gone"),
])  # fmt: skip
def test_a_failed_collective_is_explained(text: str, expected: str) -> None:
    assert (why_it_failed(RuntimeError(text)) or "").startswith(expected)


def test_other_errors_are_left_alone() -> None:
    assert why_it_failed(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
