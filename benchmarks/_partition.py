"""A plan with 16,384 data-parallel ranks and no model: do they share every global batch exactly?

Each life of a run has a layout of its own: the state is handed over as a start-up broadcast does it,
every rank looks its positions up in the ring, and all of them together are counted. With windows the
order comes from a random permutation in D3's place.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.plan import decider as make_decider
from megatron_d3.errors import PlanError
from megatron_d3.mcore import collective
from megatron_d3.mcore.position_ring import PositionRing
from megatron_d3.plan.dealing import indices_of_rank
from megatron_d3.plan.decide import Decider
from megatron_d3.plan.draft import Draft, WindowRule
from megatron_d3.plan.keeper import PlanFollower
from megatron_d3.plan.state import DeciderState
from megatron_d3.types import StepSignals

NUM_DOMAINS = 1000
_NUM_WORKERS = 2


@dataclass(frozen=True)
class Life:
    """Steps under one layout."""

    dp_size: int
    micro_batch_size: int
    num_steps: int


@dataclass(frozen=True)
class Proof:
    """What was counted over all lives.

    Attributes:
        num_ranks: ranks looked at, each in each step.
        num_positions: positions that they trained on.
        num_missing, num_repeated: positions of a global batch that no rank, or more than one, had.
        num_repeated_samples: (domain, ordinal) pairs that came more than once in the whole run.
        is_one_plan: its hash is that of a run that was never interrupted.
        stock_ranks: ranks whose positions were compared with the stock sampler's, in the first life.
        num_differing: how many of them differed.
    """

    num_ranks: int
    num_positions: int
    num_missing: int
    num_repeated: int
    num_repeated_samples: int
    is_one_plan: bool
    stock_ranks: int
    num_differing: int


def random_order(draft: Draft) -> np.ndarray:
    """In the place of D3: a permutation that depends on where the window lies."""
    return np.random.default_rng([draft.round, draft.start]).permutation(draft.num_units)


def prove(
    size: int, lives: list[Life], *, window: int | None, sampler: Any, stock_ranks: int
) -> Proof:
    """Train the lives and count.

    Args:
        size: global batch.
        lives: one after the other; each must divide the batch.
        window: units ordered together, None for none.
        sampler: `MegatronPretrainingSampler`.
        stock_ranks: how many ranks to compare with it.
    """
    subject = _decider(size, window)
    plan = PlanFollower(subject, subject.init())
    step, missing, repeated, samples = 0, 0, 0, []
    ring = _ring(lives[0], 0, size)
    for life in lives:
        arrays = plan.state_arrays()  # what rank 0 sends to the others at the start
        decided = ring.read_range(step * size, ring.stop)
        plan = PlanFollower(subject, DeciderState.from_arrays(arrays))
        ring = _ring(life, step * size, size, decided)
        for _ in range(life.num_steps):
            until = (step + 1) * size + 2 * _NUM_WORKERS * life.micro_batch_size * life.dp_size
            for segment in plan.advance(until, random_order):
                ring.append(segment.start, segment.domains, segment.samples)
            counts, records = _train(ring, step, size, life)
            missing += int((counts == 0).sum())
            repeated += int((counts > 1).sum())
            samples.append(records)
            step += 1
            plan.observe(StepSignals(step, step * size, np.zeros(NUM_DOMAINS),
                                     np.zeros(NUM_DOMAINS, np.int64)))
    drawn = np.concatenate(samples)  # (n, 2)
    differing, compared = _against_stock(lives[0], size, sampler, stock_ranks)
    return Proof(
        num_ranks=max(life.dp_size for life in lives), num_positions=len(drawn),
        num_missing=missing, num_repeated=repeated,
        num_repeated_samples=len(drawn) - len(np.unique(drawn, axis=0)),
        is_one_plan=_alone(subject, plan), stock_ranks=compared, num_differing=differing)


def _decider(size: int, window: int | None) -> Decider:
    made = make_decider(NUM_DOMAINS, size, "static", 10**12)
    return Decider(
        domains=made.domains, table_ids=made.table_ids, mixer=made.mixer, cap=None,
        total_samples=made.total_samples, batch_schedule=made.batch_schedule, seed=1,
        windows=None if window is None else WindowRule(window))


def _ring(
    life: Life, start: int, size: int, decided: tuple[np.ndarray, np.ndarray] | None = None
) -> PositionRing:
    ring = PositionRing(start=start, capacity=24 * size + 4 * life.dp_size * life.micro_batch_size)
    if decided is not None:
        ring.append(start, decided[0].astype(np.int16), decided[1])
    return ring


def _train(ring: PositionRing, step: int, size: int, life: Life) -> tuple[np.ndarray, np.ndarray]:
    """Return how many ranks had each position of the batch, and (n, 2) domain and ordinal of what
    they had."""
    domains, ordinals = ring.read_range(step * size, (step + 1) * size)
    by_rank = np.empty((life.dp_size, size // life.dp_size), np.int64)  # filled: views keep much
    for rank in range(life.dp_size):
        by_rank[rank] = indices_of_rank(
            size, life.micro_batch_size, dp_size=life.dp_size, dp_rank=rank).ravel()
    own = by_rank.ravel()
    return np.bincount(own, minlength=size), np.stack((domains[own], ordinals[own]), axis=1)


def _alone(subject: Decider, plan: PlanFollower) -> bool:
    """Whether a run without interruption comes to the same hash."""
    alone = PlanFollower(subject, subject.init())
    alone.advance(plan.state.position, random_order)
    return alone.state.position == plan.state.position and alone.chain == plan.chain


def _against_stock(life: Life, size: int, sampler: Any, num_ranks: int) -> tuple[int, int]:
    """Return how many ranks differ from the stock sampler, of how many."""
    num_ranks = min(num_ranks, life.dp_size)
    drawn = np.random.default_rng(1).permutation(life.dp_size)[:num_ranks]
    ranks = sorted({0, life.dp_size - 1, *drawn.tolist()})
    differing = 0
    for rank in ranks:
        own = indices_of_rank(size, life.micro_batch_size, dp_size=life.dp_size, dp_rank=rank)
        stock = list(sampler(
            total_samples=2 * size, consumed_samples=size, micro_batch_size=life.micro_batch_size,
            data_parallel_rank=rank, data_parallel_size=life.dp_size))
        differing += stock != (size + own).tolist()
    return differing, len(ranks)


def stock_seconds(sampler: Any, size: int, dp_size: int) -> float:
    """CPU seconds that the stock sampler takes on one rank for one global batch."""
    start = time.process_time()
    list(sampler(total_samples=size, consumed_samples=0, micro_batch_size=1,
                 data_parallel_rank=dp_size - 1, data_parallel_size=dp_size))
    return time.process_time() - start


def odd_rank_is_noticed(num_ranks: int) -> bool:
    """Whether the sums of the agreement terms show one rank among so many with another plan."""
    ours = np.array(collective.agreement_terms(0xFEDCBA9876543210))
    other = np.array(collective.agreement_terms(0xFEDCBA9876543211))
    collective.require_agreement((num_ranks * ours).tolist(), num_ranks, what="all alike")
    try:
        sums = (num_ranks - 1) * ours + other
        collective.require_agreement(sums.tolist(), num_ranks, what="one is not")
    except PlanError:
        return True
    return False
