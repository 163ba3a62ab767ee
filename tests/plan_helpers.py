"""Small plans: two toy mixers, a cap, a header, and a training loop without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from megatron_d3.plan.batch_schedule import BatchSchedule
from megatron_d3.plan.decide import Decider
from megatron_d3.plan.draft import Draft, Orderer, WindowRule, stored_order
from megatron_d3.plan.header import DomainRecord, RunHeader
from megatron_d3.plan.keeper import PlanKeeper
from megatron_d3.plan.replay import DeciderFactory
from megatron_d3.types import DomainInfo, MixContext, StepSignals


@dataclass(frozen=True)
class Fixed:
    """Constant weights."""

    values: tuple[float, ...]
    VERSION: ClassVar[int] = 1
    is_online: ClassVar[bool] = False
    uses_total_samples: ClassVar[bool] = False

    def init(self) -> dict[str, np.ndarray]:
        return {}

    def update(
        self, state: dict[str, np.ndarray], signals: StepSignals
    ) -> dict[str, np.ndarray]:
        raise AssertionError("a mixer that is not online sees no signals")

    def weights(self, state: dict[str, np.ndarray], context: MixContext) -> np.ndarray:
        return np.array(self.values)


@dataclass(frozen=True)
class Chaser:
    """Online: weights follow a moving mean of the losses, absent domains keep theirs."""

    num_domains: int
    VERSION: ClassVar[int] = 1
    is_online: ClassVar[bool] = True

    def init(self) -> dict[str, np.ndarray]:
        return {"mean": np.ones(self.num_domains), "seen": np.zeros((), np.int64)}

    def update(
        self, state: dict[str, np.ndarray], signals: StepSignals
    ) -> dict[str, np.ndarray]:
        mean = state["mean"].copy()
        ok = (signals.num_tokens > 0) & np.isfinite(signals.loss_sums)
        mean[ok] = 0.5 * mean[ok] + 0.5 * signals.loss_sums[ok] / signals.num_tokens[ok]
        return {"mean": mean, "seen": state["seen"] + 1}

    def weights(self, state: dict[str, np.ndarray], context: MixContext) -> np.ndarray:
        weights: np.ndarray = state["mean"] / state["mean"].sum()
        return weights


@dataclass(frozen=True)
class Budget:
    """A cap without foresight: only the hard limit."""

    budgets: np.ndarray
    exhausted: Literal["redistribute", "repeat", "stop"] = "redistribute"

    def cap(self, weights: np.ndarray, context: MixContext) -> np.ndarray:
        if self.exhausted != "redistribute":
            return weights
        weights = np.where(context.consumed < self.budgets, weights, 0.0)
        return weights / weights.sum()


def domains(*sizes: int, seq_length: int = 8, seed: int = 7) -> tuple[DomainRecord, ...]:
    """Domains a, b, c, ... of so many samples."""
    return tuple(
        DomainRecord(name, f"hash-of-{name}", seq_length, seed, size, size * seq_length)
        for name, size in zip("abcdefghij", sizes, strict=False))


def header(
    *, sizes: Sequence[int] = (100, 50, 20), total: int = 96, batch: int = 4,
    mix: str = "online", **changes: object,
) -> RunHeader:
    """A run of `total` samples; `mix` is "online" or weights like "0.5,0.5"."""
    made = RunHeader(
        seq_length=8, seed=7, tokenizer="toy", total_samples=total,
        batch_schedule=BatchSchedule.constant(batch), domains=domains(*sizes),
        config={"mix": {"type": mix}, "round_steps": 1, "sampling": "apportion"},
        versions={"toy": 1})
    return replace(made, **changes)  # type: ignore[arg-type]


def make_decider(head: RunHeader, table_ids: tuple[int, ...]) -> Decider:
    """The decider factory of the toy runs."""
    mix = head.config["mix"]["type"]
    num_domains = len(head.domains)
    mixer = (Chaser(num_domains) if mix == "online"
             else Fixed(tuple(float(w) for w in mix.split(","))))
    max_samples = head.config["mix"].get("max_samples")
    cap = None
    if max_samples is not None:
        cap = Budget(np.array(max_samples), head.config["mix"].get("exhausted", "redistribute"))
    return Decider(
        domains=[domain.info for domain in head.domains], table_ids=table_ids, mixer=mixer, cap=cap,
        total_samples=head.total_samples, batch_schedule=head.batch_schedule, seed=head.seed,
        sampling=head.config["sampling"], round_steps=head.config["round_steps"],
        windows=WindowRule(**order) if (order := head.config.get("order")) is not None else None)


def reverse_order(draft: Draft) -> np.ndarray:
    """The last unit first."""
    return np.arange(draft.num_units)[::-1]


def random_order(draft: Draft) -> np.ndarray:
    """A permutation that depends on where the window lies and on what it holds."""
    key = [draft.round, draft.start, int(draft.records["sample"].sum())]
    return np.random.default_rng(key).permutation(draft.num_units)


def infos(*sizes: int) -> list[DomainInfo]:
    """The same domains as a mixer sees them."""
    return [domain.info for domain in domains(*sizes)]


def losses_of(step: int, records: np.ndarray, table_ids: Sequence[int]) -> StepSignals:
    """What training step `step` (0-based) measures: a pure function of its samples."""
    index = {i: k for k, i in enumerate(table_ids)}
    sums, tokens = np.zeros(len(table_ids)), np.zeros(len(table_ids), np.int64)
    for domain, sample in records.tolist():
        k = index[domain]
        tokens[k] += 8
        sums[k] += 8 * (2.0 + 0.3 * k + ((sample * 37 + step * 11) % 17) / 10)
    if step == 6:
        sums[tokens > 0] = np.inf  # an overflow
    return StepSignals(step + 1, 0, sums, tokens, is_skipped=step == 6)


class Crash(Exception):
    """The process dies here."""


class Trainer:
    """A training loop without a model.

    Args:
        directory: of the plan.
        head: what the run wants.
        read_ahead: positions that must be decided ahead of training.
        save_every: iterations between checkpoints.
        factory: builds the deciders.
        orderer: finds the order of windows, if the header asks for any.
    """

    def __init__(
        self, directory: Path, head: RunHeader, *, read_ahead: int = 8, save_every: int = 3,
        factory: DeciderFactory = make_decider, orderer: Orderer = stored_order,
    ) -> None:
        self.directory, self.head, self.factory = directory, head, factory
        self.orderer = orderer
        self.read_ahead, self.save_every = read_ahead, save_every

    def measure(self, step: int, records: np.ndarray, table_ids: Sequence[int]) -> StepSignals:
        """What a training step measures."""
        return losses_of(step, records, table_ids)

    def run(
        self, iteration: int = 0, consumed: int = 0, *, stop_at: int | None = None,
        mode: Literal["strict", "fork"] = "strict", snapshot_every: int = 4,
    ) -> list[tuple[int, int]]:
        """Train from a checkpoint; returns those (iteration, consumed) that were reached."""
        keeper = PlanKeeper.open(self.directory, self.head, self.factory, iteration=iteration,
                                 consumed=consumed, mode=mode, snapshot_every=snapshot_every)
        reached = []
        schedule = self.head.batch_schedule
        while consumed < self.head.total_samples and iteration != stop_at:
            size = min(schedule.size_at(consumed), self.head.total_samples - consumed)
            until = schedule.stop_after(consumed, 1 + -(-self.read_ahead // size))
            keeper.advance(until, self.orderer)
            records = keeper.positions(consumed, consumed + size)
            consumed += size
            signals = self.measure(iteration, records, keeper.decider.table_ids)
            keeper.observe(replace(signals, consumed=consumed))
            iteration += 1
            if iteration % 5 == 0:
                keeper.note_eval(signals.loss_sums / 2, signals.num_tokens)
            if iteration % self.save_every == 0:
                keeper.sync()
            reached.append((iteration, consumed))
        keeper.close()
        return reached


def files_of(directory: Path) -> dict[str, bytes]:
    """All files of a plan by name, without what was set aside."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not path.relative_to(directory).parts[0].startswith("abandoned-")}
