"""Ranks: found where there are some, refused where they cannot be used."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from megatron_d3.corpus import mpi
from megatron_d3.corpus.mpi import Ranks, find_ranks, on_all_ranks
from megatron_d3.errors import ConfigError, CorpusError


def test_without_mpirun_there_is_one_rank_and_no_mpi4py(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    for environ in ({}, {"PMI_SIZE": "1"}, {"SLURM_STEP_NUM_TASKS": "one"}):
        ranks = find_ranks(environ)
        assert ranks == Ranks(0, 1)
    assert (ranks.broadcast(3), ranks.gather(4)) == (3, [4])
    assert ranks.collect(5) == [5]
    assert ranks.scatter([6]) == 6
    ranks.abort()


@pytest.mark.parametrize("name", ["PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_mpirun_without_mpi4py_is_refused(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    with pytest.raises(ConfigError, match=r"one of 4 ranks, but mpi4py cannot be used .*\[mpi\]"):
        find_ranks({name: "4"})


def test_an_mpi4py_of_another_mpi_is_refused(monkeypatch):
    alone = SimpleNamespace(COMM_WORLD=SimpleNamespace(rank=0, size=1))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", alone)
    with pytest.raises(ConfigError, match=r"one of 4 ranks, but mpi4py sees 1: .* different MPIs"):
        find_ranks({"PMI_SIZE": "4"})


def test_ranks_pass_values_through_their_communicator(monkeypatch):
    class World:
        rank, size = 1, 2

        def bcast(self, value, root):
            return ("from", root, value)

        def allgather(self, value):
            return [value, value]

        def gather(self, value, root):
            return None

        def scatter(self, values, root):
            return ("mine", values)

    monkeypatch.setitem(sys.modules, "mpi4py.MPI", SimpleNamespace(COMM_WORLD=World()))
    ranks = find_ranks({"PMI_SIZE": "2"})
    assert (ranks.rank, ranks.size) == (1, 2)
    assert ranks.broadcast("x") == ("from", 0, "x")
    assert ranks.gather("x") == ["x", "x"]
    assert ranks.collect("x") == []
    assert ranks.scatter(None) == ("mine", None)


def refuse(error: Exception):
    def work(ranks):
        raise error

    return work


def test_only_rank_0_speaks(monkeypatch):
    monkeypatch.setattr(mpi, "find_ranks", lambda: Ranks(1, 2))
    assert on_all_ranks(refuse(CorpusError("no"))) == 1
    assert on_all_ranks(lambda ranks: 5 + ranks.rank) == 6
    monkeypatch.setattr(mpi, "find_ranks", lambda: Ranks(0, 2))
    with pytest.raises(CorpusError, match="no"):
        on_all_ranks(refuse(CorpusError("no")))


def test_an_unplanned_error_ends_all_ranks(monkeypatch, capsys):
    aborted = []

    class Comm:
        def Abort(self, code):
            aborted.append(code)

    monkeypatch.setattr(mpi, "find_ranks", lambda: Ranks(1, 2, Comm()))
    with pytest.raises(ZeroDivisionError):
        on_all_ranks(refuse(ZeroDivisionError("our bug")))
    assert aborted == [1]
    assert "our bug" in capsys.readouterr().err
