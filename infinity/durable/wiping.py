"""Removing a durable run, which only the user asks for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from infinity.config.settings import Config
from infinity.durable.folder import RunFolder, ranks_in
from infinity.errors import ConfigError


def wipe(folder: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> int:
    """Remove the durable run in a folder, all its ranks' files, and return the bytes that they took.

    folder: `nvme` of the run's Config, one folder or a list; all are checked before anything is removed.
    Other files there stay. An empty folder, or one that was wiped before, returns 0. With several ranks, one
    on each machine calls this, before any rank enters Init. The blocks are not overwritten: if the disk must
    not keep their contents, use encryption (dm-crypt) or discard.

    Raises: ConfigError, with nothing removed, for a folder that does not exist, that holds other files and no
    run, in which another user could write, or whose run another process has open.
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
    """Open and lock the run folders of all ranks under these paths, so that no process can use them."""
    folders = []
    for base in bases:
        for rank in ranks_in(base):
            folders.append(RunFolder(base, rank, create=False, otherwise="end that process"))
            opened.callback(folders[-1].close)
    return folders
