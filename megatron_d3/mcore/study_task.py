"""`d3 study` inside Megatron: build and load what trains, draft its next units, measure them.

    setup_model_and_optimizer ── checkpoint ── next units (plan/next_units.py) ── Probe
                                                              influence/study.py ──┘
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from megatron.core import dist_checkpointing
from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training import get_tokenizer, training
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.initialize import set_jit_fusion_options

from megatron_d3.errors import ConfigError
from megatron_d3.influence.estimators import estimate
from megatron_d3.influence.probe_choice import choose_probes
from megatron_d3.influence.settings import D3Config
from megatron_d3.influence.sketch import make_sketch
from megatron_d3.influence.source import Influence, StepModel
from megatron_d3.influence.study import judge_settings, study
from megatron_d3.influence.study_cases import make_cases
from megatron_d3.influence.study_table import to_json, to_text
from megatron_d3.mcore import collective
from megatron_d3.mcore.model import model_config
from megatron_d3.mcore.probe import Probe, UnitSamples
from megatron_d3.mcore.reference_model import find_checkpoint
from megatron_d3.mcore.step_root import clip_of, learning_rate_of, steps_taken
from megatron_d3.mcore.study import Report, StudyJob
from megatron_d3.mcore.window_setup import probe_settings
from megatron_d3.mix.doremi import latest_checkpoint
from megatron_d3.plan.next_units import NextUnits, next_units
from megatron_d3.plan.reach import Checkpoint

MIN_UNITS = 3
"""Two units have two orders: the best one, and one of regret 2."""

# What makes a model another one, by Megatron's name. What it works out itself while it builds a
# model (num_query_groups) may be stored otherwise than given.
_SHAPE = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads",
          "group_query_attention", "kv_channels", "normalization", "swiglu", "position_embedding_type",
          "untie_embeddings_and_output_weights", "add_bias_linear", "padded_vocab_size")


def compare(setup: Any, args: argparse.Namespace, job: StudyJob) -> Report | None:
    """Measure the next units of a run and compare estimators and solvers; collective.

    Args:
        setup: a :class:`megatron_d3.mcore.planned_setup.PlannedSetup` of the run.
        args: Megatron's arguments; its process groups exist.
        job: what is asked for.

    Returns:
        The report on rank 0.

    Raises:
        ConfigError: no checkpoint, one of another model, too few units left, an unknown estimator,
            or flags with which a probe cannot work.
        ResumeError: the plan does not belong to the checkpoint.
        ProbeError: a unit's loss or gradient is not finite.
    """
    # What cannot be studied is refused before anything is loaded.
    make_cases(job.estimators, _config(
        setup, job, max(size for _, size in setup.header.batch_schedule.steps)))
    settings = probe_settings(args, int(get_tokenizer().vocab_size))
    folder = _require_checkpoint(args)
    chunks, optimizer = _load(args)
    probe = Probe(chunks, optimizer, settings)
    units = _next_units(setup, args, job)
    unit_size = units.records.shape[1]
    config = _config(setup, job, unit_size)
    cases = make_cases(job.estimators, config)
    sketch = make_sketch(config.sketch, probe.layout)
    read = _reader(setup, units)

    def measure(asked: D3Config, step: StepModel) -> Influence:
        places = choose_probes(
            units.records["domain"], asked.probe_sequences, num_curved=asked.num_curved,
            seed=[setup.header.seed, args.iteration])
        samples = UnitSamples(job.num_units, asked.probe_sequences,
                              lambda unit, sequence: read(unit, int(places[unit, sequence])))
        with probe.measuring(samples) as source:
            return estimate(source, sketch, asked, step)

    gamma = _gamma(config, optimizer)
    steps = [StepModel(gamma)]
    if steps_taken(optimizer) > 0:
        steps.append(StepModel(gamma, clip=clip_of(optimizer), uses_root=True))
    is_rank_0 = torch.distributed.get_rank() == 0
    for message in units.messages if is_rank_0 else ():
        print(f" {message}", file=sys.stderr)
    judge = judge_settings(config, job.judge, unit_size)
    seed = [setup.header.seed, args.iteration, crc32(b"d3 study")]
    studies = [study(measure, cases, step, judge=judge, seed=seed,
                     report=_say if is_rank_0 else lambda text: None) for step in steps]
    if not is_rank_0:
        return None
    about = {
        "checkpoint": str(folder), "iteration": args.iteration,
        "plan": None if units.plan is None else str(units.plan), "units": job.num_units,
        "sequences_per_unit": unit_size, "solver": config.solver}
    head = (f"{folder}, iteration {args.iteration}: the next {job.num_units} units of {unit_size} "
            f"sequences {_origin(units)}")
    text = to_text(studies, solver=config.solver, num_units=job.num_units)
    return Report(f"{head}\n{text}", to_json(studies, **about))


def _say(text: str) -> None:
    print(f" d3 study: {text}", file=sys.stderr, flush=True)


def _origin(units: NextUnits) -> str:
    if units.plan is None:
        return "of a plan made from the configuration (there is none beside the checkpoint)"
    return f"of the plan {units.plan}"


def _config(setup: Any, job: StudyJob, unit_size: int) -> D3Config:
    """Return the run's settings of D3, or the default ones, for a window of L units of G samples."""
    if job.num_units < MIN_UNITS:
        raise ConfigError(f"--units: got {job.num_units}, expected at least {MIN_UNITS}")
    order = setup.config.order
    config = D3Config() if order is None else order.params
    num_sequences = min(config.probe_sequences, unit_size)
    return replace(config, window=job.num_units, probe_sequences=num_sequences,
                   min_agreement=None, overlap=False, every=1, preset=None)


def _require_checkpoint(args: argparse.Namespace) -> Path:
    """Return the folder of the checkpoint to load, `iter_*`.

    Raises:
        ConfigError: there is none, it is of another model, or flags leave the optimizer out.
    """
    if args.skip_train:
        raise ConfigError("--skip-train: not possible with d3 study: it builds no optimizer")
    if args.load is None:
        raise ConfigError("--load: missing, expected the --save folder of the run to look at")
    folder = latest_checkpoint(Path(args.load))
    if folder is not None and args.ckpt_step is not None:
        folder = Path(args.load) / f"iter_{args.ckpt_step:07d}"
    if folder is None or not folder.is_dir():
        raise ConfigError(f"--load: no checkpoint in {folder or args.load}; expected the --save "
                          "folder of a run, and with --ckpt-step an iteration that was saved")
    if dist_checkpointing.check_is_distributed_checkpoint(str(folder)):
        theirs = find_checkpoint(folder, where="--load").args
        for name in _SHAPE:
            if hasattr(theirs, name) and getattr(theirs, name) != getattr(args, name):
                raise ConfigError(
                    f"--load: {folder} is of a model with {name} {getattr(theirs, name)}, the flags "
                    f"say {getattr(args, name)}; give the flags of its run")
    return folder


def _load(args: argparse.Namespace) -> tuple[list[Any], Any]:
    """Build model and optimizer and load the checkpoint, as `pretrain` does before it trains."""
    set_jit_fusion_options(tp_size=args.tensor_model_parallel_size)
    chunks, optimizer, _ = training.setup_model_and_optimizer(
        ModelType.encoder_or_decoder, checkpointing_context={},
        cfg_container=pretrain_cfg_container_from_args(args, model_config(args)),
        pg_collection=ProcessGroupCollection.use_mpu_process_groups())
    return chunks, optimizer


def _next_units(setup: Any, args: argparse.Namespace, job: StudyJob) -> NextUnits:
    # The plan beside the checkpoint first: --save may be the place of another run to come.
    directories = [d for d in (setup.args.load_plan_dir, setup.args.plan_dir) if d is not None]
    checkpoint = Checkpoint(args.iteration, args.consumed_train_samples)
    return collective.on_rank_0(lambda: next_units(
        directories, setup.header, setup.make_decider, checkpoint=checkpoint,
        num_units=job.num_units))


def _reader(setup: Any, units: NextUnits) -> Callable[[int, int], dict[str, Any]]:
    number_of = {table_id: i for i, table_id in enumerate(units.table_ids)}

    def read(unit: int, sequence: int) -> dict[str, Any]:
        record = units.records[unit, sequence]
        domain = setup.domains[number_of[int(record["domain"])]]
        fields: dict[str, Any] = setup.maker.fields(domain.train_tokens(int(record["sample"])))
        return fields

    return read


def _gamma(config: D3Config, optimizer: Any) -> float:
    gamma = learning_rate_of(optimizer) if config.gamma == "lr" else float(config.gamma)
    if gamma == 0:
        raise ConfigError("d3.order.gamma: lr, but the learning rate is 0 at this checkpoint, and no "
                          "step has an influence; give a number (--d3-set order.gamma=1e-3)")
    return gamma
