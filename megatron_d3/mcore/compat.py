"""What we rely on in Megatron beyond its documented API, checked once at the start.

A Megatron that moved one of these must stop the run with a sentence, not train on something else.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from pathlib import Path
from typing import Any

import torch
from megatron.core import package_info
from megatron.core.datasets import gpt_dataset
from megatron.core.datasets import utils as datasets_utils
from megatron.core.optimizer import distrib_optimizer
from megatron.core.utils import get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training import training

from megatron_d3.errors import D3Error

SUPPORTED = ">=0.19.2,<0.21"

# Its package has a function of the same name.
finalize_model_grads = importlib.import_module("megatron.core.distributed.finalize_model_grads")

# (where it is looked up, name, parameters we pass)
_USED: tuple[tuple[object, str, tuple[str, ...]], ...] = (
    (training, "train_step",
     ("forward_step_func", "data_iterator", "model", "optimizer", "opt_param_scheduler", "config",
      "forward_backward_func", "iteration")),
    (training, "setup_model_and_optimizer", ("model_type",)),
    (finalize_model_grads, "_allreduce_non_tensor_model_parallel_grads",
     ("model", "config", "tp_group")),
    (finalize_model_grads, "_allreduce_word_embedding_grads",
     ("model", "config", "embd_group", "pp_group")),
    (training, "save_checkpoint", ("iteration",)),
    (gpt_dataset, "_get_ltor_masks_and_position_ids",
     ("data", "eod_token", "reset_position_ids", "reset_attention_mask", "eod_mask_loss",
      "create_attention_mask")),
)


def check() -> None:
    """Refuse a Megatron whose seams are not where we put our hooks.

    Raises:
        D3Error: names the function that is missing or has other parameters.
    """
    for module, name, parameters in _USED:
        function = getattr(module, name, None)
        found = tuple(inspect.signature(function).parameters) if function else ()
        missing = [p for p in parameters if p not in found]
        if missing:
            raise D3Error(
                f"megatron-core {package_info.__version__}: {module.__name__}.{name} "  # type: ignore[attr-defined]
                f"{'lacks ' + ', '.join(missing) if found else 'does not exist'}; "
                f"megatron-d3 needs megatron-core {SUPPORTED}")
    for function in (get_batch_on_this_tp_rank, get_batch_on_this_cp_rank):
        if "is_hybrid_cp" not in inspect.signature(function).parameters:
            raise D3Error(
                f"megatron-core {package_info.__version__}: megatron.core.utils."
                f"{function.__name__} has other parameters; megatron-d3 needs {SUPPORTED}")


def use_prebuilt_helpers() -> None:
    """Spare a pip-installed Megatron the `make` that it cannot run.

    Its wheel holds the compiled dataset helpers but no Makefile, and `initialize_megatron` exits
    where `make` fails. With a source checkout, which has the Makefile, nothing changes.
    """
    folder = Path(datasets_utils.__file__).parent
    if not (folder / "Makefile").exists() and importlib.util.find_spec(
        "megatron.core.datasets.helpers_cpp"
    ):
        datasets_utils.compile_helpers = lambda: None


def mend_distributed_optimizer_load() -> None:
    """Let the distributed optimizer continue exactly where torch's own Adam stopped.

    Without Apex and Transformer Engine, Megatron 0.19 cannot load such a checkpoint:

    * `sharded_state_dict` reads the step count from the states, which torch's Adam creates in its
      first step only (`assert len(steps) == 1`). Megatron's own remedy elsewhere, a step on zero
      gradients, is applied here; what it changes is overwritten by the load.
    * With float32 weights the load copies into views of parameters that require gradients, which
      torch refuses outside of `no_grad`.
    * `load_state_dict` gives all parameters one shared `step` tensor, so that each Adam step counts
      once per parameter: losses part from the second step after a resume on.
    * The reshardable format stores no `step`, but the load asks for one.
    """
    if distrib_optimizer.HAVE_APEX_OR_TE:
        return
    optimizer_class = distrib_optimizer.DistributedOptimizer
    stock_sharded = optimizer_class.sharded_state_dict
    stock_load = optimizer_class.load_state_dict
    stock_set = optimizer_class._set_main_param_and_optimizer_states

    @functools.wraps(stock_sharded)
    def sharded_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(stock_sharded).bind(self, *args, **kwargs)
        if bound.arguments.get("is_loading") and not self.optimizer.state:
            self._init_optimizer_states_with_dummy_values()
        return stock_sharded(self, *args, **kwargs)

    @functools.wraps(stock_load)
    def load_state_dict(self: Any, state_dict: Any) -> None:
        stock_load(self, state_dict)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    @functools.wraps(stock_set)
    @torch.no_grad()
    def set_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        stock_set(self, model_param, {**tensors, "step": None})  # None: left as it is

    optimizer_class.sharded_state_dict = sharded_state_dict
    optimizer_class.load_state_dict = load_state_dict
    optimizer_class._set_main_param_and_optimizer_states = set_states
