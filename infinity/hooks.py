"""What a forward and a backward do with units: module hooks, saved-tensor hooks, and leases that end when gradients have come.

[Note: what autograd sees]
A module's units are held during its forward. What autograd saves of a weight is packed as (unit, alias) and unpacked by
fetching the unit again, so a released weight costs nothing between its forward and its backward. Inside a checkpoint autograd
saves nothing in the forward; what the recomputation saves in the backward is the real storage, so units used there are held until
their gradients have accumulated. In all that, nothing relies on the model's structure.

[Note: graph tasks]
Reentrant checkpoints run a backward inside a backward, each a graph task with a higher id. A hold begun by a recomputation in task
p ends when the unit's gradients accumulate in p itself (non-reentrant) or in the task started right under p (reentrant).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from infinity.errors import UnsupportedError
from infinity.executor import Executor
from infinity.trace import Phase
from infinity.unit import Unit

logger = logging.getLogger("infinity")


def graph_task() -> int:
    """Return the id of the backward that is running on this thread, -1 outside any."""
    return int(torch._C._current_graph_task_id())


@dataclass(slots=True, eq=False)
class Frame:
    """One module's forward that is under way."""

    module: int  # id()
    task: int  # the graph task it runs in, -1 for an ordinary forward
    units: list[Unit] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Packed:
    """What autograd keeps of a weight."""

    unit: Unit
    alias: torch.Tensor
    version: int


class Hooks:
    """Follows forwards and backwards of one engine's modules. One instance per engine, used by one thread at a time."""

    def __init__(self, executor: Executor) -> None:
        """Follow nothing yet."""
        self._executor = executor
        self._frames: list[Frame] = []
        self._saved: torch.autograd.graph.saved_tensors_hooks | None = None
        self._by_storage: dict[int, Unit] = {}
        self._lingering: list[Unit] = []
        self._tasks: list[int] = []
        self._lease: Unit | None = None
        self._counting = False
        self._held: set[Unit] = set()
        self.backward_ended: list[Any] = []
        """Callables run when the outermost backward is over."""

    @property
    def in_forward(self) -> bool:
        """Whether a forward of the model is under way (recomputation included)."""
        return bool(self._frames)

    def watch(self, unit: Unit) -> None:
        """Recognise the storage of `unit` when autograd saves it."""
        self._by_storage[unit.storage_key()] = unit

    # Forward

    def enter(self, module: nn.Module, units: Iterable[Unit]) -> None:
        """Begin a module's forward."""
        task = graph_task()
        if task == -1 and self._tasks:
            self.end_backward()  # the last one ended with an exception
        if not self._frames:
            self._enter_outermost(module, task)
        frame = Frame(id(module), task)
        self._frames.append(frame)
        if task != -1:
            self._note_backward(task)
        for unit in units:
            self._hold(unit, frame)

    def _hold(self, unit: Unit, frame: Frame) -> None:
        self._executor.hold(unit, Phase.FORWARD if frame.task == -1 else Phase.BACKWARD)
        frame.units.append(unit)
        if frame.task == -1 and self._counting:
            unit.forward_uses += 1

    def _enter_outermost(self, module: nn.Module, task: int) -> None:
        _refuse(module)
        for unit in self._lingering:
            self._executor.drop(unit)
        self._lingering.clear()
        self._counting = task == -1 and torch.is_grad_enabled()
        if task != -1 or not torch.is_grad_enabled():
            return
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if outer is not None and _of_checkpoint(outer[0]):
            return  # it saves nothing; and with a pair of ours inside, its recomputation would not match
        pack, unpack = outer or (_as_is, _as_is)
        self._saved = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: self._pack(tensor, pack), lambda packed: self._unpack(packed, unpack)
        )
        self._saved.__enter__()

    def leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """End a module's forward, also one that raised; units it used are released, or held as the backward needs."""
        while self._frames:
            frame = self._frames.pop()
            ours = frame.module == id(module)
            for unit in frame.units:
                self._end_use(unit, frame, inputs if ours else (), output)
            if ours:
                break
        if not self._frames and self._saved is not None:
            saved, self._saved = self._saved, None
            saved.__exit__(None, None, None)

    def _end_use(self, unit: Unit, frame: Frame, inputs: Any, output: Any) -> None:
        if frame.task != -1 and torch.is_grad_enabled():
            self._hold_for_backward(unit, frame.task, inputs)
        elif self._aliased(unit, output):
            (self._frames[-1].units if self._frames else self._lingering).append(unit)
        else:
            self._executor.drop(unit)

    def _aliased(self, unit: Unit, output: Any) -> bool:
        """Whether a module returned (a view of) its own weights, whose storage must then outlive its forward."""
        key = unit.storage_key()
        leaves = (output,) if isinstance(output, torch.Tensor) else pytree.tree_leaves(output)
        return any(
            isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and leaf.untyped_storage()._cdata == key for leaf in leaves
        )

    def touch(self, unit: Unit) -> bool:
        """Make a unit resident for the forward under way, until the module that runs ends; False outside any forward."""
        if not self._frames:
            return False
        self._hold(unit, self._frames[-1])
        return True

    # Backward

    def _pack(self, tensor: torch.Tensor, otherwise: Any) -> Any:
        unit = self._by_storage.get(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else None
        return otherwise(tensor) if unit is None else Packed(unit, tensor.detach(), unit.version)

    def _unpack(self, packed: Any, otherwise: Any) -> torch.Tensor:
        if not isinstance(packed, Packed):
            tensor: torch.Tensor = otherwise(packed)
            return tensor
        unit = packed.unit
        if packed.version != unit.version:
            raise RuntimeError(
                f"{unit.name}: its parameters were changed (by optimizer.step(), gathered(write=True) or load_state_dict) after the forward "
                "whose backward is running. Run forward and backward again after a step; "
                'with retain_graph, call step() after the last backward (and not update="backward").'
            )
        task = graph_task()
        if task != -1:
            self._note_backward(task)
        self._lend(unit)
        return packed.alias

    def _lend(self, unit: Unit) -> None:
        """Hold `unit` for the node that is running; the lease ends when another unit is asked for."""
        if self._lease is unit:
            return
        self._end_lease()
        self._executor.hold(unit, Phase.BACKWARD)
        self._lease = unit

    def _end_lease(self) -> None:
        unit, self._lease = self._lease, None
        if unit is not None:
            self._executor.drop(unit)

    def _hold_for_backward(self, unit: Unit, task: int, inputs: Any) -> None:
        """Keep the frame's hold until the backward is through with what the recomputation saved."""
        if unit.trainable:
            unit.backward_holds.append(task)
            self._held.add(unit)
            return
        for leaf in pytree.tree_leaves(inputs):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                unit.backward_holds.append(task)
                self._held.add(unit)
                leaf.register_hook(lambda grad: self._end_holds(unit, task))
                return
        self._executor.drop(unit)

    def accumulated(self, unit: Unit, index: int) -> bool:
        """Note that a parameter's gradient has accumulated; True when the unit's have all, and `end_unit` is due."""
        self._note_backward(graph_task())
        unit.arrived.add(index)
        return unit.arrived >= unit.trainable

    def end_unit(self, unit: Unit) -> None:
        """End the holds that waited for a unit's gradients: see [Note: graph tasks]."""
        unit.arrived.clear()
        parent = self._tasks[-2] if len(self._tasks) > 1 else self._tasks[-1]
        self._end_holds(unit, parent)
        if self._lease is unit:
            self._end_lease()

    def _end_holds(self, unit: Unit, since: int) -> None:
        """End the holds on `unit` that began in graph task `since` or later."""
        ending = [task for task in unit.backward_holds if task >= since]
        unit.backward_holds = [task for task in unit.backward_holds if task < since]
        if not unit.backward_holds:
            self._held.discard(unit)
        for _ in ending:
            self._executor.drop(unit)

    def _note_backward(self, task: int) -> None:
        """Keep the stack of running graph tasks; the first event of a backward asks to be told of its end."""
        if not self._tasks:
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
        while self._tasks and self._tasks[-1] > task:
            self._tasks.pop()
        if not self._tasks or self._tasks[-1] < task:
            self._tasks.append(task)

    def end_backward(self) -> None:
        """End every hold of the backward that is over (or died), and tell those who wait for it."""
        self._tasks.clear()
        self._end_lease()
        for unit in list(self._held):
            self._end_holds(unit, -1)
            unit.arrived.clear()
        for call in self.backward_ended:
            call()


def _as_is(value: Any) -> Any:
    return value


def _of_checkpoint(pack: Any) -> bool:
    return getattr(pack, "__module__", "") == "torch.utils.checkpoint"


def _refuse(module: nn.Module) -> None:
    """Refuse what would run around the hooks."""
    if getattr(module, "_is_replica", False):
        raise UnsupportedError("nn.DataParallel copies parameters that are not resident. Use torchrun with one process per device.")
    if torch.compiler.is_compiling() or getattr(module, "_compiled_call_impl", None) is not None or _inside_compile():
        raise UnsupportedError("torch.compile cannot trace fetching and releasing parameters. Run the model without it.")


def _inside_compile() -> bool:
    callback = torch._C._dynamo.eval_frame.get_eval_frame_callback()
    return callback not in (None, False)
