"""What DeepSpeed's JSON says of weights and gradients that ranks send in fewer bits (ZeRO++). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WEIGHTS = "zero_optimization.zero_quantized_weights"
GRADIENTS = "zero_optimization.zero_quantized_gradients"
KEYS = {
    WEIGHTS: 'Config(quantized_weights="int8"): what ranks send of weights; masters stay exact',
    GRADIENTS: 'Config(quantized_gradients="int4"): what ranks send of gradients; "infinity": '
    '{"quantized_gradients": "int8"} has 8 bits',
}


def quantized(given: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields of Config that a file sets: DeepSpeed's gradients go in 4 bits."""
    fields = {"quantized_weights": ("int8", WEIGHTS), "quantized_gradients": ("int4", GRADIENTS)}
    return {name: kind for name, (kind, key) in fields.items() if given.get(key)}
