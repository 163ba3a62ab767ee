"""How jobs end, wait for each other and multiply, in a real Slurm with stand-ins for Megatron."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import ROOT, SYSTEM_PATH, Cluster
from tests.slurm.jobs import TRACKER, Job

pytestmark = pytest.mark.slurm


def prepare(cluster: Cluster, folder: Path, *, name: str = "pretrain_d3.sh", **more: str) -> Job:
    job = Job.prepare(cluster, folder, name=name).on_shared_nodes()
    return job.without_torch(**more)


# --- exit codes -----------------------------------------------------------------------------------


def test_exit_codes_say_what_to_do(cluster: Cluster, shared: Path) -> None:
    def submit(number: int, **environment: str) -> Job:
        return prepare(cluster, shared / f"code-{number}", **environment).submit()

    done = prepare(cluster, shared / "code-done")
    done.run.mkdir()
    (done.run / "DONE").touch()
    jobs = {
        "nothing to do": (done.submit(), "COMPLETED", "0:0", "DONE is there: nothing to do"),
        "refused": (submit(1, MISCHIEF="refuse"), "FAILED", "1:0",
                    "megatron_d3.pretrain: rank 1: CorpusError: web.idx: no such file"),
        "no progress": (submit(2, MISCHIEF="crash"), "FAILED", "3:0",
                        "no checkpoint came of this life: not requeued"),
        "too many lives": (submit(3, MISCHIEF="crash-later", LIVES="1"), "FAILED", "4:0",
                           "life 0 was the last of LIVES=1"),
        "model": (submit(4, MODEL="llama-2b"), "FAILED", "2:0",
                  "MODEL=llama-2b is neither a file nor one of gpt2-124m.args"),
        "config": (submit(5, CONFIG="none.yaml"), "FAILED", "2:0", "CONFIG=none.yaml is no file"),
        "tokenizer": (submit(6, TOKENIZER="t.model"), "FAILED", "2:0", "TOKENIZER=t.model is no"),
        "venv": (submit(7, VENV="/nowhere"), "FAILED", "2:0", "VENV=/nowhere has no torchrun"),
        "checkout": (prepare(cluster, shared / "code-8").submit(f"--chdir={shared}"), "FAILED",
                     "2:0", "is no checkout of Megatron-D3"),
        "flags": (prepare(cluster, shared / "code-9").submit(
            arguments=("--exit-interval", "5")), "FAILED", "2:0", "use sbatch --time"),
    }
    for name, (job, state, code, message) in jobs.items():
        found = job.wait(60)
        output = job.output or (shared / f"d3-{job.id}.out").read_text()
        assert (found, job.facts()["ExitCode"]) == (state, code), f"{name}: {output}"
        assert message in output, name
    assert jobs["refused"][0].output.count("CorpusError") == 1
    done = subprocess.run(["bash", ROOT / "slurm/pretrain_d3.sh"], capture_output=True, text=True,
                          check=False, env={"PATH": "/usr/bin:/bin"})
    assert (done.returncode, "start it with sbatch" in done.stderr) == (2, True)


def test_a_crash_after_a_checkpoint_is_requeued_until_the_run_is_stopped(
    cluster: Cluster, shared: Path
) -> None:
    job = prepare(cluster, shared / "crashes", MISCHIEF="crash-later").submit()
    stopped = prepare(cluster, shared / "stopped", VENV="")  # what is on the PATH
    stopped.with_environment(PATH=f"{stopped.folder}/.venv/bin:{SYSTEM_PATH}").submit()
    stopped.wait_for_text("from 0", 20)
    (stopped.run / "STOP").touch()
    cluster.wait_until(lambda: stopped.step() >= 10, 20, "a checkpoint")
    stopped.signal("USR1", "--batch")
    assert stopped.wait(30) == "COMPLETED"
    assert "STOP is there: not requeued" in stopped.output
    assert not (stopped.run / "DONE").exists()
    # Resumed, the stand-in ends after ten steps, before it would crash again.
    assert job.wait(40) == "COMPLETED", job.output
    assert "life 0] requeued: goes on from step 10" in job.output
    assert job.step() == 20


def test_the_warning_before_the_time_limit_saves_and_requeues(
    cluster: Cluster, shared: Path
) -> None:
    """`--signal=B:USR1@600` with a limit of ten minutes: Slurm sends it at its next look."""
    job = prepare(cluster, shared / "limit", MOST_STEPS="600").submit("--time=10")
    cluster.wait_until(lambda: job.facts()["Restarts"] == "1", 90, f"a requeue: {job.output}")
    assert job.wait(30) == "COMPLETED"
    assert job.output.count("srun rc 0") == 2


# --- several jobs ---------------------------------------------------------------------------------


def test_doremi_is_three_jobs_that_wait_for_each_other(cluster: Cluster, shared: Path) -> None:
    jobs = {}
    for name, mischief in (("good", ""), ("bad", "refuse")):
        job = prepare(cluster, shared / f"doremi-{name}", name="doremi.sh", MISCHIEF=mischief)
        (job.folder / "doremi.yaml").touch()
        lines = cluster.run("slurm/doremi.sh", "doremi.yaml", "--time=30", cwd=job.folder,
                            environment=job.environment | {"MOST_STEPS": "40"}).splitlines()
        jobs[name] = [line.split(": job ") for line in lines]
        assert [step for step, _ in jobs[name]] == ["reference", "proxy", "final"]
    (_, reference), (_, proxy), (_, final) = jobs["good"]
    place = shared / "doremi-good" / "reference" / TRACKER
    cluster.wait_until(place.exists, 30, "the reference trains")
    cluster.run("scancel", "--batch", "--signal=USR1", reference)
    assert [cluster.wait(job, 60) for job in (reference, proxy, final)] == ["COMPLETED"] * 3
    assert cluster.job(reference)["Restarts"] == "1"
    ends = [cluster.job(job)["EndTime"] for job in (reference, proxy, final)]
    assert ends == sorted(ends)
    flags = (shared / "doremi-good" / "final" / "flags").read_text()
    assert "--exit-signal\nSIGUSR1" in flags
    states = [cluster.wait(job, 60) for _, job in jobs["bad"]]
    assert states == ["FAILED", "CANCELLED", "CANCELLED"]


def test_a_sweep_trains_every_mixer_with_every_seed(cluster: Cluster, shared: Path) -> None:
    job = prepare(cluster, shared / "sweep", name="sweep.sh")
    shutil.copy(ROOT / "slurm" / "pretrain_d3.sh", job.folder / "slurm")
    (job.folder / "fast.mix").write_text("{type: odm, smoothing: 0.5}\n")
    answer = cluster.run("slurm/sweep.sh", "--nodes=1", cwd=job.folder, environment={
        **job.environment, "MIXERS": "static fast", "SEEDS": "1 2", "MOST_STEPS": "3"})
    array = answer.split()[-1]
    cluster.wait_until(lambda: not cluster.run("squeue", "-h", "-j", array).strip(), 60, "the array")
    assert sorted(path.name for path in job.run.iterdir()) == [
        "fast-1", "fast-2", "static-1", "static-2"]
    for path in job.run.iterdir():
        assert (path / "DONE").exists()
        flags = (path / "flags").read_text()
        mix = "{type: odm, smoothing: 0.5}" if path.name[0] == "f" else "{type: static}"
        assert flags.endswith(f"--seed\n{path.name[-1]}\n--d3-set\nmix={mix}")
    assert "MIXERS or SEEDS is empty" in cluster.run(
        "slurm/sweep.sh", cwd=job.folder, environment={"MIXERS": " "}, check=False)


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs mpi4py")
def test_an_order_is_written_by_ranks_of_two_nodes(cluster: Cluster, shared: Path) -> None:
    folder = shared / "order"
    job = Job.prepare(cluster, folder, name="reorder_index.sh")
    (folder / "tools").symlink_to(ROOT / "tools")
    job.with_environment(VENV=sys.prefix)
    lines = [json.dumps({"text": f"document {n} " * (n % 7), "q": n % 5}) for n in range(300)]
    (folder / "web.jsonl").write_text("\n".join(lines))
    cluster.run(sys.executable, "-m", "megatron_d3", "tokenize", "--input", "web.jsonl", "--output-prefix",
                "web", "--tokenizer-type", "bytes", "--score-key", "q", "--workers", "1", cwd=folder)
    flags = ("--prefix", "web", "--method", "saw", "--descending", "--output-prefix")
    cluster.run(sys.executable, "-m", "megatron_d3", "order", *flags, "alone", cwd=folder)
    job.submit("--nodes=2", "--ntasks-per-node=2", arguments=(*flags, "together"))
    other = Job.prepare(cluster, shared / "order-none", name="reorder_index.sh")
    other.with_environment(VENV=sys.prefix, MPI_TYPE="none").submit("--ntasks=2", "--ntasks-per-node=2")
    assert job.wait(120) == "COMPLETED", job.output
    assert "4 ranks on node" in job.output
    assert (folder / "together.idx").read_bytes() == (folder / "alone.idx").read_bytes()
    assert other.wait(120) == "FAILED"
    assert other.facts()["ExitCode"] == "2:0"
    assert "2 tasks, but (ranks, size they see) is: 2 1; srun --mpi=none" in other.output


def test_launch_submits_follows_and_keeps_the_script(cluster: Cluster, shared: Path) -> None:
    job = prepare(cluster, shared / "launch", MOST_STEPS="5")
    for end in (".bin", ".idx"):
        (job.folder / f"web{end}").touch()
    (job.folder / "run.yaml").write_text("domains: {web: web}\n")
    said = cluster.run(
        sys.executable, "-m", "megatron_d3", "launch", "run.yaml", "--run", job.run, "--submit",
        "--device", "cpu", "--nodes", "2", "--ranks-per-node", "2", "--model", "gpt2-124m",
        "--venv", ".venv", "--time", "30", "--sbatch", "oversubscribe", "--flags", "--seed", "7",
        cwd=job.folder, environment=job.environment | {"PYTHONPATH": str(ROOT)}, check=False)
    assert ": COMPLETED (None), start 1" in said, said
    script = (job.run / "jobs" / "0001.sh").read_text()
    assert "MODEL=gpt2-124m" in script and "set -- --seed 7" in script
    assert (job.run / "flags").read_text().endswith("--seed\n7")
    assert (job.run / "DONE").exists()
    (kept,) = job.run.glob("logs/*/job.sh")
    assert kept.read_text() == script
