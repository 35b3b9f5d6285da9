"""Hugging Face's files from a model or from a checkpoint: save_pretrained and `infinity export`.

Weights are streamed: one range is in memory, or one tensor of those that have another form in files (see
hub).
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import nn

from infinity.checkpoint.atomic import Older, check_replaceable, new_folder
from infinity.checkpoint.hashed_stream import TensorSource
from infinity.checkpoint.hub import (
    EXPORT,
    HubWriter,
    check_names,
    exported_files,
    file_name,
    kept_names,
    write_configuration,
)
from infinity.checkpoint.inventory import Inventory
from infinity.checkpoint.peft import SAVE_FIRST, is_adapted, save_adapters
from infinity.checkpoint.ranges import CHUNK_NUMEL, copied_out, parts
from infinity.checkpoint.save_load import open_files, read_manifest
from infinity.checkpoint.sharedfolder import check_named, shared_folder
from infinity.engine.engine import Engine, engine_of, engine_of_model
from infinity.errors import UnsupportedError
from infinity.planning.layout import RecordSchema
from infinity.records.weights import WEIGHTS
from infinity.sizes import parse_size
from infinity.storage.manifest import MASTER, PLAIN, WIDTHS, CheckpointError, Manifest, Tensor, TensorSpec
from infinity.storage.safetensors_file import TensorReader
from infinity.tensors import as_bytes, empty, is_distributed, local
from infinity.units.unit import Unit

if TYPE_CHECKING:
    from rich.console import Console

HELP = "Hugging Face's files from a checkpoint, for from_pretrained and all else that reads them"


class _SavedType(NamedTuple):
    """A dtype in which weights can be written."""

    name: str
    dtype: str  # safetensors' name
    weights: str  # the format of records that compute in it

    def check(self, engine: Engine) -> None:
        """Check that the engine's weights can be written in this dtype.

        Raises: ValueError naming those in which they can.
        """
        if engine.schema.dtype != self.weights and self.dtype != "F32":
            raise ValueError(
                f"dtype=torch.{self.name}: the model computes in {engine.weights.dtype}; its weights can be "
                "written as that, or their masters as torch.float32"
            )

    def field(self, schema: RecordSchema) -> str:
        """Return the field to read from records of this format."""
        return "hi" if schema.dtype == self.weights else "master"

    def rounded(self, field: str, values: memoryview) -> memoryview:
        """Return a field's values, as bytes, in this dtype."""
        if field == "hi" or self.dtype == "F32" or not values:
            return values
        masters = torch.frombuffer(values, dtype=torch.float32)
        found = torch.empty(len(masters) * WIDTHS[self.dtype], dtype=torch.uint8, device="cpu")
        WEIGHTS[self.weights].rounded(len(masters), masters.data_ptr(), found.data_ptr())
        return as_bytes(found)


_DTYPES = {
    torch.bfloat16: _SavedType("bfloat16", "BF16", "bf16"),
    torch.float16: _SavedType("float16", "F16", "fp16"),
    torch.float32: _SavedType("float32", "F32", "fp32"),
}


def save_pretrained(
    model: nn.Module,
    folder: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    *,
    overwrite: bool = False,
) -> None:
    """Write a model as Hugging Face's safetensors files, streamed, for `from_pretrained` without Infinity.

    All ranks call this, with the same folder, on a file system that they share; each writes its part.

    model: built in Init; for a model of transformers, its configuration is written too. folder: new or empty;
    it appears when it is complete. dtype: the compute dtype, or torch.float32 for the masters; None for each
    weight's own compute dtype. max_shard_size: the most bytes of one file. overwrite: an older export there
    is replaced in one step once the new one is complete; foreign files beside it (a tokenizer's) stay.

    For a PEFT model PEFT writes the adapters, without reading the base; those that were not built in Init
    keep their dtype.

    Raises: FileExistsError for a folder that may not be replaced, after everything was written to a new one
    beside it, as `save`; StorageFullError; ValueError for another dtype and for a model that was not built in
    Init; UnsupportedError for one whose state_dict has other names than its parameters; ConfigError and
    RanksError as `save`.
    """
    if is_adapted(model):
        engine = engine_of_model(model)
        written = _saved(dtype or engine.weights.dtype)
        written.check(engine)
        save_adapters(model, Path(folder), written.field(engine.schema), overwrite=overwrite)
        return
    write_model(model, Path(folder), dtype, max_shard_size, overwrite=overwrite)


class Others(Protocol):
    """Weights that are written with other values than the model has."""

    @property
    def names(self) -> Collection[str]:
        """Those of parameters."""

    def values(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each of them once, whole, on every rank."""


def write_model(
    model: nn.Module,
    folder: Path,
    dtype: torch.dtype | None,
    max_shard_size: int | str,
    *,
    overwrite: bool,
    others: Others | None = None,
) -> None:
    """Write a model as `save_pretrained` does, which says what this raises; `others` with their values."""
    check_names(model)
    inventory = Inventory(model, None)
    inventory.check_unmarked("infinity.save_pretrained")
    whole = _saved(dtype or inventory.engine.weights.dtype)
    whole.check(inventory.engine)
    saved = {unit: whole if dtype else _saved(unit.flat.dtype) for _, unit in inventory.units()}
    ranks = inventory.ranks
    check_named(ranks, folder, "infinity.save_pretrained")
    inventory.engine.exchange.say_approximated(f"files of weights in {folder}")
    specs, all_names = _specs_of_model(model, inventory, saved)
    if others is not None:
        inventory.engine.stages.mesh.check_whole("merging adapters", SAVE_FIRST)
    apart = frozenset(others.names) if others is not None else frozenset()
    names = {name: of_file for name, of_file in all_names.items() if name not in apart}
    with (
        shared_folder(ranks, folder, _older(overwrite=overwrite, rescues=True)) as filling,
        contextlib.closing(
            HubWriter(filling, model, specs, parse_size(max_shard_size, "max_shard_size"))
        ) as files,
    ):
        with ranks.together(f"making files of {folder}"):
            if ranks.rank == 0:
                files.create()
        with ranks.together(f"writing files of {folder}"):
            if ranks.rank:
                files.join()
            _write_parts(files, inventory, names, saved)
        _write_converted(files, model, inventory, names, saved)
        for name, values in others.values() if others is not None else ():
            with ranks.together(f"writing {name}"):
                if ranks.rank == 0:
                    _write_whole(files, all_names.get(name, name), values)
        with ranks.together(f"writing the rest of {folder}"):
            rest = {name: one for name, one in specs.items() if name not in apart}
            _write_plain(files, inventory, rest)
            written_nbytes = files.finish()
        total = int(sum(ranks.totals([written_nbytes], "count what was written")))
        if ranks.rank == 0:
            files.finish_all(total, sum(parameter.numel() for parameter in model.parameters()))
            write_configuration(model, filling, whole.name)


def _write_parts(
    files: HubWriter, inventory: Inventory, names: Mapping[str, str], saved: Mapping[Unit, _SavedType]
) -> None:
    """Write this rank's parts of the weights that have the same form in files."""
    direct = {name: of_file for name, of_file in names.items() if of_file not in files.converted}
    wanted = (
        (engine, unit, (saved[unit].field(unit.record.schema),))
        for engine, unit in inventory.units()
        if any(name in direct for name in inventory.names_in(unit))
    )
    held = inventory.held()
    for unit, chunk in copied_out(wanted):
        of_unit, written = inventory.names_in(unit), saved[unit]
        for part in parts(chunk.record, chunk.start, chunk.stop, chunk.values):
            name = of_unit[part.index] or ""
            of_file = direct.get(name)
            if of_file is None or (MASTER, name) not in held:
                continue
            values, width = written.rounded(part.field, part.values), WIDTHS[written.dtype]
            stop = part.first + len(values) // width
            for at, first, numel in inventory.runs(name, part.first, stop):
                at_in_file = at + inventory.stacks_of_weights.first(name)
                files.write(of_file, at_in_file * width, values[first * width : (first + numel) * width])


def _write_converted(
    files: HubWriter,
    model: nn.Module,
    inventory: Inventory,
    names: Mapping[str, str],
    saved: Mapping[Unit, _SavedType],
) -> None:
    """Assemble the weights that have another form in files, one by one; rank 0 converts and writes them."""
    ranks = inventory.ranks
    together: dict[str, list[str]] = {}
    for name, of_file in names.items():
        if of_file in files.converted:
            together.setdefault(of_file, []).append(name)  # slices, or the one
    parameters = dict(model.named_parameters())
    for of_file, parts_of in together.items():
        filled: torch.Tensor | None = None
        for name in parts_of:
            engine = engine_of(parameters[name])
            if engine is None:
                continue
            unit = engine.parameters.unit_of(parameters[name])[0]
            written, field = saved[unit], saved[unit].field(unit.record.schema)
            whole = _whole(inventory, parameters[name], field) if is_distributed(parameters[name]) else None
            with ranks.together(f"writing {name}"):
                (values,) = engine.parameters.read(parameters[name], [field]) if whole is None else (whole,)
                if ranks.rank == 0:
                    spec = written.dtype, tuple(values.shape)
                    if filled is None:
                        filled = empty(*inventory.stacks_of_weights.spec(name, spec))
                    rounded = written.rounded(field, as_bytes(values))
                    at = inventory.stacks_of_weights.first(name) * WIDTHS[written.dtype]
                    as_bytes(filled)[at : at + len(rounded)] = rounded
        with ranks.together(f"converting {of_file}"):
            if filled is not None:
                files.convert(of_file, filled)


def _whole(inventory: Inventory, parameter: nn.Parameter, field: str) -> torch.Tensor:
    """Return a field of a DTensor, of all ranks: they meet once each has its part, as torch's own collective
    would wait for one that has failed.
    """
    engine = engine_of(parameter)
    if engine is None:
        raise AssertionError("not offloaded")
    with inventory.ranks.together(f"reading {inventory.names[id(parameter)]}"):
        (values,) = engine.parameters.read(parameter, [field])
    whole: torch.Tensor = values.full_tensor()  # type: ignore[attr-defined]
    return whole


def _write_plain(files: HubWriter, inventory: Inventory, specs: Mapping[str, TensorSpec]) -> None:
    """Write buffers and ordinary parameters that this rank writes."""
    held = inventory.held()
    for name, tensor in inventory.plain.items():
        if name not in specs or (PLAIN, name) not in held:
            continue
        if inventory.turns(name) is None:
            _write_whole(files, name, local(tensor))
            continue
        if name in files.converted:
            raise UnsupportedError(
                f"{name} is a DTensor that is not offloaded, and has another form in files: build it inside "
                "Init, with the parameters"
            )
        values, width = as_bytes(local(tensor)), WIDTHS[specs[name][0]]
        for at, first, numel in inventory.runs(name, 0, len(values) // width):
            files.write(name, at * width, values[first * width : (first + numel) * width])


def _write_whole(files: HubWriter, name: str, tensor: torch.Tensor) -> None:
    if name in files.converted:
        files.convert(name, tensor.detach().cpu())
    else:
        files.write(name, 0, as_bytes(tensor))


def _saved(dtype: torch.dtype) -> _SavedType:
    saved = _DTYPES.get(dtype)
    if saved is None:
        known = ", ".join(map(str, _DTYPES))
        raise ValueError(f"dtype={dtype}: weights can be written as {known}")
    return saved


def _older(*, overwrite: bool, rescues: bool = False, how: str = "overwrite=True") -> Older:
    return Older(EXPORT, exported_files, overwrite, how, rescues)


def _specs_of_model(
    model: nn.Module, inventory: Inventory, saved: Mapping[Unit, _SavedType]
) -> tuple[dict[str, TensorSpec], dict[str, str]]:
    """Return dtype and shape of all tensors to write, and the offloaded parameters' names among them."""
    parameters = dict(model.named_parameters())
    stacks = inventory.stacks_of_weights
    names = {
        name: stacks.name(name) if name in stacks.places else file_name(model, parameters[name], name)
        for name in inventory.masters()
    }
    kept = set(kept_names(model, [*names.values(), *inventory.plain]))
    names = {name: of_file for name, of_file in names.items() if of_file in kept}
    written = {name: one for unit, one in saved.items() for name in inventory.names_in(unit) if name}
    specs: dict[str, TensorSpec] = {
        of_file: stacks.spec(name, (written[name].dtype, tuple(parameters[name].shape)))
        for name, of_file in names.items()
    }
    specs.update({name: spec for name, spec in inventory.plains().items() if name in kept})
    return specs, names


def export_checkpoint(
    checkpoint: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    *,
    overwrite: bool = False,
    how: str = "overwrite=True",
) -> None:
    """Write the weights of a checkpoint as `save_pretrained` does, streamed, without building the model.

    dtype: torch.bfloat16 (None too) or torch.float16, to which masters are rounded as in training, or
    torch.float32. how: the option for `overwrite`, for errors.

    Raises: FileExistsError for a folder that may not be replaced, before anything is read; CheckpointError
    for a folder that is not a checkpoint, or whose model is not of transformers; CorruptionError; else as
    save_pretrained.
    """
    saved = _saved(dtype or torch.bfloat16)
    older = _older(overwrite=overwrite, how=how)
    check_replaceable(Path(folder), older)
    manifest = read_manifest(Path(checkpoint))
    model = _hollow_model(manifest, Path(checkpoint))
    tensors = {one.name: one for one in manifest.tensors if one.kind in (MASTER, PLAIN)}
    parameters = dict(model.named_parameters())
    names = {
        file_name(model, parameters[name], name) if name in parameters else name: name for name in tensors
    }
    specs = {
        of_file: (saved.dtype if tensors[name].kind == MASTER else tensors[name].dtype, tensors[name].shape)
        for of_file, name in names.items()
        if of_file in kept_names(model, list(names))
    }
    with new_folder(Path(folder), older) as filling, contextlib.ExitStack() as stack:
        readers = open_files(manifest, Path(checkpoint), stack)
        files = stack.enter_context(
            contextlib.closing(HubWriter(filling, model, specs, parse_size(max_shard_size, "max_shard_size")))
        )
        files.create()
        for of_file, spec in specs.items():
            whole = empty(*spec) if of_file in files.converted else None
            at = 0
            for values in _values(tensors[names[of_file]], readers, saved):
                if whole is None:
                    files.write(of_file, at, values)
                else:
                    as_bytes(whole)[at : at + len(values)] = values
                at += len(values)
            if whole is not None:
                files.convert(of_file, whole)
        files.finish_all(files.finish(), sum(one.numel for one in tensors.values() if one.kind == MASTER))
        write_configuration(model, filling, saved.name)


def _values(tensor: Tensor, readers: Mapping[str, TensorReader], saved: _SavedType) -> Iterator[memoryview]:
    """Yield a tensor's bytes range by range, masters in the dtype to write."""
    source = TensorSource(tensor, readers)
    width = WIDTHS[tensor.dtype]
    for start in range(0, tensor.numel, CHUNK_NUMEL):
        numel = min(CHUNK_NUMEL, tensor.numel - start)
        values = torch.empty(numel * width, dtype=torch.uint8, device="cpu")
        source.read(as_bytes(values))
        yield saved.rounded("master", as_bytes(values)) if tensor.kind == MASTER else as_bytes(values)


def _hollow_model(manifest: Manifest, checkpoint: Path) -> nn.Module:
    """Return a checkpoint's model on the meta device."""
    if manifest.model is None:
        raise CheckpointError(
            f"{checkpoint} is of a model without a configuration of transformers. Build the model in Init, "
            "load the checkpoint and call infinity.save_pretrained."
        )
    try:
        import transformers
    except ImportError as error:
        raise UnsupportedError("transformers is not installed: `pip install transformers`") from error
    name, config = manifest.model["class"], dict(manifest.model["config"])
    kind: Any = getattr(transformers, name, None)
    if kind is None:
        raise CheckpointError(f"{checkpoint}: transformers {transformers.__version__} has no model {name!r}")
    with torch.device("meta"):
        model: Any = kind(kind.config_class.from_dict(config))
    generation = manifest.model["generation_config"]
    if generation is not None:
        model.generation_config = transformers.GenerationConfig.from_dict(dict(generation))
    return model  # type: ignore[no-any-return]


# infinity export


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `infinity export`."""
    parser.add_argument("checkpoint", type=Path, help="a folder that infinity.save wrote")
    parser.add_argument("folder", type=Path, help="a new folder for the files")
    parser.add_argument("--dtype", choices=[one.name for one in _DTYPES.values()], default="bfloat16")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of one file (default: 5GB)")
    overwrite = "replace an older export in FOLDER; files beside it stay"
    parser.add_argument("--overwrite", action="store_true", help=overwrite)


def run(options: argparse.Namespace, console: Console) -> int:
    """Run `infinity export`; return the exit code."""
    dtype = next(dtype for dtype, one in _DTYPES.items() if one.name == options.dtype)
    with console.status(f"Writing {options.folder}"):
        size, overwrite = options.max_shard_size, options.overwrite
        export_checkpoint(
            options.checkpoint, options.folder, dtype, size, overwrite=overwrite, how="--overwrite"
        )
    console.print(f"{options.folder}: {options.dtype} weights for from_pretrained")
    return 0
