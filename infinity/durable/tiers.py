"""The NVMe tier of an engine: unnamed files, or the files of a durable run."""

from __future__ import annotations

from collections.abc import Sequence

from infinity.config.settings import Config
from infinity.durable.committer import Durable
from infinity.durable.recovery import check_cut
from infinity.ranks.group import Ranks
from infinity.storage.nvme import NvmeStore
from infinity.storage.stripes import StripedStore, open_nvme

NvmeTier = Durable | NvmeStore | StripedStore
"""What an engine closes at its end."""


def open_nvme_tier(
    config: Config, folders: Sequence[str], sharers: int, ranks: Ranks, tile_numel: int
) -> tuple[Durable | None, NvmeStore | StripedStore | None]:
    """Open the NVMe tier of a configuration: (its commits, its store), None for each that it does not have.

    Raises: ConfigError, CheckpointError, RanksError, or an OSError naming the path.
    """
    if not config.durable_steps:
        return None, open_nvme(folders, config.engine_kind, sharers) if folders else None
    durable = Durable(folders, config.engine_kind, config.durable_steps, wipe=config.wipe, ranks=ranks)
    try:
        for commit in durable.found[:1]:
            check_cut(commit, durable.folders[0].path, tile_numel, config.schema)
    except BaseException:
        durable.close()
        raise
    return durable, durable.nvme
