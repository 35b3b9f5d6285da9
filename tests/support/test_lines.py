"""The lines that programs reach, in processes that start, fork and end in all ways. Faked: the package."""

import os
import subprocess
import sys

import pytest

import lines

PACKAGE = '''"""What a package says of itself."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class Named:
    """A class."""

    name: str = "x"

    def of_a_protocol(self) -> Sequence[str]: ...


def chosen(number: int) -> str:
    """A docstring is no line."""
    global last
    last = number
    if number == 1:
        return (
            "one"
        )
    elif number == 2:
        return "two"
    else:
        try:
            raise ValueError(number)
        except ValueError:
            os.kill(os.getpid(), signal.SIGKILL)
    return "never"
'''


@pytest.fixture
def marked(tmp_path):
    package = tmp_path / "counted"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text(PACKAGE)
    (package / "inner/__init__.py").write_text("from counted import chosen\n\nx = chosen(1)\n")
    one = lines.Marked(package)
    one.write(tmp_path)
    return one


def run(marked, code, file):
    environment = marked.environment(file)
    environment["PYTHONPATH"] += f"{os.pathsep}{marked.package.parent}"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_lines_of_every_process_count_however_it_ends(marked, tmp_path):
    file, own = tmp_path / "one.x", marked.package / "__init__.py"
    ended = run(marked, "import counted; print(counted.chosen(2), counted.chosen.__code__.co_filename)", file)
    assert ended.stdout == f"two {own}\n", ended.stderr
    imported = {5, 6, 7, 9, 13, 16, 18, 21}
    assert set(marked.lines[own]) == imported | {24, 25, 26, 29, 30, 32, 33, 35, 36}
    assert marked.reached(file)[own] == imported | {24, 25, 29, 30}
    forks = "import os, counted\nif os.fork(): os.wait()\nelse: counted.chosen(3)"
    assert run(marked, forks, file).returncode == 0
    assert marked.reached(file)[own] == imported | {24, 25, 29, 30, 32, 33, 35}
    assert marked.reached(file)[marked.package / "inner/__init__.py"] == set()


def test_the_report_has_shares_of_what_any_run_reaches_and_names_the_rest(marked, tmp_path, capsys):
    runs = {}
    for name, code in {"default": "import counted", "all": "import counted.inner"}.items():
        run(marked, code, tmp_path / name)
        runs[name] = marked.reached(tmp_path / name)
    lines.report(marked, runs, tmp_path / "report.txt")
    shown = capsys.readouterr().out
    assert "default: 8 lines, 61.54% of the 13 that any run reaches" in shown
    assert "all: 13 lines, 100.00% of the 13" in shown
    text = (tmp_path / "report.txt").read_text()
    assert "not by default:\ncounted/__init__.py: 24-26\ncounted/inner/__init__.py: 1-3\n" in text
    assert text.endswith("by no run:\ncounted/__init__.py: 29-36\n")
