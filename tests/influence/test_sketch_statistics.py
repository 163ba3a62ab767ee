"""Inner products of sketches are right on average, with the error of dense random matrices."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megatron_d3.influence.layout import single_layout
from megatron_d3.influence.settings import SketchConfig

torch = pytest.importorskip("torch")

from megatron_d3.influence.sketch import make_sketch
from tests.influence.sketching import HASHED, RANDOM, needs_c

pytestmark = pytest.mark.usefixtures("one_thread")


SHAPES = {"w": (60, 70), "v": (40, 90), "b": (100,)}
SIZE = 60 * 70 + 40 * 90 + 100


def split_up(flat: np.ndarray) -> list[torch.Tensor]:
    parts = np.split(flat.astype(np.float32), [4200, 7800])
    return [torch.from_numpy(part) for part in parts]


def model_gradients() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Gradients of two batches of a small model with an embedding, of SHAPES' sizes."""
    torch.manual_seed(0)
    embedding = torch.randn(60, 70, requires_grad=True)
    hidden = (torch.randn(40, 90) / 8).requires_grad_()
    bias = torch.zeros(100, requires_grad=True)
    gradients = []
    for _ in range(2):
        tokens = torch.randint(0, 30, (64,))
        wide = torch.nn.functional.pad(embedding[tokens], (0, 20))  # (64, 90)
        out = torch.nn.functional.pad((wide @ hidden.T).relu(), (0, 60)) + bias  # (64, 100)
        loss = torch.nn.functional.cross_entropy(out, torch.randint(0, 40, (64,)))
        gradients.append(list(torch.autograd.grad(loss, (embedding, hidden, bias))))
    return gradients[0], gradients[1]


def make_pair(name: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    rng = np.random.default_rng(5)
    x, noise = rng.standard_normal((2, SIZE))
    if name == "model":
        return model_gradients()
    if name == "heavy_tailed":
        x = rng.standard_t(2, SIZE)
    elif name == "sparse":
        x = x * (rng.random(SIZE) < 0.01)
        noise = noise * (rng.random(SIZE) < 0.01)
    elif name == "low_rank":
        x[:7800] = np.concatenate([np.outer(*(rng.standard_normal(n) for n in shape)).ravel()
                                   for shape in ((60, 70), (40, 90))])
        noise[:4200] = np.outer(rng.standard_normal(60), x[:70]).ravel()
    elif name == "hot_column":
        x[:4200:70] *= 50  # column 0 of w
        noise[:4200:70] *= 50
    elif name == "non_negative":
        x, noise = x**2, noise**2
    return split_up(x), split_up(x + noise)


def exact(x: list[torch.Tensor], y: list[torch.Tensor]) -> float:
    pairs = zip(x, y, strict=True)
    return sum(float(a.double().flatten() @ b.double().flatten()) for a, b in pairs)


@needs_c  # for speed: some hundred sketches each
@pytest.mark.parametrize("kind", RANDOM)
@pytest.mark.parametrize("name", [
    "gaussian", "heavy_tailed", "sparse", "low_rank", "hot_column", "non_negative", "model"])
def test_inner_products_are_unbiased_with_the_error_of_dense_matrices(small_srht, name, kind):
    dim, num_seeds = 256, 100
    x, y = make_pair(name)
    layout = single_layout(SHAPES)
    inner, bound = exact(x, y), math.sqrt(
        (exact(x, x) * exact(y, y) + exact(x, y) ** 2) / dim)
    errors = []
    for seed in range(num_seeds):
        sketch = make_sketch(SketchConfig(kind, dim, seed), layout)
        errors.append((float(sketch(x) @ sketch(y)) - inner) / bound)
    assert abs(np.mean(errors)) < 3.5 / math.sqrt(num_seeds)  # unbiased
    # rms 1 of 100 draws, within 30 % (normal: 7 %); two stages add their variances
    assert 0.5 < np.sqrt(np.mean(np.square(errors))) < (1.3 if kind in HASHED else 1.4)


@needs_c
@pytest.mark.parametrize("kind", RANDOM)
def test_the_error_falls_with_the_root_of_the_dimension(small_srht, kind):
    x, y = make_pair("gaussian")
    layout, inner, rms = single_layout(SHAPES), exact(x, y), {}
    for dim in (50, 800):
        maps = [make_sketch(SketchConfig(kind, dim, seed), layout) for seed in range(60)]
        rms[dim] = np.sqrt(np.mean([(float(r(x) @ r(y)) - inner) ** 2 for r in maps]))
    assert 2.9 < rms[50] / rms[800] < 5.5  # 4


def test_elements_of_one_block_never_meet(kernel):
    layout = single_layout({"w": (40,), "v": (10,)})
    sketch = make_sketch(SketchConfig("rotation", 8, 1), layout)
    columns = torch.stack([sketch(unit.split([40, 10])) for unit in torch.eye(50)])  # (50, 8)
    assert ((columns != 0).sum(1) == 1).all() and set(columns.flatten().tolist()) == {-1, 0, 1}
    gram = columns @ columns.T
    for start, stop in ((0, 8), (8, 16), (32, 40), (40, 48), (48, 50)):
        assert torch.equal(gram[start:stop, start:stop], torch.eye(stop - start).double())
    assert (gram - torch.eye(50)).abs().sum() > 0  # of different blocks some do


@needs_c
def test_gaussian_entries_are_normal_and_independent():
    dim, size = 400, 300
    sketch = make_sketch(SketchConfig("gaussian", dim), single_layout({"w": (10**3,)}))
    eye = torch.eye(size, 10**3)
    matrix = torch.stack([sketch([row]) for row in eye]).numpy() * math.sqrt(dim)  # (size, dim)
    n = size * dim
    moments = [np.mean(matrix**power) for power in (1, 2, 3, 4, 6)]
    widths = [math.sqrt(v / n) for v in (1, 2, 15, 96, 10170)]  # of normal numbers
    assert np.all(np.abs(np.array(moments) - [0, 1, 0, 3, 15]) < 4 * np.array(widths))
    ranks = np.sort(matrix.ravel())
    normal = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in ranks[::97]])
    assert np.max(np.abs(normal - (np.arange(n)[::97] + 0.5) / n)) < 1.7 / math.sqrt(n)
    rows, columns = np.corrcoef(matrix), np.corrcoef(matrix.T)
    for correlations, count in ((rows, dim), (columns, size)):
        apart = correlations[~np.eye(len(correlations), dtype=bool)]
        assert np.std(apart) == pytest.approx(1 / math.sqrt(count), rel=0.03)
        assert np.max(np.abs(apart)) < 6 / math.sqrt(count)


