"""A signal that asks for a checkpoint must not end the processes that a rank started.

`--exit-signal-handler --exit-signal SIGUSR1` makes Megatron save and leave after the step in which
the signal came. Schedulers send it to every process of the job, also to those that Megatron starts
for writing checkpoints: they have no handler, would die of it, and the checkpoint with them.
"""

from __future__ import annotations

import signal
import threading


def shield_children(number: signal.Signals) -> None:
    """Let processes that this one starts from now on ignore the signal; this one still gets it.

    Blocked signals stay blocked across fork and exec, ignored or handled ones need not. So the main
    thread blocks the signal, and another thread stands by that does not, for the kernel to deliver
    it to; Python's handler runs in the main thread all the same.

    Args:
        number: the signal.
    """
    threading.Thread(target=threading.Event().wait, name="d3-signals", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})


def ignore(number: signal.Signals) -> None:
    """Let the signal do nothing from now on; Python's end would restore what kills the process.

    Args:
        number: the signal, which may be sent again until the job has ended.
    """
    signal.signal(number, signal.SIG_IGN)
