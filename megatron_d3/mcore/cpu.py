"""Run stock Megatron on a CPU: route what it asks of `torch.cuda` to the host.

Megatron's training loop is written for CUDA: it allocates on `device="cuda"`, moves modules with
`.cuda()`, compares `tensor.type()` with `"torch.cuda.FloatTensor"`, records events and saves CUDA
RNG states. On a machine without a GPU :func:`enable` answers these calls from the CPU, so that the
unmodified `megatron.training.pretrain` runs over gloo with tensor, pipeline, data and expert
parallelism.

It must run before the first `import megatron`, since Megatron reads some of `torch.cuda` while it
is imported. On a GPU it is never active: :func:`wanted` says when it is.

What stays out of reach: CUDA graphs, Transformer Engine, hence context parallelism and fp8. Asking
for them fails in :mod:`megatron_d3.mcore.args` with a message that says so.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from typing import Any, Self

import torch
import torch.utils.data
from torch.overrides import TorchFunctionMode

from megatron_d3.errors import ConfigError

# Tensor.type() strings Megatron's mixed-precision and distributed optimizers test for.
_CUDA_TYPE_NAMES = {
    "torch.FloatTensor": "torch.cuda.FloatTensor",
    "torch.HalfTensor": "torch.cuda.HalfTensor",
    "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor",
}
_active_mode: TorchFunctionMode | None = None


def wanted() -> bool:
    """Whether this process should run Megatron on the CPU.

    True if `MEGATRON_D3_DEVICE=cpu`, or if it is unset and there is no CUDA device.

    Raises:
        ConfigError: `MEGATRON_D3_DEVICE` is something else than `cpu` or `cuda`.
    """
    if _active_mode is not None:
        return True
    device = os.environ.get("MEGATRON_D3_DEVICE", "")
    if device not in ("", "cpu", "cuda"):
        raise ConfigError(f"MEGATRON_D3_DEVICE: got {device!r}, expected cpu or cuda (or unset)")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("MEGATRON_D3_DEVICE=cuda: PyTorch finds no CUDA device here; use cpu")
    return device == "cpu" or (device == "" and not torch.cuda.is_available())


def enable() -> None:
    """Answer `torch.cuda` from the CPU for the rest of this process. Idempotent."""
    global _active_mode
    if _active_mode is not None:
        return
    # One kernel launch queue, as Megatron's tensor-parallel code insists on; no compiler on a CPU.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    _replace_cuda_functions()
    _replace_tensor_methods()
    _keep_dropout_from_data_loaders()
    # One generator plays both parts here, so Megatron's RNG tracker would warn at every fork.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage())
    _active_mode = _CudaToCpu()
    _keep_mode_in_backward(_active_mode)
    # Entered for good: there is no moment at which Megatron stops asking for CUDA.
    _active_mode.__enter__()


class _CudaToCpu(TorchFunctionMode):
    """Turn every `device="cuda"` argument of a torch function into `"cpu"`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs and "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": torch.device("cpu")}
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], torch.device("cpu"), *args[2:])
        return func(*args, **(kwargs or {}))


def _keep_mode_in_backward(mode: TorchFunctionMode) -> None:
    """Keep the mode while a backward pass runs Python, as it does to recompute activations.

    PyTorch takes a mode aside while it handles a call, and `torch.autograd.backward` is one.
    """
    stock = torch.autograd._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return stock(*args, **kwargs)

    torch.autograd._engine_run_backward = run_backward


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    # An integer device means a CUDA ordinal: `device=torch.cuda.current_device()`.
    if isinstance(device, int) and not isinstance(device, bool):
        return True
    return isinstance(device, str) and device.startswith("cuda")


class _Stream:
    """A stream on a device that finishes each call before it returns."""

    device = torch.device("cpu")

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record()
        return event

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class _Event:
    """An event that has happened; `elapsed_time` is wall time in milliseconds."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self._time = time.perf_counter()

    def record(self, stream: object = None) -> None:
        self._time = time.perf_counter()

    def wait(self, stream: object = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: _Event) -> float:
        return (end._time - self._time) * 1e3


def _replace_cuda_functions() -> None:
    cuda = torch.cuda
    stream = _Stream()
    replacements: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        # 0 would make Megatron skip its process groups without a word.
        "device_count": lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "current_device": lambda: int(os.environ.get("LOCAL_RANK", "0")),
        "set_device": lambda device: None,
        "device": lambda device=None: contextlib.nullcontext(),
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "Stream": _Stream,
        "ExternalStream": _Stream,
        "Event": _Event,
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "set_stream": lambda stream: None,
        "is_current_stream_capturing": lambda: False,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        # Megatron's RNG tracker forks "CUDA" states: give it the CPU generator's, which is the
        # one that dropout and weight initialisation use here.
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "set_rng_state": lambda state, device="cuda": torch.set_rng_state(state),
        "memory_stats": lambda device=None: _MemoryStats(),
        "mem_get_info": lambda device=None: (0, 0),
        "get_device_capability": lambda device=None: (0, 0),
        "get_device_name": lambda device=None: "cpu",
        "get_device_properties": lambda device=None: _DeviceProperties(),
    }
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved",
                 "max_memory_reserved", "reset_peak_memory_stats", "device_memory_used"):
        replacements[name] = lambda device=None: 0
    for name, replacement in replacements.items():
        setattr(cuda, name, replacement)
    cuda.random.get_rng_state = replacements["get_rng_state"]
    cuda.random.set_rng_state = replacements["set_rng_state"]
    cuda.default_generators = _Generators()
    _take_tensors_as_split_sizes()
    # torch itself (optimizers, DataLoader, checkpointing) must not believe in the GPU.
    torch.accelerator.is_available = lambda: False
    torch.accelerator.current_accelerator = lambda check_available=False: None


def _take_tensors_as_split_sizes() -> None:
    """Let an exchange of tokens between experts give its sizes as Megatron has them.

    Megatron turns them from a tensor into numbers while it copies them off the GPU.
    """
    stock = torch.distributed.all_to_all_single

    def all_to_all_single(
        output: torch.Tensor, input: torch.Tensor, output_split_sizes: Any = None,
        input_split_sizes: Any = None, **kwargs: Any,
    ) -> Any:
        sizes = [s.tolist() if isinstance(s, torch.Tensor) else s
                 for s in (output_split_sizes, input_split_sizes)]
        return stock(output, input, *sizes, **kwargs)

    torch.distributed.all_to_all_single = all_to_all_single


class _Generators:
    """The CPU's generator, for whichever device is asked."""

    def __getitem__(self, device: int) -> torch.Generator:
        return torch.default_generator


class _MemoryStats(dict[str, int]):
    """Every statistic is 0: nothing is allocated on a device that is not there."""

    def __missing__(self, key: str) -> int:
        return 0


class _DeviceProperties:
    name = "cpu"
    major = minor = 0
    total_memory = 0
    multi_processor_count = 1


def _replace_tensor_methods() -> None:
    torch_type = torch.Tensor.type

    def tensor_type(self: torch.Tensor, dtype: Any = None, **kwargs: Any) -> Any:
        if dtype is not None:
            if isinstance(dtype, str):
                dtype = dtype.replace("torch.cuda.", "torch.")
            return torch_type(self, dtype, **kwargs)
        name = torch_type(self)
        return _CUDA_TYPE_NAMES.get(name, name)

    torch.Tensor.type = tensor_type  # type: ignore[method-assign]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


def _keep_dropout_from_data_loaders() -> None:
    """Let a DataLoader draw its seed without moving the generator that dropout uses.

    On a GPU dropout has a generator of its own. Here it shares the CPU's, from which every new
    DataLoader iterator draws: a resumed run, which makes its iterator after the checkpoint's state
    was restored, would then drop other values than the run that was not interrupted.
    """
    stock_iter = torch.utils.data.DataLoader.__iter__

    def data_loader_iter(self: Any) -> Any:
        state = torch.get_rng_state()
        iterator = stock_iter(self)
        torch.set_rng_state(state)
        return iterator

    torch.utils.data.DataLoader.__iter__ = data_loader_iter  # type: ignore[method-assign]
