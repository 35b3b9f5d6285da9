"""Runs a module over slices of its inputs, one after another, and recomputes them in backward.

[Note: one call, one gradient]
From outside a sliced module is called once, so hooks that fetch its parameters around the call fetch them
once. For autograd it is one node: its backward runs the forward and backward of each slice, sums each
parameter's gradient, and returns it once. Hooks on accumulated gradients therefore run once per backward, as
without slices.

The sum runs from the first slice to the last, in the order in which micro-batches would add to `.grad`: for
16-bit parameters in fp32, rounded once at the end (plain accumulation rounds every time), else in the
parameter's dtype.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence, MutableSet, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from infinity.tiling import mapped
from infinity.tiling.lending import Lending
from infinity.tiling.linears import Straight
from infinity.tiling.sums import GradientSums
from infinity.tiling.tile import Kept

FEWEST_NBYTES = mapped.LARGE_NBYTES // 16
"""The smallest input of a slice for which its results are expected to be large enough for the pool."""
TENSOR = object()
"""Marks the place of a tensor among the leaves of a result."""


@dataclass(slots=True)
class Call:
    """One call of a module in slices."""

    forward: Callable[..., Any]
    spec: pytree.TreeSpec  # of (args, kwargs)
    leaves: list[Any]  # of (args, kwargs); None in the place of tensors, which autograd keeps
    tensors: list[int]  # positions of tensors among the leaves
    sliced: list[bool]  # for each tensor, whether it is cut
    dims: list[int]  # for each tensor, the dimension along which it is cut; 0 if it is not
    sizes: tuple[int, ...]  # lengths of the slices
    straight: bool  # see the notes in linears.py
    cuda: list[torch.device]
    states: list[Any] = field(default_factory=list)  # of the random generators, before each slice
    unread: list[frozenset[int]] = field(default_factory=list)  # per slice: layers whose results nobody read
    autocast: list[tuple[str, bool, torch.dtype]] = field(default_factory=list)
    result: pytree.TreeSpec | None = None
    outputs: list[Any] = field(default_factory=list)  # leaves of the result; TENSOR in the place of tensors

    def run_first(
        self, tensors: Sequence[torch.Tensor], pool: mapped.BufferPool
    ) -> tuple[list[torch.Tensor], pytree.TreeSpec, list[Any]]:
        """Run the module on the tensors of one slice.

        Returns the result's tensors, its structure and its leaves, with TENSOR in the place of tensors.
        """
        self.states.append(_generators(self.cuda))
        straight = Straight(pool, None)
        found, spec, rest = self._run(tensors, straight)
        self.unread.append(straight.unread(found))
        return found, spec, rest

    def run_again(
        self, number: int, tensors: Sequence[torch.Tensor], sums: GradientSums, pool: mapped.BufferPool
    ) -> list[torch.Tensor]:
        """Run the module on slice `number` again, recorded by autograd; returns the result's tensors.

        Not all of them have values: see [Note: results that nobody reads].
        """
        _set_generators(self.cuda, self.states[number])
        with torch.enable_grad():
            found, _, _ = self._run(tensors, Straight(pool, sums, self.unread[number]))
        return found

    def _run(
        self, tensors: Sequence[torch.Tensor], straight: Straight
    ) -> tuple[list[torch.Tensor], pytree.TreeSpec, list[Any]]:
        leaves = list(self.leaves)
        for position, tensor in zip(self.tensors, tensors, strict=True):
            leaves[position] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        with straight if self.straight else contextlib.nullcontext():
            found, spec = pytree.tree_flatten(self.forward(*args, **kwargs))
        rest = [TENSOR if isinstance(one, torch.Tensor) else one for one in found]
        return [one for one in found if isinstance(one, torch.Tensor)], spec, rest

    @contextlib.contextmanager
    def lending(self, inputs: Sequence[torch.Tensor]) -> Iterator[mapped.BufferPool]:
        """Let each slice reuse the memory of the one before: see [Note: results of pointwise operations]."""
        pool = mapped.BufferPool()
        cuts = [one for one, cut in zip(inputs, self.sliced, strict=True) if cut and one.device.type == "cpu"]
        large = sum(one.nbytes for one in cuts) >= len(self.sizes) * FEWEST_NBYTES
        with Lending(pool) if self.straight and large else contextlib.nullcontext():
            yield pool
        pool.clear()

    def parts(self, tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Yield the tensors of each slice. Slices are contiguous, as some modules expect (Conv1D)."""
        start = 0
        for size in self.sizes:
            yield [
                one.narrow(dim, start, size).contiguous() if cut else one
                for one, cut, dim in zip(tensors, self.sliced, self.dims, strict=True)
            ]
            start += size


def run_in_slices(
    forward: Callable[..., Any],
    parameters: Sequence[nn.Parameter],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    cut: Callable[[torch.Tensor], int | None],
    size: int,
    straight: bool,
) -> Any:
    """Return forward(*args, **kwargs), computed on slices of at most `size` and recomputed in backward.

    cut: returns the dimension along which a tensor argument is cut, None for one that is passed whole. All
        cut dimensions have the same length. Every tensor of the result has that length too, in the dimension
        along which the first cut argument is cut.
    straight: see [Note: straight into the sums] in linears.py.

    Raises:
        ValueError: no argument to cut, lengths that differ, or an argument that the module may change.
        RuntimeError: the module changed an input in place (a recomputation would start from the change).
        TypeError: a result that cannot be assembled from slices.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    for leaf in leaves:
        if isinstance(leaf, MutableMapping | MutableSequence | MutableSet):
            raise ValueError(  # noqa: TRY004 - of a value in it, to the caller
                f"the module was given a {type(leaf).__name__}, through which modules hand each other values "
                "(shared keys, for one): slices would take one another's. Leave the model out of tiling."
            )
    positions = [number for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = [leaves[number] for number in positions]
    dims = [cut(one) for one in tensors]
    lengths = {one.shape[dim] for one, dim in zip(tensors, dims, strict=True) if dim is not None}
    if len(lengths) != 1:
        raise ValueError(
            f"tensors of shapes {[tuple(one.shape) for one in tensors]} have the lengths {sorted(lengths)} "
            "along the dimensions to cut: expected exactly one length"
        )
    (length,) = lengths
    sizes = tuple(min(size, length - start) for start in range(0, length, size)) or (0,)
    call = Call(
        forward,
        spec,
        [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves],
        positions,
        [dim is not None for dim in dims],
        [0 if dim is None else dim % one.dim() for one, dim in zip(tensors, dims, strict=True)],
        sizes,
        straight,
        sorted({one.device for one in tensors if one.device.type == "cuda"}, key=str),
    )
    for kind in sorted({one.device.type for one in tensors}):
        call.autocast.append((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)))
    used = [one for one in dict.fromkeys(parameters) if one.requires_grad]
    outputs = SlicedCall.apply(call, len(tensors), *tensors, *used)  # type: ignore[no-untyped-call]
    if call.result is None:
        raise TypeError("a sliced module returned nothing")
    rest = iter(outputs if isinstance(outputs, tuple) else (outputs,))
    return pytree.tree_unflatten([next(rest) if one is TENSOR else one for one in call.outputs], call.result)


class SlicedCall(torch.autograd.Function):
    """The node of one sliced call; see [Note: one call, one gradient]."""

    @staticmethod
    def forward(ctx: Any, call: Call, count: int, *tensors: torch.Tensor) -> Any:
        """Run the slices without recording them, and copy their results into whole tensors."""
        inputs = tensors[:count]
        versions = [one._version for one in inputs]
        whole: list[torch.Tensor] = []
        start = 0
        with call.lending(inputs) as pool:
            for number, part in enumerate(call.parts(inputs)):
                results, spec, rest = call.run_first(part, pool)
                if number == 0:
                    call.result, call.outputs = spec, _checked(rest)
                    whole = [_whole(one, call) for one in results]
                for one, result in zip(whole, results, strict=True):
                    one.narrow(_dim(call), start, call.sizes[number]).copy_(result)
                start += call.sizes[number]
                del part, results
        if versions != [one._version for one in inputs]:
            raise RuntimeError(
                "a sliced module changed its input in place, and its recomputation would start from the "
                "changed values. Slice a part of it that does not, or switch the change off (inplace "
                "dropout, router jitter)."
            )
        ctx.call = call
        ctx.save_for_backward(*inputs)
        ctx.parameters = [Kept(one) for one in tensors[count:]]
        ctx.mark_non_differentiable(*(one for one in whole if not one.is_floating_point()))
        return tuple(whole)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Recompute slice by slice, and return each gradient once."""
        call: Call = ctx.call
        inputs, parameters = ctx.saved_tensors, [one.take() for one in ctx.parameters]
        wanted = ctx.needs_input_grad[2 : 2 + len(inputs)]
        sums = GradientSums(call.sliced, call.dims, len(call.sizes), inputs, wanted, parameters)
        start = 0
        with _as_before(call), call.lending(inputs) as pool, sums.taking():
            for number, part in enumerate(call.parts(inputs)):
                size = call.sizes[number]
                part = [one.detach().requires_grad_(want) for one, want in zip(part, wanted, strict=True)]  # noqa: PLW2901
                results = call.run_again(number, part, sums, pool)
                sliced = [grad.narrow(_dim(call), start, size) for grad in grads]
                pairs = [(one, grad) for one, grad in zip(results, sliced, strict=True) if one.requires_grad]
                leaves = [one for one, want in zip(part, wanted, strict=True) if want]
                if pairs:
                    found = torch.autograd.grad(
                        [one for one, _ in pairs],
                        [*leaves, *parameters],
                        [grad for _, grad in pairs],
                        allow_unused=True,
                    )
                    sums.add(found, start, size)
                    del found
                del part, leaves, results, pairs
                start += size
        return None, None, *sums.finished()


def takes_slices_back(node: object) -> bool:
    """Whether a node of autograd's graph is that of a sliced call: its backward recomputes every slice."""
    return isinstance(node, SlicedCall._backward_cls)  # noqa: SLF001 - torch has no public name for it


def _dim(call: Call) -> int:
    return next(dim for dim, cut in zip(call.dims, call.sliced, strict=True) if cut)


def _whole(first: torch.Tensor, call: Call) -> torch.Tensor:
    dim = _dim(call)
    if first.dim() <= dim or first.shape[dim] != call.sizes[0]:
        raise TypeError(
            f"a slice of length {call.sizes[0]} returned a tensor of shape {tuple(first.shape)}: a result "
            "without one row per input row (a loss, router logits of all tokens) cannot be assembled from "
            "slices"
        )
    shape = list(first.shape)
    shape[dim] = sum(call.sizes)
    return mapped.empty(shape, first.dtype, first.device)


def _checked(rest: list[Any]) -> list[Any]:
    for one in rest:
        if one is not TENSOR and one is not None and not isinstance(one, (bool, int, float, str)):
            raise TypeError(
                f"a sliced module returned a {type(one).__name__}, which cannot be assembled from slices: "
                "expected tensors, numbers, strings or None"
            )
    return rest


def _generators(cuda: Sequence[torch.device]) -> list[torch.Tensor]:
    """Return the states of the random generators from which slices may draw."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(one) for one in cuda)]


def _set_generators(cuda: Sequence[torch.device], states: Sequence[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    for device, state in zip(cuda, states[1:], strict=True):
        torch.cuda.set_rng_state(state, device)


@contextlib.contextmanager
def _as_before(call: Call) -> Iterator[None]:
    """Context with the forward's autocast; restores the states of the random generators at its end."""
    now = _generators(call.cuda)
    try:
        with contextlib.ExitStack() as stack:
            for kind, enabled, dtype in call.autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled=enabled))
            yield
    finally:
        _set_generators(call.cuda, now)
