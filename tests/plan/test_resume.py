"""A killed run that is resumed leaves the same bytes as one that never stopped."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.plan_helpers import Trainer, files_of, header


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    directory = tmp_path_factory.mktemp("whole") / "d3"
    Trainer(directory, header()).run()
    return files_of(directory)


@pytest.mark.parametrize("killed_at", range(1, 25))
def test_resume_gives_the_same_bytes(
    tmp_path: Path, whole: dict[str, bytes], killed_at: int
) -> None:
    for checkpoint in range(killed_at + 1):
        directory = tmp_path / f"from{checkpoint}"
        Trainer(directory, header()).run(stop_at=killed_at)
        Trainer(directory, header()).run(checkpoint, 4 * checkpoint)
        assert files_of(directory) == whole
