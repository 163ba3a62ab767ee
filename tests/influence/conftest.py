"""Fixtures of the tests of sketches; torch is imported where they are used."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["torch", "cuda_on_cpu", "c"])
def kernel(request, monkeypatch):
    """Sketch by each implementation in turn."""
    from megatron_d3.influence import sketch, sketch_torch

    if request.param != "c":
        monkeypatch.setattr(sketch, "_compiled", None)
    elif not sketch.is_compiled():
        pytest.skip("built without the C extension")
    if request.param == "cuda_on_cpu":  # what is compiled for CUDA, as it stands
        monkeypatch.setattr(sketch_torch, "_gather_for", lambda _: sketch_torch._gather_elements)
    return request.param


@pytest.fixture(scope="module")
def one_thread():
    """For `pytestmark`: tensors of the tests are too small for more."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small_srht(monkeypatch):
    """65,536 numbers between two stages would be most of a test's time."""
    from megatron_d3.influence import sketch

    monkeypatch.setattr(sketch, "SRHT_DIM", 2048)
