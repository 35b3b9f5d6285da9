"""The NVMe tier of an engine: nameless files, or a durable run's."""

from __future__ import annotations

from collections.abc import Sequence

from infinity.config.settings import Config
from infinity.durable.committer import Durable
from infinity.durable.recovery import check_cut
from infinity.ranks.group import Ranks
from infinity.storage.nvme import NvmeStore
from infinity.storage.stripes import StripedStore, open_nvme

NvmeTier = Durable | NvmeStore | StripedStore
"""What has to be closed in the end."""


def open_tier(
    config: Config, folders: Sequence[str], sharers: int, ranks: Ranks, tile_numel: int
) -> tuple[Durable | None, NvmeStore | StripedStore | None]:
    """Open the NVMe tier that a configuration asks for, durable or not; None for what it does not.

    Raises: ConfigError, CheckpointError, RanksError, or an OSError naming the path.
    """
    if not config.durable_steps:
        return None, open_nvme(folders, config.aio, sharers) if folders else None
    durable = Durable(folders, config.aio, config.durable_steps, wipe=config.wipe, ranks=ranks)
    try:
        for commit in durable.found[:1]:
            check_cut(commit, durable.folders[0].path, tile_numel, config.form)
    except BaseException:
        durable.close()
        raise
    return durable, durable.nvme
