"""A gate before each training step, for `--d3-plugin tests.slurm.gates` and the forking launcher.

Step n + 1 begins once the number in the file $D3_TEST_GATE, if that is set, is above n.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from megatron_d3.mcore.planned_run import PlannedRun

MIXERS: dict[str, type] = {}  # what a plug-in must have
_stock = PlannedRun.before_step


def _before_step(self: Any, iteration: int) -> bool:
    gate = os.environ.get("D3_TEST_GATE")
    while gate and iteration >= int(Path(gate).read_text()):
        time.sleep(0.05)
    return _stock(self, iteration)


PlannedRun.before_step = _before_step  # type: ignore[method-assign]
