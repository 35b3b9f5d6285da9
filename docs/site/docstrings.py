"""For mkdocstrings: this repository's docstrings in the sections that Google's style has.

Here a paragraph such as `name: what it is` explains a parameter or a field, and one that begins with
`Raises:` the errors. Google's style has headed, indented sections for both.
"""

import re
from typing import Any

from griffe import Class, Extension, Function, Object

ITEM = re.compile(r"(?:^|(?<=[.;)] ))(\w+(?:, \w+)*): ")


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


def items(paragraph: str, known: set[str]) -> list[tuple[str, str]]:
    """Return (name, explanation) of all that a paragraph explains, if it begins with a name."""
    flat = " ".join(paragraph.split())
    heads = [match for match in ITEM.finditer(flat) if set(match[1].split(", ")) <= known]
    if not heads or heads[0].start() > 0:
        return []
    ends = [match.start() for match in heads[1:]] + [len(flat)]
    return [
        (name, flat[match.end() : end].strip())
        for match, end in zip(heads, ends, strict=True)
        for name in match[1].split(", ")
    ]


def paragraphs(text: str, known: set[str]) -> list[str]:
    """Split a docstring at blank lines, and before lines that explain something or tell of errors."""
    found = [""]
    for line in text.split("\n"):
        if not line.strip() or line.startswith("Raises: ") or items(line, known):
            found.append(line)
        else:
            found[-1] += f"\n{line}"
    return [one.strip("\n") for one in found if one.strip()]


def sections(text: str, known: set[str]) -> str:
    """Return a docstring with what it says of `known` names, and of errors, in sections."""
    prose, explained, raises = [], [], ""
    for paragraph in paragraphs(text, known):
        if paragraph.startswith("Raises: "):
            raises = "**Raises:** " + " ".join(paragraph.removeprefix("Raises: ").split())
        elif found := items(paragraph, known):
            explained += found
        elif paragraph.strip() != "::":
            prose.append(paragraph)
    if explained:
        prose.append("Args:\n" + "\n".join(f"    {name}: {what}" for name, what in explained))
    return "\n\n".join([*prose, *filter(None, [raises])])


class Sections(Extension):
    """Rewrites docstrings when they have been read."""

    def on_function_instance(self, *, func: Function, **_: Any) -> None:
        """Put a function's docstring into sections; a constructor's says nothing to those who call it."""
        if func.name == "__init__":
            func.docstring = None
        if func.docstring is not None:
            func.docstring.value = sections(func.docstring.value, names(func))

    def on_class_members(self, *, cls: Class, **_: Any) -> None:
        """Put a class's docstring into sections, once its fields are known."""
        if cls.docstring is not None:
            cls.docstring.value = sections(cls.docstring.value, names(cls))
