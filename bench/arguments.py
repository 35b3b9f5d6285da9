"""What options of the benchmarks and of `infinity plan` may be: argparse prints why others are refused."""

from __future__ import annotations

import argparse

from infinity.sizes import parse_size


def size_of(text: str) -> int:
    """Return the bytes of a text like "4MiB". Raises: argparse.ArgumentTypeError."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def some_size(text: str) -> int:
    """Return a size above 0. Raises: argparse.ArgumentTypeError."""
    nbytes = size_of(text)
    if not nbytes:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a byte at least")
    return nbytes


def positive(text: str) -> int:
    """Return a whole number above 0. Raises: argparse.ArgumentTypeError."""
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, at least 1")
    return int(text)
