"""What the keys of DeepSpeed's configuration may hold. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

AUTO = "auto"
"""What a key holds that is to follow from others."""


def is_number(value: Any) -> bool:
    """Whether a value of JSON is a number; true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def whole(value: Any) -> Any:
    """Return 1e4, a float in JSON, as a whole number."""
    return int(value) if isinstance(value, float) and value % 1 == 0 else value


_SWITCHED = {
    **dict.fromkeys((1, "1", "true", "t", "yes", "y", "on"), True),
    **dict.fromkeys((0, "0", "false", "f", "no", "n", "off"), False),
}


def switched(value: Any) -> Any:
    """Return the bool that DeepSpeed (pydantic) reads from a switch's value; other values unchanged."""
    known = value.lower() if isinstance(value, str) else value
    return _SWITCHED.get(known, value) if isinstance(known, str | int | float) else value


TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "switch": ("true or false", lambda value: isinstance(value, bool)),
    "count": ("a whole number above 0", lambda value: is_number(value) and value > 0 == value % 1),
    "size": ("a whole number, 0 or more", lambda value: is_number(value) and value >= 0 == value % 1),
    "number": ("a number, 0 or more", lambda value: is_number(value) and 0 <= value < float("inf")),
    "share": ("a number from 0 to 1", lambda value: is_number(value) and 0 <= value <= 1),
    "text": ("text", lambda value: isinstance(value, str)),
    "device": ('"none", "cpu" or "nvme"', lambda value: value in ("none", "cpu", "nvme")),
    "betas": (
        "two numbers from 0 up to 1",
        lambda value: (
            isinstance(value, list | tuple)
            and len(value) == 2
            and all(is_number(one) and 0 <= one < 1 for one in value)
        ),
    ),
    "anything": ("anything", lambda _: True),
}
"""Name -> what a key may hold: in words, and as a test. null stands for each key's default."""
