"""Real ranks: `mpirun` spreads the work and leaves the same bytes."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# The environment's own first: a launcher of another MPI leaves every rank alone, 0 of 1.
MPIRUN = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(
        MPIRUN is None or importlib.util.find_spec("mpi4py") is None,
        reason="needs mpirun and mpi4py",
    ),
]


def mpirun(size: int, *command: str | Path) -> subprocess.CompletedProcess[str]:
    assert MPIRUN is not None
    words = [MPIRUN, "-n", str(size), sys.executable, *map(str, command)]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)


def d3(size: int, *flags: str | Path) -> subprocess.CompletedProcess[str]:
    return mpirun(size, "-m", "megatron_d3.cli.main", *flags)


def files_of(prefix: Path) -> dict[str, bytes]:
    return {
        path.name.removeprefix(prefix.name): path.read_bytes().replace(
            str(prefix).encode(), b"PREFIX"
        )
        for path in prefix.parent.glob(f"{prefix.name}.*")
    }


@pytest.fixture
def source(tmp_path) -> Path:
    lines = [json.dumps({"text": f"document {n} " * (n % 7), "q": n % 5}) for n in range(300)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    return tmp_path / "a.jsonl"


def tokenize(size: int, source: Path, prefix: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return d3(size, "tokenize", "--input", source, "--output-prefix", prefix, "--tokenizer-type",
              "bytes", "--append-eod", "--score-key", "q", "--shard-size", "2k", *more)  # fmt: skip


def test_the_ranks_are_those_that_mpirun_started(tmp_path):
    code = (
        "from megatron_d3.corpus.mpi import find_ranks as f; r = f(); print(f'<{r.rank}/{r.size}>')"
    )
    found = mpirun(3, "-c", code)
    assert found.returncode == 0, found.stderr
    assert sorted(re.findall("<.*?>", found.stdout)) == ["<0/3>", "<1/3>", "<2/3>"]


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_leave_no_trace_in_a_tokenized_corpus(source, tmp_path, size):
    alone = tokenize(1, source, tmp_path / "one", "--workers", "1")
    assert alone.returncode == 0, alone.stderr
    together = tokenize(size, source, tmp_path / "many")
    assert together.returncode == 0, together.stderr
    assert together.stdout.count(" tokens from ") == 1  # rank 0 alone reports
    assert files_of(tmp_path / "many") == files_of(tmp_path / "one")


def test_a_broken_line_stops_all_ranks_with_one_message(source, tmp_path):
    with source.open("a") as file:
        file.write("\n{")
    found = tokenize(2, source, tmp_path / "web")
    assert found.returncode == 1
    assert found.stderr.count("a.jsonl, line 301: broken JSON") == 1
    assert not list(tmp_path.glob("web.idx"))


def order(
    size: int, prefix: Path, out: Path, *more: str, method: str = "saw"
) -> subprocess.CompletedProcess[str]:
    direction = [] if method == "shuffle" else ["--descending"]
    return d3(size, "order", "--prefix", prefix, "--method", method, *direction, "--jitter", "7",
              "--output-prefix", out, "--permutation-out", f"{out}.order.npy", *more)  # fmt: skip


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_leave_no_trace_in_an_ordered_corpus(source, tmp_path, size):
    assert tokenize(1, source, tmp_path / "web", "--workers", "1").returncode == 0
    alone = order(1, tmp_path / "web", tmp_path / "one")
    assert alone.returncode == 0, alone.stderr
    together = order(size, tmp_path / "web", tmp_path / "many")
    assert together.returncode == 0, together.stderr
    assert together.stdout == alone.stdout.replace("/one", "/many")
    assert files_of(tmp_path / "many") == files_of(tmp_path / "one")


@pytest.mark.parametrize(("size", "method"), [(2, "saw"), (3, "shuffle")])
def test_ranks_copy_the_tokens_together(source, tmp_path, size, method):
    assert tokenize(1, source, tmp_path / "web", "--workers", "1").returncode == 0
    alone = order(1, tmp_path / "web", tmp_path / "one", "--copy", method=method)
    assert alone.returncode == 0, alone.stderr
    together = order(size, tmp_path / "web", tmp_path / "many", "--copy", method=method)
    assert together.returncode == 0, together.stderr
    assert files_of(tmp_path / "many") == files_of(tmp_path / "one")
    assert (tmp_path / "many.bin").read_bytes() != (tmp_path / "web.bin").read_bytes()
    # Rank 0 is refused when the others are already waiting: nobody hangs.
    for more, message in (
        ([], "many.order.npy: exists; choose another name or give --overwrite"),
        (["--overwrite", "--layers", "0"], "order.layers: got 0, expected at least 1"),
    ):
        again = order(size, tmp_path / "web", tmp_path / "many", "--copy", *more)
        assert again.returncode == 1
        assert again.stderr.count(message) == 1
    (tmp_path / "web.scores.npy").unlink()
    assert order(size, tmp_path / "web", tmp_path / "no", "--copy").returncode == 1
