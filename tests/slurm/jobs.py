"""Job scripts in a checkout of their own, what they print, and how to wait for it."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.slurm.cluster import ROOT, SYSTEM_PATH, Cluster

BATCH_SIZE = 8
MODEL = [
    ("--num-layers", "2"), ("--hidden-size", "32"), ("--num-attention-heads", "4"),
    ("--seq-length", "32"), ("--max-position-embeddings", "32"), ("--lr", "1e-3"),
    ("--min-lr", "1e-4"), ("--lr-decay-style", "cosine"), ("--attention-dropout", "0"),
    ("--hidden-dropout", "0"), ("--log-interval", "1"), ("--eval-iters", "0"),
    ("--num-workers", "0"), ("--tokenizer-type", "NullTokenizer"), ("--vocab-size", "256"),
    ("--micro-batch-size", "2"), ("--global-batch-size", str(BATCH_SIZE)),
]
"""A model small enough for a step of tens of milliseconds, one flag a line."""

TRACKER = "latest_checkpointed_iteration.txt"


@dataclass
class Job:
    """A submitted job script, and the folder that it was submitted from."""

    cluster: Cluster
    folder: Path
    run: Path
    name: str = "pretrain_d3.sh"
    environment: dict[str, str] = field(default_factory=dict)
    id: str = ""

    @classmethod
    def prepare(cls, cluster: Cluster, folder: Path, *, name: str = "pretrain_d3.sh") -> Job:
        """Make a folder that looks like a fresh clone."""
        (folder / "slurm").mkdir(parents=True)
        for part in ("megatron_d3", "examples"):
            (folder / part).symlink_to(ROOT / part)
        shutil.copy(ROOT / "slurm" / name, folder / "slurm" / name)
        return cls(cluster, folder, folder.with_name(f"{folder.name}-run"), name)

    def on_shared_nodes(self) -> Job:
        """Ask for no whole nodes, so that many jobs find room at once."""
        return self.edit(("#SBATCH --exclusive\n", ""), ("#SBATCH --gpus-per-node=8\n", ""))

    def edit(self, *changes: tuple[str, str]) -> Job:
        """Replace text of the script; each old text must be there."""
        path = self.folder / "slurm" / self.name
        text = path.read_text()
        for old, new in changes:
            assert old in text, f"{self.name} has no {old!r}"
            text = text.replace(old, new)
        path.write_text(text)
        return self

    def without_torch(self, **environment: str) -> Job:
        """Let stand-ins take the place of torchrun and Python."""
        tools = self.folder / ".venv" / "bin"
        tools.mkdir(parents=True)
        stand_in = f"exec {sys.executable} {ROOT}/tests/slurm/stand_in.py"
        (tools / "torchrun").write_text(f'#!/bin/bash\n{stand_in} torchrun "$@"\n')
        (tools / "python").write_text(f'#!/bin/bash\n{stand_in} trainer "$@"\n')
        for tool in tools.iterdir():
            tool.chmod(0o755)
        (self.folder / "run.yaml").write_text("domains: {}\n")
        return self.with_environment(RUN=str(self.run), NPROC="2", JOIN_SECONDS="8", **environment)

    def with_megatron(self, config: Path, *, num_steps: int, is_forking: bool = True) -> Job:
        """Train a tiny model on the CPU.

        Args:
            config: run.yaml.
            num_steps: of the whole run.
            is_forking: import Megatron once a node and record every sample; else the real torchrun.
        """
        tools = self.folder / ".venv" / "bin"
        tools.mkdir(parents=True)
        launcher = (f"{sys.executable} -m tests.slurm.forking_torchrun" if is_forking
                    else f"{sys.executable} -m torch.distributed.run")
        for name, command in (("torchrun", launcher), ("python", sys.executable)):
            (tools / name).write_text(f'#!/bin/bash\nexec {command} "$@"\n')
            (tools / name).chmod(0o755)
        (self.folder / "tests").symlink_to(ROOT / "tests")
        (self.folder / "tiny.args").write_text("\n".join(shlex.join(pair) for pair in MODEL))
        return self.with_environment(
            MODEL="tiny.args", CONFIG=str(config), RUN=str(self.run), DEVICE="cpu", NPROC="2",
            SAMPLES=str(num_steps * BATCH_SIZE), SAVE_INTERVAL="3", EVAL_INTERVAL="1000",
            OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore", MEGATRON_D3_LEASE_SECONDS="6",
            COLLECTIVE_SECONDS="60", JOIN_SECONDS="240")

    def gate(self, num_steps: int) -> Job:
        """Let every life of this run train so many steps, and wait there."""
        path = self.folder / "gate"
        aside = path.with_suffix(".tmp")
        aside.write_text(str(num_steps))
        aside.replace(path)
        return self.with_environment(D3_TEST_GATE=str(path))

    def in_container(self) -> Job:
        """Let the job ask for a container, and srun have the plugin for it."""
        (self.folder / "pyxis").mkdir()
        (self.folder / "pyxis" / "srun").symlink_to(ROOT / "tests" / "slurm" / "pyxis.sh")
        path = f"{self.folder}/pyxis:{self.folder}/.venv/bin:{SYSTEM_PATH}"
        return self.with_environment(CONTAINER="image.sqsh", MOUNTS=f"{ROOT}:{ROOT}", PATH=path)

    def with_environment(self, **environment: str) -> Job:
        """Set variables of the job."""
        self.environment |= environment
        return self

    def submit(self, *options: str | Path, arguments: tuple[str | Path, ...] = ()) -> Job:
        """Hand it to sbatch."""
        self.id = self.cluster.sbatch(
            *options, f"slurm/{self.name}", *arguments, cwd=self.folder,
            environment=self.environment)
        return self

    # --- what it does -----------------------------------------------------------------------------

    @property
    def output(self) -> str:
        """What the job printed so far."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.out")))

    def ranks(self, life: int) -> dict[str, str]:
        """What each rank printed in a life, by `node-rankR`."""
        logs = self.run / "logs" / f"{self.id}-{life}"
        return {path.stem: path.read_text() for path in sorted(logs.glob("*.log"))}

    def trained(self, life: int) -> dict[int, list[int]]:
        """Positions of the plan that a life trained on, by step (1-based), over all ranks."""
        found: dict[int, set[int]] = {}
        logs = self.run / "logs" / f"{self.id}-{life}"
        for path in logs.glob("*.jsonl"):
            for row in map(json.loads, path.read_text().splitlines()):
                found.setdefault(row["iteration"], set()).update(row["positions"])
        return {step: sorted(positions) for step, positions in sorted(found.items())}

    def step(self) -> int:
        """The last checkpoint's step."""
        tracker = self.run / TRACKER
        return int(tracker.read_text()) if tracker.exists() else 0

    def wait(self, seconds: float) -> str:
        """Wait for the end and return Slurm's state."""
        return self.cluster.wait(self.id, seconds)

    def wait_for_text(self, text: str, seconds: float) -> None:
        """Wait until a rank or the script prints something."""
        self.cluster.wait_until(
            lambda: text in self.output or any(
                text in path.read_text() for path in self.run.glob("logs/*/*.log")),
            seconds, f"{text!r} from job {self.id}: {self.output}")

    def signal(self, name: str, *options: str) -> None:
        """`scancel --signal`."""
        self.cluster.run("scancel", *options, f"--signal={name}", self.id)

    def facts(self) -> Mapping[str, str]:
        """What Slurm says of it."""
        return self.cluster.job(self.id)
