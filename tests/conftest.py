"""Settings of the property tests, and which tests may run at the same time."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# No time limit on busy machines, the same examples in CI.
settings.register_profile("laptop", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "laptop")

_FIRST = ("slurm", "mcore")
"""Folders in the order in which they begin: those that take longest, Slurm also waits a lot."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `pytest -n N --dist loadgroup` the tests of one file, and all of Slurm, share a process."""
    def folder(item: pytest.Item) -> str:
        return item.path.relative_to(item.config.rootpath / "tests").parts[0]

    for item in items:
        group = "slurm" if folder(item) == "slurm" else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: _FIRST.index(folder(item)) if folder(item) in _FIRST else len(_FIRST))
