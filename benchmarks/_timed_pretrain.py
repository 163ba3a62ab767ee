"""`megatron_d3.pretrain` with a clock: step times, and the time inside our hooks.

    torchrun -m benchmarks._timed_pretrain TIMES.json <flags of megatron_d3.pretrain>
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    path = Path(sys.argv.pop(1))
    from megatron_d3.mcore import cpu

    if cpu.wanted():
        cpu.enable()
    from megatron.training import training

    from megatron_d3.mcore import pretrain, step_hook

    done_at: list[float] = []
    used_by: list[float] = []  # processor seconds of all threads
    in_hooks: list[tuple[float, float]] = []  # wall and processor seconds
    stock_install = step_hook.install

    def install(hook: Any) -> None:
        for name in ("before_step", "after_step"):
            setattr(hook, name, _timed(getattr(hook, name), in_hooks))
        stock_install(hook)

    step_hook.install = install  # type: ignore[assignment]
    # The end of a step is when Megatron logs it, hooks of both sides included.
    stock_log = training.training_log

    @functools.wraps(stock_log)
    def training_log(*args: Any, **kwargs: Any) -> Any:
        done_at.append(time.perf_counter())
        used_by.append(time.process_time())
        return stock_log(*args, **kwargs)

    training.training_log = training_log
    pretrain.main()
    if os.environ["RANK"] == "0":
        path.write_text(json.dumps(
            {"done_at": done_at, "used_by": used_by, "in_hooks": in_hooks}))


def _timed(function: Any, times: list[tuple[float, float]]) -> Any:
    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        wall, processor = time.perf_counter(), time.thread_time()
        result = function(*args, **kwargs)
        times.append((time.perf_counter() - wall, time.thread_time() - processor))
        return result

    return timed


if __name__ == "__main__":
    main()
