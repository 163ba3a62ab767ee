"""A Slurm cluster of 2-4 virtual nodes on this machine; see `cluster.sh` beside this file."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAB = "/run/cluster"  # inside the cluster's own /run
_SCRIPT = Path(__file__).with_name("cluster.sh")
_PACKAGES = ("munge", "slurmctld", "slurmd", "slurm-client", "iproute2")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NO_START = "/usr/sbin/policy-rc.d"  # Debian: exit code 101 keeps packages from starting daemons


def why_not() -> str | None:
    """Say why no cluster can be started here, if none can."""
    if os.geteuid() != 0:
        return "a Slurm cluster of namespaces needs root"
    if shutil.which("apt-get") is None and shutil.which("slurmctld", path=SYSTEM_PATH) is None:
        return "Slurm is installed from Debian's packages, and this is not Debian"
    return None


def install() -> None:
    """Install Slurm from Debian's packages where it is missing (8 s)."""
    commands = ("munged", "slurmctld", "slurmd", "sbatch", "ip")
    if all(shutil.which(command, path=SYSTEM_PATH) for command in commands):
        return
    is_ours = not Path(_NO_START).exists()
    if is_ours:
        Path(_NO_START).write_text("#!/bin/sh\nexit 101\n")
        Path(_NO_START).chmod(0o755)
    try:
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        for command in (["update", "-qq"],
                        ["install", "-qq", "-y", "--no-install-recommends", *_PACKAGES]):
            done = subprocess.run(["apt-get", *command], env=environment, capture_output=True,
                                  text=True, check=False)
            assert done.returncode == 0, f"apt-get {command}: {done.stdout}{done.stderr}"
    finally:
        if is_ours:
            Path(_NO_START).unlink()


class Cluster:
    """A running cluster. All of it ends with :meth:`close`, or with this process.

    Args:
        num_nodes: they are called node1, node2, ...
        shared: directories that all nodes see; of the rest of /tmp each node has its own.
    """

    def __init__(self, num_nodes: int, shared: Sequence[Path]) -> None:
        self.num_nodes = num_nodes
        places = {*map(str, shared), str(ROOT), sys.prefix, sys.base_prefix}
        self._process = subprocess.Popen(
            ["unshare", "--mount", "--uts", "--net", "--pid", "--fork", "--mount-proc",
             "--kill-child", str(_SCRIPT), "up", str(num_nodes), *sorted(places)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={"PATH": SYSTEM_PATH}, start_new_session=True)
        assert self._process.stdout is not None and self._process.stderr is not None
        if self._process.stdout.readline() != "ready\n":
            self._process.kill()
            raise RuntimeError(f"no cluster: {self._process.stderr.read()}")
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        self.init = children.read_text().strip()
        self.wait_until(lambda: self.idle_nodes() == num_nodes, 30, "all nodes idle")

    def close(self) -> None:
        """End every process of the cluster."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()

    # --- commands ---------------------------------------------------------------------------------

    def run(
        self, *command: str | Path, node: int | None = None, cwd: Path = ROOT,
        environment: Mapping[str, str] | None = None, check: bool = True,
    ) -> str:
        """Run a command on the controller, or on a node, and return what it prints."""
        enter = ["nsenter", "-t", self.init, "-a"]
        if node is not None:
            inner = self.run("cat", f"{LAB}/run/node{node}.pid").strip()
            enter += ["nsenter", "-t", inner, "-a"]
        variables = {"PATH": f"{Path(sys.executable).parent}:{SYSTEM_PATH}", "HOME": "/root",
                     "SLURM_CONF": f"{LAB}/slurm.conf", **(environment or {})}
        done = subprocess.run(
            [*enter, "env", "-i", f"--chdir={cwd}",
             *(f"{name}={value}" for name, value in variables.items()), *map(str, command)],
            capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if check and done.returncode:
            raise RuntimeError(f"{command}: exit code {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout if check else done.stdout + done.stderr

    def sbatch(
        self, *arguments: str | Path, cwd: Path = ROOT, environment: Mapping[str, str] | None = None
    ) -> str:
        """Submit a job and return its id."""
        answer = self.run("sbatch", "--parsable", *arguments, cwd=cwd, environment=environment)
        return answer.strip().split(";")[0]

    def job(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says of a job, e.g. JobState, Restarts, ExitCode, NodeList."""
        words = self.run("scontrol", "show", "job", "-o", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, job: str, seconds: float) -> str:
        """Wait for a job's final state and return it."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL")
        state = ""

        def is_over() -> bool:
            nonlocal state
            state = self.job(job)["JobState"]
            return state in ended

        self.wait_until(is_over, seconds, f"end of job {job}, which is {state or 'unknown'}")
        return state

    def wait_until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Look five times a second until a condition holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited {seconds:g} s in vain: {what}\n{self.log()}"
            time.sleep(0.2)

    def idle_nodes(self) -> int:
        """Number of nodes without a job that answer."""
        return int(self.run("sinfo", "-h", "-t", "idle", "-o", "%D", check=False).strip() or 0)

    def log(self, num_lines: int = 5) -> str:
        """The last lines that Slurm's daemons logged."""
        return self.run("bash", "-c", f"tail -n {num_lines} {LAB}/log/*", check=False)

    # --- accidents --------------------------------------------------------------------------------

    def pids(self, node: int, pattern: str) -> list[int]:
        """Processes of a node, in its own numbers, whose command line matches."""
        return [int(p) for p in self.run("pgrep", "-f", pattern, node=node, check=False).split()]

    def kill(self, node: int, pid: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a process of a node."""
        self.run("bash", "-c", f"kill -{int(number)} {pid}", node=node)

    def power_off(self, node: int) -> None:
        """Kill everything on a node at once."""
        self.run("bash", "-c", f"kill -9 $(cat {LAB}/run/node{node}.pid)")

    def power_on(self, node: int) -> None:
        """Start a node that was powered off."""
        self.run(_SCRIPT, "node", str(node))

    def kill_slurmd(self, node: int) -> None:
        """Kill Slurm's daemon on a node; its jobs' processes live on."""
        self.run("pkill", "-9", "-x", "slurmd", node=node)

    def start_slurmd(self, node: int) -> None:
        """Start Slurm's daemon on a node again."""
        self.run("slurmd", "-N", f"node{node}", node=node)

    def cut(self, node: int) -> None:
        """Pull a node's network cable."""
        self.run("ip", "link", "set", f"cable{node}", "down")

    def heal(self, node: int) -> None:
        """Put a node's network cable back."""
        self.run("ip", "link", "set", f"cable{node}", "up")
