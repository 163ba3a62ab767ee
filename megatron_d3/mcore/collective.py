"""Small agreements between all ranks: rank 0 decides and everyone hears it, errors included."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from megatron_d3.errors import D3Error, PlanError


class EchoError(D3Error):
    """Raised on every other rank when rank 0 failed; rank 0 raises, and prints, the error itself."""


def on_rank_0[T](function: Callable[[], T]) -> T:
    """Run `function` on rank 0 and return its (picklable) result on every rank.

    Raises:
        D3Error: on rank 0 what `function` raised, on the others an :class:`EchoError` of the same
            message, so that no rank waits for another.
    """
    box: list[object] = [None, None]
    error: D3Error | None = None
    if torch.distributed.get_rank() == 0:
        try:
            box[0] = function()
        except D3Error as raised:
            error, box[1] = raised, str(raised)
    torch.distributed.broadcast_object_list(box, src=0)
    if error is not None:
        raise error
    if box[1] is not None:
        raise EchoError(str(box[1]))
    return box[0]  # type: ignore[return-value]


# What gloo says, and NCCL where it does not end the process itself.
_TIMED_OUT = re.compile(r"[Tt]imed out waiting (\d+) ?ms|[Tt]imeout\(ms\)=(\d+)")
_PEER_GONE = re.compile(r"Connection (closed|reset) by peer|Broken pipe|No route to host|"
                        r"remote process exited or there was a network error", re.IGNORECASE)


def why_it_failed(error: RuntimeError) -> str | None:
    """Say what a failed collective means; None for any other error."""
    text = str(error)
    if found := _TIMED_OUT.search(text):
        seconds = int(found.group(1) or found.group(2)) / 1000
        return (f"a collective did not end within {seconds:g} s, the time-out of "
                "--distributed-timeout-seconds-after-init or --distributed-timeout-minutes: a rank "
                "hangs, or its node cannot be reached. Resume from the last checkpoint")
    if _PEER_GONE.search(text):
        return ("another rank is gone in the middle of a collective; its own log says why, unless "
                "it was killed. Resume from the last checkpoint")
    return None


_PART_BITS = 16
_NUM_PARTS = 4


def agreement_terms(value: int) -> list[float]:
    """Terms whose sums over all ranks tell whether the ranks hold the same 64-bit value.

    The parts h of 16 bits and their squares: W * sum(h^2) = (sum h)^2 over W ranks if and only if
    all h are equal (Cauchy-Schwarz). The sums stay exact in float64 for any world below 2^21 ranks.
    """
    parts = [(value >> (_PART_BITS * i)) & 0xFFFF for i in range(_NUM_PARTS)]
    return [float(h) for h in parts] + [float(h * h) for h in parts]


NUM_AGREEMENT_TERMS = 2 * _NUM_PARTS


def require_agreement(sums: list[float], world_size: int, *, what: str) -> None:
    """Check the summed terms of :func:`agreement_terms`; every rank comes to the same verdict.

    Raises:
        PlanError: the ranks hold different values.
    """
    for h, square in zip(sums[:_NUM_PARTS], sums[_NUM_PARTS:], strict=True):
        if world_size * int(square) != int(h) ** 2:
            raise PlanError(
                f"{what}: the ranks disagree, so the plan is not the same on all of them; nothing "
                "of this step was recorded. Resume from the last checkpoint, and check that all "
                "nodes run the same code and read the same corpus")
