"""The job script of a run: what is filled in, what is refused, how a job is followed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from megatron_d3.cli import launch
from megatron_d3.cli.job_script import SCRIPT, filled
from megatron_d3.cli.main import main
from megatron_d3.errors import ConfigError, D3Error


@pytest.fixture
def config(tmp_path: Path) -> Path:
    for end in (".bin", ".idx"):
        (tmp_path / f"web{end}").touch()
    path = tmp_path / "run.yaml"
    path.write_text("domains: {web: web}\n")
    return path


def changed(text: str) -> list[str]:
    """Lines that the script itself does not have."""
    known = SCRIPT.read_text().splitlines()
    return [re.sub(r" +#.*", "", line) if line[0] != "#" else line
            for line in text.splitlines() if line and line not in known]


def test_the_printed_script_has_everything_filled_in(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my flags.args").touch()
    tokenizer = tmp_path / "t.model"
    tokenizer.touch()
    assert main(["launch", str(config), "--run", str(tmp_path / "a run"), "--model", "gpt2-124m tiny",
                 "--tokenizer", str(tokenizer), "--nodes", "16", "--time", "1-12:00:00",
                 "--container", "image.sqsh", "--sbatch", "partition=gpu", "--sbatch", "no-kill",
                 "--flags", "--d3-set", "mix={type: natural}"]) == 0
    text = capsys.readouterr().out
    assert changed(text) == [
        "#SBATCH --nodes=16", "#SBATCH --time=1-12:00:00",
        f"#SBATCH --output='{tmp_path}/a run/%x-%j.out'", f"#SBATCH --chdir={launch.CHECKOUT}",
        "#SBATCH --partition=gpu", "#SBATCH --no-kill",
        "MODEL='gpt2-124m tiny'", f"CONFIG={config}", f"RUN='{tmp_path}/a run'",
        f"TOKENIZER={tokenizer}", "CONTAINER=image.sqsh",
        "set -- --d3-set 'mix={type: natural}'"]
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def test_a_dry_run_asks_for_no_gpu(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", str(config), "--run", "r", "--device", "cpu", "--ranks-per-node", "2"]) == 0
    lines = changed(capsys.readouterr().out)
    assert {"#SBATCH --gpus-per-node=0", "DEVICE=cpu", "NPROC=2"} <= set(lines)


def test_every_setting_of_the_script_can_be_filled() -> None:
    names = re.findall(r"^([A-Z_]+)=\$\{\1:?-", SCRIPT.read_text(), re.MULTILINE)
    text = filled(dict.fromkeys(names, "v a"), {})
    assert [line for line in changed(text) if line.endswith("='v a'")] == [
        f"{name}='v a'" for name in names]
    assert set(launch._SETTINGS) < set(names)
    with pytest.raises(ConfigError, match="has no setting NONE"):
        filled({"NONE": "1"}, {})
    with pytest.raises(ConfigError, match="needs a checkout of the repository"):
        filled({}, {}, script=Path("/nowhere/pretrain_d3.sh"))


@pytest.mark.parametrize(("arguments", "message"), [
    (["--model", "llama-2b"], "--model: llama-2b is neither a file of flags nor one of gpt2-124m, "),
    (["--model", " "], "--model: empty, expected one or more of"),
    (["--tokenizer", "none.model"], "--tokenizer: no file none.model"),
    (["--device", "cpu", "--gpus-per-node", "8"], "--device cpu: not with --gpus-per-node 8"),
    (["--venv", "v", "--container", "c"], "--venv: not with --container"),
])  # fmt: skip
def test_what_cannot_be_used_is_refused(
    config: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", str(config), "--run", "r", *arguments]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "message"), [
    (["--nodes", "0"], "--nodes: got 0, expected at least 1"),
    (["--time", "soon"], "--time: got soon, expected minutes, hours:minutes:seconds"),
    (["--sbatch", "--partition=gpu"], "expected one argument"),
    (["--sbatch", "-p gpu"], "--sbatch: got '-p gpu', expected a long option of sbatch"),
    (["--sbatch", "P=gpu"], "--sbatch: got 'P=gpu', expected a long option of sbatch"),
])  # fmt: skip
def test_wrong_usage_is_explained(
    config: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["launch", str(config), "--run", "r", *arguments])
    assert message in capsys.readouterr().err


def test_a_corpus_that_is_not_there_is_named(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "web.bin").unlink()
    assert main(["launch", str(config), "--run", "r"]) == 1
    assert f"run.yaml: domains.web: no file {tmp_path}/web.bin" in capsys.readouterr().err


def test_a_finished_run_is_not_submitted(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "DONE").touch()
    assert main(["launch", str(config), "--run", str(tmp_path), "--submit"]) == 1
    assert "holds DONE; remove that file to train on" in capsys.readouterr().err


def test_without_slurm_nothing_is_submitted(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["launch", str(config), "--run", str(tmp_path / "r"), "--submit"]) == 1
    assert "--submit: no sbatch on the PATH" in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


def test_scripts_that_ran_are_kept_side_by_side(tmp_path: Path) -> None:
    assert launch._keep(tmp_path / "jobs", "a") == tmp_path / "jobs" / "0001.sh"
    assert launch._keep(tmp_path / "jobs", "b").read_text() == "b"
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--run: .*file/jobs cannot be made"):
        launch._keep(tmp_path / "file" / "jobs", "c")


def test_a_refusal_of_slurm_is_passed_on(tmp_path: Path) -> None:
    with pytest.raises(D3Error, match="bash: no such partition"):
        launch._slurm("bash", "-c", "echo no such partition >&2; exit 1")
    with pytest.raises(D3Error, match="false: exit code 1"):
        launch._slurm("false")


def test_a_job_is_followed_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "d3-7.out"
    output.write_text("the reason\n")
    pending = {"JobState": "PENDING", "Reason": "Resources", "Restarts": "0"}
    running = {"JobState": "RUNNING", "NodeList": "node[1-2]", "Restarts": "0"}
    last = {"JobState": "FAILED", "Reason": "NonZeroExitCode", "Restarts": "1", "ExitCode": "3:0",
            "StdOut": str(output)}
    states = iter([pending, pending, running, running | {"Restarts": "1"}, last])
    assert launch.follow("7", tmp_path, poll_seconds=0, facts=lambda job: next(states)) == 1
    assert capsys.readouterr().err.splitlines() == [
        "job 7: PENDING (Resources), start 1", "job 7: RUNNING (node[1-2]), start 1",
        "job 7: RUNNING (node[1-2]), start 2", "job 7: FAILED (NonZeroExitCode), start 2",
        "the reason", f"job 7: exit code 3; its output: {output}"]
    done = {"JobState": "COMPLETED", "Restarts": "0"}
    assert launch.follow("7", tmp_path, facts=lambda job: done) == 0
