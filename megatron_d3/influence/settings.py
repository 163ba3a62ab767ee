"""The settings of `order: {type: d3, ...}`: what is measured in a window, and how it is ordered.

    order: {type: d3, window: 60, estimator: projected, directions: 2, solver: ils}
    order: {type: d3, preset: paper}
    order: {type: d3, preset: paper, probes: 4, sketch: {dim: 1024}}    # what is given wins

Source of the defaults of `preset: paper`: "D^3: Dynamic Directional Graph-Constrained Data
Scheduling for LLM Training" (arXiv 2605.31164): windows of 60 batches, sketches of 3500 numbers, a
diagonal Hessian by Hutchinson's probes, random pair swaps from the order of the row sums (RSR). The
paper does not say how many probes and swaps; 1 and 10,000 are ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from megatron_d3.errors import ConfigError
from megatron_d3.fields import Range, from_mapping, parse, show

WHERE = "d3.order"
"""Where the entry stands in the configuration file."""

ESTIMATORS_VERSION = 1
"""Raised whenever the same settings give another S."""

MAX_EXACT_UNITS = 18
"""Longest window of `solver: exact`; its table of subsets has 2**L entries."""

COMMON_STEPS = ("look_ahead", "look_ahead_even", "exact")
"""Estimators whose halves share the units' steps, that of all probe sequences: how well the halves agree
says nothing of how another sample of sequences would step."""

PRESETS: dict[str, dict[str, Any]] = {
    "paper": {
        "window": 60,
        "estimator": "hutchinson_diagonal",
        "probes": 1,
        "sketch": {"type": "gaussian", "dim": 3500},
        "solver": "rsr",
        "swaps": 10_000,
        "objective": "online",
    }
}
"""What `preset` stands for; keys that are given beside it win."""

Count = Annotated[int, Range("[1, inf)")]


@dataclass(frozen=True)
class SketchConfig:
    """The entry `sketch`: how a gradient of d numbers becomes one of `dim`, by a random matrix R
    with E[R^T R] = I, so that inner products stay what they are on average."""

    type: Literal["auto", "rotation", "rotation_srht", "count", "gaussian", "none"] = "auto"
    """`rotation`: each block of `dim` numbers is rotated by a random offset, given random signs and
    added up, at the speed of reading the gradient. `rotation_srht`: the same to 65,536 numbers, then
    a random Hadamard transform to `dim`; safer for gradients with few large entries. `count`: a
    random place and sign for each number. `gaussian`: independent normal numbers, drawn again for
    each gradient: the textbook's projection, `dim` times the work. `none`: the gradient itself, for
    small models and tests. `auto`: `rotation`."""

    dim: Count = 3500
    """Numbers in a sketch. The relative error of an inner product is about 1 / sqrt(dim)."""

    seed: Annotated[int, Range("[0, inf)")] = 0
    """Seed of the random matrix."""


@dataclass(frozen=True)
class D3Config:
    """The entry `order` of type `d3`: windows of global batches, trained in the order that their
    influence on each other asks for. Building one raises ConfigError where settings contradict each
    other."""

    window: Count = 60
    """Units (global batches) that are probed and ordered together."""

    estimator: Literal[
        "projected", "hutchinson_diagonal", "gnb_diagonal", "fisher", "shared_hessian",
        "look_ahead", "look_ahead_even", "exact",
    ] = "projected"  # fmt: skip
    """How the influence of unit i on unit j is measured. `projected`: each unit's curvature along
    the window's main gradient directions. `hutchinson_diagonal`: the paper's, a random estimate of
    the Hessian's diagonal. `gnb_diagonal`: the diagonal of Gauss-Newton from sampled labels.
    `fisher`: mean squared gradients of single sequences. `shared_hessian`: one diagonal for the
    whole window (an ablation: it can only sort by one number a unit). `look_ahead`: take each
    unit's step and look at the others' losses. `look_ahead_even`: its part that is even in the step.
    `exact`: the whole second order, L more gradients a unit; for small models."""

    directions: Count | None = None
    """Directions of `projected`: each costs one more gradient of the curvature sequences. One may be
    systematically wrong where two are right. null: 2."""

    basis: Literal["principal", "mean"] = "principal"
    """Which directions `projected` takes: the `principal` ones of the window's gradients (one more
    pass over the curvature sequences) or their `mean` (a single direction, without that pass;
    poor where units differ much)."""

    probes: Count = 1
    """Random probes of `hutchinson_diagonal`, drawn labels of `gnb_diagonal`."""

    sketch: SketchConfig = SketchConfig()
    """How gradients are compressed; see below."""

    solver: Literal["row_sum", "greedy_insertion", "rsr", "insertion", "ils", "exact"] = "ils"
    """How the order is found. `row_sum`: sort by row sums. `greedy_insertion`: insert one unit
    after the other at its best place. `rsr`: the paper's, random pair swaps from the row sums'
    order. `insertion`: move units until no move helps. `ils`: `insertion`, disturbed and repaired
    `solver_rounds` times. `exact`: the best order, for up to 18 units."""

    swaps: Annotated[int, Range("[0, inf)")] = 10_000
    """Random pair swaps that `rsr` tries."""

    solver_rounds: Annotated[int, Range("[0, inf)")] = 200
    """Disturbances that `ils` tries."""

    objective: Literal["online", "reverse", "random", "group", "spread"] = "online"
    """What the order is to achieve. `online`: the paper's, each unit at the lowest loss when its
    turn comes. `reverse`: that order backwards. `random`: none; nothing is measured. `group`: units
    with similar gradients follow each other. `spread`: they stay far apart."""

    probe_sequences: Count = 8
    """Sequences of each unit that stand for it when it is probed: a random sample in which each of
    its domains has its share. The reliability of S compares two halves of them that hold the same
    domains as nearly as possible, so that it needs 2 or more."""

    curvature_sequences: Count | None = None
    """Of the probe sequences, how many are used for curvature: a systematic sample of each half; null:
    a quarter of them for `projected`, all for the others."""

    every: Count = 1
    """Order each n-th window, from the first on; the others keep the stored order."""

    overlap: bool = False
    """Train only the first half of a window, and measure its second half again together with the
    units that follow."""

    gamma: Literal["lr"] | Annotated[float, Range("(0, inf)")] = "lr"
    """The learning rate that influence is measured for, of all parameters; `lr`: that of the moment,
    the largest where parameters differ (`--decoupled-lr`)."""

    step: Literal["sgd", "optimizer"] = "sgd"
    """The step whose influence is measured: `sgd`, gamma times the gradient; `optimizer`, that of
    Adam, preconditioned and clipped."""

    min_agreement: Annotated[float, Range("[0, 1]")] | None = None
    """Keep the stored order of a window where the expected agreement of S with that of all sequences
    of its units, a correlation that follows from the reliability and from how many are probed (for
    curvature, where `curvature_sequences` is less), is below this; null: never. Not with
    `look_ahead`, `look_ahead_even` and `exact`."""

    difference: Annotated[float, Range("(0, 1)")] | None = None
    """Size of the finite differences of gradients, as a share of the norm of the weights; null: as
    the precision of the weights asks for."""

    preset: Literal["paper"] | None = None
    """`paper`: the published method's settings for every key that is not given."""

    def __post_init__(self) -> None:
        """Refuse contradictions, naming the place."""
        if self.basis == "mean" and (self.directions or 1) > 1:
            _refuse("basis", f"mean with {self.directions} directions",
                    "principal (the mean is a single direction)")
        if (self.directions or 1) > self.window:
            _refuse("directions", self.directions, f"at most window = {self.window}")
        if (self.curvature_sequences or 1) > self.probe_sequences:
            _refuse("curvature_sequences", self.curvature_sequences,
                    f"at most probe_sequences = {self.probe_sequences}")
        if self.min_agreement is not None:
            self._require_agreement()
        if self.solver == "exact" and self.window > MAX_EXACT_UNITS:
            _refuse("solver", f"exact with window = {self.window}",
                    f"window of at most {MAX_EXACT_UNITS}, or another solver")
        if self.overlap and self.window < 2:
            _refuse("overlap", "true with window = 1", "window of 2 or more")
        if self.overlap and self.every > 1:
            _refuse("overlap", f"true with every = {self.every}",
                    "every = 1 (a window that is skipped has no half to measure again)")

    def _require_agreement(self) -> None:
        """Refuse what no agreement can be expected of."""
        def refuse(got: str, expected: str) -> None:
            _refuse("min_agreement", f"{self.min_agreement} with {got}", expected)

        if self.objective == "random":
            refuse("objective = random", "null (nothing is measured for a random order)")
        if self.estimator in COMMON_STEPS:
            refuse(f"estimator = {self.estimator}",
                   f"null, or an estimator other than {', '.join(COMMON_STEPS)} (their halves share "
                   "the units' steps, so that no agreement follows from them)")
        if self.probe_sequences < 2:
            refuse("1 probe sequence", "null, or probe_sequences of 2 or more to be split in halves")
        if self.curvature_sequences == 1:
            refuse("curvature_sequences = 1",
                   "null, or curvature_sequences of 2 or more, one for each half")

    @property
    def num_directions(self) -> int:
        """Directions that `projected` takes at most."""
        return 1 if self.basis == "mean" else min(self.directions or 2, self.window)

    @property
    def num_curved(self) -> int:
        """Probe sequences of a unit that are used for curvature; by default one of each half or more."""
        count = self.probe_sequences
        if self.curvature_sequences is None and self.estimator == "projected":
            return max(min(count, 2), -(-count // 4))
        return self.curvature_sequences or count


def _refuse(key: str, got: object, expected: str) -> None:
    raise ConfigError(f"{WHERE}.{key}: got {got}, expected {expected}")


def parse_d3(entry: Any) -> D3Config:
    """Return the settings of the entry `order`, its `type` left out.

    Args:
        entry: a mapping of keys of :class:`D3Config` to plain values. Keys that are missing come
            from `preset` if it is given, else they have their defaults; the keys of `sketch` too.
            With every key given, as :func:`megatron_d3.fields.to_plain` writes them, `preset` is
            only a label.

    Raises:
        ConfigError: an unknown key, a value that does not fit, or settings that contradict each
            other; starts with `d3.order`.

    >>> config = parse_d3({"preset": "paper", "probes": 4, "sketch": {"dim": 100}})
    >>> config.solver, config.probes, config.sketch.type, config.sketch.dim
    ('rsr', 4, 'gaussian', 100)
    """
    folder = Path()  # no setting is a path
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{WHERE}: got {show(entry)}, expected a mapping of settings")
    preset = parse(Literal["paper"] | None, entry.get("preset"), f"{WHERE}.preset", folder=folder)
    given = {**PRESETS[preset], **entry} if preset else dict(entry)
    if preset and isinstance(entry.get("sketch"), Mapping):
        given["sketch"] = {**PRESETS[preset]["sketch"], **entry["sketch"]}
    return from_mapping(D3Config, given, WHERE, folder=folder)
