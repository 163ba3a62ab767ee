"""From measured inner products to the advantage S; NumPy only.

    I_ij = -gamma c_i g_i.g_j + gamma^2 / 2 c_i^2 Q_ij + O(gamma^3),   Q_ij = g_i^T H_j g_i
    S_ij = I_ji - I_ij

is the influence of unit i on unit j by the step gamma c_i g_i, c_i the factor of gradient clipping.
With a preconditioned step P g the same holds for P^(1/2) g and P^(1/2) H P^(1/2).
"""

from __future__ import annotations

import numpy as np

_ROUNDING = 1e-12
"""Share of the largest |Q| below which a difference of two is rounding of float64 sums."""


def advantage_of(
    gram: np.ndarray, quadratic: np.ndarray, clip_factors: np.ndarray, gamma: float
) -> np.ndarray:
    """Return S.

    The first-order part, gamma (c_i - c_j) g_i.g_j, is exactly 0 for equal factors. Differences of
    Q that rounding makes are 0 too: units that are alike, or a Q that is symmetric, ask for no
    order.

    Args:
        gram: g_i.g_j, (L, L), symmetric.
        quadratic: Q_ij, (L, L).
        clip_factors: c, (L,).
        gamma: step size.

    Returns:
        (L, L) float64, antisymmetric to the last bit.
    """
    second = clip_factors[:, None] ** 2 * quadratic
    first = (clip_factors[:, None] - clip_factors[None, :]) * gram
    advantage = gamma * first + gamma**2 / 2 * (second.T - second)
    rounding = _ROUNDING * gamma**2 / 2 * np.abs(second).max(initial=0)
    return np.where(np.abs(advantage) > rounding, advantage, 0)


def gram_of(sketches: np.ndarray) -> np.ndarray:
    """Return the inner products of (L, k) sketches, (L, L), symmetric to the last bit."""
    gram = sketches @ sketches.T
    return (gram + gram.T) / 2


def projected_quadratic(
    gradients: np.ndarray, products: np.ndarray, basis: np.ndarray
) -> np.ndarray:
    """Return Q from curvature along a few directions only.

    With g_i = P c_i + e_i, c_i the least-squares coefficients, and h_j = H_j P:
    Q_ij = g_i^T H_j g_i = 2 c_i.(h_j^T g_i) - c_i^T (P^T h_j) c_i + e_i^T H_j e_i,
    and the last term is left out. Exact for gradients in the span of P, in sketches too up to the
    error of P^T h_j.

    Args:
        gradients: sketches of g_i, (L, k).
        products: sketches of H_j P, (r, L, k).
        basis: sketches of P's columns, (r, k), linearly independent.

    Returns:
        (L, L) float64, row i the step, column j the unit whose loss curves.
    """
    coefficients = np.linalg.solve(basis @ basis.T, basis @ gradients.T).T  # (L, r)
    mixed = np.einsum("ia,ajk,ik->ij", coefficients, products, gradients, optimize=True)
    inner = np.einsum("ak,bjk->jab", basis, products, optimize=True)  # (L, r, r)
    return 2 * mixed - np.einsum("ia,jab,ib->ij", coefficients, inner, coefficients, optimize=True)
