"""The rules of the house, checked on the sources: who imports whom, length of files, docstrings."""

from __future__ import annotations

import ast
import graphlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {"tfpar": "tfpar", "strategies": "tfpar.strategies", "models": "tfpar.models"}
LONGEST_FILE = 400
PRIVATE = ("tensorflow.python", "tensorflow.dtensor", "keras.src")


def module_name(file: Path) -> str:
    """The name under which a file is imported: strategies/hybrid.py is tfpar.strategies.hybrid."""
    folder, *rest = file.relative_to(ROOT).with_suffix("").parts
    return ".".join([PACKAGES[folder], *(part for part in rest if part != "__init__")])


FILES = sorted(file for folder in PACKAGES for file in (ROOT / folder).rglob("*.py"))
TREES = {file: ast.parse(file.read_text()) for file in FILES}
MODULES = {module_name(file): file for file in FILES}


def within(name: str, *packages: str) -> bool:
    """Whether a dotted name is one of the packages or lies in one."""
    return any(name == package or name.startswith(package + ".") for package in packages)


def nodes(tree: ast.AST, inside_functions: bool) -> Iterator[ast.AST]:
    """All nodes, or those that run when the module is imported (also not what is under `if TYPE_CHECKING`)."""
    for node in ast.iter_child_nodes(tree):
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        deferred = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or typing_only
        if inside_functions or not deferred:
            yield node
            yield from nodes(node, inside_functions)


def imports(tree: ast.AST, inside_functions: bool = True) -> set[str]:
    """Dotted names that a module imports; `from a import b` gives "a.b", whether b is a module or not."""
    found = set()
    for node in nodes(tree, inside_functions):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: write imports in full, such as from tfpar.mesh import Mesh"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def module_of(name: str) -> str | None:
    """The module of ours that an imported name is or lies in."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name or None


def files_of(folder: str) -> list[Path]:
    """The files of one of the three folders."""
    return [file for file in FILES if file.is_relative_to(ROOT / folder)]


def label(file: Path) -> str:
    """A file's path, for the names of tests."""
    return str(file.relative_to(ROOT))


@pytest.mark.parametrize("file", FILES, ids=label)
def test_private_names_only_in_compat(file):
    if file.is_relative_to(ROOT / "tfpar" / "compat"):
        return
    used = imports(TREES[file])
    used |= {ast.unparse(node) for node in ast.walk(TREES[file]) if isinstance(node, ast.Attribute)}
    used = {re.sub(r"^tf\b", "tensorflow", name) for name in used}
    assert not {name for name in used if within(name, *PRIVATE)}


@pytest.mark.parametrize("file", files_of("models"), ids=label)
def test_models_import_keras_and_layouts(file):
    allowed = {"keras", "numpy", *sys.stdlib_module_names}
    ours = ("tfpar.models", "tfpar.layouts") if file.stem.endswith("_layouts") else ("tfpar.models",)
    for name in imports(TREES[file]):
        assert name.split(".")[0] in allowed or within(name, *ours)


@pytest.mark.parametrize("file", files_of("strategies"), ids=label)
def test_strategies_import_only_tfpar(file):
    combines = file.stem in ("hybrid", "__init__")
    for name in imports(TREES[file]):
        assert not within(name, "tfpar.models")
        assert combines or not within(name, "tfpar.strategies")


@pytest.mark.parametrize("file", files_of("tfpar"), ids=label)
def test_tfpar_imports_neither_strategies_nor_models(file):
    if file in (ROOT / "tfpar" / "__init__.py", ROOT / "tfpar" / "demo.py"):
        return
    assert not {name for name in imports(TREES[file]) if within(name, "tfpar.strategies", "tfpar.models")}


def test_no_import_cycles():
    graph = {
        module: {module_of(name) for name in imports(TREES[file], inside_functions=False)} - {None, module}
        for module, file in MODULES.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # its CycleError names the cycle


@pytest.mark.parametrize("file", FILES, ids=label)
def test_file_is_short(file):
    assert len(file.read_text().splitlines()) < LONGEST_FILE


@pytest.mark.parametrize("file", FILES, ids=label)
def test_public_names_have_docstrings(file):
    tree = TREES[file]
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    public = [node for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]
    assert not tree.body or ast.get_docstring(tree), "the module has no docstring"
    assert not [node.name for node in public if not ast.get_docstring(node)]
