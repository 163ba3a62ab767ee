"""What a plan did, in numbers: `megatron-d3 plan show`. Streams, in memory that does not grow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron_d3.plan.header import Generation
from megatron_d3.plan.reader import LEDGER, PlanReader
from megatron_d3.plan.rows import LossRow, RoundRow, last_line, parsed

_CHUNK = 1 << 20


@dataclass(frozen=True)
class DomainUse:
    """What one domain gave during one generation.

    Attributes:
        name: the domain.
        id: its number in the plan's table.
        num_samples: samples in one epoch.
        num_drawn: positions that it fills in this generation.
        num_drawn_before: positions that it filled before.
        share: of this generation's positions.
        target: the share that the weights of its rounds ask for.
    """

    name: str
    id: int
    num_samples: int
    num_drawn: int
    num_drawn_before: int
    share: float
    target: float

    @property
    def epochs(self) -> float:
        """Passes over the domain so far, earlier generations included."""
        return (self.num_drawn_before + self.num_drawn) / self.num_samples


@dataclass(frozen=True)
class GenerationUse:
    """One generation in numbers.

    Attributes:
        index: from 0.
        generation: its settings.
        stop: position after its last.
        num_rounds: rounds whose positions count.
        domains: in domain order.
    """

    index: int
    generation: Generation
    stop: int
    num_rounds: int
    domains: tuple[DomainUse, ...]


@dataclass(frozen=True)
class RoundUse:
    """One round: its row, its effective stop, and the weights in force.

    Attributes:
        row: of `rounds.jsonl`.
        generation: index of its generation.
        stop: where its positions end; below `row.stop` if a later generation began before.
        weights: (K,) float64.
    """

    row: RoundRow
    generation: int
    stop: int
    weights: np.ndarray


def iter_rounds(reader: PlanReader) -> Iterator[RoundUse]:
    """Yield the rounds with the weights in force, whether their row repeats them or not."""
    weights = np.zeros(0)
    for row, _ in reader.rounds():
        index = reader.generation_of(row.round)
        if row.weights is not None:
            names = reader.plan.generations[index].header.names
            weights = np.array([row.weights[name] for name in names])
        yield RoundUse(row, index, max(row.start, reader.stop_of(row)), weights)


def summarise(reader: PlanReader) -> tuple[GenerationUse, ...]:
    """Count what each domain gave in each generation, against its target."""
    generations = reader.plan.generations
    targets = [np.zeros(len(g.domain_ids)) for g in generations]  # samples asked for
    num_rounds = [0] * len(generations)
    for use in iter_rounds(reader):
        if use.stop > use.row.start:
            targets[use.generation] += use.weights * (use.stop - use.row.start)
            num_rounds[use.generation] += 1
    stops = [g.position for g in generations[1:]] + [reader.frontier]
    uses = []
    for index, generation in enumerate(generations):
        counts = count_domains(reader, generation.position, stops[index])
        uses.append(GenerationUse(index, generation, stops[index], num_rounds[index], _domain_uses(
            generation, counts, targets[index], stops[index] - generation.position)))
    return tuple(uses)


def count_domains(reader: PlanReader, start: int, stop: int) -> np.ndarray:
    """Return how many of the positions [start, stop) each domain of the table fills."""
    num_ids = len(reader.plan.table)
    counts = np.zeros(num_ids, np.int64)
    for first in range(start, stop, _CHUNK):
        records = reader.positions(first, min(first + _CHUNK, stop))
        counts += np.bincount(records["domain"], minlength=num_ids)
    return counts


def next_ordinals(reader: PlanReader, start: int, stop: int) -> np.ndarray:
    """Return (len(table),) int64: for each domain the ordinal after the largest in [start, stop),
    0 where it has none there.
    """
    found = np.zeros(len(reader.plan.table), np.int64)
    for first in range(start, stop, _CHUNK):
        records = reader.positions(first, min(first + _CHUNK, stop))
        np.maximum.at(found, records["domain"], records["sample"] + 1)
    return found


def _domain_uses(
    generation: Generation, counts: np.ndarray, targets: np.ndarray, num_positions: int
) -> tuple[DomainUse, ...]:
    return tuple(
        DomainUse(
            name=domain.name, id=i, num_samples=domain.num_samples, num_drawn=int(counts[i]),
            num_drawn_before=generation.cursors[i], share=int(counts[i]) / max(1, num_positions),
            target=float(target) / max(1, num_positions))
        for domain, i, target in zip(
            generation.header.domains, generation.domain_ids, targets, strict=True))


def last_step(reader: PlanReader) -> LossRow | None:
    """Return the newest row of the ledger."""
    path = reader.directory / LEDGER
    found = last_line(path)
    return None if found is None else parsed(path, found[0], LossRow)


def decoded(reader: PlanReader, start: int, stop: int) -> Iterator[tuple[int, str, int, int, int]]:
    """Yield (position, domain name, epoch, index within the epoch, ordinal).

    The index is that before the epoch's shuffle.

    Raises:
        PlanError: a position is not decided.
    """
    table = reader.plan.table
    for first in range(start, stop, _CHUNK):
        records = reader.positions(first, min(first + _CHUNK, stop))
        for offset, (domain, ordinal) in enumerate(records.tolist()):
            epoch, index = divmod(ordinal, table[domain].num_samples)
            yield first + offset, table[domain].name, epoch, index, ordinal
