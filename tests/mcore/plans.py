"""Corpora, configurations and comparisons for planned runs in tests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from megatron_d3.config import load_config
from megatron_d3.plan.reader import PlanReader
from megatron_d3.planning import open_domains
from tests.corpus_helpers import documents, write_corpus
from tests.mcore.launcher import TINY

EOD = 255
SIZES = {"web": 300, "code": 120, "wiki": 60, "math": 50}  # documents
BATCH = ["--micro-batch-size", "2", "--global-batch-size", "8"]
SEQ_LENGTH = 32
SEED = 1234  # Megatron's default
# The files that an interrupted run must leave byte for byte as an uninterrupted one does.
PLAN_FILES = ("plan.json", "positions.bin", "rounds.jsonl", "ledger.jsonl", "evals.jsonl")


def make_corpora(folder: Path) -> None:
    """Write four domains of different sizes, each with its own range of token ids."""
    for seed, (name, num_documents) in enumerate(SIZES.items()):
        write_corpus(folder / name, documents(
            seed=seed, num_documents=num_documents, max_length=60, vocab_size=50 * (seed + 2),
            eod=EOD))


def write_config(path: Path, domains: Sequence[str] = ("web", "code", "wiki"), **changes: Any) -> Path:
    """Write a run.yaml beside the corpora."""
    config: dict[str, Any] = {
        "domains": {name: name for name in domains},
        "valid_fraction": 0.1,
        "mix": {"type": "static"},
    }
    config.update(changes)
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


def flags(config: Path, save: Path, *, steps: int, save_interval: int = 100) -> list[str]:
    """Flags of a small planned run of a fixed schedule, whatever `steps` it stops at."""
    return [*TINY, *BATCH, "--train-iters", str(steps), "--lr-decay-iters", "100",
            "--override-opt_param-scheduler",
            "--d3-config", str(config), "--save", str(save), "--load", str(save),
            "--save-interval", str(save_interval)]


def expected_samples(config: Path, plan_dir: Path) -> list[str]:
    """Token hashes of every decided position, cut from the corpora without Megatron."""
    run = load_config(config)
    domains = {d.name: d for d in open_domains(run, seq_length=SEQ_LENGTH, seed=SEED)}
    reader = PlanReader(plan_dir)
    names = [record.name for record in reader.plan.table]
    hashes = []
    for record in reader.stored(reader.first_position, reader.frontier):
        tokens = domains[names[record["domain"]]].train_tokens(int(record["sample"]))
        data = tokens[:-1].tobytes() + tokens[1:].tobytes()
        hashes.append(hashlib.blake2b(data, digest_size=8).hexdigest())
    return hashes


def ordinals(plan_dir: Path) -> dict[str, list[int]]:
    """The draws of each table entry, in the order of positions."""
    reader = PlanReader(plan_dir)
    records = np.array(reader.stored(reader.first_position, reader.frontier))
    return {
        f"{i}:{entry.name}": records["sample"][records["domain"] == i].tolist()
        for i, entry in enumerate(reader.plan.table)}


def ledger(plan_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (plan_dir / "ledger.jsonl").read_text().splitlines()]


def plan_bytes(plan_dir: Path) -> dict[str, bytes]:
    return {name: (plan_dir / name).read_bytes() for name in PLAN_FILES
            if (plan_dir / name).exists()}


def flat(samples: list[list[str]]) -> list[str]:
    return [sample for step in samples for sample in step]


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Every scalar that TensorBoard holds, by tag and iteration."""
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator")
    events = event_accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)}
            for tag in events.Tags()["scalars"]}
