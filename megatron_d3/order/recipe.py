"""A recipe: an order by name with its parameters, checked, and the permutation it gives.

The names are those of a command line or a file. Defaults are the settings the source documents
for pretraining (arXiv 2605.30334); `--ascending` has no default, because whether a high score
means easy or hard is a property of the data.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_d3.errors import ConfigError
from megatron_d3.order import layers, noise, sections, tails
from megatron_d3.order.ranking import rank, stream

# method -> its parameters with their defaults
METHODS: dict[str, dict[str, Any]] = {
    "sort": {"temperature": 0.0},
    "fold": {"layers": 3},
    "zigzag": {"layers": 3},
    "segment": {
        "first_percent": 10.0,
        "last_percent": 10.0,
        "first_tail": "low",
        "last_tail": "high",
    },
    "str": {"sections": 3, "ratio": 0.1, "layers": 2},
    "saw": {"sections": 3, "ratio": 0.1, "layers": 3},
    "shuffle": {},
}

# What a change of output for the same input bumps; written into every provenance file.
VERSIONS: dict[str, int] = {
    "sort": 1,
    "fold": layers.VERSION,
    "zigzag": layers.VERSION,
    "segment": tails.VERSION,
    "str": sections.VERSION,
    "saw": sections.VERSION,
    "shuffle": 1,
    "jitter": noise.VERSION,
}

# Methods for which the direction of the scores means nothing: tails are named by score.
_UNDIRECTED = ("shuffle", "segment")


@dataclass(frozen=True)
class Recipe:
    """An order and its parameters.

    Attributes:
        method: a key of `METHODS`.
        ascending: lowest score first; None only where the direction means nothing (`shuffle`,
            `segment`).
        parameters: values for the method's own parameters; what is left out has its default.
        jitter: window of the last step, int: documents, float: share of all documents; 0: off.
        seed: of every random step, 0 or more.

    Raises:
        ConfigError: an unknown method or parameter (with the nearest name), a missing or
            meaningless direction, a negative seed.
    """

    method: str
    ascending: bool | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    jitter: int | float = 0
    seed: int = 42

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"order.method: got {self.method!r}{_nearest(self.method, METHODS)}")
        defaults = METHODS[self.method]
        for name in self.parameters:
            if name not in defaults:
                raise ConfigError(
                    f"order.{name}: not a parameter of {self.method}, which takes "
                    f"{', '.join(defaults) or 'none'}"
                )
        if self.method in _UNDIRECTED:
            if self.ascending is False:
                raise ConfigError(f"order.ascending: {self.method} has no direction; leave it out")
        elif self.ascending is None:
            raise ConfigError(
                f"order.ascending: {self.method} needs --ascending (lowest score first) or "
                "--descending: whether high scores are easy or hard only the data's owner knows"
            )
        if self.seed < 0:
            raise ConfigError(f"order.seed: got {self.seed}, expected 0 or more")
        noise.window_size(self.jitter, 0)
        object.__setattr__(self, "parameters", {**defaults, **self.parameters})

    @property
    def needs_scores(self) -> bool:
        """Whether the result depends on scores at all."""
        return self.method != "shuffle"

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as JSON values, with the versions of the algorithms it uses."""
        return {
            "method": self.method,
            "version": VERSIONS[self.method],
            "ascending": self.ascending,
            "parameters": dict(self.parameters),
            "jitter": self.jitter,
            "jitter_version": VERSIONS["jitter"],
            "seed": self.seed,
        }


# What the source documents, under names to remember. Score direction is left to the user.
PRESETS: dict[str, dict[str, Any]] = {
    "saw-pretrain": {"method": "saw", "parameters": {"sections": 3, "ratio": 0.1, "layers": 3}},
    # the ratio that fits the source's own figure; neighbouring regions touch and are clamped
    "saw-wide": {"method": "saw", "parameters": {"sections": 3, "ratio": 0.2, "layers": 3}},
    "str-pretrain": {"method": "str", "parameters": {"sections": 3, "ratio": 0.1, "layers": 2}},
    "fold-pretrain": {"method": "fold", "parameters": {"layers": 3}},
    "segment-pretrain": {
        "method": "segment",
        "parameters": {"first_percent": 10.0, "last_percent": 10.0},
    },
    # the source's window of 100,000 on about 1,000,000 documents
    "sort-jitter": {"method": "sort", "parameters": {}, "jitter": 0.1},
    "zigzag-jitter": {"method": "zigzag", "parameters": {"layers": 3}, "jitter": 0.1},
}


def preset(name: str) -> dict[str, Any]:
    """Return a copy of a preset's fields; `ConfigError` with the nearest name if unknown."""
    if name not in PRESETS:
        raise ConfigError(f"order.preset: got {name!r}{_nearest(name, PRESETS)}")
    fields = dict(PRESETS[name])
    fields["parameters"] = dict(fields["parameters"])
    return fields


def permutation(
    scores: np.ndarray | None,
    recipe: Recipe,
    *,
    num_items: int,
    ranking: Callable[..., np.ndarray] = rank,
) -> np.ndarray:
    """Return the documents in the order of the recipe.

    Args:
        scores: (N,) float64; None for a method that needs none.
        recipe: what to do.
        num_items: N, checked against the scores.
        ranking: sorts the scores; another one than `rank` may only be faster.

    Returns:
        (N,) int64; entry p is the document at place p. Every document occurs once.

    Raises:
        ConfigError: a parameter out of its range, or scores missing.
        CorpusError: a NaN score.

    Peak memory beside the scores: 28 bytes a document for `sort` with a temperature, otherwise at
    most 24. Source: the spec of each method; jitter is the last step of any.

    >>> recipe = Recipe("zigzag", ascending=True, parameters={"layers": 3})
    >>> permutation(np.array([0.5, 1, .25, 1, .25, .5, .75, .5, .5, 0]), recipe, num_items=10)
    array([9, 0, 8, 3, 6, 5, 2, 4, 7, 1])
    """
    if recipe.method == "shuffle":
        ordered = stream(recipe.seed, "shuffle").permutation(num_items).astype(np.int64, copy=False)
    else:
        if scores is None:
            raise ConfigError(f"order.scores: {recipe.method} needs a score a document")
        if len(scores) != num_items:
            raise ConfigError(f"order.scores: got {len(scores)}, expected {num_items}")
        ordered = _apply(recipe, ranking(scores, ascending=recipe.ascending is not False))
    ordered = np.ascontiguousarray(ordered)
    window = noise.window_size(recipe.jitter, num_items)
    noise.jitter(ordered, window=window, rng=stream(recipe.seed, "jitter"))
    return ordered


def _apply(recipe: Recipe, ranked: np.ndarray) -> np.ndarray:
    """Rearrange (N,) ranked documents as the method says."""
    values = recipe.parameters
    if recipe.method == "sort":
        if values["temperature"] == 0:
            return ranked
        return noise.gumbel_ranks(ranked, **values, rng=stream(recipe.seed, "gumbel"))
    if recipe.method == "fold":
        return layers.fold(ranked, **values)
    if recipe.method == "zigzag":
        return layers.zigzag(ranked, **values)
    if recipe.method == "segment":
        return tails.segment(ranked, **values, rng=stream(recipe.seed, "segment"))
    if recipe.method == "str":
        return sections.str_order(ranked, **values)
    return sections.saw_order(ranked, **values)


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    listed = f", expected one of {', '.join(known)}"
    return f", did you mean {close[0]!r}?" if close else listed
