"""The NVMe tier of an engine: unnamed files, or the files of a durable run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from infinity.config.settings import Config
from infinity.durable.committer import Durable
from infinity.durable.recovery import check_format
from infinity.planning.budget import Budget
from infinity.ranks.group import Ranks
from infinity.storage.nvme import NvmeStore
from infinity.storage.stripes import StripedStore, open_nvme

NvmeTier = Durable | NvmeStore | StripedStore
"""What an engine closes at its end."""


def open_nvme_tier(
    config: Config,
    folders: Sequence[str],
    sharers: int,
    ranks: Ranks,
    divide: Callable[..., Budget],
) -> tuple[Durable | None, NvmeStore | StripedStore | None, Budget]:
    """Open the NVMe tier of a configuration: (its commits, its store), None for each that it does not have,
    and the budget.

    divide: makes the budget, in tiles of `tile_numel` elements. Those of a run that goes on are of the size
    that they had, whatever another budget would make of them.

    Raises: ConfigError, HostMemoryError, CheckpointError, RanksError, or an OSError naming the path.
    """
    budget = divide()
    if not config.durable_steps:
        return None, open_nvme(folders, config.engine_kind, sharers) if folders else None, budget
    durable = Durable(folders, config.engine_kind, config.durable_steps, wipe=config.wipe, ranks=ranks)
    try:
        for commit in durable.found[:1]:
            check_format(commit, durable.folders[0].path, config.schema)
            budget = divide(tile_numel=commit.tile_numel)
    except BaseException:
        durable.close()
        raise
    return durable, durable.nvme, budget
