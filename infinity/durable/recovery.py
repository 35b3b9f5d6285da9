"""What an earlier process has left in the folders of a durable run. Looking changes nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence

from infinity.durable.commit import Commit, read_slot
from infinity.durable.folder import RunFolder, wiping
from infinity.errors import ConfigError
from infinity.planning.budget import totals_in_tiles_of
from infinity.planning.layout import Format
from infinity.ranks.group import Ranks
from infinity.sizes import format_size
from infinity.storage.manifest import CheckpointError


def find(folders: Sequence[RunFolder]) -> tuple[Commit, ...]:
    """Return the commits in the folders of a run, the newest first; none in new ones.

    Raises: ConfigError for folders that are not those of one run; CheckpointError for a damaged one.
    """
    first, *others = folders
    slots = first.read_slots()
    read = [read_slot(data, f"{first.path}/commit-{number}") for number, data in enumerate(slots)]
    whole = sorted((one for one in read if one is not None), key=lambda one: -one.sequence)
    if not whole and all(slots):
        raise CheckpointError(
            f"{first.path}: both commits are damaged, so no step can be found. {wiping(folders)} removes "
            "them, and the run starts anew."
        )
    found = tuple(one for one in whole if one.run == whole[0].run)
    if found and found[0].paths != len(folders):
        raise ConfigError(
            f"{first.path}: the committed run lies in {found[0].paths} folders, and nvme names "
            f"{len(folders)}. Name the same ones, in the same order."
        )
    for number, folder in enumerate(folders):
        part = folder.read_part()
        run = found[0].run if found and number else None
        if part is not None and part[0] != run:
            raise ConfigError(
                f"{folder.path} is a further folder of the run in {part[1]}. Name that run's folders, all of "
                f"them, in their order; or remove what is in those that are named: {wiping(folders)}."
            )
    for folder in others:
        if any(folder.read_slots()):
            raise ConfigError(
                f"{folder.path} holds a run of its own. Name it alone, or another folder in its place; or "
                f"remove that run: {wiping([folder])}."
            )
    return found


def in_common(found: tuple[Commit, ...], ranks: Ranks) -> tuple[Commit, ...]:
    """Return those of this rank's commits that every rank has, the newest first. Every rank calls it, and on
    all of them it raises the same.

    Raises: ConfigError for the folders of several runs, or of another number of ranks; CheckpointError where
    some ranks have commits and others not those.
    """
    mine = [[one.run, one.rank, one.ranks, one.sequence, one.step] for one in found]
    rows = [json.loads(row) for row in ranks.each(json.dumps(mine).encode(), "compare commits")]
    wrong = [
        f"rank {rank}: rank {of} of {number} of run {run}, step {step}"
        for rank, row in enumerate(rows)
        for run, of, number, _, step in row
        if (of, number) != (rank, ranks.size) or run != next(row for row in rows if row)[0][0]
    ]
    if wrong:
        raise ConfigError(
            f"the durable runs in the folders of {ranks.size} ranks do not fit together: {'; '.join(wrong)}. "
            "Start as many ranks as the run had, with the same folders for each; or remove it: "
            "infinity.wipe(folder)."
        )
    everywhere = set.intersection(*({tuple(one[3:]) for one in row} for row in rows))
    if not everywhere and any(sequence > 1 for row in rows for _, _, _, sequence, _ in row):
        has = "; ".join(
            f"rank {rank}: {', '.join(f'step {one[4]}' for one in row) or 'none'}"
            for rank, row in enumerate(rows)
        )
        raise CheckpointError(
            f"the ranks have committed no step in common: {has}. Likely cause: a rank's folder is another "
            "than it was, or a commit in it is damaged. Give each its own again; or start anew: "
            "infinity.wipe(folder)."
        )
    return tuple(one for one in found if (one.sequence, one.step) in everywhere)


def check_cut(commit: Commit, path: str, tile_numel: int, form: Format) -> None:
    """See that a new process has the records of the committed run, and cuts them as it did.

    Raises: ConfigError with what would do.
    """
    if commit.state_dtype != form.name:
        raise ConfigError(
            f"dtype, state_dtype: {form.name!r}; the run in {path} has {commit.state_dtype!r}. Give that, "
            "another folder, or infinity.wipe(folder)."
        )
    if commit.tile_numel != tile_numel:
        least, most = totals_in_tiles_of(commit.tile_numel, form)
        upto = "or more" if most is None else f"to {format_size(most)}"
        raise ConfigError(
            f"host_memory: the run in {path} has records in tiles of {commit.tile_numel} elements, and this "
            f"host_memory makes tiles of {tile_numel}. Give {format_size(least)} {upto} for each rank, "
            "another folder, or infinity.wipe(folder), which loses the run."
        )
