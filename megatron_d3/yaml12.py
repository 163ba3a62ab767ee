"""YAML as people write it: the 1.2 core schema, no duplicate keys, and `a.b=c` overrides.

PyYAML follows YAML 1.1, in which `1e-3` is a text, `no` is false, `1:30` is 90 and `010` is 8. Here
numbers, booleans and null are those of YAML 1.2; all else is text, so a domain may be called `no`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_d3.errors import ConfigError

_RESOLVERS = {
    "null": (r"~|null|Null|NULL|", "~nN\0"),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?[0-9]+", "-+0123456789"),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
}


class _Loader(yaml.SafeLoader):
    """A safe loader of the 1.2 core schema that refuses duplicate keys."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # none of YAML 1.1  # noqa: RUF012


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[str, Any]:
    """Build a mapping whose keys are distinct texts."""
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key, line = loader.construct_object(key_node, deep=True), key_node.start_mark.line + 1
        if not isinstance(key, str):
            raise ConfigError(
                f"line {line}: got the key {key!r}, expected a text; put it in quotes"
            )
        if key in mapping:
            raise ConfigError(f"line {line}: the key {key} is given twice")
        mapping[key] = loader.construct_object(value_node, deep=True)
    return mapping


def _int(loader: _Loader, node: yaml.ScalarNode) -> int:
    """Read decimal digits; a leading 0 means nothing."""
    return int(loader.construct_scalar(node))


def _float(loader: _Loader, node: yaml.ScalarNode) -> float:
    """Read a number with a point or an exponent, `.inf` or `.nan`."""
    return float(re.sub(r"\.(?=[inIN])", "", loader.construct_scalar(node)))


for _name, (_pattern, _first) in _RESOLVERS.items():
    _chars = [char if char != "\0" else "" for char in _first]
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_name}", re.compile(f"^(?:{_pattern})$"), _chars
    )
_Loader.add_constructor("tag:yaml.org,2002:int", _int)
_Loader.add_constructor("tag:yaml.org,2002:float", _float)
_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def parse_yaml(text: str, name: str) -> Any:
    """Return the value of a YAML document.

    Args:
        text: the document.
        name: of its file, the start of every error message.

    Raises:
        ConfigError: no YAML, a key given twice, or a key that is no text; with the line.
    """
    try:
        return yaml.load(text, Loader=_Loader)  # a subclass of SafeLoader
    except ConfigError as error:
        raise ConfigError(f"{name}, {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).replace("\n", " ")
        raise ConfigError(f"{name}{line}: not valid YAML: {problem}") from None


def read_yaml(path: Path) -> Any:
    """Return the value of a YAML file.

    Raises:
        ConfigError: the file cannot be read, or see :func:`parse_yaml`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason}") from error
    return parse_yaml(text, str(path))


def override(config: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Return a copy of the nested mapping with `a.b=value` settings applied in order.

    The value is YAML: `mix.type=natural`, `round_steps=4`, `mix={type: static}`. A key that holds
    dots itself is found if it is there. A leading `d3.` is ignored, as error messages print it.

    Raises:
        ConfigError: a setting without `=`, without a key, or below something that is no mapping.

    >>> override({"mix": {"type": "static"}}, ["mix.type=natural", "round_steps=2"])
    {'mix': {'type': 'natural'}, 'round_steps': 2}
    """
    result: dict[str, Any] = _copied(config)
    for setting in settings:
        key, equals, text = setting.partition("=")
        key = key.strip().removeprefix("d3.")
        if not equals or not key or not all(key.split(".")):
            raise ConfigError(f"--d3-set {setting}: expected KEY=VALUE, e.g. mix.type=natural")
        target, rest = result, key
        while (head := _head(target, rest)) != rest:
            below = target.setdefault(head, {})
            if not isinstance(below, dict):
                raise ConfigError(f"--d3-set {setting}: {head} is not a mapping, but {below!r}")
            target, rest = below, rest[len(head) + 1 :]
        target[rest] = parse_yaml(text, f"--d3-set {setting}")
    return result


def _head(mapping: dict[str, Any], key: str) -> str:
    """Return the longest start of the dotted key that is a key, else the first part."""
    parts = key.split(".")
    starts = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return next((start for start in starts if start in mapping), parts[0])


def _copied(value: Any) -> Any:
    """Copy nested mappings; leave everything else, which is never written to."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return value
