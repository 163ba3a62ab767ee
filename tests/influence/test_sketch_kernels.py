"""C, PyTorch and what runs on CUDA compute what slow versions in plain Python do."""

from __future__ import annotations

import math
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_d3.influence.layout import (
    Layout,
    Shard,
    dim_slice,
    flat_slice,
    single_layout,
    whole_tensor,
)
from megatron_d3.influence.settings import SketchConfig

torch = pytest.importorskip("torch")

from megatron_d3.influence import sketch as module
from megatron_d3.influence import sketch_torch
from megatron_d3.influence.sketch import make_sketch
from megatron_d3.influence.sketch_hash import hash64, make_key, random_signs, sign_bits, signed
from tests.influence.sketching import HASHED, RANDOM, distance, needs_c, sketch_of, vector

pytestmark = pytest.mark.usefixtures("one_thread")


MASK = (1 << 64) - 1


def slow_hash64(n: int, key: int) -> int:
    word = ((n + 1) * 0x9E3779B97F4A7C15 + key) & MASK
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & MASK
    word = (word ^ word >> 27) * 0x94D049BB133111EB & MASK
    return word ^ word >> 31


def slow_rotation(x: list[float], name: str, dim: int, seed: int) -> list[float]:
    out = [0.0] * dim
    offsets = make_key(name, seed, "rotation bucket")
    signs = make_key(name, seed, "rotation sign")
    for p, value in enumerate(x):
        offset = (slow_hash64(p // dim, offsets) >> 32) * dim >> 32
        sign = -1 if slow_hash64(p // 64, signs) >> p % 64 & 1 else 1
        out[(p % dim + offset) % dim] += sign * value
    return out


def slow_count(x: list[float], name: str, dim: int, seed: int) -> list[float]:
    out = [0.0] * dim
    for p, value in enumerate(x):
        word = slow_hash64(p, make_key(name, seed, "count bucket"))
        out[(word >> 32) * dim >> 32] += -value if word & 1 else value
    return out


def slow_gaussian(x: list[float], name: str, dim: int, seed: int) -> list[float]:
    half = (dim + 1) // 2
    out = [0.0] * (2 * half)
    for p, value in enumerate(x):
        key = slow_hash64(p, make_key(name, seed, "gaussian bucket"))
        for row in range(half):
            word = slow_hash64(row, key)
            low = word & 0xFFFFFFFF
            radius = math.sqrt(-2 * math.log((word >> 33) / 2**31 + 2**-32))
            angle = (low - (low >> 31 << 32)) * math.pi / 4 / 2**31
            pair = [math.cos(angle) * (-1 if low & 2 else 1), math.sin(angle)]
            cosine, sine = pair[::-1] if low & 1 else pair
            out[row] += radius * cosine * value
            out[half + row] += radius * sine * value
    return [value / math.sqrt(dim) for value in out[:dim]]


SLOW = {"rotation": slow_rotation, "count": slow_count, "gaussian": slow_gaussian}


def test_the_hash_is_splitmix64():
    key = 1234567  # the numbers every implementation is checked with
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [slow_hash64(n, key) for n in range(3)] == expected
    assert hash64(torch.arange(3), key).tolist() == [signed(word) for word in expected]


def test_keys_differ_by_name_seed_and_purpose():
    keys = {make_key(name, seed, purpose) for name in "ab" for seed in (0, 1) for purpose in "xy"}
    assert len(keys) == 8
    assert make_key("layer.weight", 3, "x") == make_key("layer.weight", 3, "x") < 1 << 64


@given(st.integers(0, 300), st.tuples(st.integers(0, 150), st.integers(0, 300)),
       st.integers(0, 300), st.integers(0, 2**64 - 1))
def test_signs_of_runs_are_those_of_their_offsets(start, shape, stride, key):
    offsets = start + torch.arange(shape[0])[:, None] * stride + torch.arange(shape[1])
    expected = 1.0 - 2 * sign_bits(offsets, key)
    assert torch.equal(random_signs(start, shape, stride, key, "cpu"), expected)


@pytest.mark.parametrize("kind", HASHED)
@pytest.mark.parametrize("dim", [1, 5, 64, 150])
def test_each_kind_computes_what_it_says(kernel, kind, dim):
    (x,) = vector((201,))
    expected = torch.tensor(SLOW[kind](x.tolist(), "w", dim, 7), dtype=torch.float64)
    out = sketch_of(kind, dim, single_layout({"w": (201,)}), [x], seed=7)
    assert out.dtype == torch.float64 and out.shape == (dim,)
    assert distance(out, expected) < 1e-6


def test_double_precision_is_kept(kernel):
    layout, x = single_layout({"w": (5000,)}), torch.randn(5000, dtype=torch.float64)
    out = torch.tensor(slow_rotation(x.tolist(), "w", 40, 0), dtype=torch.float64)
    assert distance(sketch_of("rotation", 40, layout, [x]), out) < 1e-14


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile takes a C++ compiler")
@pytest.mark.filterwarnings("ignore")  # of PyTorch's compiler
def test_what_runs_on_cuda_compiles_once_for_all_sizes(monkeypatch):
    """With the compiler's CPU backend; it traces the same function for CUDA."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    counters = pytest.importorskip("torch._dynamo.utils").counters
    counters.clear()
    compiled = sketch_torch._compiled(sketch_torch._gather_elements)
    whole = [Shard("w", size, 0, 1, size, size, 0, size) for size in (501, 7_000, 31_000)]
    columns = [Shard("w", 2 * rows * size, size, rows, size, 2 * size, 0, size)
               for rows, size in ((9, 60), (70, 33), (128, 64))]
    for shard in (*whole, *columns):
        for dim in (64, 150):
            (x,) = vector((shard.num_runs * shard.run_length,))
            plain = sketch_torch.rotation(x, shard, dim, (1, 2))
            with monkeypatch.context() as patch:
                patch.setattr(sketch_torch, "_gather_for", lambda values: compiled)
                assert distance(sketch_torch.rotation(x, shard, dim, (1, 2)), plain) < 1e-12
    assert counters["stats"]["unique_graphs"] == 2  # of whole tensors, of columns


@st.composite
def shards(draw: st.DrawFn) -> tuple[Shard, int]:
    """A shard with gaps everywhere, and the size of its local tensor."""
    num_runs, run_length = draw(st.integers(1, 5)), draw(st.integers(1, 200))
    stride = run_length + draw(st.integers(0, 90))
    local_stride = run_length + draw(st.integers(0, 9))
    start, local_start = draw(st.integers(0, 300)), draw(st.integers(0, 9))
    shard = Shard("w", start + num_runs * stride + draw(st.integers(0, 50)), start, num_runs,
                  run_length, stride, local_start, local_stride)
    return shard, shard.local_stop + draw(st.integers(0, 3))


@needs_c
@pytest.mark.parametrize("kind", HASHED)
@given(shards(), st.integers(1, 130), st.integers(0, 2**40))
def test_c_and_torch_agree(kind, case, dim, seed):
    shard, size = case
    dim = min(dim, shard.global_size)
    layout = Layout(((shard,),), {"w": shard.global_size})
    sketch = make_sketch(SketchConfig(kind, dim, seed), layout)
    (x,) = vector((size,), seed=seed)
    compiled = sketch([x])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_compiled", None)
        in_torch = sketch([x])
    held = torch.zeros(shard.global_size)
    for run in range(shard.num_runs):
        start = shard.local_start + run * shard.local_stride
        to = shard.global_start + run * shard.global_stride
        held[to : to + shard.run_length] = x[start : start + shard.run_length]
    whole = make_sketch(SketchConfig(kind, dim, seed), single_layout({"w": held.shape}))([held])
    scale = float(x.norm())
    assert float((compiled - in_torch).norm()) < 1e-6 * scale
    assert float((compiled - whole).norm()) < 1e-6 * scale


@needs_c
@pytest.mark.parametrize("kind", HASHED)
@pytest.mark.parametrize("size", [700, 200_003])
def test_c_and_torch_agree_on_many_blocks(kind, size):
    if kind == "gaussian":
        size //= 20
    layout, x = single_layout({"w": (size,)}), vector((size,))
    compiled = sketch_of(kind, 30, layout, x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_compiled", None)
        assert distance(sketch_of(kind, 30, layout, x), compiled) < 1e-6


@needs_c
@pytest.mark.parametrize("runs", [
    (0, 1, 9, 9, 0, 9), (0, 1, 8, 8, 1, 8), (0, 2, 4, 4, 0, 5), (-1, 1, 4, 4, 0, 4),
    (0, 0, 4, 4, 0, 4), (0, 1, 0, 4, 0, 4), (0, 1, 4, 4, -1, 4),
    (0, 1 << 62, 8, 8, 0, 8),
])  # fmt: skip
def test_c_refuses_to_read_past_the_end(runs):
    with pytest.raises(ValueError, match="_sketch: sizes do not fit"):
        module._compiled.rotation(np.zeros(8, np.float32), 4, runs, (1, 2), np.zeros(3))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", [*RANDOM, "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_agrees_with_the_cpu(kind, dtype):
    shards = (dim_slice("w", (400, 3000), 1, 700, 1900), flat_slice("v", (10**6,), 1234, 10**6))
    layout = Layout(((shards[0],), (shards[1], whole_tensor("b", (7,)).moved(10**6))),
                    {"w": 1_200_000, "v": 10**6, "b": 7})
    tensors = [x.to(dtype) for x in vector((400, 1200), (10**6 + 7,))]
    if kind == "gaussian":  # a dense matrix
        layout, tensors = Layout(((whole_tensor("b", (7,)),), ()), {"b": 7, "v": 10**6}), [
            tensors[1][:7], tensors[0][:0]]
    here = sketch_of(kind, 3500, layout, tensors)
    there = sketch_of(kind, 3500, layout, [x.cuda() for x in tensors])
    assert there.is_cuda and distance(there.cpu(), here) < 1e-6
    again = sketch_of(kind, 3500, layout, [x.cuda() for x in tensors])
    assert torch.equal(again, there)  # deterministic


