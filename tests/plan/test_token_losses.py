"""Token losses on disk: what is written is read, and only by runs that draw the same samples."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_d3.errors import ConfigError, PlanError
from megatron_d3.plan.batch_schedule import BatchSchedule
from megatron_d3.plan.header import DomainRecord, RunHeader
from megatron_d3.plan.token_losses import HEADER, TokenLosses, TokenLossWriter


def header() -> RunHeader:
    domains = tuple(
        DomainRecord(name=name, fingerprint=name * 4, seq_length=2, seed=7, num_samples=5,
                     num_tokens=10) for name in "ab")
    return RunHeader(
        seq_length=2, seed=7, tokenizer="t", total_samples=4,
        batch_schedule=BatchSchedule.constant(2), domains=domains, config={}, versions={})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    writer = TokenLossWriter(tmp_path / "losses", header(), [2, 0])
    writer.create()
    writer.write(0, 1, np.array([1.5, 2.5]))
    writer.flush()
    writer.publish(reference="somewhere")
    return tmp_path / "losses"


def test_rows_are_found_by_domain_and_draw(folder: Path) -> None:
    losses = TokenLosses(folder, header())
    assert losses.read(0, 1).tolist() == [1.5, 2.5]
    assert losses.read(0, 0).tolist() == [0.0, 0.0]
    assert sorted(path.name for path in folder.iterdir()) == ["0000.f32", "0001.f32", HEADER]
    with pytest.raises(PlanError, match="holds 0 draws of b, this run needs draw 0"):
        losses.read(1, 0)


def test_nothing_is_there_before_it_is_complete(tmp_path: Path) -> None:
    writer = TokenLossWriter(tmp_path / "losses", header(), [2, 0])
    writer.create()
    with pytest.raises(ConfigError, match=r"d3.mix.losses: no stored losses in .*losses"):
        TokenLosses(tmp_path / "losses", header())
    writer.create()  # another attempt


def test_finished_losses_are_not_overwritten(folder: Path) -> None:
    with pytest.raises(PlanError, match="losses: exists; remove it, or give another folder"):
        TokenLossWriter(folder, header(), [2, 0]).create()


@pytest.mark.parametrize(("change", "what"), [
    ({"seq_length": 4}, "seq_length"), ({"seed": 8}, "seed"), ({"tokenizer": "u"}, "tokenizer"),
    ({"domains": header().domains[::-1]}, "domains"),
    ({"domains": (replace(header().domains[0], fingerprint="x"), header().domains[1])}, "domains"),
])
def test_other_samples_are_refused(folder: Path, change: dict, what: str) -> None:
    with pytest.raises(ConfigError, match=f"was made with another {what}"):
        TokenLosses(folder, replace(header(), **change))


def test_a_longer_run_is_not_another_one(folder: Path) -> None:
    assert TokenLosses(folder, replace(header(), total_samples=8)).read(0, 1).tolist() == [1.5, 2.5]


def test_damaged_headers_are_refused(folder: Path) -> None:
    content = json.loads((folder / HEADER).read_text())
    (folder / HEADER).write_text(json.dumps(content | {"version": 2}))
    with pytest.raises(ConfigError, match="has version 2, this Megatron-D3 reads 1"):
        TokenLosses(folder, header())
    (folder / HEADER).write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        TokenLosses(folder, header())
