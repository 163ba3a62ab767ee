"""A checkpoint that could not be written is explained by the disk, if it is the disk."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import pytest

from megatron_d3.errors import PlanError
from megatron_d3.mcore.save_failure import require_writable

_CAUSE = RuntimeError("Worker failure")


def test_a_disk_that_takes_a_mebibyte_is_not_the_reason(tmp_path: Path) -> None:
    require_writable(tmp_path, _CAUSE)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="none: cannot write the checkpoint: No such file or directory; "
                                        "check the path. The checkpoint before it") as caught:
        require_writable(tmp_path / "none", _CAUSE)
    assert caught.value.__cause__ is _CAUSE


def test_a_disk_that_takes_no_more_is_named(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(PlanError, match="cannot write the checkpoint: File too large; raise the"):
            require_writable(tmp_path, _CAUSE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []
