"""Types of command-line options for the benchmarks and `infinity plan`; argparse prints their errors."""

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
        raise argparse.ArgumentTypeError(f"{text!r}: expected a size of at least one byte")
    return nbytes


def positive(text: str) -> int:
    """Return a whole number above 0. Raises: argparse.ArgumentTypeError."""
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, at least 1")
    return int(text)


def rate(text: str) -> float:
    """Return a number above 0, and below 10^12. Raises: argparse.ArgumentTypeError."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e12:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0")
    return number


def batch_of(text: str) -> tuple[int, int]:
    """Return the sequences and tokens of each of "4x1024", or "1024". Raises: argparse.ArgumentTypeError."""
    batch, _, sequence = text.rpartition("x")
    return positive(batch or "1"), positive(sequence)
