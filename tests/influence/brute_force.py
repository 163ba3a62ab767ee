"""S by autograd in float64: every gradient, Hessian product and step written out."""

from __future__ import annotations

import copy

import numpy as np
import torch

from megatron_d3.influence.settings import D3Config
from megatron_d3.influence.source import StepModel
from tests.influence.plain_source import PlainSource


class BruteForce:
    """Units of equal tokens; the halves of 2h sequences are [0, h) and [h, 2h)."""

    def __init__(self, source: PlainSource, step: StepModel) -> None:
        self.source, self.step = source, step
        self.model = copy.deepcopy(source.model)
        self.weights = list(self.model.parameters())
        root = source.step_root() if step.uses_root else None
        ones = [torch.ones_like(p) for p in self.weights]
        self.root = _flat(ones if root is None else root).detach()
        self.num_units, self.n = source.num_units, source.num_sequences
        self.g = torch.stack([self.gradient(u, 0, self.n) for u in range(self.num_units)])  # (L, d)
        self.w = self.g * self.root
        norms = self.g.norm(dim=1)
        limit = step.clip or float("inf")
        self.c = np.minimum(1, limit / norms.numpy())

    def _mean_loss(self, unit: int, start: int, stop: int, key: int | None = None) -> torch.Tensor:
        total, num_tokens = self.source._task(self.model, unit, start, stop, key)
        return total / num_tokens

    def gradient(self, unit: int, start: int, stop: int, key: int | None = None) -> torch.Tensor:
        return _flat(torch.autograd.grad(self._mean_loss(unit, start, stop, key), self.weights))

    def hessian(self, unit: int, start: int, stop: int, v: torch.Tensor) -> torch.Tensor:
        """Return H v of a unit's sequences, by double backward."""
        loss = self._mean_loss(unit, start, stop)
        slope = _flat(torch.autograd.grad(loss, self.weights, create_graph=True)) @ v.detach()
        return _flat(torch.autograd.grad(slope, self.weights))

    def whitened_hessian(self, unit: int, v: torch.Tensor) -> torch.Tensor:
        return self.root * self.hessian(unit, 0, self.n, self.root * v)

    def loss_after(self, unit: int, displacement: torch.Tensor, start: int, stop: int) -> float:
        offset = 0
        with torch.no_grad():
            before = [p.clone() for p in self.weights]
            for p in self.weights:
                p += displacement[offset : offset + p.numel()].view(p.shape)
                offset += p.numel()
            loss = float(self._mean_loss(unit, start, stop))
            for p, old in zip(self.weights, before, strict=True):
                p.copy_(old)
        return loss

    # --- S --------------------------------------------------------------------------------------

    def advantage(self, settings: D3Config) -> np.ndarray:
        """Return S as the definition of the settings' estimator has it, without a sketch."""
        gamma, pairs = self.step.gamma, [(i, j) for i in range(self.num_units)
                                         for j in range(self.num_units)]
        influence = np.zeros((self.num_units, self.num_units))
        quadratic = self._quadratic(settings)
        for i, j in pairs:
            if i == j:
                continue
            first = -gamma * self.c[i] * float(self.w[i] @ self.w[j])
            if settings.estimator.startswith("look_ahead"):
                move = -gamma * self.c[i] * self.root**2 * self.g[i]
                plus, zero, minus = (
                    self.loss_after(j, factor * move, 0, self.n) for factor in (1, 0, -1))
                is_even = settings.estimator == "look_ahead_even"
                influence[i, j] = first + (plus + minus) / 2 - zero if is_even else plus - zero
            else:
                influence[i, j] = first + gamma**2 / 2 * self.c[i] ** 2 * quadratic(i, j)
        return influence.T - influence

    def _quadratic(self, settings: D3Config):
        """Return a function (i, j) -> Q_ij."""
        if settings.estimator == "exact":
            return lambda i, j: float(self.w[i] @ self.whitened_hessian(j, self.w[i]))
        if settings.estimator == "projected":
            rest = self.w - self._project(settings)
            return lambda i, j: float(
                self.w[i] @ self.whitened_hessian(j, self.w[i])
                - rest[i] @ self.whitened_hessian(j, rest[i]))
        if settings.estimator.startswith("look_ahead"):
            return None
        h = torch.stack([self._diagonal(settings, j) for j in range(self.num_units)])
        if settings.estimator == "shared_hessian":
            h[:] = h.mean(dim=0)
        return lambda i, j: float(self.w[i] ** 2 @ h[j])

    def _project(self, settings: D3Config) -> torch.Tensor:
        """Return the units' (whitened) gradients within the directions' span."""
        if settings.basis == "mean":
            basis = self.w.mean(dim=0)[:, None]
        else:
            basis = torch.linalg.svd(self.w, full_matrices=False).Vh[: settings.num_directions].T
        q, _ = torch.linalg.qr(basis)
        return self.w @ q @ q.T

    def _diagonal(self, settings: D3Config, unit: int) -> torch.Tensor:
        half = self.n // 2
        halves = [(0, half), (half, self.n)] if half else [(0, 1)]
        num_tokens = self.source._task(self.model, unit, 0, 1, None)[1]
        if settings.estimator == "fisher":
            rows = [self.root * self.gradient(unit, n, n + 1) for n in range(self.n)]
            return num_tokens * torch.stack(rows).square().mean(dim=0)
        found = []
        for number, (start, stop) in enumerate(halves):
            for probe in range(settings.probes):
                if settings.estimator == "gnb_diagonal":
                    g = self.root * self.gradient(unit, start, stop, probe)
                    found.append(num_tokens * (stop - start) * g**2)
                    continue
                z = _flat(list(self.source.rademacher(2 * probe + number)))
                scales = _flat([torch.full_like(p, s) for p, s in zip(
                    self.weights, self.source.tensor_scales(), strict=True)])
                product = self.hessian(unit, start, stop, scales * z)
                found.append(self.root**2 * z * product / scales)
        return torch.stack(found).mean(dim=0)


def _flat(tensors) -> torch.Tensor:
    return torch.cat([x.detach().reshape(-1) if not x.requires_grad else x.reshape(-1)
                      for x in tensors])
