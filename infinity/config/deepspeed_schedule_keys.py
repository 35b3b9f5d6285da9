"""The parameters of DeepSpeed's learning rate schedules, and what they may be. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from infinity.errors import ConfigError

_WARMUP = {"warmup_num_steps": "count", "warmup_type": "kind", "last_batch_iteration": "start"}
_REQUIRED = {"total_num_steps", "cycle_min_lr", "cycle_max_lr"}

SCHEDULES: dict[str, dict[str, str]] = {
    "WarmupLR": {"warmup_min_lr": "rates", "warmup_max_lr": "rates", **_WARMUP},
    "WarmupDecayLR": {
        "total_num_steps": "count",
        "warmup_min_lr": "rates",
        "warmup_max_lr": "rates",
        **_WARMUP,
    },
    "WarmupCosineLR": {
        "total_num_steps": "count",
        "warmup_min_ratio": "number",
        "cos_min_ratio": "number",
        **_WARMUP,
    },
    "OneCycle": {
        "cycle_min_lr": "rates",
        "cycle_max_lr": "rates",
        "decay_lr_rate": "number",
        "cycle_first_step_size": "count",
        "cycle_second_step_size": "size",
        "cycle_first_stair_count": "size",
        "cycle_second_stair_count": "size",
        "decay_step_size": "size",
        "cycle_momentum": "switch",
        "cycle_min_mom": "rates",
        "cycle_max_mom": "rates",
        "decay_mom_rate": "number",
        "last_batch_iteration": "start",
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": "rates",
        "lr_range_test_step_size": "count",
        "lr_range_test_step_rate": "number",
        "lr_range_test_staircase": "switch",
        "last_batch_iteration": "start",
    },
}
"""Type -> parameter -> what it holds."""


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_FITS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "count": ("a whole number above 0", lambda value: _number(value) and value > 0 == value % 1),
    "size": ("a whole number, 0 or more", lambda value: _number(value) and value >= 0 == value % 1),
    "number": ("a number", _number),
    "rates": (
        "a number, or one per param group",
        lambda value: _number(value) or (isinstance(value, list | tuple) and all(map(_number, value))),
    ),
    "switch": ("true or false", lambda value: isinstance(value, bool) or value in (0, 1)),
    "kind": ('"log" or "linear"', lambda value: value in ("log", "linear")),
    "start": ("-1: load_checkpoint sets where a schedule goes on", lambda value: value == -1),
}


def check_schedule(name: Any, parameters: Mapping[str, Any]) -> str:
    """Check a schedule of a DeepSpeed file; return its type.

    Raises: ConfigError naming the type or the parameter, and what it may be.
    """
    known = SCHEDULES.get(name) if isinstance(name, str) else None
    if known is None:
        raise ConfigError(f"scheduler.type={name!r}: expected one of {', '.join(SCHEDULES)}")
    for parameter, value in parameters.items():
        if parameter not in known:
            near = difflib.get_close_matches(parameter, known, 1)
            one_of = near[0] if near else ", ".join(known)
            raise ConfigError(f"scheduler.params.{parameter}: {name} has no such parameter; {one_of}?")
        said, fits = _FITS[known[parameter]]
        if not fits(value):
            raise ConfigError(f"scheduler.params.{parameter}={value!r}: expected {said}")
    missing = sorted(_REQUIRED & known.keys() - parameters.keys())
    if missing:
        raise ConfigError(f"scheduler: {name} needs {', '.join(missing)}")
    return str(name)
