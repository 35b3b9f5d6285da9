"""docs/design.md says what is there. Trusted: the files, and what test_layers holds them to."""

import ast
import re

import pytest

from packages import PACKAGE, PACKAGES
from places import ROOT

TEXT = (ROOT / "docs/design.md").read_text(encoding="utf-8")
PATHS = sorted(set(re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.(?:py|md))`", TEXT)))


def test_the_table_of_packages_is_that_of_the_layers_with_the_words_of_their_docstrings():
    rows = re.findall(r"^\| `([a-z]+)` \| (.+) \|$", TEXT.split("## The packages")[1], re.MULTILINE)
    said = {
        name: ast.get_docstring(ast.parse((PACKAGE / name / "__init__.py").read_text())).split("\n\n")[0]
        for name in PACKAGES[1:]
    }
    assert rows == [(name, " ".join(text.split())) for name, text in said.items()]


@pytest.mark.parametrize("path", PATHS)
def test_every_file_that_is_named_is_there(path):
    assert any((folder / path).is_file() for folder in (ROOT, PACKAGE))


def test_files_are_named_for_every_step_of_a_shards_way():
    steps = re.findall(r"^\d+\. (.+)$", TEXT, re.MULTILINE)
    assert len(steps) == 10
    assert all(re.search(r"`[a-z_]+/[a-z_]+\.py`", step) for step in steps)
