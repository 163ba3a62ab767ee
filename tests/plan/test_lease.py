"""Who may write a plan: one life at a time, the newest, however the others ended."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_d3.errors import ConfigError, PlanError
from megatron_d3.plan import lease as module
from megatron_d3.plan.lease import Lease, lives_of, watch
from megatron_d3.plan.life import SECONDS, Life

HERE = Life.here({"SLURM_JOB_ID": "7", "MEGATRON_D3_LEASE_SECONDS": "60"})
FAR = replace(HERE, host="node9", machine="another", pid=12, seconds=0.6)


def states(directory: Path) -> list[tuple[str, str, str]]:
    contents = [json.loads(p.read_text()) for p in sorted(lives_of(directory).glob("*.json"))]
    return [(c["job"], c["host"], c["state"]) for c in contents]


def test_a_life_is_described_by_slurm_and_torchrun() -> None:
    found = Life.here({"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "3",
                       "TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_RUN_ID": "x"})
    assert (found.job, found.restart, found.seconds) == ("12", (3, 1), SECONDS)
    assert (found.host, found.pid) == (socket.gethostname(), os.getpid())
    assert str(found) == f"job 12 (start 5) on {found.host}, process {found.pid}"
    assert Life.here({"TORCHELASTIC_RUN_ID": "x"}).job == "x"
    # Two launches with torchrun's default id are not the same job.
    assert Life.here({"TORCHELASTIC_RUN_ID": "none"}).job == f"{found.host}-{os.getppid()}"


@pytest.mark.parametrize("text", ["soon", "0", "-1", "inf", "nan", ""])
def test_the_length_of_a_lease_must_be_a_time(text: str) -> None:
    with pytest.raises(ConfigError, match=r"MEGATRON_D3_LEASE_SECONDS: got '.*', expected seconds"):
        Life.here({"MEGATRON_D3_LEASE_SECONDS": text})


def test_lives_follow_each_other(tmp_path: Path) -> None:
    first = Lease.claim(tmp_path / "d3", HERE)
    first.require()
    first.release()
    second = Lease.claim(tmp_path / "d3", replace(FAR, job="8"))
    assert (first.number, second.number) == (1, 2)
    assert states(tmp_path / "d3") == [("7", HERE.host, "ended"), ("8", "node9", "running")]


@pytest.mark.parametrize("owner", [replace(FAR, job="8"), FAR])
def test_a_second_job_is_refused_while_the_first_is_alive(tmp_path: Path, owner: Life) -> None:
    lease = Lease.claim(tmp_path, owner)
    lease.watch(pytest.fail)
    said: list[str] = []
    with pytest.raises(PlanError, match=r"job \d \(start 1\) on node9, process 12 writes this plan, "
                                        "and is alive; wait for that run to end or stop it"):
        Lease.claim(tmp_path, HERE, say=said.append, poll_seconds=0.02)
    assert len(said) == 1 and "looking whether it is alive" in said[0]
    assert len(states(tmp_path)) == 1
    lease.release()


def test_a_dead_process_of_this_machine_is_recognised_at_once(tmp_path: Path) -> None:
    def die() -> None:
        Lease.claim(tmp_path, Life.here({"SLURM_JOB_ID": "8", "MEGATRON_D3_LEASE_SECONDS": "900"}))
        os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=die)
    process.start()
    deadline = time.monotonic() + 30
    while not (lives_of(tmp_path) / "0001.json").exists() or process.exitcode is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert Lease.claim(tmp_path, HERE).number == 2
    process.join()


def test_a_silent_life_elsewhere_is_waited_for(tmp_path: Path) -> None:
    Lease.claim(tmp_path, replace(FAR, job="8"))
    start = time.monotonic()
    assert Lease.claim(tmp_path, HERE, poll_seconds=0.02).number == 2
    assert time.monotonic() - start > 0.8  # 1.5 leases less what passed before


def test_the_next_start_of_a_job_takes_over_and_the_old_life_stops(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    old = Lease.claim(tmp_path, replace(FAR, seconds=1.0))
    lost: list[str] = []
    is_lost = threading.Event()
    old.watch(lambda reason: (lost.append(reason), is_lost.set())[0])
    new = Lease.claim(tmp_path, replace(HERE, restart=(1, 0)), poll_seconds=0.02)
    assert is_lost.wait(5)
    assert "job 7 (start 2)" in lost[0] and "has taken over this plan; this life" in lost[0]
    with pytest.raises(PlanError, match="has taken over this plan; this life, job 7 .* stops"):
        old.renew()
    new.require()
    assert [state for *_, state in states(tmp_path)] == ["superseded", "running"]
    assert not (tmp_path / "lock").exists()  # whose holder sits on a node that is not reached


def test_an_old_life_that_slept_does_not_write(tmp_path: Path) -> None:
    old = Lease.claim(tmp_path, FAR)
    new = Lease.claim(tmp_path, replace(HERE, restart=(0, 1)), poll_seconds=0.02)
    with pytest.raises(PlanError, match="has taken over"):
        old.require()
    assert new.number == 2


def test_a_late_renewal_takes_the_next_number_if_it_is_free(tmp_path: Path) -> None:
    life = replace(FAR, seconds=0.05)
    lease = Lease.claim(tmp_path, life)
    time.sleep(0.06)
    lease.require()
    assert lease.number == 2
    time.sleep(0.06)
    assert module._create(tmp_path, 3, HERE)
    with pytest.raises(PlanError, match="has taken over"):
        lease.require()


def test_only_one_of_many_gets_a_number(tmp_path: Path) -> None:
    (lives_of(tmp_path)).mkdir()
    lives = [replace(HERE, pid=pid) for pid in range(8)]
    found: list[bool] = []
    threads = [threading.Thread(target=lambda life=life: found.append(
        module._create(tmp_path, 1, life))) for life in lives]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found.count(True) == 1
    assert [path.name for path in (lives_of(tmp_path)).iterdir()] == ["0001.json"]


def test_ranks_of_other_nodes_see_that_their_life_is_over(tmp_path: Path) -> None:
    lost: list[str] = []
    is_lost = threading.Event()
    owner = Lease.claim(tmp_path, replace(FAR, seconds=0.3))
    watch(tmp_path, owner.life, lambda reason: (lost.append(reason), is_lost.set())[0])
    watch(tmp_path / "not here", owner.life, pytest.fail)
    assert not is_lost.wait(0.2)
    Lease.claim(tmp_path, replace(HERE, restart=(1, 0)), poll_seconds=0.02)
    assert is_lost.wait(5)
    assert lost[0].endswith(f"what {owner.life} runs on {socket.gethostname()} stops")


def test_nobody_is_stopped_after_a_good_end(tmp_path: Path) -> None:
    owner = Lease.claim(tmp_path, replace(FAR, seconds=0.06))
    owner.watch(pytest.fail)
    watch(tmp_path, owner.life, pytest.fail)
    owner.release()
    Lease.claim(tmp_path, HERE)
    deadline = time.monotonic() + 10
    while any(thread.name == "d3-lease" for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "a thread still looks"
        time.sleep(0.01)
    owner.release()
    assert [state for *_, state in states(tmp_path)] == ["ended", "running"]


@pytest.fixture
def without_links(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def link(source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    yield


@pytest.mark.usefixtures("without_links")
def test_a_file_system_without_links_will_do(tmp_path: Path) -> None:
    first = Lease.claim(tmp_path, HERE)
    assert not module._create(tmp_path, 1, FAR)
    first.release()
    assert Lease.claim(tmp_path, FAR).number == 2


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (lives_of(tmp_path)).mkdir()
    (lives_of(tmp_path) / "0001.json").write_text("{")
    with pytest.raises(PlanError, match=r"0001.json: does not say who writes this plan"):
        Lease.claim(tmp_path, HERE)


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "d3.lives").write_text("a file")
    with pytest.raises(PlanError, match="d3: cannot claim the plan"):
        Lease.claim(tmp_path / "d3", HERE)
