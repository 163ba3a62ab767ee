"""Why a checkpoint could not be written: Megatron's writers only say that one of them failed."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_d3.errors import PlanError
from megatron_d3.plan.files import advice_on

_PROBE_BYTES = 1 << 20


def require_writable(folder: Path, error: BaseException) -> None:
    """Return if a mebibyte can be written; the failure then has another reason.

    Args:
        folder: where checkpoints go.
        error: how the checkpoint failed.

    Raises:
        PlanError: the disk is full, a quota is used up, it is read-only ...
    """
    probe = folder / f"writable-{os.uname().nodename}-{os.getpid()}.tmp"
    try:
        try:
            with open(probe, "wb") as file:
                file.write(bytes(_PROBE_BYTES))
                file.flush()
                os.fsync(file.fileno())
        finally:
            probe.unlink(missing_ok=True)
    except OSError as reason:
        raise PlanError(
            f"{folder}: cannot write the checkpoint: {reason.strerror or reason}; "
            f"{advice_on(reason)}. The checkpoint before it and the plan are whole: resume from there"
        ) from error
