"""One zygote for all tests that start Megatron."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.mcore.launcher import Launcher


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    launcher = Launcher()
    yield launcher
    launcher.close()
