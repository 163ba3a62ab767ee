"""The demo: a corpus of real text, runs of one model on it, each on other data, and what came of it.

    OUT/corpus/            see `corpus/demo.py`; made once, reused
    OUT/uniform.yaml ...   copies of the recipe, beside the corpus that their paths point to
    OUT/uniform/           checkpoints, the plan in d3/, and demo.json: what it was trained from
    OUT/uniform.log        everything Megatron said
    OUT/weights.png, OUT/losses.png, OUT/graph.png

Running it again reuses what is finished and continues what is not. Nothing is deleted:
:func:`set_aside` moves the runs to OUT/abandoned-NNNN/.
"""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from megatron_d3.cli.plot import draw_graph
from megatron_d3.cli.progress import Progress
from megatron_d3.cli.torchrun import require_training_packages, train
from megatron_d3.config import load_config
from megatron_d3.corpus.demo import DemoCorpus, build_demo_corpus
from megatron_d3.curves import RunCurves, read_curves
from megatron_d3.errors import ConfigError, D3Error
from megatron_d3.plots import plot_losses, plot_weights, require_matplotlib

RUNS = ("uniform", "shift", "odm", "d3")
"""The runs, each with a YAML file of its name in the recipe."""

MODEL = "model.args"
"""The recipe's file of Megatron flags."""

RECIPE = Path(__file__).resolve().parents[2] / "examples" / "demo"
"""The recipe in a checkout of the repository."""

_PLOTS = ("weights.png", "losses.png", "graph.png")


@dataclass(frozen=True)
class Demo:
    """Where and how the demo runs.

    Attributes:
        out_dir: folder of everything it makes.
        recipe: folder with a YAML file for each of `RUNS`, and `model.args`.
        num_processes: data-parallel processes on this machine.
        max_bytes_per_domain: UTF-8 bytes of text at which a domain of the corpus is full.
        vocab_size: pieces of the tokenizer.
    """

    out_dir: Path
    recipe: Path = RECIPE
    num_processes: int = 2
    max_bytes_per_domain: int = 5_000_000
    vocab_size: int = 4096

    def folder(self, run: str) -> Path:
        """Return a run's folder, Megatron's `--save`."""
        return self.out_dir / run

    def config(self, run: str) -> Path:
        """Return a run's configuration file."""
        return self.out_dir / f"{run}.yaml"

    def log(self, run: str) -> Path:
        """Return the file of a run's output."""
        return self.out_dir / f"{run}.log"


def prepare(demo: Demo, stream: TextIO) -> DemoCorpus:
    """Build or reuse the corpus and lay the recipe beside it.

    Raises:
        ConfigError: a package or a file of the recipe is missing, or a copy differs from it.
        CorpusError: there is not enough text, or the folder holds another corpus.
    """
    require_training_packages()
    require_matplotlib()
    recipe = {name: _read(demo.recipe / name) for name in (*map("{}.yaml".format, RUNS), MODEL)}
    corpus_dir = demo.out_dir / "corpus"
    is_there = (corpus_dir / "corpus.json").exists()
    _say(stream, f"corpus    {'found' if is_there else 'building from the text Python brings'}")
    corpus = build_demo_corpus(
        corpus_dir, max_bytes_per_domain=demo.max_bytes_per_domain, vocab_size=demo.vocab_size)
    _say(stream, f"corpus    {len(corpus.domains)} domains, {corpus.num_bytes / 1e6:.1f} MB, "
                 f"{corpus.num_tokens:,} tokens in {corpus_dir}")
    for name, text in recipe.items():
        _copy(text, demo.recipe / name, demo.out_dir / name)
    for run in RUNS:
        _require_domains(demo.config(run), corpus)
    return corpus


def train_all(demo: Demo, corpus: DemoCorpus, stream: TextIO) -> None:
    """Train every run that is not finished.

    Raises:
        D3Error: a run failed, or was made from another recipe or corpus.
    """
    for run in RUNS:
        _train_one(demo, run, corpus, stream)


def draw(demo: Demo) -> tuple[list[RunCurves], list[Path]]:
    """Read what the runs did from their plans and draw it.

    Returns:
        the curves of the runs, and the images.
    """
    curves = [read_curves(demo.folder(run) / "d3", name=run) for run in RUNS]
    weights, losses, graph = (demo.out_dir / name for name in _PLOTS)
    plot_weights(curves, weights)
    plot_losses(curves, losses)
    draw_graph(demo.folder("d3") / "d3", None, graph)
    return curves, [weights, losses, graph]


def set_aside(demo: Demo) -> Path | None:
    """Move the runs, their logs, configurations and plots away; the corpus stays.

    Returns:
        the folder that they are in now; None if there was nothing.
    """
    names = [MODEL, *_PLOTS, *RUNS, *(f"{run}{end}" for run in RUNS for end in (".yaml", ".log"))]
    found = [demo.out_dir / name for name in names if (demo.out_dir / name).exists()]
    if not found:
        return None
    number = 1
    while (aside := demo.out_dir / f"abandoned-{number:04d}").exists():
        number += 1
    aside.mkdir()
    for path in found:
        path.rename(aside / path.name)
    return aside


def arguments(demo: Demo, run: str, corpus: DemoCorpus) -> list[str]:
    """Return the flags of `megatron_d3.pretrain` for a run."""
    return [
        *_flags(demo.out_dir / MODEL),
        "--tokenizer-type", "SentencePieceTokenizer",
        "--tokenizer-model", str(corpus.tokenizer_model),
        "--save", str(demo.folder(run)), "--load", str(demo.folder(run)),
        "--d3-config", str(demo.config(run)),
    ]  # fmt: skip


def _train_one(demo: Demo, run: str, corpus: DemoCorpus, stream: TextIO) -> None:
    folder = demo.folder(run)
    made_from = {
        "config": _read(demo.config(run)), "model": _read(demo.out_dir / MODEL),
        "corpus": {domain.name: domain.train.hash for domain in corpus.domains}}
    marker = folder / "demo.json"
    before = json.loads(_read(marker)) if marker.exists() else {"made_from": made_from}
    for key, value in made_from.items():
        if before["made_from"][key] != value:
            raise D3Error(f"{folder}: was trained from another {key}; start anew with --fresh (the "
                          "old runs are kept aside)")
    if before.get("is_finished"):
        _say(stream, f"{run:<10}finished before, reused")
        return
    folder.mkdir(parents=True, exist_ok=True)
    _write(marker, {"made_from": made_from, "is_finished": False})
    latest = folder / "latest_checkpointed_iteration.txt"
    if latest.exists():
        _say(stream, f"{run:<10}continues from its checkpoint at step {_read(latest).strip()}")
    progress = Progress(run, folder / "d3", stream)
    try:
        train(arguments(demo, run, corpus), log=demo.log(run), num_processes=demo.num_processes,
              poll=progress.poll)
    except BaseException:
        progress.abandon()
        raise
    progress.finish()
    _write(marker, {"made_from": made_from, "is_finished": True})


def _require_domains(config: Path, corpus: DemoCorpus) -> None:
    """A Python with fewer packages has less text: say so before Megatron misses a file."""
    known = [domain.name for domain in corpus.domains]
    for name in load_config(config).domains:
        if name not in known:
            raise ConfigError(
                f"{config}: names the domain {name}, but this Python installation has too little "
                f"text of it (it has {', '.join(known)}); give a recipe without it by --recipe DIR")


def _flags(path: Path) -> list[str]:
    return shlex.split(_read(path), comments=True)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; the recipe of the demo is in "
                          "examples/demo/ of the repository, see --recipe") from error


def _copy(text: str, source: Path, target: Path) -> None:
    if target.exists() and _read(target) != text:
        raise ConfigError(f"{target}: differs from {source}, which it was copied from; start anew "
                          "with --fresh (the old runs are kept aside)")
    target.write_text(text, encoding="utf-8")


def _write(path: Path, value: dict[str, Any]) -> None:
    aside = path.with_name(path.name + ".tmp")
    with open(aside, "w", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def _say(stream: TextIO, text: str) -> None:
    print(text, file=stream, flush=True)
