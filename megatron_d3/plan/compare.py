"""Where two plans part, and why: `megatron-d3 plan diff`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from megatron_d3.plan.header import DomainRecord, differences
from megatron_d3.plan.reader import PlanReader
from megatron_d3.plan.rows import LossRow
from megatron_d3.plan.summary import RoundUse, iter_rounds

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Parting:
    """The first position at which two plans differ.

    Attributes:
        position: the first that differs or that one of them lacks.
        a: domain and ordinal there in the first plan, None if it ends before.
        b: the same of the second.
        reasons: what differs before it, most basic first; empty if nothing does.
    """

    position: int
    a: tuple[str, int] | None
    b: tuple[str, int] | None
    reasons: tuple[str, ...]


def compare(a: PlanReader, b: PlanReader) -> Parting | None:
    """Return where two plans part, or None if they hold the same samples in the same order.

    A domain is the same in both if its name, corpus, `seq_length` and seed are: table ids and paths
    may differ.
    """
    position = _first_difference(a, b)
    if position is None:
        return None
    one, two = _at(a, position), _at(b, position)
    reasons = _reasons(a, b, position)
    if one is not None and two is not None:
        reasons = (*_domain_reasons(one[0], two[0]), *reasons)
    return Parting(position, _named(one), _named(two), reasons)


def _first_difference(a: PlanReader, b: PlanReader) -> int | None:
    if a.first_position != b.first_position:
        return min(a.first_position, b.first_position)
    known: dict[tuple[object, ...], int] = {}
    ids = [np.array([known.setdefault(_identity(domain), len(known))
                     for domain in reader.plan.table])
           for reader in (a, b)]
    stop = min(a.frontier, b.frontier)
    for start in range(a.first_position, stop, _CHUNK):
        end = min(start + _CHUNK, stop)
        one, two = a.positions(start, end), b.positions(start, end)
        is_different = ((ids[0][one["domain"]] != ids[1][two["domain"]])
                        | (one["sample"] != two["sample"]))  # (n,)
        if is_different.any():
            return start + int(np.argmax(is_different))
    return None if a.frontier == b.frontier else stop


def _identity(domain: DomainRecord) -> tuple[object, ...]:
    """What makes two draws of the same ordinal the same tokens."""
    return domain.name, domain.fingerprint, domain.seq_length, domain.seed


def _at(reader: PlanReader, position: int) -> tuple[DomainRecord, int] | None:
    if not reader.first_position <= position < reader.frontier:
        return None
    record = reader.positions(position, position + 1)[0]
    return reader.plan.table[int(record["domain"])], int(record["sample"])


def _named(sample: tuple[DomainRecord, int] | None) -> tuple[str, int] | None:
    return None if sample is None else (sample[0].name, sample[1])


def _domain_reasons(one: DomainRecord, two: DomainRecord) -> list[str]:
    """Say why a domain of one name is not the same domain."""
    if one.name != two.name:
        return []
    return [f"domain {one.name}: {field} {getattr(one, field)} in A, {getattr(two, field)} in B"
            for field in ("fingerprint", "seq_length", "seed")
            if getattr(one, field) != getattr(two, field)]


def _reasons(a: PlanReader, b: PlanReader, position: int) -> tuple[str, ...]:
    """Return what differs in settings, ledgers and rounds up to the position."""
    reasons = []
    generations = [[g for g in reader.plan.generations if g.position <= position]
                   for reader in (a, b)]
    for index, (one, two) in enumerate(zip_longest(*generations)):
        if one is None or two is None:
            present = one or two
            reasons.append(f"generation {index}: only {'B' if one is None else 'A'} has it, from "
                           f"position {present.position} on")
            if index > 0:
                before = generations[one is None][index - 1].header
                reasons += [f"generation {index}: {change.field} {change.old} before, "
                            f"{change.new} in {'B' if one is None else 'A'}"
                            for change in differences(before, present.header)]
            break
        for field in ("iteration", "position"):
            old, new = getattr(one, field), getattr(two, field)
            if old != new:
                reasons.append(f"generation {index}: {field} {old} in A, {new} in B")
        reasons += [f"generation {index}: {change.field} {change.old} in A, {change.new} in B"
                    for change in differences(one.header, two.header)]
        if reasons:
            break
    rounds = _first_round_difference(a, b, position)
    last_iteration = rounds[1] if rounds else None
    row = _first_ledger_difference(a, b)
    if row is not None and (last_iteration is None or row[0] <= last_iteration):
        reasons.append(row[1])
    if rounds:
        reasons.append(rounds[0])
    return tuple(reasons)


def _first_round_difference(a: PlanReader, b: PlanReader, position: int) -> tuple[str, int] | None:
    """Return a sentence and the iteration at which the first different round was decided."""
    for one, two in zip(iter_rounds(a), iter_rounds(b), strict=False):
        if max(one.row.start, two.row.start) > position:
            return None
        for name, old, new in (
                ("positions", _span(one), _span(two)), ("step", one.row.step, two.row.step),
                ("unit", one.row.unit, two.row.unit),
                ("weights", one.weights.tolist(), two.weights.tolist()),
                ("iteration", one.row.iteration, two.row.iteration)):
            if old != new:
                return (f"round {one.row.round}: {name} {old} in A, {new} in B",
                        max(one.row.iteration, two.row.iteration))
    return None


def _span(use: RoundUse) -> str:
    return f"{use.row.start}-{use.stop - 1}" if use.row.start < use.stop else "none"


def _first_ledger_difference(a: PlanReader, b: PlanReader) -> tuple[int, str] | None:
    for (one, _, _), (two, _, _) in zip(a.ledger(), b.ledger(), strict=False):
        if one != two:
            return min(one.iteration, two.iteration), _ledger_sentence(one, two)
    return None


def _ledger_sentence(one: LossRow, two: LossRow) -> str:
    for field in ("iteration", "consumed", "is_skipped"):
        if getattr(one, field) != getattr(two, field):
            return (f"ledger: {field} {getattr(one, field)} in A, {getattr(two, field)} in B "
                    f"(iteration {one.iteration})")
    name = next(name for name in {**one.losses, **two.losses}
                if one.losses.get(name) != two.losses.get(name))
    return (f"ledger: iteration {one.iteration}: loss of {name} {one.losses.get(name)} in A, "
            f"{two.losses.get(name)} in B")
