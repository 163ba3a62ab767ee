"""Names that users type into objects: mixers, built-in and from plug-ins.

A plug-in is any importable module with a dict `MIXERS` of its own (`--d3-plugin my.module`).
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_d3.config import MIX_KEYS, MixConfig
from megatron_d3.errors import ConfigError
from megatron_d3.mix import MIXERS, EpochCap, rehearse
from megatron_d3.types import DomainInfo

MIXER_MEMBERS = ("VERSION", "Config", "is_online", "init", "update", "weights")
"""What a mixer must have; see `megatron_d3.mix`."""


def load_plugins(modules: Sequence[str]) -> dict[str, type]:
    """Import plug-in modules and return the built-in mixers together with theirs.

    Raises:
        ConfigError: a module that cannot be imported, whose `MIXERS` is no dict of mixers, or that
            gives a name away twice.
    """
    mixers = dict(MIXERS)
    for name in modules:
        where = f"--d3-plugin {name}"
        try:
            module = importlib.import_module(name)
        except Exception as error:
            kind = type(error).__name__
            raise ConfigError(f"{where}: cannot be imported: {kind}: {error}") from error
        own = getattr(module, "MIXERS", {})
        if not isinstance(own, dict):
            raise ConfigError(f"{where}: MIXERS is {own!r}, expected a dict of names to mixers")
        for mixer_name, mixer in own.items():
            if mixer_name in mixers:
                raise ConfigError(
                    f"{where}: there is a mixer {mixer_name} already, choose another name"
                )
            _check_mixer(mixer, f"{where}: mixer {mixer_name}")
            mixers[mixer_name] = mixer
    return mixers


def build_mix(
    config: MixConfig,
    domains: Sequence[DomainInfo],
    *,
    total_samples: int,
    mixers: Mapping[str, type] = MIXERS,
    step_at: Callable[[int], int] | None = None,
) -> tuple[Any, EpochCap | None, str | None]:
    """Build the mixer and the cap of a run.

    Args:
        config: the entry `mix`.
        domains: the K domains.
        total_samples: positions of the whole run.
        mixers: those that `config` was read with.
        step_at: the 0-based training step that consumes a position; with it the caps are rehearsed
            over the run before it starts (:func:`megatron_d3.mix.rehearse`).

    Returns:
        The mixer, its cap (None without `max_epochs`), and a sentence worth logging once, or None.

    Raises:
        ConfigError: settings that do not fit the domains, or a run too long for its caps.
    """
    mixer = mixers[config.type](config.params, domains, total_samples=total_samples)
    if config.max_epochs is None:
        return mixer, None, None
    cap = EpochCap(config.max_epochs, config.exhausted, domains)
    note = cap.check(total_samples)
    if step_at is not None:
        rehearse(mixer, cap, total_samples=total_samples, step_at=step_at)
    return mixer, cap, note


def _check_mixer(mixer: Any, where: str) -> None:
    """Raise ConfigError unless the object looks like a mixer class."""
    missing = [member for member in MIXER_MEMBERS if not hasattr(mixer, member)]
    if missing:
        raise ConfigError(f"{where}: lacks {', '.join(missing)}")
    if not dataclasses.is_dataclass(mixer.Config):
        raise ConfigError(f"{where}: its Config is no dataclass")
    names = {field.name for field in dataclasses.fields(mixer.Config)}
    taken = names & (set(MIX_KEYS) - {"max_epochs"})
    if taken:
        raise ConfigError(
            f"{where}: its Config has {', '.join(sorted(taken))}, a key of every mixer"
        )
