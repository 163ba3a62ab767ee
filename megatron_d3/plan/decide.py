"""The decision: which domain, and which of its samples, fills each position of the next round.

    mixer weights -> epoch caps -> apportionment -> ordinals -> Segment

A :class:`Decider` holds no state and touches no file: `decide` and `observe` are pure functions of
a :class:`DeciderState`, so every rank of a run, a resumed run and an audit compute the same plan.

A round fills `round_steps` global batches with the weights of its **first** step: with a schedule
mixer and `round_steps` above 1 the weights move once a round, not once a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal
from zlib import crc32

import numpy as np

from megatron_d3.errors import PlanError
from megatron_d3.plan.apportion import apportion, multinomial
from megatron_d3.plan.batch_schedule import BatchSchedule
from megatron_d3.plan.draft import Draft, Orderer, WindowRule, checked, commit, make_draft
from megatron_d3.plan.protocols import Cap, Mixer
from megatron_d3.plan.segment import RECORD, Segment, chain_hash
from megatron_d3.plan.state import DeciderState
from megatron_d3.types import DomainInfo, MixContext, StepSignals

# How far from 1 the weights of a mixer may sum: many domains, float64 rounding.
_SUM_TOLERANCE = 1e-6
# Positions numbered at a time: what fits a core's cache (146 against 57 million positions/s, K = 8).
_CHUNK = 1 << 15


@dataclass(frozen=True)
class Decider:
    """The settings of a run's decisions.

    Attributes:
        domains: K domains in the order of every (K,) array.
        table_ids: (K,) ids under which the plan's table knows them.
        mixer: gives the weights; built for the same domains and `total_samples`.
        cap: limit on repetition, or None.
        total_samples: positions of the whole run; the last round is cut there.
        batch_schedule: samples per training step.
        seed: for `sampling: multinomial`.
        sampling: `apportion` keeps counts within about 1 of their share; `multinomial` draws.
        round_steps: global batches filled by one decision.
        windows: how rounds are put together and ordered; None: each is decided on its own.
    """

    domains: Sequence[DomainInfo]
    table_ids: Sequence[int]
    mixer: Mixer
    cap: Cap | None
    total_samples: int
    batch_schedule: BatchSchedule
    seed: int
    sampling: Literal["apportion", "multinomial"] = "apportion"
    round_steps: int = 1
    windows: WindowRule | None = None

    @property
    def steps_at_once(self) -> int:
        """The most global batches that one decision fills."""
        return self.round_steps if self.windows is None else self.windows.length

    @property
    def depends_on_total(self) -> bool:
        """Whether weights may depend on `total_samples`.

        Caps do. A mixer does unless its class says `uses_total_samples = False`.
        """
        return self.cap is not None or getattr(self.mixer, "uses_total_samples", True)

    def init(self, *, position: int = 0, iteration: int = 0) -> DeciderState:
        """Return the state of a plan that starts at `position` after `iteration` steps."""
        num_domains = len(self.domains)
        return DeciderState(
            round=0, position=position, step=iteration, iteration=iteration, consumed=position,
            decided_at=-1, chain=0, cursors=np.zeros(num_domains, np.int64),
            carry=np.zeros(num_domains), weights=np.full(num_domains, np.nan),
            mixer=self.mixer.init())

    def observe(self, state: DeciderState, signals: StepSignals) -> DeciderState:
        """Return the state after one more training step.

        Only an online mixer looks at the signals, and it sees what the ledger keeps of them: a loss
        that is not finite is NaN, whatever it was.
        """
        mixer = state.mixer
        if self.mixer.is_online:
            mixer = self.mixer.update(mixer, canonical(signals))
        return replace(
            state, iteration=signals.iteration, consumed=signals.consumed, mixer=mixer)

    def round_stop(self, start: int) -> int:
        """Return where a round that starts at a position ends, `start` at the end of the run."""
        stop = self.batch_schedule.stop_after(start, self.round_steps)
        return max(start, min(stop, self.total_samples))

    def draft(self, state: DeciderState) -> Draft | None:
        """Decide the units of the next window, one after the other, as :meth:`decide` would.

        Returns:
            The units, which have no order yet; None where :meth:`decide` gives None.

        Raises:
            PlanError: as :meth:`decide`.
        """
        return make_draft(self, state)

    def advance(
        self, state: DeciderState, orderer: Orderer | None
    ) -> tuple[DeciderState, list[Segment]] | None:
        """Fill the next round, or with windows the next window's rounds.

        Args:
            state: as of now.
            orderer: finds the order of a window; needed with windows only.

        Returns:
            The state after it and the segments; None as :meth:`decide`.

        Raises:
            PlanError: as :meth:`decide`, or the orderer's answer is not a permutation.
        """
        if self.windows is None:
            decided = self.decide(state)
            return None if decided is None else (decided[0], [decided[1]])
        draft = self.draft(state)
        if draft is None:
            return None
        assert orderer is not None, "windows need an orderer"
        return commit(state, draft, checked(orderer(draft), draft))

    def decide(
        self, state: DeciderState, *, limit: int | None = None
    ) -> tuple[DeciderState, Segment] | None:
        """Fill the next round, whatever the windows.

        Args:
            state: as of now.
            limit: cut the round at this position. The positions before it are those that the whole
                round would hold.

        Returns:
            The state after the round and its segment; None when the run is complete, or when the
            domains may not be repeated enough to fill a round (`exhausted: stop`).

        Raises:
            PlanError: the mixer's weights are not on the simplex, or all domains that have weight
                are exhausted.
        """
        start = state.position
        stop = self.round_stop(start)
        stop = stop if limit is None else min(stop, limit)
        if stop <= start:
            return None
        context = MixContext(step=state.step, position=start, total_samples=self.total_samples,
                             consumed=state.cursors.copy())
        weights = self._checked(self.mixer.weights(state.mixer, context), state)
        if self.cap is not None:
            weights = self._checked(self.cap.cap(weights, context), state)
        drawn = self._draw(state, weights, stop - start)
        if drawn is None:
            return None
        domains, carry = drawn
        samples, cursors = number_draws(domains, state.cursors)
        records = np.empty(stop - start, RECORD)
        records["domain"] = np.asarray(self.table_ids, np.int16)[domains]
        records["sample"] = samples
        chain = chain_hash(state.chain, where=(state.round, state.step, start, stop),
                           weights=weights, records=records)
        segment = Segment(
            round=state.round, step=state.step, start=start, stop=stop, weights=weights,
            has_new_weights=weights.tobytes() != state.weights.tobytes(), records=records,
            chain=chain)
        after = replace(
            state, round=state.round + 1, position=stop, step=state.step + self.round_steps,
            decided_at=state.iteration, chain=chain, cursors=cursors, carry=carry, weights=weights)
        return after, segment

    def _checked(self, weights: np.ndarray, state: DeciderState) -> np.ndarray:
        weights = np.asarray(weights, np.float64)
        is_simplex = (weights.shape == (len(self.domains),) and bool(np.all(weights >= 0))
                      and abs(weights.sum() - 1) < _SUM_TOLERANCE)
        if not is_simplex:
            raise PlanError(
                f"round {state.round}: mixer {type(self.mixer).__name__} gave weights "
                f"{weights.tolist()}, expected {len(self.domains)} numbers >= 0 that sum to 1")
        return weights

    def _draw(
        self, state: DeciderState, weights: np.ndarray, num_positions: int
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Return (n,) domain indices and the new carry, within the budgets of the cap."""
        domains, carry = self._sample(state, weights, num_positions, state.carry, attempt=0)
        if self.cap is None or self.cap.exhausted == "repeat":
            return domains, carry
        # A budget may be overdrawn already: by a run without it, before a fork.
        left = np.maximum(self.cap.budgets - state.cursors, 0)
        if not np.any(_counts(domains, len(left)) > left):
            return domains, carry
        if self.cap.exhausted == "stop":
            return None
        return self._draw_within(state, weights, domains, left)

    def _draw_within(
        self, state: DeciderState, weights: np.ndarray, domains: np.ndarray, left: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Redraw from the first position at which a domain would exceed its budget, and so on.

        The exhausted domain's weight and its carry go to the others in proportion to their weights.
        """
        carry, parts, num_positions = state.carry, [], len(domains)
        for attempt in range(1, len(left) + 2):
            keep = _first_excess(domains, left)
            parts.append(domains[:keep])
            num_positions -= keep
            _, carry = self._sample(state, weights, keep, carry, attempt=attempt - 1)
            if num_positions == 0:
                break
            exhausted = int(domains[keep])
            left = left - _counts(domains[:keep], len(left))
            weights = self._without(exhausted, weights, state)
            debt = carry[exhausted]
            carry = carry + debt * weights
            carry[exhausted] = 0.0
            domains, _ = self._sample(state, weights, num_positions, carry, attempt=attempt)
        return np.concatenate(parts), carry

    def _without(self, exhausted: int, weights: np.ndarray, state: DeciderState) -> np.ndarray:
        weights = weights.copy()
        weights[exhausted] = 0.0
        total = weights.sum()
        if total <= 0:
            raise PlanError(
                f"round {state.round}: every domain that has weight is exhausted, the last was "
                f"{self.domains[exhausted].name}; raise d3.mix.max_epochs, give other domains "
                "weight, or train on fewer samples")
        shares: np.ndarray = weights / total
        return shares

    def _sample(
        self, state: DeciderState, weights: np.ndarray, num_positions: int, carry: np.ndarray,
        *, attempt: int,
    ) -> tuple[np.ndarray, np.ndarray]:
        if self.sampling == "apportion":
            return apportion(weights, num_positions, carry)
        key = [self.seed, state.round, crc32(b"multinomial"), attempt]
        return multinomial(weights, num_positions, key=key), carry


def canonical(signals: StepSignals) -> StepSignals:
    """Return the signals as the ledger can hold them.

    A sum that is not finite becomes NaN; a domain without tokens has the sum 0.
    """
    num_tokens = np.asarray(signals.num_tokens, np.int64)

    def storable(sums: np.ndarray) -> np.ndarray:
        return np.where(num_tokens > 0, np.where(np.isfinite(sums), sums, np.nan), 0.0)

    excess = signals.excess_sums
    return replace(
        signals, loss_sums=storable(signals.loss_sums), num_tokens=num_tokens,
        excess_sums=None if excess is None else storable(excess))


def _counts(domains: np.ndarray, num_domains: int) -> np.ndarray:
    counts: np.ndarray = np.bincount(domains, minlength=num_domains)
    return counts


def _first_excess(domains: np.ndarray, left: np.ndarray) -> int:
    """Return the first index at which a domain's count exceeds `left`, or the length."""
    first = len(domains)
    for domain in np.flatnonzero(_counts(domains, len(left)) > left):
        first = min(first, int(np.flatnonzero(domains == domain)[left[domain]]))
    return first


def number_draws(domains: np.ndarray, cursors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number the draws of each domain on from its cursor.

    Returns:
        (n,) int64 ordinals and the (K,) new cursors.
    """
    samples = np.empty(len(domains), np.int64)
    for start in range(0, len(domains), _CHUNK):
        chunk = domains[start:start + _CHUNK]  # (c,)
        counts = _counts(chunk, len(cursors))
        order = np.argsort(chunk, kind="stable")  # radix sort for int16: O(c)
        first = np.cumsum(counts) - counts  # (K,) where each domain's run starts in `order`
        numbered = np.arange(len(chunk)) + np.repeat(cursors - first, counts)  # (c,) sorted
        samples[start:start + _CHUNK][order] = numbered
        cursors = cursors + counts
    return samples, cursors
