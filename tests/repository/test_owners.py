"""State has one owner: what a class's instances keep is assigned in its own file. Trusted: ast."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from packages import product
from places import ROOT

OTHERS = {"grad", "weight", "forward", "dtype", "optimizer", "data", "shape"}
"""Attributes of torch's and transformers' objects that classes of ours have as well."""
RECEIVERS = {"self", "cls", "ctx", "struct"}
"""The instance itself; what torch hands an autograd function; a struct of C."""
FOREIGN = {
    "infinity/engine/quantized.py",  # transformers' quantizer
    "infinity/huggingface/trainer_setup.py",  # the user's model
    "infinity/ranks/gloo.py",  # options of gloo's
    "tiling/experts.py",  # a tile that is being made
}
"""Files that set attributes by their names, of objects that no class of ours makes."""
FEW = 12
GREAT = {
    "Unit": "infinity/units/unit.py",
    "Residence": "infinity/planning/residence.py",
    "Record": "infinity/records/record.py",
    "GradientStore": "infinity/gradients/store.py",
    "Gradient": "infinity/gradients/gradient.py",
    "Engine": "infinity/engine/engine.py",
    "UnitResidency": "infinity/units/residency.py",
    "Pass": "infinity/lane/base.py",
}
"""Classes that much meets in."""


def own_files() -> list[Path]:
    return [path for path in product() if path.relative_to(ROOT).parts[0] != "bench"]


def targets(node: ast.AST) -> Iterator[ast.Attribute]:
    """Yield the attributes that a statement assigns to, or deletes."""
    found: list[ast.expr] = []
    if isinstance(node, (ast.Assign, ast.Delete)):
        found = list(node.targets)
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.For)):
        found = [node.target]
    for one in found:
        parts = one.elts if isinstance(one, (ast.Tuple, ast.List)) else [one]
        yield from (part for part in parts if isinstance(part, ast.Attribute))


def set_by_name(node: ast.AST) -> bool:
    """Whether a call sets an attribute of something else than the instance itself, by its name."""
    return (
        isinstance(node, ast.Call)
        and getattr(node.func, "id", getattr(node.func, "attr", "")) in {"setattr", "__setattr__"}
        and ast.unparse(node.func) in {"setattr", "object.__setattr__"}
        and ast.unparse(node.args[0]) not in RECEIVERS
    )


def receiver(attribute: ast.Attribute) -> str:
    value = attribute.value
    return value.id if isinstance(value, ast.Name) else ast.unparse(value)


def declared(tree: ast.AST) -> Iterator[str]:
    """Yield the attributes that the classes of a file keep."""
    for owner in ast.walk(tree):
        if not isinstance(owner, ast.ClassDef):
            continue
        for node in ast.walk(owner):
            yield from (one.attr for one in targets(node) if receiver(one) == "self")
        fields = (one.target for one in owner.body if isinstance(one, ast.AnnAssign))
        yield from (one.id for one in fields if isinstance(one, ast.Name))


def test_no_file_assigns_what_instances_of_another_files_class_keep() -> None:
    keepers = defaultdict(set)
    trees = {path: ast.parse(path.read_text(), str(path)) for path in own_files()}
    for path, tree in trees.items():
        for name in declared(tree):
            keepers[name].add(path)
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if set_by_name(node) and str(path.relative_to(ROOT)) not in FOREIGN
    ]
    wrong += [
        f"{path.relative_to(ROOT)}:{one.lineno}: {ast.unparse(one)}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        for one in targets(node)
        if one.attr not in OTHERS
        and keepers[one.attr]
        and path not in keepers[one.attr]
        and receiver(one) not in RECEIVERS
    ]
    assert not wrong, "give the class a method that does it:\n" + "\n".join(wrong)


@pytest.mark.parametrize("name", GREAT)
def test_no_great_class_has_many_attributes_that_change(name: str) -> None:
    """Of those that `__init__` sets, the ones that a later method assigns anew."""
    tree = ast.parse((ROOT / GREAT[name]).read_text())
    (owner,) = (one for one in ast.walk(tree) if isinstance(one, ast.ClassDef) and one.name == name)
    changed = {
        one.attr
        for method in owner.body
        if isinstance(method, ast.FunctionDef) and method.name != "__init__"
        for node in ast.walk(method)
        for one in targets(node)
        if receiver(one) == "self"
    }
    assert len(changed) <= FEW, sorted(changed)
