"""Strict loading of frozen dataclasses: the values of a configuration, checked and named.

A configuration is a tree of frozen dataclasses. Their annotations say which values are legal, their
field docstrings say what they mean; both serve the loader's errors and the generated reference.

    @dataclass(frozen=True)
    class Config:
        alpha: Annotated[float, Range("[0, 1)")] = 0.5
        \"\"\"Share of the old value that is kept.\"\"\"

    from_mapping(Config, {"alpha": 1.5}, "d3.mix", folder=Path("."))
    # ConfigError: d3.mix.alpha: got 1.5, expected a number in [0, 1)

Nothing is converted silently except an integer to a float, an integral float (`1e3`) to an integer,
and the words `inf` and `nan` to floats.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import math
import textwrap
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from megatron_d3.errors import ConfigError


@dataclass(frozen=True)
class Range:
    """The interval a number must lie in, e.g. `Annotated[float, Range("[0, 1)")]`.

    Attributes:
        text: two numbers in brackets, square where the end belongs to the interval.
    """

    text: str

    def contains(self, number: float) -> bool:
        """Tell whether the number lies in the interval; NaN lies in none."""
        low, high = (float(end) for end in self.text[1:-1].split(","))
        above = number >= low if self.text[0] == "[" else number > low
        return above and (number <= high if self.text[-1] == "]" else number < high)


def from_mapping[T](cls: type[T], mapping: Any, where: str, *, folder: Path) -> T:
    """Build a frozen dataclass from a mapping of its field names to plain values.

    Args:
        cls: a dataclass of the annotations described in :func:`parse`.
        mapping: as YAML gives it.
        where: dotted place of the mapping, the start of every error message.
        folder: relative paths are relative to it.

    Raises:
        ConfigError: `mapping` is none, a key is unknown or missing, or a value does not fit.
    """
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{where}: got {show(mapping)}, expected a mapping of settings")
    hints = get_type_hints(cls, include_extras=True)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in mapping:
        if key not in fields:
            raise ConfigError(f"{where}.{key}: unknown key{did_you_mean(key, fields)}")
    values = {}
    for name, field in fields.items():
        if name in mapping:
            values[name] = parse(hints[name], mapping[name], f"{where}.{name}", folder=folder)
        elif is_required(field):
            raise ConfigError(f"{where}.{name}: missing, expected {describe(hints[name])}")
    return cls(**values)


def is_required(field: dataclasses.Field[Any]) -> bool:
    """Tell whether a dataclass field has no default."""
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def parse(annotation: Any, value: Any, where: str, *, folder: Path) -> Any:
    """Return `value` as the annotation wants it.

    Understood: int, float, bool, str, Path, None, Literal, tuple[X, ...], tuple[X, Y],
    dict[str, X], unions, dataclasses, and Annotated[X, Range]. A single text also stands for a
    tuple of one path.

    Raises:
        ConfigError: the value does not fit; the message starts with `where`.
    """
    origin, args = get_origin(annotation), get_args(annotation)
    unfit = ConfigError(f"{where}: got {show(value)}, expected {describe(annotation)}")
    if origin in (Union, types.UnionType):
        member = next((arg for arg in args if _has_shape(arg, value)), unfit)
        if member is unfit:
            raise unfit
        return parse(member, value, where, folder=folder)
    if annotation == tuple[Path, ...] and isinstance(value, str):
        value = [value]
    if not _has_shape(annotation, value):
        raise unfit
    if origin is Annotated:
        number = parse(args[0], value, where, folder=folder)
        if not all(mark.contains(number) for mark in args[1:] if isinstance(mark, Range)):
            raise unfit
        return number
    if origin is tuple:
        each = args[:1] * len(value) if args[-1] is Ellipsis else args
        return tuple(
            parse(arg, item, f"{where}[{index}]", folder=folder)
            for index, (arg, item) in enumerate(zip(each, value, strict=True))
        )
    if origin is dict:
        return {
            key: parse(args[1], item, f"{where}.{key}", folder=folder)
            for key, item in value.items()
        }
    if dataclasses.is_dataclass(annotation):
        return from_mapping(annotation, value, where, folder=folder)  # type: ignore[arg-type]
    if annotation is Path:
        return Path(folder, value).absolute()
    return annotation(value) if annotation in (int, float) else value


def _has_shape(annotation: Any, value: Any) -> bool:
    """Tell whether the value is of the annotation's kind, not looking inside."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _has_shape(args[0], value)
    if origin is Literal:
        return any(value == arg and type(value) is type(arg) for arg in args)
    if origin is tuple:
        is_length_free = args[-1] is Ellipsis
        return isinstance(value, list | tuple) and (is_length_free or len(value) == len(args))
    if origin is dict:
        return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
    if dataclasses.is_dataclass(annotation):
        return isinstance(value, Mapping)
    if annotation is None or annotation is type(None):
        return value is None
    if annotation is bool or isinstance(value, bool):
        return annotation is bool and isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if annotation is float:
        return isinstance(value, int | float) or value in ("inf", "-inf", "nan")
    return isinstance(value, str)  # str, Path


def describe(annotation: Any) -> str:
    """Say in words which values an annotation allows: `a number in [0, 1)`."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        ranges = [f" in {arg.text}" for arg in args[1:] if isinstance(arg, Range)]
        return describe(args[0]) + "".join(ranges)
    if origin is Literal:
        return " or ".join(str(arg) for arg in args)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(arg) for arg in args)
    if origin is tuple and args[-1] is Ellipsis:
        return f"a list, each {describe(args[0])}"
    if origin is tuple:
        return "a list of " + " and ".join(describe(arg) for arg in args)
    if origin is dict:
        return f"a mapping of names, each to {describe(args[1])}"
    if dataclasses.is_dataclass(annotation):
        return "a mapping of settings"
    words = {
        int: "an integer",
        float: "a number",
        bool: "true or false",
        str: "a text",
        Path: "a path",
        None: "null",
        type(None): "null",
    }
    if annotation not in words:
        raise TypeError(f"no rule to load a {annotation}")
    return words[annotation]


def show(value: Any) -> str:
    """Print a value for a message, shortened."""
    words = {None: "null", True: "true", False: "false"}
    is_word = value is None or isinstance(value, bool)
    return words[value] if is_word else textwrap.shorten(repr(value), 80, placeholder=" ...")


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return `, did you mean X?` for the nearest of the known names, else a list of them."""
    known = list(known)
    near = difflib.get_close_matches(str(name), known, n=1)
    if near:
        return f", did you mean {near[0]}?"
    return f"; known: {', '.join(known)}" if known else "; there is none to set"


def to_plain(value: Any) -> Any:
    """Return a dataclass tree as JSON-able values; :func:`from_mapping` reads them back.

    Fields keep their order. Infinity and NaN, which JSON lacks, become the texts `inf` and `nan`.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return str(value) if isinstance(value, Path) else value


@cache
def field_docs(cls: type) -> dict[str, str]:
    """Return the docstring under each field of a dataclass, on one line; empty where none is."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for node, after in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            is_doc = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            text = str(after.value.value) if is_doc else ""  # type: ignore[union-attr]
            docs[node.target.id] = " ".join(text.split())
    return docs
