"""The file of `--d3-config`: strict YAML into frozen dataclasses.

    domains:                              # the order here is the domain order
      web:  {paths: [corpus/web], order: shuffle}
      code: {paths: [corpus/code_a, corpus/code_b], valid_paths: [corpus/code_valid]}
      wiki: corpus/wiki                   # short for {paths: [corpus/wiki]}
    mix: {type: static, weights: {web: 0.7, code: 0.2, wiki: 0.1}, max_epochs: 4}
    order: {type: d3, window: 60}         # leave it out for the order in which samples are decided

Paths are relative to the file. Every error names the place (`d3.mix.alpha: got 1.5, expected a
number in [0, 1)`), an unknown key the nearest known one. There are no defaults but those written
here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from megatron_d3.errors import ConfigError
from megatron_d3.fields import Range, did_you_mean, from_mapping, parse, show, to_plain
from megatron_d3.influence.settings import D3Config, parse_d3
from megatron_d3.mix import MIXERS, Static
from megatron_d3.mix.weights import require_domains
from megatron_d3.yaml12 import override, read_yaml

MAX_DOMAINS = 32767
"""The plan numbers domains by int16."""

Epochs = Annotated[float, Range("(0, inf]")]


@dataclass(frozen=True)
class DomainConfig:
    """One entry of `domains`: a data source. One path or a list of paths stands for `paths`."""

    paths: tuple[Path, ...]
    """Megatron `.bin`/`.idx` prefixes (without the suffix), read one after the other."""

    valid_paths: tuple[Path, ...] = ()
    """Prefixes of held-out documents. Without any, the last documents of each of `paths` are held
    out, see `valid_fraction`."""

    order: Literal["shuffle", "stored"] = "shuffle"
    """`shuffle`: another permutation of the samples each epoch, from `seed`. `stored`: as in the
    file, every epoch, to keep an order made offline."""


@dataclass(frozen=True)
class MixConfig:
    """The entry `mix`: how many samples of each domain. Its other keys belong to the mixer."""

    type: str = "static"
    """The mixer, by name."""

    max_epochs: Epochs | dict[str, Epochs] | None = None
    """No domain is repeated more often than this over the whole run, whatever the mixer: one
    number, or a number by domain (domains left out have no limit); null: no limit."""

    exhausted: Literal["redistribute", "repeat", "stop"] = "redistribute"
    """What a domain at its limit does. `redistribute`: its samples are spread over the rest of the
    run and the others take its place; a run too long for that is refused at its start. `repeat`: it
    goes on beyond the limit. `stop`: the run's data ends where a limit would be exceeded."""

    params: Any = dataclasses.field(default_factory=Static.Config)
    """The mixer's own settings, an instance of its `Config`: its fields are keys of `mix`."""

    def to_dict(self) -> dict[str, Any]:
        """Return the entry as it would be written in the file, JSON-able."""
        common = {name: to_plain(getattr(self, name)) for name in MIX_KEYS}
        own: dict[str, Any] = to_plain(self.params)
        return common | own


MIX_KEYS = ("type", "max_epochs", "exhausted")


@dataclass(frozen=True)
class OrderConfig:
    """The entry `order`: in which order the global batches of a window are trained. Its other keys
    belong to its type."""

    type: Literal["d3"]
    """`d3`: by their measured influence on each other."""

    params: D3Config
    """The type's own settings: its fields are keys of `order`."""

    def to_dict(self) -> dict[str, Any]:
        """Return the entry as it would be written in the file, JSON-able."""
        own: dict[str, Any] = to_plain(self.params)
        return {"type": self.type} | own


@dataclass(frozen=True)
class RunConfig:
    """The whole file."""

    domains: dict[str, DomainConfig]
    """The data sources by name. Their order is the order in which ties are broken and tables are
    printed."""

    seed: int | None = None
    """Seed of the shuffles and of `sampling: multinomial`; null: Megatron's `--seed`."""

    valid_fraction: Annotated[float, Range("[0, 1)")] = 0.01
    """Share of each domain's tokens that is held out for validation and never trained on."""

    mix: MixConfig = MixConfig()
    """How many samples of each domain; see the mixers below."""

    round_steps: Annotated[int, Range("[1, inf)")] = 1
    """Global batches that one decision fills. The weights change between rounds only."""

    read_ahead_steps: Annotated[int, Range("[0, inf)")] | None = None
    """Global batches decided beyond the next one, for mixers that learn from losses and for `order`:
    what was measured up to step t acts from step t + 1 + this on. Null: as many as the DataLoader
    needs when the plan starts (2 x workers x micro-batch x data-parallel size, in global batches),
    and kept from then on. Set it higher to resume with more workers or ranks later. Other runs do
    not depend on it."""

    sampling: Literal["apportion", "multinomial"] = "apportion"
    """How weights become samples. `apportion`: counts follow the cumulative weights to about one
    sample. `multinomial`: each position is drawn independently."""

    order: OrderConfig | None = None
    """In which order the global batches of a window are trained; null: as they are decided."""

    def to_dict(self) -> dict[str, Any]:
        """Return the resolved configuration as it could be written in a file, JSON-able.

        Every key is there, in the order of the fields; paths are absolute. Only `order` is left out
        where it is null: a plan says nothing of it then.
        """
        plain: dict[str, Any] = to_plain(self) | {"mix": self.mix.to_dict()}
        del plain["order"]
        return plain if self.order is None else plain | {"order": self.order.to_dict()}


def load_config(
    path: str | Path, overrides: Sequence[str] = (), *, mixers: Mapping[str, type] = MIXERS
) -> RunConfig:
    """Read a configuration file.

    Args:
        path: of the YAML file.
        overrides: `a.b=c` settings that replace values of the file, see `--d3-set`.
        mixers: by the name that `mix.type` may have; :func:`megatron_d3.registry.load_plugins` adds
            to the built-in ones.

    Raises:
        ConfigError: anything that cannot be used as it stands.
    """
    path = Path(path)
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: got {show(content)}, expected a mapping with the key domains")
    return parse_config(override(content, overrides), folder=path.absolute().parent, mixers=mixers)


def parse_config(
    content: Mapping[str, Any], *, folder: Path, mixers: Mapping[str, type] = MIXERS
) -> RunConfig:
    """Return the configuration of a nested mapping; relative paths are relative to `folder`.

    `parse_config(config.to_dict(), folder=...)` gives the configuration back.

    Raises:
        ConfigError: anything that cannot be used as it stands.
    """
    # Three entries have a form of their own; the rest is the generic loader's.
    special = ("domains", "mix", "order")
    rest = {key: value for key, value in content.items() if key not in special}
    known = [field.name for field in dataclasses.fields(RunConfig)]
    for key in rest:
        if key not in known:
            raise ConfigError(f"d3.{key}: unknown key{did_you_mean(key, known)}")
    domains = _parse_domains(content.get("domains"), folder)
    mix = _parse_mix(content.get("mix"), folder, mixers, list(domains))
    order = _parse_order(content.get("order"))
    config = from_mapping(RunConfig, rest | {"domains": {}}, "d3", folder=folder)
    if order is not None and config.round_steps != 1:
        raise ConfigError(
            f"d3.round_steps: got {config.round_steps}, expected 1 with d3.order: each global batch "
            "is a unit that the mixer decides; leave round_steps out")
    return dataclasses.replace(config, domains=domains, mix=mix, order=order)


def _parse_domains(entries: Any, folder: Path) -> dict[str, DomainConfig]:
    where = "d3.domains"
    if not isinstance(entries, Mapping) or not entries:
        raise ConfigError(f"{where}: got {show(entries)}, expected a mapping of names to paths")
    if len(entries) > MAX_DOMAINS:
        raise ConfigError(f"{where}: got {len(entries)} domains, expected at most {MAX_DOMAINS}")
    domains = {}
    for name, entry in entries.items():
        if not re.fullmatch(r"\w[\w.+-]*", str(name)):
            raise ConfigError(
                f"{where}: got the name {name!r}, expected letters, digits and _ . + - only"
            )
        short = isinstance(entry, str | list)
        domains[name] = from_mapping(
            DomainConfig, {"paths": entry} if short else entry, f"{where}.{name}", folder=folder
        )
        if not domains[name].paths:
            raise ConfigError(
                f"{where}.{name}.paths: got an empty list, expected at least one path"
            )
    return domains


def _parse_mix(
    entry: Any, folder: Path, mixers: Mapping[str, type], domains: Sequence[str]
) -> MixConfig:
    where = "d3.mix"
    entry = {} if entry is None else entry
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where}: got {show(entry)}, expected a mapping of settings")
    common = {key: entry[key] for key in MIX_KEYS if key in entry}
    mix = from_mapping(MixConfig, common, where, folder=folder)
    if mix.type not in mixers:
        raise ConfigError(f"{where}.type: no mixer {mix.type}{did_you_mean(mix.type, mixers)}")
    params_class = mixers[mix.type].Config  # type: ignore[attr-defined]
    own = [field.name for field in dataclasses.fields(params_class)]
    settings = {key: value for key, value in entry.items() if key in own or key not in MIX_KEYS}
    for key in settings:
        if key not in own:
            raise ConfigError(f"{where}.{key}: {_why_unknown(key, mix.type, own, mixers)}")
    params = from_mapping(params_class, settings, where, folder=folder)
    if hasattr(params, "resolved"):
        written, params = params, params.resolved()
        for key in {"weights", "losses"} & set(own):
            path, named = getattr(written, key), getattr(params, key)
            if isinstance(path, Path) and isinstance(named, Mapping):  # only here the file is known
                require_domains(named, domains, f"{where}.{key}: {path}", what="number")
    return dataclasses.replace(mix, params=params)


def _parse_order(entry: Any) -> OrderConfig | None:
    where = "d3.order"
    if entry is None:
        return None
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where}: got {show(entry)}, expected a mapping of settings, or null for "
                          "the order in which samples are decided")
    if "type" not in entry:
        raise ConfigError(f"{where}.type: missing, expected d3")
    if entry["type"] != "d3":
        raise ConfigError(f"{where}.type: got {show(entry['type'])}, expected d3")
    return OrderConfig("d3", parse_d3({k: v for k, v in entry.items() if k != "type"}))


def _why_unknown(key: str, name: str, own: Sequence[str], mixers: Mapping[str, type]) -> str:
    """Explain a key that the mixer does not have."""
    configs = {other: mixer.Config for other, mixer in mixers.items()}  # type: ignore[attr-defined]
    owners = [
        other
        for other, config in configs.items()
        if key in [field.name for field in dataclasses.fields(config)]
    ]
    if owners:
        return (
            f"unknown key for type {name}, it belongs to {', '.join(owners)}; leave it out, or set"
            f" the whole entry, e.g. --d3-set 'mix={{type: {name}}}'"
        )
    return f"unknown key for type {name}{did_you_mean(key, [*own, *MIX_KEYS])}"


__all__ = [
    "DomainConfig",
    "MixConfig",
    "OrderConfig",
    "RunConfig",
    "from_mapping",
    "load_config",
    "parse",
    "parse_config",
]
