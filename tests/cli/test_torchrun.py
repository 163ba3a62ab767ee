"""Starting processes through torchrun: what is said when they fail, and that none is left."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_d3.cli import torchrun
from megatron_d3.errors import ConfigError, D3Error

REFUSED = """\
> building GPT model ...
megatron_d3.pretrain: rank 0: ResumeError: plan d3: made with seed 1, now 2; keep the old one
plan d3: made with mix.type static, now natural; keep the old value
megatron_d3.pretrain: rank 1: EchoError: plan d3: made with seed 1, now 2; keep the old one
E1129 16:00:00.000000 17 torch/distributed/elastic/multiprocessing/api.py:1028] failed (exitcode: 1)
"""
CRASHED = "".join(f"line {i}\n" for i in range(40)) + """\
RuntimeError: out of luck
W1129 16:00:00.000000 17 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""


def test_a_refusal_is_told_once_and_without_torchruns_words(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text(REFUSED)
    assert torchrun.failure(log, 0, 1) == (
        "ResumeError: plan d3: made with seed 1, now 2; keep the old one\n"
        "plan d3: made with mix.type static, now natural; keep the old value\n"
        f"(the whole log: {log})")


def test_a_refusal_of_a_verb_that_runs_under_torchrun_is_told(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text("> loading\nmegatron-d3 score: web: no such file\nmegatron-d3 score: web: no\n")
    assert torchrun.failure(log, 0, 1) == f"web: no such file\n(the whole log: {log})"


def test_the_environment_follows_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_D3_DEVICE", "cuda")
    assert torchrun.launch_environment(2) == dict(os.environ)
    monkeypatch.setenv("MEGATRON_D3_DEVICE", "cpu")
    assert torchrun.launch_environment(2) == torchrun.cpu_environment(2)


def test_a_crash_shows_the_last_lines_of_the_run_itself(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text(REFUSED + CRASHED)
    lines = torchrun.failure(log, len(REFUSED), 1).splitlines()
    assert lines[0] == "training ended with exit code 1; its last lines:"
    assert lines[1:-1] == [
        *(f"  line {i}" for i in range(26, 40)), "  RuntimeError: out of luck"]
    assert lines[-1] == f"(the whole log: {log})"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "megatron" else found(name))
    with pytest.raises(ConfigError, match=r"needs the package megatron; .*megatron-d3\[megatron\]"):
        torchrun.require_training_packages()


def test_processes_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert torchrun.cpu_environment(2)["OMP_NUM_THREADS"] == "4"
    assert torchrun.cpu_environment(16)["OMP_NUM_THREADS"] == "1"
    assert torchrun.cpu_environment(2)["MEGATRON_D3_DEVICE"] == "cpu"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert torchrun.cpu_environment(2)["OMP_NUM_THREADS"] == "3"


# A worker that behaves as a rank of Megatron does: it has a process of its own.
WORKER = """
import os, pathlib, subprocess, sys, time
what, folder = sys.argv[1], pathlib.Path(sys.argv[2])
# print() writes a line and its end one by one, and the other process may write between them.
sys.stdout.write(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}: {what}\\n")
if what == "end":
    sys.exit()
child = subprocess.Popen(["sleep", "300"], start_new_session=True)
(folder / f"{os.environ['RANK']}.tmp").write_text(f"{os.getpid()} {child.pid}")
(folder / f"{os.environ['RANK']}.tmp").rename(folder / f"{os.environ['RANK']}.pids")
if what == "fail":
    time.sleep(2)
    sys.exit("megatron_d3.pretrain: rank 0: CorpusError: no such corpus")
time.sleep(300)
"""


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., None]:
    """Start two workers through torchrun."""
    (tmp_path / "d3_test_worker.py").write_text(WORKER)
    environment = torchrun.cpu_environment(2) | {"PYTHONPATH": str(tmp_path)}

    def start(what: str, poll: Callable[[], None] = lambda: None) -> None:
        torchrun.train(
            [what, str(tmp_path)], log=tmp_path / "run.log", num_processes=2, poll=poll,
            environment=environment, module="d3_test_worker")

    return start


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def pids_in(folder: Path) -> list[int]:
    return [int(pid) for file in folder.glob("*.pids") for pid in file.read_text().split()]


@pytest.mark.mcore
def test_output_goes_to_the_log_after_the_command(
    start: Callable[..., None], tmp_path: Path
) -> None:
    polls: list[int] = []
    start("end", lambda: polls.append(1))
    lines = (tmp_path / "run.log").read_text().splitlines()
    assert lines[0].startswith("$ ") and " torch.distributed.run --standalone " in lines[0]
    assert lines[0].endswith(f"--nproc-per-node 2 -m d3_test_worker end {tmp_path}")
    assert {"rank 0 of 2: end", "rank 1 of 2: end"} <= set(lines)
    assert polls


@pytest.mark.mcore
def test_a_failure_is_told_and_leaves_no_process(
    start: Callable[..., None], tmp_path: Path
) -> None:
    with pytest.raises(D3Error, match="^CorpusError: no such corpus\n.*run.log"):
        start("fail")
    pids = pids_in(tmp_path)
    assert len(pids) == 4 and not any(map(is_alive, pids))


@pytest.mark.mcore
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_no_process(
    start: Callable[..., None], tmp_path: Path, number: int
) -> None:
    # A shell starts its background jobs with SIGINT ignored: the test would wait for ever.
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = signal.getsignal(signal.SIGTERM)
    polls_to_come = [1]

    def interrupt() -> None:
        if len(pids_in(tmp_path)) == 4 and not polls_to_come:
            os.kill(os.getpid(), number)
        elif len(pids_in(tmp_path)) == 4:
            polls_to_come.pop()

    try:
        with pytest.raises(KeyboardInterrupt):
            start("sleep", interrupt)
    finally:
        signal.signal(signal.SIGINT, ours)
    assert not any(map(is_alive, pids_in(tmp_path)))
    assert signal.getsignal(signal.SIGTERM) is before
