"""torch.distributed.checkpoint (DCP): it reads the files of `infinity.save`, and we read its own.

[Note: DCP's storage]
DCP has a planner, which says of which tensors a rank needs which boxes, and a storage, which reads them. Its
storage for safetensors knows files of whole tensors and of boxes; ours have flat parts of boxes as well. So
this is a storage of its own: it says that each tensor is there whole, and reads the boxes that planners ask
for from whatever pieces there are, each range compared with its hash.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from infinity.checkpoint.deepspeed_files import has_adams
from infinity.checkpoint.hashed_stream import TensorSource
from infinity.checkpoint.inventory import Inventory
from infinity.checkpoint.kinds import CODES_4BIT, KINDS
from infinity.checkpoint.ranges import CHUNK_NUMEL
from infinity.checkpoint.save_load import open_files, read_manifest
from infinity.checkpoint.sharedfolder import check_named
from infinity.engine.engine import engine_of
from infinity.errors import UnsupportedError
from infinity.optim.base import OffloadedOptimizer
from infinity.planning.boxes import Box
from infinity.storage.manifest import (
    MASTER,
    NAME,
    PLAIN,
    CheckpointError,
    Manifest,
    Tensor,
    compare,
    readable,
)
from infinity.tensors import DTYPES, as_bytes, empty, spread_as

_SCALES = KINDS["scale"]


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
    does not match its hash; UnsupportedError for moments that are codes (state_dtype "int8" and
    "int4").
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
        self._check_plain(item.storage_index.fqn for item in plan.items)
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

    def _check_plain(self, names: Iterable[str]) -> None:
        """Check that what is read is numbers.

        Raises: UnsupportedError for moments that are kept as codes in blocks, of which each has a scale.
        """
        for name in names:
            tensor = self._tensors[name]
            if f"{_SCALES}.{tensor.name}" in self._tensors and tensor.kind in KINDS.values():
                raise UnsupportedError(
                    f"{name}: {self._folder} has moments of state_dtype={self._state_dtype()!r}, which are "
                    "codes in blocks, and no numbers: infinity.load reads them; here the weights alone can be"
                    " read"
                )

    def _state_dtype(self) -> str:
        return "int4" if any(one.kind in CODES_4BIT for one in self._tensors.values()) else "int8"

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


# Loading what DCP has written

_FIELDS = {"m": "exp_avg", "v": "exp_avg_sq"}


def load_dcp(
    model: nn.Module,
    optimizer: OffloadedOptimizer | None,
    checkpoint: str | os.PathLike[str],
    *,
    reader: StorageReader | None = None,
) -> None:
    """Load what torch.distributed.checkpoint has saved, of any mesh, into a model built in Init, on any mesh.

    model: gets weights, in fp32 where they were saved so, and buffers: their names in the checkpoint are
    those of the model behind one prefix, as {"model": model.state_dict()} makes it. optimizer: Adam or AdamW:
    gets moments and step counts, which are named as optimizer.state_dict()["state"] or torch's
    get_optimizer_state_dict name them, behind one prefix; None loads weights and buffers alone. Options of
    param groups stay as they are. reader: a storage of DCP for other files than DCP's own.

    All ranks call this. Each reads what it has of one parameter after the other, which is then in memory in
    fp32, with its moments, beside the budget.

    Raises: CheckpointError naming all that does not fit, before anything is changed; FileNotFoundError;
    RanksError if another rank failed, with its reason.
    """
    inventory = Inventory(model, optimizer, by_turns=False)  # DCP knows a box alone
    inventory.check_unmarked("infinity.load_dcp")
    ranks, folder = inventory.ranks, Path(checkpoint)
    check_named(ranks, folder, "infinity.load_dcp")
    if optimizer is not None and not has_adams(optimizer):
        raise CheckpointError(
            f"{folder}: Adam's moments are loaded into AdamW or Adam, and the optimizer is "
            f"{type(optimizer).__name__}: give None, and load the weights alone"
        )
    with ranks.together(f"loading {folder}"):
        with ranks.together(f"comparing {folder} with the model"):
            saved = _SavedByDcp(folder, reader or FileSystemReader(folder))
            weights = saved.weights(inventory)
            moments = saved.moments(inventory) if optimizer is not None else {}
        for name, tensor in inventory.plain.items():
            saved.read({weights[name]: tensor.detach()})
        for parameter in model.parameters():
            if (own := inventory.names.get(id(parameter))) is not None:
                _load_parameter(saved, inventory, parameter, weights[own], moments.get(own))


def _load_parameter(
    saved: _SavedByDcp, inventory: Inventory, parameter: nn.Parameter, weight: str, moments: str | None
) -> None:
    """Read a parameter's master, and its moments, whose names begin with `moments`."""
    engine, optimizer = engine_of(parameter), inventory.optimizer
    if engine is None:
        raise AssertionError(f"{weight}: not offloaded")
    unit, index = engine.parameters.unit_of(parameter)
    shape = unit.layout.segments[index].shape
    keys = {"master": weight}
    if moments is not None and optimizer is not None:
        keys |= {field: f"{moments}.{kind}" for field, kind in _FIELDS.items()}
        optimizer.make_room(engine, parameter)
        optimizer.counts[parameter] = {"step": saved.number(f"{moments}.step")}
    values = {
        field: spread_as(parameter, torch.empty(shape, dtype=torch.float32, device="cpu")) for field in keys
    }
    saved.read({keys[field]: one for field, one in values.items()})
    engine.parameters.write(parameter, values)


class _SavedByDcp:
    """A checkpoint of DCP."""

    def __init__(self, folder: Path, reader: StorageReader) -> None:
        self._folder, self._reader = folder, reader
        reader.reset()
        with readable(f"the metadata of torch.distributed.checkpoint in {folder}"):
            self._metadata = reader.read_metadata()
            reader.set_up_storage_reader(self._metadata, is_coordinator=False)
        self._there = self._metadata.state_dict_metadata

    def weights(self, inventory: Inventory) -> dict[str, str]:
        """Return the names, in the checkpoint, of a model's parameters and buffers.

        Raises: CheckpointError naming what does not fit; UnsupportedError for slices of stacks.
        """
        if inventory.stacks.places:
            raise UnsupportedError(
                f"{next(iter(inventory.stacks.places))} is a slice of a stack, which checkpoints of torch "
                'have whole: experts="whole", in Config; or torch.distributed.checkpoint.load into '
                "model.state_dict(), and model.load_state_dict"
            )
        masters = inventory.masters()
        specs = {name: ("tensor", shape) for name, (_, shape) in (masters | inventory.plains()).items()}
        prefix = self._prefix(specs)
        found = {name: f"{prefix}{name}" for name in specs}
        sizes = {
            name: ("tensor", tuple(of.size))
            for name, key in found.items()
            if isinstance(of := self._there.get(key), TensorStorageMetadata)
        }
        if wrong := compare(sizes, specs, "parameters and buffers"):
            raise CheckpointError("\n  ".join([f"{self._folder} does not fit; nothing was loaded:", *wrong]))
        return found

    def _prefix(self, wanted: Iterable[str], behind: str = "") -> str:
        """Return what stands before most of the wanted names, with `behind` after them."""
        counts = Counter(
            key[: -len(name) - len(behind)]
            for name in wanted
            for key in self._ending.get((name + behind).rpartition(".")[2], ())
            if key.endswith(name + behind)
        )
        return max(counts, key=lambda prefix: (counts[prefix], -len(prefix)), default="")

    @functools.cached_property
    def _ending(self) -> dict[str, list[str]]:
        """All names, by what is behind their last dot."""
        found: dict[str, list[str]] = {}
        for key in self._there:
            found.setdefault(key.rpartition(".")[2], []).append(key)
        return found

    def moments(self, inventory: Inventory) -> dict[str, str]:
        """Return what the names of each parameter's moments begin with, of those that have some.

        Raises: CheckpointError where none has, or their shapes are others.
        """
        names = [name for group in inventory.group_names for name in group]
        numbers = {name: str(number) for number, name in enumerate(names)}
        for said in (dict(zip(names, names, strict=True)), numbers):
            prefix = self._prefix(said.values(), ".exp_avg")
            found = {name: f"{prefix}{one}" for name, one in said.items()}
            found = {name: key for name, key in found.items() if f"{key}.exp_avg" in self._there}
            if found:
                break
        else:
            raise CheckpointError(
                f"{self._folder} has no moments (NAME.exp_avg) of the optimizer's parameters: load it with "
                "optimizer=None"
            )
        masters = inventory.masters()
        for kind in _FIELDS.values():
            sizes = {
                name: ("tensor", tuple(of.size))
                for name, key in found.items()
                if isinstance(of := self._there.get(f"{key}.{kind}"), TensorStorageMetadata)
            }
            wanted = {name: ("tensor", masters[name][1]) for name in found}
            if wrong := compare(sizes, wanted, f"{kind}s"):
                raise CheckpointError(
                    "\n  ".join([f"{self._folder} does not fit; nothing was loaded:", *wrong])
                )
        if missing := [name for name, key in found.items() if f"{key}.step" not in self._there]:
            raise CheckpointError(f"{self._folder} has no step of {', '.join(missing[:20])}")
        return found

    def read(self, state: dict[str, Any]) -> None:
        """Fill what this rank has of some tensors, by name, and replace what is none."""
        planner = DefaultLoadPlanner()
        planner.set_up_planner(state, self._metadata, is_coordinator=False)
        plan = planner.finish_plan(self._reader.prepare_local_plan(planner.create_local_plan()))
        self._reader.read_data(plan, planner).wait()

    def number(self, key: str) -> int:
        """Return a number, which is a tensor or a plain value there."""
        told = self._there[key]
        state: dict[str, Any] = {key: None}
        if isinstance(told, TensorStorageMetadata):
            state[key] = torch.empty(told.size, dtype=told.properties.dtype, device="cpu")
        self.read(state)
        return int(state[key])
