"""The optimizers and learning rate schedules that DeepSpeed's JSON may name, with their parameters. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from infinity.config.deepspeed_values import TYPES, is_number
from infinity.errors import ConfigError, meant

# Optimizers

_PARAMS = "optimizer.params."
_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}

OPTIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "AdamW": _ADAM,
        "Adam": _ADAM,
        "SGD": {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
        "Adagrad": {"lr": 1e-2, "lr_decay": 0.0, "weight_decay": 0.0, "eps": 1e-10},
        "Lion": {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.0},
        "OneBitAdam": {**_ADAM, "freeze_step": 100_000},
        "Muon": {
            "lr": None,
            "muon_lr": None,
            "adam_lr": None,
            "momentum": 0.95,
            "weight_decay": 0.0,
            "betas": (0.9, 0.95),
            "eps": 1e-10,
        },
    }
)
"""The options of each optimizer, with DeepSpeed's defaults, or torch's."""

LIKE_ONE_BIT: Mapping[str, str] = MappingProxyType(
    {
        "zerooneadam": "DeepSpeed has removed it, too; OneBitAdam sends momenta at one bit after freeze_step",
        "onebitlamb": "a norm of each layer comes too late for a stream; OneBitAdam, or Adam with "
        "zero_quantized_gradients",
    }
)
"""What to use instead of optimizers that send one bit, and are not there."""

_KINDS = {kind.lower(): kind for kind in OPTIONS}


@dataclass(frozen=True, slots=True)
class Chosen:
    """The optimizer that a file names: a class of infinity, and its options."""

    kind: str
    options: Mapping[str, Any]


def kind_of(given: Mapping[str, Any]) -> str | None:
    """Return the class that "optimizer.type" names; None for an unknown one.

    In DeepSpeed, too, "Adam" is AdamW unless "adam_w_mode" is false.
    """
    kind = _KINDS.get(str(given.get("optimizer.type")).lower())
    decays = given.get(_PARAMS + "adam_w_mode") is False and given.get(_PARAMS + "weight_decay")
    return "AdamW" if kind == "Adam" and not decays else kind


def chosen(given: Mapping[str, Any]) -> Chosen | None:
    """Return the optimizer; None where the file names none that is known."""
    kind = kind_of(given)
    if kind is None:
        return None
    options = {name: given.get(_PARAMS + name, default) for name, default in OPTIONS[kind].items()}
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    return Chosen(kind, options)


def halves_of_muon(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the options of "Muon" say to Muon, and to the AdamW beside it: "muon_lr" and "adam_lr" go
    before "lr", and that before DeepSpeed's defaults.
    """
    rates = {
        half: next(rate for rate in (options[f"{half}_lr"], options["lr"], default) if rate is not None)
        for half, default in (("muon", 0.02), ("adam", 3e-4))
    }
    decay = {"weight_decay": options["weight_decay"]}
    muon = {"lr": rates["muon"], "momentum": options["momentum"], **decay}
    return muon, {"lr": rates["adam"], "betas": options["betas"], "eps": options["eps"], **decay}


def foreign_options(given: Mapping[str, Any]) -> Iterator[str]:
    """Yield the options that the named optimizer does not have, but another one has."""
    kind = kind_of(given)
    known = {name for options in OPTIONS.values() for name in options}
    for name in known - set(OPTIONS[kind] if kind is not None else known):
        if given.get(_PARAMS + name) is not None:
            yield _PARAMS + name


# Schedules

_WARMUP = {"warmup_num_steps": "count", "warmup_type": "kind", "last_batch_iteration": "start"}
_WARMUP_RATES = {"warmup_min_lr": "rates", "warmup_max_lr": "rates", **_WARMUP}
_REQUIRED = {"total_num_steps", "cycle_min_lr", "cycle_max_lr"}

SCHEDULES: dict[str, dict[str, str]] = {
    "WarmupLR": _WARMUP_RATES,
    "WarmupDecayLR": {"total_num_steps": "count", **_WARMUP_RATES},
    "WarmupCosineLR": {
        "total_num_steps": "count",
        "warmup_min_ratio": "any number",
        "cos_min_ratio": "any number",
        **_WARMUP,
    },
    "OneCycle": {
        "cycle_min_lr": "rates",
        "cycle_max_lr": "rates",
        "decay_lr_rate": "any number",
        "cycle_first_step_size": "count",
        "cycle_second_step_size": "size",
        "cycle_first_stair_count": "size",
        "cycle_second_stair_count": "size",
        "decay_step_size": "size",
        "cycle_momentum": "switch or bit",
        "cycle_min_mom": "rates",
        "cycle_max_mom": "rates",
        "decay_mom_rate": "any number",
        "last_batch_iteration": "start",
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": "rates",
        "lr_range_test_step_size": "count",
        "lr_range_test_step_rate": "any number",
        "lr_range_test_staircase": "switch or bit",
        "last_batch_iteration": "start",
    },
}
"""Type -> parameter -> the name of what it may hold, in _FITS."""

_FITS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **TYPES,
    "any number": ("a number", is_number),
    "rates": (
        "a number, or one per param group",
        lambda value: is_number(value) or (isinstance(value, list | tuple) and all(map(is_number, value))),
    ),
    "switch or bit": ("true or false", lambda value: isinstance(value, bool) or value in (0, 1)),
    "kind": ('"log" or "linear"', lambda value: value in ("log", "linear")),
    "start": ("-1: load_checkpoint sets where a schedule continues", lambda value: value == -1),
}


def check_schedule(name: Any, parameters: Mapping[str, Any]) -> str:
    """Check a schedule of a DeepSpeed file; return its type.

    Raises: ConfigError naming the type or the parameter, and what it may hold.
    """
    known = SCHEDULES.get(name) if isinstance(name, str) else None
    if known is None:
        raise ConfigError(f"scheduler.type={name!r}: expected one of {', '.join(SCHEDULES)}")
    for parameter, value in parameters.items():
        if parameter not in known:
            raise ConfigError(
                f"scheduler.params.{parameter}: {name} has no such parameter{meant(parameter, known)}"
            )
        expected, fits = _FITS[known[parameter]]
        if not fits(value):
            raise ConfigError(f"scheduler.params.{parameter}={value!r}: expected {expected}")
    missing = sorted(_REQUIRED & known.keys() - parameters.keys())
    if missing:
        raise ConfigError(f"scheduler: {name} needs {', '.join(missing)}")
    return str(name)
