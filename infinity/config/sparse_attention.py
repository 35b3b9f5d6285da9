"""DeepSpeed's section sparse_attention, in Infinity's terms. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infinity.errors import ConfigError

SPARSE = "sparse_attention."
NUMBERS = (
    "num_local_blocks num_global_blocks num_different_global_patterns num_random_blocks "
    "num_sliding_window_blocks"
)
LISTS = "local_window_blocks global_block_indices global_block_end_indices"
SWITCHES = "different_layout_per_head horizontal_global_attention"
TEXTS = "mode attention"
_MODES = ("dense", "fixed", "variable", "bigbird", "bslongformer")


@dataclass(frozen=True, slots=True)
class AskedSparsity:
    """What a file says of sparse attention."""

    mode: str
    options: Mapping[str, Any]
    """Of the layout, by DeepSpeed's names."""


def asked_sparsity(given: Mapping[str, Any]) -> AskedSparsity | None:
    """Return what a file's keys say of sparse attention; None where it has no such section.

    Raises: ConfigError for a mode that DeepSpeed has not.
    """
    found = {path.removeprefix(SPARSE): value for path, value in given.items() if path.startswith(SPARSE)}
    if not found:
        return None
    mode = found.pop("mode", "fixed")
    if mode not in _MODES:
        raise ConfigError(f"{SPARSE}mode={mode!r}: expected one of {', '.join(map(repr, _MODES))}")
    if mode == "bigbird":  # the default of the file, which is not that of DeepSpeed's class
        found.setdefault("num_random_blocks", 0)
    return AskedSparsity(mode, {name: _whole(value) for name, value in found.items()})


def _whole(value: Any) -> Any:
    """Return 16.0, a float in JSON, as a whole number."""
    if isinstance(value, list):
        return [_whole(one) for one in value]
    return int(value) if isinstance(value, float) and value % 1 == 0 else value
