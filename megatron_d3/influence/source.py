"""What an estimator may ask of a model, and what it answers.

An estimator of `influence/estimators/` sees the model only through :class:`GradientSource`: losses
and gradients of a unit's probe sequences at the present weights or at displaced ones, and sums
over ranks. `mcore/probe.py` implements it on Megatron; the tests implement it on plain torch.

Words. A *vector* is a sequence of tensors, one contiguous tensor per local parameter in layout
order. A *model-parallel group* is the set of ranks that together hold one copy of the weights
(tensor and pipeline parallel, and the ranks that share one copy of the experts); a *data-parallel
group* is the copy's place among its equals. Each group measures its own units, or its own sequences
of them, so no gradient of a unit ever crosses groups: only sketches, numbers and (once a window)
directions do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch

    from megatron_d3.influence.layout import Layout

    Vector = Sequence[torch.Tensor]
    Direction = Vector | Callable[[], Iterable[torch.Tensor]]

# What is the matter with a bad unit, to be followed by "in unit ...".
UNUSABLE = "loss or gradient is not finite, or no token counts,"


class Loss(NamedTuple):
    """The loss of some sequences, the same on all ranks of the model-parallel group.

    Attributes:
        mean: mean over the tokens that count, nats per token.
        num_tokens: how many count.
    """

    mean: float
    num_tokens: int


class GradientSource(Protocol):
    """A model whose losses, gradients and gradient differences can be measured.

    Every method is called by all ranks of a model-parallel group together, with the same arguments;
    `sum_over_groups` and `all_sum` by all ranks. Nothing here changes what training sees.
    """

    @property
    def layout(self) -> Layout:
        """Where each local element lies in the unsharded parameters."""

    @property
    def num_units(self) -> int:
        """L, the units of the window."""

    @property
    def group(self) -> int:
        """Number of this data-parallel group, in [0, num_groups)."""

    @property
    def num_groups(self) -> int:
        """D, data-parallel groups; there may be more than units."""

    @property
    def num_sequences(self) -> int:
        """Probe sequences of each unit, n >= 1."""

    @property
    def precision(self) -> float:
        """The relative precision of gradients: that of the weights as the forward pass takes them.

        The machine epsilon of their dtype, or of the matrix products' if that is coarser: 1.2e-7
        for float32, 9.8e-4 for TF32, 7.8e-3 for bfloat16. It sets the size of finite differences.
        """

    @property
    def gradients(self) -> Vector:
        """The last gradient, complete within the model-parallel group.

        Valid until the next call of `gradient` or `loss`; replicas hold the full value too.
        """

    def gradient(self, unit: int, start: int, stop: int, *, sample_key: int | None = None) -> Loss:
        """Put the gradient of the mean token loss of probe sequences [start, stop) in `gradients`.

        At the weights as they are now. `unit` may be any unit of the window.

        Args:
            unit: in [0, L).
            start: first probe sequence.
            stop: one past the last, start < stop <= n.
            sample_key: if given, the labels are drawn from the model's own prediction instead; the
                same key, unit and token give the same label under every layout.
        """

    def loss(self, unit: int, start: int, stop: int) -> Loss:
        """Return the loss of probe sequences [start, stop) of any unit, forward only."""

    def new_vector(self) -> list[torch.Tensor]:
        """Return zeros in the shapes and dtypes of `gradients`."""

    def dot(self, x: Vector, y: Vector) -> float:
        """Return the inner product over counted elements, summed over the model-parallel group.

        Accumulated in float64; the same on all ranks of the group.
        """

    def sum_over_groups(self, vector: Vector) -> None:
        """Add up a vector over the data-parallel groups, in place."""

    def all_sum(self, array: np.ndarray) -> np.ndarray:
        """Return the sum of a float64 array over all ranks.

        It adds the shards of a model-parallel group and collects groups; a rank leaves 0 where
        another group measured.
        """

    def group_sum(self, array: np.ndarray) -> np.ndarray:
        """Return the sum of a float64 array over the model-parallel group."""

    def from_rank_0(self, array: np.ndarray) -> np.ndarray:
        """Return the float64 array that rank 0 has, on all ranks: what two machines' linear algebra may
        answer differently."""

    def weights_norm(self) -> float:
        """Return the Euclidean norm of all weights, replicas counted once."""

    def displaced(self, direction: Direction, size: float) -> AbstractContextManager[Vector]:
        """Put the weights at weights + size * direction within a `with` block.

        Yields the displacement that the weights' precision allowed, divided by `size`; it may be
        computed when read, so it is read within the block only. Afterwards the weights hold exactly
        the bits they had, also after an error.

        Args:
            direction: a vector, read on entry only, so `gradients` may be given; or a function that
                returns its tensors one by one in layout order.
            size: any sign.
        """

    def moved_along(self, direction: Vector, size: float) -> AbstractContextManager[float]:
        """Put the weights at weights + size * direction within a `with` block, without a copy of them.

        The direction's tensors hold the weights meanwhile, and nothing of use afterwards. The weights
        then hold exactly the bits they had, also after an error.

        Yields the inner product of the displacement that the weights' precision allowed with the
        direction; the same on all ranks of the group.

        Args:
            direction: no weight is of higher precision than its tensor.
            size: any sign.
        """

    def rademacher(self, probe: int) -> Iterable[torch.Tensor]:
        """Yield tensors of +1 and -1 in layout order, the same signs under every layout.

        A sign depends on the parameter's name, the element's global index and `probe`, and follows
        the layout: replicas have equal signs.
        """

    def tensor_scales(self) -> Sequence[float]:
        """Return the root mean square of each unsharded parameter, in layout order.

        Positive; a tensor of zeros gets the root mean square of all weights.
        """

    def step_root(self) -> Vector | None:
        """Return P^(1/2) of the optimizer's preconditioner, positive; None for plain gradients.

        Adam: (sqrt(v_hat) + eps)^(-1/2), with the v_hat that a step leaves whose squared gradient is
        each parameter's mean of v_hat.
        """


@dataclass(frozen=True)
class StepModel:
    """The training step that a unit is assumed to take: theta - gamma * c_i * P g_i.

    Attributes:
        gamma: step size, the learning rate where the run file says `gamma: lr`.
        clip: largest gradient norm; c_i = min(1, clip / |g_i|). None: c_i = 1.
        uses_root: P comes from `GradientSource.step_root`; False: P = 1.
    """

    gamma: float
    clip: float | None = None
    uses_root: bool = False


@dataclass(frozen=True)
class Influence:
    """What an estimator found about a window of L units; arrays are equal on all ranks.

    Attributes:
        advantage: S, (L, L) float64, antisymmetric, in nats per token. S_ij > 0: i before j.
            All zeros where `bad_units` is not empty.
        halves: S from two disjoint halves of the measurements, or None where there is only one
            probe sequence or a unit is bad. Each estimator says what it splits.
        gram: inner products of the units' gradients, (L, L) float64 symmetric, from sketches; of
            P^(1/2) g where the step uses the optimizer's root.
        losses: mean token loss of each unit's probe sequences, (L,) float64; 0 for a bad unit.
        gradient_norms: norm of each unit's plain gradient, (L,) float64; from its sketch where groups
            share units (`projected`); 0 for a bad unit.
        num_gradients: forward and backward passes, in probe sets of one unit, over the whole
            window and all groups; a pass over a quarter of a unit's probe sequences counts 1/4.
        num_forwards: forward passes without backward, in the same measure.
        seconds: this rank's time in "gradients" (forward passes included), "sketch", "reduce".
        bad_units: units whose loss or gradient was not finite, or none of whose tokens counted in a
            half, ascending.
    """

    advantage: np.ndarray
    halves: tuple[np.ndarray, np.ndarray] | None
    gram: np.ndarray
    losses: np.ndarray
    gradient_norms: np.ndarray
    num_gradients: float
    num_forwards: float
    seconds: Mapping[str, float]
    bad_units: tuple[int, ...] = ()
