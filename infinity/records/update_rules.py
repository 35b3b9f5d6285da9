"""Update rules: the state that each optimizer keeps in a record, its scalars, and its kernel per schema.

[Note: masters that are not split]
AdamW has a kernel for each schema of a record, and so has every optimizer where moments are small. The
others' kernels of fp32 moments work on split masters (hi, lo): in other schemas a part that fits the caches
is split, stepped and joined again, which loses no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from infinity import kernels
from infinity.planning.layout import RecordSchema
from infinity.records import tensor_steps
from infinity.records.matrix_steps import MUON_RULE, MatrixRule, moves, muon_scalars
from infinity.records.tensor_steps import TensorStep
from infinity.records.weights import WEIGHTS

CHUNK_NUMEL = 1 << 15
"""Elements that are split, stepped and joined at a time."""


MASTER_BITS = 0x9E3779B97F4A7C15
"""In which the key of random bits for masters differs from that for moments."""


class UpdateSpan(NamedTuple):
    """A part of one parameter that makes a step: the addresses of its fields and of its gradient."""

    n: int
    at: Mapping[str, int]
    grad: int
    dtype: kernels.AnyGradientDtype
    """Of the gradient."""
    key: int = 0
    """Of the random bits that round 16- and 8-bit state; see kernels."""
    first: int = 0
    """The parameter's element at which the part begins."""
    sums: kernels.Checksums | None = None
    """Checksums for the kernel to take; see Recipe.summing."""
    told: kernels.ToldGradient | None = None
    """Takes what the moments do not tell of the gradient, of a step of which they do: see `tells`."""


Kernel = Callable[[UpdateSpan, Any], None]
"""Makes a step, given the recipe's scalars."""


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """An optimizer's update rule.

    state: the record's fields that it keeps, with their names in torch.optim's state; fp32, unless the
    schema's moments are narrower. scalars: returns the kernel's scalars from a param group, the step's count
    (from 1) and the factor on the gradient; raises ValueError for options out of range. kernels: by the
    dtype and state_dtype of a schema.
    """

    name: str
    state: Mapping[str, str]
    scalars: Callable[[Mapping[str, Any], int, float], Any]
    kernels: Mapping[tuple[str, str], Kernel]
    summing: frozenset[tuple[str, str]] = frozenset()
    """Those whose kernel takes the checksums of the fields on its way."""
    tensors: TensorStep | None = None
    """The step of fp32 masters, split or not, and fp32 moments, for records that live on an accelerator;
    None: such records stay where the kernels are.
    """
    matrices: MatrixRule | None = None
    """What it does with whole matrices before its kernels, which get the result in the place of the gradient,
    and no state; None for an elementwise recipe. See [Note: the muon step] in matrix_steps.
    """
    in_codes: Mapping[str, str] | None = None
    """As `state`, of records whose moments are codes; None: the same."""

    def stepped(self, schema: RecordSchema) -> tuple[str, ...]:
        """Return those of them that its kernels work on."""
        return () if self.matrices is not None else self.fields(schema)

    def fields(self, schema: RecordSchema) -> tuple[str, ...]:
        """Return the fields of a record that hold its state, the scales of codes included."""
        in_codes = self.in_codes if schema.in_blocks else None
        return schema.moments_of(self.state if in_codes is None else in_codes)


def _adam_scalars(group: Mapping[str, Any], step: int, clip: float) -> kernels.AdamWScalars:
    beta1, beta2 = map(float, group["betas"])
    return _of_adam(
        float(group["lr"]), beta1, beta2, float(group["eps"]), float(group["weight_decay"]), step, clip
    )


@lru_cache(maxsize=64)  # a step has few different ones, for many parameters
def _of_adam(*scalars: Any) -> kernels.AdamWScalars:
    return kernels.AdamWScalars(*scalars)


def _sgd_scalars(group: Mapping[str, Any], step: int, clip: float) -> kernels.SGDScalars:
    lr, momentum = float(group["lr"]), group["momentum"]
    dampening, nesterov = group["dampening"], group["nesterov"]
    return kernels.SGDScalars(lr, momentum, group["weight_decay"], step, dampening, nesterov, clip)


def _plain_sgd_scalars(group: Mapping[str, Any], step: int, clip: float) -> kernels.SGDScalars:
    if group["momentum"]:
        raise ValueError(
            f"momentum={group['momentum']}: this SGD was made without momentum, so its records have no "
            "room for it. Give it a momentum when it is made."
        )
    return _sgd_scalars(group, step, clip)


def _adagrad_scalars(group: Mapping[str, Any], step: int, clip: float) -> kernels.AdagradScalars:
    return kernels.AdagradScalars(
        float(group["lr"]), group["eps"], group["weight_decay"], step, group["lr_decay"], clip
    )


def _lion_scalars(group: Mapping[str, Any], _step: int, clip: float) -> kernels.LionScalars:
    beta1, beta2 = group["betas"]
    return kernels.LionScalars(float(group["lr"]), beta1, beta2, group["weight_decay"], clip)


def _over(call: Any, *names: str) -> Kernel:
    """Return a Kernel from a kernel over the addresses of these fields."""

    def step(span: UpdateSpan, scalars: Any) -> None:
        fields = [span.at[name] for name in names]
        call(span.n, *fields, span.grad, span.dtype, scalars, span.sums)

    return step


def _adamw(span: UpdateSpan, scalars: Any) -> None:
    """Make the step of split masters and fp32 moments."""
    hi, lo, m, v = (span.at[name] for name in ("hi", "lo", "m", "v"))
    if span.told is not None:
        span.told.adamw(span.n, (hi, lo, m, v), span.grad, scalars, span.first, span.sums)
        return
    call: Any = kernels.adamw
    call(span.n, hi, lo, m, v, span.grad, span.dtype, scalars, span.sums)


_SMALL = ("bf16", "int8", "int4")
"""In which moments can be kept beside fp32."""
_STATES = ("fp32", *_SMALL)


def _on_small(recipe: kernels.SmallRecipe) -> dict[tuple[str, str], Kernel]:
    """Return an optimizer's kernels on moments that are rounded stochastically, for weights of every type."""

    def of(weights: Any, state: Any) -> Kernel:
        def step(span: UpdateSpan, scalars: Any) -> None:
            where = span.grad, span.dtype
            kernels.small_step(
                recipe, weights, state, span.n, span.at, *where, scalars, span.key, span.first, span.sums
            )

        return step

    return {(weights, state): of(weights, state) for weights in WEIGHTS for state in _SMALL}


def on_every_record(step: Kernel) -> dict[tuple[str, str], Kernel]:
    """Return kernels for every schema from one for split masters; see [Note: masters that are not split]."""

    def on_fp32(span: UpdateSpan, scalars: Any) -> None:
        _through_split(step, span, scalars, "hi")

    def on_fp16(span: UpdateSpan, scalars: Any) -> None:
        _through_split(step, span, scalars, "master")
        kernels.narrow_f16(span.n, span.at["master"], span.at["hi"])

    return {("bf16", "fp32"): step, ("fp16", "fp32"): on_fp16, ("fp32", "fp32"): on_fp32}


def _through_split(step: Kernel, span: UpdateSpan, scalars: Any, field: str) -> None:
    halves = torch.empty((2, min(span.n, CHUNK_NUMEL)), dtype=torch.int16, device="cpu")
    hi, lo = (half.data_ptr() for half in halves)
    width = 4 if span.dtype == "f32" else 2
    for start in range(0, span.n, CHUNK_NUMEL):
        n, master = min(CHUNK_NUMEL, span.n - start), span.at[field] + 4 * start
        at = {name: span.at[name] + 4 * start for name in ("m", "v") if name in span.at}
        kernels.split(n, master, hi, lo)
        part = span._replace(n=n, at={**at, "hi": hi, "lo": lo}, grad=span.grad + width * start)
        step(part, scalars)
        kernels.join(n, hi, lo, master)


def _on_fp24(steps: Mapping[tuple[str, str], Kernel]) -> dict[tuple[str, str], Kernel]:
    """Return kernels for masters in 24 bits from those for split ones: each part that fits the caches is
    widened, stepped, and rounded at random.
    """
    return {
        ("bf16, fp24", state): _with_narrow_lo(step, RecordSchema(state, master_dtype="fp24"))
        for (dtype, state), step in steps.items()
        if dtype == "bf16"
    }


def _with_narrow_lo(step: Kernel, schema: RecordSchema) -> Kernel:
    def on_fp24(span: UpdateSpan, scalars: Any) -> None:
        wide = torch.empty(min(span.n, CHUNK_NUMEL), dtype=torch.int16, device="cpu")
        lo, width = wide.data_ptr(), 4 if span.dtype == "f32" else 2
        for start in range(0, span.n, CHUNK_NUMEL):
            n, first = min(CHUNK_NUMEL, span.n - start), span.first + start
            at = {
                name: address + schema.nbytes(name, start)
                for name, address in span.at.items()
                if name in schema.fields  # others, as errors of codes, no step moves
            }
            kernels.widen_lo(n, at["lo"], lo)
            grad = span.grad + width * start
            step(span._replace(n=n, at={**at, "lo": lo}, grad=grad, first=first, sums=None), scalars)
            kernels.round_lo(n, lo, at["lo"], span.key ^ MASTER_BITS, first)

    return on_fp24


def _without_momentum(span: UpdateSpan, scalars: Any) -> None:
    """Step by the gradient alone: as a first step with momentum, whose momentum is not kept."""
    momentum = torch.empty(min(span.n, CHUNK_NUMEL), device="cpu")
    width = 4 if span.dtype == "f32" else 2
    for start in range(0, span.n, CHUNK_NUMEL):
        n = min(CHUNK_NUMEL, span.n - start)
        hi, lo = (span.at[name] + 2 * start for name in ("hi", "lo"))
        grad = span.grad + width * start
        kernels.sgd(n, hi, lo, momentum.data_ptr(), grad, span.dtype, replace(scalars, step=1))


_ADAMW_KERNELS = {
    ("bf16", "fp32"): _adamw,
    ("fp16", "fp32"): _over(kernels.adamw_fp16, "hi", "master", "m", "v"),
    ("fp32", "fp32"): _over(kernels.adamw_fp32, "hi", "m", "v"),
    **_on_small("adamw"),
}

_ADAM_KERNELS = {
    **on_every_record(_over(kernels.adam, "hi", "lo", "m", "v")),
    **_on_small("adam"),
}
_SGD_KERNELS = {**on_every_record(_over(kernels.sgd, "hi", "lo", "m")), **_on_small("sgd")}
_ADAGRAD_KERNELS = {
    **on_every_record(_over(kernels.adagrad, "hi", "lo", "v")),
    **_on_small("adagrad"),
}
_LION_KERNELS = {**on_every_record(_over(kernels.lion, "hi", "lo", "m")), **_on_small("lion")}
_ADAMW_KERNELS |= _on_fp24(_ADAMW_KERNELS)
_ADAM_KERNELS |= _on_fp24(_ADAM_KERNELS)
ADAM_STATE = {"m": "exp_avg", "v": "exp_avg_sq"}


def _summing(steps: Mapping[tuple[str, str], Kernel], *, every: bool = False) -> frozenset[tuple[str, str]]:
    """Return those whose kernel takes checksums on its way: all but those that split masters, or widen them,
    in Python. every: it has a kernel for each type.
    """
    direct = (one for one in steps if one[0] in WEIGHTS)
    return frozenset(one for one in direct if every or one == ("bf16", "fp32") or one[1] != "fp32")


_STATELESS = {
    (dtype, state): step
    for (dtype, _), step in on_every_record(_without_momentum).items()
    for state in _STATES
}

ADAMW = Recipe(
    "AdamW",
    ADAM_STATE,
    _adam_scalars,
    _ADAMW_KERNELS,
    _summing(_ADAMW_KERNELS, every=True),
    tensor_steps.adamw,
)
ADAM = Recipe("Adam", ADAM_STATE, _adam_scalars, _ADAM_KERNELS, _summing(_ADAM_KERNELS), tensor_steps.adam)
SGD = Recipe("SGD", {}, _plain_sgd_scalars, _STATELESS, tensors=tensor_steps.sgd)
MOMENTUM = Recipe(
    "SGD",
    {"m": "momentum_buffer"},
    _sgd_scalars,
    _SGD_KERNELS,
    _summing(_SGD_KERNELS),
    tensor_steps.sgd,
)
ADAGRAD = Recipe(
    "Adagrad",
    {"v": "sum"},
    _adagrad_scalars,
    _ADAGRAD_KERNELS,
    _summing(_ADAGRAD_KERNELS),
    tensor_steps.adagrad,
)
LION = Recipe(
    "Lion", {"m": "exp_avg"}, _lion_scalars, _LION_KERNELS, _summing(_LION_KERNELS), tensor_steps.lion
)
MUON = Recipe(
    "Muon",
    {"m": "momentum_buffer"},
    muon_scalars,
    {(dtype, state): moves(weights) for dtype, weights in WEIGHTS.items() for state in _STATES},
    matrices=MUON_RULE,
)


def tells(recipe: Recipe, schema: RecordSchema) -> bool:
    """Whether the moments around a step tell a bf16 gradient: see kernels.ToldGradient."""
    return recipe is ADAMW and (schema.kept, schema.state_dtype) == ("bf16", "fp32")
