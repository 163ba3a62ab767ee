"""One document from a line of JSON to the tensor a model is fed: tokenize, order saw, plan, batch."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from megatron_d3.cli.main import main
from megatron_d3.corpus.domain import Domain, open_domain
from megatron_d3.plan.batch_schedule import BatchSchedule
from megatron_d3.plan.header import DomainRecord
from megatron_d3.plan.keeper import PlanKeeper
from tests.plan_helpers import header, make_decider

SEQ_LENGTH = 16
NUM_DOCUMENTS = 60


def text_of(number: int) -> str:
    return f"<document {number}> " + "word " * (number % 5)


def quality_of(number: int) -> float:
    return (number * 7 % NUM_DOCUMENTS) / NUM_DOCUMENTS


def saw(ranked: list[int]) -> list[int]:
    """3 sections, ratio 0.1, 3 layers, on 60 documents: two regions of 12 around 20 and 40."""
    out = ranked[:14]
    for start in (14, 34):
        region = ranked[start : start + 12]
        out += region[0::3] + region[1::3][::-1] + region[2::3]
        out += ranked[start + 12 : start + 20] if start == 14 else ranked[start + 12 :]
    return out


@pytest.fixture
def domain(tmp_path: Path) -> Domain:
    """What the two commands of the README make of a file with quality scores."""
    rows = [{"text": text_of(n), "meta": {"quality": quality_of(n)}} for n in range(NUM_DOCUMENTS)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    web, ordered = str(tmp_path / "web"), str(tmp_path / "web-saw")
    tokenize = ["--input", str(tmp_path / "data.jsonl"), "--output-prefix", web, "--append-eod",
                "--tokenizer-type", "bytes", "--score-key", "meta.quality"]  # fmt: skip
    assert main(["tokenize", *tokenize, "--workers", "1"]) == 0
    order = ["--prefix", web, "--output-prefix", ordered, "--preset", "saw-pretrain"]
    assert main(["order", *order, "--ascending"]) == 0
    return open_domain("web", paths=[ordered], valid_fraction=0.0, order="stored",
                       seq_length=SEQ_LENGTH, seed=1)  # fmt: skip


def expected_stream() -> tuple[np.ndarray, list[int]]:
    """All tokens in the order of training, and where document 23 begins."""
    ranked = sorted(range(NUM_DOCUMENTS), key=quality_of)
    contents = [(n, [*text_of(n).encode(), 0]) for n in saw(ranked)]
    tokens = np.concatenate([content for _, content in contents])
    place = [number for number, _ in contents].index(23)
    return tokens, [sum(len(content) for _, content in contents[:place]), place]


def plan(domain: Domain, directory: Path) -> np.ndarray:
    """Plan one epoch; return its (domain, ordinal) records."""
    size = domain.info.num_samples
    record = DomainRecord("web", domain.fingerprint, SEQ_LENGTH, 1, size, domain.info.num_tokens)
    head = header(total=size, mix="1.0", domains=(record,), seq_length=SEQ_LENGTH,
                  batch_schedule=BatchSchedule.constant(1))  # fmt: skip
    keeper = PlanKeeper.open(directory, head, make_decider, iteration=0, consumed=0,
                             mode="strict", snapshot_every=4)  # fmt: skip
    keeper.advance(size)
    records = keeper.positions(0, size)
    keeper.close()
    return records


def test_a_document_is_trained_on_where_its_score_puts_it(domain, tmp_path):
    tokens, (begin, place) = expected_stream()
    records = plan(domain, tmp_path / "plan")
    samples = [domain.train_tokens(ordinal) for _, ordinal in records.tolist()]
    seen = np.concatenate([sample[:-1] for sample in samples])
    assert np.array_equal(seen, tokens[: len(seen)])
    content = bytes(seen[begin : begin + len(text_of(23))].astype(np.uint8))
    assert content.decode() == text_of(23)
    assert quality_of(23) * NUM_DOCUMENTS == 41  # its rank; inside the second region of SAW
    assert place == 39  # on the way down: after rank 44, before rank 38


@pytest.mark.mcore
@pytest.mark.filterwarnings("ignore")  # importing Megatron and torch warns
@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")
def test_the_batch_holds_the_document(domain, tmp_path):
    from torch.utils.data import DataLoader

    from megatron_d3.mcore.datasets import PlannedDataset, SampleMaker
    from megatron_d3.mcore.position_ring import PositionRing

    records = plan(domain, tmp_path / "plan")
    size = len(records)
    ring = PositionRing(start=0, capacity=size)
    ring.append(0, records["domain"], records["sample"])
    maker = SampleMaker(eod=0, pad=-1, reset_position_ids=False, reset_attention_mask=False,
                        eod_mask_loss=True, create_attention_mask=False)  # fmt: skip
    loader = DataLoader(PlannedDataset(ring, [domain], maker, size), batch_size=4)
    batches = list(loader)
    tokens, (begin, _) = expected_stream()
    seen = np.concatenate([batch["tokens"].numpy().ravel() for batch in batches])
    labels = np.concatenate([batch["labels"].numpy().ravel() for batch in batches])
    mask = np.concatenate([batch["loss_mask"].numpy().ravel() for batch in batches])
    assert np.array_equal(seen, tokens[: len(seen)])
    assert np.array_equal(labels, tokens[1 : len(seen) + 1])
    assert np.array_equal(mask == 0, seen == 0)  # no loss behind the end of a document
    assert bytes(seen[begin : begin + 13].astype(np.uint8)) == b"<document 23>"
