"""Sizes in bytes: parsing, formatting, and rounding to whole blocks."""

from __future__ import annotations

import re

BLOCK = 4096
"""Bytes. Every extent, transfer and slot is a multiple of it, as O_DIRECT needs on every drive."""

DEVICE_BLOCK = 512
"""Bytes. What torch's allocators round a block of device memory up to."""

_UNITS = {
    "": 1,
    "b": 1,
    **{
        f"{letter}{suffix}": 1024**power
        for power, letter in enumerate("kmgt", 1)
        for suffix in ("", "i", "ib")
    },
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_size(size: int | str, what: str = "size") -> int:
    """Return `size` in bytes; text may carry a unit: "512MiB", "4GiB", "1.5 GB" (decimal), "64k" (binary).

    Raises: ValueError naming `what`, for text that is not a size and for negative numbers.
    """
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise ValueError(f'{what}: expected bytes as int or a text like "4GiB", got {size!r}')  # noqa: TRY004 - one error for all
    if isinstance(size, int):
        nbytes = size
    else:
        match = _SIZE.fullmatch(size)
        if match is None or match[2].lower() not in _UNITS:
            raise ValueError(
                f'{what}: {size!r} is not a size; write bytes as int or a text like "512MiB" or "4GiB"'
            )
        nbytes = int(float(match[1]) * _UNITS[match[2].lower()])
    if nbytes < 0:
        raise ValueError(f"{what}: {size!r} is negative")
    return nbytes


def format_size(nbytes: float) -> str:
    """Return `nbytes` as text with a binary unit: "512.0 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `number`."""
    return -(-number // multiple) * multiple
