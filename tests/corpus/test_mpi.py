"""Ranks: found where there are some, refused where they cannot be used."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from megatron_d3.corpus.mpi import Ranks, find_ranks
from megatron_d3.errors import ConfigError


def test_without_mpirun_there_is_one_rank_and_no_mpi4py(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    for environ in ({}, {"PMI_SIZE": "1"}, {"SLURM_STEP_NUM_TASKS": "one"}):
        ranks = find_ranks(environ)
        assert ranks == Ranks(0, 1)
    assert (ranks.broadcast(3), ranks.gather(4)) == (3, [4])
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

    monkeypatch.setitem(sys.modules, "mpi4py.MPI", SimpleNamespace(COMM_WORLD=World()))
    ranks = find_ranks({"PMI_SIZE": "2"})
    assert (ranks.rank, ranks.size) == (1, 2)
    assert ranks.broadcast("x") == ("from", 0, "x")
    assert ranks.gather("x") == ["x", "x"]
