"""The door of `megatron-d3 d3 study`: Megatron's flags in, a report out. Nothing is trained.

Every process of a `torchrun` calls :func:`run_study` with the flags of the run. Model, optimizer and
data are built as training builds them, the checkpoint is loaded, and the next units are measured
(`mcore/study_task.py`). Neither the checkpoint nor the plan beside it is written to.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_d3.influence.study import Judge


@dataclass(frozen=True)
class StudyJob:
    """What to compare.

    Attributes:
        num_units: L.
        estimators: as typed, see `influence/study_cases.py`; None for the usual ones.
        judge: the estimator that is believed, on all sequences of each unit.
        flags: of the run that is looked at.
    """

    num_units: int
    estimators: tuple[str, ...] | None
    judge: Judge
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """What rank 0 found out.

    Attributes:
        text: the tables.
        content: the same, JSON-able.
    """

    text: str
    content: dict[str, Any]


def run_study(job: StudyJob) -> Report | None:
    """Compare estimators and solvers at the run's checkpoint.

    Args:
        job: the same on every rank.

    Returns:
        The report on rank 0, None elsewhere.

    Raises:
        SystemExit: refused, or failed; the text says why.
    """
    from megatron_d3.mcore import pretrain

    found: list[Report] = []

    def task(setup: Any, args: Any) -> None:
        from megatron_d3.mcore import study_task  # not before Megatron's CPU switch

        report = study_task.compare(setup, args, job)
        if report is not None:
            found.append(report)

    before, sys.argv = sys.argv, [sys.argv[0], *_flags(job.flags)]
    try:
        with contextlib.redirect_stdout(sys.stderr):  # of Megatron's own words
            pretrain.main(task=task)
    finally:
        sys.argv = before
    return found[0] if found else None


def _flags(flags: Sequence[str]) -> list[str]:
    """Return Megatron's flags: what the run's own may leave out here, they, and what is not wanted."""
    nowhere = Path(tempfile.gettempdir()) / "megatron-d3-study-saves-nothing"
    return ["--save", str(nowhere), "--save-interval", "1", "--eval-interval", "1",
            "--eval-iters", "0", *flags, "--tensorboard-dir", "", "--wandb-project", ""]
