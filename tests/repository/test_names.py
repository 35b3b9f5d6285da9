"""One name, one thing. Trusted: the text of the files, read with ast."""

import ast
from collections import defaultdict

from packages import product
from places import ROOT


def test_every_file_of_the_product_is_looked_at() -> None:
    folders = {path.relative_to(ROOT).parts[0] for path in product()}
    assert folders == {"infinity", "aio", "kernels", "tiling", "bench"}


def test_no_two_classes_of_the_product_have_one_name() -> None:
    files = defaultdict(list)
    for path in product():
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if isinstance(node, ast.ClassDef):
                files[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    twice = [f"{name}: {', '.join(places)}" for name, places in sorted(files.items()) if len(places) > 1]
    assert not twice, "name one of them for what sets it apart:\n" + "\n".join(twice)
