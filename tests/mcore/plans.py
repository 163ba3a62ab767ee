"""Corpora and configurations for planned runs in tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.corpus_helpers import documents, write_corpus

EOD = 255
DOMAINS = ("web", "code", "wiki")
SIZES = {"web": 300, "code": 120, "wiki": 60}  # documents


def make_corpora(folder: Path) -> None:
    """Write three domains of different sizes and their own vocabulary ranges."""
    for seed, name in enumerate(DOMAINS):
        write_corpus(folder / name, documents(
            seed=seed, num_documents=SIZES[name], max_length=60, vocab_size=60 * (seed + 2),
            eod=EOD))


def write_config(path: Path, **changes: Any) -> Path:
    """Write a run.yaml beside the corpora."""
    config: dict[str, Any] = {
        "domains": {name: name for name in DOMAINS},
        "valid_fraction": 0.1,
        "mix": {"type": "static", "weights": {"web": 0.5, "code": 0.3, "wiki": 0.2}},
    }
    config.update(changes)
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path
