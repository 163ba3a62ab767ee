"""Who may import whom: each layer those above it, Megatron and torch where they belong."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megatron_d3"

# From top to bottom; a module may import its own layer and those above. The parts of the stage
# layer do not know each other, except where listed nowhere in STRANGERS (orders read corpora).
LAYERS = [
    {"errors", "types"},
    {"fields", "yaml12"},
    {"corpus", "mix", "order", "influence", "weight"},
    {"plan"},
    {"config", "config_reference", "registry", "planning", "curves", "plots"}
    | {"loss_table", "simulate", "propose"},
    {"mcore"},
    {"cli", "pretrain", "__main__"},
]
STRANGERS = {
    ("corpus", "mix"), ("corpus", "order"), ("corpus", "influence"), ("corpus", "weight"),
    ("mix", "order"), ("mix", "corpus"), ("order", "mix"), ("order", "influence"),
}  # fmt: skip
FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(module: str) -> str:
    """`megatron_d3.plan.store` -> `plan`; the package itself -> ``."""
    return module.split(".")[1] if "." in module else ""


def imports(path: Path, *, only_module_level: bool = False) -> Iterator[tuple[int, str]]:
    """Yield (line, module) of the imports in a file; relative ones and type-checking ones too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in _module_level(tree) if only_module_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            base = node.module or ""
            yield node.lineno, base
            if base == "megatron_d3":  # from megatron_d3 import plan
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def _module_level(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run on import: everything outside functions and TYPE_CHECKING."""
    for node in ast.iter_child_nodes(tree):
        is_typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        is_later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if not is_later and not is_typing:
            yield node
            yield from _module_level(node)


def layer_of(part: str) -> int:
    found = [number for number, layer in enumerate(LAYERS) if part in layer]
    assert found, f"{part} has no layer: name it in tests/test_layers.py"
    return found[0]


def test_the_walk_sees_every_import(tmp_path):
    path = tmp_path / "x.py"
    path.write_text(
        "import a.b\n"
        "from megatron_d3 import plan\n"
        "class C:\n    from c import d\n"
        "def f():\n    import lazy\n"
        "if TYPE_CHECKING:\n    import typed\n"
    )
    eager = [(1, "a.b"), (2, "megatron_d3"), (2, "megatron_d3.plan"), (4, "c")]
    assert sorted(imports(path, only_module_level=True)) == eager
    assert sorted(imports(path)) == [*eager, (6, "lazy"), (8, "typed")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_upwards(path):
    own = path.relative_to(PACKAGE).with_suffix("").parts[0]
    if own == "__init__":
        assert not [name for _, name in imports(path) if name.startswith("megatron_d3")]
        return
    for line, name in imports(path):
        part = part_of(name) if name.split(".")[0] == "megatron_d3" else ""
        if part in ("", own, "__version__"):
            continue
        where = f"{path.relative_to(ROOT)}:{line} imports {name}"
        assert layer_of(part) <= layer_of(own), f"{where}: {own} lies above {part}"
        assert (own, part) not in STRANGERS, f"{where}: {own} and {part} do not know each other"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_megatron_and_torch_stay_where_they_belong(path):
    own = path.relative_to(PACKAGE).parts[0]
    where = path.relative_to(ROOT)
    if own != "mcore":
        megatron = [line for line, name in imports(path) if name.split(".")[0] == "megatron"]
        assert not megatron, f"{where}:{megatron[0]} imports megatron outside mcore/"
    if own not in ("mcore", "influence"):
        torch = [line for line, name in imports(path, only_module_level=True)
                 if name.split(".")[0] == "torch"]
        assert not torch, f"{where}:{torch[0]} imports torch at module level"


HEAVY = ("torch", "megatron", "transformer_engine", "sentencepiece", "matplotlib", "tensorboard")


@pytest.mark.parametrize("code", [
    "import megatron_d3.cli.main as m\ntry: m.main(['--help'])\nexcept SystemExit: pass",
    "import megatron_d3.planning, megatron_d3.corpus, megatron_d3.mix, megatron_d3.order",
])  # fmt: skip
def test_help_and_the_layers_above_mcore_load_nothing_heavy(code):
    check = f"\nimport sys\nheavy = [m for m in {HEAVY} if m in sys.modules]\nassert not heavy"
    done = subprocess.run(
        [sys.executable, "-c", code + check], cwd=ROOT, capture_output=True, text=True, timeout=300,
        check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
