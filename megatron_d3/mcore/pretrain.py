"""The entry point: parse Megatron's flags, connect the seams, call `megatron.training.pretrain`."""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from megatron_d3.errors import ConfigError, D3Error
from megatron_d3.mcore import cpu

_RANK_0_SECONDS = 2.0


Task = Callable[[Any, Any], None]


def main(started_at: float | None = None, *, task: Task | None = None) -> None:
    """Run Megatron's GPT pretraining, planned if `--d3-config` is given.

    Args:
        started_at: `time.time()` at the start of the process, for Megatron's start-up report.
        task: called with the planned run's settings and Megatron's arguments once the processes may
            talk to each other, in place of training.
    """
    try:
        _main(started_at or time.time(), task)
    except D3Error as error:
        rank = int(os.environ.get("RANK", "0"))
        if rank > 0:
            # Most likely rank 0 says the same, and the launcher ends this process meanwhile.
            time.sleep(_RANK_0_SECONDS)
        sys.exit(f"megatron_d3.pretrain: rank {rank}: {type(error).__name__}: {error}")
    except RuntimeError as error:
        from megatron_d3.mcore.collective import why_it_failed

        reason = why_it_failed(error)
        if reason is None:
            raise
        traceback.print_exc()
        sys.exit(f"megatron_d3.pretrain: rank {os.environ.get('RANK', '0')} on "
                 f"{socket.gethostname()}: {reason}")


def _main(started_at: float, task: Task | None) -> None:
    is_cpu = cpu.wanted()
    if is_cpu:
        cpu.enable()
    # Imported here and not above: Megatron reads torch.cuda while it is imported.
    from megatron.core.enums import ModelType
    from megatron.training import initialize, inprocess_restart, pretrain, set_startup_timestamps
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args, parse_args

    from megatron_d3.mcore import args as d3_args
    from megatron_d3.mcore import compat, exit_signal, step_hook, stock_data
    from megatron_d3.mcore.forward_step import ForwardStep
    from megatron_d3.mcore.model import model_config

    compat.check()
    compat.use_prebuilt_helpers()
    compat.mend_distributed_optimizer_load()
    set_startup_timestamps(program_start=started_at, main_entry=time.time())

    def add_arguments(parser: Any) -> Any:
        if is_cpu:
            d3_args.use_cpu_defaults(parser)
        return d3_args.add_d3_arguments(parser)

    pretrain, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    # Before Megatron's own assertions, so that what we refuse is refused by name.
    asked = parse_args(add_arguments)
    d3_args.refuse(asked)
    if is_cpu:
        d3_args.check_cpu_args(asked)
    args = parse_and_validate_args(
        extra_args_provider=add_arguments, args_defaults={"tokenizer_type": "GPT2BPETokenizer"})

    setup = None
    if args.d3_config is not None:
        from megatron_d3.mcore.planned_setup import PlannedSetup

        setup = PlannedSetup(args)
        if setup.note is not None and args.rank == 0:
            print(f" {setup.note}", flush=True)
        if args.d3_dry_run:
            if args.rank == 0:
                print(setup.preview(), flush=True)
            return
        if task is not None:
            initialize.initialize_megatron()
            task(setup, args)
            return
    elif task is not None:
        raise ConfigError("--d3-config: missing; this needs the configuration of the run")
    elif _has_d3_flags(args):
        raise ConfigError("--d3-* flags were given without --d3-config PATH, which they belong to")

    if setup is None:
        provide, forward_step, after_evaluation = stock_data.provide, ForwardStep(), None
    else:
        run = setup.planned_run()
        step_hook.install(run)
        if run.orderer is not None and not args.skip_train:
            step_hook.install_model_hook(run.orderer.attach)
        provide, forward_step = run.provide, ForwardStep(run.tally, run.proxy)
        after_evaluation = run.after_evaluation
    if args.exit_signal_handler:
        exit_signal.shield_children(args.exit_signal)
    try:
        if setup is not None and args.rank == 0:
            # Before the checkpoint is chosen: an old life may be about to save another one. The
            # other ranks wait where the processes meet.
            run.claim()
        pretrain(
            pretrain_cfg_container_from_args(args, model_config(args)),
            provide,
            ModelType.encoder_or_decoder,
            forward_step,
            store=store,
            non_loss_data_func=after_evaluation,
        )
    finally:  # Megatron leaves by sys.exit too
        if args.exit_signal_handler:
            exit_signal.ignore(args.exit_signal)
        if setup is not None:
            run.close()


def _has_d3_flags(args: Any) -> bool:
    return bool(args.d3_set or args.d3_plan_dir or args.d3_plugin or args.d3_dry_run
                or args.d3_resume != "strict")
