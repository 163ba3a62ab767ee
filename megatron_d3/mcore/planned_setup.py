"""From flags and YAML to a :class:`PlannedRun`: everything that can fail without a GPU, first."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

from megatron_d3.config import RunConfig, load_config
from megatron_d3.corpus.domain import Domain
from megatron_d3.errors import ConfigError
from megatron_d3.mcore.args import RunArgs, read_run_args
from megatron_d3.mcore.datasets import SampleMaker, pad_id
from megatron_d3.mcore.dry_run import preview
from megatron_d3.mcore.planned_run import PlannedRun
from megatron_d3.mcore.proxy_setup import proxy_step
from megatron_d3.mcore.window_setup import window_orderer
from megatron_d3.plan.batch_schedule import BatchSchedule
from megatron_d3.plan.header import RunHeader
from megatron_d3.planning import decider_factory, open_domains, plan_header, rehearse_mix
from megatron_d3.registry import load_plugins


class PlannedSetup:
    """A run's settings, checked, before Megatron starts its processes' groups.

    Args:
        args: Megatron's validated arguments.

    Raises:
        ConfigError, CorpusError: anything that cannot work.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args: RunArgs = read_run_args(args, batch_schedule(args))
        mixers = load_plugins(self.args.plugins)
        self.config: RunConfig = load_config(
            self.args.config, self.args.overrides, mixers=mixers)
        self.domains: list[Domain] = open_domains(
            self.config, seq_length=self.args.seq_length, seed=self.args.seed)
        _require_held_out(self.domains, self.args.eval_samples)
        self.header: RunHeader = plan_header(
            self.config, self.domains, seq_length=self.args.seq_length, seed=self.args.seed,
            tokenizer=self.args.tokenizer, total_samples=self.args.total_samples,
            batch_schedule=self.args.batch_schedule, mixers=mixers,
            num_prefetched=self.args.read_ahead)
        self.note = rehearse_mix(self.config, self.header, mixers=mixers)
        self.make_decider = decider_factory(mixers)
        tokenizer = build_tokenizer(args)
        self.maker = sample_maker(self.args, tokenizer)
        self.proxy = proxy_step(self.config, self.header, args)
        self.orderer = window_orderer(
            self.config, self.domains, self.maker, args, header=self.header,
            vocab_size=int(tokenizer.vocab_size))

    def preview(self) -> str:
        """The text of `--d3-dry-run`."""
        decider = self.make_decider(self.header, tuple(range(len(self.domains))))
        return preview(self.config, self.domains, self.header, decider)

    def planned_run(self) -> PlannedRun:
        """The run, once Megatron's processes may talk to each other."""
        return PlannedRun(
            self.args, self.domains, header=self.header, make_decider=self.make_decider,
            maker=self.maker, proxy=self.proxy, orderer=self.orderer)


def batch_schedule(args: argparse.Namespace) -> BatchSchedule:
    """Megatron's global batch sizes, constant or by `--step-batch-size-schedule`."""
    if args.step_batch_size_schedule is None:
        return BatchSchedule.constant(args.global_batch_size)
    return BatchSchedule.from_json(StepBatchsizeNumMicroBatchesCalculator._parse_schedule(
        args.step_batch_size_schedule, args.seq_length))


def sample_maker(args: RunArgs, tokenizer: Any) -> SampleMaker:
    """How token ids become Megatron's fields, from its flags and tokenizer."""
    return SampleMaker(
        eod=int(tokenizer.eod), pad=pad_id(
            tokenizer, is_ambiguous_allowed=args.allow_ambiguous_pad_tokens),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask, eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask)


def _require_held_out(domains: Sequence[Domain], eval_samples: int) -> None:
    if eval_samples != 0 and not any(domain.valid for domain in domains):
        raise ConfigError(
            "d3.domains: evaluation is on, but no domain has a held-out part; set valid_fraction "
            "or valid_paths, or turn evaluation off with --eval-iters 0")
