"""Rank scores with the help of other processes: each sorts a share, the first merges."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from megatron_d3.order.ranking import rank, refuse_nan


class Ranks(Protocol):
    """Processes that run the same code, as `megatron_d3.corpus.mpi.Ranks`."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def collect(self, value: Any) -> list[Any]: ...


def rank_together(scores: np.ndarray, *, ascending: bool, ranks: Ranks) -> np.ndarray:
    """Return what `rank` returns; all ranks call this with the same scores.

    Args:
        scores: (N,) float64; each rank reads its share of them.
        ascending: as of `rank`.
        ranks: the processes.

    Returns:
        (N,) int64 on rank 0, (0,) on others.

    Raises:
        CorpusError: a score is NaN; on every rank.
    """
    if ranks.size == 1:
        return rank(scores, ascending=ascending)
    refuse_nan(scores)
    bounds = [len(scores) * number // ranks.size for number in range(ranks.size + 1)]
    first, last = bounds[ranks.rank], bounds[ranks.rank + 1]
    share = np.asarray(scores[first:last])
    parts = ranks.collect(first + rank(share, ascending=ascending))
    if ranks.rank:
        return np.empty(0, np.int64)
    joined = np.concatenate(parts)
    del parts
    # Shares lie in document order and are sorted stably, so ties stay in document order. NumPy's
    # stable sort of floats finds sorted runs and merges them: N log(ranks) comparisons.
    return joined[rank(scores[joined], ascending=ascending)]
