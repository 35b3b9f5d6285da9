"""The models being built inside one `with infinity.Init(...)`.

[Note: modules under construction]
Parameters stay real, in the dtype they are drawn in, while their module is being built: initialisation may
work on views, or come later. What is real is bounded by a window of half the budget; when it is full, the
modules touched longest ago are *evicted*: their masters are split and written. An evicted parameter that is
touched again (Hugging Face initialises when the whole model stands) becomes real again. So the same random
numbers are drawn, in the same order and dtype, as without Init. When the `with` ends, everything is evicted,
and what came without registration (copy.deepcopy) has been found by walking the modules. Each module's
parameters are in one record, or in one for each type that they compute in; see asked.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.utils import _pytree as pytree

from infinity.config.sequence_ranks import check_experts
from infinity.engine.asked import Asked
from infinity.engine.blocks import Block, UnitKind, blocks_of, chooses, covered, name_blocks, own
from infinity.engine.built_parameter import BuiltParameter
from infinity.engine.embeddings import held_elsewhere, in_blocks, in_groups
from infinity.engine.engine import Engine, engine_of
from infinity.engine.foresight import NONE
from infinity.engine.frozen import FrozenFile, frozen_layers
from infinity.engine.layouts import Find
from infinity.engine.module_records import (
    alive_and_roots,
    check_divided,
    chosen_records,
    name_records,
    named_modules,
    routed_records,
    used_units,
)
from infinity.engine.origins import Origins
from infinity.engine.overflow import Overflow
from infinity.engine.pretrained import Mapped, check_values, name_file
from infinity.engine.real_parameters import RealParameters
from infinity.engine.refused import check_kept, refuse_packed
from infinity.engine.scripting import refuse_script
from infinity.engine.stand_ins import StandIns
from infinity.errors import UnsupportedError
from infinity.planning.layout import RecordSchema
from infinity.planning.tile_size import LEAST_SLICE_NBYTES, tile_choice
from infinity.records.record import Record
from infinity.records.weights import compute_dtype
from infinity.sizes import format_size
from infinity.storage.packed import FileRange, Packed
from infinity.tensors import is_distributed, local
from infinity.tiling import (
    EmbeddingTile,
    ExpertTile,
    Grid,
    Piece,
    Routed,
    TiledEmbedding,
    TiledExperts,
    Whole,
    assembled,
    stand_in,
    stand_in_for_stack,
    stands_in,
)
from infinity.tiling.experts import is_stack
from infinity.units.forms import release, restore
from infinity.units.released import Guarded, not_resident, placeholder, set_owner

logger = logging.getLogger("infinity")

_OVERWRITES = frozenset(
    {"normal_", "uniform_", "zero_", "fill_", "copy_", "constant_"}
    | {f"{whose}_{how}_" for whose in ("kaiming", "xavier") for how in ("uniform", "normal")}
)
"""Operations that do not look at the values: an evicted parameter need not be read for them."""
_MAPPED_NBYTES = 2 << 20
"""Memory that malloc maps while a model is built; see map_large_blocks in storage/memory.py."""


class Construction:
    """The models being built inside one `with`."""

    def __init__(self, engine: Engine, *, frozen: bool = False) -> None:
        """Build for `engine`. frozen: what is loaded gets no gradients; see Init."""
        self._engine = engine
        self._frozen = frozen
        self._origins = Origins()
        self._packed = StandIns()
        self._before_loading: Callable[[], None] = lambda: None
        self._copied: Counter[str] = Counter()
        """Bytes of a checkpoint that got records of their own, by the reason."""
        self._entries: dict[int, BuiltParameter] = {}
        self._real = RealParameters()
        self._records: dict[Record, None] = {}
        self._mapped: Mapped | None = None
        self._modules: dict[int, weakref.ref[nn.Module]] = {}
        self._window_nbytes = max(engine.budget.total_nbytes // 2, 1)
        self._asked_of_tiles: torch.dtype | None = None
        self._overflow = Overflow(engine)
        self._taken_in = False
        self.asked = Asked(self._converted)
        """To be entered while models are built."""

    def before_loading(self, call: Callable[[], None]) -> None:
        """Have `call` called when a parameter comes whose values are to be loaded."""
        self._before_loading = call

    def take_in(self, model: nn.Module) -> None:
        """Take charge of a model that was built before. Its modules stay: others may have its parameters."""
        self._taken_in = True
        self.adopted(model, "", None)

    # Registration

    def registered(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        """Called when a module gets a parameter; return what it gets instead, None for no other."""
        self._modules[id(module)] = weakref.ref(module)
        if parameter is None:
            return None
        with self.asked.quiet():
            self.asked.registered(parameter)
            before = module._parameters.get(name)
            if self._frozen and before is not None and before.is_meta and self._is_loaded(parameter, before):
                parameter.requires_grad_(False)
            asked = self._asked_for(parameter, before)
            tiled, self._asked_of_tiles, outer = None, asked, self._asked_of_tiles
            try:
                if not is_distributed(parameter):
                    tiled = self._in_slices(module, name, parameter, asked)
                    tiled = self._in_tiles(module, name, parameter) if tiled is None else tiled
            finally:
                self._asked_of_tiles = outer
            if tiled is None and self._take(module, name, parameter, asked):
                if self._packed.of(parameter) is not None:
                    self._evict([self._entries[id(parameter)]])  # before anybody looks at its values
                self._make_room(keep=[module])
        return tiled

    def offered(
        self, make: Callable[[Find], Packed | None], shape: torch.Size, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Take note of where a packed weight is; return what stands for it until it is registered, or None
        for one that cannot be read in place. See [Note: packed checkpoints] in quantized.
        """
        with self.asked.quiet():
            if dtype != self._engine.weights.dtype:
                return None
            self._origins.look()  # what was mapped when this looked last may be another file by now
            found = make(self._origins.where)
            return self._packed.stand_for(found, shape, dtype) if found is not None else None

    def _is_loaded(self, parameter: nn.Parameter, before: nn.Parameter) -> bool:
        """Whether what replaces a parameter without values, `before`, has a checkpoint's: it lies in a mapped
        file, or transformers has marked either (5 the new one, 4 the old). What the checkpoint lacks comes
        unmarked, to be initialised.
        """
        if parameter.is_meta:
            return False
        marked = any(getattr(one, "_is_hf_initialized", False) for one in (parameter, before))
        return marked or self._packed.of(parameter) is not None or self._origins.may_have(parameter)

    def _asked_for(self, parameter: nn.Parameter, before: nn.Parameter | None) -> torch.dtype | None:
        """Return the type that a parameter, which takes the place of another, is asked for in."""
        replaced = self._asked_of(before)
        if before is not None and before.is_meta:
            return replaced  # its values come from a file, in whatever type they are there
        return self.asked.of(parameter) or replaced or self._asked_of_tiles

    def _in_slices(
        self, module: nn.Module, name: str, parameter: nn.Parameter, asked: torch.dtype | None
    ) -> Whole | None:
        """Return what stands for a stack of experts that is to be built expert by expert; None for every
        other parameter.
        """
        if self._engine.config.experts == "whole" or isinstance(parameter, UninitializedParameter):
            return None
        least_nbytes = LEAST_SLICE_NBYTES * parameter.element_size() // self._engine.schema.width
        ranks = self._engine.config.expert_parallel
        if ranks > 1 and is_stack(module, parameter):
            check_experts(len(parameter), ranks, f"{type(module).__name__}.{name}")
        whole = stand_in_for_stack(module, name, parameter, least_nbytes, ranks)
        if whole is None:
            return None
        for tile in whole.tiles:
            self.asked.note(getattr(tile, name), asked)
        kind, shape = type(module).__name__, " x ".join(map(str, whole.shape))
        logger.info("%s.%s of %s is built in %d slices", kind, name, shape, len(whole.grid))
        return whole

    def _in_tiles(self, module: nn.Module, name: str, parameter: nn.Parameter) -> Whole | None:
        """Return what stands for a weight that is to be built in tiles, which are taken charge of as they are
        made; None for every other parameter.
        """
        config = self._engine.config
        above, reason = config.tile_nbytes, ""
        if config.tile_above == "auto":
            choice = tile_choice(self._engine.budget.total_nbytes, config.device_nbytes)
            above = choice.of_built(parameter.element_size(), self._engine.schema.width)
            reason = f" by {choice.reason}"
        if above is None:
            return None
        if parameter.is_meta and parameter.nbytes > above:
            raise UnsupportedError(
                f"{type(module).__name__}.{name} of {format_size(parameter.nbytes)} is built "
                f"without values, as by from_pretrained, and tile_above={format_size(above)} would cut it. "
                "Build the model from its config and load the weights with load_state_dict, or leave "
                "tile_above out."
            )
        whole = stand_in(module, name, parameter, above)
        if whole is not None:
            kind, shape = type(module).__name__, " x ".join(map(str, whole.shape))
            logger.info("a %s of %s is built in %d tiles%s", kind, shape, len(whole.grid), reason)
        return whole

    def adopted(self, module: nn.Module, name: str, child: nn.Module | None) -> nn.Module | None:
        """Called when a module gets a child, perhaps a copy whose parameters were never registered; return
        the tiled one that takes its place, None for no other.
        """
        self._modules[id(module)] = weakref.ref(module)
        if isinstance(child, torch.jit.ScriptModule):
            refuse_script(child)
            return None
        tiled = assembled(child)
        if tiled is not None:
            child = tiled
        if isinstance(tiled, TiledExperts):
            tiled.view_where(self._views)
        if child is not None:
            with self.asked.quiet():
                self._sweep(child)
                self._make_room(keep=[child])
        return tiled

    def _views(self, stack: torch.Tensor) -> bool:
        """Whether slices of a stack may be views of it: it takes no memory."""
        return stack in self._packed or self._origins.may_have(stack)

    def _sweep(self, module: nn.Module) -> None:
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    self._take(part, name, parameter, self.asked.of(parameter))

    def _entry(self, parameter: torch.Tensor | None) -> BuiltParameter | None:
        """Return what is known of a parameter."""
        entry = self._entries.get(id(parameter))
        return entry if entry is not None and entry.parameter() is parameter else None

    def _asked_of(self, parameter: nn.Parameter | None) -> torch.dtype | None:
        """Return the type that a parameter, one that is known or has no values yet, was asked for in."""
        if parameter is None:
            return None
        entry = self._entry(parameter)
        return self.asked.of(parameter) or (entry.asked if entry is not None else None)

    def _take(self, module: nn.Module, name: str, parameter: nn.Parameter, asked: torch.dtype | None) -> bool:
        """Take charge of a parameter; False if it is known, or not one that is offloaded.

        asked: the type that it is to compute in; None for Config's.
        """
        known = self._entry(parameter) is not None or engine_of(parameter) is not None
        if known or isinstance(parameter, Whole):  # whose tiles were taken, each by itself
            return False
        if parameter.is_meta:
            self._before_loading()
            refuse_packed(module, name, parameter)
        if not (parameter.is_floating_point() or parameter.is_complex()):
            return False  # integers have no gradient: they stay ordinary, like buffers
        if parameter.is_meta and not parameter.is_complex():
            self._mapped = self._mapped or Mapped()
            return False  # its values come with the parameter that replaces it
        check_kept(module, name, parameter, self._engine.stages.mesh)
        entry = self._entries[id(parameter)] = BuiltParameter(parameter, module, name, asked)
        if self._mapped is not None and self._packed.of(parameter) is None:
            # Where slices are, was looked for when their stack came.
            looks = self._origins.knows if isinstance(module, Piece) else self._origins.may_have
            entry.note_mapped(is_mapped=looks(parameter))
        self._real.add(parameter, entry)
        set_owner(parameter, self._engine)
        return True

    def _schema(self, asked: torch.dtype | None) -> RecordSchema:
        return self._engine.schema_of(asked or self._engine.weights.dtype)

    # Eviction and its reverse

    def _make_room(self, keep: Iterable[nn.Module | None]) -> None:
        """Evict the modules touched longest ago until the real parameters fit the window."""
        for together in self._real.first_out(self._window_nbytes, keep):
            if self._mapped is not None:
                self._origins.look()
            self._evict(together)

    def _evict(self, entries: Sequence[BuiltParameter]) -> None:
        """Write real parameters of one module to their records, and release them."""
        alive = [(entry, parameter) for entry in entries if (parameter := entry.parameter()) is not None]
        for entry, parameter in alive:
            asked = self._asked_of(parameter)
            entry.take(parameter, asked, self._schema(asked))
        fresh = [(entry, parameter) for entry, parameter in alive if entry.record is None]
        self._give_records(fresh)
        lain = {id(entry) for entry, _ in fresh if entry.record is not None and entry.record.in_files}
        self._write([one for one in alive if id(one[0]) not in lain])
        for entry, parameter in alive:
            release(parameter, placeholder(local(parameter).shape, entry.dtype, parameter.device))
            self.asked.note(parameter, entry.asked)
            self._real.remove(id(parameter))
        if self._mapped is not None:  # of what lies in files nothing was read
            self._mapped.taken(sum(entry.nbytes for entry, _ in alive if id(entry) not in lain))

    def _write(self, entries: Sequence[tuple[BuiltParameter, nn.Parameter]]) -> None:
        """Write the values of real parameters to their records."""
        values: dict[Record, dict[int, dict[str, torch.Tensor]]] = {}
        for entry, parameter in entries:
            if entry.record is not None:
                part = entry.part_of(parameter, entry.record)
                values.setdefault(entry.record, {})[entry.index] = {"master": part}
        for record, fields in () if self._overflow else values.items():
            self._engine.parameters.write_record(record, fields)

    def _give_records(self, fresh: Sequence[tuple[BuiltParameter, nn.Parameter]]) -> None:
        """Make a record for parameters of one module, or one for each type that they compute in; it lies in
        the checkpoint's files, if all of them do.
        """
        by_schema: dict[RecordSchema, list[tuple[BuiltParameter, nn.Parameter]]] = {}
        for entry, parameter in fresh:
            by_schema.setdefault(self._schema(entry.asked), []).append((entry, parameter))
        for schema, together in by_schema.items():
            name = f"{type(together[0][0].module()).__name__} no. {len(self._entries)}"
            module = together[0][0].module()
            part = module.part if isinstance(module, ExpertTile) else None
            record = self._engine.new_record([parameter for _, parameter in together], name, schema, part)
            self._records[record] = None
            ranges = self._ranges([parameter for _, parameter in together], record)
            if ranges is not None:
                self._engine.lay_in_files(record, ranges)
                for (entry, _), one in zip(together, ranges, strict=True):
                    entry.lie(one)
            else:
                self._overflow.give_room(record)
            for index, (entry, _) in enumerate(together):
                entry.belongs_to(record, index)

    def _ranges(self, parameters: Sequence[nn.Parameter], record: Record) -> list[FileRange | Packed] | None:
        """Return the ranges of files that parameters' values are; None if that is not so of all."""
        if self._mapped is None:
            return None
        found = [
            self._packed.of(one) or self._origins.of(one, compute_dtype(record.schema)) for one in parameters
        ]
        ranges = [one for one in found if not isinstance(one, str)]
        if len(ranges) == len(found):
            return ranges
        why = next(one for one in found if isinstance(one, str))
        self._copied[why] += sum(local(one).nbytes for one in parameters)
        return None

    def touch(self, parameters: Sequence[nn.Parameter], operation: str, args: Sequence[Any]) -> object:
        """Make evicted parameters real again: they are used while the model is built."""
        with self.asked.quiet():
            self._restore(parameters, operation, args)
        return None

    def _converted(self, parameter: nn.Parameter) -> None:
        """Called when a parameter, which may be in a record, is asked for in another type."""
        if isinstance(parameter, Guarded):
            self.touch([parameter], "data", ())

    def _restore(self, parameters: Sequence[nn.Parameter], operation: str, args: Sequence[Any]) -> None:
        for parameter in parameters:
            entry = self._entries.get(id(parameter))
            if entry is None or entry.record is None:
                raise not_resident(parameter, operation)
            asked = self._asked_of(parameter)
            values = torch.empty(local(parameter).shape, dtype=entry.dtype, device=parameter.device)
            if self._overflow:
                values.zero_()
            elif operation not in _OVERWRITES or (args and args[0] is not parameter):
                field, dtype = entry.field_in(entry.record)
                read = self._engine.parameters.read_record(entry.record, entry.index, {field: dtype})
                values.copy_(read[field].view(values.shape))
            restore(parameter, values)
            entry.note_mapped(is_mapped=False)
            self.asked.note(parameter, asked)
            self._real.add(parameter, entry)
        used = [self._entries.get(id(leaf)) for leaf in pytree.tree_leaves((parameters, args))]
        self._make_room(keep=[entry.module() for entry in used if entry is not None])

    # The end

    def failed(self, error: BaseException) -> None:
        """Called when building ends with `error`. Raises: HostMemoryError if memory had run out before;
        TensorFileError naming a file that could not be opened.
        """
        name_file(error)
        self._overflow.refuse_half(list(self._records), error)

    def models(self) -> list[nn.Module]:
        """Return the models so far."""
        return alive_and_roots(self._modules.values())[1]

    def finish(self) -> list[nn.Module]:
        """Evict everything, and hand the finished models to the engine; return these."""
        modules, roots = alive_and_roots(self._modules.values())
        for root in roots:
            if stands_in(root):
                raise UnsupportedError(
                    f"{type(root).__name__} is to be tiled, and is in no other module: put it into one "
                    "(nn.Sequential), inside Init, or leave tile_above out"
                )
            self._sweep(root)
        for experts in [one for one in modules if isinstance(one, TiledExperts)]:
            experts.view_where(None)
            experts.join(UnsupportedError)
        check_values(named := list(named_modules(roots)))
        if self._mapped is not None:
            self._origins.look()
        named = list(named_modules(roots)) if self._cut_embeddings(named) else named
        blocks = self._join_blocks(named)
        for _, module in named:
            self._evict([self._real[id(one)] for one in module._parameters.values() if id(one) in self._real])
        self._real.clear()
        for why, nbytes in self._copied.items():
            logger.info("%s of the checkpoint have records of their own: %s", format_size(nbytes), why)
        self._hand_over(named, blocks)
        return roots

    def _join_blocks(self, named: list[tuple[str, nn.Module]]) -> list[Block]:
        """Let the modules of small blocks share a unit, as Config or a run says; return these blocks."""
        blocks = blocks_of(named, self._kind_of, chooses(self._engine, named))
        for group in [group for block in blocks for group in block.groups]:
            self._join([self._entries[id(one)] for module in group for one in own(module)])
        return blocks

    def _kind_of(self, parameter: nn.Parameter) -> UnitKind | None:
        """Return what the parameters of one unit have in common; None for one that shares none."""
        entry = self._entry(parameter)
        if entry is None or isinstance(entry.lies, Packed):
            return None
        schema, lies = self._schema(self._asked_of(parameter)), entry.lies_in_files
        if id(parameter) in self._real and self._mapped is not None:
            lies = isinstance(self._origins.of(parameter, compute_dtype(schema)), FileRange)
        return UnitKind(schema, in_files=lies, trained=parameter.requires_grad)

    def _join(self, entries: Sequence[BuiltParameter]) -> None:
        """Let parameters of one kind share a record; those that were evicted leave theirs."""
        parameters = [one for entry in entries if (one := entry.parameter()) is not None]
        kinds = [kind for one in parameters if (kind := self._kind_of(one)) is not None]
        if all(kind.in_files for kind in kinds):
            self._evict([one for one in entries if id(one.parameter()) in self._real])
            record = self._engine.new_record(parameters, f"block no. {len(self._records)}", kinds[0].schema)
            self._engine.lay_in_files(record, [one.lies for one in entries if one.lies is not None])
            self._records[record] = None
            for index, entry in enumerate(entries):
                entry.belongs_to(record, index)
            return
        counted = None
        if any(one.record is not None for one in entries):
            self._evict([one for one in entries if id(one.parameter()) in self._real])
            counted = self._copied.copy()
            self._restore(parameters, "data", ())
        for left in dict.fromkeys(one.leave_record() for one in entries):
            if left is not None:
                del self._records[left]
                for field in left.schema.weights:
                    left.drop(field)
        self._evict(entries)
        self._copied = self._copied if counted is None else counted

    def _cut_embeddings(self, named: list[tuple[str, nn.Module]]) -> bool:
        """Cut large embeddings by their rows, in place, now that it is known what else uses their weights;
        return whether there were any. See [Note: blocks of rows] in planning/tile_size.py.
        """
        config = self._engine.config
        whole = config.experts == "whole" or not config.schema.is_exact or self._engine.stages.mesh.several
        if whole or self._engine.nvme_store is None:  # ranks beside this one might cut otherwise
            return False
        numel = sum(
            one.numel() for _, module in named for one in module._parameters.values() if one is not None
        )
        if numel * self._engine.schema.slot_nbytes <= self._engine.budget.kept_nbytes:
            return False  # all stays in host memory, where blocks would only be more calls
        found = [] if self._taken_in or self._overflow else list(in_blocks(named, self._engine.schema.width))
        held = held_elsewhere([one for _, one, _ in found], self._engine.ranks)
        for number, (name, embedding, grid) in enumerate(found):
            tiles = [] if number in held else self._blocks(embedding._parameters["weight"], grid)
            if tiles:
                TiledEmbedding.convert(embedding, tiles, grid, UnsupportedError)
                rows, columns = grid.shape
                logger.info("%s of %d x %d is kept in %d blocks of rows", name, rows, columns, len(tiles))
        return bool(found)

    def _blocks(self, weight: nn.Parameter | None, grid: Grid) -> list[EmbeddingTile]:
        """Return modules of the rows of an embedding's weight; none where it has to stay whole."""
        entry = self._entry(weight)
        if weight is None or entry is None or isinstance(entry.lies, Packed):
            return []
        evicted = id(weight) not in self._real
        if evicted and entry.record is not None and entry.record.in_files is not None:
            return [self._block_in_files(entry, weight, rows) for rows, _ in grid.slices()]
        if not evicted:
            self._real.remove(id(weight))
            return [self._block(weight, weight.detach()[rows], entry) for rows, _ in grid.slices()]
        tiles = []
        # There is room for some blocks, and perhaps not for all of the weight. They are read together into
        # memory that malloc maps: freed one by one, they would leave holes among small objects.
        of_row = max(1, weight.nbytes // len(weight))
        for group in in_groups([rows for rows, _ in grid.slices()], _MAPPED_NBYTES // of_row):
            values = self._rows(entry, weight, slice(group[0].start, group[-1].stop))
            for part in values.split([rows.stop - rows.start for rows in group]):
                tiles.append(self._block(weight, part, entry))
                self._evict([self._entries[id(tiles[-1].weight)]])
        return tiles

    def _block(self, weight: nn.Parameter, values: torch.Tensor, of: BuiltParameter) -> EmbeddingTile:
        """Return a module of some rows of a weight, a real one, which is taken charge of."""
        own = values.data  # past the version of the whole, which all blocks would share
        tile = EmbeddingTile(nn.Parameter(own, weight.requires_grad))
        self._take(tile, "weight", tile.weight, of.asked)
        return tile

    def _rows(self, entry: BuiltParameter, weight: nn.Parameter, rows: slice) -> torch.Tensor:
        """Return some rows of an evicted parameter."""
        if entry.record is None:
            raise not_resident(weight, "cut by rows")
        of_row = math.prod(weight.shape[1:])
        elements = range(rows.start * of_row, rows.stop * of_row)
        field, dtype = entry.field_in(entry.record)
        parts = self._engine.parameters.read_elements(entry.record, entry.index, elements, {field: dtype})
        return parts[field].view(-1, *weight.shape[1:]).to(weight.device, entry.dtype)

    def _block_in_files(self, of: BuiltParameter, weight: nn.Parameter, rows: slice) -> EmbeddingTile:
        """Return a module of some rows of a weight that lies in a checkpoint's files, and is not real."""
        if not isinstance(of.lies, FileRange):
            raise TypeError(f"expected a range of a file, got {of.lies}")
        path, offset, nbytes = of.lies
        of_row = nbytes // len(weight)
        shape = (rows.stop - rows.start, *weight.shape[1:])
        piece = nn.Parameter(placeholder(shape, of.dtype, weight.device), weight.requires_grad)
        tile = EmbeddingTile(piece)
        entry = self._entries[id(piece)] = BuiltParameter(piece, tile, "weight", of.asked)
        record = self._engine.new_record([piece], f"rows no. {len(self._entries)}", self._schema(of.asked))
        self._records[record] = None
        self._engine.lay_in_files(record, [FileRange(path, offset + rows.start * of_row, shape[0] * of_row)])
        entry.belongs_to(record, 0)
        set_owner(piece, self._engine)
        release(piece, placeholder(shape, of.dtype, weight.device))
        self.asked.note(piece, of.asked)
        return tile

    def _hand_over(self, named: list[tuple[str, nn.Module]], blocks: Sequence[Block]) -> None:
        units, units_of = name_records(named, self._entry, self._engine.schema.dtype)
        joined = name_blocks(blocks, units_of)
        self._overflow.refuse(list(self._records), units)
        for record in [one for one in self._records if one not in units]:  # of parameters in no model
            for field in record.schema.weights:
                record.drop(field)
        if (kind := self._engine.config.frozen_dtype) is not None:
            FrozenFile(self._engine, kind).take(frozen_layers(named, units, kind))
        self._engine.build_with(None)
        routed = routed_records(named, units_of)
        if self._engine.expert_ranks is not None:
            check_divided(units, routed, self._engine.expert_ranks.size)
        opened = self._engine.open(units, routed, chosen_records(named, units_of))
        self._engine.share_buffers(named)
        used_of = used_units(named, units_of, opened, joined)
        for _, module in named:
            if id(module) in used_of:
                covers = covered(module, used_of) if id(module) in joined else frozenset()
                self._engine.hook(module, *used_of[id(module)], covers)
        own = {module: [opened[one] for one in parts] for module, parts in units_of.items()}
        foresight = self._engine.foresight(named, own)
        for name, module in named:
            if isinstance(module, Routed):
                tiles = {id(tile): own[id(tile)] for tile in module.tiles}
                self._engine.route(module, name, tiles, foresight.get(id(module), NONE))
