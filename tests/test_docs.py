"""README and docs name files, commands, flags and keys that exist."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron_d3.cli.main import VERBS, _load
from megatron_d3.config import load_config
from tests.plan_helpers import Trainer, header

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "slurm/README.md", *sorted((ROOT / "docs").glob("*.md"))]
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def blocks(page: Path, language: str) -> list[str]:
    """Fenced blocks of a language, without the indentation of a list."""
    pattern = re.compile(rf"^( *)```{language}\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
    found = pattern.findall(page.read_text())
    return [re.sub(rf"^{indent}", "", text, flags=re.MULTILINE) for indent, text in found]


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every command line, continuation lines joined, comments left out."""
    for text in blocks(page, "bash") + blocks(page, ""):
        for line in text.replace("\\\n", " ").splitlines():
            if line.startswith(("make ", "megatron-d3 ", "torchrun ")):
                yield shlex.split(line, comments=True)


def test_the_pages_have_commands() -> None:
    assert sum(1 for page in PAGES for _ in commands(page)) > 10


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    local = [target for target in targets if "://" not in target]
    missing = [target for target in local if not (page.parent / target).exists()]
    assert not missing


@every_page
def test_files_that_are_named_exist(page: Path) -> None:
    folders, ends = "megatron_d3|examples|tools|benchmarks|tests|docs", "py|md|args|yaml|sh"
    pattern = rf"(?:{folders})/[\w./-]+\.(?:{ends})"
    missing = [name for name in re.findall(pattern, page.read_text())
               if not (ROOT / name).exists()]
    assert not missing


@every_page
def test_make_targets_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for words in commands(page):
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), words
    variables = re.findall(r"`make \w+ (\w+)=", page.read_text())
    assert all(re.search(rf"^{name} :=", makefile, re.MULTILINE) for name in variables)


@every_page
def test_commands_parse(page: Path) -> None:
    for words in commands(page):
        if words[0] != "megatron-d3":
            continue
        verb = _load(VERBS[words[1]])
        parser = argparse.ArgumentParser(exit_on_error=False)
        verb.add_arguments(parser)
        try:
            parser.parse_args(words[2:])
        except (SystemExit, argparse.ArgumentError) as error:
            raise AssertionError(f"{page.name}: {shlex.join(words)}: {error}") from error


@every_page
def test_flags_of_the_entry_point_exist(page: Path) -> None:
    pytest.importorskip("megatron")
    parser = argparse.ArgumentParser()
    importlib.import_module("megatron_d3.mcore.args").add_d3_arguments(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    assert set(re.findall(r"--d3-[a-z-]*[a-z]", page.read_text())) <= known


@every_page
def test_configurations_load(page: Path, tmp_path: Path) -> None:
    for number, text in enumerate(blocks(page, "yaml")):
        path = tmp_path / f"{number}.yaml"
        path.write_text(text)
        load_config(path)


def test_positions_can_be_read_in_two_lines(tmp_path: Path) -> None:
    Trainer(tmp_path / "d3", header(mix="0.5,0.25,0.25", total=40)).run()
    (code,) = blocks(ROOT / "docs" / "plan.md", "python")
    lines = code.replace("runs/demo/shift/d3", str(tmp_path / "d3")).splitlines()
    names: dict[str, object] = {}
    exec("\n".join([*lines[:-1], "counts = " + lines[-1]]), names)  # noqa: S102
    np.testing.assert_array_equal(names["counts"], [20, 10, 10])


def test_the_picture_of_the_readme_is_small() -> None:
    assert (ROOT / "docs" / "demo-losses.png").stat().st_size < 150_000
