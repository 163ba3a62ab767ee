"""`megatron-d3 d3 study`, with processes that study nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_d3.cli import d3
from megatron_d3.cli.main import main
from megatron_d3.cli.torchrun import failure
from megatron_d3.errors import D3Error
from megatron_d3.mcore import study

FLAGS = ["--", "--d3-config", "run.yaml", "--load", "runs/a"]
FOUND = {"version": 1, "steps": [], "text": "a table"}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """Command lines given to torchrun; each writes what rank 0 would."""
    lines: list[list[str]] = []

    def train(arguments: Sequence[str], *, log: Path, **how: Any) -> None:
        lines.append([how["module"], str(how["num_processes"]), *arguments])
        if "--fail" in arguments:
            raise D3Error(f"it failed\n(the whole log: {log})")
        Path(arguments[arguments.index("--out") + 1]).write_text(json.dumps(FOUND))

    monkeypatch.setattr(d3, "train", train)
    monkeypatch.setattr(d3, "require_training_packages", lambda: None)
    monkeypatch.setattr(d3, "launch_environment", lambda num_processes: {})
    monkeypatch.setattr(d3.tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("RANK", raising=False)
    return lines


def test_started_by_itself_it_starts_the_processes_and_prints_the_table(
    started: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--units", "5", "--estimators", "projected,exact", "--judge", "exact"]
    out = tmp_path / "out" / "study.json"
    out.parent.mkdir()
    assert main(["d3", "study", *words, "--num-processes", "2", "--out", str(out), *FLAGS]) == 0
    (line,) = started
    assert line[:4] == ["megatron_d3", "2", "d3", "study"]
    for flag, value in zip(words[::2], words[1::2], strict=True):
        assert line[line.index(flag) + 1] == value
    assert line[-5:] == FLAGS
    assert capsys.readouterr().out == "a table\n"
    assert json.loads(out.read_text()) == FOUND
    assert list(tmp_path.iterdir()) == [out.parent]  # neither log nor other files are left


def test_json_for_machines(
    started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["d3", "study", "--json", *FLAGS]) == 0
    assert json.loads(capsys.readouterr().out) == FOUND


def test_the_log_of_a_failure_is_kept(
    started: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["d3", "study", *FLAGS, "--fail"]) == 1
    (log,) = tmp_path.glob("*.log")
    assert f"(the whole log: {log})" in capsys.readouterr().err


def test_a_refusal_of_a_process_is_told_as_it_was(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("words\nmegatron-d3 d3: --units: too many\nE torch/distributed/elastic: oh\n")
    assert failure(log, 0, 1) == f"--units: too many\n(the whole log: {log})"


@pytest.mark.parametrize(("words", "message"), [
    ([], "give the run's flags after --, with --d3-config and --load"),
    (["--num-processes", "0", *FLAGS], "--num-processes: got 0, expected at least 1"),
])
def test_what_cannot_be_started_is_refused(
    started: list[list[str]], capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["d3", "study", *words]) == 1
    assert message in capsys.readouterr().err
    assert started == []


@pytest.mark.parametrize("is_rank_0", [True, False])
def test_a_process_of_torchrun_takes_part_and_rank_0_prints(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], is_rank_0: bool,
) -> None:
    jobs: list[study.StudyJob] = []

    def run_study(job: study.StudyJob) -> study.Report | None:
        jobs.append(job)
        return study.Report("a table", {"version": 1}) if is_rank_0 else None

    monkeypatch.setattr(study, "run_study", run_study)
    monkeypatch.setenv("RANK", "0" if is_rank_0 else "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    out = tmp_path / "study.json"
    assert main(["d3", "study", "--estimators", "projected,exact", "--out", str(out), *FLAGS]) == 0
    assert jobs == [study.StudyJob(12, ("projected", "exact"), "look_ahead", tuple(FLAGS[1:]))]
    assert started == []
    assert capsys.readouterr().out == ("a table\n" if is_rank_0 else "")
    assert out.exists() is is_rank_0


def test_flags_of_the_run_win_and_nothing_is_written_by_its_writers() -> None:
    flags = study._flags(["--save", "runs/a", "--tensorboard-dir", "tb"])
    assert flags.index("--save") < len(flags) - 1 - flags[::-1].index("--save")
    assert flags[-4:] == ["--tensorboard-dir", "", "--wandb-project", ""]
