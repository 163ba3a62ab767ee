"""The file of `megatron-d3 doremi`: what the three steps are trained from.

    folder: runs/doremi              # everything is made here
    config: run.yaml                 # the domains; its mix is the reference's mixture
    flags: [model.args]              # Megatron's flags of all steps
    tokenizer_model: corpus/tokenizer.model
    proxy: {eta: 1.0, c: 1e-3}
    final: {flags: [large.args]}

Paths are relative to the file.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from megatron_d3.config import RunConfig, load_config
from megatron_d3.errors import ConfigError
from megatron_d3.fields import Range, from_mapping
from megatron_d3.mix.doremi import STOP_TOLERANCE
from megatron_d3.yaml12 import read_yaml

# Mixers whose weights are one set of numbers for the whole run: what alpha_ref can be.
_CONSTANT = ("static", "natural", "temperature", "unimax")


@dataclass(frozen=True)
class Step:
    """One of the three runs."""

    flags: tuple[Path, ...] = ()
    """Files of Megatron flags for this step, after those of all steps (a later flag wins)."""


@dataclass(frozen=True)
class ProxyStep:
    """The run that finds the weights."""

    flags: tuple[Path, ...] = ()
    """Files of Megatron flags for this step, after those of all steps (a later flag wins)."""

    eta: Annotated[float, Range("(0, inf)")] = 1.0
    """See `mix: {type: doremi}`; so are the next three."""

    c: Annotated[float, Range("[0, 1]")] = 1e-3
    variant: Literal["paper", "official"] = "paper"
    initial_score: Annotated[float, Range("[0, inf)")] = 0.0

    stored_losses: bool = False
    """Store the reference's token losses once and read them back, in place of a reference model
    beside the proxy."""


@dataclass(frozen=True)
class DoremiFile:
    """The whole file."""

    folder: Path
    """Where runs, logs and weights go; made if missing."""

    config: Path
    """A `--d3-config` file. Its domains are those of all steps; its mix, one that does not change
    during a run, is the mixture of the first reference."""

    flags: tuple[Path, ...]
    """Files of Megatron flags, for all steps."""

    tokenizer_model: Path | None = None
    """A SentencePiece model; stands for `--tokenizer-type` and `--tokenizer-model`."""

    num_processes: Annotated[int, Range("[1, inf)")] = 1
    """Processes of each run on this machine."""

    reference: Step = Step()
    """The reference model."""

    proxy: ProxyStep = ProxyStep()
    """The proxy model."""

    final: Step | None = None
    """The model trained on the weights that were found; null: the weights are enough."""

    tolerance: Annotated[float, Range("(0, 1)")] = STOP_TOLERANCE
    """With `--iterate`: end when no weight differs by as much from the reference's."""

    max_rounds: Annotated[int, Range("[1, inf)")] = 5
    """With `--iterate`: end after so many references and proxies."""


def read_doremi_file(path: Path) -> tuple[DoremiFile, RunConfig]:
    """Read the file and the run configuration that it names.

    Raises:
        ConfigError: anything that cannot be used as it stands; names the place.
    """
    content: Any = read_yaml(path)
    file = from_mapping(DoremiFile, content, "doremi", folder=path.absolute().parent)
    config = load_config(file.config)
    if config.mix.type not in _CONSTANT:
        raise ConfigError(
            f"doremi.config: the mix of {file.config} is {config.mix.type}, whose weights change; "
            f"the reference's mixture must be one of {', '.join(_CONSTANT)}")
    of_final = file.final.flags if file.final else ()
    for flags in (*file.flags, *file.reference.flags, *file.proxy.flags, *of_final):
        if not flags.is_file():
            raise ConfigError(f"doremi.flags: no file {flags}")
    folder = Path(os.path.normpath(file.folder))  # for the eye: it is printed
    return dataclasses.replace(file, folder=folder), config
