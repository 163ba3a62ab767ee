"""Weights into samples: which domain fills each position, never a whole sample off for long.

With weights `w` (K,) and `c_i` samples given to domain i in the first n positions, the domain's
*carry* is `n * w_i - c_i`: how far it is behind (> 0) or ahead (< 0) of its share, in samples.

Rule, per position:

1. A domain may be taken if its carry, this position's share included, is positive. So none is ever
   a whole sample ahead.
2. A domain's next sample is *due* at the position at which its carry would otherwise reach 1. The
   set of the due dates leaves some freedom: the domain taken must keep it possible to serve every
   later sample by its date (a count over the dates, exact for unit jobs on one machine).
3. Among what 1 and 2 allow within the next `HORIZON` positions, take the largest carry; ties by
   domain order. (If nothing is due within the horizon, take the earliest date.)

For constant weights the dates can always be met (Baruah, Cohen, Plaxton, Varvel 1996,
"Proportionate progress", for one processor; the freedom is that of the quota methods of Balinski
and Young 1975 and Still 1979), so that **every prefix of every domain stays strictly within one
sample of its share**.

Weights that change without notice: no rule that cannot see the future stays within 1 for K >= 4.
With K = 4: uniform weights, then 1/3 on each domain not served, then 1/2 on each of the two not
served yet leaves one of them 1/4 + 1/3 + 1/2 = 1.083 behind. To serve the largest carry is the best
defence; :func:`apportion` says what was measured.

Numerics: weights and carries are integers in units of 2**-48 sample, so that all sums are exact,
the carries always add up to what they did before, a segment cut anywhere gives the same domains bit
for bit, and the optional C version (`_apportion.c`) cannot differ from the one here. The rounding
of a weight moves a domain's share by less than 0.001 sample in 10**9 positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_d3.errors import PlanError

try:
    from megatron_d3.plan import _apportion as _compiled  # type: ignore[attr-defined,unused-ignore]
except ImportError:  # built without a C compiler: the same result, slower
    _compiled = None

VERSION = 1
"""Raised whenever the same input gives other domains."""

HORIZON = 256
"""Positions looked ahead for due dates. Part of the result, as `VERSION` is."""

BLOCK = 4096
"""Positions per refill of the table of due dates. No part of the result."""

ONE = 1 << 48
"""One sample, in the units of the integer weights and carries."""

MAX_CARRY = 16.0
"""Largest carry, in samples: below it 2**-48 units fit a float64 exactly."""

MAX_DOMAINS = int(np.iinfo(np.int16).max)


def is_compiled() -> bool:
    """Tell whether the C version is in use."""
    return _compiled is not None


def apportion(
    weights: np.ndarray, num_positions: int, carry: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Give each of the next positions to a domain, so that counts follow the cumulative weights.

    Args:
        weights: (K,) float64, >= 0, sum 1 (within 1e-6). A weight of 0 gives no sample; neither
            does one below 2**-49.
        num_positions: positions to fill, n >= 0.
        carry: (K,) float64, samples each domain is behind its share (< 0: ahead), as returned by
            the call before; zeros at the start of a run.

    Returns:
        (n,) int16, the domain of each position, and the new (K,) float64 carry. Their sum does not
        change. Two calls with m and n - m positions give exactly what one call with n gives.

    Raises:
        PlanError: weights that are no weights, a carry out of range, or too many domains.

    With constant weights each carry stays in (-1, 1) at every position. Measured otherwise, largest
    |carry| at any of some 10**5 positions, K = 2 to 64: 0.995 with weights drawn anew every 1, 8 or
    256 positions (Dirichlet 1), 1.17 with spiky ones (Dirichlet 0.1), 1.21 with half of them 0;
    0.993 along linear, cosine and step schedules (batches of 64, knots every 100 steps). Earliest
    due date first, the textbook rule, reaches 1.97 on such draws.

    >>> domains, carry = apportion(np.array([0.5, 0.25, 0.25]), 6, np.zeros(3))
    >>> domains.tolist(), carry.tolist()
    ([0, 1, 2, 0, 0, 1], [0.0, -0.5, 0.5])
    """
    units = _weights_in_units(weights)
    lag = _carry_in_units(carry, len(units))
    if num_positions < 0:
        raise PlanError(f"apportion: got {num_positions} positions, expected 0 or more")
    domains = np.empty(num_positions, np.int16)
    fill = _fill_python if _compiled is None else _compiled.fill
    fill(units, lag, domains, HORIZON, BLOCK)
    return domains, lag / ONE


def multinomial(weights: np.ndarray, num_positions: int, *, key: Sequence[int]) -> np.ndarray:
    """Draw the domain of each position independently with the weights as probabilities.

    Args:
        weights: (K,) float64 on the simplex; a weight of 0 gives no sample.
        num_positions: positions to fill, n >= 0.
        key: non-negative integers, e.g. (seed, round); the same key gives the same draws.

    Returns:
        (n,) int16, the domain of each position.

    Raises:
        PlanError: weights that are no weights.
    """
    weights = _checked_weights(weights)
    edges = np.cumsum(weights)
    edges[np.flatnonzero(weights)[-1] :] = 1.0  # rounding must not leave a gap below 1
    draws = np.random.default_rng(list(key)).random(num_positions)
    return np.searchsorted(edges, draws, side="right").astype(np.int16)


def _checked_weights(weights: np.ndarray) -> np.ndarray:
    """Return the weights as float64 with sum 1, or raise PlanError."""
    weights = np.asarray(weights, np.float64)
    if weights.ndim != 1 or not 1 <= len(weights) <= MAX_DOMAINS:
        raise PlanError(
            f"apportion: got weights of shape {weights.shape}, expected (K,) with 1 to"
            f" {MAX_DOMAINS} domains"
        )
    total = weights.sum()
    if not (np.isfinite(total) and (weights >= 0).all() and abs(total - 1.0) <= 1e-6):
        raise PlanError(
            f"apportion: got weights with minimum {weights.min()} and sum {total}, expected numbers"
            " >= 0 with sum 1"
        )
    return np.asarray(weights / total)


def _weights_in_units(weights: np.ndarray) -> np.ndarray:
    """Round weights to (K,) int64 units whose sum is exactly ONE; the largest takes the rest."""
    units = np.rint(_checked_weights(weights) * ONE).astype(np.int64)
    units[np.argmax(units)] += ONE - units.sum()
    return units


def _carry_in_units(carry: np.ndarray, num_domains: int) -> np.ndarray:
    """Return the carry as (K,) int64 units, a fresh array, or raise PlanError."""
    carry = np.asarray(carry, np.float64)
    if carry.shape != (num_domains,):
        raise PlanError(f"apportion: got a carry of shape {carry.shape} for {num_domains} domains")
    if not (np.abs(carry) <= MAX_CARRY).all():  # NaN fails too
        raise PlanError(
            f"apportion: got a carry of {carry.tolist()}, expected numbers in"
            f" [-{MAX_CARRY:g}, {MAX_CARRY:g}] samples"
        )
    return np.rint(carry * ONE).astype(np.int64)


def _fill_python(
    units: np.ndarray, lag: np.ndarray, domains: np.ndarray, horizon: int, block: int
) -> None:
    """Fill `domains` and bring `lag` forward, both in place. The reference for `_apportion.c`.

    Args:
        units: (K,) int64 weights, sum ONE.
        lag: (K,) int64 carry.
        domains: (n,) int16, written.
        horizon: see HORIZON.
        block: see BLOCK.
    """
    active = np.flatnonzero(units)  # (A,) domains with a weight
    weight, behind = units[active], lag[active]
    for start in range(0, len(domains), block):
        part = domains[start : start + block]
        picks = _fill_block(weight, behind, len(part), horizon)
        part[:] = active[picks]
    lag[active] = behind


def _fill_block(
    weight: np.ndarray, behind: np.ndarray, num_positions: int, horizon: int
) -> list[int]:
    """Pick the domains of one block; `behind` (A,) int64 is brought forward in place."""
    # Due date of a domain's next sample, counted from the block's first position (= 0): the first
    # position a with behind + (a + 1) * weight >= ONE.
    target = ONE - behind  # (A,) units still to gain until the carry is 1; due = ceil(target/w) - 1
    due = -(-target // weight) - 1  # (A,)
    spare = (due + 1) * weight - target  # (A,) in [0, weight)
    step, rest = ONE // weight, ONE % weight  # (A,) the date moves on by ONE / weight
    slack = _slack(due, spare, weight, num_positions + horizon)
    picks: list[int] = []
    for now in range(num_positions):
        behind += weight
        pick = _pick(behind, due, slack, now, now + horizon)
        slack[now + 1 : max(int(due[pick]), now + 1)] -= 1
        behind[pick] -= ONE
        is_late = rest[pick] > spare[pick]
        due[pick] += step[pick] + is_late
        spare[pick] += (weight[pick] if is_late else 0) - rest[pick]
        picks.append(pick)
    return picks


def _slack(due: np.ndarray, spare: np.ndarray, weight: np.ndarray, length: int) -> np.ndarray:
    """Return (length,) int64: positions 0..a minus samples due by a; < 0: a date will be missed."""
    num_due = np.zeros(length, np.int64)
    for d, s, w in zip(due.tolist(), spare.tolist(), weight.tolist(), strict=True):
        if d >= length:
            continue
        target = (d + 1) * w - s
        targets = target + ONE * np.arange((length * w - target) // ONE + 1)  # below 2**61
        dates = -(-targets // w) - 1
        num_due += np.bincount(np.maximum(dates, 0), minlength=length)
    return np.arange(1, length + 1) - np.cumsum(num_due)


def _pick(behind: np.ndarray, due: np.ndarray, slack: np.ndarray, now: int, limit: int) -> int:
    """Return the domain for position `now` by the three rules of the module."""
    pick = _largest(behind, (behind > 0) & (due <= limit))
    if pick >= 0:
        tight = np.flatnonzero(slack[now : max(int(due[pick]), now)] <= 0)
        if not len(tight):
            return pick
        pick = _largest(behind, (behind > 0) & (due <= now + tight[0]))
        if pick >= 0:
            return pick
    may = np.flatnonzero(behind > 0)
    if len(may):
        return int(may[np.argmin(due[may])])
    # Only after weights changed: those who may be served are all ahead. Take the least ahead.
    return int(np.argmax(behind))


def _largest(behind: np.ndarray, mask: np.ndarray) -> int:
    """Return the index of the largest value under the mask, the first of equals; -1 if none."""
    index = int(np.argmax(np.where(mask, behind, np.iinfo(np.int64).min)))
    return index if mask[index] else -1
