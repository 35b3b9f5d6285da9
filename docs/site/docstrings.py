"""For mkdocstrings: this repository's docstrings in the sections that Google's style has.

Here a paragraph such as `name: what it is` explains a parameter or a field, and one that begins with
`Raises:` the errors. Google's style has headed, indented sections for both.
"""

import re
from typing import Any

from griffe import Class, Extension, Function, Object

ITEM = re.compile(r"(\w+): (.+)")


def names(thing: Object) -> set[str]:
    """Return what a docstring may explain: parameters, and a class's fields."""
    found: set[str] = set()
    if isinstance(thing, Function):
        found |= {parameter.name for parameter in thing.parameters}
    if isinstance(thing, Class):
        found |= set(thing.members)
        if "__init__" in thing.members and isinstance(thing.members["__init__"], Function):
            found |= names(thing.members["__init__"])
    return found


def sections(text: str, known: set[str]) -> str:
    """Return a docstring with what it says of `known` names, and of errors, in sections."""
    prose: list[str] = []
    items: list[list[str]] = []
    within = False
    for line in text.split("\n"):
        match = ITEM.fullmatch(line)
        if match and match[1] in known:
            items.append([line])
            within = True
        elif within and line.strip() and not line.startswith(("Raises:", "::")):
            items[-1].append(line.strip())
        else:
            within = False
            prose.append(line)
    told = "\n".join(prose).strip()
    raises = re.search(r"(?m)^Raises: (.+(?:\n.+)*)", told)
    if raises:
        told = (told[: raises.start()] + told[raises.end() :]).strip()
    told = re.sub(r"(?m)^::\n", "", told)
    if items:
        told += "\n\nArgs:\n" + "\n".join("    " + "\n        ".join(item) for item in items)
    if raises:
        told += "\n\n**Raises:** " + raises[1].replace("\n", " ")
    return told


class Sections(Extension):
    """Rewrites docstrings when they have been read."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Put one docstring into sections."""
        if obj.docstring is not None:
            obj.docstring.value = sections(obj.docstring.value, names(obj))
