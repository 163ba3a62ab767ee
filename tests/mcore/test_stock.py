"""Without `--d3-config` the entry point is stock Megatron, to the last digit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.corpus_helpers import documents, write_corpus
from tests.mcore.launcher import LLAMA, REFERENCE, TINY, Launcher

pytestmark = pytest.mark.mcore

EOD = 255


def blend(folder: Path) -> list[str]:
    """Two corpora, and the flags that blend them."""
    for seed, name in enumerate(("a", "b")):
        write_corpus(folder / name, documents(
            seed=seed, num_documents=300, max_length=60, vocab_size=EOD, eod=EOD))
    return ["--data-path", "0.7", str(folder / "a"), "0.3", str(folder / "b"),
            "--split", "100,0,0", "--data-cache-path", str(folder / "cache")]


# What the product sets by itself on a CPU.
CPU = ["--distributed-backend", "gloo", "--transformer-impl", "local", "--use-cpu-initialization", "--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion", "--no-bias-gelu-fusion", "--no-bias-swiglu-fusion", "--no-bias-dropout-fusion", "--no-rope-fusion", "--no-persist-layer-norm"]
BATCH = ["--micro-batch-size", "2", "--global-batch-size", "8", "--train-iters", "20"]


@pytest.mark.parametrize("flags", [
    ["--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss"], LLAMA])
def test_equals_megatrons_own_loop_over_20_steps(
    launcher: Launcher, tmp_path: Path, flags: list[str]
) -> None:
    arguments = [*TINY, *BATCH, *blend(tmp_path), *flags]
    reference = launcher.run(
        tmp_path / "reference", [*arguments, *CPU], world_size=2, entry=REFERENCE).require_success()
    product = launcher.run(tmp_path / "product", arguments, world_size=2).require_success()

    assert len(product.losses()) == 20
    assert product.samples() == reference.samples()
    assert product.losses() == reference.losses()
    assert product.grad_norms() == reference.grad_norms()
    assert len({h for step in product.samples() for h in step}) > 100  # real, varied data
