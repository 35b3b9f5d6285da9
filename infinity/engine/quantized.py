"""What lets quantised checkpoints load inside Init: weights that stay packed in their files.

[Note: packed checkpoints]
transformers asks a quantizer, by the method that a checkpoint names, what to do with packed weights. Inside
Init, quantizers name other conversions: a weight whose codes and scales are bytes of mapped files is
*offered* to the construction, which notes where they are, and answers by a tensor without values to put in
the model.
- fp8 and MXFP4: where the model is to compute in 16 bits, transformers converts each weight while it is
  loaded, by default on a CPU alone, here always; what is not taken is converted as ever.
- bitsandbytes: transformers puts layers of its own in the model, which widen their weights when they compute.
  Here the layers stay as they are, and bitsandbytes need not be there. What is not taken is widened by our
  kernels, to the same bits.
- compressed-tensors: transformers puts compressed layers in the model, which its package decompresses when
  they compute first. Here they are converted while they are loaded, as `dequantize=True` asks for.
Checkpoints by any other method are refused by name before anything is read: transformers would leave their
weights in memory, or, where it does not know the method, draw new ones.
A transformers that is imported within Init is seen to when its model is built, without values yet, which is
before it asks for conversions.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from infinity.engine import layouts
from infinity.errors import UnsupportedError
from infinity.storage.packed import Packed

logger = logging.getLogger("infinity")

Offer = Callable[[Callable[[layouts.Find], "Packed | None"], torch.Size, torch.dtype], "torch.Tensor | None"]
"""What makes the weight where its tensors are in files, its shape, and the type to widen it to; returns what
stands for the weight, or None where it is not taken.
"""

_OPERATIONS = "get_load_operations"
_BITSANDBYTES = ("bitsandbytes_4bit", "bitsandbytes_8bit")
_CONVERTED = ("fp8", "mxfp4", "bitsandbytes", "compressed-tensors", "metal")
"""Methods whose weights are read in place, or converted while they are loaded."""


@contextlib.contextmanager
def leaving_packed(offer: Offer) -> Iterator[Callable[[], None]]:
    """Have transformers offer packed weights; see [Note: packed checkpoints]. Gives what is to be called when
    a model without values is being built: it sees to a transformers that is imported only within the `with`.
    """
    with contextlib.ExitStack() as changed:
        kinds: list[Any] = []

        def see_to_it() -> None:
            table = _table() if not kinds else {}
            if table:
                changed.enter_context(_refusing_others())
            for method, quantizer in table.items():
                others = _others(method, quantizer, offer)
                kinds.append(quantizer)
                for name, other in others.items():
                    changed.enter_context(_with_method(quantizer, name, other))

        see_to_it()
        yield see_to_it


@contextlib.contextmanager
def _with_method(quantizer: Any, name: str, other: Any) -> Iterator[None]:
    """Let a class of quantizers, and what is already made of it, have another method."""
    own = vars(quantizer).get(name)
    setattr(quantizer, name, other)
    try:
        yield
    finally:
        if own is None:
            delattr(quantizer, name)
        else:
            setattr(quantizer, name, own)


def _refusing_others() -> contextlib.AbstractContextManager[None]:
    """Refuse checkpoints quantised by other methods than those that are converted."""
    from transformers.quantizers.auto import AutoHfQuantizer

    before: Any = AutoHfQuantizer.supports_quant_method

    def supports_quant_method(said: Any) -> Any:
        method = said.get("quant_method", None)
        if method is not None and method not in _CONVERTED:
            raise UnsupportedError(
                f"quant_method={method!r} in the checkpoint's configuration: weights quantised so are not "
                f"read inside Init; {', '.join(_CONVERTED[:-1])} are. Load a checkpoint in 16 bits, which "
                'Init(frozen=True) with frozen_dtype="nf4" or "int8" quantises.'
            )
        return before(said)

    return _with_method(AutoHfQuantizer, "supports_quant_method", staticmethod(supports_quant_method))


def _table() -> Mapping[str, Any]:
    """Return transformers' quantizers by their methods, if it is there."""
    if "transformers" not in sys.modules:
        return {}
    try:
        from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
    except ImportError:
        return {}
    return AUTO_QUANTIZER_MAPPING


def _others(method: str, quantizer: Any, offer: Offer) -> dict[str, Any]:
    """Return the methods that a quantizer is to have instead of its own, by name; none for a method that has
    no packed weights. With a transformers that has no such conversions weights are not offered: they are
    widened while they are loaded, as transformers does it by itself where no GPU is.
    """
    before = getattr(quantizer, _OPERATIONS, None)
    if method in _BITSANDBYTES:
        return {} if before is None else _bitsandbytes(_loading(offer, eight=method == "bitsandbytes_8bit"))
    makers = {"fp8": _fp8, "mxfp4": _mxfp4, "compressed-tensors": _compressed}
    if method not in makers:
        return {}
    try:  # an older transformers may lack one
        operation = None if before is None else makers[method](offer)
    except ImportError:
        operation = None
    if operation is None or before is None:
        return _dequantizing(quantizer)

    def get_load_operations(self: Any) -> dict[str, Any]:
        operations: dict[str, Any] = before(self)
        return {**operations, "dequantize": operation} if "dequantize" in operations else operations

    return {_OPERATIONS: get_load_operations, **_dequantizing(quantizer)}


def _fp8(offer: Offer) -> Any:
    """Return transformers' conversion of fp8, but for a weight that is taken."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    if not hasattr(Fp8Dequantize, "_get_target_dtype"):
        return None
    dequantize: Any = Fp8Dequantize  # transformers' types are not part of what it promises

    class OfferingFp8(dequantize):
        """Offers the weight of a layer before it is converted."""

        def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> Any:
            """Answer as ever, with what the offer gave."""
            tensors, name = _singles(input_dict), kwargs.get("full_layer_name")
            if tensors.keys() >= {"weight", "weight_scale_inv"} and name is not None:
                dtype = _target(kwargs.get("model"), name)
                shape = tensors["weight"].shape
                found = offer(lambda find: layouts.fp8(tensors, find), shape, dtype) if dtype else None
                if found is not None:
                    return {name: found}
            return super().convert(input_dict, **kwargs)

    return OfferingFp8


def _mxfp4(offer: Offer) -> Any:
    """Return transformers' conversion of MXFP4, but for a weight that is taken."""
    from transformers.integrations.mxfp4 import Mxfp4Dequantize

    dequantize: Any = Mxfp4Dequantize

    class OfferingMxfp4(dequantize):
        """Offers a stack of experts before it is converted."""

        def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> Any:
            """Answer as ever, with what the offer gave."""
            tensors, name = _singles(input_dict), kwargs.get("full_layer_name")
            parts = {one: _ending(tensors, one) for one in ("blocks", "scales")}
            both = {one: part for one, part in parts.items() if part is not None}
            dtype = _target(kwargs.get("model"), name)
            if len(both) == len(parts) and name is not None and dtype is not None:
                matrices, rows, blocks, width = both["blocks"].shape
                shape = torch.Size((matrices, blocks * width * 2, rows))
                found = offer(lambda find: layouts.mxfp4(both, find), shape, dtype)
                if found is not None:
                    return {name: found}
            return super().convert(input_dict, **kwargs)

    return OfferingMxfp4


def _compressed(offer: Offer) -> Any:
    """Return transformers' conversion of compressed-tensors, but for a weight that is taken."""
    from transformers.integrations import compressed_tensors

    integration: Any = compressed_tensors
    dequantize: Any = integration.CompressedTensorsDequantize
    scheme_of = getattr(integration, "get_dense_scheme", lambda _: None)

    class OfferingCompressed(dequantize):
        """Offers the weight of a layer before it is decompressed."""

        def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> Any:
            """Answer as ever, with what the offer gave."""
            tensors, name = _singles(input_dict), kwargs.get("full_layer_name")
            dtype = _target(kwargs.get("model"), name)
            codes = tensors.get("weight", tensors.get("weight_shape"))
            if "weight_scale" in tensors and codes is not None and name is not None and dtype is not None:
                scheme = self.scheme or scheme_of(self.hf_quantizer.compressor.quantization_config)
                block = getattr(getattr(scheme, "weights", None), "block_structure", None)
                packed = "weight" not in tensors
                shape = torch.Size(int(one) for one in codes) if packed else codes.shape
                found = offer(lambda find: layouts.compressed(tensors, find, dtype, block), shape, dtype)
                if found is not None:
                    return {name: found}
            return super().convert(input_dict, **kwargs)

    return OfferingCompressed


def check_order(said: Any) -> None:
    """Refuse weights whose groups of scales are not of consecutive columns: transformers drops their index.

    Raises: UnsupportedError.
    """
    inner = getattr(said, "quantization_config", None) or said
    for name, scheme in (getattr(inner, "config_groups", None) or {}).items():
        weights = getattr(scheme, "weights", None)
        order = getattr(weights, "actorder", None)
        if order is not None and str(getattr(order, "value", order)) in ("group", "dynamic"):
            raise UnsupportedError(
                f"{name} of the checkpoint's configuration has actorder={order!s}: scales of columns in an "
                'order of their own are not read inside Init. Load a checkpoint with actorder="weight" or '
                "none, or one in 16 bits."
            )


def say_activations_stay(said: Any) -> None:
    """Log that activations are not quantised, where a checkpoint says how they are to be."""
    inner = getattr(said, "quantization_config", None) or said
    kinds = ("input_activations", "output_activations")
    groups = (getattr(inner, "config_groups", None) or {}).values()
    asked = {one for one in kinds for group in groups if getattr(group, one, None) is not None}
    asked |= {"activation_scheme"} if getattr(said, "activation_scheme", None) is not None else set()
    if asked:
        logger.warning(
            "the checkpoint's configuration has activations quantised (%s): inside Init they are not. Layers "
            "compute in the model's type, with weights that are widened to it, so results may differ from "
            "those of a server that quantises both.",
            ", ".join(sorted(asked)),
        )


def _dequantizing(quantizer: Any) -> dict[str, Any]:
    """Return what makes a quantizer convert weights while they are loaded, also where a GPU is."""
    before = quantizer.validate_environment

    def validate_environment(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.pre_quantized:
            check_order(self.quantization_config)
            say_activations_stay(self.quantization_config)
            self.quantization_config.dequantize = True
            if hasattr(self.quantization_config, "use_optimized_inference"):
                self.quantization_config.use_optimized_inference = False
        before(self, *args, **kwargs)

    return {"validate_environment": validate_environment}


def _loading(offer: Offer, *, eight: bool) -> Any:
    """Return the conversion of bitsandbytes' weights, of 8 or of 4 bits."""
    from transformers.core_model_loading import ConversionOps

    base: Any = ConversionOps

    class LoadingBitsAndBytes(base):
        """Offers the weight of a layer; widens it, if it is not taken."""

        def __init__(self, hf_quantizer: Any) -> None:
            self.hf_quantizer = hf_quantizer

        def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> Any:
            """Return the weight, by its name."""
            name = str(kwargs.get("full_layer_name"))
            tensors = {key.removeprefix("weight."): one for key, one in _singles(input_dict).items()}
            dtype = _target(kwargs.get("model"), name) or torch.float32
            if len(tensors) == 1:  # not packed
                return {name: next(iter(tensors.values())).to(dtype)}
            return {
                name: _eight(offer, name, tensors, dtype) if eight else _four(offer, name, tensors, dtype)
            }

    return LoadingBitsAndBytes


def _eight(offer: Offer, name: str, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    shape, parts = tensors["weight"].shape, list(tensors.values())
    found = offer(lambda find: layouts.int8(name, tensors, find), shape, dtype)
    if found is not None:
        return found
    weight = layouts.int8(name, tensors, layouts.in_memory(parts))
    if weight is None:
        raise UnsupportedError(f"{name}: its parts are not there: {', '.join(sorted(tensors))}")
    return layouts.widened(weight, parts, shape, dtype)


def _four(offer: Offer, name: str, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    parts = list(tensors.values())
    weight, shape, widened_to = layouts.four_bits(name, tensors, layouts.in_memory(parts))
    if weight is None:
        raise UnsupportedError(f"{name}: its parts are not there: {', '.join(sorted(tensors))}")
    if widened_to == dtype:  # else it would be rounded once, and not twice as bitsandbytes does it
        found = offer(lambda find: layouts.four_bits(name, tensors, find)[0], shape, dtype)
        if found is not None:
            return found
    return layouts.widened(weight, parts, shape, widened_to).to(dtype)


def _bitsandbytes(operation: Any) -> dict[str, Any]:
    """Return what makes a quantizer of bitsandbytes load weights alone: its layers stay out of the model."""

    def validate_environment(self: Any, *_args: Any, **_kwargs: Any) -> None:
        if not self.pre_quantized:
            raise UnsupportedError(
                "BitsAndBytesConfig for a checkpoint in 16 bits: inside Init nothing is quantised by "
                "transformers. Leave it out, and let Infinity do it, Init(frozen=True) with "
                'frozen_dtype="nf4" or "int8"; or load a checkpoint that is quantised already.'
            )
        self.quantization_config.dequantize = True

    def nothing(_self: Any, *_args: Any, **_kwargs: Any) -> None:
        """Leave the model as it is."""

    def the_model(_self: Any, model: Any, **_kwargs: Any) -> Any:
        return model

    def same(_self: Any, given: Any) -> Any:
        return given

    def never(_self: Any, *_args: Any, **_kwargs: Any) -> bool:
        return False

    def get_load_operations(_self: Any) -> dict[str, Any]:
        return {"dequantize": operation}

    return {
        "validate_environment": validate_environment,
        "update_device_map": same,
        "adjust_max_memory": same,
        "param_needs_quantization": never,
        "_convert_model_for_quantization": nothing,
        "_process_model_before_weight_loading": nothing,
        "_process_model_after_weight_loading": the_model,
        _OPERATIONS: get_load_operations,
    }


def _target(model: Any, name: str | None) -> torch.dtype | None:
    """Return the type of the parameter of that name, which is what its values are converted to."""
    if model is None or name is None:
        return None
    module, _, last = name.rpartition(".")
    found = getattr(getattr(model.get_submodule(module), last, None), "dtype", None)
    return found if isinstance(found, torch.dtype) else None


def _singles(collected: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors that transformers has collected one of."""
    single = {
        name: value[0] if isinstance(value, list) and len(value) == 1 else value
        for name, value in collected.items()
    }
    return {name: one for name, one in single.items() if isinstance(one, torch.Tensor)}


def _ending(tensors: Mapping[str, torch.Tensor], end: str) -> torch.Tensor | None:
    return next((one for name, one in tensors.items() if name.endswith(f"_{end}")), None)
