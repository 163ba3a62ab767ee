"""A power law of each domain's loss, fitted while training runs, in memory that does not grow.

    L(n) = irreducible + scale * n ** -exponent

For a given exponent this is a straight line in n ** -exponent, so weighted sums over the losses
suffice: they are kept for a grid of exponents, and a fit takes the line of least squared error
within the bounds, then the exponent of least error.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_NUM_EXPONENTS = 24


@dataclass(frozen=True)
class Bounds:
    """The least and the most that each parameter of a fit may be; the most may be inf."""

    irreducible: tuple[float, float]
    scale: tuple[float, float]
    exponent: tuple[float, float]

    @property
    def exponents(self) -> np.ndarray:
        """(M,) float64, the exponents that are tried, from one end to the other."""
        return np.geomspace(*self.exponent, _NUM_EXPONENTS)


def empty_sums(num_domains: int) -> dict[str, np.ndarray]:
    """Return the sums before the first loss."""
    shape = (num_domains, _NUM_EXPONENTS)
    return {
        "num_losses": np.zeros(num_domains, np.int64),
        "sum_w": np.zeros(num_domains),
        "sum_y": np.zeros(num_domains),
        "sum_yy": np.zeros(num_domains),
        "sum_x": np.zeros(shape),
        "sum_xx": np.zeros(shape),
        "sum_xy": np.zeros(shape),
    }


def add_losses(
    sums: dict[str, np.ndarray], *, n: int, losses: np.ndarray, weights: np.ndarray, bounds: Bounds
) -> dict[str, np.ndarray]:
    """Return the sums with one more loss of each domain.

    Args:
        sums: of :func:`empty_sums`.
        n: how much was trained on, > 0.
        losses: (K,) float64; ignored where the weight is 0.
        weights: (K,) float64 >= 0, what each loss counts.
        bounds: the same at every call.
    """
    x = float(n) ** -bounds.exponents  # (M,)
    y = np.where(weights > 0, losses, 0.0)  # (K,)
    return {
        "num_losses": sums["num_losses"] + (weights > 0),
        "sum_w": sums["sum_w"] + weights,
        "sum_y": sums["sum_y"] + weights * y,
        "sum_yy": sums["sum_yy"] + weights * y * y,
        "sum_x": sums["sum_x"] + weights[:, None] * x,
        "sum_xx": sums["sum_xx"] + weights[:, None] * x * x,
        "sum_xy": sums["sum_xy"] + (weights * y)[:, None] * x,
    }


def fit(
    sums: dict[str, np.ndarray], bounds: Bounds, *, min_losses: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (K,) float64 irreducible, scale and exponent; NaN for a domain with too few losses."""
    enough = sums["num_losses"] >= max(min_losses, 3)
    total = np.where(enough, sums["sum_w"], 1.0)[:, None]  # (K, 1)
    x, xx, xy = (sums[name] / total for name in ("sum_x", "sum_xx", "sum_xy"))  # (K, M)
    y, yy = (sums[name][:, None] / total for name in ("sum_y", "sum_yy"))  # (K, 1)

    def error(e: np.ndarray, b: np.ndarray) -> np.ndarray:
        return yy - 2 * e * y - 2 * b * xy + e * e + 2 * e * b * x + b * b * xx

    with np.errstate(all="ignore"):
        slope = (xy - x * y) / (xx - x * x)
        candidates = [(y - slope * x, slope)]
        # Where the best line lies outside, the best inside lies on an edge: a bound for one
        # parameter, the best for the other given it.
        for edge in bounds.irreducible:
            at = np.full_like(x, edge)
            candidates.append((at, np.clip((xy - at * x) / xx, *bounds.scale)))
        for edge in bounds.scale:
            at = np.full_like(x, edge)
            candidates.append((np.clip(y - at * x, *bounds.irreducible), at))
        errors = np.stack([
            np.where(_within(e, bounds.irreducible) & _within(b, bounds.scale), error(e, b), np.inf)
            for e, b in candidates
        ])  # (C, K, M)
    errors = np.where(np.isfinite(errors), errors, np.inf)
    domain = np.arange(len(enough))
    best_line = errors.argmin(axis=0)  # (K, M)
    best = errors.min(axis=0).argmin(axis=1)  # (K,)
    line = best_line[domain, best]
    e, b = (np.stack([np.broadcast_to(c[i], x.shape) for c in candidates])[line, domain, best]
            for i in (0, 1))
    found = enough & np.isfinite(errors.min(axis=(0, 2)))
    return tuple(np.where(found, value, np.nan)  # type: ignore[return-value]
                 for value in (e, b, bounds.exponents[best]))


def _within(values: np.ndarray, bounds: tuple[float, float]) -> np.ndarray:
    return (values >= bounds[0]) & (values <= bounds[1])
