"""How the weights of a record that lie in a checkpoint's files come to memory: see [Note: windows] in
storage/checkpoint_store.py.
"""

from __future__ import annotations

from infinity.records.record import Record
from infinity.storage.checkpoint_store import CheckpointStore

_ALIGNED = 8
"""Bytes: on so many tensors in safetensors files begin, and those that torch maps."""


def skew_nbytes(record: Record) -> int:
    """Return how many bytes behind the begin of a block memory for `hi` is to begin, so that most of it is
    read straight there; 0 where that makes no difference.
    """
    extent = record.in_files
    if extent is None or not isinstance(extent.store, CheckpointStore):
        return 0
    skew = extent.store.skew_nbytes(extent)
    return 0 if skew % _ALIGNED else skew


def comes_straight(record: Record, address: int) -> bool:
    """Whether `hi`, which lies in files, is read straight to memory that begins at `address`."""
    extent = record.in_files
    return (
        extent is not None
        and isinstance(extent.store, CheckpointStore)
        and extent.store.comes_straight(extent, address)
    )


def tiles_read_at_once(record: Record) -> int | None:
    """Return how many tiles of what is packed in files fill a slot as they are there; all of those that are
    transposed there. None where nothing is packed.
    """
    packed = record.packed_nbytes
    if packed is None or record.is_transposed:
        return None if packed is None else -(-record.shard.numel // record.tile_numel)
    return max(1, record.schema.slot_nbytes * record.shard.numel // packed)
