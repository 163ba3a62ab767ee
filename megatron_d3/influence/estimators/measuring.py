"""What all estimators share: one measured pass over the window's units after another.

The order of calls is the same on all ranks of a group, as are all arrays that leave this file on all
ranks. The memory that an estimator states comes on top of the source's own: the saved weights while
they are displaced (not with `moved_along`) and, for steps of the optimizer, its root.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from megatron_d3.errors import ProbeError
from megatron_d3.influence.estimators.pieces import Piece, Probed, weighted_mean
from megatron_d3.influence.settings import D3Config
from megatron_d3.influence.source import GradientSource, Influence, Loss, StepModel

if TYPE_CHECKING:
    import torch

    from megatron_d3.influence.sketch import Sketch
    from megatron_d3.influence.source import Vector

ALONG_GRADIENTS = 0.01
"""Size of a finite difference along a gradient, over the cube root of the precision; as a share of
the norm of the weights. The cube root is where rounding and truncation of a central difference
meet. Along gradients the loss curves most, so that truncation sets in early: on a 28,000-parameter
GPT, trained 20 or 200 steps, S is within 0.1-0.2 % of its limit in float32 at 3e-5 (2-8 % at 1e-3),
and within 5-10 % in bfloat16 at 1e-3 to 3e-3 (25-60 % at 1e-2)."""

ALONG_SIGNS = 0.2
"""The same for displacements of all weights by random signs. Measured best: 1e-3 in float32 (S within
0.01 %), 3e-2 in bfloat16 (3-6 %; below 1e-2 nothing but rounding)."""


class Measuring:
    """Calls a source, keeps time and counts, and builds the answer.

    Args:
        source: the model and the window.
        sketch: of the source's layout.
        settings: of the window.
        step: whose influence is measured.

    Raises:
        ProbeError: the step needs the optimizer's root and the source has none.
    """

    def __init__(
        self, source: GradientSource, sketch: Sketch, settings: D3Config, step: StepModel
    ) -> None:
        self.source = source
        self.settings = settings
        self.step = step
        self.root = source.step_root() if step.uses_root else None
        if step.uses_root and self.root is None:
            raise ProbeError(
                "d3.order.step: `optimizer` needs an optimizer that scales its gradients; this one "
                "does not: use `step: sgd`"
            )
        self.num_units = source.num_units
        # Whole units of this group: by number, so another data-parallel size measures the same.
        self.own_units = range(source.group, source.num_units, source.num_groups)
        self.dim = sketch.dim
        self.seconds = {"gradients": 0.0, "sketch": 0.0, "reduce": 0.0}
        self.num_curved = min(settings.num_curved, source.num_sequences)
        self._sketch = sketch
        self._num_sequences = {"gradients": 0, "forwards": 0}
        # All ranks of a group know its losses, and a sum over all ranks must count them once.
        self.share = 1.0 / float(source.group_sum(np.ones(1))[0])

    # --- measured calls -------------------------------------------------------------------------

    def gradient(self, unit: int, start: int, stop: int, *, sample_key: int | None = None) -> Loss:
        """See `GradientSource.gradient`; timed and counted."""
        with self.timed("gradients"):
            self._num_sequences["gradients"] += stop - start
            return self.source.gradient(unit, start, stop, sample_key=sample_key)

    def loss(self, unit: int, start: int, stop: int) -> Loss:
        """See `GradientSource.loss`; timed and counted."""
        with self.timed("gradients"):
            self._num_sequences["forwards"] += stop - start
            return self.source.loss(unit, start, stop)

    def sketch(self, vector: Iterable[torch.Tensor]) -> np.ndarray:
        """Return this rank's part of a sketch, (k,) float64; timed."""
        with self.timed("sketch"):
            return self._sketch(vector).numpy(force=True)

    def all_sum(self, *arrays: np.ndarray) -> list[np.ndarray]:
        """Return the sums over all ranks, in one message; timed.

        A number that every rank of a group knows has to be multiplied by `share` first.
        """
        with self.timed("reduce"):
            total = self.source.all_sum(np.concatenate([a.ravel() for a in arrays]))
        ends = np.cumsum([a.size for a in arrays])[:-1]
        parts = np.split(total, ends)
        return [part.reshape(a.shape) for part, a in zip(parts, arrays, strict=True)]

    def group_sum(self, array: np.ndarray) -> np.ndarray:
        """Return the sum over the model-parallel group; timed."""
        with self.timed("reduce"):
            return self.source.group_sum(array)

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Add the time within to one of `seconds`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] += time.perf_counter() - start

    # --- coordinates ----------------------------------------------------------------------------

    def whitened(self, vector: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
        """Yield P^(1/2) x, one tensor at a time; x itself for plain steps."""
        if self.root is None:
            return vector
        return (x * r for x, r in zip(vector, self.root, strict=True))

    def squares(self) -> Iterable[torch.Tensor]:
        """Yield the squares of the last gradient, whitened."""
        return (g * g for g in self.whitened(self.source.gradients))

    def stepwise(self, vector: Vector) -> Callable[[], Iterable[torch.Tensor]]:
        """Return a direction: P x, which the step takes for the gradient x."""
        return lambda: self.whitened(self.whitened(vector))

    def difference(self, factor: float) -> float:
        """Return the size of a finite difference as a share of the norm of the weights.

        Args:
            factor: `ALONG_GRADIENTS` or `ALONG_SIGNS`, for where the settings leave it open.
        """
        return self.settings.difference or factor * self.source.precision ** (1 / 3)

    def length_along(self, norm: float) -> float:
        """Return the factor that makes a gradient of this norm as long as a finite difference."""
        return self.difference(ALONG_GRADIENTS) * self.source.weights_norm() / norm

    def clip_factors(self, norms: np.ndarray) -> np.ndarray:
        """Return c_i = min(1, clip / |g_i|) of norms (L,).

        Known difference: the norm is that of the probe sequences' gradient, whose noise makes it
        longer than that of the whole unit.
        """
        if self.step.clip is None:
            return np.ones_like(norms)
        return self.step.clip / np.maximum(norms, self.step.clip)

    # --- passes ---------------------------------------------------------------------------------

    def probe(
        self,
        pieces: Sequence[Piece],
        *,
        on_piece: Callable[[int, int, Loss], None] | None = None,
        on_unit: Callable[[int, Vector], None] | None = None,
    ) -> Probed:
        """Measure and sketch the gradient of every own unit, and collect the others'.

        For what needs a unit's whole gradient on one group; `linear.probe` shares units.
        Cost: 1 gradient a unit. One extra vector.

        Args:
            pieces: ranges that together hold each probe sequence once, by half.
            on_piece: called with (unit, index of the piece, loss) while `source.gradients` holds
                the piece's gradient.
            on_unit: called with (unit, its gradient, the token-weighted mean of all pieces), for
                units whose loss and gradient are finite. May change the vector.
        """
        shape = (len(pieces), self.num_units)
        sketches = np.zeros((*shape, self.dim))
        tokens, losses = np.zeros(shape), np.zeros(shape)
        norms, bad = np.zeros(self.num_units), np.zeros(self.num_units)
        whole = self.source.new_vector()
        for unit in self.own_units:
            for index, piece in enumerate(pieces):
                loss = self.gradient(unit, piece.start, piece.stop)
                if is_usable(loss):
                    sketches[index, unit] = self.sketch(self.whitened(self.source.gradients))
                    tokens[index, unit] = loss.num_tokens * self.share
                    losses[index, unit] = loss.mean * self.share
                    if on_piece is not None:
                        on_piece(unit, index, loss)
                else:
                    bad[unit] = 1
                add(whole, self.source.gradients, loss.num_tokens, is_first=index == 0)
            if not bad[unit]:
                scale(whole, self.share / tokens[:, unit].sum())
                norm = self.source.dot(whole, whole) ** 0.5
                if np.isfinite(norm):
                    norms[unit] = norm * self.share
                    if on_unit is not None:
                        on_unit(unit, whole)
                else:
                    bad[unit] = 1
            if bad[unit]:  # nothing that is not a number goes into the sum over ranks
                sketches[:, unit], losses[:, unit] = 0, 0
        sketches, tokens, losses, norms, bad = self.all_sum(sketches, tokens, losses, norms, bad)
        bad_units = tuple(int(u) for u in np.flatnonzero(bad))
        return Probed(tuple(pieces), sketches, tokens, losses, norms, bad_units)

    # --- answers --------------------------------------------------------------------------------

    def answer(
        self,
        probed: Probed,
        gram: np.ndarray,
        advantage: np.ndarray,
        halves: tuple[np.ndarray, np.ndarray] | None,
    ) -> Influence:
        """Return the finding about a window without bad units."""
        return self._influence(probed, gram, advantage, halves, ())

    def refuse(self, probed: Probed, bad_units: Sequence[int] = ()) -> Influence:
        """Return the finding about a window with bad units: no advantage."""
        zeros = np.zeros((self.num_units, self.num_units))
        bad_units = tuple(sorted({*probed.bad_units, *bad_units}))
        return self._influence(probed, zeros, zeros.copy(), None, bad_units)

    def _influence(
        self,
        probed: Probed,
        gram: np.ndarray,
        advantage: np.ndarray,
        halves: tuple[np.ndarray, np.ndarray] | None,
        bad_units: tuple[int, ...],
    ) -> Influence:
        counts = np.array([self._num_sequences["gradients"], self._num_sequences["forwards"]])
        (counts,) = self.all_sum(counts * self.share / self.source.num_sequences)
        weights = np.maximum(probed.tokens, 1e-300)  # a bad unit may have none
        return Influence(
            advantage=advantage,
            halves=halves,
            gram=gram,
            losses=weighted_mean(probed.losses, weights),
            gradient_norms=probed.norms,
            num_gradients=float(counts[0]),
            num_forwards=float(counts[1]),
            seconds=self.seconds,
            bad_units=bad_units,
        )


def is_usable(loss: Loss) -> bool:
    """Whether a loss is a number, of at least one token."""
    return bool(np.isfinite(loss.mean)) and loss.num_tokens > 0


def add(total: Vector, vector: Iterable[torch.Tensor], factor: float, *, is_first: bool) -> None:
    """Add factor * vector to a total, in place; the first time the total's content is dropped."""
    for sum_, x in zip(total, vector, strict=True):
        if is_first:
            sum_.copy_(x).mul_(factor)
        else:
            sum_.add_(x, alpha=factor)


def scale(vector: Vector, factor: float) -> None:
    """Multiply a vector in place."""
    for tensor in vector:
        tensor.mul_(factor)
