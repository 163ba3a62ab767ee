"""The configuration's reference, written from the dataclasses and their field docstrings.

`docs/config.md` is the output of `python -m megatron_d3.config_reference`; a test keeps it so.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, get_type_hints

from megatron_d3.config import DomainConfig, MixConfig, OrderConfig, RunConfig
from megatron_d3.fields import describe, field_docs, is_required, show, to_plain
from megatron_d3.influence.settings import D3Config, SketchConfig
from megatron_d3.mix import MIXERS

_HEAD = """\
# The configuration file

Written from the code: `python -m megatron_d3.config_reference > docs/config.md`.

`--d3-config PATH` names the file, `--d3-set a.b=c` replaces single values (`--d3-set seed=7`) or
whole entries (`--d3-set 'mix={type: natural}'`). Paths are relative to the file. Numbers are those
of YAML 1.2: `1e-3` is one, `no` is a text. Unknown keys, keys given twice and values out of range
are errors.

```yaml
domains:                              # the order here is the domain order
  web:  {paths: [corpus/web], order: shuffle}
  code: {paths: [corpus/code_a, corpus/code_b], valid_paths: [corpus/code_valid]}
  wiki: corpus/wiki                   # short for {paths: [corpus/wiki]}
mix: {type: static, weights: {web: 0.7, code: 0.2, wiki: 0.1}, max_epochs: 4}
order: {type: d3, window: 60}         # leave it out for the order in which samples are decided
```
"""


def render(mixers: Mapping[str, type] = MIXERS) -> str:
    """Return the reference of all keys as Markdown."""
    parts = [_HEAD, "## Top level\n", *_entries(RunConfig, special={"domains", "mix", "order"})]
    parts += ["## `domains`\n", _text(DomainConfig), *_entries(DomainConfig)]
    parts += ["## `mix`\n", _text(MixConfig), *_entries(MixConfig, leave_out={"params"})]
    for name, mixer in mixers.items():
        config = mixer.Config  # type: ignore[attr-defined]
        parts += [f"### `mix: {{type: {name}}}`\n", _text(mixer), *_entries(config)]
    parts += ["## `order`\n", _text(OrderConfig), *_entries(OrderConfig, leave_out={"params"})]
    parts += ["### `order: {type: d3}`\n", _text(D3Config), *_entries(D3Config, special={"sketch"})]
    parts += ["#### `sketch`\n", _text(SketchConfig), *_entries(SketchConfig)]
    return "\n".join(parts).rstrip() + "\n"


def _text(cls: type) -> str:
    """Return the first paragraph of a class's docstring."""
    return inspect.getdoc(cls).split("\n\n")[0] + "\n"  # type: ignore[union-attr]


def _entries(cls: Any, *, leave_out: Iterable[str] = (), special: Iterable[str] = ()) -> list[str]:
    """Return one list entry a field; `special` ones have a section that gives their values."""
    hints, docs, lines = get_type_hints(cls, include_extras=True), field_docs(cls), []
    for field in dataclasses.fields(cls):
        if field.name in leave_out:
            continue
        if field.name in special:
            values = "a mapping, see below"
        else:
            default = "required" if is_required(field) else f"default {_default(field)}"
            values = f"{describe(hints[field.name])}; {default}"
        lines.append(f"- **`{field.name}`** ({values})  \n  {docs[field.name]}")
    return [*lines, ""] if lines else []


def _default(field: dataclasses.Field[Any]) -> str:
    value = to_plain(field.default)
    return "none" if value == [] else value if isinstance(value, str) else show(value)


if __name__ == "__main__":
    print(render(), end="")
