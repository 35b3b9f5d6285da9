"""What lets quantised checkpoints load inside Init: weights that stay packed in their files.

[Note: packed checkpoints]
transformers asks a quantizer, by the method that a checkpoint names, what to do with packed weights. Where
the model is to compute in 16 bits, as always on a CPU, that of fp8 converts each while it is loaded. Inside
Init that quantizer names another conversion: a weight whose codes and scales are bytes of a mapped file is
*offered* to the construction, which notes where they are, and answers by a tensor without values to put in
the model. What it does not take is converted as ever. A transformers that is imported within Init is seen to
when its model is built, without values yet, which is before it asks for conversions.
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
_OPERATIONS = "get_load_operations"


@contextlib.contextmanager
def leaving_packed(offer: Offer) -> Iterator[Callable[[], None]]:
    """Have transformers offer packed weights; see [Note: packed checkpoints]. Gives what is to be called when
    a model without values is being built: it sees to a transformers that is imported only within the `with`.
    """
    with contextlib.ExitStack() as changed:
        kinds: list[Any] = []

        def see_to_it() -> None:
            if kinds:
                return
            quantizer = _table().get(_METHOD)
            replacement = _offering(quantizer, offer) if quantizer is not None else None
            if replacement is not None:
                kinds.append(quantizer)
                changed.enter_context(_with_operations(quantizer, replacement))

        see_to_it()
        yield see_to_it


@contextlib.contextmanager
def _with_operations(quantizer: Any, operations: Callable[[Any], dict[str, Any]]) -> Iterator[None]:
    """Let a class of quantizers, and what is already made of it, answer with other operations."""
    own = vars(quantizer).get(_OPERATIONS)
    setattr(quantizer, _OPERATIONS, operations)
    try:
        yield
    finally:
        if own is None:
            delattr(quantizer, _OPERATIONS)
        else:
            setattr(quantizer, _OPERATIONS, own)


def _table() -> dict[str, Any]:
    if "transformers" not in sys.modules:
        return {}
    try:
        from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
    except ImportError:
        return {}
    return AUTO_QUANTIZER_MAPPING


def _offering(quantizer: Any, offer: Offer) -> Callable[[Any], dict[str, Any]] | None:
    """Return what answers with this quantizer's operations, but for a conversion that offers; None for a
    transformers that has no such conversion.
    """
    before = getattr(quantizer, _OPERATIONS, None)
    if before is None:
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
        operations: dict[str, Any] = before(self)
        return {**operations, "dequantize": OfferingFp8} if "dequantize" in operations else operations

    return get_load_operations


def _single(value: Any) -> torch.Tensor | None:
    one = value[0] if isinstance(value, list) and len(value) == 1 else value
    return one if isinstance(one, torch.Tensor) else None
