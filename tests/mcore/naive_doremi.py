"""DoReMi's loss and gradient written down naively, beside a real step; and faults in its weights.

Used as `setup=` of the launcher, inside the ranks.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.mcore.plans import ledger


def alphas_from(rows: list[dict[str, Any]], names: list[str], *, eta: float = 1.0,
                c: float = 1e-3) -> list[np.ndarray]:
    """alpha_0, alpha_1, ... in float64 from the sums of the ledger: the rule once more, by hand."""
    alpha, score = np.full(len(names), 1 / len(names)), np.zeros(len(names))
    alphas = [alpha]
    for row in rows:
        for i, name in enumerate(names):
            if name in row["loss"]:
                score[i] = row["excess"][name] / row["loss"][name][1]
        raw = alpha * np.exp(eta * score)
        alpha = (1 - c) * raw / raw.sum() + c / len(names)
        alphas.append(alpha)
    return alphas


def record_alpha() -> None:
    """Note the alpha that weighs each step, rank by rank, as exact numbers."""
    from megatron_d3.mcore.proxy import ProxyStep

    stock = ProxyStep.start_step

    def start_step(self: Any, *args: Any, alpha: np.ndarray, **kwargs: Any) -> None:
        with Path(os.environ["D3_TEST_ALPHA_FILE"] + os.environ["RANK"]).open("a") as file:
            file.write(json.dumps(alpha.tolist()) + "\n")
        stock(self, *args, alpha=alpha, **kwargs)

    ProxyStep.start_step = start_step  # type: ignore[method-assign]


def force_alpha() -> None:
    """Let the loss be weighed by D3_TEST_ALPHA, whatever was measured."""
    from megatron_d3.mix.doremi import DoReMi

    alpha = np.array(json.loads(os.environ["D3_TEST_ALPHA"]))
    DoReMi.loss_weights = lambda self, state: alpha  # type: ignore[method-assign]


def change_alpha_on_rank_1() -> None:
    """Let rank 1 hold another mixer from step 3 on."""
    from megatron_d3.mcore.planned_run import PlannedRun

    stock = PlannedRun.before_step

    def before_step(self: Any, iteration: int) -> bool:
        if iteration == 2 and os.environ["RANK"] == "1":
            self.plan.state.mixer["alpha"] = np.array([0.5, 0.3, 0.2])
        return stock(self, iteration)

    PlannedRun.before_step = before_step  # type: ignore[method-assign]


def compare_gradients() -> None:
    """In one process: write each step's naive loss and gradient beside those of the real step."""
    record_gradients(naive=True)


def record_gradients(naive: bool = False) -> None:
    """Write the loss that Megatron reports and its gradient, after each step."""
    from megatron.training import training

    stock = training.train_step

    @functools.wraps(stock)
    def train_step(forward_step: Any, iterator: Any, model: Any, *args: Any,
                   iteration: int | None = None, **kwargs: Any) -> Any:
        parameters = [p for p in model[0].parameters() if p.requires_grad]
        folder = Path(os.environ["D3_TEST_GRADIENTS"])
        expected = _naive(model[0], parameters, iteration or 0) if naive else ()
        result = stock(forward_step, iterator, model, *args, iteration=iteration, **kwargs)
        if os.environ["RANK"] == "0":
            found = (result[0]["doremi loss"], [p.main_grad for p in parameters])
            for kind, values in (("naive", expected), ("real", found)):
                if values:
                    flat = torch.cat([g.detach().reshape(-1).double() for g in values[1]])
                    np.savez(folder / f"{kind}-{iteration}.npz", loss=float(values[0]),
                             gradient=flat.numpy())
        return result

    training.train_step = train_step


def _naive(model: Any, parameters: list[Any], iteration: int) -> tuple[Any, list[Any]]:
    """sum_i alpha_i * (token mean over domain i), the whole global batch in one forward pass."""
    from megatron.training import get_args

    from megatron_d3.config import load_config
    from megatron_d3.plan.reader import PlanReader
    from megatron_d3.planning import open_domains

    args = get_args()
    config = load_config(args.d3_config)
    domains = open_domains(config, seq_length=args.seq_length, seed=args.seed)
    names = [domain.name for domain in domains]
    rows = ledger(args.d3_plan_dir) if iteration else []
    alpha = alphas_from(rows, names, eta=config.mix.params.eta)[iteration]
    size = args.global_batch_size
    records = PlanReader(args.d3_plan_dir).stored(iteration * size, (iteration + 1) * size)
    tokens = torch.from_numpy(np.stack(
        [domains[r["domain"]].train_tokens(int(r["sample"])) for r in records]))  # (size, S + 1)
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    positions = torch.arange(args.seq_length).expand(size, -1)
    losses = model(inputs, positions, None, labels=labels)  # (size, S)
    loss = torch.zeros((), dtype=torch.float64)
    for number, weight in enumerate(alpha):
        own = losses[torch.from_numpy(np.array(records["domain"]) == number)]
        if len(own):
            loss = loss + weight * own.double().mean()
    return loss, list(torch.autograd.grad(loss, parameters))


def spoil_reference() -> None:
    """Let the reference measure NaN on domain 2 in step D3_TEST_SPOIL_AT (1-based)."""
    from megatron_d3.mcore.proxy import ModelLosses

    stock = ModelLosses.of_batch

    def of_batch(self: Any, batch: Any, dataset: Any) -> list[torch.Tensor]:
        losses = stock(self, batch, dataset)
        if _is_spoilt_step() and losses:
            for micro_batch, domains in zip(losses, batch.domains, strict=True):
                micro_batch[torch.from_numpy(domains == 2)] = float("nan")
        return losses

    ModelLosses.of_batch = of_batch  # type: ignore[method-assign]


def spoil_losses() -> None:
    """Let the proxy's own losses of domain 2 be NaN in step D3_TEST_SPOIL_AT (1-based)."""
    from megatron_d3.mcore import forward_step

    stock = forward_step._loss

    def loss(mask: torch.Tensor, token_losses: torch.Tensor, *, origin: Any, **how: Any) -> Any:
        if _is_spoilt_step() and origin is not None:
            factor = torch.ones_like(token_losses)
            factor[origin[:, 0] == 2] = float("nan")
            token_losses = token_losses * factor
        return stock(mask, token_losses, origin=origin, **how)

    forward_step._loss = loss


def _is_spoilt_step() -> bool:
    from megatron.training import get_args

    return bool(get_args().curr_iteration + 1 == int(os.environ["D3_TEST_SPOIL_AT"]))
