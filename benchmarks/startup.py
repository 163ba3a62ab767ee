"""Time and memory to the first sample: opening a plan against building Megatron's indexes.

Each side runs in a process of its own, after its imports. Corpora are synthetic: real `.idx` files
over sparse `.bin` files, so that 10^7 documents cost index bytes only.

    python -m benchmarks.startup --documents 1e6 1e7 --domains 1 100 1000
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks._table import print_machine, print_table

SEQ_LENGTH = 2048
MEAN_LENGTH = 500  # tokens a document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=float, nargs="+", default=[1e6, 1e7])
    parser.add_argument("--domains", type=int, nargs="+", default=[1, 100, 1000])
    parser.add_argument("--side", choices=("planned", "megatron"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps((planned if options.side == "planned" else megatron)(options.folder)))
        return
    print_machine()
    rows = []
    for num_documents in map(int, options.documents):
        for num_domains in options.domains:
            with tempfile.TemporaryDirectory() as folder:
                make(Path(folder), num_documents, num_domains)
                ours, theirs = (measure(side, Path(folder)) for side in ("planned", "megatron"))
            rows.append((
                f"{num_documents:,}", f"{num_domains:,}",
                f"{ours['seconds']:.3f}", f"{theirs['seconds']:.2f}",
                f"{theirs['seconds'] / ours['seconds']:.0f}x",
                f"{ours['megabytes']:.0f}", f"{theirs['megabytes']:.0f}"))
    print_table(("documents", "domains", "planned s", "Megatron s", "ratio", "planned MB",
                 "Megatron MB"), rows)
    print("s, MB: from opening the corpora to the first sample; growth of peak resident memory")


def make(folder: Path, num_documents: int, num_domains: int) -> None:
    """Write `num_domains` corpora that together hold `num_documents` documents."""
    rng = np.random.default_rng(0)
    for i in range(num_domains):
        n = num_documents // num_domains
        lengths = rng.integers(1, 2 * MEAN_LENGTH, n).astype(np.int32)
        ends = np.cumsum(lengths, dtype=np.int64) * 2
        with (folder / f"d{i}.idx").open("wb") as file:
            file.write(b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + b"\x08")
            file.write(n.to_bytes(8, "little") + (n + 1).to_bytes(8, "little"))
            for array in (lengths, np.concatenate(([0], ends[:-1])), np.arange(n + 1)):
                file.write(array.tobytes())
        with (folder / f"d{i}.bin").open("wb") as file:
            file.truncate(int(ends[-1]))


def measure(side: str, folder: Path) -> dict[str, float]:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.startup", "--side", side, "--folder",
         str(folder)], check=True, capture_output=True, text=True)
    answer: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return answer


def prefixes(folder: Path) -> dict[str, str]:
    return {path.stem: str(path.with_suffix("")) for path in sorted(folder.glob("*.idx"))}


def planned(folder: Path) -> dict[str, float]:
    from megatron_d3.config import parse_config
    from megatron_d3.plan.batch_schedule import BatchSchedule
    from megatron_d3.plan.keeper import PlanKeeper
    from megatron_d3.planning import decider_factory, open_domains, plan_header

    start, memory = time.perf_counter(), peak_megabytes()
    config = parse_config({"domains": prefixes(folder), "mix": {"type": "natural"}}, folder=folder)
    domains = open_domains(config, seq_length=SEQ_LENGTH, seed=1)
    total = sum(domain.info.num_samples for domain in domains)
    header = plan_header(
        config, domains, seq_length=SEQ_LENGTH, seed=1, tokenizer="t", total_samples=total,
        batch_schedule=BatchSchedule.constant(1024))
    keeper = PlanKeeper.open(folder / "plan", header, decider_factory())
    record = keeper.advance(1)[0].records[0]
    tokens = domains[record["domain"]].train_tokens(int(record["sample"]))
    assert len(tokens) == SEQ_LENGTH + 1
    return {"seconds": time.perf_counter() - start, "megabytes": peak_megabytes() - memory}


def megatron(folder: Path) -> dict[str, float]:
    import os

    os.environ["RANK"] = "0"
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

    start, memory = time.perf_counter(), peak_megabytes()
    config = GPTDatasetConfig(
        random_seed=1, sequence_length=SEQ_LENGTH, tokenizer=NullTokenizer(65000),
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
        create_attention_mask=False, path_to_cache=str(folder / "cache"), split="100,0,0",
        blend=(list(prefixes(folder).values()), None))
    train, _, _ = BlendedMegatronDatasetBuilder(
        GPTDataset, [None, None, None], lambda: True, config).build()
    assert train is not None
    assert len(train[0]["tokens"]) == SEQ_LENGTH
    return {"seconds": time.perf_counter() - start, "megabytes": peak_megabytes() - memory}


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
