"""Which ranks Accelerate's loaders share batches among, where some ranks are given the same."""

from __future__ import annotations

from typing import Any


def share_batches(loader: Any, ranks: int, rank: int) -> bool:
    """Have a loader of Accelerate share its batches among `ranks`, of which this process is, or is beside,
    the one numbered `rank`. Return False for a loader that does not share by a sampler of Accelerate's.
    """
    from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard

    kinds = (BatchSamplerShard, IterableDatasetShard)
    sharers = [getattr(loader, name, None) for name in ("batch_sampler", "sampler", "dataset")]
    found = [one for one in sharers if isinstance(one, kinds)]
    for one in found:
        one.num_processes, one.process_index = ranks, rank
    return bool(found)
