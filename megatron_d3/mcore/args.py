"""Megatron's arguments: our six flags, what is refused, and the few values the rest reads.

`--d3-*` flags are frozen: a new option is a field of the YAML file, not a flag. Megatron's `args` is
read here once, into :class:`RunArgs`; no other file of the package looks into it, except for the
counters that Megatron itself advances (`mcore/runtime.py`).
"""

from __future__ import annotations

import argparse
import os
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_d3.errors import ConfigError
from megatron_d3.plan.batch_schedule import BatchSchedule

# What Megatron's own defaults cannot do without a GPU. Set as parser defaults, so that a flag file
# written for GPUs runs on a laptop unchanged and an explicit flag still wins.
_CPU_DEFAULTS: dict[str, Any] = {
    "distributed_backend": "gloo",
    "transformer_impl": "local",
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "cross_entropy_loss_fusion": False,
    "no_persist_layer_norm": True,
    "async_tensor_model_parallel_allreduce": False,
}


def add_d3_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the `--d3-*` flags to Megatron's parser."""
    group = parser.add_argument_group("d3", "Megatron-D3: decide the data while the model learns")
    group.add_argument(
        "--d3-config", type=Path, metavar="PATH",
        help="YAML file of domains and mixture. Without it this is stock Megatron.")
    group.add_argument(
        "--d3-set", action="append", default=[], metavar="KEY=VALUE",
        help="override one value of the YAML file, e.g. round_steps=10 or 'mix={type: natural}'; "
             "may be repeated")
    group.add_argument(
        "--d3-plan-dir", type=Path, metavar="DIR",
        help="where the plan is written (default: d3/ below --save)")
    group.add_argument(
        "--d3-resume", choices=("strict", "fork"), default="strict",
        help="strict (default): refuse to continue a plan made with other settings; fork: continue "
             "with the new settings on purpose, keeping the cursor of every unchanged domain")
    group.add_argument(
        "--d3-plugin", action="append", default=[], metavar="MODULE",
        help="import MODULE, which may define mixers of its own; may be repeated")
    group.add_argument(
        "--d3-dry-run", action="store_true",
        help="print the resolved configuration, the domains and the first segment, then exit")
    return parser


def use_cpu_defaults(parser: argparse.ArgumentParser) -> None:
    """Replace the parser's defaults that need a GPU by those that run on a CPU."""
    known = {action.dest for action in parser._actions}
    parser.set_defaults(**{k: v for k, v in _CPU_DEFAULTS.items() if k in known})


@dataclass(frozen=True)
class RunArgs:
    """What Megatron-D3 reads of Megatron's arguments.

    Attributes:
        plan_dir: where the plan is.
        load_plan_dir: the plan beside the checkpoint to load, where that is another run's.
        total_samples: training samples of the whole run.
        batch_schedule: samples of each global batch.
        eval_samples: samples of one evaluation.
        read_ahead: positions the DataLoader workers may fetch before training reaches them.
    """

    config: Path
    overrides: tuple[str, ...]
    plan_dir: Path
    load_plan_dir: Path | None
    resume: Literal["strict", "fork"]
    plugins: tuple[str, ...]
    is_dry_run: bool
    seed: int
    seq_length: int
    total_samples: int
    batch_schedule: BatchSchedule
    micro_batch_size: int
    data_parallel_size: int
    read_ahead: int
    eval_samples: int
    tokenizer: str
    log_interval: int
    tensorboard_log_interval: int
    has_checkpoints: bool
    is_evaluation_only: bool
    save_interval: int | None
    iterations_to_skip: tuple[int, ...]
    reset_position_ids: bool
    reset_attention_mask: bool
    eod_mask_loss: bool
    create_attention_mask: bool
    allow_ambiguous_pad_tokens: bool


def read_run_args(args: argparse.Namespace, batch_schedule: BatchSchedule) -> RunArgs:
    """Read what a planned run needs of Megatron's arguments.

    Args:
        args: Megatron's validated arguments.
        batch_schedule: the global batch sizes, from Megatron's own calculator.

    Raises:
        ConfigError: the plan has no place, or the run no length.
    """
    if args.d3_plan_dir is None and args.save is None:
        raise ConfigError(
            "--d3-config: the plan needs a place; give --save DIR (plan in DIR/d3) or --d3-plan-dir")
    plan_dir = args.d3_plan_dir or Path(args.save) / "d3"
    load_plan_dir = None
    # With --finetune the checkpoint gives its weights only: this run's data begins anew.
    is_continued = bool(args.load) and not args.finetune
    if args.d3_plan_dir is None and is_continued and Path(args.load) != Path(args.save):
        load_plan_dir = Path(args.load) / "d3"
    prefetched = 2 * args.num_workers * args.micro_batch_size * args.data_parallel_size
    return RunArgs(
        config=args.d3_config,
        overrides=tuple(args.d3_set),
        plan_dir=plan_dir,
        load_plan_dir=load_plan_dir,
        resume=args.d3_resume,
        plugins=tuple(args.d3_plugin),
        is_dry_run=args.d3_dry_run,
        seed=args.seed,
        seq_length=args.seq_length,
        total_samples=_total_samples(args, batch_schedule),
        batch_schedule=batch_schedule,
        micro_batch_size=args.micro_batch_size,
        data_parallel_size=args.data_parallel_size,
        read_ahead=prefetched,
        eval_samples=args.eval_iters * args.eval_global_batch_size,
        tokenizer=tokenizer_name(args),
        log_interval=args.log_interval,
        tensorboard_log_interval=args.tensorboard_log_interval,
        has_checkpoints=args.save is not None,
        is_evaluation_only=args.skip_train,
        save_interval=args.save_interval,
        iterations_to_skip=tuple(args.iterations_to_skip),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
    )


def _total_samples(args: argparse.Namespace, schedule: BatchSchedule) -> int:
    """Samples in the whole global batches that Megatron will train on.

    With `--train-samples` a constant batch size drops an incomplete last batch, a batch-size
    schedule fills it up (`megatron.training.training.update_train_iters`).

    Raises:
        ConfigError: the run has no length, or not one global batch.
    """
    if args.train_iters:
        return schedule.stop_after(0, args.train_iters)
    if not args.train_samples:
        raise ConfigError(
            "--d3-config: the plan needs the length of the run; give --train-samples or "
            "--train-iters")
    num_steps = bisect_left(
        range(args.train_samples), args.train_samples, key=lambda n: schedule.stop_after(0, n))
    if args.step_batch_size_schedule is None:
        num_steps = args.train_samples // args.global_batch_size
    if num_steps == 0:
        raise ConfigError(
            f"--train-samples: got {args.train_samples}, expected at least one global batch of "
            f"{args.global_batch_size}")
    return schedule.stop_after(0, num_steps)


def tokenizer_name(args: argparse.Namespace) -> str:
    """The tokenizer as the plan records it: type, file name and vocabulary size."""
    model = args.tokenizer_model or args.vocab_file or ""
    return f"{args.tokenizer_type}:{os.path.basename(str(model))}:{args.padded_vocab_size}"


# (attribute, value that is fine, flag, why it is refused)
_Refusal = tuple[str, Any, str, str]
# Megatron's own scripts do these; an entry point that ignored them would train something else.
_OTHER_SCRIPTS: tuple[_Refusal, ...] = (
    ("sft", False, "--sft", "packing for fine-tuning changes what a sample is"),
    ("perform_rl_step", False, "--perform-rl-step", "RL makes its own samples"),
    ("fim_data", False, "--fim-data", "fill-in-the-middle changes what a sample is"),
    ("hybrid_context_parallel", False, "--hybrid-context-parallel",
     "it packs samples of other lengths"),
    ("mtp_num_layers", None, "--mtp-num-layers", "multi-token prediction has a loss of its own"),
    ("logits_load_dir", None, "--logits-load-dir", "distillation has a loss of its own"),
    ("modelopt_enabled", False, "--modelopt-enabled", "quantisation builds another model"),
)
_NO_PLAN: tuple[_Refusal, ...] = (
    ("mock_data", False, "--mock-data", "mock data has no domains"),
    ("dataloader_inter_document_masking", False, "--dataloader-inter-document-masking",
     "packed attention per document is not planned yet; use --reset-attention-mask"),
    ("phase_transition_iterations", None, "--phase-transition-iterations",
     "use a schedule (mix.type: schedule) for phases"),
    ("data_path", None, "--data-path", "the domains of --d3-config replace it"),
    ("data_args_path", None, "--data-args-path", "the domains of --d3-config replace it"),
    ("train_data_path", None, "--train-data-path", "the domains of --d3-config replace it"),
    ("valid_data_path", None, "--valid-data-path", "each domain of --d3-config keeps its own"),
    ("test_data_path", None, "--test-data-path", "each domain of --d3-config keeps its own"),
    ("per_split_data_args_path", None, "--per-split-data-args-path",
     "the domains of --d3-config replace it"),
    ("multiple_validation_sets", False, "--multiple-validation-sets",
     "every evaluation reports each domain by itself"),
    ("full_validation", False, "--full-validation",
     ("Megatron 0.19 fails in its first evaluation; set --eval-iters to cover the held-out "
      "samples, which --d3-dry-run counts")),
    ("rampup_batch_size", None, "--rampup-batch-size",
     "this Megatron ignores it; use --step-batch-size-schedule"),
    ("decrease_batch_size_if_needed", False, "--decrease-batch-size-if-needed",
     "batches would skip planned samples"),
)


def refuse(args: argparse.Namespace) -> None:
    """Refuse by name what this entry point, or a plan, cannot do; `args` not yet validated.

    Raises:
        ConfigError: an option changes what a sample or the loss is, or contradicts the plan.
    """
    for flag, why in _asked(args, _OTHER_SCRIPTS):
        raise ConfigError(f"{flag}: not possible with megatron_d3.pretrain: {why}")
    if args.d3_config is None:
        return
    if args.dataloader_type not in (None, "single"):
        raise ConfigError(
            f"--dataloader-type {args.dataloader_type}: not possible with --d3-config: the plan is "
            "the order; leave it out or use single")
    for value, flag, why in (
        (args.eval_interval, "--eval-interval", "the number of steps between two evaluations"),
        (args.save_interval or not args.save, "--save-interval",
         "the number of steps between two checkpoints in --save"),
    ):
        if value is None or value is False:
            raise ConfigError(f"{flag}: missing, expected {why}, e.g. {flag} 500")
    for flag, why in _asked(args, _NO_PLAN):
        raise ConfigError(f"{flag}: not possible with --d3-config: {why}")


def _asked(args: argparse.Namespace, refused: tuple[_Refusal, ...]) -> Iterator[tuple[str, str]]:
    for attribute, fine, flag, why in refused:
        value = getattr(args, attribute, fine)  # some flags exist in some Megatron versions only
        if value != fine and value:
            yield flag, why


def check_cpu_args(args: argparse.Namespace) -> None:
    """Refuse what needs a GPU, before Megatron fails in the middle of it.

    Raises:
        ConfigError: context parallelism, Transformer Engine, fp8/fp4 or CUDA graphs were asked for
            on a machine without a GPU.
    """
    needs_gpu = (
        (args.context_parallel_size > 1, "--context-parallel-size",
         "needs Transformer Engine's attention; use 1"),
        (args.transformer_impl != "local", f"--transformer-impl {args.transformer_impl}",
         "needs Transformer Engine; leave it out or use local"),
        (args.fp8 is not None, "--fp8-format", "needs Transformer Engine; use --bf16"),
        (args.cuda_graph_impl != "none", "--cuda-graph-impl", "needs CUDA; leave it out"),
        (args.distributed_backend == "nccl", "--distributed-backend nccl",
         "needs CUDA; leave it out or use gloo"),
    )
    for is_asked, flag, why in needs_gpu:
        if is_asked:
            raise ConfigError(f"{flag}: not possible on a CPU: {why}")
