"""Copying by ranks; `tests/cli/test_mpi.py` does it with real ones."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_d3.corpus.copying import Copiers
from megatron_d3.corpus.index import read_index
from megatron_d3.corpus.mpi import Ranks
from megatron_d3.corpus.rewrite import open_source
from tests.corpus_helpers import write_corpus


class Heard(Ranks):
    """One rank that notes what it broadcasts."""

    heard: list = []  # noqa: RUF012

    def broadcast(self, value):
        self.heard.append(value)
        return value


@pytest.fixture
def source(tmp_path):
    return open_source([read_index(write_corpus(tmp_path / "web", [[1, 2], [], [3]]))])


def test_one_rank_copies_all(source, tmp_path):
    Copiers(source, Ranks()).write(np.array([2, 1, 0, 2]), tmp_path / "out")
    assert np.fromfile(tmp_path / "out", "<u2").tolist() == [3, 1, 2, 3]


def test_a_failure_is_raised_after_all_ranks_know_it(source, tmp_path):
    with pytest.raises(OSError, match=r"Is a directory: .*out"):
        (tmp_path / "out").mkdir()
        Copiers(source, Ranks()).write(np.array([0]), tmp_path / "out")


def test_ranks_that_wait_are_sent_home(source):
    ranks = Heard()
    ranks.heard.clear()
    copiers = Copiers(source, ranks)
    with copiers.dismiss():
        pass
    assert ranks.heard == []  # nobody waits yet
    copiers.are_waiting = True
    with pytest.raises(ZeroDivisionError), copiers.dismiss():
        raise ZeroDivisionError
    assert ranks.heard == [None]
    assert copiers.help() == 1
