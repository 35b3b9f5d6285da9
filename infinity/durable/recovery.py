"""The commits that an earlier process has left in a durable run's folders; nothing is changed here."""

from __future__ import annotations

import json
from collections.abc import Sequence

from infinity.durable.commit import Commit, read_slot
from infinity.durable.folder import RunFolder, wiping
from infinity.errors import ConfigError
from infinity.planning.layout import RecordSchema
from infinity.ranks.group import Ranks
from infinity.storage.manifest import CheckpointError


def find(folders: Sequence[RunFolder]) -> tuple[Commit, ...]:
    """Return the commits in a run's folders, the newest first; none for new folders.

    Raises: ConfigError if the folders are not those of one run; CheckpointError if both commits are damaged.
    """
    first, *others = folders
    slots = first.read_slots()
    read = [read_slot(data, f"{first.path}/commit-{number}") for number, data in enumerate(slots)]
    whole = sorted((one for one in read if one is not None), key=lambda one: -one.sequence)
    if not whole and all(slots):
        raise CheckpointError(
            f"{first.path}: both commits are damaged, so no step can be resumed. {wiping(folders)} removes "
            "them, and the run starts anew."
        )
    found = tuple(one for one in whole if one.run == whole[0].run)
    if found and found[0].paths != len(folders):
        raise ConfigError(
            f"{first.path}: the committed run is striped over {found[0].paths} folders, but nvme names "
            f"{len(folders)}. Name the same folders, in the same order."
        )
    for number, folder in enumerate(folders):
        part = folder.read_part()
        run = found[0].run if found and number else None
        if part is not None and part[0] != run:
            raise ConfigError(
                f"{folder.path} is a further folder of the run in {part[1]}. Name all folders of that run, "
                f"in their order; or remove what the named folders hold: {wiping(folders)}."
            )
    for folder in others:
        if any(folder.read_slots()):
            raise ConfigError(
                f"{folder.path} holds a run of its own. Name it alone, name another folder instead, or "
                f"remove that run: {wiping([folder])}."
            )
    return found


def in_common(found: tuple[Commit, ...], ranks: Ranks) -> tuple[Commit, ...]:
    """Return those of this rank's commits that every rank has, the newest first. All ranks call this, and get
    the same error.

    Raises: ConfigError if the folders are of several runs, or of another number of ranks; CheckpointError if
    the ranks have commits, but none in common.
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
            "Start as many ranks as the run had, each with the folders it had; or remove the run: "
            "infinity.wipe(folder)."
        )
    everywhere = set.intersection(*({tuple(one[3:]) for one in row} for row in rows))
    if not everywhere and any(sequence > 1 for row in rows for _, _, _, sequence, _ in row):
        has = "; ".join(
            f"rank {rank}: {', '.join(f'step {one[4]}' for one in row) or 'none'}"
            for rank, row in enumerate(rows)
        )
        raise CheckpointError(
            f"the ranks have committed no step in common: {has}. Likely cause: a rank has another folder "
            "than before, or a commit in it is damaged. Give each rank its own folder again; or start anew: "
            "infinity.wipe(folder)."
        )
    return tuple(one for one in found if (one.sequence, one.step) in everywhere)


def check_format(commit: Commit, path: str, schema: RecordSchema) -> None:
    """Check that a new process has the record format of the committed run.

    Raises: ConfigError with the settings that work.
    """
    if commit.state_dtype != schema.name:
        raise ConfigError(
            f"dtype, state_dtype, master_dtype: {schema.name!r}; the run in {path} has "
            f"{commit.state_dtype!r}. Set that, name another folder, or remove the run with "
            "infinity.wipe(folder)."
        )
