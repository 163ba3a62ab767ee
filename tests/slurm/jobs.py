"""Job scripts in a checkout of their own, what they print, and how to wait for it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.slurm.cluster import ROOT, SYSTEM_PATH, Cluster

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
