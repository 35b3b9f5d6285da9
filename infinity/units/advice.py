"""Advice for errors about released parameters: what to do instead, by the kind of code that wanted values.

An error that says "wrap it in gathered" to an optimizer, an average or an exporter sends its reader in a
circle. So when such an error is made, and only then, the stack is searched for the code that wanted the
values.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any, TypeGuard

from torch.optim import Optimizer

from infinity.units.optimizer_options import DECOUPLED, IMPLEMENTATION, MISSING
from infinity.units.tracking import Tracking

_ELEMENTWISE = frozenset({"Adadelta", "Adamax", "RAdam", "RMSprop", "Rprop"})
"""Classes of torch.optim that infinity.wrap_optimizer takes."""
_OURS = ("AdamW", "Adam", "SGD", "Adagrad", "Lion", "Muon")
_AVERAGE = re.compile(r"EMA|Ema(?![a-z])|Averag")
_NEAR = 20
"""Frames of the stack in which a class whose name speaks of an average is taken for what wants the values."""
_EXPORTERS = ("torch.jit.", "torch.export.", "torch._export.", "torch.onnx.")
_DORA = "peft.tuners.lora.dora"
_SURGERY = ("torch.nn.utils.prune", "torch.nn.utils.parametri", "torch.nn.utils.weight_norm")

ADDING = inspect.unwrap(Optimizer.add_param_group).__code__
"""The code that runs when an optimizer checks the parameters that it is given."""

GATHERED = "`with infinity.gathered(module_or_parameters):` (write=True to change the values)"
SECOND_MODEL = (
    "For a second model build one inside `with infinity.Init(...):`, where copies work, too, or outside, in "
    "memory, and call its load_state_dict(model.state_dict())."
)
AVERAGE = (
    "An average of the weights is made inside `with infinity.Init(...):`, beside its model, and updated "
    "inside `with infinity.gathered(model), infinity.gathered(average, write=True):`, with "
    'Init(dtype="fp32"). Of '
    "16-bit weights keep it in plain tensors: `average = {name: value.float() for name, value in "
    "model.state_dict().items()}`, then `average[name].lerp_(value.float(), 1 - decay)`."
)
RESIZE = (
    "Shapes are settled when Init ends: call model.resize_token_embeddings(...) inside "
    "`with infinity.Init(...):`, after the model was built or loaded there."
)
REPARAMETRIZE = "Prune and reparametrize modules inside `with infinity.Init(...):`, where it works as ever."
SHARED = (
    "Other processes cannot share parameters that were built in Init; share plain copies: "
    "{name: value.share_memory_() for name, value in model.state_dict().items()}."
)
PARTITIONED = (
    "FSDP (fully_shard) and Infinity both divide parameters among ranks: leave fully_shard out, since ranks "
    "divide a model built in Init by themselves; for FSDP build the model outside Init."
)
EMPTIED = "Parameters built in Init have their place; give them values by load_state_dict."
PARALLEL = (
    "Make DTensors of a model (parallelize_module, distribute_module) inside `with infinity.Init(mesh=..., "
    "data=...):`, or before init.take_in(model)."
)
ADAPTERS = "Call peft.get_peft_model inside `with infinity.Init(...):`, where modules can be copied."


def for_caller() -> str | None:
    """Return what to do instead of the call found on the stack; None for callers that are not known."""
    found = (_for(frame, near=depth < _NEAR) for depth, frame in enumerate(_stack()))
    return next((text for text in found if text is not None), None)


def shards() -> bool:
    """Whether FSDP is on the stack."""
    return any(
        str(one.f_globals.get("__name__", "")).startswith("torch.distributed.fsdp.") for one in _stack()
    )


def makes_adapter() -> bool:
    """Whether what wants values is PEFT's DoRA, which reads the weight of a layer to begin with its norms."""
    return any(
        frame.f_code.co_name == "update_layer" and frame.f_globals.get("__name__") == _DORA
        for _, frame in zip(range(_NEAR), _stack(), strict=False)
    )


def _for(frame: FrameType, *, near: bool) -> str | None:
    """Return what to do instead of the call of one frame."""
    name, itself = str(frame.f_globals.get("__name__", "")), frame.f_locals.get("self")
    if is_foreign(itself):
        return in_place_of(itself)
    if name.startswith(_EXPORTERS):
        return export(".".join(name.replace("._", ".").split(".")[: 3 if "jit" in name else 2]))
    kind, function = type(itself).__name__, frame.f_code.co_name
    averages = name == "torch.optim.swa_utils" or (near and _AVERAGE.search(kind) is not None)
    known = {
        AVERAGE: averages,
        SHARED: function in ("share_memory", "share_memory_"),
        EMPTIED: function == "to_empty",
        RESIZE: function == "resize_token_embeddings",
        REPARAMETRIZE: name.startswith(_SURGERY),
        PARALLEL: function == "distribute_tensor" and name.startswith("torch.distributed.tensor."),
        ADAPTERS: name.startswith("peft.") and "ModulesToSave" in kind,
    }
    return next((text for text, applies in known.items() if applies), None)


def export(what: str) -> str:
    """Return how to script, trace or export a model instead."""
    return (
        f"{what} cannot follow how parameters are fetched and released. Build the model once more as an "
        f"ordinary one, outside Init, call its load_state_dict(model.state_dict()), and give that to {what}."
    )


def in_place_of(optimizer: Optimizer) -> str:
    """Return which optimizer of ours takes the place of `optimizer`, with the options that it was given."""
    kind = type(optimizer)
    name = kind.__name__
    options, dropped = _options(optimizer)
    if name == "Adam" and optimizer.defaults.get(DECOUPLED):
        name = "AdamW"
    given = "".join(f", {key}={value!r}" for key, value in options.items())
    if name in _OURS:
        call = f"infinity.{name}(params{given})"
    elif name in _ELEMENTWISE:
        call = f"infinity.wrap_optimizer(torch.optim.{name}, params{given})"
    else:
        return (
            f"{kind.__module__}.{name} cannot step parameters that were built in Init. "
            f"infinity.{', '.join(_OURS)} can, and infinity.wrap_optimizer({name}, params, ...) where it "
            "treats every element by itself; or give it those parameters alone that were not built there."
        )
    refused = "".join(f" Leave out {key}=True, which it does not have." for key in dropped)
    trainer = (
        f" For the Trainer: optimizer_cls_and_kwargs=(infinity.{name}, {options!r})."
        if name in _OURS and _in_trainer()
        else ""
    )
    return (
        f"{kind.__module__}.{name} cannot step parameters that were built in Init: use `{call}`, with the "
        f"same param groups.{refused}{trainer}"
    )


def _options(optimizer: Optimizer) -> tuple[dict[str, Any], list[str]]:
    """Return the options that differ from the defaults, and the names of those that ours do not have."""
    known: Mapping[str, Any] = inspect.signature(type(optimizer).__init__).parameters
    given = {
        name: value
        for name, value in optimizer.defaults.items()
        if name in known and name not in {*IMPLEMENTATION, DECOUPLED} and known[name].default != value
    }
    taken = {name: value for name, value in given.items() if name not in MISSING}
    return taken, sorted(set(given) & MISSING)


def is_foreign(one: object) -> TypeGuard[Optimizer]:
    """Whether `one` is an optimizer, and none of ours."""
    return isinstance(one, Optimizer) and not isinstance(one, Tracking)


def _in_trainer() -> bool:
    return any(
        any(base.__module__ == "transformers.trainer" for base in type(one).__mro__)
        for frame in _stack()
        if (one := frame.f_locals.get("self")) is not None
    )


def _stack() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
