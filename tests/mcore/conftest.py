"""What all tests that start Megatron share: one zygote, and corpora for each module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mcore.launcher import Launcher
from tests.mcore.plans import make_corpora


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    launcher = Launcher()
    yield launcher
    launcher.close()


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the domains that `plans.write_config` names."""
    folder = tmp_path_factory.mktemp("corpora")
    make_corpora(folder)
    return folder
