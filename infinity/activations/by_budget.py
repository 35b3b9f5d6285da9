"""Config(activation_memory=...): each block keeps what the budget has room for.

[Note: measure, decide, keep to it]
The first forward with gradients recomputes every block, with all inputs on NVMe where there is one, which is
the least that a forward can keep, and measures what each block needs. From that the planner
decides; the forwards that follow do as it says. A decision holds for batches of the measured shape and for
smaller ones, dimension by dimension. A larger batch, or one of another kind (another mask, a model in eval
mode, other weights that train), is measured anew, in a forward that recomputes all. So every forward is
within the budget, and the bits are the same in each.

[Note: several forwards before a backward]
A decision counts one forward. Where another is still waiting for its backward, all blocks are recomputed,
which is the least that a forward can keep; the log says so once. A forward is waiting from its first block on
until its backward comes back to that block, or its graph is gone.

[Note: ranks]
Ranks fetch weights together, and a block that is computed again fetches anew. So ranks decide alike: before
the first block of a forward they tell each other their shapes, and go by the largest; of what they measured
they take the largest as well.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from infinity.activations.boundaries import Boundaries
from infinity.activations.cut_by_budget import CutByBudget
from infinity.activations.measured import MeasuredForward, storage_of, tensors_in
from infinity.device.device import Device
from infinity.errors import ConfigError, UnsupportedError
from infinity.planning.recomputation import (
    HOST,
    KEEP,
    NVME,
    RECOMPUTE,
    ActivationPlan,
    InputTiers,
    StepMemory,
    combined,
    plan_activations,
)
from infinity.ranks.group import Ranks
from infinity.sizes import format_size
from infinity.units.released import owner_of
from infinity.units.unit import Unit

logger = logging.getLogger("infinity")

_Call = tuple[int, int]
"""A block's number, and how often the forward had called it before."""


@dataclass(frozen=True, slots=True)
class BatchShape:
    """What tells whether a decision holds for a forward."""

    kind: str
    """Names and types of what is given, and how the model is used."""
    sizes: tuple[int, ...]
    """All dimensions of all tensors that the model and its first block are given."""

    def holds(self, other: BatchShape) -> bool:
        """Whether `other` is no larger anywhere."""
        pairs = zip(self.sizes, other.sizes, strict=False)
        return self.kind == other.kind and all(one >= two for one, two in pairs)


class _Waiting:
    """Lives with the graph of a forward."""

    def __init__(self) -> None:
        self.over = False
        """Whether its backward has come back to the first block that trains."""

    def came_back(self, *_: Any) -> None:
        """Be called before the first block's backward."""
        self.over = True


@dataclass(slots=True, eq=False)
class _Run:
    """A forward that is under way."""

    inputs: Any
    """Of the model."""
    decided: bool = False
    measured: MeasuredForward | None = None
    shape: BatchShape | None = None
    """Of the batch that is measured."""
    places: dict[_Call, str] = field(default_factory=dict)
    """Where nothing is said, a block is recomputed, and its input waits on NVMe, if there is one."""
    calls: list[_Call] = field(default_factory=list)
    counts: Counter[int] = field(default_factory=Counter)
    left_alone: bool = False
    """Whether blocks were called without gradients."""
    waiting: _Waiting | None = None
    """Of its graph."""
    emptied: list[Any] = field(default_factory=list)
    """Caches that its blocks were to fill."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What the planner chose for batches of a shape."""

    shape: BatchShape
    plan: ActivationPlan
    places: dict[_Call, str]


class ActivationBudget:
    """Decides what the blocks of one engine's models keep. Called from the thread that computes."""

    def __init__(
        self,
        nbytes: int | None,
        boundaries: Boundaries,
        device: Device,
        ranks: Ranks,
        weights: dict[int, Unit],
        *,
        free_nbytes: Callable[[], int],
        host_nbytes: Callable[[], int],
        stalled_s: Callable[[], float],
        trained: Callable[[], int],
    ) -> None:
        """nbytes: None for as much as is free, in bytes, when the first forward begins, by `free_nbytes`.
        weights: units by the keys of the storages that they are resident in. host_nbytes: room of host_memory
        for inputs. stalled_s: seconds that computing waited for weights. trained: parameters that train.
        """
        self._nbytes = nbytes
        self._boundaries, self._device, self._ranks, self._weights = boundaries, device, ranks, weights
        self._free_nbytes, self._host_nbytes = free_nbytes, host_nbytes
        self._stalled_s, self._trained = stalled_s, trained
        self._run: _Run | None = None
        self.decisions: list[Decision] = []
        """All so far."""
        self._cuts: CutByBudget | None = None
        self._waiting: list[weakref.ref[_Waiting]] = []
        self._said: set[str] = set()
        self._emptied: weakref.WeakSet[Any] = weakref.WeakSet()
        """Caches of keys and values that a forward with gradients was given, and did not fill."""
        self.reason = "nothing is measured yet: the first step recomputes all blocks"
        """What the last forward did, and why, for people."""

    def cut_by(self, cuts: CutByBudget) -> None:
        """Have `cuts` hear of forwards, and measure those anew for which it chooses something else."""
        self._cuts = cuts

    @property
    def told(self) -> str:
        """What is decided, and why, for people."""
        cut = "" if self._cuts is None else self._cuts.reason
        return f"{self.reason}; {cut}" if cut else self.reason

    def budget_nbytes(self, agree: bool) -> int:  # noqa: FBT001
        """Return the budget; agree: whether all ranks ask for it. Where it is "auto", and nothing was decided
        yet, a rank that asks alone gets what is free now.
        """
        if self._nbytes is not None or (agree and torch.is_grad_enabled()):
            return self._budget()
        return max(self._free_nbytes(), 1)

    # What follows a model's forward

    def began(self, inputs: Any) -> None:
        """A forward begins that a backward may follow; inputs: (args, kwargs) of the outermost module."""
        if self._run is not None:
            self._failed(self._run)  # Ctrl-C ended it, and no hook ran
        self._run = _Run(inputs)
        if self._cuts is not None:
            self._cuts.began(inputs)

    def saved(self, tensor: torch.Tensor) -> None:
        """Autograd saves a tensor that is no weight."""
        if self._run is not None and self._run.measured is not None:
            self._run.measured.saved(tensor)

    def ended(self, output: Any) -> None:
        """The forward is over; output: None where it failed.

        Raises: ConfigError with the smallest budget that works, where nothing fits.
        """
        run, self._run = self._run, None
        if self._cuts is not None:
            self._cuts.ended()
        if run is None:
            return
        self._emptied.update(run.emptied)
        if output is None:
            self._failed(run)
            return
        if run.left_alone and not run.calls:
            self._say(
                "all blocks run in slices (tile_batch_, micro-batches that share a fetch), which recompute "
                "by themselves: nothing is decided for them"
            )
        if run.measured is None or run.shape is None:
            return
        sent = 0 if self._device.is_host else self._boundaries.outgoing_share.ledger.limit_nbytes
        step = self._agreed_step(replace(run.measured.step(output), sent_nbytes=sent), run.calls)
        if step is None:
            self._say("the ranks call other blocks than one another: all are recomputed")
            return
        tiers = InputTiers(self._room_in_host(), self._boundaries.nvme is not None)
        plan: ActivationPlan = plan_activations(step, self._budget(), tiers)
        places = dict(zip(run.calls, plan.places, strict=True))
        self.decisions.append(Decision(run.shape, plan, places))
        self.reason = plan.reason
        logger.info("activation_memory: %s", plan.reason)

    def _failed(self, run: _Run) -> None:
        """Let no other forward wait for one that failed: its error may keep its graph."""
        if run.waiting is not None:
            run.waiting.came_back()

    def _room_in_host(self) -> int:
        return self._ranks.least(self._host_nbytes(), "find room for activations")

    def _budget(self) -> int:
        """Return the budget in bytes.

        Raises: ConfigError where "auto" finds nothing free.
        """
        if self._nbytes is None:
            found = self._ranks.least(self._free_nbytes(), "find memory for activations")
            if found <= 0:
                raise ConfigError(
                    'activation_memory="auto": no memory is free where the model computes, beside what '
                    "host_memory or device_memory may still take. Make that smaller, or give a number"
                )
            self._nbytes = found
        return self._nbytes

    # Decisions

    def _decide(self, run: _Run, module: nn.Module, given: Any) -> None:
        """Say what the blocks of this forward keep, when it comes to the first: see [Note: ranks]."""
        run.decided = True
        self._waiting = [one for one in self._waiting if (there := one()) is not None and not there.over]
        shape, busy = self._agreed_shape(self._shape_of(run, module, given), busy=bool(self._waiting))
        run.inputs = None
        if busy:
            self._say(
                "a forward began while another waited for its backward: the blocks of such forwards are all "
                "recomputed, and each keeps its inputs beside the budget"
            )
            return
        if shape is None:
            self._say("the ranks are given batches of different kinds: their blocks are recomputed")
            return
        fitting = [one for one in self.decisions if one.shape.holds(shape)]
        if fitting:
            best = min(fitting, key=lambda one: sum(one.shape.sizes))
            run.places, self.reason = best.places, best.plan.reason
            return
        if self.decisions:
            logger.info("activation_memory: a larger batch, or one of another kind, is measured")
        self._budget()
        run.shape = shape
        run.measured = MeasuredForward(
            self._is_weight, self._stalled_s, self._device.synchronize, self._boundaries.can_leave
        )

    def _shape_of(self, run: _Run, module: nn.Module, given: Any) -> BatchShape:
        kinds: list[Any] = [
            module.training,
            torch.is_autocast_enabled(self._device.torch_device.type),
            self._trained(),
            sum(one.requires_grad for one in module.parameters()),
            None if self._cuts is None else self._cuts.regime(run.inputs),
        ]
        sizes: list[int] = []
        for path, leaf in pytree.tree_flatten_with_path((run.inputs, given))[0]:
            if isinstance(leaf, torch.Tensor):
                kinds.append((pytree.keystr(path), str(leaf.dtype), leaf.requires_grad, leaf.dim()))
                sizes += leaf.shape
            elif isinstance(leaf, bool | str):  # output_attentions and the like; numbers count labels
                kinds.append((pytree.keystr(path), leaf))
        return BatchShape(repr(kinds), tuple(sizes))

    def _agreed_shape(self, shape: BatchShape, *, busy: bool) -> tuple[BatchShape | None, bool]:
        """Return the largest of all ranks' shapes, None where kinds differ, and whether one is busy."""
        if self._ranks.size == 1:
            return shape, busy
        said = json.dumps([shape.kind, shape.sizes, busy]).encode()
        found = [json.loads(one) for one in self._ranks.each(said, "compare batches")]
        if any(kind != shape.kind for kind, _, _ in found):
            return None, any(one for _, _, one in found)
        sizes = tuple(map(max, zip(*(sizes for _, sizes, _ in found), strict=True)))
        return BatchShape(shape.kind, sizes), any(one for _, _, one in found)

    def _agreed_step(self, step: StepMemory, calls: Sequence[_Call]) -> StepMemory | None:
        """Return the largest of what all ranks measured; None where they called different blocks."""
        if self._ranks.size == 1:
            return step
        said = json.dumps([list(calls), asdict(step)]).encode()
        found = [json.loads(one) for one in self._ranks.each(said, "compare activations")]
        if any(theirs != [list(one) for one in calls] for theirs, _ in found):
            return None
        return combined([one for _, one in found])

    def _is_weight(self, tensor: torch.Tensor) -> bool:
        storage = storage_of(tensor)
        return storage is not None and storage._cdata in self._weights

    # Blocks

    def run_block(
        self, number: int, module: nn.Module, plain: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run a block's forward as was decided; plain: its own."""
        run = self._run
        if run is None:
            return plain(*args, **kwargs)
        self._switch_off(module)
        args, kwargs = _without_cache(args, kwargs, type(module).__name__, run.emptied)
        if not run.decided:
            self._decide(run, module, (args, kwargs))
        call = number, run.counts[number]
        run.counts[number] += 1
        run.calls.append(call)
        if run.measured is not None:
            output = self._measure(run.measured, module, plain, args, kwargs)
        else:
            place = run.places.get(call, self._safe_place)
            kept = place == KEEP
            output = plain(*args, **kwargs) if kept else self._recompute(plain, args, kwargs, place)
        if run.waiting is None:
            self._follow(run, output)
        return output

    def left_alone(self) -> None:
        """A block was called without gradients inside a forward that has them, as slices call it."""
        if self._run is not None:
            self._run.left_alone = True

    def refuse_emptied(self, args: Any, kwargs: Any) -> None:
        """Refuse a cache that an earlier forward should have filled.

        Raises: UnsupportedError.
        """
        if self._emptied and any(one in self._emptied for one in _caches_in(args, kwargs)):
            raise UnsupportedError(
                "activation_memory: the cache of keys and values of a forward with gradients is used again. "
                "It is empty, as blocks may be recomputed. Run that forward in torch.no_grad()"
            )

    def switched_off(self) -> None:
        """A block's own switch was on; it is off now."""
        self._say("it decides what is recomputed; the model's own activation checkpointing is switched off")

    def _switch_off(self, module: nn.Module) -> None:
        if getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False  # type: ignore[assignment]
            self.switched_off()

    @property
    def _safe_place(self) -> str:
        """Where the input of a block waits for which nothing is decided: the least that is possible."""
        return NVME if self._boundaries.nvme is not None else RECOMPUTE

    def _measure(
        self,
        measured: MeasuredForward,
        module: nn.Module,
        plain: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Recompute a block, and note what it needs.

        Raises: UnsupportedError for one that changes itself in its forward.
        """
        before = {name: (one, one._version) for name, one in module.named_buffers()}
        own = _own_storages(module)
        block = measured.block((args, kwargs))

        def saved(tensor: torch.Tensor) -> None:
            storage = storage_of(tensor)
            if storage is not None and storage._cdata not in own:
                block.saved(tensor)

        output = self._recompute(plain, args, kwargs, self._safe_place, saved)
        changed = [
            name
            for name, one in module.named_buffers()
            if name not in before or before[name][0] is not one or before[name][1] != one._version
        ]
        if changed:
            raise UnsupportedError(
                f"activation_memory: a {type(module).__name__} changes its buffers {', '.join(changed)} in "
                "its forward (as batch norms do), and would change them again when it is recomputed. Leave "
                "activation_memory out for this model"
            )
        measured.ended_block(block, output)
        return output

    def _recompute(
        self,
        plain: Callable[..., Any],
        args: Any,
        kwargs: Any,
        place: str,
        saved: Callable[[torch.Tensor], None] | None = None,
    ) -> Any:
        """Run a block's forward so that the backward repeats it. saved: called with what it would keep."""
        names, values = list(kwargs), [*args, *kwargs.values()]
        # Tensors are handed over by position: checkpoint saves them so, and nothing else refers to them.
        positions = [at for at, one in enumerate(values) if isinstance(one, torch.Tensor)]
        tensors = [values[at] for at in positions]
        for at in positions:
            values[at] = None
        watching = [saved] if saved is not None else []
        cuts = self._cuts
        latest = 0 if cuts is None else cuts.latest

        def forward(*tensors: torch.Tensor) -> Any:
            given = list(values)
            for at, one in zip(positions, tensors, strict=True):
                given[at] = one
            count = len(given) - len(names)
            as_then = contextlib.nullcontext() if cuts is None else cuts.as_in(latest)
            with as_then, _seeing(watching.pop()) if watching else contextlib.nullcontext():
                return plain(*given[:count], **dict(zip(names, given[count:], strict=True)))

        with self._boundaries.waiting_in(place if place in (HOST, NVME) else None):
            return checkpoint(forward, *tensors, use_reentrant=False)

    def _follow(self, run: _Run, output: Any) -> None:
        """Note when the backward comes back to the first block that trains."""
        node = next((one.grad_fn for one in tensors_in(output) if one.grad_fn is not None), None)
        if node is not None:
            waiting = run.waiting = _Waiting()
            node.register_prehook(waiting.came_back)
            self._waiting.append(weakref.ref(waiting))

    def _say(self, why: str) -> None:
        self.reason = why
        if why not in self._said:
            self._said.add(why)
            budget = '"auto"' if self._nbytes is None else format_size(self._nbytes)
            logger.warning("activation_memory=%s: %s", budget, why)


class BudgetedBlock:
    """Replaces a block's forward, on that one instance."""

    def __init__(self, budget: ActivationBudget, number: int, module: nn.Module) -> None:
        """number: the block's among all."""
        self._budget, self._number, self._module = budget, number, module
        self._forward: Callable[..., Any] = module.forward
        self.__wrapped__ = self._forward  # for inspect.signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block."""
        if torch._C._functorch.peek_interpreter_stack() is not None or in_backward():
            return self._forward(*args, **kwargs)
        self._budget.refuse_emptied(args, kwargs)
        if not torch.is_grad_enabled():
            self._budget.left_alone()
            return self._forward(*args, **kwargs)
        if _in_checkpoint():
            if getattr(self._module, "gradient_checkpointing", False):
                self._module.gradient_checkpointing = False  # type: ignore[assignment] # from the next call on
                self._budget.switched_off()
            return self._forward(*args, **kwargs)
        return self._budget.run_block(self._number, self._module, self._forward, args, kwargs)


def in_backward() -> bool:
    """Whether a backward runs on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def _in_checkpoint() -> bool:
    """Whether what autograd saves now goes to a checkpoint, which recomputes."""
    pair = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return pair is not None and getattr(pair[0], "__module__", "") == checkpoint.__module__


@contextlib.contextmanager
def _seeing(saved: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Call `saved` with what goes to the hooks on saved tensors inside the `with`."""
    pair: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if pair is None:
        raise AssertionError("no checkpoint saves anything here")
    pack, unpack = pair

    @functools.wraps(pack)  # whose module tells the engine that a checkpoint saves
    def seen(tensor: torch.Tensor) -> Any:
        saved(tensor)
        return pack(tensor)

    with torch.autograd.graph.saved_tensors_hooks(seen, unpack):
        yield


def _own_storages(module: nn.Module) -> set[int]:
    """Return the keys of the storages of a block's buffers, and of its parameters outside the engine."""
    plain = [one for one in module.parameters() if owner_of(one) is None]
    storages = (one.untyped_storage() for one in (*plain, *module.buffers()) if one.layout == torch.strided)
    return {one._cdata for one in storages}


def _caches_in(args: Any, kwargs: Any) -> list[Any]:
    cache = getattr(sys.modules.get("transformers.cache_utils"), "Cache", ())
    return [one for one in (*args, *kwargs.values()) if isinstance(one, cache)]


def _without_cache(args: Any, kwargs: Any, kind: str, emptied: list[Any]) -> tuple[Any, Any]:
    """Return a block's arguments without a cache of keys and values, which a recomputation would fill again.
    emptied: where those caches are noted.

    Raises: UnsupportedError for a cache that holds tokens, or room for them.
    """
    caches = _caches_in(args, kwargs)
    for one in caches:
        growing = type(one).__name__ in ("DynamicCache", "EncoderDecoderCache")
        if not growing or one.get_seq_length() > 0:
            raise UnsupportedError(
                f"activation_memory: a {kind} was given a {type(one).__name__}, in a forward with gradients, "
                "that holds tokens or has room for a fixed number. Its recomputation would fill it again. "
                "Call the model with use_cache=False and without a cache; PEFT's prefix tuning needs one, "
                "and goes without activation_memory"
            )
    emptied += caches
    taken = {id(one) for one in caches}
    return (
        tuple(None if id(one) in taken else one for one in args),
        {name: None if id(one) in taken else one for name, one in kwargs.items()},
    )
