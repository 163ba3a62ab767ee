"""Per-domain losses, weights and shares: in the log, in TensorBoard and in W&B.

Megatron's own writers are used; both live on the last rank, and so do our lines. Names are
`d3/<thing>/<domain>`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from megatron.training import print_rank_last
from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

from megatron_d3.plan.windows import WindowRow

# Domains named in one log line; the rest are in TensorBoard and in the ledger.
_NUM_SHOWN = 12


class DomainMetrics:
    """Writes what the domains did.

    Args:
        names: (K,) domain names.
        log_interval: steps between two log lines; losses are token means since the last line.
        tensorboard_interval: steps between two points in TensorBoard and W&B.
    """

    def __init__(
        self, names: Sequence[str], *, log_interval: int, tensorboard_interval: int
    ) -> None:
        self._names = list(names)
        self._log_interval = log_interval
        self._tensorboard_interval = tensorboard_interval
        self._loss_sums = np.zeros(len(names))
        self._num_tokens = np.zeros(len(names), dtype=np.int64)
        self._told_at: int | None = None  # iteration of the last line about a round

    def decided(
        self, round_number: int, iteration: int, *, positions: tuple[int, int], weights: np.ndarray
    ) -> None:
        """Log a round, at most one a log interval: from where on its weights hold.

        Args:
            round_number: of the decision.
            iteration: training steps whose losses it could follow.
            positions: first one, and the one after the last.
            weights: (K,) target weights.
        """
        if self._told_at is not None and iteration - self._told_at < self._log_interval:
            return
        self._told_at = iteration
        print_rank_last(
            f" d3 round {round_number} | iteration {iteration} | positions {positions[0]:,}-"
            f"{positions[1] - 1:,} | weights " + self._line(weights, "{:.3f}"))

    def ordered(self, row: WindowRow) -> None:
        """Report a window: costs of orders relative to a random one, how far S holds, curl, seconds.

        Seconds are also given as shares of the seconds of the training steps the window decides.
        """
        values = {f"cost_{name}": cost for name, cost in row.cost.items()}
        values |= {"curl": row.curl, "reliability": row.reliability,
                   "expected_agreement": row.expected_agreement}
        values |= {f"{name}_seconds": seconds for name, seconds in row.seconds.items()}
        step_seconds = row.details.get("step_seconds")
        shares: dict[str, float] = {}
        if step_seconds:
            steps_seconds = row.details["num_steps"] * step_seconds
            shares = {name: seconds / steps_seconds for name, seconds in row.seconds.items()
                      if seconds is not None}
        values |= {f"{name}_share": share for name, share in shares.items()}
        points = {f"d3/window/{name}": float(value) for name, value in values.items()
                  if value is not None and np.isfinite(value)}
        self._put(row.iteration, points)
        shown = " ".join(f"{name} {cost:.3f}" for name, cost in row.cost.items() if cost is not None)
        print_rank_last(
            f" d3 window at round {row.round} | iteration {row.iteration} | {row.num_units} units"
            + (f" | cost relative to random: {shown}" if shown else "")
            + (f" | reliability {row.reliability:.3f}" if row.reliability is not None else "")
            + (f" | expected agreement {row.expected_agreement:.3f}"
               if row.expected_agreement is not None else "")
            + (f" | curl {row.curl:.3f}" if row.curl is not None else "")
            + f" | {row.seconds['total']:.1f} s"
            + (f" ({100 * shares['total']:.1f} % of its steps)" if shares else "")
            + (f" | stored order kept: {row.reason}" if row.reason else ""))

    def trained(
        self, iteration: int, *, loss_sums: np.ndarray, num_tokens: np.ndarray,
        weights: np.ndarray, shares: np.ndarray, more: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Report a training step.

        Args:
            iteration: 1-based.
            loss_sums, num_tokens: (K,) of this step.
            weights: (K,) target weights of the step's positions.
            shares: (K,) share of each domain in all samples decided so far.
            more: (K,) values by name: what else the mixer says of itself.
        """
        has_loss = (num_tokens > 0) & np.isfinite(loss_sums)
        self._loss_sums[has_loss] += loss_sums[has_loss]
        self._num_tokens[has_loss] += num_tokens[has_loss]
        if iteration % self._tensorboard_interval == 0:
            self._write(iteration, "loss", _means(loss_sums, num_tokens))
            self._write(iteration, "weight", weights)
            self._write(iteration, "share", shares)
            for name, values in (more or {}).items():
                self._write(iteration, name, values)
        if iteration % self._log_interval == 0:
            losses = _means(self._loss_sums, self._num_tokens)
            print_rank_last(f" d3 iteration {iteration} | loss " + self._line(losses, "{:.4f}")
                            + " | weight " + self._line(weights, "{:.3f}")
                            + "".join(f" | {name} " + self._line(values, "{:.4f}")
                                      for name, values in (more or {}).items()))
            self._loss_sums[:] = 0
            self._num_tokens[:] = 0

    def evaluated(self, iteration: int, *, loss_sums: np.ndarray, num_tokens: np.ndarray) -> None:
        """Report an evaluation on the held-out samples: (K,) sums and counts."""
        losses = _means(loss_sums, num_tokens)
        self._write(iteration, "valid_loss", losses)
        print_rank_last(f" d3 validation at iteration {iteration} | loss "
                        + self._line(losses, "{:.4f}"))

    def _line(self, values: np.ndarray, form: str) -> str:
        shown = [f"{name} {form.format(value)}"
                 for name, value in zip(self._names, values, strict=True) if np.isfinite(value)]
        hidden = len(shown) - _NUM_SHOWN
        return " ".join(shown[:_NUM_SHOWN]) + (f" (+{hidden} more)" if hidden > 0 else "")

    def _write(self, iteration: int, thing: str, values: np.ndarray) -> None:
        points = {f"d3/{thing}/{name}": float(value)
                  for name, value in zip(self._names, values, strict=True) if np.isfinite(value)}
        self._put(iteration, points)

    def _put(self, iteration: int, points: Mapping[str, float]) -> None:
        if writer := get_tensorboard_writer():
            for name, value in points.items():
                writer.add_scalar(name, value, iteration)
        if (wandb := get_wandb_writer()) and points:
            wandb.log(dict(points), iteration)


def _means(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Token means, NaN for a domain without tokens."""
    return np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0)
