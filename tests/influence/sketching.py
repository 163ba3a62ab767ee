"""What the tests of sketches share. Needs torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_d3.influence import sketch
from megatron_d3.influence.layout import Layout
from megatron_d3.influence.settings import SketchConfig

HASHED = ["rotation", "count", "gaussian"]
RANDOM = [*HASHED, "rotation_srht"]
needs_c = pytest.mark.skipif(not sketch.is_compiled(), reason="built without the C extension")


def vector(*shapes: tuple[int, ...], seed: int = 0) -> list[torch.Tensor]:
    rng = np.random.default_rng(seed)
    return [torch.from_numpy(rng.standard_normal(shape, np.float32)) for shape in shapes]


def sketch_of(kind: str, dim: int, layout: Layout, tensors, *, seed: int = 0) -> torch.Tensor:
    return sketch.make_sketch(SketchConfig(kind, dim, seed), layout)(tensors)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())
