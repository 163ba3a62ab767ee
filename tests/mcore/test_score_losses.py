"""`megatron-d3 score --loss-of`: every layout gives what a plain recomputation gives."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from megatron_d3.cli.main import main
from megatron_d3.corpus.index import read_index
from megatron_d3.corpus.scores import read_scores
from tests.corpus_helpers import documents, write_corpus
from tests.mcore.launcher import LLAMA, TINY, Launcher, Run
from tests.mcore.plans import EOD, flags, write_config

pytestmark = pytest.mark.mcore

SCORE = "tests.mcore.naive_losses:score"
TP2 = ["--tensor-model-parallel-size", "2"]
PP2 = ["--pipeline-model-parallel-size", "2"]
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one": (1, []),
    "tp2": (2, TP2),
    "tp2-sequence-parallel": (2, [*TP2, "--sequence-parallel"]),
    "pp2": (2, PP2),
    "dp2": (2, []),
    "tp2-pp2": (4, [*TP2, *PP2]),
    "pp2-interleaved": (2, [*PP2, "--num-virtual-stages-per-pipeline-rank", "2"]),
    "dp2-micro-batches-of-seven": (2, ["--micro-batch-size", "7"]),
    "flags-of-the-run": (1, TINY),
}
MODEL = ["--num-layers", "4", "--make-vocab-size-divisible-by", "64", "--lr", "1e-2"]


@pytest.fixture(scope="module")
def checkpoint(launcher: Launcher, corpora: Path) -> Path:
    """A LLaMA-like model after three steps."""
    save = corpora / "small"
    config = write_config(corpora / "small.yaml")
    launcher.run(corpora / "small.run", [
        *flags(config, save, steps=3, save_interval=3), *MODEL, *LLAMA]).require_success()
    return save


@pytest.fixture(scope="module")
def web(corpora: Path) -> Path:
    """A corpus of documents of 0 to 99 tokens, one of them of three sequences, in another order."""
    docs = documents(seed=5, num_documents=60, max_length=98, vocab_size=200, eod=EOD)
    docs[3:5] = [[], [7]]
    return write_corpus(corpora / "scored", docs, sequence_length=40)


@pytest.fixture(scope="module")
def naive(launcher: Launcher, web: Path, checkpoint: Path) -> np.ndarray:
    run = launcher.run(
        web.with_name("naive"),
        [*TINY, *MODEL, *LLAMA, "--micro-batch-size", "1", "--load", str(checkpoint),
         "--finetune", "--no-load-optim", "--no-load-rng"],
        entry="tests.mcore.naive_losses:main", environment={"D3_TEST_CORPUS": str(web)})
    run.require_success()
    return np.load(f"{web}.naive.npy")


@pytest.fixture
def copy(web: Path, tmp_path: Path) -> Path:
    """The corpus by itself."""
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{web}{suffix}", tmp_path)
    return tmp_path / web.name


def score(
    launcher: Launcher, prefix: Path, checkpoint: Path, *more: str, extra: tuple[str, ...] = (),
    world_size: int = 1, name: str = "run", **how: Any,
) -> Run:
    words = ["score", "--prefix", str(prefix), "--loss-of", str(checkpoint), *more, "--", *extra]
    return launcher.run(
        prefix.with_name(name), words, world_size=world_size, entry=SCORE, **how)


def losses(prefix: Path, name: str = "loss") -> np.ndarray:
    return read_scores(f"{prefix}.scores.npy", index=read_index(prefix)).row(name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_plain_losses(
    launcher: Launcher, copy: Path, checkpoint: Path, naive: np.ndarray, layout: str
) -> None:
    world_size, extra = LAYOUTS[layout]
    run = score(launcher, copy, checkpoint, extra=tuple(extra), world_size=world_size)
    run.require_success()
    assert_allclose(losses(copy), naive, rtol=1e-5)
    assert naive[3] == naive[4] == 0 and (np.delete(naive, [3, 4]) > 1).all()
    # the summary, and nothing of Megatron, can be piped
    files = {path.name for path in copy.parent.iterdir()} - {"run"}
    assert files == {"scored.bin", "scored.idx", "scored.scores.npy", "scored.scores.json"}


def test_half_precision_may_be_asked_for(
    launcher: Launcher, copy: Path, checkpoint: Path, naive: np.ndarray
) -> None:
    score(launcher, copy, checkpoint, extra=("--bf16",)).require_success()
    assert_allclose(losses(copy), naive, rtol=1e-2)
    assert not np.allclose(losses(copy), naive, rtol=1e-6)


def test_an_interrupted_run_goes_on_and_other_settings_are_refused(
    launcher: Launcher, copy: Path, checkpoint: Path, naive: np.ndarray
) -> None:
    kill = {"setup": "tests.mcore.naive_losses:kill_at_the_fifth_shard"}
    run = score(launcher, copy, checkpoint, **kill)
    assert run.codes == [-9]
    parts = copy.with_name("scored.loss.parts")
    done = sorted(path.name for path in parts.glob("*.loss"))
    assert len(done) == 4
    assert not copy.with_name("scored.scores.npy").exists()
    run = score(launcher, copy, checkpoint, extra=("--seq-length", "16"), name="other")
    assert run.codes == [1]
    assert "unfinished run with another seq-length: 32, now 16" in run.output
    (parts / done[0]).write_bytes((parts / done[0]).read_bytes())  # kept, not written again
    before = os.stat(parts / done[0]).st_ino
    again = score(launcher, copy, checkpoint, extra=tuple(TP2), world_size=2, name="again",
                  setup="tests.mcore.naive_losses:keep_parts")
    again.require_success()
    assert os.stat(parts / done[0]).st_ino == before
    assert_allclose(losses(copy), naive, rtol=1e-5)


def test_a_second_checkpoints_losses_are_added(
    launcher: Launcher, copy: Path, checkpoint: Path, naive: np.ndarray
) -> None:
    assert main(["score", "--prefix", str(copy), "--method", "length"]) == 0
    run = score(launcher, copy, checkpoint, "--add", "--loss-name", "small", world_size=2)
    run.require_success()
    assert_allclose(losses(copy, "small"), naive, rtol=1e-5)
    assert losses(copy, "length").sum() == read_index(copy).num_tokens
    refused = score(launcher, copy, checkpoint, world_size=2, name="refused")
    assert refused.codes == [1, 1]
    assert "scores.npy: exists; choose another name or give --overwrite" in refused.output


@pytest.mark.parametrize(("extra", "world_size", "message"), [
    (("--context-parallel-size", "2"), 1, "--context-parallel-size"),
    (("--tensor-model-parallel-size", "2"), 1,
     "1 processes are no multiple of tensor parallel 2 x pipeline parallel 1"),
    (("--pipeline-model-parallel-size", "3"), 3,
     "has 4 layers, which do not divide into 3 pipeline stages"),
])
def test_layouts_that_cannot_be_are_refused(
    launcher: Launcher, copy: Path, checkpoint: Path, extra: tuple[str, ...], world_size: int,
    message: str,
) -> None:
    run = score(launcher, copy, checkpoint, extra=extra, world_size=world_size)
    assert set(run.codes) == {1}
    assert message in run.output
    assert not list(copy.parent.glob("scored.scores*"))


def test_a_missing_checkpoint_is_refused(launcher: Launcher, copy: Path, tmp_path: Path) -> None:
    run = score(launcher, copy, tmp_path / "nowhere")
    assert run.codes == [1]
    assert f"--loss-of: no checkpoint in {tmp_path / 'nowhere'}; expected the --save" in run.output


def test_a_longer_sequence_than_learned_positions_is_refused(
    launcher: Launcher, corpora: Path, copy: Path
) -> None:
    save, config = corpora / "gpt", write_config(corpora / "gpt.yaml")
    launcher.run(corpora / "gpt.run", flags(
        config, save, steps=1, save_interval=1)).require_success()
    run = score(launcher, copy, save, extra=("--seq-length", "64"))
    assert run.codes == [1]
    assert "--seq-length 64: the model has learned 32 positions" in run.output


def test_tokens_that_the_model_does_not_know_are_refused(
    launcher: Launcher, copy: Path, checkpoint: Path
) -> None:
    write_corpus(copy, [[1, 2], [3, 256, 5]])
    run = score(launcher, copy, checkpoint, world_size=2)
    assert set(run.codes) <= {1, -6} and 1 in run.codes
    assert "document 1 has token 256, but the model's vocabulary is 256" in run.output
    copy.with_name("scored.origin.json").write_text('{"vocab_size": 50257}')
    run = score(launcher, copy, checkpoint, name="known")
    assert run.codes == [1]
    assert "its tokenizer has 50,257 tokens, but the model's vocabulary is 256" in run.output


def test_an_empty_corpus_has_no_losses(launcher: Launcher, copy: Path, checkpoint: Path) -> None:
    write_corpus(copy, [])
    score(launcher, copy, checkpoint, world_size=2).require_success()
    assert losses(copy).shape == (0,)


def test_the_verb_starts_torchrun_itself(
    copy: Path, checkpoint: Path, naive: np.ndarray, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MEGATRON_D3_DEVICE", "cpu")
    words = ["score", "--prefix", str(copy), "--loss-of", str(checkpoint), "--num-processes", "2"]
    assert main(words) == 0
    assert_allclose(losses(copy), naive, rtol=1e-5)
    out = capfd.readouterr().out.splitlines()
    assert out[0].endswith("scored.scores.npy: 60 documents") and out[1].startswith("loss ")
    assert not copy.with_name("scored.loss.log").exists()
