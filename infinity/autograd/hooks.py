"""What forwards and backwards do with units: called by the hooks on modules and saved tensors, it holds units
while they are used and drops them afterwards.

[Note: what autograd sees]
A module's units are held during its forward. What autograd saves of a weight is packed as (unit, alias) and
unpacked by fetching the unit again, so a released weight costs nothing between its forward and its backward.
Inside a checkpoint autograd saves nothing in the forward; what the recomputation saves in the backward is the
real storage, so units used there are held until their gradients have accumulated. Nothing here relies on the
model's structure.

[Note: graph tasks]
Reentrant checkpoints run a backward inside a backward, each a graph task with a higher id. A hold begun by a
recomputation in task p ends when the unit's gradients accumulate in p itself (non-reentrant) or in the task
started right under p (reentrant).

[Note: leases]
A node of the graph may have saved several weights, and unpacks them one by one. So the units that it unpacks
are leased to it until another node of the same graph task unpacks something, or the task is over. A node that
starts a backward of its own keeps its lease meanwhile. So does the node of a call in slices, which recomputes
one slice after the other: no gradient tells that the last slice is done with a frozen unit.

[Note: all at once]
Following each module costs as much as computing it, where one token is computed with a small layer. So a
forward without gradients that finds all its units where they compute, so that a use would fetch nothing,
holds all of them from its begin to its end, and the modules in it are not followed.
Of many experts, or rows, which the data chooses among, a token uses few: their tiles are followed, and each
holds its own.

[Note: covered modules]
Nor are the modules in a block followed whose units, all of them, the block holds (Config(units="block")):
what they would hold is held, until the block's forward ends or, in a recomputation, until the gradients are
there. But where something has changed in between that decides what autograd saves, and with which hooks, or
where tiling has given such a module a forward of its own, it is followed as ever, and holds the block's unit
once more. A checkpoint within the block has other hooks, which need ours only where something is frozen. What
it recomputes are the block's modules, and not the block: the first one that is called then holds the unit for
the others. A reentrant one brings gradients of its own for each module that it runs, so each is a use.

[Note: partly frozen units]
The gradients of the parameters that train tell that the backward is done with a unit of which all train. What
is frozen beside them, in a block or in a module of its own, may be needed after these: for the gradients of
the inputs. Such a unit is held as one that is frozen as a whole, until the gradients of the inputs are there,
and in a recomputation each module of such a block is followed, as each has inputs of its own. Nor is it
updated before its backward is over.

[Note: modules in tiles]
A module that runs in tiles holds all units in it, so that one fetch serves every tile. While it runs them
without gradients the modules in it, which would each hold their units once more for every tile, are not
followed. The backward computes them again one by one, where the first tile holds what the others need.

[Note: routed units in tiles]
Of experts, which the data chooses, a tile may need a few: in a round, where no backward needs the others,
each is held by the experts' own calls.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils import _pytree as pytree

from infinity.activations.boundaries import Boundaries, Boundary, stands_between
from infinity.activations.partitioned import BoundaryPart, PartitionedBoundaries
from infinity.autograd.module_calls import differentiates, refuse, refuse_transform, runs_in_itself
from infinity.autograd.packed import PackedWeight, unchanged, where_it_is
from infinity.planning.trace import Phase
from infinity.tensors import local, spread_as
from infinity.tiling import Tile, runs_in_slices, takes_slices_back
from infinity.units.residency import UnitResidency
from infinity.units.unit import Unit

logger = logging.getLogger("infinity")
stands_between(__name__)


graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the id of the backward that is running on this thread, -1 outside any."""
_grad_enabled, _current_node = torch.is_grad_enabled, torch._C._current_autograd_node
_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
"""Named once: each use of a module asks for them."""


@dataclass(slots=True, eq=False)
class Frame:
    """A module's forward that is under way."""

    module: int  # id()
    task: int  # the graph task it runs in, -1 for an ordinary forward
    inputs: Any  # whose gradients end the holds on frozen units; None where no hold outlives the frame
    saving: torch.autograd.graph.saved_tensors_hooks | None
    keeps: bool  # the backward needs what a recomputation here saves of the weights
    counts: bool  # each use in it brings a gradient
    slices: bool  # for autograd, all uses within it are one
    again: bool  # a node recomputes a slice in it, and others will follow
    covers: frozenset[int] = frozenset()  # id() of modules: see [Note: covered modules]
    saves: object = None  # what decided what autograd saves, see `_saves`; known where it covers any
    units: list[Unit] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class BackwardLease:
    """The units that one node of the graph works with."""

    task: int  # the graph task
    node: object  # its mark, see `_mark`
    units: list[Unit] = field(default_factory=list)


class ForwardFollower(Protocol):
    """Is told of each forward that a backward may follow: what blocks keep is decided there."""

    def began(self, inputs: Any) -> None:
        """Such a forward begins; inputs: (args, kwargs) of its outermost module."""

    def saved(self, tensor: torch.Tensor) -> None:
        """Autograd saves a tensor that is no weight."""

    def ended(self, output: Any) -> None:
        """The forward is over; output: None where it failed."""


class Hooks:
    """Follows forwards and backwards of one engine's modules. One instance per engine, used by one thread at
    a time.
    """

    def __init__(
        self, residency: UnitResidency, boundaries: Boundaries | PartitionedBoundaries | None
    ) -> None:
        """Follow nothing yet. boundaries: what keeps the inputs of checkpoints; None where they stay."""
        self._residency = residency
        self._frames: list[Frame] = []
        self.by_storage: dict[int, Unit] = {}
        """Units by the key of the storage they are resident in: it tells which weight autograd saves."""
        self._tasks: list[int] = []
        self._leases: list[BackwardLease] = []
        self._counting = False
        self._at_once = False
        """Whether the outermost forward holds all units in it: see [Note: all at once]."""
        self._tiles: set[int] = set()
        """The id() of the tiles that the data chooses among."""
        self._chosen: set[Unit] = set()
        """Their units."""
        self._held: set[Unit] = set()
        self._holds: defaultdict[Unit, list[int]] = defaultdict(list)
        """For each hold that lasts until the gradients accumulate: the graph task in which it began."""
        self._arrived: defaultdict[Unit, set[int]] = defaultdict(set)
        """Parameters whose gradient has accumulated since the unit was last complete in this backward."""
        self._forward_uses: Counter[Unit] = Counter()
        """Uses in forwards since the last step."""
        self._boundaries = boundaries
        self.backward_ended: list[Any] = []
        """Called when the outermost backward is over, in the order in which they were appended."""
        self.forward_began: list[Any] = []
        """Called with a module whose forward begins that a backward may follow."""
        self.round_began: list[Any] = []
        """Called with a module whose forward begins that no backward will follow."""
        self.followers: list[ForwardFollower] = []

    @property
    def in_forward(self) -> bool:
        """Whether a forward or backward is under way: a released parameter may be fetched on demand."""
        return bool(self._frames) or graph_task() != -1

    def used_once(self, unit: Unit) -> bool:
        """Whether a unit is needed no more, and gets no gradient, once it has one of each parameter."""
        if self._forward_uses.get(unit, 0) > 1:  # several forwards since the last step have used it
            return False
        with torch._C.DisableTorchFunctionSubclass():  # that it trains is no value: no guard is asked
            return unit.trains_whole

    def begin_step(self) -> None:
        """A step was decided: count the uses of the next one."""
        self._forward_uses.clear()

    def know_chosen(self, units_of: Mapping[int, Sequence[Unit]]) -> None:
        """Know tiles, by their id(), that the data chooses among; units_of: those of each."""
        routed = self._residency.routed
        self._tiles.update(units_of)
        self._chosen.update(one for units in units_of.values() for one in units if one in routed)

    # Forward

    def enter(
        self,
        module: nn.Module,
        units: Sequence[Unit],
        inputs: Any = (),
        *,
        saves: bool = True,
        below: Sequence[Unit] = (),
        covers: frozenset[int] = frozenset(),
    ) -> None:
        """Begin a module's forward; without `saves` the graph that is built takes no hooks. below: the units
        of all modules in it, if they are known. covers: see [Note: covered modules].
        """
        task, key, frames = graph_task(), id(module), self._frames
        held = self._is_held if frames else self._is_held_already
        if held(module, units, task):
            return
        if task == -1 and self._tasks:
            self.end_backward()  # the last one ended with an exception
        for frame in frames:
            if frame.module == key and not runs_in_itself(module):
                self._abandon_frames()
                break
        outer = frames[-1] if frames else None
        if outer is None:
            self._begin_outermost(module, task, inputs, below)
        watched, saving = self._watching(task, inputs) if saves and _grad_enabled() else (None, None)
        counts = task == -1 and self._counting and (outer is None or (outer.counts and not outer.slices))
        keeps = not isinstance(module, Tile)
        slices = "forward" in module.__dict__ and runs_in_slices(module, inputs or ((), {}))
        again = task != -1 and keeps and takes_slices_back(_current_node())
        covered = (covers, self._saves()) if covers and not slices else ()
        frame = Frame(key, task, watched, saving, keeps, counts, slices, again, *covered)
        frames.append(frame)
        if task != -1:
            self._note_backward(task)
        if self._at_once and (outer is None or key in self._tiles):
            own = units if key in self._tiles else [one for one in below if one not in self._chosen]
            self._residency.hold_here(own, frame.units)
            return
        as_chosen = slices and self._residency.in_round  # see [Note: routed units in tiles]
        for unit in units:
            if not (as_chosen and unit in self._residency.routed):
                self._hold(unit, frame)

    def _is_held(self, module: nn.Module, units: Sequence[Unit], task: int) -> bool:
        """Whether a forward that is under way holds what `module` uses: see [Note: covered modules], and
        [Note: modules in tiles].
        """
        if self._at_once and self.is_covered(module):
            return True
        frame = self._frames[-1]
        if frame.slices and frame.task == task and not torch.is_grad_enabled():
            return "forward" not in module.__dict__ and all(unit in frame.units for unit in units)
        if id(module) not in frame.covers or frame.task != task or "forward" in module.__dict__:
            return False
        if not torch.is_grad_enabled():
            if self._counting and task == -1:  # a reentrant checkpoint: each brings gradients of its own
                for unit in frame.units:
                    self._forward_uses[unit] = self._forward_uses.get(unit, 0) + 1
            return True
        if task != -1 and not _all_trainable(frame.units):
            return False  # see [Note: partly frozen units]
        saves = self._saves()
        return saves == frame.saves or (_is_hook_of_checkpoint(saves) and _all_trainable(frame.units))

    def _is_held_already(self, module: nn.Module, units: Sequence[Unit], task: int) -> bool:
        """Whether a recomputation in the same backward holds all that `module`, which calls no other, uses
        until the gradients are there; or there is nothing to hold for it.
        """
        if task == -1:
            return False
        if not units:
            followed = "forward" in module.__dict__ or isinstance(module, Tile) or not _grad_enabled()
            return not followed
        if module._modules:  # noqa: SLF001
            return False
        for unit in units:
            holds = self._holds.get(unit)
            if not holds or holds[-1] != task:
                return False
        return _all_trainable(units)  # last: parameters that are released answer slowly

    def _saves(self) -> object:
        """Return what decides what autograd saves, and with which hooks: outside a backward, those that pack
        weights for it.
        """
        if not torch.is_grad_enabled() or graph_task() != -1:
            return torch.is_grad_enabled()
        pair = _saved_tensors_hooks(True)
        return None if pair is None else pair[0]

    def _watching(
        self, task: int, inputs: Any
    ) -> tuple[Any, torch.autograd.graph.saved_tensors_hooks | None]:
        """Return the inputs whose gradients end holds, and the hooks that pack weights, of a forward that
        builds a graph.
        """
        if task != -1:
            return inputs, None
        pair = _saved_tensors_hooks(True)
        if pair is not None and _is_hook_of_checkpoint(pair[0]):
            return inputs, None
        if pair is None or getattr(pair[0], "infinity", None) is not self:
            return None, self._packing(*((where_it_is, unchanged) if pair is None else pair))
        return None, None

    def _begin_outermost(self, module: nn.Module, task: int, inputs: Any, below: Sequence[Unit]) -> None:
        """Begin a forward within no other; a recomputation, in a backward, is none that counts."""
        refuse(module)
        if task != -1:
            self._counting = self._at_once = False
            return
        self._counting = _grad_enabled()
        for call in self.forward_began if self._counting else self.round_began:
            call(module)
        for one in self.followers if self._counting else ():
            one.began(inputs)
        self._at_once = not self._counting and bool(below) and self._residency.are_here(below)

    def is_covered(self, module: nn.Module) -> bool:
        """Whether the outermost forward holds the units of `module`, which begins or ends within it: see
        [Note: all at once].
        """
        if not self._at_once or len(self._frames) != 1:
            return False
        if self._frames[0].module == id(module) or id(module) in self._tiles:
            return False
        return not torch.is_grad_enabled() and graph_task() == -1

    def _hold(self, unit: Unit, frame: Frame) -> None:
        leased = frame.again and not unit.trainable
        if leased:
            self._lend(unit)
        self._residency.hold(unit, Phase.FORWARD if frame.task == -1 else Phase.BACKWARD)
        frame.units.append(unit)
        if frame.counts:
            self._forward_uses[unit] = self._forward_uses.get(unit, 0) + 1
        if frame.inputs is not None and not leased and not unit.trains_whole:
            self._watch(unit, _differentiable(frame.inputs))

    def _packing(self, pack: Any, unpack: Any) -> torch.autograd.graph.saved_tensors_hooks:
        """Pack weights from here on; tensors that are not weights go to the hooks installed before."""

        def ours(tensor: torch.Tensor) -> Any:
            return self._pack(tensor, pack)

        ours.infinity = self  # type: ignore[attr-defined]
        pair = torch.autograd.graph.saved_tensors_hooks(ours, lambda packed: self._unpack(packed, unpack))
        pair.__enter__()
        return pair

    def leave(self, module: nn.Module, output: Any) -> None:
        """End a module's forward, also one that raised; units it used are released, or held as the backward
        needs.

        Raises: UnsupportedError naming a parameter that was changed.
        """
        frames, key, ours = self._frames, id(module), False
        if frames and frames[-1].module != key:
            for frame in frames:
                if frame.module == key:
                    break
            else:
                return  # it was not followed
        if self._at_once and not frames:
            return
        while frames and not ours:
            ours = frames[-1].module == key
            self._end_frame(frames[-1], output if ours else None)
        over = not frames and graph_task() == -1
        if over:
            self._residency.meet()
        if self._residency.refusals.found:
            self._residency.refusals.check()
        if over and self._counting:
            for one in self.followers:
                one.ended(output)

    def _abandon_frames(self) -> None:
        """End the frames of a forward that was interrupted (KeyboardInterrupt runs no hooks)."""
        while self._frames:
            frame = self._frames[-1]
            while frame.units:
                self._residency.drop(frame.units.pop())
            self._end_frame(frame, None)

    def _end_frame(self, frame: Frame, output: Any) -> None:
        """End the innermost frame. Where a Ctrl-C interrupts this, `_abandon_frames` ends the rest."""
        try:
            if self._at_once and len(self._frames) == 1:
                self._residency.drop_here(frame.units)
            while frame.units:
                self._end_use(frame.units.pop(0), frame, output)
        finally:  # also where the engine has failed: hooks left on torch's stack would keep the model
            saving, frame.saving = frame.saving, None
            if saving is not None:
                saving.__exit__(None, None, None)
        self._frames.pop()
        self._at_once = self._at_once and bool(self._frames)

    def _end_use(self, unit: Unit, frame: Frame, output: Any) -> None:
        leased = frame.again and not unit.trainable
        if frame.task != -1 and frame.keeps and not leased and _grad_enabled():
            self._hold_for_backward(unit, frame.task, output)
        elif len(self._frames) > 1 and self._aliased(unit, output):
            self._frames[-2].units.append(unit)
        else:
            self._residency.drop(unit)

    def _aliased(self, unit: Unit, output: Any) -> bool:
        """Whether a module returned (a view of) its own weights, which its parent then uses."""
        key = unit.storage_key
        if type(output) is torch.Tensor and output.layout == torch.strided:  # as nearly always
            return bool(output.untyped_storage()._cdata == key)
        leaves = (output,) if isinstance(output, torch.Tensor) else pytree.tree_leaves(output)
        for leaf in leaves:
            strided = isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided
            if strided and local(leaf).untyped_storage()._cdata == key:
                return True
        return False

    def touch(self, unit: Unit) -> None:
        """Make a unit resident until the module, or the node of a backward, that runs ends: `in_forward`."""
        if self._frames:
            if differentiates():
                refuse_transform([unit])
            with temporarily_clear_interpreter_stack():
                self._hold(unit, self._frames[-1])
        else:
            self._lend(unit)

    # Backward

    def _pack(self, tensor: torch.Tensor, otherwise: Any) -> Any:
        here, unit = local(tensor), None
        if tensor.layout == torch.strided:
            unit = self.by_storage.get(here.untyped_storage()._cdata)
        if unit is None or tensor.dtype != unit.flat.dtype:
            boundaries = self._boundaries
            for one in self.followers:
                one.saved(tensor)
            stays = otherwise is not where_it_is or here is not tensor
            if not stays and boundaries is not None and boundaries.takes(tensor):
                return boundaries.save(tensor)
            return otherwise(tensor)
        like = None if here is tensor else spread_as(tensor, torch.empty_like(here, device="meta"))
        place = here.shape, here.stride(), int(here.storage_offset())
        return PackedWeight(unit, *place, unit.version, like)

    def _unpack(self, packed: Any, otherwise: Any) -> torch.Tensor:
        if isinstance(packed, (Boundary, BoundaryPart)):
            return packed.take()
        if not isinstance(packed, PackedWeight):
            tensor: torch.Tensor = otherwise(packed)
            return tensor
        unit = packed.unit
        if packed.version != unit.version:
            raise RuntimeError(
                f"{unit.name}: its parameters were changed (by optimizer.step(), gathered(write=True) or "
                "load_state_dict) after the forward whose backward is running. "
                "Run forward and backward again after a step; "
                'with retain_graph, call step() after the last backward (and not update="backward").'
            )
        if graph_task() == -1 or torch.is_grad_enabled():
            # Read outside a backward, or for create_graph=True, whose graph outlives this node.
            self._residency.hold_aside(unit, exact=False)
            copy = unit.flat.as_strided(packed.shape, packed.stride, packed.offset).clone()
            self._residency.drop(unit)
            return packed.whole(copy)
        self._lend(unit)
        return packed.whole(unit.flat.as_strided(packed.shape, packed.stride, packed.offset))

    def _lend(self, unit: Unit) -> None:
        """Hold `unit` for the node that is running: see [Note: leases]."""
        task, node = graph_task(), _mark(torch._C._current_autograd_node())
        self._note_backward(task)
        lease = self._leases[-1] if self._leases else None
        if lease is None or lease.task != task:
            lease = BackwardLease(task, node)
            self._leases.append(lease)
        elif lease.node is not node:
            ended, lease.units = lease.units, [one for one in lease.units if one is unit]
            lease.node = node
            for one in ended:
                if one is not unit:
                    self._residency.drop(one)
        if unit not in lease.units:
            self._residency.hold(unit, Phase.BACKWARD)
            lease.units.append(unit)

    def _end_leases(self, since: int) -> None:
        """End the leases of graph tasks from `since` on."""
        while self._leases and self._leases[-1].task >= since:
            for unit in self._leases.pop().units:
                self._residency.drop(unit)

    def _hold_for_backward(self, unit: Unit, task: int, output: Any) -> None:
        """Keep the frame's hold until the backward has used what the recomputation saved."""
        if not unit.trainable:
            leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
            if leaves and not any(leaf.requires_grad for leaf in leaves):
                self._residency.drop(unit)  # no gradient goes back through it
                return
        self._holds[unit].append(task)
        self._held.add(unit)

    def _watch(self, unit: Unit, inputs: list[torch.Tensor]) -> None:
        """End one hold on a frozen unit when the gradients of all these inputs have come: nothing else tells
        that the backward is done with it.
        """
        count = missing = len(inputs)  # the hook may not refer to the inputs: a cycle that is never collected

        def arrived(_grad: torch.Tensor) -> None:
            nonlocal missing
            missing -= 1
            if not missing:
                missing = count
                self._note_backward(graph_task())
                holds = self._holds[unit]
                if holds and holds[-1] >= self._outer_task:
                    holds.pop()
                    self._residency.drop(unit)

        for one in inputs:
            one.register_hook(arrived)

    def accumulated(self, unit: Unit, index: int) -> bool:
        """Note that a parameter's gradient has accumulated; return whether all of the unit's have, so that
        `end_unit` is to be called.
        """
        self._note_backward(graph_task())
        arrived = self._arrived[unit]
        arrived.add(index)
        if len(arrived) == len(unit.parameters):
            return True
        for at, parameter in enumerate(unit.parameters):
            if at not in arrived and parameter.requires_grad:
                return False
        return True

    def end_unit(self, unit: Unit) -> None:
        """End the holds that waited for a unit's gradients: see [Note: graph tasks]."""
        self._arrived[unit].clear()
        if not unit.trains_whole:
            return  # `_watch` ends them: see [Note: partly frozen units]
        parent = self._outer_task
        self._end_holds(unit, parent)
        if self._leases and self._leases[-1].task >= parent and unit in self._leases[-1].units:
            self._leases[-1].units.remove(unit)
            self._residency.drop(unit)

    @property
    def _outer_task(self) -> int:
        """The graph task around the one that runs; that one itself if it is the outermost."""
        return self._tasks[-2] if len(self._tasks) > 1 else self._tasks[-1]

    def _end_holds(self, unit: Unit, since: int) -> None:
        """End the holds on `unit` that began in graph task `since` or later."""
        holds = self._holds[unit]
        before = len(holds)
        holds[:] = [task for task in holds if task < since]
        if not holds:
            self._held.discard(unit)
        for _ in range(before - len(holds)):
            self._residency.drop(unit)

    def _note_backward(self, task: int) -> None:
        """Keep the stack of running graph tasks; on a backward's first event, have torch tell its end."""
        if self._tasks and self._tasks[-1] == task:
            return
        if not self._tasks:
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
        while self._tasks and self._tasks[-1] > task:
            self._end_leases(self._tasks.pop())
        if not self._tasks or self._tasks[-1] < task:
            self._tasks.append(task)

    def end_backward(self) -> None:
        """End the holds of the backward that is over, or has raised, and make the calls that follow it."""
        self._tasks.clear()
        self._end_leases(-1)
        for unit in list(self._held):
            self._end_holds(unit, -1)
        self._arrived.clear()
        for call in self.backward_ended:
            call()
        self._residency.refusals.check()


def _differentiable(inputs: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(inputs)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def _mark(node: Any) -> object:
    """Return an object that stands for a node of the graph without keeping it: a lease outlives a backward
    that raised, and the graph leads back to this object in a way that Python's collector cannot follow.
    """
    return None if node is None else node.metadata.setdefault(_mark, object())


def _all_trainable(units: Iterable[Unit]) -> bool:
    """Whether every parameter of these units trains."""
    return all(unit.trains_whole for unit in units)


def _is_hook_of_checkpoint(pack: Any) -> bool:
    return getattr(pack, "__module__", "") == "torch.utils.checkpoint"
