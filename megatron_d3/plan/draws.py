"""Which samples of each domain a plan has drawn so far: none twice, none left out.

An independent count for the audit, which does not trust the replay.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_d3.plan.decide import number_draws
from megatron_d3.plan.segment import RECORD


class Draws:
    """The draws of D domains.

    Args:
        num_domains: rows of the plan's domain table.

    Attributes:
        cursors: (D,) int64, all ordinals below are drawn or passed over.
        ahead: (A,) of `RECORD`, drawn ordinals above, sorted by domain and ordinal.
        wanted: the ordinal that should have come where `consecutive` found another.
    """

    def __init__(self, num_domains: int) -> None:
        self.cursors = np.zeros(num_domains, np.int64)
        self.ahead = np.empty(0, RECORD)
        self.wanted = 0

    def begin(self, cursors: Sequence[int]) -> list[int]:
        """Go on from the cursors of a generation.

        Args:
            cursors: of the first rows of the table; the others are at 0.

        Returns:
            The domains whose cursor goes back behind a sample that was drawn.
        """
        drawn = self.cursors.copy()
        np.maximum.at(drawn, self.ahead["domain"], self.ahead["sample"] + 1)
        new = np.zeros_like(drawn)
        new[:len(cursors)] = cursors
        self.cursors, self.ahead = new, np.empty(0, RECORD)
        return np.flatnonzero(new < drawn).tolist()

    def consecutive(self, records: np.ndarray) -> int | None:
        """Take in samples that must be the next ones of their domains, in order.

        Returns:
            The index of the first that is not; None if all are.
        """
        samples, self.cursors = number_draws(records["domain"], self.cursors)
        wrong = np.flatnonzero(samples != records["sample"])
        if not len(wrong):
            return None
        self.wanted = int(samples[wrong[0]])
        return int(wrong[0])

    def ordered(self, records: np.ndarray) -> int | None:
        """Take in samples that may come in any order, but each once.

        Returns:
            The index of the first that was drawn before; None if none was.
        """
        merged = np.concatenate([self.ahead, records])
        order = np.lexsort((merged["sample"], merged["domain"]))  # stable: equal ones as they came
        merged = merged[order]  # (n,)
        is_repeated = merged["sample"] < self.cursors[merged["domain"]]
        is_repeated[1:] |= merged[1:] == merged[:-1]
        repeated, merged = order[is_repeated], merged[~is_repeated]
        counts = np.bincount(merged["domain"], minlength=len(self.cursors))
        first = np.cumsum(counts) - counts  # (D,) where each domain's run starts
        rank = np.arange(len(merged)) - np.repeat(first, counts)  # (n,) within its domain
        is_next = merged["sample"] - rank == self.cursors[merged["domain"]]
        index = int(repeated.min()) - len(self.ahead) if len(repeated) else None
        self.cursors = self.cursors + np.bincount(
            merged["domain"][is_next], minlength=len(self.cursors))
        self.ahead = merged[~is_next]
        return index
