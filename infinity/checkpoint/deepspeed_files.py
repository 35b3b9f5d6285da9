"""Loading weights and optimizer state from a checkpoint of DeepSpeed's ZeRO stage 3.

[Note: DeepSpeed's files]
There is a folder per tag; the file `latest` names one. Each rank has two files in it.
zero_pp_rank_R_mp_rank_00_model_states.pt has buffers, names and shapes of parameters by param group, and the
rank's part of frozen ones; ..._optim_states.pt has fp32 masters as flat sub-groups, and their moments. Laid
end to end, the sub-groups hold the rank's ceil(numel / ranks) elements of each parameter, in the order of the
shapes; the last rank's part is padded. (After zero_to_fp32.py in DeepSpeed, by its authors.)

Files are mapped, not read, and unpickled with weights_only: no code of DeepSpeed's classes runs, their
objects become `Ignored`.
"""

from __future__ import annotations

import itertools
import math
import os
import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.checkpoint.inventory import Inventory
from infinity.engine.engine import engine_of
from infinity.optim.base import OffloadedOptimizer
from infinity.storage.manifest import MASTER, CheckpointError, TensorSpec, compare
from infinity.tensors import name_of_dtype

_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_00_(model|optim)_states\.pt$")


class Ignored:
    """A stand-in for objects of DeepSpeed's classes, which hold no part of the model."""

    def __init__(self, *_arguments: object) -> None:
        """Drop the arguments."""

    def __setstate__(self, _state: object) -> None:
        """Drop the state."""


_IGNORED = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    # Python 3.11.0 to 3.11.3 pickle a member of an enum as getattr(class, name): ignored as the class is
    "builtins.getattr",
    "__builtin__.getattr",  # its name in pickle's protocol 2
)


def load_deepspeed(
    model: nn.Module,
    optimizer: OffloadedOptimizer | None,
    folder: str | os.PathLike[str],
    tag: str | None = None,
) -> None:
    """Load a checkpoint of DeepSpeed's ZeRO stage 3, of any number of ranks, into a model built in Init.

    optimizer: gets moments and step counts as well; None loads weights and buffers alone. Param groups keep
    their present options. tag: of the checkpoint; None for the one that the file `latest` names.

    All ranks call this; each reads the parts that it holds.

    Raises: CheckpointError naming all that does not fit, before anything is changed, and for files that
    cannot be read; FileNotFoundError; RanksError if another rank failed, with its reason.
    """
    folder = Path(folder)
    inventory = Inventory(model, optimizer)
    ranks = inventory.engine.ranks
    inventory.engine.stages.mesh.check_whole(
        "a checkpoint of DeepSpeed",
        "Load it in one process, or on ranks that share data, and infinity.save it: that loads on a mesh",
    )
    with ranks.together(f"loading {folder}"):
        with ranks.together(f"comparing {folder} with the model"):
            saved = _TagFiles(folder / (tag or (folder / "latest").read_text().strip()))
            plains, moments = _check_fits(saved, inventory)
        _fill(saved, moments, inventory, model)
        with torch.no_grad():
            for name in plains:
                inventory.plain[name].copy_(saved.module[name])


def _check_fits(saved: _TagFiles, inventory: Inventory) -> tuple[Iterable[str], _Moments | None]:
    """Check that checkpoint and model fit; return the names of buffers, and the moments."""
    shared = saved.shared
    plains = {name: spec for name, spec in inventory.plains().items() if name not in shared}
    found = compare(saved.specs(), inventory.stacks_of_weights.specs(inventory.masters()), "parameters")
    found += compare(saved.buffers(), plains, "buffers")
    optimizer = inventory.optimizer
    moments = saved.moments() if optimizer is not None else None
    if optimizer is not None and moments is not None and not has_adams(optimizer):
        kind = type(optimizer).__name__
        found.append(f"it has Adam's moments, but the optimizer is {kind}; give AdamW or Adam, or None")
    if found:
        raise CheckpointError("\n  ".join([f"{saved.folder} does not fit; nothing was loaded:", *found]))
    return plains, moments


def has_adams(optimizer: OffloadedOptimizer) -> bool:
    """Whether an optimizer keeps Adam's moments of all its parameters."""
    return all({"m", "v"} <= set(optimizer.recipe_in(group).state) for group in optimizer.param_groups)


def _fill(saved: _TagFiles, moments: _Moments | None, inventory: Inventory, model: nn.Module) -> None:
    """Write this rank's parts of masters and moments into the records."""
    optimizer, held = inventory.optimizer, inventory.held()
    ours = {id(one) for group in inventory.groups for one in group["params"]}
    for parameter in model.parameters():
        engine, name = engine_of(parameter), inventory.names.get(id(parameter))
        if engine is None or name is None:
            continue
        first = inventory.stacks_of_weights.first(name)
        start, stop = (first + at for at in held[MASTER, name])
        name = inventory.stacks_of_weights.name(name)
        values = {"master": saved.master(name, start, stop)}
        if optimizer is not None and moments is not None and name in saved.trained and id(parameter) in ours:
            for field, key in (("m", "exp_avg"), ("v", "exp_avg_sq")):
                values[field] = saved.part(name, moments[key], start, stop)
            optimizer.make_room(engine, parameter)
            optimizer.counts[parameter] = {"step": saved.step(name)}
        engine.parameters.write_part(parameter, values)


_Moments = dict[str, list[list[torch.Tensor]]]
"""By DeepSpeed's names: each rank's moments by sub-group."""


class _TagFiles:
    """The files of one tag."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        files: dict[str, dict[int, Path]] = {"model": {}, "optim": {}}
        for path in sorted(folder.iterdir()):
            match = _RANK.search(path.name)
            if match is not None:
                files[match[2]][int(match[1])] = path
        ranks = len(files["optim"])
        if not ranks or any(sorted(of_kind) != list(range(ranks)) for of_kind in files.values()):
            names = {kind: sorted(of_kind) for kind, of_kind in files.items()}
            raise CheckpointError(
                f"{folder}: not a complete checkpoint of ZeRO stage 3, which has two files a rank: found "
                f"those of ranks {names['model']} for the model, {names['optim']} for the optimizer"
            )
        try:
            self._models = [_unpickled(files["model"][rank]) for rank in range(ranks)]
            self._states = [_unpickled(files["optim"][rank])["optimizer_state_dict"] for rank in range(ranks)]
            self.module: Mapping[str, torch.Tensor] = self._models[0]["module"]
            self.shared: Mapping[str, str] = self._models[0]["shared_params"]
            self.trained: dict[str, torch.Size] = {
                name: shape for group in self._models[0]["param_shapes"] for name, shape in group.items()
            }
            self.frozen: Mapping[str, torch.Size] = self._models[0].get("frozen_param_shapes") or {}
            self._masters: list[Sequence[torch.Tensor]] = [one["fp32_flat_groups"] for one in self._states]
            partitions = self._states[0]["partition_count"]
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"{folder}: not a checkpoint of ZeRO stage 3: {error!r} is missing"
            ) from error
        if partitions != ranks:
            raise CheckpointError(f"{folder}: saved by {partitions} ranks, but there are files of {ranks}")
        self._starts = dict(
            zip(
                self.trained,
                itertools.accumulate((self._numel(shape) for shape in self.trained.values()), initial=0),
                strict=False,
            )
        )

    def _numel(self, shape: torch.Size) -> int:
        """Return the number of a parameter's elements that each rank has."""
        return math.ceil(shape.numel() / len(self._states))

    def specs(self) -> dict[str, TensorSpec]:
        """Return dtype and shape of all parameters' masters."""
        return {name: ("F32", tuple(shape)) for name, shape in {**self.trained, **self.frozen}.items()}

    def buffers(self) -> dict[str, TensorSpec]:
        """Return dtype and shape of all buffers."""
        kept = {name: self.module[name] for name in self._models[0]["buffer_names"]}
        return {name: (name_of_dtype(one, name), tuple(one.shape)) for name, one in kept.items()}

    def moments(self) -> _Moments | None:
        """Return each rank's moments by sub-group; None if none were saved.

        Raises: CheckpointError if they do not match the masters, as when DeepSpeed kept them on NVMe.
        """
        states = [one["optimizer_state_dict"]["state"] for one in self._states]
        if not any(states):
            return None
        found: _Moments = {}
        for key in ("exp_avg", "exp_avg_sq"):
            found[key] = []
            for rank, (state, masters) in enumerate(zip(states, self._masters, strict=True)):
                parts = [state.get(index, {}).get(key) for index in range(len(masters))]
                sizes = [0 if part is None else part.numel() for part in parts]
                expected = [master.numel() for master in masters]
                if sizes != expected:
                    raise CheckpointError(
                        f"{self.folder}: {key} of rank {rank} has sub-groups of {sizes} elements, expected "
                        f"{expected}. DeepSpeed does not save moments that it keeps on NVMe. Load the "
                        "weights alone: optimizer=None."
                    )
                found[key].append(parts)
        return found

    def step(self, name: str) -> int:
        """Return the number of updates of a parameter."""
        end = self._starts[name] + 1
        sizes = itertools.accumulate(master.numel() for master in self._masters[0])
        index = next(number for number, size in enumerate(sizes) if size >= end)
        inner = self._states[0]["optimizer_state_dict"]
        step = inner["state"][index].get("step", self._models[0]["global_steps"])
        return int(step)

    def master(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return elements [start, stop) of a parameter in fp32: of its master, or of a frozen parameter."""
        if name in self.trained:
            return self.part(name, self._masters, start, stop)
        parts = [model["frozen_param_fragments"][name] for model in self._models]
        return _cut(parts, start, stop).float()

    def part(
        self, name: str, groups: Sequence[Sequence[torch.Tensor]], start: int, stop: int
    ) -> torch.Tensor:
        """Return elements [start, stop) of a trained parameter from all ranks' flat sub-groups."""
        shape = self.trained[name]
        first, numel = self._starts[name], self._numel(shape)
        parts = []
        for of_rank in groups:
            at = 0
            for group in of_rank:
                begin, end = max(first - at, 0), min(first + numel - at, group.numel())
                if begin < end:
                    parts.append(group[begin:end])
                at += group.numel()
        found = sum(part.numel() for part in parts)
        if found < shape.numel():
            raise CheckpointError(
                f"{self.folder}: {name} has {found} elements in the flat groups, expected {shape.numel()}"
            )
        return _cut(parts, start, stop)


def _cut(parts: Sequence[torch.Tensor], start: int, stop: int) -> torch.Tensor:
    """Return elements [start, stop) of tensors laid end to end; the others are not read."""
    found, at = [], 0
    for part in parts:
        begin, end = max(start - at, 0), min(stop - at, part.numel())
        if begin < end:
            found.append(part[begin:end])
        at += part.numel()
    return torch.cat(found) if found else torch.empty(0, device="cpu")


def _unpickled(path: Path) -> dict[str, Any]:
    """Map a file of torch.save, without running code from it.

    Raises: CheckpointError for a file that holds more than plain values and tensors.
    """
    allowed: list[Any] = [(Ignored, name) for name in _IGNORED]
    try:
        with torch.serialization.safe_globals(allowed):
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise CheckpointError(f"{path}: cannot be read without running what it holds: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: holds a {type(found).__name__}, expected a dict")
    return found
