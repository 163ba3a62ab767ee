"""The text of `--d3-dry-run`: what a run would do, without running it."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from megatron_d3.config import RunConfig
from megatron_d3.corpus.domain import Domain
from megatron_d3.errors import ConfigError
from megatron_d3.plan.decide import Decider
from megatron_d3.plan.header import RunHeader

# Positions of the first segment that are listed one by one.
_NUM_LISTED = 16


def preview(
    config: RunConfig, domains: Sequence[Domain], header: RunHeader, decider: Decider
) -> str:
    """Return the resolved configuration, the domain table and the first segment.

    Raises:
        ConfigError: the epoch limits end the run before its first step.
    """
    decided = decider.decide(decider.init())
    if decided is None:
        raise ConfigError(
            "d3.mix.max_epochs: a domain reaches its limit within the first round, and "
            "d3.mix.exhausted is stop: no step would be trained; raise max_epochs, or choose "
            "exhausted: redistribute or repeat")
    _, segment = decided
    lines = ["configuration:", json.dumps(config.to_dict(), indent=2), "", "domains:"]
    lines.append(f"  {'name':20} {'samples':>12} {'tokens':>15} {'held out':>10} {'weight':>8} "
                 f"{'epochs':>8}  fingerprint")
    for domain, weight in zip(domains, segment.weights, strict=True):
        num_valid = domain.valid.num_samples if domain.valid else 0
        epochs = weight * header.total_samples / domain.info.num_samples
        lines.append(
            f"  {domain.name:20} {domain.info.num_samples:12,} {domain.info.num_tokens:15,} "
            f"{num_valid:10,} {weight:8.4f} {epochs:8.3f}  {domain.fingerprint[:12]}")
    lines.append(f"\nfirst segment: positions {segment.start}-{segment.stop - 1} of "
                 f"{header.total_samples:,}, round {segment.round}, step {segment.step}")
    if config.order is not None:
        lines.append(
            f"  (one of the {config.order.params.window} global batches of the first window; which "
            "comes first is found when the model is there to be measured)")
    counts = np.bincount(segment.domains, minlength=len(domains))
    lines += [f"  {domain.name:20} {count:8,} samples"
              for domain, count in zip(domains, counts, strict=True)]
    lines.append(f"  {'position':>10}  domain, epoch, sample")
    for record, position in zip(segment.records[:_NUM_LISTED], range(segment.stop), strict=False):
        domain = domains[int(record["domain"])]
        epoch, sample = domain.locate(int(record["sample"]))
        lines.append(f"  {position:10,}  {domain.name}, {epoch}, {sample:,}")
    return "\n".join(lines)
