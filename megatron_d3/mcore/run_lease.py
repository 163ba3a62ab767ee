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


def claim(plan_dir: Path) -> Lease | None:
    """Become the writers of a plan, and stay it until the processes end. A collective.

    Args:
        plan_dir: as this node sees it.

    Returns:
        The lease on rank 0, None elsewhere.

    Raises:
        PlanError: another job writes the plan, or its place cannot be written.
        EchoError: the same on the other ranks.
    """
    held: list[Lease] = []

    def claim_on_rank_0() -> Life:
        say = lambda text: print(f" {text}", flush=True)  # noqa: E731
        held.append(Lease.claim(plan_dir, Life.here(), say=say))
        return held[0].life

    owner = collective.on_rank_0(claim_on_rank_0)
    if held:
        held[0].watch(_leave)
        return held[0]
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        watch(plan_dir, owner, _leave)
    return None


def _leave(reason: str) -> None:
    print(f"megatron_d3.pretrain: rank {os.environ.get('RANK', '0')}: PlanError: {reason}",
          file=sys.stderr, flush=True)
    os._exit(_REFUSED)
