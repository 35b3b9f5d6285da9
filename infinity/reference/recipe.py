"""The reference recipe: what Infinity computes, in memory, in plain torch.

Train a copy of the model with it and compare: the engine's losses, gradients and weights after any number of
steps equal this file's bit for bit, at any budget, tier and number of paths. moments.py has how moments are
stored in bf16 and 8 bits.

    model = reference.prepare(model)                    # 16-bit weights, fp32 masters beside them
    optimizer = reference.ReferenceAdamW(model.parameters(), lr=3e-4, weight_decay=0.1, max_norm=1.0)
    for batch in loader:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

[Note: the split master]
The compute weight is the fp32 master rounded to bf16, to nearest, ties away from zero: with u the master's
bits, hi = (u + 0x8000) >> 16. (With ties to even, master - hi would not fit 16 bits.) NaN becomes 0x7FC0. A
weight that the user has changed since the last step becomes its own master.

[Note: the stored gradient]
A backward gives a 16-bit gradient in p.grad, as in torch. A second backward before zero_grad() does not add
in 16 bits: the stored gradient becomes fp32, and the new one is added to it in fp32. p.grad then shows the
sum rounded to p.dtype, and stands for the exact sum until it is replaced or changed in place. From then on
its own values are the gradient: so zero_grad() starts anew, with set_to_none or without. A parameter's own
`register_hook` changes the gradient if it was registered before `prepare`.

[Note: the norm]
norm = fp32(sqrt(the sum over parameters, in order, of the fp64 sums of the squares of the stored gradients)).
With max_norm: clip = min(1, max_norm / (norm + 1e-6)) in fp32 arithmetic.

[Note: the adamw step]
In this order, in fp32, each operation rounded by itself (kernels.h has the same lines):
    g     = f32(grad) * clip
    p     = p * decay                            decay = 1 - lr * weight_decay
    m     = m + (g - m) * (1 - beta1)            where 1 - beta1 < 0.5, else
    m     = g - (g - m) * beta1                  (torch.lerp's two branches)
    v     = v * beta2
    v     = v + ((1 - beta2) * g) * g
    denom = sqrt(v) / sqrt(1 - beta2^step) + eps
    p     = p + (-(lr / (1 - beta1^step)) * m) / denom
Every scalar is computed in fp64 and rounded to fp32 once; clip is fp32 already. Every NaN is stored as
0x7FC00000.

[Note: the small step]
The same step with its constants multiplied together, for moments in bf16 or 8 bits. It is faster, and differs
in the last places alone, far less than the rounding of such moments. With c = sqrt(1 - beta2^step):
    t = f32(grad) * (clip * sqrt(1 - beta2))
    m = fma(m, beta1, f32(grad) * (clip * (1 - beta1)))
    v = fma(t, t, v * beta2)
    p = fma(p, decay, (-(lr / (1 - beta1^step) * c) * m) / (sqrt(v) + eps * c))
where fma(a, b, c) is a * b + c, rounded once.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast, get_args

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT
from torch.utils.weak import WeakIdKeyDictionary

from infinity.reference.moments import StateDtype, in_24_bits, state_key, step_stored, zero_moments

ModelT = TypeVar("ModelT", bound=nn.Module)

HALF = 0.5  # torch.lerp changes its form at this weight
COMPUTE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class _Pending:
    """A stored gradient that p.grad cannot hold itself; invalid once p.grad is replaced or changed."""

    shown: Tensor  # what p.grad was set to
    version: int  # of `shown`, raised by every change in place
    value: Tensor  # the stored gradient: 16-bit after one backward, fp32 after several
    factor: Tensor  # fp32, what clip_grad_norm_ recorded, else 1


# By Parameter object, while it lives: deepcopies and pickles of a model start without entries.
_masters: Any = WeakIdKeyDictionary()  # Parameter -> Tensor, fp32
_hooked: Any = WeakIdKeyDictionary()  # Parameter -> True
_pending: Any = WeakIdKeyDictionary()  # Parameter -> _Pending


def prepare(model: ModelT, dtype: torch.dtype = torch.bfloat16) -> ModelT:
    """Round every floating-point Parameter of the model, frozen ones too, to `dtype`, and keep fp32 masters.

    The Parameter objects stay the same, and buffers are not changed. The masters are the initial values in
    fp32; a parameter that is already 16-bit is its own master. dtype may also be float16 (ties to even) or
    float32.
    """
    if dtype not in COMPUTE_DTYPES:
        raise ValueError(f"dtype={dtype}: expected one of {', '.join(map(str, COMPUTE_DTYPES))}")
    for parameter in model.parameters():
        if parameter.is_floating_point():
            _adopt(parameter, dtype)
    return model


@torch.no_grad()
def _adopt(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the parameter's master; the first time, make it and convert the parameter to dtype."""
    if parameter not in _masters:
        if parameter.dtype not in COMPUTE_DTYPES:
            raise TypeError(f"a parameter of {parameter.dtype} has no fp32 master that equals it")
        _masters[parameter] = canonical_(parameter.detach().to(torch.float32, copy=True))
        parameter.data = rounded(_masters[parameter], dtype)
    if parameter.requires_grad and parameter not in _hooked:
        _hooked[parameter] = True
        _accumulate_in_fp32(parameter)
    return cast("Tensor", _masters[parameter])


def rounded(master: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return the compute weight of an fp32 master: for bf16, [Note: the split master]."""
    if dtype != torch.bfloat16:
        return master.to(dtype, copy=True)
    hi = ((master.view(torch.int32) + 0x8000) >> 16).to(torch.int16)
    return hi.masked_fill_(master.isnan(), 0x7FC0).view(torch.bfloat16)


def canonical_(values: Tensor) -> Tensor:
    """Replace every NaN by 0x7FC00000, in place: NaN payloads depend on the order of operands."""
    return values.masked_fill_(values.isnan(), math.nan)


def _accumulate_in_fp32(parameter: Tensor) -> None:
    """Make a second backward add in fp32: [Note: the stored gradient].

    torch adds into p.grad itself, in 16 bits. So a first hook, before that, keeps both terms, and a second,
    after it, replaces the sum. (Setting p.grad to None in the first hook would need no copy, but
    torch.autograd.grad runs that hook too, and would lose the gradient.)
    """
    terms: list[tuple[Tensor, Tensor]] = []
    owner = weakref.ref(parameter)  # a hook that held its parameter would keep it for ever

    def keep_terms(new: Tensor) -> None:
        terms.clear()
        parameter = owner()
        if parameter is not None and parameter.grad is not None:
            value, factor = _stored(parameter)
            terms.append((value.float() * factor, new))

    def add_terms(parameter: Tensor) -> None:
        if terms:
            value, new = terms.pop()
            _store(parameter, value + new.float(), torch.ones(()))

    parameter.register_hook(keep_terms)
    parameter.register_post_accumulate_grad_hook(add_terms)


def _store(parameter: Tensor, value: Tensor, factor: Tensor) -> None:
    """Set the stored gradient: `value`, to be multiplied by the fp32 `factor` in the update."""
    with torch.no_grad():
        shown = (value.float() * factor).to(parameter.dtype)
        parameter.grad = shown
        _pending[parameter] = _Pending(shown, shown._version, value.detach(), factor)


def _stored(parameter: Tensor) -> tuple[Tensor, Tensor]:
    """Return the stored gradient behind p.grad, which is not None, and its fp32 factor."""
    shown = cast("Tensor", parameter.grad)
    pending = _pending.get(parameter)
    if pending is not None and pending.shown is shown and pending.version == shown._version:
        bits = {2: torch.int16, 4: torch.int32}[shown.element_size()]
        before = (pending.value.float() * pending.factor).to(shown.dtype)
        if torch.equal(
            before.view(bits), shown.detach().view(bits)
        ):  # changes of `.data` do not raise the version
            return pending.value, pending.factor
    return shown.detach(), torch.ones(())


def sum_squares(gradient: Tensor) -> float:
    """Return the fp64 sum of the fp64 squares of a gradient."""
    return float(gradient.double().square().sum())


def adamw_step(
    p: Tensor, m: Tensor, v: Tensor, grad: Tensor, clip: Tensor, step: int, group: dict[str, Any]
) -> None:
    """Apply [Note: the adamw step] in place to the fp32 p (the master), m and v.

    `clip` is an fp32 scalar tensor, `step` counts this step, `group` holds lr, betas, eps and weight_decay.
    """
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    g = grad.float() * clip
    p.mul_(f32(1 - lr * group["weight_decay"]))
    lerp_weight = f32(1 - beta1)
    if lerp_weight < HALF:
        m.copy_(m + (g - m) * lerp_weight)
    else:
        m.copy_(g - (g - m) * f32(beta1))
    v.mul_(f32(beta2))
    v.add_((f32(1 - beta2) * g) * g)
    denom = root(v) / f32((1 - beta2**step) ** 0.5) + f32(group["eps"])
    p.add_((f32(-(lr / (1 - beta1**step))) * m) / denom)
    for state in (p, m, v):
        canonical_(state)


def adamw_small_step(
    p: Tensor, m: Tensor, v: Tensor, grad: Tensor, clip: Tensor, step: int, group: dict[str, Any]
) -> None:
    """Apply [Note: the small step] in place; arguments as in `adamw_step`."""
    lr, (beta1, beta2), factor = float(group["lr"]), group["betas"], float(clip)
    correction = (1 - beta2**step) ** 0.5
    t = grad.float() * f32(factor * (1 - beta2) ** 0.5)
    m.copy_(fused(m, f32(beta1), grad.float() * f32(factor * (1 - beta1))))
    v.copy_(fused(t, t, v * f32(beta2)))
    denom = root(v) + f32(group["eps"] * correction)
    move = (f32(-(lr / (1 - beta1**step) * correction)) * m) / denom
    p.copy_(fused(p, f32(1 - lr * group["weight_decay"]), move))
    for state in (p, m, v):
        canonical_(state)


def fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a * b + c of fp32 tensors, rounded once, as an FMA does; torch has none.

    The product is exact in fp64. The sum is rounded to odd there: if it is inexact (Knuth's TwoSum gives its
    error) and even, it becomes its neighbour towards the exact sum. Rounded to fp32, that equals the exact
    sum rounded to fp32 (Boldo and Melquiond, 2008).
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    part = total - product
    lacking = (product - (total - part)) + (addend - part)
    bits = total.view(torch.int64)
    towards = torch.where((lacking > 0) == (total > 0), 1, -1)  # unused for infinities and NaNs
    is_off = lacking.isfinite() & (lacking != 0) & (bits % 2 == 0)
    return torch.where(is_off, bits + towards, bits).view(torch.float64).float()


def root(values: Tensor) -> Tensor:
    """Return correctly rounded fp32 square roots; torch's own, by MKL, are up to one ULP off."""
    return values.double().sqrt().float()


def f32(scalar: float) -> Tensor:
    """Return a scalar as a tensor, rounded to fp32."""
    return torch.tensor(scalar, dtype=torch.float32)


class ReferenceAdamW(torch.optim.Optimizer):
    """The recipe's AdamW, over parameters that `prepare` has converted, or that are their own masters.

    max_norm: clip the gradients to this global norm in step(); clip_grad_norm_ then raises. state_dtype: how
    the moments are stored, "fp32", "bf16", "int8" or "int4"; master_dtype: "fp32", or "fp24"; seed: of the
    rounding of all but fp32.
    State of each parameter: `master` (fp32), `step` (int), and the tensors of `zero_moments`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        max_norm: float | None = None,
        state_dtype: StateDtype = "fp32",
        master_dtype: str = "fp32",
        seed: int = 0,
    ) -> None:
        for name, value in (
            ("lr", lr),
            ("eps", eps),
            ("weight_decay", weight_decay),
            ("max_norm", max_norm or 0),
        ):
            if not value >= 0:
                raise ValueError(f"{name}={value}: expected at least 0")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas={betas}: expected at least 0 and below 1")
        if state_dtype not in get_args(StateDtype):
            raise ValueError(f"state_dtype={state_dtype!r}: expected one of {get_args(StateDtype)}")
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"seed={seed}: expected an unsigned 64-bit integer")
        self.max_norm = max_norm
        self.state_dtype: StateDtype = state_dtype
        self.master_dtype = master_dtype
        self.seed = seed
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, and for each of its parameters the master and zero moments."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            master = _adopt(parameter, parameter.dtype)
            if self.master_dtype == "fp24":
                master.copy_(in_24_bits(master))
            moments = zero_moments(master, self.state_dtype)
            self.state[parameter] = {"step": 0, "master": master, **moments}

    def masters(self) -> dict[Tensor, Tensor]:
        """Return every parameter's fp32 master, by Parameter object."""
        return {parameter: self.state[parameter]["master"] for parameter in self._parameters()}

    def _parameters(self) -> Iterator[Tensor]:
        for group in self.param_groups:
            yield from group["params"]

    def _clip_factor(self) -> Tensor | None:
        """Return the fp32 clip factor of [Note: the norm]; None without max_norm."""
        if self.max_norm is None:
            return None
        total = 0.0
        for parameter in self._parameters():
            if parameter.grad is not None:
                value, factor = _stored(parameter)
                if factor != 1:
                    raise RuntimeError("clip_grad_norm_ was called, but max_norm clips too: use only one")
                total += sum_squares(value)
        norm = torch.tensor(total, dtype=torch.float64).sqrt().float()
        return torch.clamp(f32(self.max_norm) / (norm + f32(1e-6)), max=1.0)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update master, moments and compute weight of every parameter whose grad is not None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        clip = self._clip_factor()
        groups = [(group, parameter) for group in self.param_groups for parameter in group["params"]]
        for number, (group, parameter) in enumerate(groups):
            if parameter.grad is None:
                continue
            grad, factor = _stored(parameter)
            state = self.state[parameter]
            state["step"] += 1
            _take_edits(parameter, state["master"])
            factor = factor if clip is None else clip
            count = state["step"]
            make_step = adamw_step if self.state_dtype == "fp32" else adamw_small_step
            rest = grad, factor, count, group
            step = partial(_with_moments, make_step, state["master"], rest)
            key = state_key(self.seed, number, count)
            step_stored(state, key, self.state_dtype, step)
            if self.master_dtype == "fp24":
                state["master"].copy_(in_24_bits(state["master"], key))
            parameter.copy_(rounded(state["master"], parameter.dtype))
        return loss

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load param groups, masters, moments and step counts; the compute weights follow the masters."""
        masters = self.masters()
        expected = zero_moments(torch.zeros(1), self.state_dtype)
        for saved in state_dict["state"].values():
            for name, moment in expected.items():
                if name not in saved or saved[name].dtype != moment.dtype:
                    raise ValueError(
                        f"{name} was not saved with state_dtype={self.state_dtype!r}: make the optimizer "
                        "with the state_dtype that it was saved with"
                    )
        super().load_state_dict(state_dict)
        # torch has cast the state to each parameter's 16-bit dtype: copy it again from the original.
        saved_ids = [saved for group in state_dict["param_groups"] for saved in group["params"]]
        for parameter, saved_id in zip(self._parameters(), saved_ids, strict=True):
            saved = state_dict["state"][saved_id]
            masters[parameter].copy_(saved["master"])
            moments = zero_moments(masters[parameter], self.state_dtype)
            for name, moment in moments.items():
                moment.copy_(saved[name])
            self.state[parameter] = {"step": int(saved["step"]), "master": masters[parameter], **moments}
            parameter.copy_(rounded(masters[parameter], parameter.dtype))


def _with_moments(
    make_step: Callable[..., None], master: Tensor, rest: tuple[Any, ...], m: Tensor, v: Tensor
) -> None:
    make_step(master, m, v, *rest)


def _take_edits(parameter: Tensor, master: Tensor) -> None:
    """Make compute weights that the user has changed since the last rounding their own masters."""
    as_bits = {2: torch.int16, 4: torch.int32}[parameter.element_size()]
    edited = parameter.view(as_bits) != rounded(master, parameter.dtype).view(as_bits)
    master.copy_(torch.where(edited, parameter.float(), master))


@torch.no_grad()
def clip_grad_norm_(optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
    """Clip as torch.nn.utils.clip_grad_norm_, but in fp64; return the total norm, an fp64 scalar.

    min(1, max_norm / (norm + 1e-6)) in fp64, rounded to fp32, becomes the factor by which step() multiplies
    the gradient in fp32; p.grad shows the product, rounded to p.dtype.
    """
    if getattr(optimizer, "max_norm", None) is not None:
        raise RuntimeError("max_norm already clips in step(): use either max_norm or clip_grad_norm_")
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    stored = [_stored(parameter) for parameter in parameters]
    norms = [torch.linalg.vector_norm(value.double()) * factor.double() for value, factor in stored]
    total = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), dtype=torch.float64)
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0).float()
    for parameter, (value, factor) in zip(parameters, stored, strict=True):
        _store(parameter, value, factor * coefficient)
    return total
