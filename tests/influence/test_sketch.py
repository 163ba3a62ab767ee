"""A sketch is the same under every split, and takes what a model gives."""

from __future__ import annotations

import math
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_d3.errors import ProbeError
from megatron_d3.influence.layout import (
    Layout,
    Shard,
    cut,
    dim_slice,
    flat_slice,
    single_layout,
    whole_tensor,
)
from megatron_d3.influence.settings import SketchConfig

torch = pytest.importorskip("torch")

from megatron_d3.influence import sketch as module
from megatron_d3.influence.sketch import HashedSketch, RotationSRHT, hadamard, make_sketch, segments
from tests.influence.sketching import HASHED, RANDOM, distance, sketch_of, vector

pytestmark = pytest.mark.usefixtures("one_thread")


def test_auto_is_rotation():
    layout, tensors = single_layout({"w": (50,)}), vector((50,))
    rotation = sketch_of("rotation", 9, layout, tensors)
    assert torch.equal(sketch_of("auto", 9, layout, tensors), rotation)


def test_srht_is_a_scaled_choice_of_rows_of_an_orthogonal_matrix(small_srht):
    layout, tensors = single_layout({"w": (5000,)}), vector((5000,))
    sketch = RotationSRHT(layout, 2048, 3)  # all rows: norms stay those of the first stage
    first = HashedSketch(layout, "rotation", 2048, 3)(tensors)
    assert float(sketch(tensors).norm()) == pytest.approx(float(first.norm()), rel=1e-12)
    assert RotationSRHT(layout, 2049, 3)(tensors).shape == (2049,)


def test_hadamard_of_four():
    expected = [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]
    assert torch.stack([hadamard(row) for row in torch.eye(4)]).tolist() == expected


def test_none_is_the_vector_at_its_global_offsets():
    layout = Layout(
        ((dim_slice("w", (2, 4), 1, 2, 4),), (whole_tensor("b", (3,)),)), {"b": 3, "w": 8, "z": 1})
    out = sketch_of("none", 10**9, layout, [torch.tensor([[1.0, 2], [3, 4]]), torch.ones(3)])
    assert out.dtype == torch.float64
    assert out.tolist() == [1, 1, 1, 0, 0, 1, 2, 0, 0, 3, 4, 0]


# ---- splits --------------------------------------------------------------------------------------


def split_layouts(shape: tuple[int, int], parts: int, how: str) -> list[Shard]:
    """Return each rank's shard of a matrix."""
    if how == "flat":
        size = shape[0] * shape[1]
        bounds = [size * i // parts for i in range(parts + 1)]
        return [flat_slice("w", shape, *bounds[i : i + 2]) for i in range(parts)]
    dim = 0 if how == "column_parallel" else 1
    bounds = [shape[dim] * i // parts for i in range(parts + 1)]
    return [dim_slice("w", shape, dim, *bounds[i : i + 2]) for i in range(parts)]


def local_tensor(whole: torch.Tensor, shard: Shard) -> torch.Tensor:
    place = (shard.num_runs, shard.run_length), (shard.global_stride, 1), shard.global_start
    return whole.flatten().as_strided(*place).contiguous()


@pytest.mark.parametrize("kind", [*RANDOM, "none"])
@pytest.mark.parametrize("how", ["column_parallel", "row_parallel", "flat"])
@pytest.mark.parametrize("dim", [64, 100])
def test_the_parts_of_a_split_add_up_to_the_whole(kernel, small_srht, kind, how, dim):
    w, bias = vector((50, 66), (37,))
    sizes = {"w": 50 * 66, "b": 37}
    whole = sketch_of(kind, dim, single_layout({"w": (50, 66), "b": (37,)}), [w, bias])
    total = torch.zeros_like(whole)
    for rank, shard in enumerate(split_layouts((50, 66), 3, how)):
        replica = whole_tensor("b", (37,)) if rank == 1 else whole_tensor("b", (37,)).replica()
        layout = Layout(((replica,), (shard,)), sizes)  # each rank in an order of its own
        total += sketch_of(kind, dim, layout, [bias, local_tensor(w, shard)])
    assert distance(total, whole) < 1e-6


@given(st.integers(1, 12), st.integers(1, 60), st.integers(1, 4), st.integers(1, 70),
       st.sampled_from(["column_parallel", "row_parallel", "flat"]), st.data())
def test_any_split_and_a_second_split_of_its_parts_add_up(rows, columns, parts, dim, how, data):
    (w,) = vector((rows, columns))
    sizes = {"w": rows * columns, "rest": 70}
    config = SketchConfig("rotation", dim)
    whole = make_sketch(config, Layout(((whole_tensor("w", w.shape),),), sizes))
    total = torch.zeros(dim, dtype=torch.float64)
    for shard in split_layouts((rows, columns), parts, how):
        local = local_tensor(w, shard).flatten()
        middle = data.draw(st.integers(0, len(local)))  # as a ZeRO-like optimizer cuts a buffer
        for start, stop in ((0, middle), (middle, len(local))):
            layout = Layout((cut(shard, start, stop),), sizes)
            total += make_sketch(config, layout)([local[start:stop]])
    assert float((total - whole([w])).norm()) <= 1e-6 * float(w.norm())


def test_a_tensor_of_two_shards():
    gate, up = vector((4, 6), (4, 6))
    sizes = {"gate": 24, "up": 24}
    fused = Layout(((whole_tensor("gate", (4, 6)), whole_tensor("up", (4, 6)).moved(24)),), sizes)
    apart = single_layout({"gate": (4, 6), "up": (4, 6)})
    assert torch.equal(sketch_of("rotation", 9, fused, [torch.cat([gate, up])]),
                       sketch_of("rotation", 9, apart, [gate, up]))


@pytest.mark.parametrize("kind", RANDOM)
def test_names_order_and_seeds(small_srht, kind):
    a, b = vector((30,), (40,))
    one = sketch_of(kind, 16, single_layout({"a": (30,), "b": (40,)}), [a, b])
    other = sketch_of(kind, 16, single_layout({"b": (40,), "a": (30,)}), [b, a])
    assert distance(other, one) < 1e-12
    assert distance(sketch_of(kind, 16, single_layout({"a": (30,), "c": (40,)}), [a, b]), one) > 0.1
    assert distance(sketch_of(kind, 16, single_layout({"a": (30,), "b": (40,)}), [a, b], seed=1),
                    one) > 0.1


@pytest.mark.parametrize("length", [5, 10, 1000])
def test_segments_are_a_shard_in_order(length):
    shard = Shard("w", 500, 3, 7, 40, 60, 2, 41)
    pieces = list(segments(shard, length))
    assert all(piece.num_elements <= max(length, 1) or piece.num_runs > 1 for piece in pieces)
    places = [(piece.global_start + r * piece.global_stride, piece.local_start + r * 41,
               piece.run_length) for piece in pieces for r in range(piece.num_runs)]
    flat = [(g + i, at + i) for g, at, n in places for i in range(n)]
    assert flat == [(3 + 60 * r + i, 2 + 41 * r + i) for r in range(7) for i in range(40)]


@pytest.mark.parametrize("kind", HASHED)
def test_the_number_of_threads_changes_no_bit(kernel, kind, monkeypatch):
    monkeypatch.setattr(module, "SEGMENT", 1000)
    layout, tensors = single_layout({"w": (70, 99), "v": (10, 10)}), vector((70, 99), (10, 10))
    one = sketch_of(kind, 20, layout, tensors)
    torch.set_num_threads(3)
    assert torch.equal(sketch_of(kind, 20, layout, tensors), one)


# ---- what comes in -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*RANDOM, "none"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_any_floating_type_is_taken_as_it_is(kernel, small_srht, kind, dtype):
    layout, (x,) = single_layout({"w": (600,)}), vector((600,))
    x = x.to(dtype)
    out = sketch_of(kind, 40, layout, [x])
    assert out.dtype == torch.float64
    assert distance(sketch_of(kind, 40, layout, [x.float()]), out) < 1e-6


@pytest.mark.parametrize("kind", [*RANDOM, "none"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows(kernel, small_srht, kind, value):
    layout, (x,) = single_layout({"w": (600,)}), vector((600,))
    x[333] = value
    out = sketch_of(kind, 40, layout, [x])
    assert not torch.isfinite(out).all()
    if math.isnan(value):
        assert torch.isnan(out).any()


def test_views_and_parameters_are_taken(kernel):
    layout, (x,) = single_layout({"w": (20, 30)}), vector((30, 20))
    expected = sketch_of("rotation", 40, layout, [x.T.contiguous()])
    assert torch.equal(sketch_of("rotation", 40, layout, [x.T]), expected)
    assert torch.equal(sketch_of("rotation", 40, layout, [torch.nn.Parameter(x.T)]), expected)
    padded = torch.cat([torch.ones(7), x.T.flatten(), torch.ones(7)])
    assert torch.equal(sketch_of("rotation", 40, layout, [padded[7:607]]), expected)
    assert torch.equal(sketch_of("none", 1, layout, [padded[7:607]]), x.T.flatten().double())


def test_a_generator_of_temporaries_holds_one_at_a_time(kernel):
    layout, tensors = single_layout({str(i): (50,) for i in range(9)}), vector(*[(50,)] * 9)
    alive: list[weakref.ref] = []

    def squares():
        for x in tensors:
            square = x * x
            alive.append(weakref.ref(square))
            yield square
            del square
            assert sum(ref() is not None for ref in alive) <= 1  # what the loop still holds

    sketch_of("rotation", 16, layout, squares())
    assert len(alive) == 9


def test_a_rank_that_counts_nothing_gives_zeros():
    layout = Layout(((whole_tensor("w", (9,)).replica(),),), {"w": 9, "x": 9})
    for kind in ("rotation", "none"):
        assert not sketch_of(kind, 4, layout, vector((9,))).any()
    assert not sketch_of("rotation", 4, Layout(((),), {"x": 9}), vector((0,))).any()
    assert not sketch_of("rotation", 4, Layout((), {"x": 9}), []).any()


@pytest.mark.parametrize("kind", ["auto", *RANDOM])
def test_more_numbers_than_the_model_has_are_refused(kind):
    layout = Layout(((whole_tensor("w", (9,)),),), {"w": 9, "elsewhere": 91})
    make_sketch(SketchConfig(kind, 100), layout)
    with pytest.raises(ProbeError, match=r"sketch.dim: got 101, more than the model's 100 param"):
        make_sketch(SketchConfig(kind, 101), layout)
    assert make_sketch(SketchConfig("none", 101), layout).dim == 100


@pytest.mark.parametrize(("tensors", "error", "message"), [
    ([torch.ones(8)], AssertionError, "w: the tensor has 8 elements, the layout expects 9"),
    ([torch.ones(9, dtype=torch.int64)], AssertionError, "a gradient of torch.int64"),
    ([torch.ones(9), torch.ones(1)], ValueError, "argument 2 is shorter"),
    ([], ValueError, "argument 2 is longer"),
])  # fmt: skip
def test_a_vector_that_does_not_fit_is_refused(tensors, error, message):
    with pytest.raises(error, match=message):
        sketch_of("rotation", 4, single_layout({"w": (9,)}), tensors)
