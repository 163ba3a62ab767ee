"""`sbatch slurm/pretrain_d3.sh` with Megatron on two and more nodes, and every accident on the way.

A tiny model on the CPU. Tests open a gate (`Job.gate`) step by step, so that an accident happens
between two known steps, however busy the machine is.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from tests.mcore.plans import make_corpora, write_config
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import BATCH_SIZE, Job

pytestmark = [pytest.mark.slurm, pytest.mark.mcore]

NUM_STEPS = 12
OPEN = 10**6
SCHEDULE = {"type": "schedule", "interpolation": "cosine", "max_epochs": {"wiki": 0.6},
            "knots": [[0, {"web": 0.8, "code": 0.1, "wiki": 0.1}],
                      [NUM_STEPS - 1, {"web": 0.1, "code": 0.4, "wiki": 0.5}]]}
DECISIONS = ("plan.json", "positions.bin", "rounds.jsonl")
"""What must not depend on the layout; the ledger's losses may, in their last digits."""


@pytest.fixture(scope="module")
def config(shared: Path) -> Path:
    """Four domains and a mixture of three that changes at every step."""
    folder = shared / "corpora"
    folder.mkdir()
    make_corpora(folder)
    return write_config(folder / "run.yaml", mix=SCHEDULE)


def decisions(plan: Path) -> dict[str, bytes]:
    return {name: (plan / name).read_bytes() for name in DECISIONS}


@pytest.fixture(scope="module")
def alone(cluster: Cluster, shared: Path, config: Path) -> dict[str, bytes]:
    """The plan of a run of one rank on one node."""
    job = Job.prepare(cluster, shared / "alone").with_megatron(config, num_steps=NUM_STEPS)
    job.with_environment(NPROC="1").submit("--nodes=1", "--gpus-per-node=0")
    assert job.wait(300) == "COMPLETED", job.output
    assert job.trained(0) == {
        step: list(range(BATCH_SIZE * (step - 1), BATCH_SIZE * step))
        for step in range(1, NUM_STEPS + 1)}
    return decisions(job.run / "d3")


def prepare(cluster: Cluster, folder: Path, config: Path, **environment: str) -> Job:
    job = Job.prepare(cluster, folder).with_megatron(config, num_steps=NUM_STEPS)
    return job.with_environment(**environment)


def require_exactly_the_plan(job: Job, alone: dict[str, bytes], lives: int) -> None:
    """The last word on each step is what a run without accidents trains on at that step."""
    trained: dict[int, list[int]] = {}
    for life in range(lives):
        trained |= job.trained(life)
    assert trained == {
        step: list(range(BATCH_SIZE * (step - 1), BATCH_SIZE * step))
        for step in range(1, NUM_STEPS + 1)}
    assert decisions(job.run / "d3") == alone
    assert (job.run / "DONE").exists()


# --- layouts, the time limit ------------------------------------------------------------------------


def test_a_signal_costs_no_sample_under_tensor_parallelism(
    cluster: Cluster, shared: Path, config: Path, alone: dict[str, bytes]
) -> None:
    """Torchrun itself, TP=2 x DP=2 on two nodes; the signal comes after two checkpoints."""
    job = Job.prepare(cluster, shared / "tp").with_megatron(
        config, num_steps=NUM_STEPS, is_forking=False)
    job.with_environment(SAVE_INTERVAL="2").gate(4)
    job.submit("--nodes=2", "--gpus-per-node=0", arguments=(
        "--tensor-model-parallel-size", "2", "--d3-plugin", "tests.slurm.gates"))
    cluster.wait_until(lambda: job.step() == 4, 240, f"a checkpoint: {job.output}")
    job.signal("USR1", "--batch")  # what the limit sends: tests/slurm/test_job_scripts.py
    job.wait_for_text("USR1: asking every rank for a checkpoint", 30)
    time.sleep(2)  # it is on its way to the ranks, which wait before step 5
    job.gate(OPEN)
    assert job.wait(300) == "COMPLETED", job.output
    assert job.facts()["Restarts"] == "1"
    assert job.output.count("srun rc 0") == 2
    assert re.search(r"life 0\] requeued: goes on from step ([5-9]|1\d)\n", job.output)
    # Nothing was put aside: the life ended with the checkpoint that the signal asked for.
    assert not list((job.run / "d3").glob("abandoned-*"))
    assert decisions(job.run / "d3") == alone


def test_a_pipeline_over_two_nodes_needs_no_shared_plan(
    cluster: Cluster, shared: Path, config: Path, alone: dict[str, bytes]
) -> None:
    """PP=2 x DP=2; the plan lies in the /tmp of the node that has rank 0, and nowhere else."""
    job = prepare(cluster, shared / "pp", config)
    job.submit("--nodes=2", "--gpus-per-node=0", arguments=(
        "--pipeline-model-parallel-size", "2", "--d3-plan-dir", "/tmp/plan"))
    assert job.wait(240) == "COMPLETED", job.output
    places = [node for node in range(1, cluster.num_nodes + 1)
              if "positions.bin" in cluster.run("ls", "/tmp/plan", node=node, check=False)]
    assert len(places) == 1
    cluster.run("cp", "-r", "/tmp/plan", str(shared / "pp-plan"), node=places[0])
    assert decisions(shared / "pp-plan") == alone


# --- accidents ------------------------------------------------------------------------------------


def test_ranks_launchers_and_nodes_die_and_the_run_goes_on(
    cluster: Cluster, shared: Path, config: Path, alone: dict[str, bytes]
) -> None:
    """Life 0 loses a rank, life 1 a launcher, life 2 a node's slurmd; life 3 ends the run."""
    job = prepare(cluster, shared / "deaths", config).gate(4).submit("--nodes=2", "--gpus-per-node=0")

    def reach(life: int, step: int) -> str:
        cluster.wait_until(lambda: max(job.trained(life), default=0) >= step, 240,
                           f"step {step} in life {life}: {job.output}")
        return cluster.job(job.id)["BatchHost"]

    def node_with_ranks(*, other_than: str = "") -> int:
        return next(node for node in range(1, cluster.num_nodes + 1)
                    if f"node{node}" != other_than and cluster.pids(node, "forking_torchrun"))

    def launcher_on(node: int) -> int:
        return min(cluster.pids(node, "bin/python.*forking_torchrun"))

    reach(0, 4)
    node = node_with_ranks()
    ranks = cluster.run("pgrep", "-P", str(launcher_on(node)), node=node).split()
    cluster.kill(node, int(ranks[-1]))
    job.gate(7)
    batch_host = reach(1, 7)
    node = node_with_ranks(other_than=batch_host)
    cluster.kill(node, launcher_on(node))
    job.gate(10)
    batch_host = reach(2, 10)
    lost = node_with_ranks(other_than=batch_host)
    cluster.kill_slurmd(lost)
    cluster.wait_until(lambda: job.facts()["Restarts"] == "3", 90, "Slurm gives the node up")
    job.gate(OPEN)
    try:
        assert job.wait(300) == "COMPLETED", job.output
    finally:
        cluster.start_slurmd(lost)
    assert max(job.trained(2)) == 10
    require_exactly_the_plan(job, alone, lives=4)


def test_a_cut_link_ends_in_an_error_that_names_the_timeout(
    cluster: Cluster, shared: Path, config: Path, alone: dict[str, bytes]
) -> None:
    job = prepare(cluster, shared / "link", config, NPROC="1", COLLECTIVE_SECONDS="8").gate(5)
    job.submit("--nodes=2", "--gpus-per-node=0")
    cluster.wait_until(lambda: 5 in job.trained(0), 240, f"step 5: {job.output}")
    facts = job.facts()
    nodes = cluster.run("scontrol", "show", "hostnames", facts["NodeList"]).split()
    lost = next(int(node.removeprefix("node")) for node in nodes if node != facts["BatchHost"])
    cluster.cut(lost)
    job.gate(OPEN)
    try:
        job.wait_for_text("a collective did not end within 8 s, the time-out of", 120)
        assert job.wait(240) == "COMPLETED", job.output
    finally:
        cluster.heal(lost)
    require_exactly_the_plan(job, alone, lives=2)


def test_the_old_life_behind_a_cut_link_stops_when_the_new_one_writes(
    cluster: Cluster, shared: Path, config: Path, alone: dict[str, bytes]
) -> None:
    """All ranks on one node: cut off, they go on training, and Slurm starts the job elsewhere."""
    job = prepare(cluster, shared / "brain", config, NPROC="1").gate(4)
    job.submit("--nodes=1", "--gpus-per-node=0")
    cluster.wait_until(lambda: 4 in job.trained(0), 240, f"step 4: {job.output}")
    old = int(job.facts()["NodeList"].removeprefix("node"))
    cluster.cut(old)
    try:
        cluster.wait_until(lambda: job.facts()["Restarts"] == "1", 60, "Slurm gives the node up")
        assert cluster.pids(old, "forking_torchrun"), "the old life should be alive"
        job.gate(5)  # it writes on
        cluster.wait_until(lambda: 5 in job.trained(0), 60, "the old life trains")
        job.wait_for_text("has taken over this plan; this life", 240)
        job.gate(OPEN)
        assert job.wait(240) == "COMPLETED", job.output
        assert max(job.trained(0)) == 5
        assert (job.run / "d3.lives" / "0001.json").read_text().count('"superseded"') == 1
    finally:
        cluster.heal(old)
    require_exactly_the_plan(job, alone, lives=2)


# --- who may write --------------------------------------------------------------------------------


def test_a_second_job_refuses_and_follows_on_fewer_and_more_nodes(
    cluster: Cluster, shared: Path, config: Path, alone: dict[str, bytes]
) -> None:
    """The first has DP=2 and dies, the second goes on with DP=1, is stopped, and ends with DP=4."""
    first = prepare(cluster, shared / "two", config, NPROC="1").gate(4)
    first.submit("--nodes=2", "--gpus-per-node=0", "--no-requeue")
    cluster.wait_until(lambda: 4 in first.trained(0), 240, f"step 4: {first.output}")
    plan = decisions(first.run / "d3")
    second = prepare(cluster, shared / "two-more", config, NPROC="1").gate(8)
    second.run = first.run
    second.with_environment(RUN=str(first.run)).submit("--nodes=1", "--gpus-per-node=0")
    assert second.wait(240) == "FAILED"
    assert second.facts()["ExitCode"] == "1:0"
    refusal = next(line for line in second.output.splitlines() if "PlanError" in line)
    owner = json.loads((first.run / "d3.lives" / "0001.json").read_text())
    assert f"job {first.id} (start 1) on {owner['host']}, process {owner['pid']} writes" in refusal
    assert refusal.endswith("another --save or --d3-plan-dir")
    assert decisions(first.run / "d3") == plan
    # The writer's node loses power: nobody says that the first job has stopped.
    node = int(owner["host"].removeprefix("node"))
    cluster.power_off(node)
    try:
        assert first.wait(90) in ("NODE_FAIL", "FAILED")
        second.submit("--nodes=1", "--gpus-per-node=0")
        cluster.wait_until(lambda: 8 in second.trained(0), 240, f"step 8: {second.output}")
    finally:
        cluster.power_on(node)
    (second.run / "STOP").touch()
    second.signal("USR1", "--batch")
    second.gate(OPEN)
    assert second.wait(120) == "COMPLETED"
    assert "STOP is there: not requeued" in second.output
    (second.run / "STOP").unlink()
    second.with_environment(NPROC="2").submit("--nodes=2", "--gpus-per-node=0")
    assert second.wait(240) == "COMPLETED", second.output
    assert decisions(first.run / "d3") == alone


# --- what cannot start, what cannot be written ----------------------------------------------------


def test_what_cannot_start_says_why_on_one_rank(
    cluster: Cluster, shared: Path, config: Path, alone: dict[str, bytes]
) -> None:
    folder = config.parent
    other = write_config(folder / "other.yaml", ["web", "code", "math"], mix=SCHEDULE)
    bad = write_config(folder / "bad.yaml", mix={"type": "statik"})
    missing = write_config(folder / "missing.yaml", ["web", "gone"])
    expected = {
        "bad": (bad, "ConfigError: d3.mix.type: no mixer statik, did you mean static?"),
        "missing": (missing, "CorpusError: "),
        "other": (other, "mix"),
    }
    jobs = {}
    for name, (path, _) in expected.items():
        job = prepare(cluster, shared / f"cannot-{name}", path, NPROC="1")
        if name == "other":
            job.with_environment(RUN=str(shared / "alone-run"))
            (shared / "alone-run" / "DONE").unlink()
        jobs[name] = job.submit("--nodes=2", "--gpus-per-node=0")
    for name, job in jobs.items():
        assert job.wait(240) == "FAILED", name
        assert job.facts()["ExitCode"] == "1:0"
        refusals = [line for line in job.output.splitlines() if "Error: " in line
                    and line.startswith("megatron_d3.pretrain: rank")]
        assert len(refusals) == 1, job.output
        assert expected[name][1] in refusals[0]
        assert not any(cluster.pids(node, f"rdzv-id={job.id}")
                       for node in range(1, cluster.num_nodes + 1))


def test_a_full_or_read_only_disk_stops_the_run_and_loses_nothing(
    cluster: Cluster, shared: Path, config: Path, alone: dict[str, bytes]
) -> None:
    job = prepare(cluster, shared / "disk", config, NPROC="1", LOGS=str(shared / "disk-logs"))
    job.run.mkdir()
    image = shared / "disk.img"
    cluster.run("truncate", "--size=24M", image)
    cluster.run("mkfs.ext4", "-q", image)
    cluster.run("mount", "-o", "loop", image, job.run, node=4)
    node4 = ("--nodes=1", "--nodelist=node4", "--gpus-per-node=0")
    logs = shared / "disk-logs"

    def wait_for_step(step: int) -> None:
        cluster.wait_until(lambda: any(
            f" iteration {step:8d}/" in path.read_text()
            for path in (logs / f"{job.id}-0").glob("*.log")), 240, f"step {step}: {job.output}")

    job.gate(4).submit(*node4)
    wait_for_step(4)
    cluster.run("bash", "-c", f"dd if=/dev/zero of={job.run}/filler bs=64k 2>/dev/null; true", node=4)
    job.gate(7)
    assert job.wait(240) == "FAILED"
    assert job.facts()["ExitCode"] == "1:0", job.output
    assert "No space left on device; free some space there" in job.output
    assert job.facts()["Restarts"] == "0"
    cluster.run("rm", str(job.run / "filler"), node=4)
    job.submit(*node4)
    wait_for_step(7)
    # What the kernel does once the disk reports an error. Megatron does not flush its checkpoints:
    # without this the one of step 6 would be half there.
    cluster.run("sync", "-f", job.run, node=4)
    cluster.run("mount", "-o", "remount,abort", job.run, node=4)
    job.gate(OPEN)
    assert job.wait(240) == "FAILED"
    assert job.facts()["ExitCode"] == "1:0", job.output
    assert "Read-only file system; it is on a read-only file system" in job.output
    cluster.run("umount", job.run, node=4)
    cluster.run("mount", "-o", "loop", image, job.run, node=4)
    job.submit(*node4)
    assert job.wait(240) == "COMPLETED", job.output
    cluster.run("cp", "-r", str(job.run / "d3"), str(shared / "disk-plan"), node=4)
    cluster.run("umount", job.run, node=4)
    assert decisions(shared / "disk-plan") == alone
