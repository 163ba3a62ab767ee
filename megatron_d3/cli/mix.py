"""`megatron-d3 mix propose RUNS.csv`: a mixture from finished small runs."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np

from megatron_d3.errors import ConfigError
from megatron_d3.plan.files import write_atomically
from megatron_d3.propose import BACK_ENDS, Limits, Proposal, Runs, limits_of, read_runs

NAME = "mix"
HELP = "propose a mixture from the losses of finished small runs"
EXAMPLE = """\
megatron-d3 mix propose runs.csv --out weights.json
megatron-d3 mix propose runs.csv --target wiki --prior web=8 code=2 --max-kl 0.2 --cap code=0.4
megatron-d3 mix propose runs.csv --back-end regmix

runs.csv:
  run,weight/web,weight/code,loss/wiki,loss/math
  r0,0.7,0.3,3.1,2.4
  ..."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subverb and its flags."""
    verbs = parser.add_subparsers(dest="subverb", required=True, metavar="propose")
    propose = verbs.add_parser(
        "propose", help="fit each loss against the mixture, minimise their mean",
        description="Fit each loss column against the mixture and minimise their mean within the "
                    "limits. Refuses runs that cannot support the fit.")
    propose.add_argument("runs", type=Path, metavar="RUNS.csv",
                         help="columns weight/DOMAIN (any unit) and loss/NAME (nats per token), a "
                              "row a run")
    propose.add_argument("--back-end", choices=tuple(BACK_ENDS), default="loglinear",
                         help="loglinear (default): c + exp(t.x), exact optimum; regmix: gradient "
                              "boosting, mean of the best simulated mixtures (needs scikit-learn)")
    propose.add_argument("--target", nargs="+", default=[], metavar="NAME",
                         help="loss columns whose mean is minimised (default: all)")
    propose.add_argument("--prior", nargs="+", default=[], metavar="DOMAIN=W",
                         help="mixture that --max-kl is measured from (default: uniform)")
    propose.add_argument("--max-kl", type=_positive, default=math.inf, metavar="NATS",
                         help="greatest KL divergence from the prior (default: none)")
    propose.add_argument("--cap", nargs="+", default=[], metavar="DOMAIN=W",
                         help="the most of a domain: epochs allowed * its samples / the run's")
    propose.add_argument("--out", type=Path, metavar="FILE",
                         help="write the weights here, for mix: {type: static, weights: FILE}")
    propose.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Fit, print, write."""
    runs = read_runs(args.runs, args.target)
    limits = limits_of(runs.domains, _named(args.prior, "--prior"), _named(args.cap, "--cap"),
                       args.max_kl)
    proposal = BACK_ENDS[args.back_end](runs, limits)
    content = _content(runs, proposal, args.back_end)
    if args.out is not None:
        write_atomically(args.out, (json.dumps(content, indent=1) + "\n").encode())
    print(json.dumps(content) if args.json else _table(runs, limits, proposal))
    return 0


def _named(texts: list[str], flag: str) -> dict[str, float]:
    named = {}
    for text in texts:
        name, _, number = text.partition("=")
        try:
            named[name] = float(number)
        except ValueError:
            raise ConfigError(f"{flag} {text}: expected DOMAIN=NUMBER") from None
    return named


def _content(runs: Runs, proposal: Proposal, back_end: str) -> dict[str, object]:
    def by_target(values: np.ndarray) -> dict[str, float]:
        return dict(zip(runs.targets, values.tolist(), strict=True))

    return {
        "version": 1, "back_end": back_end, "runs": len(runs.losses),
        "weights": dict(zip(runs.domains, proposal.weights.tolist(), strict=True)),
        "predicted": by_target(proposal.predicted),
        "predicted_prior": by_target(proposal.predicted_prior),
        "left_out_error": by_target(proposal.errors),
        "left_out_error_of_mean": by_target(proposal.spreads),
        "duality_gap": proposal.gap if math.isfinite(proposal.gap) else None,
    }


def _table(runs: Runs, limits: Limits, proposal: Proposal) -> str:
    width = max(8, *(len(name) for name in (*runs.domains, *runs.targets)))
    lines = [f"{'domain':{width}} {'prior':>8} {'proposed':>9} {'cap':>8}  tried"]
    low, high = runs.weights.min(axis=0), runs.weights.max(axis=0)
    outside = []
    for i, name in enumerate(runs.domains):
        cap = f"{limits.upper[i]:.4f}" if np.isfinite(limits.upper[i]) else "-"
        lines.append(f"{name:{width}} {limits.prior[i]:8.4f} {proposal.weights[i]:9.4f} {cap:>8}  "
                     f"{low[i]:.4f}-{high[i]:.4f}")
        if not low[i] - 1e-9 <= proposal.weights[i] <= high[i] + 1e-9:
            outside.append(name)
    head = f"{'loss':{width}} {'at prior':>8} {'proposed':>9} {'error':>8} of left-out runs"
    lines += ["", f"{head} ({len(runs.losses)} runs; of their mean)"]
    for i, name in enumerate(runs.targets):
        lines.append(f"{name:{width}} {proposal.predicted_prior[i]:8.4f} "
                     f"{proposal.predicted[i]:9.4f} {proposal.errors[i]:8.4f} "
                     f"({proposal.spreads[i]:.4f})")
    if math.isfinite(proposal.gap):
        gap = f"{max(proposal.gap, 0.0):.1e} nats (duality gap)"
        lines += ["", f"no mixture within the limits has a fitted mean loss lower by more than {gap}"]
    if outside:
        lines += ["", f"beyond what the runs tried: {', '.join(outside)}"]
        lines.append("the fit extrapolates there: use --max-kl or --cap, or add runs")
    return "\n".join(lines)


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not number > 0:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number > 0")
    return number
