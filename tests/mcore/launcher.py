"""Drive the zygote from a test: `launcher.run(...)` is one Megatron run of several processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

PRODUCT = "megatron_d3.mcore.pretrain:main"
REFERENCE = "tests.mcore.reference:main"

# A model small enough for a step of tens of milliseconds on one core.
TINY = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32", "--max-position-embeddings", "32", "--lr", "1e-3", "--min-lr", "1e-4", "--lr-decay-style", "cosine", "--attention-dropout", "0", "--hidden-dropout", "0", "--log-interval", "1", "--eval-interval", "1000", "--eval-iters", "0", "--num-workers", "0", "--tokenizer-type", "NullTokenizer", "--vocab-size", "256"]
LLAMA = ["--swiglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope", "--group-query-attention", "--num-query-groups", "2", "--disable-bias-linear", "--untie-embeddings-and-output-weights"]


@dataclass(frozen=True)
class Run:
    """A finished run: its exit codes, what it printed and what its ranks recorded."""

    folder: Path
    codes: list[int]

    @property
    def output(self) -> str:
        return "\n".join(p.read_text() for p in sorted(self.folder.glob("rank*.log")))

    def steps(self, rank: int = 0) -> list[dict[str, Any]]:
        """Rows of the recorder, one a step."""
        path = self.folder / f"rank{rank}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def losses(self, rank: int = -1) -> list[str]:
        """Exact losses of the last rank, which is on the last pipeline stage."""
        rank = len(self.codes) - 1 if rank < 0 else rank
        return [row["loss"] for row in self.steps(rank)]

    def grad_norms(self) -> list[str]:
        return [row["grad_norm"] for row in self.steps(0)]

    def samples(self) -> list[list[str]]:
        """Token hashes of each step over the ranks that read, in position order where known."""
        merged: dict[int, list[tuple[int, str]]] = {}
        for rank in range(len(self.codes)):
            for row in self.steps(rank):
                positions = row["positions"] or range(len(row["samples"]))
                merged.setdefault(row["iteration"], []).extend(
                    zip(positions, row["samples"], strict=True))
        return [[h for _, h in sorted(set(merged[i]))] for i in sorted(merged)]

    def require_success(self) -> Run:
        assert set(self.codes) == {0}, f"exit codes {self.codes}\n{self.output[-6000:]}"
        return self


class Launcher:
    """Owns one zygote process."""

    def __init__(self) -> None:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore",
            "MEGATRON_D3_DEVICE": "cpu", "GLOO_SOCKET_IFNAME": "lo",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.mcore.zygote"], cwd=ROOT, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._answer()

    def run(
        self, folder: Path, arguments: list[str], *, world_size: int = 1, timeout: float = 120,
        environment: dict[str, str] | None = None, entry: str = PRODUCT, **recorder: Any,
    ) -> Run:
        """Run `megatron_d3.pretrain ARGUMENTS`, or another entry, in `world_size` processes."""
        command = {
            "entry": entry,
            "folder": str(folder), "arguments": [str(a) for a in arguments],
            "world_size": world_size, "timeout": timeout, "port": _free_port(),
            "environment": environment or {}, "recorder": recorder,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return Run(folder, self._answer()["codes"])

    def close(self) -> None:
        with self._process:  # closes both pipes and waits
            pass

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the zygote died with {self._process.wait()}"
        answer: dict[str, Any] = json.loads(line)
        return answer


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
