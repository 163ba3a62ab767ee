"""A probe inside a training run: before step D3_TEST_PROBE_AT, what it sees goes to an .npz.

After each step a digest of all that training left, weights, buffers and optimizer, goes to a .txt.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

NUM_UNITS, NUM_SEQUENCES, SEQ_LENGTH, VOCAB = 3, 4, 32, 256
DIM = 400


def fields(unit: int, sequence: int) -> dict[str, Any]:
    """A repeatable random sample; the last token of odd sequences does not count in the loss."""
    import torch

    rng = np.random.default_rng([unit, sequence])
    tokens = torch.from_numpy(rng.integers(0, VOCAB, SEQ_LENGTH + 1))
    mask = torch.ones(SEQ_LENGTH)
    mask[-1] = 1 - sequence % 2
    return {"tokens": tokens[:-1].clone(), "labels": tokens[1:].clone(), "loss_mask": mask,
            "position_ids": torch.arange(SEQ_LENGTH),
            "attention_mask": torch.tril(torch.ones(1, SEQ_LENGTH, SEQ_LENGTH)) < 0.5}


def measure(source: Any) -> dict[str, np.ndarray]:
    """Everything a source answers, on all ranks alike."""
    from megatron_d3.influence.settings import SketchConfig
    from megatron_d3.influence.sketch import make_sketch

    sketches = {kind: make_sketch(SketchConfig(type=kind, dim=DIM), source.layout)
                for kind in ("rotation", "none")}
    found: dict[str, np.ndarray] = {}

    def take(name: str, unit: int, vector: Any) -> None:
        for kind, sketch in sketches.items():
            key = f"{name}/{kind}"
            if key not in found:
                found[key] = np.zeros((NUM_UNITS, sketch.dim))
            found[key][unit] = sketch(vector).cpu().numpy()

    numbers = np.zeros((NUM_UNITS, 8))
    own_units = range(source.group, NUM_UNITS, source.num_groups)
    mean = source.new_vector()
    for unit in own_units:
        values = [*source.loss(unit, 0, NUM_SEQUENCES), *source.gradient(unit, 0, NUM_SEQUENCES)]
        take("gradient", unit, source.gradients)
        take("signs", unit, list(source.rademacher(unit)))
        norm = source.dot(source.gradients, source.gradients)
        for total, part in zip(mean, source.gradients, strict=True):
            total += part
        values += source.gradient(unit, 1, 2)
        values += [norm, 0.0]
        numbers[unit] = values
        source.gradient(unit, 0, NUM_SEQUENCES, sample_key=7)
        take("sampled", unit, source.gradients)
    source.sum_over_groups(mean)
    length = source.dot(mean, mean) ** 0.5
    with source.displaced([tensor / length for tensor in mean], 0.01) as applied:
        for unit in own_units:
            take("applied", unit, applied)
            numbers[unit, 7] = source.gradient(unit, 0, NUM_SEQUENCES).mean
            take("there", unit, source.gradients)
    for unit in own_units:
        source.gradient(unit, 0, NUM_SEQUENCES)
        take("again", unit, source.gradients)
    found = {name: source.all_sum(array) for name, array in found.items()}
    # Every rank of a group says the same: the mean over the group's ranks.
    size = source.group_sum(np.ones(1))[0]
    found["numbers"] = source.all_sum(numbers / size)
    # By name; a rank knows those of its own tensors.
    names = list(source.layout.global_sizes)
    found["scales"] = np.full(len(names) + 1, np.nan)
    found["scales"][-1] = source.weights_norm()
    for shards, scale in zip(source.layout.tensors, source.tensor_scales(), strict=True):
        found["scales"][names.index(shards[0].name)] = scale
    # Groups hold equal roots; every rank adds its own shards of one of them.
    root = source.step_root()
    found["root"] = source.group_sum(sketches["none"](root).cpu().numpy())
    return found


def settings_of(names: Iterable[str]) -> list[Any]:
    """Settings of estimators, and of `projected` with one direction."""
    from megatron_d3.influence.settings import D3Config

    # Differences are larger than by default: what two layouts round differently stands out less.
    common: Any = {"probe_sequences": NUM_SEQUENCES}
    sizes = {"hutchinson_diagonal": 0.05, "shared_hessian": 0.05}
    cases = [D3Config(estimator=name, difference=sizes.get(name, 3e-3), **common)
             for name in names]
    return [*cases, D3Config(directions=1, difference=3e-3, **common)]


def influences(source: Any, cases: list[Any]) -> dict[str, np.ndarray]:
    """S of each case, for plain and for the optimizer's steps."""
    from megatron_d3.influence.estimators import estimate
    from megatron_d3.influence.settings import SketchConfig
    from megatron_d3.influence.sketch import make_sketch
    from megatron_d3.influence.source import StepModel

    sketch = make_sketch(SketchConfig(dim=DIM), source.layout)
    # Look-ahead is a difference of float32 losses: with small steps S would be their rounding.
    steps = {"sgd": StepModel(gamma=3.0), "optimizer": StepModel(0.01, clip=0.5, uses_root=True)}
    found = {}
    for config in cases:
        for step, model in steps.items():
            influence = estimate(source, sketch, config, model)
            assert influence.bad_units == ()
            name = f"{config.estimator}-{config.num_directions}-{step}"
            found[name] = influence.advantage
            found[f"{name}-gram"] = influence.gram
            found[f"{name}-norms"] = influence.gradient_norms
            found[f"{name}-losses"] = influence.losses
            if influence.halves is not None:
                found[f"{name}-half"] = influence.halves[0]
    return found


def probe_once(*names: str) -> None:
    """Probe before the step D3_TEST_PROBE_AT (1-based), or not at all if it is 0.

    Args:
        names: of estimators; all by default.
    """
    def measure_all(source: Any) -> dict[str, np.ndarray]:
        from megatron_d3.influence.estimators import ESTIMATORS

        return measure(source) | influences(source, settings_of(names or ESTIMATORS))

    _probe_at_step(NUM_UNITS, measure_all)


def probe_two_units_once() -> None:
    """The same of two units by `projected` only: four data-parallel groups share them."""
    _probe_at_step(2, lambda source: influences(source, settings_of(["projected"])))


def probe_projected_once() -> None:
    """The same of all units by `projected` only."""
    _probe_at_step(NUM_UNITS, lambda source: influences(source, settings_of(["projected"])))


def _probe_at_step(num_units: int, measure_all: Callable[[Any], dict[str, np.ndarray]]) -> None:
    from megatron.training import training

    stock = training.train_step

    @functools.wraps(stock)
    def train_step(*args: Any, iteration: int | None = None, **kwargs: Any) -> Any:
        if (iteration or 0) + 1 == int(os.environ["D3_TEST_PROBE_AT"]):
            _probe(args[2], args[3], num_units, measure_all)
        result = stock(*args, iteration=iteration, **kwargs)
        folder = _folder()
        (folder / f"state{os.environ['RANK']}.txt").write_text(_digest(args[2], args[3]))
        return result

    training.train_step = train_step


def probe_with_made_up_moments() -> None:
    """The same of some estimators, with Adam's second moments made of the weights under every layout.

    Megatron does not load an optimizer's state from a run without expert parallelism into one with.
    """
    from megatron.training import training

    probe_once("projected", "hutchinson_diagonal", "gnb_diagonal", "look_ahead")
    probing = training.train_step

    @functools.wraps(probing)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        import torch

        for leaf in _leaves(args[3]):
            for group in leaf.optimizer.param_groups:
                for weight in group["params"]:
                    square = (0.01 * weight.detach().float()) ** 2
                    leaf.optimizer.state.setdefault(weight, {
                        "step": torch.tensor(2.0), "exp_avg": torch.zeros_like(square),
                        "exp_avg_sq": square})
        return probing(*args, **kwargs)

    training.train_step = train_step


def _leaves(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _probe(
    chunks: Any, optimizer: Any, num_units: int, measure_all: Callable[[Any], dict[str, np.ndarray]]
) -> None:
    import torch

    from megatron_d3.mcore.probe import Probe, ProbeSettings, UnitSamples

    probe = Probe(chunks, optimizer, ProbeSettings(
        seq_length=SEQ_LENGTH, micro_batch_size=2, vocab_size=VOCAB, has_dropout=True))
    before = [p.data.clone() for p in probe.parameters]
    with (probe.measuring(UnitSamples(num_units, NUM_SEQUENCES, fields)) as source,
          _counted_recomputations() as recomputed):
        found = measure_all(source)
        if os.environ["WORLD_SIZE"] == "1":
            _check_root(source.step_root(), optimizer, probe.parameters)
            _check_moves(source, probe.parameters)
    assert all(torch.equal(p.data, b) for p, b in zip(probe.parameters, before, strict=True))
    granularity = chunks[0].config.recompute_granularity
    assert (len(recomputed) > 0) == (granularity is not None), "recomputed as in training"
    np.savez(_folder() / f"probe{os.environ['RANK']}.npz", **found)


@contextlib.contextmanager
def _counted_recomputations() -> Iterator[list[int]]:
    """Give a list that grows by each part of the model whose activations are not kept."""
    from megatron.core import tensor_parallel

    stock, calls = tensor_parallel.checkpoint, []

    def checkpoint(*args: Any) -> Any:
        calls.append(1)
        return stock(*args)

    tensor_parallel.checkpoint = checkpoint
    try:
        yield calls
    finally:
        tensor_parallel.checkpoint = stock


def _check_moves(source: Any, parameters: list[Any]) -> None:
    """Weights move as far as asked, and come back to the bit, also after an error, early or late."""
    import torch

    before = [p.data.clone() for p in parameters]

    def require_the_weights() -> None:
        assert all(torch.equal(p.data, b) for p, b in zip(parameters, before, strict=True))

    def direction() -> Any:
        generator = torch.Generator().manual_seed(1)
        return [torch.randn(p.shape, generator=generator) * b.float().abs().mean()
                for p, b in zip(parameters, before, strict=True)]

    square = source.dot(direction(), direction())
    for size in (0.01, -0.01):
        with source.moved_along(direction(), size) as along:
            assert abs(along / (size * square) - 1) < (1e-4 if parameters[0].dtype == torch.float32 else 0.1)
            assert not all(torch.equal(p.data, b) for p, b in zip(parameters, before, strict=True))
        require_the_weights()
    stock, num_calls = source._displace, 0

    def displace(*args: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        stock(*args)
        if num_calls == 3:
            raise MemoryError

    for move in (source.moved_along, source.displaced):
        num_calls, source._displace = 0, displace
        try:
            with move(direction(), 0.01):
                raise AssertionError("no error")
        except MemoryError:
            require_the_weights()
        source._displace = stock
        try:
            with move(direction(), 0.01):
                raise KeyError
        except KeyError:
            require_the_weights()


def _check_root(roots: Any, optimizer: Any, parameters: list[Any]) -> None:
    """Every second moment is used, each with its parameter's mean."""
    import torch

    from megatron_d3.influence.adam import step_root_
    from megatron_d3.mcore.step_root import _second_moment, steps_taken

    leaves, num_steps = _leaves(optimizer), steps_taken(optimizer)
    moments = [_second_moment(p, leaves) for p in parameters]
    stored = [s["exp_avg_sq"].reshape(-1) for leaf in leaves for s in leaf.optimizer.state.values()]
    assert torch.equal(torch.cat(moments).sort()[0], torch.cat(stored).sort()[0])
    group = leaves[0].optimizer.param_groups[0]
    beta2, eps = group["betas"][1], group["eps"]
    moments = [moment / (1 - beta2**num_steps) for moment in moments]
    mean = float(torch.cat(moments).double().mean())
    for root, moment in zip(roots, moments, strict=True):
        own = float(moment.double().mean()) or mean
        expected = step_root_(moment, own, beta2=beta2, num_steps=num_steps, eps=eps)
        torch.testing.assert_close(root.reshape(-1), expected, rtol=1e-5, atol=0)


def _folder() -> Path:
    from tests.mcore import recorder

    assert recorder.folder is not None
    return recorder.folder


def _digest(chunks: Any, optimizer: Any) -> str:
    """A hash of every weight, buffer and tensor of the optimizer's states on this rank."""
    import torch

    tensors = [t for chunk in chunks for t in (*chunk.parameters(), *chunk.module.buffers())]
    for leaf in _leaves(optimizer):
        tensors += [value for state in leaf.optimizer.state.values()
                    for _, value in sorted(state.items()) if isinstance(value, torch.Tensor)]
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(tensor.detach().float().numpy().tobytes())
    return f"{len(tensors)} tensors {digest.hexdigest()}"
