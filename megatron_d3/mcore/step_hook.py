"""A hook on every rank between two training steps.

Megatron 0.19 offers none, so :func:`install` wraps `megatron.training.training.train_step`, which
`train()` looks up as a module global at each call, and in the same way `save_checkpoint`. Both are
checked at the start (`mcore/compat.py`). Where D3 orders windows, `setup_model_and_optimizer` is
wrapped too, to see the model that trains. Nothing else of Megatron's loop is replaced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from megatron.training import training
from torch.distributed.checkpoint.api import CheckpointException  # no Exception

from megatron_d3.mcore.save_failure import require_writable

_SHOULD_EXIT = 3  # index in what train_step returns


class StepHook(Protocol):
    """What is called around each step, on every rank."""

    @property
    def can_save(self) -> bool:
        """Whether the run saves checkpoints."""

    def before_step(self, iteration: int) -> bool:
        """Prepare 0-based step `iteration`; False ends the run here, with a checkpoint."""

    def after_step(self, iteration: int, *, is_skipped: bool) -> None:
        """Step `iteration` is done; `is_skipped` if the optimizer left the weights alone."""

    def before_save(self) -> None:
        """A checkpoint is about to be written: at an interval, a signal, or the end of the run."""


def install(hook: StepHook) -> None:
    """Call `hook` around every training step and before every checkpoint from now on."""
    stock_step, stock_save = training.train_step, training.save_checkpoint

    @functools.wraps(stock_save)
    def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
        hook.before_save()
        try:
            return stock_save(*args, **kwargs)
        except (Exception, CheckpointException) as error:
            require_writable(Path(training.get_args().save), error)
            raise

    @functools.wraps(stock_step)
    def train_step(*args: Any, iteration: int | None = None, **kwargs: Any) -> Any:
        assert iteration is not None, "compat.check() saw the parameter"
        if not hook.before_step(iteration):
            # losses, skipped, should_checkpoint, should_exit, exit_code, grad_norm, zeros, logit
            return {}, True, hook.can_save, True, 0, None, None, 0
        result = stock_step(*args, iteration=iteration, **kwargs)
        # NOTE: on an exit that the rerun state machine asks for, no step was taken.
        if not result[_SHOULD_EXIT]:
            hook.after_step(iteration, is_skipped=bool(result[1]))
        return result

    training.train_step, training.save_checkpoint = train_step, save_checkpoint


def install_model_hook(attach: Callable[[list[Any], Any], None]) -> None:
    """Call `attach(model chunks, optimizer)` once Megatron has built and loaded them.

    `pretrain()` looks `setup_model_and_optimizer` up as a module global and asks for the datasets
    after it.
    """
    stock_setup = training.setup_model_and_optimizer

    @functools.wraps(stock_setup)
    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        result = stock_setup(*args, **kwargs)
        attach(result[0], result[1])
        return result

    training.setup_model_and_optimizer = setup_model_and_optimizer
