"""What a step of the plan costs one rank, and how many bytes it moves: measured, no training.

Times are CPU seconds of this process (`time.process_time`), so that other work on the machine counts
less; waiting for a disk does not count.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_d3.influence.estimators import estimate
from megatron_d3.influence.settings import D3Config
from megatron_d3.influence.sketch import make_sketch
from megatron_d3.influence.source import StepModel
from megatron_d3.mcore.collective import NUM_AGREEMENT_TERMS, agreement_terms
from megatron_d3.mcore.position_ring import PositionRing
from megatron_d3.mcore.tally import DomainTally
from megatron_d3.mix import Schedule, Static
from megatron_d3.plan.ahead import targets_ahead
from megatron_d3.plan.batch_schedule import BatchSchedule
from megatron_d3.plan.decide import Decider
from megatron_d3.plan.header import DomainRecord, RunHeader
from megatron_d3.plan.keeper import PlanFollower, PlanKeeper
from megatron_d3.plan.reader import LEDGER, POSITIONS, ROUNDS
from megatron_d3.plan.rows import last_line
from megatron_d3.types import StepSignals
from tests.influence.plain_source import PlainSource

TOKENS = 4096
"""Of a sample, in the rows of the ledger."""
_MIN_SECONDS = 0.3


@dataclass(frozen=True)
class Step:
    """Medians over the steps of a run on rank 0.

    Attributes:
        decide: CPU seconds of the decision, its hash included.
        rest: of the ring, the fingerprint and the observation, as on every rank.
        write: of the rows and positions, on rank 0 only.
        ledger, rounds, positions: bytes a step, on rank 0; of the last step's rows.
        snapshot: bytes of a stored state, every 100 rounds.
        broadcasts: bytes sent to each rank at a resume, by number of data-parallel ranks.
    """

    decide: float
    rest: float
    write: float
    ledger: int
    rounds: int
    positions: int
    snapshot: int
    broadcasts: dict[int, int]


def reduced_bytes(num_domains: int, *, has_reference: bool = False) -> int:
    """Bytes of the all-reduce of a step: loss sums and token counts, with a reference the excess,
    the sum of the positions, and the terms of the agreement; float64."""
    return 8 * ((3 if has_reference else 2) * num_domains + 1 + NUM_AGREEMENT_TERMS)


def header_of(num_domains: int, size: int) -> RunHeader:
    """A run of domains of unequal size."""
    domains = tuple(
        DomainRecord(f"domain-{i:05d}", "f" * 16, TOKENS, 1, 10**6 * (1 + i % 97), 10**9)
        for i in range(num_domains))
    return RunHeader(
        seq_length=TOKENS, seed=1, tokenizer="t", total_samples=10**12,
        batch_schedule=BatchSchedule.constant(size), config={}, versions={}, domains=domains,
        read_ahead_steps=0)


def decider_of(head: RunHeader, mixer: str, sampling: Any) -> Decider:
    """Weights in proportion 1 to 97: `static`, or `schedule`, which moves all of them every step.

    (ODM would not do: with so many domains its exploration keeps it uniform for K ln K steps.)
    """
    infos = [record.info for record in head.domains]
    uneven = {d.name: float(1 + i % 97) for i, d in enumerate(infos)}
    made: Any
    if mixer == "static":
        made = Static(Static.Config(uneven), infos, total_samples=head.total_samples)
    else:
        uniform = dict.fromkeys(uneven, 1.0)
        made = Schedule(Schedule.Config(knots=((0, uneven), (10**6, uniform)),
                                        interpolation="linear"),
                        infos, total_samples=head.total_samples)
    return Decider(
        domains=infos, table_ids=range(len(infos)), mixer=made, cap=None,
        total_samples=head.total_samples, batch_schedule=head.batch_schedule, seed=1,
        sampling=sampling)


def measure_step(
    num_domains: int, size: int, *, mixer: str, sampling: str, ranks: Sequence[int]
) -> Step:
    """Run the steps of a plan as `mcore/planned_run.py` does on rank 0."""
    head = header_of(num_domains, size)
    subject = decider_of(head, mixer, sampling)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "d3"
        keeper = PlanKeeper.open(directory, head, lambda h, ids: subject)
        follower = PlanFollower(subject, subject.init())
        ring = PositionRing(start=0, capacity=3 * size)
        times: list[tuple[float, float, float]] = []
        # As many steps as lie ahead with two workers a rank, for the broadcast's size.
        min_steps = 3 if size > max(ranks, default=0) else 6
        while len(times) < min_steps or sum(map(sum, times)) < _MIN_SECONDS:
            times.append(_step(keeper, follower, ring, size))
        assert keeper.fingerprint == follower.fingerprint
        ledger, rounds = (len(_last(directory / name)) for name in (LEDGER, ROUNDS))
        positions = (directory / POSITIONS).stat().st_size // len(times)
        keeper.store.snapshot(keeper.state)
        (stored,) = (path.stat().st_size for path in (directory / "state").glob("*.npz"))
        broadcasts = {p: _broadcast_bytes(keeper, size, p) for p in ranks}
        keeper.close()
    decide, rest, write = (statistics.median(part) for part in zip(*times, strict=True))
    return Step(decide, rest, write, ledger, rounds, positions, stored, broadcasts)


def _step(
    keeper: PlanKeeper, follower: PlanFollower, ring: PositionRing, size: int
) -> tuple[float, float, float]:
    """CPU seconds of decision, rest and writing; the writing is what the keeper takes longer."""
    until = keeper.state.position + size
    num_domains = len(keeper.decider.domains)
    decided = _timed(lambda: follower.advance(until))
    kept = _timed(lambda: keeper.store.append_segments(decided[1], iteration=keeper.state.iteration))
    keeper.state = follower.state
    (segment,) = decided[1]
    counts = np.bincount(segment.domains, minlength=num_domains)
    signals = StepSignals(
        follower.state.iteration + 1, until, counts * TOKENS * _losses(num_domains, until),
        counts * TOKENS)
    ids = np.arange(num_domains, dtype=np.int16)

    def rest() -> None:
        ring.append(segment.start, ids[segment.domains], segment.samples)
        agreement_terms(follower.fingerprint)
        follower.observe(signals)

    done = _timed(rest)
    written = _timed(lambda: keeper.store.append_ledger(signals))
    keeper.state = follower.state
    return decided[0], done[0], kept[0] + written[0]


def _losses(num_domains: int, position: int) -> np.ndarray:
    """(K,) mean losses, nats, that no two steps or domains share: all digits are written."""
    losses: np.ndarray = np.random.default_rng(position).uniform(2, 4, num_domains)
    return losses


def _last(path: Path) -> bytes:
    found = last_line(path)
    assert found is not None
    return found[0]


def _timed[T](call: Callable[[], T]) -> tuple[float, T]:
    start = time.process_time()
    result = call()
    return time.process_time() - start, result


def _broadcast_bytes(keeper: PlanKeeper, size: int, num_ranks: int) -> int:
    """What `collective.on_rank_0` sends at a resume with two DataLoader workers a rank, pickled.

    Decided ahead are the next global batch and what all workers fetch, as far as the run goes.
    """
    frontier = keeper.state.position
    consumed = max(0, frontier - size - 2 * 2 * num_ranks)
    targets = targets_ahead(
        keeper.store.directory, keeper.store.plan.generations[-1].header.names,
        consumed=consumed, frontier=frontier)
    decided = np.array(keeper.positions(consumed, frontier))
    return len(pickle.dumps([(keeper.state_arrays(), decided, 0, targets), None]))


def tally_seconds(num_domains: int) -> float:
    """CPU seconds to add one micro-batch of one sample to the tally, on the CPU."""
    tally = DomainTally(num_domains)
    tally.start_step(10**9)
    losses, mask = torch.ones(1, TOKENS), torch.ones(1, TOKENS)
    origin = torch.zeros(1, 2, dtype=torch.int64)
    return min(_timed(lambda: tally.add(losses, mask, origin, is_training=True))[0]
               for _ in range(20))


def log_seconds(num_domains: int) -> tuple[float, float, float]:
    """CPU seconds of the metrics of a step without output, of one line in the log (on every rank),
    and of the points of one step in TensorBoard (on the last rank, if it is asked for)."""
    from megatron_d3.mcore.metrics import DomainMetrics

    names = [f"domain-{i:05d}" for i in range(num_domains)]
    ones, tokens = np.ones(num_domains), np.full(num_domains, TOKENS)
    found = []
    for interval in (10**9, 1):
        metrics = DomainMetrics(names, log_interval=interval, tensorboard_interval=10**9)
        call = partial(metrics.trained, 7, loss_sums=ones, num_tokens=tokens, weights=ones,
                       shares=ones)
        with contextlib.redirect_stdout(io.StringIO()):
            found.append(min(_timed(call)[0] for _ in range(5)))
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return found[0], found[1], float("nan")
    with tempfile.TemporaryDirectory() as folder, SummaryWriter(folder) as writer:
        seconds = _timed(lambda: [writer.add_scalar(f"d3/loss/{name}", 1.0, 1)
                                  for name in names[:2000]])[0]
    return found[0], found[1], 3 * num_domains * seconds / min(num_domains, 2000)


@dataclass
class Exchange:
    """What one rank gives into collectives in a window of D3.

    Attributes:
        calls: all-reduces over all ranks.
        num_bytes: their bytes together.
        vectors: vectors as large as the rank's gradients, summed over data-parallel ranks.
        gradients: forward and backward passes over a unit's probe sequences, for each unit.
    """

    calls: int = 0
    num_bytes: int = 0
    vectors: int = 0
    gradients: float = 0.0


class _Counting(PlainSource):
    exchange: Exchange

    def all_sum(self, array: np.ndarray) -> np.ndarray:
        self.exchange.calls += 1
        self.exchange.num_bytes += array.size * 8
        return super().all_sum(array)

    def sum_over_groups(self, vector: Any) -> None:
        self.exchange.vectors += 1
        super().sum_over_groups(vector)


def window_exchange(settings: D3Config) -> Exchange:
    """Count the collectives of an estimator on a small model; they do not depend on the model."""
    model = torch.nn.Sequential(torch.nn.Linear(80, 80), torch.nn.Tanh(), torch.nn.Linear(80, 1))

    def task(
        module: torch.nn.Module, unit: int, start: int, stop: int, sample_key: int | None
    ) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(1000 * unit + start)
        x = torch.randn(stop - start, 80, generator=generator)
        return (module(x) - x[:, :1]).square().sum(), stop - start

    source = _Counting(model, task, num_units=settings.window,
                       num_sequences=settings.probe_sequences)
    source.exchange = Exchange()
    influence = estimate(
        source, make_sketch(settings.sketch, source.layout), settings, StepModel(1e-3))
    return replace(source.exchange, gradients=influence.num_gradients / settings.window)
