"""Removing a durable run: what a user asks for, and no training does by itself."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from infinity.config.settings import Config
from infinity.durable.folder import RunFolder, ranks_in
from infinity.errors import ConfigError


def wipe(folder: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> int:
    """Remove the durable run in a folder, all its ranks' files, and return the bytes that these took.

    folder: what `nvme` names in the run's Config: one folder, or a list of them, all of which are checked
    before anything is removed. What else lies there stays. An empty folder, or one that was wiped before, has
    nothing to remove. Of several ranks, one on each machine calls it, before any of them enters Init.
    What the blocks held is not overwritten: a disk that must not keep it needs encryption (dm-crypt) or
    discard.

    Raises: ConfigError, with nothing removed, for a folder that is not there, that holds no run and is not
    empty, in which another user could write, or whose run is under way.
    """
    with contextlib.ExitStack() as opened:
        try:
            folders = _locked(Config(nvme=folder, durable=True).nvme_folders, opened)  # type: ignore[arg-type]
            nbytes = sum(one.nbytes for one in folders)
        except ConfigError as error:
            why = str(error).rstrip(".")
            raise ConfigError(f"wipe({folder!r}): {why}. Nothing was removed.") from None
        for one in folders:
            one.wipe()
    return nbytes


def _locked(bases: Sequence[str], opened: contextlib.ExitStack) -> list[RunFolder]:
    """Open the folders of every rank's run under these paths; no process can begin one there meanwhile."""
    folders = []
    for base in bases:
        for rank in ranks_in(base):
            folders.append(RunFolder(base, rank, create=False, otherwise="end that process"))
            opened.callback(folders[-1].close)
    return folders
