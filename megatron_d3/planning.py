"""From a configuration to a plan's settings: the header, and the decider of a header.

The training run and the tools that look at its plan later build their deciders here, so that both
decide the same.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_d3.config import RunConfig, parse_config
from megatron_d3.corpus import shuffle
from megatron_d3.corpus.domain import Domain, open_domain
from megatron_d3.errors import ConfigError
from megatron_d3.influence import objectives, probe_choice, settings, solvers
from megatron_d3.mix import MIXERS
from megatron_d3.plan import apportion, draft
from megatron_d3.plan.batch_schedule import BatchSchedule
from megatron_d3.plan.decide import Decider
from megatron_d3.plan.draft import WindowRule
from megatron_d3.plan.header import DomainRecord, RunHeader
from megatron_d3.plan.replay import DeciderFactory
from megatron_d3.registry import build_mix


def open_domains(config: RunConfig, *, seq_length: int, seed: int) -> list[Domain]:
    """Open the corpora of all domains, in domain order.

    Args:
        config: the run's configuration.
        seq_length: tokens of a sample.
        seed: of the shuffles, unless the configuration has its own.

    Raises:
        CorpusError: naming the domain whose corpus cannot be used.
    """
    return [
        open_domain(
            name, paths=domain.paths, valid_paths=domain.valid_paths,
            valid_fraction=config.valid_fraction, order=domain.order, seq_length=seq_length,
            seed=seed if config.seed is None else config.seed)
        for name, domain in config.domains.items()
    ]


def plan_header(
    config: RunConfig, domains: Sequence[Domain], *, seq_length: int, seed: int, tokenizer: str,
    total_samples: int, batch_schedule: BatchSchedule, mixers: Mapping[str, type] = MIXERS,
    num_prefetched: int = 0,
) -> RunHeader:
    """Describe what a run makes its plan from. Reads every `.idx` once, for the fingerprints.

    Args:
        num_prefetched: samples that the DataLoaders of all ranks may fetch before training reaches
            them.

    Raises:
        ConfigError: `read_ahead_steps` does not cover them, or the run is shorter than a window.
    """
    seed = seed if config.seed is None else config.seed
    records = tuple(
        DomainRecord(
            name=domain.name, fingerprint=domain.fingerprint, seq_length=seq_length, seed=seed,
            num_samples=domain.info.num_samples, num_tokens=domain.info.num_tokens)
        for domain in domains)
    versions = {config.mix.type: mixers[config.mix.type].VERSION,  # type: ignore[attr-defined]
                "apportion": apportion.VERSION, "shuffle": shuffle.VERSION}
    if config.order is not None:
        _check_window(config.order.params.window, batch_schedule, total_samples)
        versions |= {"windows": draft.VERSION, "estimators": settings.ESTIMATORS_VERSION,
                     "objectives": objectives.VERSION,
                     "probe_choice": probe_choice.VERSION, "solvers": solvers.VERSION}
    return RunHeader(
        seq_length=seq_length, seed=seed, tokenizer=tokenizer, total_samples=total_samples,
        batch_schedule=batch_schedule, domains=records, config=config.to_dict(),
        versions=versions,
        read_ahead_steps=_read_ahead_steps(config, batch_schedule, num_prefetched, mixers))


def _check_window(window: int, schedule: BatchSchedule, total_samples: int) -> None:
    """Raise ConfigError unless the run can fill one window."""
    needed = schedule.stop_after(0, window)
    if needed > total_samples:
        num_steps = bisect_right(range(window + 1), total_samples,
                                 key=lambda n: schedule.stop_after(0, n)) - 1
        raise ConfigError(
            f"d3.order.window: got {window} global batches, which are {needed} samples, but the run "
            f"has {total_samples}; expected at most {num_steps}, or a longer run "
            "(--train-samples, --train-iters)")


def _read_ahead_steps(
    config: RunConfig, schedule: BatchSchedule, num_prefetched: int, mixers: Mapping[str, type]
) -> int | None:
    """Return the read-ahead that the run asks for or needs; None where neither losses nor the model
    decide."""
    is_online = mixers[config.mix.type].is_online  # type: ignore[attr-defined]
    if not is_online and config.order is None:
        return None
    needed = -(-num_prefetched // min(size for _, size in schedule.steps))
    if config.read_ahead_steps is None:
        return needed
    if config.read_ahead_steps < needed:
        raise ConfigError(
            f"d3.read_ahead_steps: got {config.read_ahead_steps}, expected at least {needed}: the "
            f"DataLoader fetches {num_prefetched} samples ahead (2 x --num-workers x "
            "--micro-batch-size x data-parallel size); raise it, or use fewer --num-workers")
    return config.read_ahead_steps


def decider_factory(mixers: Mapping[str, type] = MIXERS) -> DeciderFactory:
    """Return the function that builds the decider of a header.

    Args:
        mixers: built-in ones and those of plug-ins, by name.
    """

    def make_decider(header: RunHeader, table_ids: tuple[int, ...]) -> Decider:
        # The header's paths are absolute, so the folder does not matter.
        config = parse_config(_what_decides(header.config), folder=Path("/"), mixers=mixers)
        domains = [record.info for record in header.domains]
        mixer, cap, _ = build_mix(
            config.mix, domains, total_samples=header.total_samples, mixers=mixers)
        return Decider(
            domains=domains, table_ids=table_ids, mixer=mixer, cap=cap,
            total_samples=header.total_samples, batch_schedule=header.batch_schedule,
            seed=header.seed, sampling=config.sampling, round_steps=config.round_steps,
            windows=window_rule(config))

    return make_decider


def _what_decides(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Leave out of `order` how orders are found, which may be by settings that are no more: orders are
    read from the plan. A resume still compares them."""
    order = config.get("order")
    if not order:
        return config
    return {**config, "order": {key: order[key] for key in ("type", "window", "overlap")
                                if key in order}}


def window_rule(config: RunConfig) -> WindowRule | None:
    """Return how the run is cut into windows; None where samples keep their order."""
    if config.order is None:
        return None
    return WindowRule(config.order.params.window, overlap=config.order.params.overlap)


def rehearse_mix(
    config: RunConfig, header: RunHeader, *, mixers: Mapping[str, type] = MIXERS
) -> str | None:
    """Try the mixture against its epoch caps before the run starts.

    Returns:
        A sentence worth logging, or None.

    Raises:
        ConfigError: the run is longer than the caps allow; names the largest feasible run.
    """
    schedule = header.batch_schedule

    def step_at(position: int) -> int:
        return bisect_right(
            range(position + 1), position, key=lambda n: schedule.stop_after(0, n)) - 1

    _, _, note = build_mix(
        config.mix, [record.info for record in header.domains],
        total_samples=header.total_samples, mixers=mixers, step_at=step_at)
    return note
