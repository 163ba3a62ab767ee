"""`megatron-d3 simulate RUN.yaml --losses FILE|RUN`: play a mixer without training."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_d3.cli.plan import plan_directory
from megatron_d3.config import RunConfig, load_config
from megatron_d3.errors import ConfigError
from megatron_d3.fields import did_you_mean
from megatron_d3.loss_table import LossTable, read_losses, recorded_losses
from megatron_d3.plan.batch_schedule import BatchSchedule
from megatron_d3.plan.decide import Decider
from megatron_d3.plan.reader import PlanReader
from megatron_d3.planning import open_domains, window_rule
from megatron_d3.registry import build_mix, load_plugins
from megatron_d3.simulate import Simulation, report, simulate
from megatron_d3.types import DomainInfo

NAME = "simulate"
HELP = "play a mixer over recorded or made-up losses: shares, epochs, first exhaustion; no training"
EXAMPLE = """\
megatron-d3 simulate run.yaml --losses runs/demo/uniform
megatron-d3 simulate run.yaml --losses runs/demo/uniform --set mix.smoothing=0.9 --steps 5000
megatron-d3 simulate run.yaml --losses losses.csv --samples web=90000 code=20000 \\
    --seq-length 1024 --global-batch-size 256"""

_NUM_POINTS = 101  # of the trajectory in the JSON


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("config", type=Path, metavar="RUN.yaml", help="the file of --d3-config")
    parser.add_argument(
        "--losses", type=Path, required=True, metavar="FILE|RUN",
        help="CSV with a column `step` (1-based) and one of losses (nats per token) a domain, "
             "straight lines between its rows; or a run's --save directory, whose ledger, sizes, "
             "batch and sequence length are taken")
    parser.add_argument("--steps", type=_positive, help="steps played (default: to the last loss)")
    parser.add_argument(
        "--samples", nargs="+", metavar="NAME=N",
        help="samples in one epoch of each domain (default: those of the run, else the corpora are "
             "opened)")
    parser.add_argument("--seq-length", type=_positive, help="tokens a sample")
    parser.add_argument("--global-batch-size", type=_positive, help="samples a step")
    parser.add_argument("--read-ahead-steps", type=_count, metavar="N",
                        help="as the configuration's key (default: that, else the run's, else 0)")
    parser.add_argument("--seed", type=int, default=1234,
                        help="of `sampling: multinomial` (default 1234)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
                        help="override one value of the file, as --d3-set; may be repeated")
    parser.add_argument("--plugin", action="append", default=[], metavar="MODULE",
                        help="as --d3-plugin; may be repeated")
    parser.add_argument("--json", action="store_true", help="print JSON, with the trajectory")


@dataclass(frozen=True)
class _Setting:
    """Where the mixer plays."""

    domains: list[DomainInfo]
    table: LossTable
    seq_length: int
    schedule: BatchSchedule
    read_ahead_steps: int


def run(args: argparse.Namespace) -> int:
    """Play, print the table or JSON."""
    mixers = load_plugins(args.plugin)
    config = load_config(args.config, args.overrides, mixers=mixers)
    if config.mix.type == "doremi":
        raise ConfigError("d3.mix.type: got doremi, which samples uniformly whatever the losses; its "
                          "weights follow the excess over a reference model: megatron-d3 doremi")
    setting = _setting(args, config)
    num_steps = args.steps or int(setting.table.steps[-1])
    total = setting.schedule.stop_after(0, num_steps)
    mixer, cap, _ = build_mix(config.mix, setting.domains, total_samples=total, mixers=mixers)
    decider = Decider(
        domains=setting.domains, table_ids=range(len(setting.domains)), mixer=mixer, cap=cap,
        total_samples=total, batch_schedule=setting.schedule,
        seed=args.seed if config.seed is None else config.seed, sampling=config.sampling,
        round_steps=config.round_steps, windows=window_rule(config))
    played = simulate(
        decider, setting.table.until(num_steps), seq_length=setting.seq_length,
        read_ahead_steps=setting.read_ahead_steps)
    if args.json:
        content = _json(played, setting, config.mix.type)
        if config.order is not None:
            content["order"] = {"window": config.order.params.window, "simulated": "stored"}
        print(json.dumps(content))
        return 0
    title = (f"{config.mix.type}: {played.num_steps:,} of {num_steps:,} steps, "
             f"{int(played.samples.sum()):,} samples of {setting.seq_length:,} tokens, read-ahead "
             f"{setting.read_ahead_steps} steps")
    if config.order is not None:
        title += (f"; windows of {config.order.params.window} steps, in the stored order (that of "
                  f"{config.order.type} needs the model)")
    print(report(played, setting.domains, title=title))
    return 0


def _setting(args: argparse.Namespace, config: RunConfig) -> _Setting:
    names = list(config.domains)
    reader = PlanReader(plan_directory(args.losses)) if args.losses.is_dir() else None
    header = reader.plan.generations[-1].header if reader else None
    seq_length = args.seq_length or (header and header.seq_length)
    if args.global_batch_size:
        schedule = BatchSchedule.constant(args.global_batch_size)
    elif header:
        schedule = header.batch_schedule
    else:
        raise ConfigError("--global-batch-size: missing; a CSV of losses does not say it")
    if not seq_length:
        raise ConfigError("--seq-length: missing; a CSV of losses does not say it")
    if args.samples:
        domains = _given_domains(args.samples, names, seq_length)
    elif header and set(names) <= set(header.names) and seq_length == header.seq_length:
        known = {record.name: record.info for record in header.domains}
        domains = [known[name] for name in names]
    else:
        opened = open_domains(config, seq_length=seq_length, seed=args.seed)
        domains = [domain.info for domain in opened]
    table = recorded_losses(reader, names) if reader else read_losses(args.losses, names)
    ahead = [args.read_ahead_steps, config.read_ahead_steps, header and header.read_ahead_steps, 0]
    return _Setting(domains, table, seq_length, schedule,
                    next(steps for steps in ahead if steps is not None))


def _given_domains(
    texts: Sequence[str], names: Sequence[str], seq_length: int
) -> list[DomainInfo]:
    """Parse `--samples web=100 code=50`."""
    sizes: dict[str, int] = {}
    for text in texts:
        name, _, number = text.partition("=")
        if name not in names:
            raise ConfigError(f"--samples {text}: no such domain{did_you_mean(name, names)}")
        if not number.isdecimal() or int(number) < 1:
            raise ConfigError(f"--samples {text}: expected NAME=N, N >= 1")
        sizes[name] = int(number)
    missing = [name for name in names if name not in sizes]
    if missing:
        raise ConfigError(f"--samples: none given of {', '.join(missing)}")
    return [DomainInfo(name, sizes[name], sizes[name] * seq_length) for name in names]


def _json(played: Simulation, setting: _Setting, mixer: str) -> dict[str, object]:
    names = [domain.name for domain in setting.domains]
    total = max(1, int(played.samples.sum()))
    first = played.first_exhaustion
    at = np.unique(np.linspace(0, max(0, played.num_steps - 1), _NUM_POINTS).astype(int))
    return {
        "mixer": mixer, "steps": played.num_steps, "samples": int(played.samples.sum()),
        "read_ahead_steps": setting.read_ahead_steps,
        "domains": {
            domain.name: {
                "samples": int(played.samples[i]), "share": played.samples[i] / total,
                "epochs": played.samples[i] / domain.num_samples,
                "used_up_after_step": int(played.used_up_at[i]) or None,
            }
            for i, domain in enumerate(setting.domains)
        },
        "first_exhaustion": None if first is None else {
            "domain": names[first], "step": int(played.used_up_at[first])},
        "weights": [{"step": int(i) + 1, **dict(zip(names, played.weights[i].tolist(), strict=True))}
                    for i in at[:played.num_steps]],
    }


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer >= 1")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer >= 0")
    return int(text)
