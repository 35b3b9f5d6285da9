"""Has a process import the code that `lines.py` has marked, where there is some: in all processes of a run of
tests, for Python imports this file when it starts. A mark sets a byte of a file that they all map.
"""

import builtins
import marshal
import mmap
import os
from importlib.machinery import SourceFileLoader

_COMPILED = SourceFileLoader.get_code


def _get_code(loader, name):
    """Return the marked code of a module, or what Python compiles."""
    try:
        with open(f"{CODE}{loader.path}", "rb") as file:  # noqa: PTH123 - most processes need no pathlib
            return marshal.load(file)  # noqa: S302 - of this run's own files
    except FileNotFoundError:
        return _COMPILED(loader, name)


if REACHED := os.environ.get("INFINITY_TEST_LINES"):
    CODE = f"{os.path.dirname(REACHED)}/code"  # noqa: PTH120 - the same
    with open(REACHED, "r+b") as FILE:  # noqa: PTH123 - the same
        builtins.__reached__ = mmap.mmap(FILE.fileno(), 0)
    SourceFileLoader.get_code = _get_code
