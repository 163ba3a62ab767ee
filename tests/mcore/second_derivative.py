"""H z of a small network of Megatron's parallel layers: by double backward, by differences, exactly.

Started by the launcher, one process a tensor-parallel rank; each writes its parts to an .npz.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

NUM_TOKENS, HIDDEN, INNER, VOCAB = 24, 16, 32, 48

Vector = list[torch.Tensor]


def whole_weights(seed: int) -> Vector:
    """float64 W1 (I, H), b1 (I,), W2 (H, I), b2 (H,), W3 (V, H)."""
    rng = np.random.default_rng(seed)
    shapes = [(INNER, HIDDEN), (INNER,), (HIDDEN, INNER), (HIDDEN,), (VOCAB, HIDDEN)]
    return [torch.from_numpy(rng.normal(size=shape) / shape[-1] ** 0.5) for shape in shapes]


def whole_loss(weights: Sequence[torch.Tensor], inputs: torch.Tensor, labels: torch.Tensor) -> Any:
    """The same network in plain torch."""
    w1, b1, w2, b2, w3 = weights
    hidden = torch.nn.functional.gelu(inputs @ w1.T + b1) @ w2.T + b2
    return torch.nn.functional.cross_entropy((hidden @ w3.T).view(-1, VOCAB), labels.view(-1))


def shards(whole: Vector, rank: int, size: int) -> Vector:
    """What a rank holds: W1, b1 and W3 by rows, W2 by columns, b2 whole."""
    w1, b1, w2, b2, w3 = whole
    return [w1.chunk(size)[rank], b1.chunk(size)[rank], w2.chunk(size, dim=1)[rank], b2,
            w3.chunk(size)[rank]]


def gradients(loss: Callable[[], torch.Tensor], weights: Vector, **kwargs: Any) -> Vector:
    return list(torch.autograd.grad(loss(), weights, **kwargs))


def double_backward(loss: Callable[[], torch.Tensor], weights: Vector, z: Vector) -> Vector:
    """H z as d (g.z) / d weights."""
    first = gradients(loss, weights, create_graph=True)
    product = torch.stack([(g * d).sum() for g, d in zip(first, z, strict=True)]).sum()
    return list(torch.autograd.grad(product, weights))


def central_difference(
    loss: Callable[[], torch.Tensor], weights: Vector, z: Vector, size: float
) -> Vector:
    """H z as (g(weights + size z) - g(weights - size z)) / (2 size)."""
    found = []
    for sign in (1, -1):
        for weight, d in zip(weights, z, strict=True):
            weight.data.add_(d, alpha=sign * size)
        found.append(gradients(loss, weights))
        for weight, d in zip(weights, z, strict=True):
            weight.data.add_(d, alpha=-sign * size)
    return [(plus - minus) / (2 * size) for plus, minus in zip(*found, strict=True)]


def measure() -> None:
    """Write this rank's parts of H z."""
    from megatron.core import parallel_state

    from tests.mcore import recorder

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    rng = np.random.default_rng(0)
    inputs = torch.from_numpy(rng.normal(size=(NUM_TOKENS, 1, HIDDEN)))
    labels = torch.from_numpy(rng.integers(0, VOCAB, (NUM_TOKENS, 1)))
    weights, z = whole_weights(1), whole_weights(2)
    for weight in weights:
        weight.requires_grad_()
    exact = double_backward(lambda: whole_loss(weights, inputs, labels), weights, z)

    own = [w.detach().clone() for w in shards(weights, rank, size)]
    loss, parameters = _megatron(own, inputs, labels)
    found = {
        "gradient": gradients(loss, parameters),
        "whole gradient": shards(gradients(
            lambda: whole_loss(weights, inputs, labels), weights), rank, size),
        "exact": shards(exact, rank, size),
        "double backward": double_backward(loss, parameters, shards(z, rank, size)),
        "central difference": central_difference(
            loss, parameters, shards(z, rank, size), 2e-3),
    }
    assert recorder.folder is not None
    np.savez(Path(recorder.folder) / f"rank{rank}.npz", **{
        name: np.concatenate([part.detach().numpy().ravel() for part in parts])
        for name, parts in found.items()})
    torch.distributed.barrier()


def _megatron(
    weights: Vector, inputs: torch.Tensor, labels: torch.Tensor
) -> tuple[Callable[[], torch.Tensor], Vector]:
    """Return the loss of Megatron's layers with these weights, and their parameters."""
    from megatron.core.tensor_parallel import (
        ColumnParallelLinear,
        RowParallelLinear,
        vocab_parallel_cross_entropy,
    )
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, params_dtype=torch.float64,
        use_cpu_initialization=True, tensor_model_parallel_size=int(os.environ["WORLD_SIZE"]),
        gradient_accumulation_fusion=False)
    common: dict[str, Any] = {
        "config": config, "init_method": torch.nn.init.zeros_, "skip_bias_add": False}
    up = ColumnParallelLinear(HIDDEN, INNER, bias=True, gather_output=False, **common)
    down = RowParallelLinear(INNER, HIDDEN, bias=True, input_is_parallel=True, **common)
    out = ColumnParallelLinear(HIDDEN, VOCAB, bias=False, gather_output=False, **common)
    parameters = [up.weight, up.bias, down.weight, down.bias, out.weight]
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.data.copy_(weight)

    def loss() -> torch.Tensor:
        hidden = torch.nn.functional.gelu(up(inputs)[0])
        logits = out(down(hidden)[0])[0]
        mean: torch.Tensor = vocab_parallel_cross_entropy(logits, labels).mean()
        return mean

    return loss, parameters
