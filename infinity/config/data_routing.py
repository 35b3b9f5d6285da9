"""DeepSpeed's data routing, random-LTD, in Infinity's terms. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infinity.config.deepspeed_values import whole
from infinity.errors import ConfigError
from infinity.planning.kept_tokens import TokenSchedule

ROUTING = "data_efficiency.data_routing."
LTD = ROUTING + "random_ltd."
SCHEDULE = LTD + "random_ltd_schedule."
STEPS = SCHEDULE + "schedule_config."
RATES = LTD + "layer_token_lr_schedule."
SWITCHES = ("data_efficiency.enabled", ROUTING + "enabled", LTD + "enabled")
"""All of them switch random-LTD on."""
_ORDERS = {"batch_seq_dim": False, "seq_batch_dim": True}
_NEEDED = (
    LTD + "random_ltd_layer_id",
    SCHEDULE + "min_value",
    SCHEDULE + "max_value",
    SCHEDULE + "schedule_type",
    STEPS + "require_steps",
    STEPS + "seq_per_step",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRouting:
    """What a file says of random-LTD."""

    schedule: TokenSchedule
    layers: tuple[int, ...]
    """Numbers of the layers that leave tokens out."""
    of_layers: int | None
    """How many the model has; None where the file does not say."""
    mask: str | None
    """The layers' argument that is a mask."""
    seq_first: bool
    """Whether hidden states are [tokens, rows, width]."""


def asked(found: Mapping[str, Any]) -> bool:
    """Whether random-LTD is switched on."""
    return all(found.get(one) is True for one in SWITCHES)


def token_routing(given: Mapping[str, Any]) -> TokenRouting | None:
    """Return what a file's keys say of random-LTD; None where it is not switched on.

    Raises: ConfigError naming what is missing, or what does not fit.
    """
    if not asked(given):
        return None
    missing = [one.removeprefix(LTD) for one in _NEEDED if given.get(one) is None]
    if missing:
        raise ConfigError(f"{LTD[:-1]}: needs {', '.join(missing)}")
    kind, order = given[SCHEDULE + "schedule_type"], given.get(LTD + "hidden_state_order", "batch_seq_dim")
    if kind != "fixed_linear":
        raise ConfigError(f"{SCHEDULE}schedule_type={kind!r}: expected 'fixed_linear', DeepSpeed's only one")
    if order not in _ORDERS:
        expected = " or ".join(map(repr, _ORDERS))
        raise ConfigError(f"{LTD}hidden_state_order={order!r}: expected {expected}")
    shortest, longest, steps, multiple = (whole(given[one]) for one in (*_NEEDED[1:3], *_NEEDED[4:]))
    try:
        schedule = TokenSchedule(shortest=shortest, longest=longest, steps=steps, multiple=multiple)
    except ConfigError as error:
        raise ConfigError(f"{SCHEDULE[:-1]}: {error}") from None
    total = given.get(LTD + "total_layer_num")
    return TokenRouting(
        schedule=schedule,
        layers=_layers(given),
        of_layers=None if total is None else int(total),
        mask=given.get(LTD + "model_mask_name"),
        seq_first=_ORDERS[order],
    )


def _layers(given: Mapping[str, Any]) -> tuple[int, ...]:
    layers, count = given[LTD + "random_ltd_layer_id"], given.get(LTD + "random_ltd_layer_num")
    if not isinstance(layers, list | tuple) or any(type(one) is not int for one in layers):
        raise ConfigError(f"{LTD}random_ltd_layer_id={layers!r}: expected a list of numbers of layers")
    if count is not None and count != len(layers):
        raise ConfigError(
            f"{LTD}random_ltd_layer_num={count}, but random_ltd_layer_id names {len(layers)} layers; make "
            "them equal, or leave random_ltd_layer_num out"
        )
    return tuple(layers)
