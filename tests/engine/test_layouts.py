"""Tensors of a checkpoint as packed weights. Trusted: bitsandbytes' own conversion, where it is installed."""

import json

import pytest
import torch

import quantised
from infinity import UnsupportedError
from infinity.engine import layouts

SHAPES = [(64, 256), (33, 130), (128, 64)]


def own(tensors, dtype):
    parts = list(tensors.values())
    weight, shape, widened_to = layouts.four_bits("a.weight", tensors, layouts.in_memory(parts))
    assert widened_to == dtype
    return layouts.widened(weight, parts, shape, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_in_4_and_8_bits_have_the_bits_that_bitsandbytes_gives_them(dtype):
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    torch.manual_seed(0)
    for shape in SHAPES:
        weight = torch.randn(shape).to(dtype)
        for nested in (False, True):
            for kind in ("nf4", "fp4"):
                packed, state = functional.quantize_4bit(
                    weight, blocksize=64, compress_statistics=nested, quant_type=kind
                )
                tensors = {"weight": packed, **state.as_dict(packed=True)}
                assert torch.equal(own(tensors, dtype), functional.dequantize_4bit(packed, state))
        codes, scales, _ = functional.int8_vectorwise_quant(weight.half())
        tensors = {"weight": codes, "SCB": scales}
        parts = list(tensors.values())
        rows = layouts.int8("a.weight", tensors, layouts.in_memory(parts))
        expected = functional.int8_vectorwise_dequant(codes, scales).to(dtype)
        assert torch.equal(layouts.widened(rows, parts, codes.shape, dtype), expected)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_nf4_has_the_bits_of_its_formula(shape, nested):
    torch.manual_seed(1)
    tensors, expected = quantised.to_nf4(torch.randn(shape).bfloat16(), nested=nested)
    tensors = {name.removeprefix(".") or "weight": one for name, one in tensors.items()}
    assert torch.equal(own(tensors, torch.bfloat16), expected)


def test_what_is_not_whole_or_unknown_is_refused_by_name():
    tensors, _ = quantised.to_nf4(torch.randn(64, 64), nested=True)
    whole = {name.removeprefix(".") or "weight": one for name, one in tensors.items()}
    state = "quant_state.bitsandbytes__nf4"

    def refused(match, without=None, **others):
        given = {name: one for name, one in {**whole, **others}.items() if name != without}
        with pytest.raises(UnsupportedError, match=match):
            layouts.four_bits("a.weight", given, layouts.in_memory(list(given.values())))

    for part in ("absmax", "quant_map", "nested_quant_map", state):
        refused(rf"a\.weight: a weight of bitsandbytes in 4 bits without '{part}'", without=part)
    refused("256 scales .* are not", absmax=torch.ones(256))
    refused("2000 B of codes", weight=whole["weight"][:2000])
    refused("nested scales of torch.float32", absmax=torch.ones(64))
    refused("cannot be read", **{state: torch.zeros(5, dtype=torch.uint8)})
    said = json.loads(bytes(whole[state].tolist())) | {"blocksize": 3}
    odd = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)
    refused("no valid shape, dtype and blocksize", **{state: odd})
    codes, scales = torch.zeros(4, 8, dtype=torch.int8), torch.ones(4)
    for match, given in (
        ("format no. 2, an order of tensor cores", {"weight_format": torch.tensor(2, dtype=torch.uint8)}),
        ("4 rows, and 3 scales", {"SCB": scales[:3]}),
        ("torch.uint8 of .* is not a matrix of int8", {"weight": codes.view(torch.uint8)}),
    ):
        with pytest.raises(UnsupportedError, match=match):
            layouts.int8("a.weight", {"weight": codes, "SCB": scales, **given}, lambda _: None)


def test_layouts_that_are_read_no_other_way_are_left_to_transformers():
    ones, codes = torch.ones(2, 2), torch.zeros(64, 64).to(torch.float8_e4m3fn)
    nowhere, names = (lambda _: None), ("weight", "weight_scale_inv")
    for weight, scales in ((codes, ones.double()), (ones, ones), (codes, torch.ones(3, 2)), (codes[0], ones)):
        parts = [weight, scales]
        given = dict(zip(names, parts, strict=True))
        assert layouts.fp8(given, layouts.in_memory(parts)) is None
    assert layouts.fp8(dict(zip(names, (codes, ones), strict=True)), nowhere) is None
    blocks, scales = torch.zeros(2, 3, 4, 16, dtype=torch.uint8), torch.zeros(2, 3, 4, dtype=torch.uint8)
    assert layouts.mxfp4({"blocks": blocks, "scales": scales}, nowhere) is None
    parts = [blocks[..., :8], scales]
    assert layouts.mxfp4({"blocks": parts[0], "scales": scales}, layouts.in_memory(parts)) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", sorted(quantised.COMPRESSED))
def test_compressed_tensors_have_the_bits_of_their_formula_and_of_their_library(kind, dtype):
    torch.manual_seed(2)
    for shape in ((96, 256), (130, 320)):
        tensors, expected = quantised.to_compressed(torch.randn(shape).to(dtype), kind)
        parts = list(tensors.values())
        block = quantised.COMPRESSED[kind].get("block_structure")
        weight = layouts.compressed(tensors, layouts.in_memory(parts), dtype, block)
        found = layouts.widened(weight, parts, torch.Size(shape), dtype)
        assert torch.equal(found, expected)
        whole = torch.empty(shape, dtype=dtype)
        for row in range(0, shape[0], 7):  # from the middle of groups and blocks
            n = min(7, shape[0] - row) * shape[1]
            for cut in weight.cuts(row * shape[1], n, 1 << 62):
                at = [parts[int(one.path)].data_ptr() + one.offset for one in cut.sources]
                weight.widen(layouts._NAMES[dtype], cut, at, row * shape[1], n, whole[row].data_ptr())
        assert torch.equal(whole, expected)


@pytest.mark.parametrize("kind", sorted(quantised.COMPRESSED))
def test_the_formula_of_compressed_tensors_is_its_librarys(kind):
    compressors = pytest.importorskip(
        "compressed_tensors.compressors", reason="compressed-tensors is not installed"
    )
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    torch.manual_seed(3)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**quantised.COMPRESSED[kind]))
    name = "pack-quantized" if "int4" in kind else "naive-quantized"
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        tensors, expected = quantised.to_compressed(torch.randn(96, 320).to(dtype), kind)
        library = compressors.BaseCompressor.get_value_from_registry(name).decompress(tensors, scheme)
        assert torch.equal(library["weight"], expected)


def test_compressed_tensors_that_would_be_rounded_twice_or_have_zero_points_are_left_to_their_library():
    tensors, _ = quantised.to_compressed(torch.randn(64, 64).bfloat16(), "int8 channel")
    four, _ = quantised.to_compressed(torch.randn(64, 64).bfloat16(), "int4 group")
    odd = {"weight_shape": torch.tensor([64, 60])}
    for given, dtype in (
        (tensors, torch.float32),
        ({**tensors, "weight_zero_point": torch.zeros(64, 1)}, torch.bfloat16),
        ({**tensors, "weight_scale": tensors["weight_scale"].double()}, torch.bfloat16),
        ({**tensors, "weight_scale": tensors["weight_scale"][:5]}, torch.bfloat16),
        ({**four, **odd}, torch.bfloat16),
        ({**four, "weight_packed": four["weight_packed"].long()}, torch.bfloat16),
    ):
        assert layouts.compressed(given, layouts.in_memory(list(given.values())), dtype) is None
    assert layouts.compressed(tensors, lambda _: None, torch.bfloat16) is None
