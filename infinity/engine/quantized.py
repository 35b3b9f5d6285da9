"""What lets quantised checkpoints load inside Init: weights that stay packed in their files.

[Note: packed checkpoints]
transformers asks a quantizer, by the method that a checkpoint names, what to do with packed weights. Where
the model is to compute in 16 bits, as always on a CPU, that of fp8 converts each while it is loaded. Inside
Init a quantizer of the same kind stands in its place, in transformers' own table of quantizers: a weight
whose codes and scales are bytes of a mapped file is *offered* to the construction, which notes where they
are, and answers by a tensor without values to put in the model. What it does not take is converted as ever.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

Offer = Callable[[torch.Tensor, torch.Tensor, torch.dtype], "torch.Tensor | None"]
"""Codes, scales and the type to convert to; returns what stands for the weight, or None."""

_METHOD = "fp8"


@contextlib.contextmanager
def leaving_packed(offer: Offer) -> Iterator[None]:
    """Have transformers, if it is imported, offer packed weights; see [Note: packed checkpoints]."""
    table = _table()
    before = table.get(_METHOD)
    kind = _offering(before, offer) if before is not None else None
    if kind is None:
        yield
        return
    table[_METHOD] = kind
    try:
        yield
    finally:
        table[_METHOD] = before


def _table() -> dict[str, Any]:
    if "transformers" not in sys.modules:
        return {}
    try:
        from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
    except ImportError:
        return {}
    return AUTO_QUANTIZER_MAPPING


def _offering(quantizer: Any, offer: Offer) -> Any:
    """Return a quantizer like this one whose conversion offers; None for a transformers that has no such
    conversion.
    """
    if not hasattr(quantizer, "get_load_operations"):
        return None
    try:
        from transformers.integrations.finegrained_fp8 import Fp8Dequantize
    except ImportError:
        return None
    if not hasattr(Fp8Dequantize, "_get_target_dtype"):
        return None
    dequantize: Any = Fp8Dequantize  # transformers' types are not part of what it promises

    class OfferingFp8(dequantize):
        """Offers the weight of a layer before it is converted."""

        def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> Any:
            """Answer as ever, with what the offer gave."""
            codes, scales = (_single(input_dict.get(name)) for name in ("weight", "weight_scale_inv"))
            name = kwargs.get("full_layer_name")
            if codes is not None and scales is not None and name is not None:
                dtype = self._get_target_dtype(kwargs.get("model"), name)
                stand_in = offer(codes, scales, dtype) if dtype is not None else None
                if stand_in is not None:
                    return {name: stand_in}
            return super().convert(input_dict, **kwargs)

    def get_load_operations(self: Any) -> dict[str, Any]:
        operations: dict[str, Any] = quantizer.get_load_operations(self)
        return {**operations, "dequantize": OfferingFp8} if "dequantize" in operations else operations

    return type(quantizer.__name__, (quantizer,), {"get_load_operations": get_load_operations})


def _single(value: Any) -> torch.Tensor | None:
    one = value[0] if isinstance(value, list) and len(value) == 1 else value
    return one if isinstance(one, torch.Tensor) else None
