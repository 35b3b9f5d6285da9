"""The style as a test. Trusted: the text of the files, and what public names say of themselves."""

import ast
import functools
import importlib
import re
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from packages import product
from places import ROOT

PRODUCT = sorted([*product(), *(path for path in ROOT.glob("*/*.[ch]") if path.parent.name != ".deps")])
TESTS = sorted((ROOT / "tests").glob("**/*.py"))
SCRIPTS = [ROOT / "dev.py", ROOT / "dev_system.py", ROOT / "setup.py"]

FUNCTION_LINES = 70
FILE_LINES = 600
# Words that name nothing: whatever they are used for has a better name, its verb or its noun.
EMPTY_WORDS = {"coordinator", "handler", "helper", "manager", "swapper", "util", "utils"}
SYSTEM_NAMES = {"sa_handler"}  # C's own
DEEPSPEED_NAMES = {"infinity/deepspeed/utils.py: utils"}  # deepspeed.utils, which scripts import


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """Return what a file of the product consists of: four tests look at all of it."""
    return list(ast.walk(ast.parse(path.read_text(), str(path))))


def functions(path: Path) -> Iterator[tuple[str, int, int]]:
    """Yield (name, first line, number of lines) of each function of a Python or C file."""
    text = path.read_text()
    if path.suffix == ".py":
        for node in nodes(path) if path in PRODUCT else ast.walk(ast.parse(text, str(path))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.name, node.lineno, (node.end_lineno or 0) - node.lineno + 1
        return
    first = 0
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if re.match(r"[A-Za-z_].*\(", line) and not line.rstrip().endswith(";"):
            first = number
        if line.startswith("}"):
            if first:
                yield lines[first - 1], first, number - first + 1
            first = 0


def test_functions_fit_on_a_screen() -> None:
    long = [
        f"{name(path)}:{line}: {function} has {length} lines"
        for path in [*PRODUCT, *TESTS, *SCRIPTS]
        for function, line, length in functions(path)
        if length > FUNCTION_LINES
    ]
    assert long == []


def test_files_are_short_enough_to_be_read() -> None:
    limits = dict.fromkeys([*PRODUCT, *SCRIPTS, *TESTS], FILE_LINES)
    lengths = {path: len(path.read_text().splitlines()) for path in limits}
    long = [f"{name(path)}: {lengths[path]} lines" for path, limit in limits.items() if lengths[path] > limit]
    assert long == []


def test_memory_is_asked_for_on_a_device_that_is_named() -> None:
    """torch.set_default_device would decide else, and the kernels write to addresses of the host."""
    makers = {"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm"}
    makers |= {"scalar_tensor", "tensor", "zeros"}
    wrong = []
    for path in (ROOT / "infinity").glob("**/*.py"):
        for node in nodes(path) if "reference" not in path.parts else ():
            makes = (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in makers
                and ast.unparse(node.func.value) == "torch"
            )
            if makes and not {"device", None} & {one.arg for one in node.keywords}:
                wrong.append(f"{name(path)}:{node.lineno}")
    assert wrong == []


def test_product_code_neither_prints_nor_asserts_bare() -> None:
    wrong = []
    for path in (path for path in PRODUCT if path.suffix == ".py"):
        for node in nodes(path):
            if isinstance(node, ast.Assert):
                wrong.append(f"{name(path)}:{node.lineno}: assert vanishes under python -O: raise")
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                wrong.append(f"{name(path)}:{node.lineno}: print")
    assert wrong == []


def test_nothing_is_left_to_do() -> None:
    marks = re.compile(r"\b(TODO|FIXME|XXX)\b")
    left = [
        f"{name(path)}:{number}: {line.strip()}"
        for path in [*PRODUCT, *SCRIPTS]
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if marks.search(line)
    ]
    assert left == []


def identifiers(path: Path) -> Iterator[str]:
    """Yield the names that a file gives (Python) or uses (C)."""
    yield path.stem
    text = path.read_text()
    if path.suffix != ".py":
        code = re.sub(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\])*"', " ", text, flags=re.DOTALL)
        yield from set(re.findall(r"[A-Za-z_]\w*", code)) - SYSTEM_NAMES
        return
    for node in nodes(path):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.arg():
                yield node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.attr
            case ast.alias(asname=str()):
                yield node.asname or ""


def words(identifier: str) -> set[str]:
    """Split snake_case and CamelCase into lower-case words, singular and plural alike."""
    parts = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", identifier)
    return {part.lower() for part in parts} | {part.lower().removesuffix("s") for part in parts}


def test_names_say_something() -> None:
    empty = sorted(
        f"{name(path)}: {identifier}"
        for path in PRODUCT
        for identifier in set(identifiers(path))
        if words(identifier) & EMPTY_WORDS
    )
    assert set(empty) == DEEPSPEED_NAMES


@pytest.mark.parametrize("package", ["infinity", "infinity.aio", "infinity.kernels", "infinity.tiling"])
def test_public_names_are_explained(package: str) -> None:
    module = importlib.import_module(package)
    pages = [ROOT / "docs/api.md", *ROOT.glob("[!.]*/README.md")]
    prose = set(re.findall(r"\w+", "\n".join(page.read_text() for page in pages if page.exists())))
    public = list(module.__all__)
    documented = (type, types.FunctionType, types.ModuleType)
    silent = [
        public_name
        for public_name in public
        if isinstance(thing := getattr(module, public_name), documented) and not thing.__doc__
    ]
    assert (silent, sorted(set(public) - prose)) == ([], []), (
        "no docstring; named neither in docs/api.md nor in a README"
    )
