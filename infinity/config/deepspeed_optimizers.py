"""The optimizers that DeepSpeed's JSON may name, with their options and defaults. Pure.

"Adam" is AdamW in DeepSpeed, too, unless "adam_w_mode" is false.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

_PARAMS = "optimizer.params."
_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}

OPTIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "AdamW": _ADAM,
        "Adam": _ADAM,
        "SGD": {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
        "Adagrad": {"lr": 1e-2, "lr_decay": 0.0, "weight_decay": 0.0, "eps": 1e-10},
        "Lion": {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.0},
    }
)
"""What each takes, with DeepSpeed's defaults, or torch's."""

_KINDS = {kind.lower(): kind for kind in OPTIONS}


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a file says of the optimizer: a class of infinity, and its options."""

    kind: str
    options: Mapping[str, Any]


def kind_of(given: Mapping[str, Any]) -> str | None:
    """Return the name of the class that "optimizer.type" asks for; None for one that is not there."""
    kind = _KINDS.get(str(given.get("optimizer.type")).lower())
    decays = given.get(_PARAMS + "adam_w_mode") is False and given.get(_PARAMS + "weight_decay")
    return "AdamW" if kind == "Adam" and not decays else kind


def chosen(given: Mapping[str, Any]) -> Chosen | None:
    """Return the optimizer, None where the file names none that is there."""
    kind = kind_of(given)
    if kind is None:
        return None
    options = {name: given.get(_PARAMS + name, default) for name, default in OPTIONS[kind].items()}
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    return Chosen(kind, options)


def strangers(given: Mapping[str, Any]) -> Iterator[str]:
    """Return the options that belong to another optimizer than the one that is named."""
    kind = kind_of(given)
    known = {name for options in OPTIONS.values() for name in options}
    for name in known - set(OPTIONS[kind] if kind is not None else known):
        if given.get(_PARAMS + name) is not None:
            yield _PARAMS + name
