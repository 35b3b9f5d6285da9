"""Any elementwise optimizer of torch over offloaded parameters: torch's own step, on parts of a parameter.

[Note: what is elementwise]
An optimizer that treats every element by itself gives the same bits for a whole parameter as for its parts.
This is tested before a class is accepted: three steps on random values, whole and cut. A record has room for
a step count and at most two tensors of the parameter's shape; classes with other scalars (NAdam, ASGD), more
tensors, or sums over rows (Adafactor) are refused by name, and so is Muon, which has a class of its own.

[Note: which tensor has a sign]
Beside `m`, codes have a sign; those of `v` have none, and twice the range instead. The test shows which
tensors of a class are never negative: the first of these is `v`, and the other one `m`. Two tensors that both
have a sign find no codes, so that their class is refused "int8". One that becomes negative only after the
test is an error in that step. "int4" is for one tensor, or for two that mean what Adam's do, which torch's
names tell. What may not be rounded stays in fp32: integers, and the state of the centered RMSprop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Optimizer

from infinity.errors import UnsupportedError
from infinity.optim.base import OffloadedOptimizer, Speculate, When
from infinity.optim.delayed import DELAYED_AFTER
from infinity.planning.layout import RecordSchema
from infinity.records.stored_moments import read_moments, round_moments
from infinity.records.update_rules import ADAM_STATE, Kernel, Recipe, UpdateSpan
from infinity.records.weights import KERNEL_DTYPE, WEIGHTS, WIDEN, Weights

CHUNK_NUMEL = 1 << 18
"""Elements that are stepped at a time: their master, gradient and state are copied in fp32."""

_FIELDS = ("m", "v")
_PROBED_NUMEL, _CUT = 1000, 307
_SUBTRACTED = {"square_avg", "grad_avg"}
"""Of the centered RMSprop: the root of one less the other's square, which rounding makes negative."""
_TYPES = {name: dtype for dtype, name in KERNEL_DTYPE.items()}


def wrap_optimizer(
    kind: type[Optimizer],
    params: Iterable[Any],
    *,
    max_norm: float | None = None,
    update: When = "forward",
    seed: int = 0,
    speculate: Speculate = "auto",
    delayed_after: int = DELAYED_AFTER,
    **options: Any,
) -> Elementwise:
    """Return an optimizer that steps offloaded parameters by any elementwise class of torch.optim.

    It is for classes without a kernel in this package, and slower. kind: the class, such as
    torch.optim.RMSprop; options: its own. Masters and arithmetic are fp32, and so is the state, unless
    Config(state_dtype=...) has it rounded after each step; the bits are those of kind(..., foreach=False) in
    memory, on fp32 parameters with the same gradients. params, max_norm, update, seed, speculate,
    delayed_after: as OffloadedOptimizer.

        optimizer = infinity.wrap_optimizer(torch.optim.RMSprop, model.parameters(), lr=1e-3, momentum=0.9)

    Raises: UnsupportedError for a class that is not elementwise, or whose state a record has no room for, or
    no codes; see the notes above. What `kind` itself raises for its options.
    """
    timing: dict[str, Any] = {"update": update, "speculate": speculate, "delayed_after": delayed_after}
    return Elementwise(kind, params, max_norm=max_norm, seed=seed, **timing, **options)


class Elementwise(OffloadedOptimizer):
    """What wrap_optimizer returns: a class of torch.optim on offloaded parameters."""

    def __init__(
        self,
        kind: type[Optimizer],
        params: Iterable[Any],
        *,
        max_norm: float | None = None,
        update: When = "forward",
        seed: int = 0,
        speculate: Speculate = "auto",
        delayed_after: int = DELAYED_AFTER,
        **options: Any,
    ) -> None:
        """Test the class, and take the parameters; room for their state is allocated now."""
        chosen = _OptimizerKind(kind, options)
        recipe = chosen.recipe()
        self._in_codes = replace(recipe, state=chosen.in_codes)
        timing: dict[str, Any] = {"update": update, "speculate": speculate, "delayed_after": delayed_after}
        super().__init__(params, chosen.defaults, recipe, max_norm=max_norm, seed=seed, **timing)

    def recipe_of(self, parameter: torch.Tensor) -> Recipe:
        """See OffloadedOptimizer. Codes have fields of their own: [Note: which tensor has a sign]."""
        record = self.mine[id(parameter)].engine.parameters.unit_of(parameter)[0].record
        return self._in_codes if record.schema.in_blocks else super().recipe_of(parameter)


@dataclass(frozen=True, slots=True)
class _Given:
    """The scalars of one parameter's step."""

    options: Mapping[str, Any]
    step: int
    clip: float


class _OptimizerKind:
    """One class of optimizers, tested, with the names of its state."""

    def __init__(self, kind: type[Optimizer], options: Mapping[str, Any]) -> None:
        """Test it with these options.

        Raises: see wrap_optimizer.
        """
        self._kind, self._options = kind, options
        if kind is getattr(torch.optim, "Muon", None):
            raise UnsupportedError("Muon is not elementwise: infinity.Muon takes its arguments")
        made = kind([torch.nn.Parameter(torch.zeros(1, device="cpu"))], **options)
        plain = {"foreach": False, "fused": False}
        self.defaults = {name: plain.get(name, value) for name, value in made.defaults.items()}
        self._count: Callable[[int], Any] | None = None
        """Converts a step count to the form of its state; None if its state has none."""
        self._signed: frozenset[str] = frozenset()
        """Those tensors of its state that were negative in the test."""
        self._rounds = True
        """Whether its state is of numbers that may be rounded, and not of integers."""
        self._state = self._tested(self.defaults)
        self._fields = dict(zip(_FIELDS, self._state, strict=False))
        v = next((name for name in self._state if name not in self._signed), None)
        self.in_codes = {"v" if name == v else "m": name for name in self._state}
        """As `_fields`, of codes: [Note: which tensor has a sign]."""
        self._known = {self._key(self.defaults)}

    def recipe(self) -> Recipe:
        """Return its update rule for OffloadedOptimizer."""
        states = ["fp32"]
        if self._rounds and not set(self._state) >= _SUBTRACTED:
            states += ["bf16"] + ["int8"] * (len(self._signed) < len(_FIELDS))
            states += ["int4"] * (len(self._state) < len(_FIELDS) or self.in_codes == ADAM_STATE)
        kernels = {(dtype, state): self._on(dtype, state) for dtype in WEIGHTS for state in states}
        name = f"Elementwise({self._kind.__name__})"
        return Recipe(name, self._fields, self._scalars, kernels, in_codes=self.in_codes)

    @staticmethod
    def _key(options: Mapping[str, Any]) -> str:
        return repr(sorted((name, one) for name, one in options.items() if name != "lr"))

    def _scalars(self, group: Mapping[str, Any], step: int, clip: float) -> _Given:
        options = {name: _own(group[name]) for name in self.defaults}
        key = self._key(options)
        if key not in self._known:
            state = self._tested(options)
            if state != self._state:
                raise ValueError(
                    f"{self._kind.__name__} was made with options that keep the state {self._state}; "
                    f"those of a param group need {state}: give them when the optimizer is made"
                )
            self._known.add(key)
        return _Given(options, step, clip)

    # Steps

    def _step(
        self, values: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Make one step in place; return the state."""
        parameter = torch.nn.Parameter(values)
        optimizer = self._kind([parameter], **self._options)
        optimizer.param_groups[0].update(options)
        if state:
            optimizer.state[parameter] = state
        parameter.grad = grad
        optimizer.step()
        return dict(optimizer.state[parameter])

    def _on(self, dtype: str, state: str) -> Kernel:
        schema, weights = RecordSchema(state, dtype), WEIGHTS[dtype]

        def step(span: UpdateSpan, given: _Given) -> None:
            for start in range(0, span.n, CHUNK_NUMEL):
                self._step_part(schema, weights, span, given, start, min(CHUNK_NUMEL, span.n - start))

        return step

    def _step_part(
        self, schema: RecordSchema, weights: Weights, span: UpdateSpan, given: _Given, start: int, n: int
    ) -> None:
        fields = self.in_codes if schema.in_blocks else self._fields
        names = *schema.weights, *schema.moments_of(fields)
        at = {name: span.at[name] + schema.nbytes(name, start) for name in names}
        dtype = _TYPES[span.dtype]
        master, grad = torch.empty(n, device="cpu"), torch.empty(n, device="cpu")
        weights.read_master(n, at, master.data_ptr())
        WIDEN[dtype](n, span.grad + dtype.itemsize * start, grad.data_ptr())
        state: dict[str, Any] = {}
        if given.step > 1:
            state = {name: torch.empty(n, device="cpu") for name in fields.values()}
            into = {field: state[name].data_ptr() for field, name in fields.items()}
            read_moments(schema, n, at, into)
            if self._count is not None:
                state["step"] = self._count(given.step - 1)
        state = self._step(master, grad.mul_(given.clip), state, given.options)
        values = {field: state[name].float().contiguous() for field, name in fields.items()}
        if schema.in_blocks and "v" in values and bool((values["v"] < 0).any()):
            raise UnsupportedError(
                f"{self._kind.__name__}: {fields['v']} has become negative, which it never was when it was "
                f"tested, and the codes of state_dtype={schema.state_dtype!r} have no sign for it: use "
                "Config(state_dtype='bf16')"
            )
        weights.write_master(n, master.data_ptr(), at)
        addresses = {field: one.data_ptr() for field, one in values.items()}
        round_moments(schema, n, at, addresses, (span.key, span.first + start))

    # The test

    def _tested(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """Test it with these options; return the names of its state. See [Note: what is elementwise]."""
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn((4, _PROBED_NUMEL), generator=generator, device="cpu")
        name = self._kind.__name__
        try:
            whole, state = self._run(drawn, options)
            parts = [self._run(drawn[:, :_CUT], options)[0], self._run(drawn[:, _CUT:], options)[0]]
        except (RuntimeError, ValueError, TypeError) as error:
            raise UnsupportedError(f"{name} cannot step flat parts of a parameter: {error}") from error
        if not torch.equal(whole, torch.cat(parts)):
            raise UnsupportedError(
                f"{name} is not elementwise: its step on parts of a parameter differs from that on the whole"
            )
        tensors = tuple(key for key, one in state.items() if getattr(one, "shape", ()) == whole.shape)
        others = sorted(set(state) - {*tensors, "step"} - {key for key, one in state.items() if one is None})
        if others or len(tensors) > len(_FIELDS):
            raise UnsupportedError(
                f"{name} keeps {', '.join([*tensors, *others])}: a record has room for a count of steps and "
                f"for {len(_FIELDS)} tensors"
            )
        self._signed |= {key for key in tensors if bool((state[key] < 0).any())}
        self._rounds = all(state[key].is_floating_point() for key in tensors)
        if "step" in state:
            self._count = _as_tensor if isinstance(state["step"], torch.Tensor) else int
        return tensors

    def _run(self, drawn: torch.Tensor, options: Mapping[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
        values, *grads = (one.clone() for one in drawn)
        state: dict[str, Any] = {}
        for grad in grads:
            state = self._step(values, grad, state, options)
        return values, state


def _own(option: Any) -> Any:
    """Return an option as it is now: a learning rate in a tensor may change in place before its update."""
    if isinstance(option, tuple):
        return tuple(map(_own, option))
    return option.clone() if isinstance(option, torch.Tensor) else option


def _as_tensor(step: int) -> torch.Tensor:
    return torch.tensor(float(step), device="cpu")
