"""Record what a rank really trained on, step by step, from inside the process.

Wraps Megatron's own functions before the product does, so that what is recorded is what stock
Megatron saw: token hashes from its data iterator, losses and gradient norms from its `train_step`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch

_samples: list[str] = []
_positions: list[int] = []
folder: Path | None = None  # of what this rank records


def install(
    path: Path, *, kill_at: int | None = None, setup: str | None = None
) -> None:
    """Record to `path`, one JSON line a step.

    Args:
        kill_at: SIGKILL this process once that many steps (1-based) are done.
        setup: `module:function` to call first, for faults a test injects.
    """
    from megatron.core.rerun_state_machine import RerunDataIterator
    from megatron.training import training

    global folder
    folder = path.parent
    if setup:
        module, function = setup.split(":")
        getattr(importlib.import_module(module), function)()

    stock_next = RerunDataIterator.__next__

    def recording_next(self: Any) -> Any:
        batch = stock_next(self)
        for tokens, labels in zip(batch["tokens"], batch["labels"], strict=True):
            data = tokens.numpy().tobytes() + labels.numpy().tobytes()
            _samples.append(hashlib.blake2b(data, digest_size=8).hexdigest())
        if "origin" in batch:
            _positions.extend(batch["origin"][:, 1].tolist())
        return batch

    RerunDataIterator.__next__ = recording_next
    stock_step = training.train_step

    @functools.wraps(stock_step)  # the product checks its signature
    def train_step(*args: Any, iteration: int | None = None, **kwargs: Any) -> Any:
        _samples.clear()
        _positions.clear()
        result = stock_step(*args, iteration=iteration, **kwargs)
        losses, grad_norm = result[0], result[5]
        row = {
            "iteration": (iteration or 0) + 1,
            "loss": _hex(losses.get("lm loss")),
            "grad_norm": _hex(grad_norm),
            "samples": list(_samples),
            "positions": list(_positions),
        }
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if kill_at == (iteration or 0) + 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    training.train_step = train_step


def _hex(value: Any) -> str | None:
    if value is None:
        return None
    return float(value.item() if isinstance(value, torch.Tensor) else value).hex()
