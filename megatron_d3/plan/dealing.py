"""Which data-parallel rank trains on which position: the rule of Megatron's own sampler.

A global batch is dealt in turns, a micro-batch at a time, in the order of ranks:

    position   consumed + 0 1 | 2 3 | 4 5 | 6 7        micro-batch size 2, 2 ranks, accumulation 2
    rank                   0     1     0     1
    micro-batch            0     0     1     1

So a plan knows nothing of ranks: whatever their number, together they read the next global batch.

Source: `MegatronPretrainingSampler` in `megatron.training.datasets.data_samplers`.
"""

from __future__ import annotations

import numpy as np


def indices_of_rank(size: int, micro_batch_size: int, *, dp_size: int, dp_rank: int) -> np.ndarray:
    """Return (M, B) int64, which samples of a global batch a rank trains on, by micro-batch.

    Args:
        size: samples of the global batch; a multiple of `micro_batch_size * dp_size`, as Megatron
            demands of it.
        micro_batch_size: B.
        dp_size: data-parallel ranks.
        dp_rank: in [0, dp_size).

    >>> indices_of_rank(8, 2, dp_size=2, dp_rank=1).tolist()
    [[2, 3], [6, 7]]
    """
    return np.arange(size).reshape(-1, dp_size, micro_batch_size)[:, dp_rank]
