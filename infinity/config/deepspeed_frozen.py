"""What DeepSpeed's JSON says of frozen weights in fewer bits, as Config(frozen_dtype=...). Pure.

DeepSpeed has two ways, both of which quantise once and widen at each use:
- zero_optimization.zero_quantized_nontrainable_weights: what is frozen is kept in int8, whatever the rest of
  the configuration says. Here: frozen_dtype="int8", of what is frozen when Init ends.
- weight_quantization.quantized_initialization: all that is loaded is quantised, and frozen. Here:
  Init(frozen=True), with "int8" for 8 bits and "nf4" for 4.
The numbers that the second has beside the bits are fixed here: "int8" has a scale for each row, "nf4" one for
each 64 elements of a row. A configuration that asks for others is refused, number by number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from infinity.errors import ConfigError

NONTRAINABLE = "zero_optimization.zero_quantized_nontrainable_weights"
LOADED = "weight_quantization.quantized_initialization."
_KINDS = {8: "int8", 4: "nf4"}
_SCALES = {8: "a scale for each row", 4: "a scale for each 64 elements of a row"}
_FITTING: dict[int, dict[str, tuple[Any, ...]]] = {
    8: {"group_size": (), "group_dim": (1,), "symmetric": (True,)},
    4: {"group_size": (64,), "group_dim": (1,), "symmetric": (True, False)},
}
"""By bits: what the other numbers may be; leaving them out is always right."""


def freezes(given: Mapping[str, Any]) -> bool:
    """Whether all that is loaded is to be frozen."""
    return given.get(LOADED + "num_bits") in _KINDS


def frozen_dtype(given: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, str]:
    """Return {"frozen_dtype": ...} of Config as a configuration asks for it; nothing where it does not.

    others: the fields of Config that it sets besides.

    Raises: ConfigError where there is no folder on NVMe, or another frozen_dtype is asked for there.
    """
    kind = _KINDS.get(given.get(LOADED + "num_bits", 8 if given.get(NONTRAINABLE) else 0))
    if kind is None:
        return {}
    asked = LOADED.rstrip(".") if freezes(given) else NONTRAINABLE
    if not others.get("nvme"):
        raise ConfigError(
            f'{asked}: weights in "{kind}" lie in a file on NVMe, and no folder is named there: '
            'write "offload_param": {"device": "nvme", "nvme_path": ...}'
        )
    if others.get("frozen_dtype", kind) != kind:
        raise ConfigError(
            f'{asked} asks for "{kind}", and infinity.frozen_dtype for {others["frozen_dtype"]!r}; leave one '
            "of them out"
        )
    return {"frozen_dtype": kind}


def misfits(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the keys whose values mean something else than frozen_dtype does, and what to do."""
    numbers = {
        path.removeprefix(LOADED): value
        for path, value in found.items()
        if path.startswith(LOADED) and value is not None
    }
    if not numbers:
        return
    bits = numbers.pop("num_bits", None)
    if bits not in _KINDS:
        says = 'write "num_bits": 8 (int8) or 4 (nf4)'
        yield LOADED + "num_bits", says
        return
    if found.get(NONTRAINABLE) and bits != 8:
        yield NONTRAINABLE, f"it means 8 bits, and {LOADED}num_bits says {bits}; leave one of them out"
    for name, value in numbers.items():
        if name in _FITTING[bits] and value not in _FITTING[bits][name]:
            yield LOADED + name, f'"{_KINDS[bits]}" is symmetric, with {_SCALES[bits]}; leave it out'
