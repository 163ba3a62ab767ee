"""Every flag file of `examples/models/`, shrunk by `tiny.args`, trains two planned steps."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from megatron_d3.plan.reader import PlanReader
from tests.mcore.launcher import ROOT, Launcher
from tests.mcore.plans import make_corpora, write_config

pytestmark = pytest.mark.mcore

MODELS = ROOT / "examples" / "models"
NAMES = sorted(path.stem for path in MODELS.glob("*.args") if path.stem != "tiny")
REST = shlex.split(
    "--tokenizer-type NullTokenizer --vocab-size 256 --train-samples 16 --num-workers 0 "
    "--eval-iters 0 --eval-interval 1000 --log-interval 1 --save-interval 1000"
)


def flags(name: str) -> list[str]:
    return (MODELS / f"{name}.args").read_text().split()


def test_the_issue_names_these_models() -> None:
    assert NAMES == ["gpt2-124m", "gpt2-355m", "llama-160m", "llama-1b", "llama-7b"]


@pytest.mark.parametrize("name", NAMES)
def test_a_tiny_twin_trains_on_a_cpu(launcher: Launcher, tmp_path: Path, name: str) -> None:
    make_corpora(tmp_path)
    config = write_config(tmp_path / "run.yaml")
    arguments = [*flags(name), *flags("tiny"), *REST, "--d3-config", str(config),
                 "--save", str(tmp_path / "run")]
    world_size = 2 if "--tensor-model-parallel-size" in flags(name) else 1
    run = launcher.run(tmp_path / "out", arguments, world_size=world_size).require_success()

    assert len(run.steps()) == 2
    assert PlanReader(tmp_path / "run" / "d3").frontier == 16
    sizes = re.findall(r"number of parameters on \(tensor.*\): (\d+)", run.output)
    assert len(sizes) == world_size and all(int(size) < 200_000 for size in sizes)  # the twin ran
