"""P^(1/2) of the step that Adam takes next.

Adam's step t is gamma * P g, P = 1 / (sqrt(v_hat_t) + eps) (Kingma and Ba, "Adam", 2015, algorithm 1),
where

    v_hat_t = (1 - w) v_hat_(t-1) + w g^2,    w = (1 - beta2) / (1 - beta2^t),

holds the gradient of the step itself: no element moves by more than gamma / sqrt(w). One P serves all
units of a window, so g^2 cannot be that of a unit; the mean of v_hat_(t-1) over the parameter takes its
place. Elements of ordinary size hardly notice it. Others, rows of an embedding whose tokens were hardly
ever seen, would move without bound with the denominator before the step. Momentum and weight decay are
the same whichever unit comes next, to first order, and are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def step_root_(
    moment: torch.Tensor, mean: float, *, beta2: float, num_steps: int, eps: float
) -> torch.Tensor:
    """Return P^(1/2) of a parameter, in place.

    Args:
        moment: v_hat after `num_steps`, the second moment without its bias; it is overwritten.
        mean: of v_hat over the whole parameter.
        beta2: of the optimizer.
        num_steps: t - 1, steps taken.
        eps: of the optimizer.

    >>> import torch
    >>> root = step_root_(torch.tensor([1.0, 0.0]), 0.25, beta2=0.75, num_steps=10**6, eps=0.0)
    >>> [round(x, 4) for x in (root**-4).tolist()]  # v_hat after the step
    [0.8125, 0.0625]
    """
    weight = (1.0 - beta2) / (1.0 - beta2 ** (num_steps + 1))  # w
    return moment.mul_(1.0 - weight).add_(weight * mean).sqrt_().add_(eps).rsqrt_()
