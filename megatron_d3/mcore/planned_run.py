"""A planned run on one rank: opens the plan, feeds the datasets, hooks into each step.

    provide          rank 0 opens or resumes the plan, the others follow its state
    before_step      decide rounds until the step and the workers' read-ahead are covered
    (stock step)     the forward step tallies losses per domain
    after_step       one all-reduce: losses, counts, and the proof that all ranks agree
    after_evaluation the same for the held-out samples

Every rank runs the same decider on the same signals, so no segment is ever sent; rank 0 also writes
the plan directory.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from megatron.core import mpu
from megatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    get_num_microbatches,
)
from megatron.training import get_args, print_rank_0

from megatron_d3.corpus.domain import Domain
from megatron_d3.errors import PlanError
from megatron_d3.mcore import collective, run_lease
from megatron_d3.mcore.args import RunArgs
from megatron_d3.mcore.datasets import HeldOutDataset, PlannedDataset, SampleMaker
from megatron_d3.mcore.metrics import DomainMetrics
from megatron_d3.mcore.position_ring import PositionRing
from megatron_d3.mcore.proxy import LocalBatch, ProxyStep
from megatron_d3.mcore.stock_data import is_built_on_this_rank
from megatron_d3.mcore.tally import DomainTally
from megatron_d3.mcore.window import StepClock, WindowOrderer
from megatron_d3.plan.ahead import Target, targets_ahead
from megatron_d3.plan.draft import Draft, stored_order
from megatron_d3.plan.header import RunHeader
from megatron_d3.plan.keeper import PlanFollower, PlanKeeper
from megatron_d3.plan.lease import Lease
from megatron_d3.plan.replay import DeciderFactory
from megatron_d3.plan.segment import Segment
from megatron_d3.types import StepSignals

# The plan's files are flushed to disk before a checkpoint, and at least this often.
_SYNC_SECONDS = 1.0


class PlannedRun:
    """The state of a planned run on this rank.

    Args:
        args: what was read of Megatron's arguments.
        domains: opened, in domain order.
        header: what the plan is made from.
        make_decider: builds the decider of a header.
        maker: makes the fields of a sample.
        proxy: DoReMi's loss, where this is a proxy run.
        orderer: finds the order of windows, where the run has any.
    """

    def __init__(
        self, args: RunArgs, domains: Sequence[Domain], *, header: RunHeader,
        make_decider: DeciderFactory, maker: SampleMaker, proxy: ProxyStep | None = None,
        orderer: WindowOrderer | None = None,
    ) -> None:
        self._args = args
        self._domains = domains
        self._header = header
        self._make_decider = make_decider
        self._maker = maker
        self.proxy = proxy
        self.orderer = orderer
        self.tally = DomainTally(len(domains), has_reference=proxy is not None)
        self._metrics = DomainMetrics(
            [domain.name for domain in domains], log_interval=args.log_interval,
            tensorboard_interval=args.tensorboard_log_interval)
        self._plan: PlanFollower | None = None  # on rank 0 a PlanKeeper
        self._lease: Lease | None = None  # on rank 0, while the plan is open
        self._ring: PositionRing | None = None
        self._upcoming: deque[Segment | Target] = deque()  # decided, not yet trained on
        self._read_ahead_steps: int | None = None  # known once the plan is open
        self._synced_at = 0.0
        self._has_stepped = False
        self._clock = StepClock()

    def claim(self) -> None:
        """On rank 0: become the writer of the plan, before anything of the run is read.

        Raises:
            PlanError: another job writes it, or its place cannot be written.
        """
        if not self._args.is_evaluation_only:
            self._lease = run_lease.claim(self._args.plan_dir)

    # --- data -----------------------------------------------------------------------------------

    def provide(
        self, num_samples: Sequence[int], vp_stage: int | None = None
    ) -> tuple[Any, Any, Any]:
        """Megatron's `train_valid_test_dataset_provider`, called once the checkpoint is loaded."""
        if self._plan is None:
            if self.proxy is not None:
                self.proxy.open()  # first: what cannot be loaded must not begin a plan
            self._open_plan()
        if not is_built_on_this_rank(vp_stage):
            return None, None, None
        train = None if self._args.is_evaluation_only else self._train_dataset()
        return train, self._held_out(num_samples[1]), None

    # Megatron: every rank calls the provider, not only those that read samples.
    provide.is_distributed = True  # type: ignore[attr-defined]

    def _train_dataset(self) -> PlannedDataset:
        return PlannedDataset(self.ring, self._domains, self._maker, self._args.total_samples)

    def _held_out(self, num_samples: int) -> HeldOutDataset | None:
        if num_samples == 0:
            return None
        return HeldOutDataset(
            self._domains, self._maker, num_samples=num_samples,
            samples_per_evaluation=self._args.eval_samples)

    @property
    def plan(self) -> PlanFollower:
        """The plan; `provide` has opened it."""
        assert self._plan is not None
        return self._plan

    @property
    def ring(self) -> PositionRing:
        """The decided positions around the present."""
        assert self._ring is not None
        return self._ring

    def _open_plan(self) -> None:
        """Open or resume the plan at the loaded checkpoint and decide the first positions."""
        args = get_args()
        iteration, consumed = args.iteration, args.consumed_train_samples
        self.tally.allocate(torch.device("cuda", torch.cuda.current_device()))
        if self._args.is_evaluation_only:
            # --skip-train looks at a checkpoint, perhaps of a run that trains at this moment: its
            # plan is neither needed nor touched.
            decider = self._make_decider(self._header, tuple(range(len(self._domains))))
            self._plan = PlanFollower(
                decider, decider.init(position=consumed, iteration=iteration))
            return
        run_lease.follow(self._args.plan_dir, self._lease)
        keepers: list[PlanKeeper] = []

        def open_plan() -> tuple[dict[str, np.ndarray], np.ndarray, int | None, list[Target]]:
            keeper = PlanKeeper.open(
                self._args.plan_dir, self._header, self._make_decider, iteration=iteration,
                consumed=consumed, mode=self._args.resume, copy_from=self._args.load_plan_dir)
            keeper.lease = self._lease
            keepers.append(keeper)
            # Copied: the file's memory map must not travel to other nodes.
            decided = np.array(keeper.positions(consumed, keeper.state.position))
            targets = targets_ahead(
                self._args.plan_dir, self._header.names, consumed=consumed,
                frontier=keeper.state.position)
            return keeper.state_arrays(), decided, keeper.read_ahead_steps, targets

        arrays, decided, self._read_ahead_steps, targets = collective.on_rank_0(open_plan)
        self._upcoming.extend(targets)
        if keepers:
            self._plan = keepers[0]
            for message in keepers[0].messages:
                print_rank_0(f" {message}")
        else:
            self._plan = PlanFollower.from_arrays(self._header, self._make_decider, arrays)
        self._ring = PositionRing(start=consumed, capacity=self._ring_capacity(len(decided)))
        self._append(consumed, decided)
        self._say_when_losses_act(iteration)
        self._advance(iteration, consumed)

    def _say_when_losses_act(self, iteration: int) -> None:
        if not self.plan.decider.mixer.is_online:
            return
        ahead = self._read_ahead_steps or 0
        if self.proxy is not None:
            print_rank_0(" d3: samples are uniform; the losses of step t act on the loss weights "
                         "alpha from step t + 1 on")
        else:
            print_rank_0(
                f" d3: the losses of step t act on the weights from step t + {ahead + 1} on "
                f"(read_ahead_steps {ahead})")
        if iteration > 0:
            print_rank_0(
                f" d3: resumed with data-parallel size {self._args.data_parallel_size} and "
                f"micro-batch size {self._args.micro_batch_size}: the same weights as before, digit "
                "for digit under the same layout, up to the order of float sums under another")

    def _ring_capacity(self, num_decided: int) -> int:
        """Enough for the positions from the present to the frontier, whatever the next round."""
        largest = max(size for _, size in self._args.batch_schedule.steps)
        num_batches = 2 + len(self._args.iterations_to_skip) + self.plan.decider.steps_at_once
        num_batches += self._read_ahead_steps or 0
        return num_decided + self._args.read_ahead + num_batches * largest

    def _append(self, start: int, records: np.ndarray) -> None:
        ids = np.asarray(self.plan.decider.table_ids)  # (K,)
        number_of = np.full(ids.max() + 1, -1, dtype=np.int16)
        number_of[ids] = np.arange(len(ids))
        self.ring.append(start, number_of[records["domain"]], records["sample"])

    # --- steps ----------------------------------------------------------------------------------

    @property
    def can_save(self) -> bool:
        """Whether Megatron has a place for a checkpoint, and this process something to save."""
        return self._args.has_checkpoints and self._has_stepped

    def before_step(self, iteration: int) -> bool:
        """Decide what the step and the DataLoader workers need; False if the plan ends here."""
        consumed = get_args().consumed_train_samples
        self._note_skipped(iteration)
        if get_current_global_batch_size() != self._batch_size(consumed):
            raise PlanError(
                f"step {iteration + 1}: Megatron trains a global batch of "
                f"{get_current_global_batch_size()}, planned were {self._batch_size(consumed)}")
        self._advance(iteration, consumed)
        if self.ring.stop < consumed + self._batch_size(consumed):
            print_rank_0(
                f" d3: the plan ends at position {self.ring.stop}: a domain has reached "
                "d3.mix.max_epochs and d3.mix.exhausted is stop; leaving")
            return False
        self._has_stepped = True
        self.tally.start_step(get_num_microbatches())
        if self.proxy is not None:
            self._start_proxy_step(self.proxy, consumed)
        self._clock.start()
        return True

    def _start_proxy_step(self, proxy: ProxyStep, consumed: int) -> None:
        batch = LocalBatch.of_step(
            self.ring, consumed, self._batch_size(consumed),
            micro_batch_size=self._args.micro_batch_size, num_domains=len(self._domains))
        is_reader = is_built_on_this_rank()
        proxy.start_step(
            batch, self._train_dataset() if is_reader else None,
            alpha=proxy.mixer.loss_weights(self.plan.state.mixer),
            sampling_weights=self._weights_at(consumed))

    def _note_skipped(self, iteration: int) -> None:
        """Give the ledger a row for each iteration that Megatron passed over without a step."""
        num_domains = len(self._domains)
        while (state := self.plan.state).iteration < iteration:
            self.plan.observe(StepSignals(
                iteration=state.iteration + 1,
                consumed=state.consumed + self._batch_size(state.consumed),
                loss_sums=np.zeros(num_domains), num_tokens=np.zeros(num_domains, np.int64),
                is_skipped=True))

    def _batch_size(self, consumed: int) -> int:
        return self._args.batch_schedule.size_at(consumed)

    def _advance(self, iteration: int, consumed: int) -> None:
        # Megatron passes over skipped iterations without calling the hook.
        num_batches = 1
        while iteration + num_batches + 1 in self._args.iterations_to_skip:
            num_batches += 1
        until = self._args.batch_schedule.stop_after(
            consumed, num_batches + (self._read_ahead_steps or 0))
        if self._read_ahead_steps is None:
            until += self._args.read_ahead
        # NOTE: where losses decide, `until` follows from the plan alone, not from this life's
        # workers and ranks: the same step sees the same losses in every life.
        for segment in self.plan.advance(until, self._order):
            self._append(segment.start, segment.records)
            self._upcoming.append(segment)
            if self.plan.decider.mixer.is_online:
                self._metrics.decided(
                    segment.round, iteration, positions=(segment.start, segment.stop),
                    weights=segment.weights)

    def _order(self, draft: Draft) -> np.ndarray:
        """Find the order of a window, on every rank, and keep a record of it."""
        assert self.orderer is not None, "the run has windows"
        self.orderer.step_seconds = self._clock.mean()
        finding = self.orderer.find(draft, self.plan.decider.table_ids)
        if finding is None:
            return stored_order(draft)
        if isinstance(self._plan, PlanKeeper):
            self._plan.note_window(finding.row, finding.arrays)
        self._metrics.ordered(finding.row)
        return finding.order

    def after_step(self, iteration: int, *, is_skipped: bool) -> None:
        """Reduce what the step measured, check that all ranks agree, write the ledger."""
        self._clock.stop()
        consumed = get_args().consumed_train_samples
        size = self._batch_size(consumed)
        loss_sums, num_tokens, excess_sums, position_sum = self._reduce()
        expected = size * consumed + size * (size - 1) // 2
        if position_sum != expected:
            raise PlanError(
                f"step {iteration + 1}: trained on positions that sum to {position_sum:.0f}, "
                f"planned were {consumed}-{consumed + size - 1} (sum {expected}); the sampler or "
                "the DataLoader no longer follows consumed_train_samples")
        signals = StepSignals(
            iteration=iteration + 1, consumed=consumed + size, loss_sums=loss_sums,
            num_tokens=num_tokens, is_skipped=is_skipped, excess_sums=excess_sums)
        if self.proxy is not None:
            self.proxy.require_whole_samples(num_tokens, iteration + 1)
        self.plan.observe(signals)
        self._sync(iteration + 1)
        self._metrics.trained(
            iteration + 1, loss_sums=loss_sums, num_tokens=num_tokens,
            weights=self._weights_at(consumed), shares=self._shares(), more=self._proxy_values())

    def _reduce(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, float]:
        """Sum the step over all ranks in one all-reduce; prove that all hold the same plan.

        Returns:
            (K,) loss sums, (K,) int64 token counts, (K,) sums of the excess over the reference
            where there is one, and the sum of the trained positions.
        """
        num_domains = len(self._domains)
        training = self.tally.training.view(-1)  # (CK,)
        terms = torch.tensor(
            collective.agreement_terms(self.plan.fingerprint), dtype=torch.float64,
            device=training.device)
        vector = torch.cat((training, self.tally.position_sum, terms))
        torch.distributed.all_reduce(vector)
        sums = vector.cpu().numpy()
        split = len(training)
        collective.require_agreement(
            sums[split + 1:].tolist(), torch.distributed.get_world_size(),
            what=f"plan at position {self.plan.state.position}")
        per_domain = sums[:split].reshape(num_domains, -1)  # (K, C)
        excess_sums = per_domain[:, 2].copy() if self.proxy is not None else None
        # Each context-parallel rank holds its part of every sample.
        position_sum = float(sums[split]) / mpu.get_context_parallel_world_size()
        num_tokens = np.rint(per_domain[:, 1]).astype(np.int64)
        return per_domain[:, 0].copy(), num_tokens, excess_sums, position_sum

    def _sync(self, iteration: int) -> None:
        if not isinstance(self._plan, PlanKeeper):
            return
        interval = self._args.save_interval
        now = time.monotonic()
        if (interval and iteration % interval == 0) or now - self._synced_at > _SYNC_SECONDS:
            self._plan.sync()
            self._synced_at = now

    def _weights_at(self, position: int) -> np.ndarray:
        """Target weights of the segment that holds a position just trained on."""
        while self._upcoming and self._upcoming[0].stop <= position:
            self._upcoming.popleft()
        return self._upcoming[0].weights

    def _proxy_values(self) -> dict[str, np.ndarray]:
        """DoReMi's weights after the step: alpha, and its mean so far."""
        if self.proxy is None:
            return {}
        mixer, state = self.proxy.mixer, self.plan.state.mixer
        return {"alpha": mixer.loss_weights(state), "alpha_mean": mixer.mean_weights(state),
                "excess": state["score"]}

    def _shares(self) -> np.ndarray:
        cursors = self.plan.state.cursors
        return cursors / max(1, cursors.sum())

    # --- evaluation -----------------------------------------------------------------------------

    def after_evaluation(self, model: Any) -> None:
        """Megatron's `non_loss_data_func`: called on every rank at the end of an evaluation."""
        sums = self.tally.evaluation.clone()
        self.tally.evaluation.zero_()
        torch.distributed.all_reduce(sums)
        loss_sums, counts = sums.cpu().numpy().T
        num_tokens = np.rint(counts).astype(np.int64)
        if isinstance(self._plan, PlanKeeper):
            self._plan.note_eval(loss_sums, num_tokens)
        self._metrics.evaluated(
            self.plan.state.iteration, loss_sums=loss_sums, num_tokens=num_tokens)

    def before_save(self) -> None:
        """Let no checkpoint be newer than the plan on disk, and none come of a life that is over."""
        keeper = self._plan
        collective.on_rank_0(lambda: keeper.sync() if isinstance(keeper, PlanKeeper) else None)

    def close(self) -> None:
        """Training is over: give the plan up."""
        try:
            if isinstance(self._plan, PlanKeeper):
                self._plan.close()
        finally:
            if self._lease is not None:
                self._lease.release()
