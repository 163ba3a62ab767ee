"""The lease of a planned run: rank 0 holds it, one rank of every other node watches it.

A rank whose life is over leaves at once, from a thread, since the main thread may hang in a
collective whose peer is gone.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from megatron_d3.mcore import collective
from megatron_d3.plan.lease import Lease, watch
from megatron_d3.plan.life import Life

_REFUSED = 1


def claim(plan_dir: Path) -> Lease:
    """Become the writer of a plan, on rank 0, and stay it until the process ends.

    Raises:
        PlanError: another job writes the plan, or its place cannot be written.
    """
    lease = Lease.claim(plan_dir, Life.here(), say=lambda text: print(f" {text}", flush=True))
    lease.watch(_leave)
    return lease


def follow(plan_dir: Path, lease: Lease | None) -> None:
    """Let one rank of each other node leave once the life of rank 0 is over. A collective.

    Args:
        plan_dir: as this node sees it.
        lease: rank 0's; None on the others.
    """
    owner = collective.on_rank_0(lambda: None if lease is None else lease.life)
    if owner is not None and lease is None and int(os.environ.get("LOCAL_RANK", "0")) == 0:
        watch(plan_dir, owner, _leave)


def _leave(reason: str) -> None:
    print(f"megatron_d3.pretrain: rank {os.environ.get('RANK', '0')}: PlanError: {reason}",
          file=sys.stderr, flush=True)
    os._exit(_REFUSED)
