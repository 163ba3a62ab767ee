"""One cluster of four virtual nodes for all tests here, made when the first one asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, install, why_not


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all nodes see; of /tmp each has its own otherwise."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="session")
def cluster(shared: Path) -> Iterator[Cluster]:
    """Slurm with node1 to node4, installed from Debian's packages if need be."""
    if reason := why_not():
        pytest.skip(reason)
    install()
    cluster = Cluster(4, [shared])
    yield cluster
    cluster.close()
