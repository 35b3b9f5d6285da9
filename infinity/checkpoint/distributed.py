"""torch.distributed.checkpoint (DCP) on the files of `infinity.save`: a storage that its `load` reads from.

[Note: DCP's storage]
DCP has a planner, which says of which tensors a rank needs which boxes, and a storage, which reads them. Its
storage for safetensors knows files of whole tensors and of boxes; ours have flat parts of boxes as well. So
this is a storage of its own: it says that each tensor is there whole, and reads the boxes that planners ask
for from whatever pieces there are, each range compared with its hash.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, Metadata, StorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.futures import Future

from infinity.checkpoint.hashed_stream import TensorSource
from infinity.checkpoint.ranges import CHUNK_NUMEL
from infinity.checkpoint.save_load import open_files, read_manifest
from infinity.planning.boxes import Box
from infinity.storage.manifest import MASTER, NAME, PLAIN, Manifest, Tensor, readable
from infinity.tensors import DTYPES, as_bytes, empty


def name_in_dcp(tensor: Tensor) -> str:
    """Return a tensor's name for DCP: a weight's own, and "exp_avg.NAME" for a moment."""
    return tensor.name if tensor.kind in (MASTER, PLAIN) else f"{tensor.kind}.{tensor.name}"


class CheckpointReader(StorageReader):
    """Reads what `infinity.save` has written, on whatever ranks and mesh, for torch.distributed.checkpoint.

    ::

        state = model.state_dict()  # of any model: tensors, or DTensors of any mesh
        torch.distributed.checkpoint.load(state, storage_reader=infinity.CheckpointReader("step-1000"))

    Weights are the fp32 masters, under the names that they have in the model, and are rounded to the type of
    what they are loaded into; moments are "exp_avg.NAME" and "exp_avg_sq.NAME".

    Raises, while it loads: CheckpointError and FileNotFoundError as `load`; CorruptionError for a range that
    does not match its hash.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Read from this folder."""
        self._folder = Path(folder)
        self._tensors: dict[str, Tensor] = {}
        self._manifest: Manifest | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """DCP begins to read, from another folder where it names one."""
        if checkpoint_id is not None:
            self._folder = Path(checkpoint_id)

    def read_metadata(self, *_args: Any, **_options: Any) -> Metadata:
        """Return the shape and type of each tensor, as one chunk."""
        self._manifest = read_manifest(self._folder)
        kept = [one for one in self._manifest.tensors if one.kind != "extra"]
        self._tensors = {name_in_dcp(one): one for one in kept}
        return Metadata({name: _told(one) for name, one in self._tensors.items()})

    def set_up_storage_reader(self, *_args: Any, **_options: Any) -> None:
        """Nothing is kept open between two loads."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan names, piece by piece, into the planner's tensors."""
        if self._manifest is None:
            raise AssertionError("read_data before read_metadata")
        with contextlib.ExitStack() as stack:
            with readable(f"{self._folder / NAME}"):
                files = open_files(self._manifest, self._folder, stack)
            for item in plan.items:
                tensor = self._tensors[item.storage_index.fqn]
                box = Box(tuple(item.storage_offsets), tuple(item.lengths))
                target = planner.resolve_tensor(item).detach()
                _fill(target, tensor, TensorSource(tensor, files, box=box), box)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether there is a checkpoint of ours."""
        return (Path(checkpoint_id) / NAME).is_file()


def _told(tensor: Tensor) -> TensorStorageMetadata:
    whole = ChunkStorageMetadata(torch.Size([0] * len(tensor.shape)), torch.Size(tensor.shape))
    properties = TensorProperties(DTYPES[tensor.dtype])
    return TensorStorageMetadata(properties, torch.Size(tensor.shape), [whole])


def _fill(target: torch.Tensor, tensor: Tensor, source: TensorSource, box: Box) -> None:
    """Copy a box into a tensor of its shape, a few megabytes at a time."""
    for start in range(0, box.numel, CHUNK_NUMEL):
        for part in box.cut(start, min(start + CHUNK_NUMEL, box.numel)):
            values = empty(tensor.dtype, part.shape)
            source.read(as_bytes(values))
            at = zip(part.first, box.first, part.shape, strict=True)
            target[tuple(slice(mine - first, mine - first + size) for mine, first, size in at)].copy_(values)
