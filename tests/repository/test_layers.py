"""Imports go one way. Trusted: the text of the files, read with ast.

A file may import its own package and those above it in the table below, for types alone, too, and within a
function, too; and no two files, of one package either, may reach each other.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from packages import PACKAGE, PACKAGES
from places import ROOT

ALONE = {"aio": set(), "kernels": set(), "tiling": {"kernels"}}
"""Packages that import nothing of ours but these: each would be of use without the rest."""
FLOORS = 13
TOP = {"infinity", "infinity.__main__"}
"""What users import and run: they may import anything, and nothing but measurements imports them."""
PURE = ("infinity.planning.", "infinity.errors", "infinity.sizes")
"""What decides and computes, and never touches torch or the machine: it runs anywhere, in milliseconds."""
IMPURE = {
    *("cffi", "io", "mmap", "os", "psutil", "shutil", "socket", "subprocess", "tempfile", "torch"),
}


@cache
def files() -> dict[str, Path]:
    """Return the Python files of the package by their modules' names; links to folders are followed."""
    folders = [PACKAGE, *(one for one in PACKAGE.iterdir() if one.is_dir())]
    paths = {path for folder in folders for path in folder.glob("**/*.py" if folder != PACKAGE else "*.py")}
    named = {tuple(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    return {".".join(parts).removesuffix(".__init__"): path for parts, path in sorted(named.items())}


def package(module: str) -> str:
    """Return the package that a module belongs to."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and (PACKAGE / parts[1]).is_dir() else ""


@cache
def imported(module: str) -> tuple[tuple[int, str], ...]:
    """Return (line, dotted name) of all that a module imports."""
    return tuple(_imports(ast.parse(files()[module].read_text(), module)))


def _imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield node.lineno, whole if whole in files() else node.module


def ours(module: str) -> set[str]:
    """Return the modules of ours that a module imports."""
    return {name for _, name in imported(module) if name in files()} - {module}


def complaint(one: str, other: str) -> str | None:
    """Say why a file of package `one` may not import one of `other`, or nothing."""
    if one == other:
        return None
    if one in ALONE:
        return None if other in ALONE[one] else f"{one} imports nothing of {other or 'ours'}"
    return f"{other} is above {one}" if PACKAGES.index(other) > PACKAGES.index(one) else None


def test_every_package_is_in_the_table_and_says_what_it_is_for() -> None:
    assert {package(module) for module in files()} == set(PACKAGES)
    for name in PACKAGES[1:]:
        text = (PACKAGE / name / "__init__.py").read_text()
        assert ast.get_docstring(ast.parse(text)), name


def test_imports_go_down_the_packages() -> None:
    wrong = [
        f"{module}:{line}: {name}: {why}"
        for module in files()
        if module not in TOP
        for line, name in imported(module)
        if name in files()
        and (why := complaint(package(module), package(name) if name not in TOP else "bench"))
    ]
    assert wrong == []


def test_the_packages_stand_on_thirteen_floors_at_most() -> None:
    """On how many packages, one upon the other, does one stand? Who reads the last has to know that many."""
    needs = {name: set[str]() for name in PACKAGES[1:]}
    for module in files():
        if package(module):
            needs[package(module)] |= {package(other) for other in ours(module)} - {"", package(module)}
    floors: dict[str, int] = {}
    for name in PACKAGES[1:]:
        floors[name] = 1 + max((floors[other] for other in needs[name]), default=0)
    assert max(floors.values()) <= FLOORS, floors


def test_no_two_files_reach_each_other() -> None:
    """Type-only imports count: who reads one file of a circle has to read them all."""
    left = {module: ours(module) for module in files() if module not in TOP}
    while free := [module for module, needs in left.items() if not needs & left.keys()]:
        for module in free:
            del left[module]
    assert left == {}


def test_what_decides_touches_neither_torch_nor_the_machine_nor_does_anything_that_it_imports() -> None:
    seen: set[str] = set()
    waiting = [module for module in files() if module.startswith(PURE)]
    wrong = []
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            waiting += ours(module)
            wrong += [f"{module}: {name}" for _, name in imported(module) if name.split(".")[0] in IMPURE]
    assert wrong == []


@pytest.mark.parametrize("module", ["infinity", "infinity.planning.forecast", "infinity.__main__"])
def test_planning_and_the_commands_help_load_neither_torch_nor_cffi(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'cffi'}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_names_that_come_when_they_are_used_are_those_that_type_checkers_see() -> None:
    import infinity

    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname: f"{node.module}.{alias.name}"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    packages = {name: f"infinity.{name}" for name in infinity._PACKAGES}
    assert seen == packages | {name: f"{module}.{name}" for name, module in infinity._MODULE_OF.items()}
    assert {*infinity.__all__, *infinity._PACKAGES, "OffloadedOptimizer"} == {*seen}
    assert set(infinity.__all__) <= set(dir(infinity))
    with pytest.raises(AttributeError, match="no attribute 'AdamWW'"):
        infinity.AdamWW  # noqa: B018


@pytest.mark.parametrize(
    ("one", "other", "allowed"),
    [
        ("cli", "engine", True),
        ("engine", "cli", False),
        ("storage", "aio", True),
        ("aio", "planning", False),
        ("aio", "", False),
        ("tiling", "kernels", True),
        ("tiling", "aio", False),
        ("planning", "", True),
        ("planning", "storage", False),
    ],
)
def test_the_table_reads_as_meant(one: str, other: str, *, allowed: bool) -> None:
    assert (complaint(one, other) is None) is allowed
