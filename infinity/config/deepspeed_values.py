"""What the keys of DeepSpeed's configuration may hold. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_SWITCHED = {
    **dict.fromkeys((1, "1", "true", "t", "yes", "y", "on"), True),
    **dict.fromkeys((0, "0", "false", "f", "no", "n", "off"), False),
}


def switched(value: Any) -> Any:
    """Return the bool that DeepSpeed (pydantic) takes a value for, of a switch; other values as they are."""
    known = value.lower() if isinstance(value, str) else value
    return _SWITCHED.get(known, value) if isinstance(known, str | int | float) else value


TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "switch": ("true or false", lambda value: isinstance(value, bool)),
    "count": (
        "a whole number above 0",
        lambda value: _is_number(value) and value > 0 == value % 1,
    ),
    "size": ("a whole number, 0 or more", lambda value: _is_number(value) and value >= 0 == value % 1),
    "number": ("a number, 0 or more", lambda value: _is_number(value) and 0 <= value < float("inf")),
    "text": ("text", lambda value: isinstance(value, str)),
    "device": ('"none", "cpu" or "nvme"', lambda value: value in ("none", "cpu", "nvme")),
    "betas": (
        "two numbers from 0 up to 1",
        lambda value: (
            isinstance(value, list | tuple)
            and len(value) == 2
            and all(_is_number(one) and 0 <= one < 1 for one in value)
        ),
    ),
    "anything": ("anything", lambda _: True),
}
"""What a key may take: (said in words, test). null is left to each key's default, whatever its type."""
