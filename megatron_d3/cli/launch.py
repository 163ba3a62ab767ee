"""`megatron-d3 launch`: the job script of a run, filled in; printed, or submitted and followed."""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from megatron_d3.cli.job_script import CHECKOUT, filled, require_model
from megatron_d3.cli.progress import Progress
from megatron_d3.config import load_config
from megatron_d3.errors import ConfigError, D3Error
from megatron_d3.plan.files import write_atomically

NAME = "launch"
HELP = "print the Slurm job script of a run, or submit it and follow the job"
EXAMPLE = """\
megatron-d3 launch run.yaml --run /shared/one --model llama-1b --tokenizer t.model --nodes 16
megatron-d3 launch run.yaml --run /shared/one --nodes 2 --time 2:00:00 --submit \\
    --flags --tensor-model-parallel-size 2"""

_POLL_SECONDS = 5.0
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE",
          "OUT_OF_MEMORY", "PREEMPTED")
_TIME = re.compile(r"\d+(-\d+(:\d+){0,2}|(:\d+){0,2})")  # minutes, h:m:s, days-hours ...
_OPTION = re.compile(r"[a-z][a-z-]*(=.*)?")
# setting of the script, flag
_SETTINGS = {
    "TOKENIZER": "tokenizer", "SAMPLES": "samples", "SAVE_INTERVAL": "save_interval",
    "EVAL_INTERVAL": "eval_interval", "DEVICE": "device", "NPROC": "ranks_per_node", "VENV": "venv",
    "CONTAINER": "container", "MOUNTS": "mounts", "LOGS": "logs", "LIVES": "lives",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags; those left out keep the script's own values."""
    add = parser.add_argument
    add("config", type=Path, metavar="RUN.yaml", help="domains and mixture: --d3-config")
    add("--run", type=Path, required=True, metavar="DIR",
        help="folder of checkpoints, plan and logs, on a file system that all nodes share")
    add("--model", default="llama-1b", metavar="NAMES",
        help="presets of examples/models/ or files of flags; a later one wins (default llama-1b)")
    add("--tokenizer", type=Path, metavar="FILE", help="a SentencePiece model")
    add("--samples", type=_count, metavar="N", help="samples of seq_length tokens to train on")
    add("--save-interval", type=_count, metavar="STEPS", help="steps between two checkpoints")
    add("--eval-interval", type=_count, metavar="STEPS", help="steps between two evaluations")
    add("--nodes", type=_count, metavar="N", help="nodes")
    add("--gpus-per-node", type=_count_or_none, metavar="N", help="GPUs of each; 0 with --device cpu")
    add("--ranks-per-node", type=_count, metavar="N", help="default: one a GPU")
    add("--time", type=_time, metavar="TIME", help="of one life, e.g. 24:00:00")
    add("--device", choices=("cuda", "cpu"), help="cpu: a dry run over gloo")
    add("--venv", type=Path, metavar="DIR", help="virtual environment (default: .venv)")
    add("--container", metavar="IMAGE", help="for Pyxis, in place of a virtual environment")
    add("--mounts", metavar="DIR:DIR,...", help="more directories for the container")
    add("--logs", type=Path, metavar="DIR", help="default: logs/ below the run")
    add("--lives", type=_count, metavar="N", help="how often the job may start")
    add("--sbatch", action="append", default=[], metavar="OPTION", type=_option,
        help="any other option of sbatch, e.g. --sbatch partition=gpu; may be repeated")
    add("--submit", action="store_true",
        help="submit it and follow the job; the script is kept in DIR/jobs/")
    add("--flags", nargs=argparse.REMAINDER, default=[], metavar="...",
        help="Megatron's: everything that follows")


def run(args: argparse.Namespace) -> int:
    """Print the script to stdout, or submit it and say on stderr how the job is."""
    text = script_of(args)
    if not args.submit:
        sys.stdout.write(text)
        return 0
    for name in ("DONE", "STOP"):
        if (args.run / name).exists():
            raise ConfigError(f"{args.run}: holds {name}; remove that file to train on, or give "
                              "another --run")
    if shutil.which("sbatch") is None:
        raise ConfigError("--submit: no sbatch on the PATH; without it the script is printed, to be "
                          "submitted elsewhere")
    path = _keep(args.run / "jobs", text)
    job = _slurm("sbatch", "--parsable", str(path)).strip().split(";")[0]
    print(job)
    print(f"job {job}: {path}", file=sys.stderr)
    try:
        return follow(job, args.run)
    except KeyboardInterrupt:
        print(f"no longer followed; the job goes on. To stop it: scancel {job}", file=sys.stderr)
        return 128 + signal.SIGINT


def script_of(args: argparse.Namespace) -> str:
    """Return the filled script of the parsed flags.

    Raises:
        ConfigError: something named does not exist, or cannot be used as it stands.
    """
    _require_corpora(args.config)
    if args.tokenizer is not None and not args.tokenizer.is_file():
        raise ConfigError(f"--tokenizer: no file {args.tokenizer}")
    if args.device == "cpu" and args.gpus_per_node:
        raise ConfigError(f"--device cpu: not with --gpus-per-node {args.gpus_per_node}")
    if args.venv is not None and args.container is not None:
        raise ConfigError("--venv: not with --container, which brings its own Python")
    settings = {"MODEL": require_model(args.model), "CONFIG": str(args.config.absolute()),
                "RUN": str(args.run.absolute())}
    for name, flag in _SETTINGS.items():
        value = getattr(args, flag)
        if value is not None:
            settings[name] = str(value.absolute() if isinstance(value, Path) else value)
    options = {"chdir": str(CHECKOUT), "output": f"{args.run.absolute()}/%x-%j.out"}
    if args.device == "cpu":
        options["gpus-per-node"] = "0"
    for option, value in (("nodes", args.nodes), ("gpus-per-node", args.gpus_per_node),
                          ("time", args.time)):
        if value is not None:
            options[option] = str(value)
    for option in args.sbatch:
        name, _, value = option.partition("=")
        options[name] = value
    return filled(settings, options, args.flags)


def follow(
    job: str, run_dir: Path, *, poll_seconds: float = _POLL_SECONDS,
    facts: Callable[[str], dict[str, str]] | None = None,
) -> int:
    """Say how a job is until it ends.

    Args:
        job: its id.
        run_dir: where its plan and its output are.
        poll_seconds: between two looks.
        facts: what the scheduler says of a job, in place of `scontrol show job`.

    Returns:
        0 if it completed, 1 otherwise.
    """
    facts = facts or _facts
    progress = Progress(f"job {job}", run_dir / "d3", sys.stderr)
    before = ""
    while True:
        found = facts(job)
        state = found.get("JobState", "UNKNOWN")
        where = found.get("NodeList", "") if state == "RUNNING" else found.get("Reason", "")
        now = f"{state} ({where}), start {int(found.get('Restarts', '0')) + 1}"
        if now != before:
            progress.abandon()
            print(f"job {job}: {now}", file=sys.stderr, flush=True)
            before = now
        if state in _ENDED:
            break
        if state == "RUNNING":
            progress.poll()
        time.sleep(poll_seconds)
    if state == "COMPLETED":
        return 0
    output = Path(found.get("StdOut", ""))
    if output.is_file():
        lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
        print("\n".join(lines[-15:]), file=sys.stderr)
    print(f"job {job}: exit code {found.get('ExitCode', '?').split(':')[0]}; its output: {output}",
          file=sys.stderr)
    return 1


def _require_corpora(path: Path) -> None:
    config = load_config(path)
    for name, domain in config.domains.items():
        for prefix in (*domain.paths, *domain.valid_paths):
            for end in (".idx", ".bin"):
                if not Path(f"{prefix}{end}").is_file():
                    raise ConfigError(f"{path}: domains.{name}: no file {prefix}{end}")


def _keep(folder: Path, text: str) -> Path:
    """Write the script beside the run under a name of its own."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--run: {folder} cannot be made: {error.strerror}") from error
    path = folder / f"{len(list(folder.glob('*.sh'))) + 1:04d}.sh"
    write_atomically(path, text.encode())
    return path


def _facts(job: str) -> dict[str, str]:
    words = _slurm("scontrol", "show", "job", "-o", job).split()
    return dict(word.split("=", 1) for word in words if "=" in word)


def _slurm(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise D3Error(f"{command[0]}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected at least 1")
    return number


def _count_or_none(text: str) -> int:
    return 0 if text == "0" else _count(text)


def _time(text: str) -> str:
    if not _TIME.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"got {text}, expected minutes, hours:minutes:seconds or days-hours")
    return text


def _option(text: str) -> str:
    if not _OPTION.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected a long option of sbatch without dashes, e.g. partition=gpu")
    return text
