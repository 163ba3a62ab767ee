"""The logic of `slurm/pretrain_d3.sh` in a real Slurm, with stand-ins for torchrun and Megatron.

All jobs of this module run at the same time. Each seeded fault is an edit of the script that people
make; the assertions that hold for the script as it is must notice it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.jobs import Job

pytestmark = pytest.mark.slurm

Changes = tuple[tuple[str, str], ...]

FAULTS: dict[str, tuple[str, Changes]] = {
    "every node waits for itself": ("'from 0'", (
        ('master=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
         "master=localhost"),)),
    "the node's rank is read in the batch script": ("'from 0'", (
        ("--rdzv-backend=c10d --rdzv-id=", '--node-rank="$SLURM_NODEID" --rdzv-id='),)),
    "two launchers a node": ("srun of life 0 failed", (
        ("#SBATCH --ntasks-per-node=1", "#SBATCH --ntasks-per-node=2"),
        ('--ntasks-per-node=1 --cpus-per-task="$cpus"', "--ntasks-per-node=2 --cpus-per-task=1"))),
    "srun in the foreground": ("0 restarts", (
        (' "${flags[@]}" &\nstep=$!', ' "${flags[@]}"\nstep=$$; exit 0'),)),
    "torchrun dies of USR1": ("srun of life 0 failed", (
        ('trap "" USR1; exec torchrun', "exec torchrun"),)),
    "the log is truncated": ("life 0 is not in the log", (
        ("#SBATCH --open-mode=append\n", "#SBATCH --open-mode=truncate\n"),)),
    "the script looks for its own folder": ("'from 0'", (
        ("[ -d megatron_d3 ]", 'cd "$(dirname "$0")"\n[ -d megatron_d3 ]'),)),
    "a log folder that nobody made": ("'from 0'", (
        ("--output=%x-%j.out", "--output=logs/%x-%j.out"),)),
    "checkpoints in the node's own /tmp": ("the shared disk has step 0", (
        ('--save "$RUN" --load "$RUN"', "--save /tmp/d3-run --load /tmp/d3-run"),)),
    "checkpoints outside the container's mounts": ("the shared disk has step 0", (
        ('--save "$RUN" --load "$RUN"', "--save /srv/d3-run --load /srv/d3-run"),)),
}
"""What people do to such a script: the complaint that must come, and (text, replacement)."""


def complaints(job: Job) -> list[str]:
    """Everything that is wrong with a job that was to save, requeue itself once and finish."""
    found = []

    def expect(is_so: bool, what: str) -> None:
        if not is_so:
            found.append(what)

    try:
        job.wait_for_text("from 0", 15)
        time.sleep(1)  # a few steps
        job.signal("USR1", "--batch")
        state = job.wait(40)
    except (AssertionError, RuntimeError) as error:
        return [f"does not come to its end: {error}"]
    expect(state == "COMPLETED", f"ended as {state}")
    expect(job.facts()["Restarts"] == "1", f"{job.facts()['Restarts']} restarts")
    for life in (0, 1):
        expect(f"life {life}] job {job.id} on node" in job.output, f"life {life} is not in the log")
        expect(f"life {life}] srun rc 0" in job.output, f"srun of life {life} failed")
        ranks = sorted(line.split(" from")[0] for text in job.ranks(life).values()
                       for line in text.splitlines())
        places = [re.sub("rank . of 4 on ", "", rank) for rank in ranks]
        expect([rank[:11] for rank in ranks] == [f"rank {i} of 4" for i in range(4)],
               f"ranks {ranks}")
        expect(sorted(places.count(place) for place in set(places)) == [2, 2], f"nodes {places}")
    expect(all(not text.rstrip().endswith("from 0") for text in job.ranks(1).values()),
           "life 1 began at step 0")
    expect(job.step() > 15, f"the shared disk has step {job.step()}")
    expect((job.run / "DONE").exists(), "no DONE")
    return found


@pytest.fixture(scope="module")
def checks(cluster: Cluster, shared: Path) -> Iterator[dict[str, Future[list[str]]]]:
    """Complaints about the script with each fault, and with none."""
    scripts: dict[str, Changes] = {"as it is": (), "in a container": ()}
    scripts |= {name: changes for name, (_, changes) in FAULTS.items()}
    with ThreadPoolExecutor(len(scripts)) as pool:
        found = {}
        for number, (name, changes) in enumerate(scripts.items()):
            job = Job.prepare(cluster, shared / f"script-{number}")
            job.on_shared_nodes().edit(*changes).without_torch()
            if "container" in name:
                job.in_container()
            found[name] = pool.submit(complaints, job.submit())
        yield found


@pytest.mark.parametrize("place", ["as it is", "in a container"])
def test_the_script_saves_requeues_itself_and_finishes(
    place: str, checks: dict[str, Future[list[str]]]
) -> None:
    assert checks[place].result() == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_is_noticed(fault: str, checks: dict[str, Future[list[str]]]) -> None:
    expected, _ = FAULTS[fault]
    assert any(expected in complaint for complaint in checks[fault].result())
