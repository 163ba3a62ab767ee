"""`plan.json`: what a plan was made from, and each later change of it.

The **domain table** is append-only. A domain is known by (name, fingerprint, seq_length, seed):
while these stay, it keeps its id, its cursor and its carry; when one changes, it is another domain
that starts at ordinal 0. A **generation** is a stretch of the run with one set of settings; a change
that is allowed at a checkpoint, or forced with `--d3-resume fork`, appends one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_d3.errors import PlanError
from megatron_d3.plan.batch_schedule import BatchSchedule
from megatron_d3.types import DomainInfo

VERSION = 1
_MAX_DOMAINS = 1 << 15  # table ids are int16
# The parts of the configuration that decide the order of samples. The rest (paths above all) may
# change freely: what it leads to is compared by fingerprint.
_DECISIVE = ("mix", "round_steps", "sampling", "order")


@dataclass(frozen=True)
class DomainRecord:
    """A row of the domain table; its index there is the `domain` of `positions.bin`.

    Attributes:
        name: as the user calls it.
        fingerprint: hash of the corpus, whatever its path.
        seq_length: tokens per sample.
        seed: of the shuffle.
        num_samples: training samples in one epoch.
        num_tokens: training tokens in one epoch.
    """

    name: str
    fingerprint: str
    seq_length: int
    seed: int
    num_samples: int
    num_tokens: int

    @property
    def info(self) -> DomainInfo:
        """What mixers see of it."""
        return DomainInfo(self.name, self.num_samples, self.num_tokens)


@dataclass(frozen=True)
class RunHeader:
    """What a run makes its plan from. Compared field by field on resume.

    Attributes:
        seq_length: tokens per sample.
        seed: of shuffles and draws.
        tokenizer: any text that names it.
        total_samples: positions of the whole run.
        batch_schedule: samples per training step.
        domains: in the order of every (K,) array.
        config: the resolved configuration, JSON-able; `mix`, `round_steps`, `sampling` and `order`
            of it are compared.
        versions: version of each algorithm that takes part, e.g. `{"static": 1, "shuffle": 1}`.
        read_ahead_steps: global batches decided beyond the next one; with it the losses up to step
            t act from step t + 1 + `read_ahead_steps` on. None where neither losses nor the model
            decide: the order does not depend on it then.
    """

    seq_length: int
    seed: int
    tokenizer: str
    total_samples: int
    batch_schedule: BatchSchedule
    domains: tuple[DomainRecord, ...]
    config: Mapping[str, Any]
    versions: Mapping[str, int]
    read_ahead_steps: int | None = None

    def __post_init__(self) -> None:
        # As it will be read back: tuples become lists, so that the two compare equal.
        for name in ("config", "versions"):
            plain = json.loads(json.dumps(getattr(self, name), allow_nan=False))
            object.__setattr__(self, name, plain)

    @property
    def names(self) -> tuple[str, ...]:
        """Domain names in order."""
        return tuple(domain.name for domain in self.domains)

    def to_json(self) -> dict[str, Any]:
        """Return nested dicts and lists."""
        plain = {name: getattr(self, name) for name in _PLAIN}
        if self.read_ahead_steps is not None:
            plain["read_ahead_steps"] = self.read_ahead_steps
        return plain | {
            "batch_schedule": self.batch_schedule.to_json(),
            "versions": dict(self.versions), "config": dict(self.config),
            "domains": [asdict(domain) for domain in self.domains],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RunHeader:
        """Rebuild a header from :meth:`to_json`."""
        return cls(
            batch_schedule=BatchSchedule.from_json(value["batch_schedule"]),
            domains=tuple(DomainRecord(**domain) for domain in value["domains"]),
            config=value["config"], versions=value["versions"],
            read_ahead_steps=value.get("read_ahead_steps"),
            **{name: value[name] for name in _PLAIN})

    def following(self, old: RunHeader) -> RunHeader:
        """Return the header with the old read-ahead, if that suffices and no other was asked for.

        What a DataLoader fetches early differs from life to life of a run (workers, micro-batch,
        data-parallel size); when a loss takes effect must not.
        """
        here, before = self.read_ahead_steps, old.read_ahead_steps
        if here is None or before is None or self.config.get("read_ahead_steps") is not None:
            return self
        return replace(self, read_ahead_steps=max(here, before))


_PLAIN = ("seq_length", "seed", "tokenizer", "total_samples")


@dataclass(frozen=True)
class Generation:
    """A stretch of the run with one set of settings.

    Attributes:
        iteration: training steps done when it began (the checkpoint's).
        position: its first position: samples consumed at that checkpoint. Positions that the
            generation before had decided beyond it were never trained on and do not count.
        round: its first round.
        domain_ids: (K,) table ids.
        cursors: for each row of the table at that time, samples drawn of it before `position`.
        header: the settings.
    """

    iteration: int
    position: int
    round: int
    domain_ids: tuple[int, ...]
    cursors: tuple[int, ...]
    header: RunHeader


@dataclass(frozen=True)
class PlanFile:
    """The content of `plan.json`.

    Attributes:
        table: the domain table.
        generations: at least one.
    """

    table: tuple[DomainRecord, ...]
    generations: tuple[Generation, ...]

    def __post_init__(self) -> None:
        if len(self.table) > _MAX_DOMAINS:
            raise PlanError(f"the plan's table has {len(self.table)} domains, at most "
                            f"{_MAX_DOMAINS} fit; start a new plan")

    @classmethod
    def begin(cls, header: RunHeader, *, iteration: int = 0, position: int = 0) -> PlanFile:
        """Return the file of a plan that starts at `position` after `iteration` steps."""
        first = Generation(iteration, position, 0, tuple(range(len(header.domains))),
                           (0,) * len(header.domains), header)
        return cls(header.domains, (first,))

    def table_with(self, header: RunHeader) -> tuple[tuple[DomainRecord, ...], tuple[int, ...]]:
        """Return the table with the header's domains in it, and their ids."""
        table = list(self.table)
        for domain in header.domains:
            if domain not in table:
                table.append(domain)
        return tuple(table), tuple(table.index(domain) for domain in header.domains)

    def with_generation(self, generation: Generation) -> PlanFile:
        """Return the file with one more generation (and its new domains)."""
        table, _ = self.table_with(generation.header)
        return PlanFile(table, (*self.generations, generation))

    def before(self, iteration: int) -> PlanFile:
        """Return the file without the generations that began after `iteration`."""
        kept = tuple(g for g in self.generations if g.iteration <= iteration)
        num_ids = max((len(g.cursors) for g in kept), default=0)
        return replace(self, table=self.table[:num_ids], generations=kept)

    def to_text(self) -> str:
        """Return the JSON text of `plan.json`."""
        generations = []
        for generation in self.generations:
            header = generation.header.to_json() | {"domains": list(generation.domain_ids)}
            generations.append({
                "iteration": generation.iteration, "position": generation.position,
                "round": generation.round, "cursors": list(generation.cursors), **header})
        value = {
            "version": VERSION,
            "dtype": [["domain", "<i2"], ["sample", "<i8"]],
            "domains": [asdict(domain) for domain in self.table],
            "generations": generations,
        }
        return json.dumps(value, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_text(cls, text: str, *, where: str) -> PlanFile:
        """Read the text of `plan.json`.

        Raises:
            PlanError: not JSON, another version, or a field is missing.
        """
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"{where}: not JSON ({error}); restore it from a backup") from error
        version = value.get("version") if isinstance(value, dict) else None
        if version != VERSION:
            raise PlanError(
                f"{where}: plan version {version}, expected {VERSION}; use the Megatron-D3 that "
                "wrote it, or start a new plan in another directory")
        try:
            table = tuple(DomainRecord(**domain) for domain in value["domains"])
            return cls(table, tuple(_generation(g, table) for g in value["generations"]))
        except (KeyError, TypeError, IndexError) as error:
            raise PlanError(f"{where}: damaged, {type(error).__name__} {error}; restore it from a "
                            "backup") from error


def _generation(value: Mapping[str, Any], table: Sequence[DomainRecord]) -> Generation:
    domains = [asdict(table[i]) for i in value["domains"]]
    return Generation(
        iteration=value["iteration"], position=value["position"], round=value["round"],
        domain_ids=tuple(value["domains"]), cursors=tuple(value["cursors"]),
        header=RunHeader.from_json({**value, "domains": domains}))


@dataclass(frozen=True)
class Difference:
    """One field in which a run differs from the plan it wants to continue.

    Attributes:
        field: dotted path.
        old: in the plan.
        new: in the run.
    """

    field: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"made with {self.field} {_brief(self.old)}, now {_brief(self.new)}"


def differences(old: RunHeader, new: RunHeader) -> list[Difference]:
    """Return every field that decides the order of samples and differs, most basic first."""
    found = [Difference(name, getattr(old, name), getattr(new, name))
             for name in ("seq_length", "seed", "tokenizer")
             if getattr(old, name) != getattr(new, name)]
    found += _domain_differences(old, new)
    for key in _DECISIVE:
        found += _value_differences(key, old.config.get(key), new.config.get(key))
    found += [Difference(f"versions.{name}", old.versions[name], new.versions[name])
              for name in old.versions if old.versions[name] != new.versions.get(name, old.versions[name])]
    if old.total_samples != new.total_samples:
        found.append(Difference("total_samples", old.total_samples, new.total_samples))
    if None not in (old.read_ahead_steps, new.read_ahead_steps) and (
            old.read_ahead_steps != new.read_ahead_steps):
        found.append(Difference("read_ahead_steps", old.read_ahead_steps, new.read_ahead_steps))
    if old.batch_schedule != new.batch_schedule:
        found.append(Difference("batch_schedule", old.batch_schedule.to_json(),
                                new.batch_schedule.to_json()))
    return found


def _domain_differences(old: RunHeader, new: RunHeader) -> list[Difference]:
    if sorted(old.names) != sorted(new.names):
        return [Difference("domains", list(old.names), list(new.names))]
    found = []
    if old.names != new.names:
        found.append(Difference("domain order", list(old.names), list(new.names)))
    theirs = {domain.name: domain for domain in new.domains}
    for domain in old.domains:
        for key in ("fingerprint", "num_samples", "num_tokens"):
            before, after = getattr(domain, key), getattr(theirs[domain.name], key)
            if before != after and (key == "fingerprint" or old.seq_length == new.seq_length):
                found.append(Difference(f"domains.{domain.name}.{key}", before, after))
                break
    return found


def _value_differences(where: str, old: Any, new: Any) -> list[Difference]:
    """Compare two JSON values; name the deepest mapping keys that differ."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        found = []
        for key in dict.fromkeys((*old, *new)):
            found += _value_differences(f"{where}.{key}", old.get(key), new.get(key))
        return found
    return [] if old == new else [Difference(where, old, new)]


def _brief(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 200 else text[:197] + "..."
