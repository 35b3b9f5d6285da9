"""Save and load a training: weights, moments and progress. Streamed, hashed, atomic, never unpickled.

[Note: files of a checkpoint]
manifest.json          everything but tensors, and the contents of the files; see manifest
weights-*.safetensors  fp32 masters, buffers and ordinary parameters, by their names in the model, for any
                       reader of safetensors, torch.distributed.checkpoint included. Each of several ranks has
                       files of its own, with a flat part of most tensors, "NAME[START:STOP]"; on a mesh with
                       a box, "NAME[0:64,32:64]", or a flat part of one, "NAME[0:64,32:64][START:STOP]"; of
                       fused weights several
moments-*.safetensors  "exp_avg.NAME", "exp_avg_sq.NAME" in the dtype in which they are kept; 8-bit ones have
                       "exp_avg_scale.NAME", two fp32 scales for each 256 elements; so have 4-bit ones, which
                       are "exp_avg_both.NAME". The state of SGD, Lion and Muon is saved as exp_avg, that of
                       Adagrad as exp_avg_sq; of 4 bits, two elements to a byte, as exp_avg_alone and
                       exp_avg_sq_alone
extra-*.safetensors    the user's tensors

Each rank writes and reads the parts that it holds, unit by unit, with a few ranges in memory. Rank 0 writes
the manifest when all files are on disk. Pending updates are applied first. Gradients are not saved.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.checkpoint import generators
from infinity.checkpoint.atomic import Older
from infinity.checkpoint.hashed_stream import TensorSource, TurnsSource, source_of
from infinity.checkpoint.hub import configuration
from infinity.checkpoint.inventory import Inventory
from infinity.checkpoint.kinds import KINDS
from infinity.checkpoint.of_stages import StagesTogether
from infinity.checkpoint.ranges import buffers, chunks, copied_out, parts
from infinity.checkpoint.sharedfolder import check_named, shared_folder
from infinity.checkpoint.writer import CheckpointWriter
from infinity.engine.engine import Engine
from infinity.errors import UnsupportedError
from infinity.lane.passes import CopyInPass
from infinity.optim.base import OffloadedOptimizer
from infinity.planning.boxes import Turns
from infinity.ranks.group import Ranks
from infinity.storage.manifest import (
    MASTER,
    NAME,
    PLAIN,
    CheckpointError,
    Manifest,
    RankManifest,
    Tensor,
    compare,
    compare_groups,
    decode,
    encode,
    joined,
    names_of,
    readable,
)
from infinity.storage.safetensors_file import TensorReader
from infinity.tensors import as_bytes, empty, is_distributed, local, name_of_dtype
from infinity.units.tracking import Stateful
from infinity.units.unit import Unit

CHECKPOINT = "a checkpoint of infinity.save"


# Saving


def save(
    model: nn.Module,
    optimizer: OffloadedOptimizer | None,
    folder: str | os.PathLike[str],
    *,
    scheduler: Stateful | None = None,
    extra: Any = None,
    overwrite: bool = False,
) -> None:
    """Save a training to a new folder, which is complete, or, after an error or a kill, not there.

    All ranks call this, with the same folder, on a file system that they share; of a pipeline those of every
    stage do, with a folder for each stage.

    model: built in Init. optimizer: its optimizer; None saves weights and buffers alone. scheduler: its
    state_dict may hold plain values and tensors. extra: plain values and tensors of your own, such as the
    position in the data; each rank's are saved, and load returns them. overwrite: an older checkpoint there
    is replaced in one step once the new one is complete; foreign files beside it stay. The generators of
    torch, Python and numpy are saved as well. Gradients are not.

    Raises: FileExistsError for a folder that may not be replaced, after everything was saved in a new one
    beside it (FOLDER-2, ...; the error's filename2), so that no training is lost; StorageFullError with the
    sizes; CheckpointError naming a value that is not plain, and UnsupportedError one that is a DTensor, or
    delayed gradients; ValueError for a model that was not built in Init; ConfigError if the ranks do not
    share the folder, or stages do; RanksError if another rank failed, with its reason.
    """
    inventory = to_save(model, optimizer)
    stages = StagesTogether(inventory, folder, saves=True)
    ranks = inventory.ranks
    check_named(ranks, folder, "infinity.save")
    inventory.engine.exchange.say_approximated(f"a checkpoint in {folder}")
    kept: dict[str, torch.Tensor] = {}
    of_rank = f"extra.{ranks.rank}." if ranks.rank else "extra."
    of_speaker = f"extra.{stages.speaker}." if stages.speaker else "extra."

    def keep(value: Any, what: str, prefix: str = of_speaker) -> str | None:
        if not isinstance(value, torch.Tensor):
            return None
        _check_own(value, what)
        key = f"{prefix}{len(kept)}"
        kept[key] = value.detach()
        return key

    with ranks.together(f"saving to {folder}"):
        scheduled = scheduler.state_dict() if scheduler else None
        shared = {
            "optimizer": optimizer_out(inventory, keep),
            "scheduler": encode(scheduled, "scheduler.state_dict()", keep),
        }
        stages.note_shared(kept)  # which the speaker writes; every rank writes its own extra
        own = encode(extra, "extra", functools.partial(keep, prefix=of_rank))
    shared = stages.shared_of_all(shared)  # not in the `with`: a rank that failed there would not come
    older = Older(CHECKPOINT, checkpoint_files, overwrite, rescues=True)
    with shared_folder(ranks, Path(folder), older) as filling:
        with contextlib.ExitStack() as stack:
            with ranks.together(f"making files of {folder}"):
                files = stack.enter_context(contextlib.closing(CheckpointWriter(filling, inventory, kept)))
            with ranks.together(f"writing files of {folder}"):
                files.write_units(inventory)
                files.write_plain(inventory.plain, kept)
                written = RankManifest(
                    files.pieces(), files.files(), generators.capture(), own, inventory.place
                )
        manifests = ranks.each(written.to_json(), f"say what files of {folder} hold")
        stacks = stages.stacks_of_all()
        if ranks.rank == 0:
            shared["model"] = configuration(model)
            manifest = joined([RankManifest.from_json(text) for text in manifests], shared)
            (filling / NAME).write_text(stacks.joined(manifest).to_json())


def _check_own(value: torch.Tensor, what: str) -> None:
    """Check a tensor of the user's, of which each rank saves its own.

    Raises: UnsupportedError for a DTensor; ValueError for a type that files do not know.
    """
    if is_distributed(value):
        raise UnsupportedError(
            f"{what} is a DTensor: each rank's own tensors are saved here. Give value.full_tensor(), or "
            "value.to_local()"
        )
    name_of_dtype(value, what)


def to_save(model: nn.Module, optimizer: OffloadedOptimizer | None) -> Inventory:
    """Return what is to be saved.

    Raises: UnsupportedError where an optimizer keeps what a checkpoint does not have.
    """
    inventory = Inventory(model, optimizer)
    if optimizer is not None:
        optimizer.check_nothing_waits("infinity.save")
    return inventory


def optimizer_out(inventory: Inventory, keep: Any) -> dict[str, Any] | None:
    """Return an optimizer's groups, steps and seed in the form of manifest.encode."""
    if inventory.optimizer is None:
        return None
    groups = [
        {
            "parameters": names,
            "options": encode(
                {key: value for key, value in group.items() if key != "params"}, f"param group {number}", keep
            ),
        }
        for number, (names, group) in enumerate(zip(inventory.groups_in_files, inventory.groups, strict=True))
    ]
    return {
        "kind": inventory.optimizer.recipe.name,
        "state_dtype": inventory.engine.schema.state_dtype,
        "seed": inventory.optimizer.seed,
        "steps": {inventory.stacks.name(name): step for name, step in inventory.steps.items()},
        "groups": groups,
    }


def checkpoint_files(folder: Path) -> set[str] | None:
    """Return the files of the checkpoint in a folder; None if there is none."""
    try:
        return {NAME, *read_manifest(folder).files}
    except (OSError, CheckpointError):
        return None


# Loading


def load(
    model: nn.Module,
    optimizer: OffloadedOptimizer | None,
    folder: str | os.PathLike[str],
    *,
    scheduler: Stateful | None = None,
) -> Any:
    """Load a checkpoint of `save` into a model, optimizer and scheduler of the same kind; return `extra`.

    Budgets, tiers and `update` may differ. With an optimizer the random number generators are restored as
    well, and the training goes on as if it had never stopped; with None only weights and buffers are loaded.
    All ranks call this; their number, and their mesh, may differ. If the number does not, each rank gets its
    own generators and `extra` back; if it does, all get rank 0's `extra`, and ranks beyond the saved number
    seed generators of their own. On a mesh it is the number of those with different data that counts: ranks
    that share data get what one of them had.

    Raises: CheckpointError naming everything that does not fit, before anything is changed; CorruptionError
    naming file and tensor if a hash does not match; FileNotFoundError.
    """
    folder = Path(folder)
    inventory = Inventory(model, optimizer)
    stages = StagesTogether(inventory, folder, saves=False)
    ranks = inventory.ranks
    check_named(ranks, folder, "infinity.load")
    with ranks.together(f"loading {folder}"), contextlib.ExitStack() as stack:
        with ranks.together(f"reading {folder / NAME}"):
            manifest = read_manifest(folder)
        _check_same(manifest, ranks, folder)
        with readable(f"{folder / NAME}"):
            manifest = stages.own_of(manifest)
        with ranks.together(f"comparing {folder} with the model"), readable(f"{folder / NAME}"):
            _check_fits(manifest, inventory, scheduler, folder)
            files = open_files(manifest, folder, stack)

        def tensor_of(key: str) -> torch.Tensor:
            one = manifest.by_kind()["extra", key]
            return _read(one, files, None, one.shape)

        saved = manifest.at_place(inventory.place)
        as_many = inventory.engine.ranks.size == manifest.data_size
        with readable(f"{folder / NAME}"):
            extra = decode(saved["extra"] if saved and as_many else manifest.extra, tensor_of)
            schedule = decode(manifest.scheduler, tensor_of)
            groups = decode((manifest.optimizer or {}).get("groups", []), tensor_of)
        _begin_moments(manifest, inventory)
        _fill_units(manifest, inventory, files)
        with torch.no_grad():
            for name, tensor in inventory.plain.items():
                values = local(tensor)
                saved_as = manifest.by_kind()[PLAIN, name]
                values.copy_(_read(saved_as, files, inventory.turns(name), values.shape))
    if optimizer is not None and manifest.optimizer is not None:
        with readable(f"{folder / NAME}"):
            optimizer_in(manifest.optimizer, groups, inventory, optimizer)
            if scheduler is not None:
                scheduler.load_state_dict(schedule)
        with readable(f"the generators' states in {folder / NAME}"):
            if saved is not None:
                generators.restore(saved["rng"])
            else:
                generators.begin(manifest.rng, inventory.place.data)
    return extra


def read_manifest(folder: Path) -> Manifest:
    """Return a checkpoint's manifest.

    Raises: CheckpointError naming the file; FileNotFoundError where there is none, with what there is.
    """
    path = folder / NAME
    try:
        return Manifest.from_json(path.read_bytes())
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except (FileNotFoundError, NotADirectoryError) as error:
        raise type(error)(error.errno, _no_checkpoint(folder), str(folder)) from None


def _check_same(manifest: Manifest, ranks: Ranks, folder: Path) -> None:
    """Check that all ranks have read the same manifest.

    Raises: CheckpointError, on all of them, naming their folders.
    """
    if ranks.size == 1:
        return
    mine = f"{folder.absolute()} (hash {manifest.digest})"
    said = [one.decode() for one in ranks.each(mine.encode(), f"compare {NAME} of all ranks")]
    if len({one.rpartition(" ")[2] for one in said}) > 1:
        raise CheckpointError(
            "the ranks find different manifests of a checkpoint, and nothing was loaded: "
            f"{ranks.names.told(said)}. Likely "
            "cause: the folder is not on a file system that they share, and one has an older copy. Copy the "
            "same checkpoint to all machines, or name a folder that they share"
        )


def _no_checkpoint(folder: Path) -> str:
    """Say what is there in the place of a checkpoint, and what to do."""
    if not folder.exists():
        return f"there is no such folder (looked in {Path.cwd()}). Name one that infinity.save has written"
    if not folder.is_dir():
        return "that is a file. Name the folder that infinity.save has written"
    why = f"no checkpoint of infinity.save: it holds no {NAME}"
    if any(folder.glob("*.safetensors")):
        return f"{why}, but weights of Hugging Face's: load them by from_pretrained(...) inside Init"
    if inside := sorted(str(one.parent) for one in folder.glob(f"*/{NAME}")):
        return f"{why}; {inside[-1]} does: name that"
    return f"{why}. Name a folder that infinity.save has written"


def _check_fits(manifest: Manifest, inventory: Inventory, scheduler: Stateful | None, folder: Path) -> None:
    """Check that checkpoint, model, optimizer and scheduler fit.

    Raises: CheckpointError naming all that does not.
    """
    tensors = manifest.tensors
    found = compare(names_of(tensors, MASTER), inventory.stacks.specs(inventory.masters()), "parameters")
    found += compare(names_of(tensors, PLAIN), inventory.plains(), "buffers and ordinary parameters")
    if inventory.optimizer is not None:
        found += _optimizer_complaints(manifest, inventory)
        if scheduler is not None and manifest.scheduler is None:
            found.append("no scheduler was saved")
    elif scheduler is not None:
        found.append("a scheduler is loaded together with its optimizer: give both")
    if found:
        raise CheckpointError("\n  ".join([f"{folder} does not fit; nothing was loaded:", *found]))
    for _, unit in inventory.units():
        if unit.residence.users:
            raise UnsupportedError(
                f"{unit.name}: load inside a forward or `with infinity.gathered(...)`: call it afterwards"
            )


def _optimizer_complaints(manifest: Manifest, inventory: Inventory) -> list[str]:
    saved = manifest.optimizer
    if saved is None:
        return ["it was saved without an optimizer: load it with optimizer=None"]
    kind, ours = saved.get("kind", "AdamW"), type(inventory.optimizer).__name__
    if inventory.optimizer is not None and kind != inventory.optimizer.recipe.name:
        return [f"it has the state of infinity.{kind}, but the optimizer is {ours}; make that, or give None"]
    state_dtype = inventory.engine.schema.state_dtype
    if saved["state_dtype"] != state_dtype:
        cure = f"build the model with Config(state_dtype={saved['state_dtype']!r})"
        return [f"its moments are {saved['state_dtype']}, those of this model {state_dtype}; {cure}"]
    names = [name for group in saved["groups"] for name in group["parameters"]]
    groups, ours_in_files = [group["parameters"] for group in saved["groups"]], inventory.groups_in_files
    if "stages" in saved:  # which list theirs one after the other, as the whole model may not
        groups, ours_in_files = list(map(sorted, groups)), list(map(sorted, ours_in_files))
    found = compare_groups(groups, ours_in_files)
    stray = [name for name in saved["steps"] if name not in names]
    if stray:
        found.append(f"steps of parameters that are in no group: {', '.join(stray)}")
    stepped = {name for name in inventory.names.values() if inventory.stacks.name(name) in saved["steps"]}
    moments = inventory.moments(stepped)
    for kind in KINDS.values():
        specs = {name: spec for (of, name), spec in moments.items() if of == kind}
        expected = inventory.stacks.specs(specs, kind)
        found += compare(names_of(manifest.tensors, kind), expected, kind)
    return found


def open_files(manifest: Manifest, folder: Path, stack: contextlib.ExitStack) -> dict[str, TensorReader]:
    """Open the files and check that they have the tensors of the manifest.

    Raises: CheckpointError naming a file that has not; TensorFileError; FileNotFoundError.
    """
    files = {
        name: stack.enter_context(TensorReader(folder / name))
        for name in dict.fromkeys(piece.file for one in manifest.tensors for piece in one.pieces)
    }
    for name, reader in files.items():
        if reader.nbytes != manifest.files.get(name):
            raise CheckpointError(
                f"{reader.path}: {reader.nbytes} bytes, {manifest.files.get(name)} when it was saved"
            )
    for tensor in manifest.tensors:
        for piece in tensor.pieces:
            entry = files[piece.file].entries.get(piece.key)
            if entry is None or (entry.dtype, entry.numel) != (tensor.dtype, piece.stop - piece.start):
                raise CheckpointError(
                    f"{folder / piece.file}: expected {piece.stop - piece.start} elements of {tensor.dtype} "
                    f"as {piece.key}, found {entry}"
                )
    return files


def _read(
    tensor: Tensor, files: Mapping[str, TensorReader], turns: Turns | None, shape: Sequence[int]
) -> torch.Tensor:
    """Return what a rank has of a tensor, which has this shape; None for the whole."""
    values = empty(tensor.dtype, tuple(shape))
    source_of(tensor, files, 0, turns).read(as_bytes(values))
    return values


def _begin_moments(manifest: Manifest, inventory: Inventory) -> None:
    """Make room for the moments of all parameters that have some in the checkpoint, frozen ones included:
    otherwise they would begin with zeros when unfrozen.
    """
    if inventory.optimizer is None or manifest.optimizer is None:
        return
    for group in inventory.groups:
        for parameter in group["params"]:
            if inventory.name_in_files(parameter) in manifest.optimizer["steps"]:
                inventory.optimizer.make_room(inventory.engine, parameter)


def _fill_units(manifest: Manifest, inventory: Inventory, files: Mapping[str, TensorReader]) -> None:
    """Stream masters and moments into the records; moments that the checkpoint does not have become zeros."""
    tensors = manifest.by_kind()
    before: tuple[Engine, CopyInPass] | None = None
    for engine, unit in inventory.units():
        engine.parameters.before_change()
        engine.residency.flush(unit)
        engine.residency.changed(unit)
        if inventory.optimizer is not None and engine.partition is not None:
            engine.partition.forget_errors(unit.record)
        names = inventory.names_in(unit)
        fields = ("master", *_moments_to_fill(unit, names, manifest, inventory))
        if fields == ("master",) and _are_in_files(engine, unit, inventory, tensors, files):
            continue
        _give_room(engine, unit, fields[1:])
        sources: dict[tuple[str, str], TensorSource | TurnsSource] = {}
        for start, stop in chunks(unit.record):
            values = buffers(unit.record, fields, stop - start)
            for part in parts(unit.record, start, stop, values):
                name, kind = names[part.index], KINDS.get(part.field, MASTER)
                if name is not None and (of := (kind, inventory.stacks.name(name))) in tensors:
                    key = kind, name
                    if key not in sources:
                        first = inventory.stacks.first(name, kind)
                        turns = inventory.turns(name)
                        sources[key] = source_of(tensors[of], files, first + part.first, turns)
                    sources[key].read(part.values)
            job = CopyInPass(unit.record, unit.record.tile_numel, start, stop, values)
            if before is not None:
                before[0].lane.wait(before[1])
            engine.lane.submit(job, urgent=True)
            before = engine, job
    if before is not None:
        before[0].lane.wait(before[1])


def _give_room(engine: Engine, unit: Unit, moments: Sequence[str]) -> None:
    """Give a unit a record of its own, with room for these fields."""
    engine.parameters.make_own([unit.record], "a checkpoint is loaded into them")
    for field in moments:
        if field not in unit.record:
            unit.record.add(field, engine.store)


def _are_in_files(
    engine: Engine,
    unit: Unit,
    inventory: Inventory,
    tensors: Mapping[tuple[str, str], Tensor],
    files: Mapping[str, TensorReader],
) -> bool:
    """Whether a unit's weights lie in the files they were loaded from, with the masters of a checkpoint."""
    if unit.record.in_files is None:
        return False
    names = inventory.names_in(unit)
    sources: dict[str, TensorSource | TurnsSource] = {}
    for _, chunk in copied_out([(engine, unit, ("master",))]):
        for part in parts(unit.record, chunk.start, chunk.stop, chunk.values):
            name = names[part.index]
            tensor = tensors.get((MASTER, name)) if name is not None else None
            if name is None or tensor is None:
                return False
            if name not in sources:
                sources[name] = source_of(tensor, files, part.first, inventory.turns(name))
            saved = memoryview(bytearray(len(part.values)))
            sources[name].read(saved)
            if saved != part.values:
                return False
    return True


def _moments_to_fill(
    unit: Unit, names: Sequence[str | None], manifest: Manifest, inventory: Inventory
) -> Sequence[str]:
    """Return the moments to set: all, if the checkpoint or the record has any of the unit's."""
    fields = inventory.fields_in(unit)
    saved = manifest.optimizer
    if inventory.optimizer is None or saved is None:
        return ()
    stepped = any(inventory.stacks.name(name) in saved["steps"] for name in names if name is not None)
    tiles = range(0, unit.record.shard.numel, unit.record.tile_numel)
    written = any(unit.record.written(field, start) for field in fields for start in tiles)
    return fields if stepped or written else ()


def optimizer_in(
    saved: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    inventory: Inventory,
    optimizer: OffloadedOptimizer,
) -> None:
    """Set step counts, options of groups and the rounding's seed from what `optimizer_out` returned."""
    optimizer.set_seed(saved["seed"])
    optimizer.drop_delayed()
    for group, found in zip(optimizer.param_groups, groups, strict=True):
        group.update(found["options"])
        for parameter in group["params"]:
            optimizer.counts.pop(parameter, None)
            step = saved["steps"].get(inventory.name_in_files(parameter))
            if step is not None:
                optimizer.counts[parameter] = {"step": int(step)}
