"""The cluster of the other tests: nodes of their own, and nothing left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.slurm.cluster import ROOT, Cluster

pytestmark = pytest.mark.slurm


def test_each_node_has_a_name_an_address_and_a_tmp_of_its_own(
    cluster: Cluster, shared: Path
) -> None:
    script = 'touch "/tmp/$(hostname)" "$0/$(hostname)"; hostname -i; ls /tmp | grep node'
    said = cluster.run("srun", "--nodes=3", "--label", "bash", "-c", script, shared)
    lines = sorted(line.split(": ")[1] for line in said.splitlines())
    assert lines == ["10.99.0.1", "10.99.0.2", "10.99.0.3", "node1", "node2", "node3"]
    assert sorted(path.name for path in shared.glob("node*")) == ["node1", "node2", "node3"]
    assert not Path("/tmp/node1").exists()
    cluster.run("srun", "--nodes=3", "bash", "-c", 'rm "/tmp/$(hostname)" "$0/$(hostname)"', shared)


def test_a_killed_test_leaves_no_process(cluster: Cluster) -> None:
    code = ("from tests.slurm.cluster import Cluster; c = Cluster(2, []); "
            "c.sbatch('--wrap=sleep 5000'); print(c.init, flush=True); input()")
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        init = Path("/proc") / process.stdout.readline().strip()
        names = (init / "ns" / "pid").readlink()
        process.send_signal(signal.SIGKILL)

    def left() -> list[Path]:
        found = []
        for path in Path("/proc").glob("[0-9]*/ns/pid_for_children"):
            try:
                if path.with_name("pid").readlink() == names:
                    found.append(path)
            except OSError:
                pass
        return found

    deadline = time.monotonic() + 30
    while init.exists() or left():
        assert time.monotonic() < deadline, f"{init} lives"
        time.sleep(0.05)
    links = Path("/sys/class/net").iterdir()
    assert not [link.name for link in links if link.name.startswith(("cable", "plug", "bridge"))]
