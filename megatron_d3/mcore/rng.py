"""Random states: what is measured beside training must not draw from what training draws."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch
from megatron.core import tensor_parallel


@contextlib.contextmanager
def untouched_rng() -> Iterator[None]:
    """Leave every random state as it was: a resumed run must draw what an unbroken one draws."""
    tracker = tensor_parallel.get_cuda_rng_tracker()
    states = (random.getstate(), np.random.get_state(), torch.get_rng_state(),
              torch.cuda.get_rng_state(), tracker.get_states())
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        torch.cuda.set_rng_state(states[3])
        tracker.set_states(states[4])
