"""Offline orders: in which sequence a corpus is read, decided once from a score a document.

```
scores (N,) -> rank -> ranked documents -> fold | zigzag | segment | str | saw -> jitter -> (N,)
```
Everything here is a pure function of arrays, parameters and a seed; the permutation it gives is
written into an index by `megatron_d3.corpus.reorder`.

* `sort`: a curriculum, lowest (or highest) score first.
* `fold`, `zigzag`: several passes over the whole range of scores (`layers`).
* `segment`: chosen tails first and last, everything shuffled within its part.
* `str`, `saw`: a curriculum with its section borders folded or zigzagged (`sections`, `ratio`).
* `shuffle`: for comparison. `jitter` shuffles small windows on top of any of them.

Source of all but `shuffle`: "Demystifying Data Organization for Enhanced LLM Training"
(arXiv 2605.30334).

>>> import numpy as np
>>> from megatron_d3.order import Recipe, permutation
>>> recipe = Recipe("saw", ascending=True, parameters={"sections": 2, "ratio": 0.3})
>>> permutation(np.arange(10.0), recipe, num_items=10)
array([0, 1, 2, 5, 6, 3, 4, 7, 8, 9])
"""

from megatron_d3.order.layers import fold, zigzag
from megatron_d3.order.noise import gumbel_ranks, jitter, window_size
from megatron_d3.order.parallel import rank_together
from megatron_d3.order.ranking import rank, refuse_nan, refuse_repeats
from megatron_d3.order.recipe import METHODS, PRESETS, Recipe, permutation, preset
from megatron_d3.order.sections import saw_order, str_order, transitions
from megatron_d3.order.tails import segment

__all__ = [
    "METHODS",
    "PRESETS",
    "Recipe",
    "fold",
    "gumbel_ranks",
    "jitter",
    "permutation",
    "preset",
    "rank",
    "rank_together",
    "refuse_nan",
    "refuse_repeats",
    "saw_order",
    "segment",
    "str_order",
    "transitions",
    "window_size",
    "zigzag",
]
