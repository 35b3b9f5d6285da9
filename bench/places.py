"""Folders that measurements are asked to work in: whether they are there, and which of them share a disk."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from infinity.errors import ConfigError


def check_folder(folder: Path | str, option: str = "--nvme") -> None:
    """Refuse what is no folder to write in. A missing one is not made: with a slip in its name, or a drive
    that is not mounted, another disk than the one that was meant would be measured.

    Raises: ConfigError naming the option, with what is wrong and what to do.
    """
    path = Path(folder)
    if not path.exists():
        raise ConfigError(
            f"{option} {folder}: there is no such folder. Create it (mkdir -p) on the drive to measure."
        )
    if not path.is_dir():
        raise ConfigError(f"{option} {folder}: that is a file. Name a folder on the drive to measure.")
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{option} {folder}: user {os.geteuid()} may not write there. Choose another folder, or chown it."
        )


def check_apart(folders: Sequence[str], option: str = "--nvme") -> None:
    """Refuse a folder that is named twice, by whatever path. Raises: ConfigError naming both."""
    named: dict[tuple[int, int], str] = {}
    for folder in folders:
        status = os.stat(folder)
        place = status.st_dev, status.st_ino
        if place in named:
            raise ConfigError(
                f"{option} {named[place]} and {option} {folder} are one folder: name each folder once."
            )
        named[place] = folder


def shared(folders: Sequence[str]) -> Iterator[str]:
    """Yield a line about each filesystem that holds several of the folders."""
    on: dict[int, list[str]] = {}
    for folder in folders:
        on.setdefault(os.stat(folder).st_dev, []).append(folder)
    for together in on.values():
        if len(together) > 1:
            yield f"{' and '.join(together)} lie on one filesystem: that is one disk, not several"
