"""Tiny checkpoints in the layouts of quantised models, made from models of transformers."""

from __future__ import annotations

import json

import torch
import transformers
from safetensors.torch import load_file, save_file

SIZES = {
    "vocab_size": 64,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 384,
}


def to_blocks(weight, block=128):
    """Return a matrix as e4m3 codes and the fp32 scales of its blocks."""
    rows, cols = weight.shape
    blocks = weight.float().view(rows // block, block, cols // block, block)
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return codes.view(rows, cols), scales


def fp8_llama(path, block=128, **options):
    """Save a Llama as DeepSeek saves its models: e4m3 with `weight_scale_inv`, all else in bf16."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**{**SIZES, **options})
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path, max_shard_size="300kB")
    for shard in path.glob("*.safetensors"):
        tensors = {}
        for name, one in load_file(shard).items():
            tensors[name] = one
            if name.endswith("proj.weight"):
                tensors[name], tensors[f"{name}_scale_inv"] = to_blocks(one, block)
        save_file(tensors, shard, {"format": "pt"})
    join(path)
    add_method(path, quant_method="fp8", weight_block_size=[block, block], activation_scheme="dynamic")
    return path


def join(path):
    """Write the index of a folder's shards."""
    shards = {one.name: load_file(one) for one in sorted(path.glob("*.safetensors"))}
    names = {name: shard for shard, tensors in shards.items() for name in tensors}
    total = sum(one.nbytes for tensors in shards.values() for one in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": names}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def add_method(path, **quantization):
    """Name the quantisation in a checkpoint's configuration."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))


def to_mxfp4(stack):
    """Return a stack of matrices, as gpt-oss computes with them, as blocks and scales of its files."""
    turned = stack.float().transpose(1, 2).contiguous()
    blocks = turned.view(*turned.shape[:2], -1, 32)
    exponents = blocks.abs().amax(-1).clamp(min=1e-30).log2().floor().clamp(-120, 120) - 2
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    scaled = blocks / exponents.exp2()[..., None]
    codes = (scaled[..., None] - values).abs().argmin(-1).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8)


GPT_OSS = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "layer_types": ["full_attention", "sliding_attention"],
}


def mxfp4_gpt_oss(path, **options):
    """Save a gpt-oss as it is published: stacks of experts in MXFP4, all else in bf16."""
    torch.manual_seed(1)
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**{**GPT_OSS, **options}))
    model.to(torch.bfloat16).save_pretrained(path)
    shard = path / "model.safetensors"
    tensors = {}
    for name, one in load_file(shard).items():
        if name.endswith(("gate_up_proj", "down_proj")):
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = to_mxfp4(one)
        else:
            tensors[name] = one
    save_file({name: one.contiguous() for name, one in tensors.items()}, shard, {"format": "pt"})
    add_method(path, quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "lm_head"])
    return path


NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635]
NF4 += [-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725]
NF4 += [0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941]
NF4 += [0.7229568362236023, 1.0]
"""The values of nf4 (Dettmers et al., QLoRA, appendix E), as bitsandbytes has them."""


def to_nf4(weight, *, nested, block=64):
    """Return a weight's tensors in bitsandbytes' nf4, by their names behind that of the weight, and the
    values that its formula gives: code times absmax in fp32, rounded; absmax, if nested, its value in a table
    times the absmax of its 256, plus an offset.
    """
    numel, table = weight.numel(), torch.tensor(NF4)
    flat = torch.cat([weight.float().flatten(), torch.zeros(-numel % block)]).view(-1, block)
    absmax = flat.abs().amax(1).clamp(min=1e-30)
    codes = torch.bucketize(flat / absmax[:, None], (table[1:] + table[:-1]) / 2)
    codes = codes.to(torch.uint8).flatten()[:numel]
    tensors = {"": (codes[0::2] << 4 | codes[1::2]).view(-1, 1), ".quant_map": table, ".absmax": absmax}
    state = {"quant_type": "nf4", "blocksize": block, "dtype": str(weight.dtype).removeprefix("torch.")}
    state["shape"] = list(weight.shape)
    if nested:
        names = torch.linspace(-1, 1, 256)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": absmax.mean().item()}
        centred = torch.cat([absmax - state["nested_offset"], torch.zeros(-len(absmax) % 256)]).view(-1, 256)
        outer = centred.abs().amax(1).clamp(min=1e-30)
        eight = ((centred / outer[:, None])[..., None] - names).abs().argmin(-1).to(torch.uint8)
        eight = eight.flatten()[: len(absmax)]
        tensors |= {".absmax": eight, ".nested_absmax": outer, ".nested_quant_map": names}
        spread = outer.repeat_interleave(256)[: len(absmax)]
        absmax = names[eight.long()] * spread + torch.tensor(state["nested_offset"])
    said = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    tensors[".quant_state.bitsandbytes__nf4"] = said
    spread = absmax.repeat_interleave(block)[:numel]
    return tensors, (table[codes.long()] * spread).to(weight.dtype).view(weight.shape)


def to_int8(weight):
    """Return a matrix's tensors in bitsandbytes' int8, and the values that its formula gives."""
    scales = weight.float().abs().amax(1)
    codes = (weight.float() * (127 / scales[:, None])).round().to(torch.int8)
    values = (codes * scales[:, None] * 7.874015718698502e-3).to(weight.dtype)
    tensors = {"": codes, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, values


def packed_llama(path, plain, pack, **options):
    """Save a Llama in bf16 with its projections packed to `path`, and with their values to `plain`. pack:
    returns the tensors of a layer's weight by their names in it, and its values.
    """
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**{**SIZES, **options})
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    for folder in (path, plain):
        model.save_pretrained(folder)
    tensors, values = {}, {}
    for name, one in load_file(path / "model.safetensors").items():
        tensors[name] = values[name] = one
        if name.endswith("proj.weight"):
            packed, values[name] = pack(tensors.pop(name))
            layer = name.removesuffix("weight")
            tensors |= {f"{layer}{part}": values_of.contiguous() for part, values_of in packed.items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    save_file(values, plain / "model.safetensors", {"format": "pt"})


def bitsandbytes_llama(path, kind, plain, **options):
    """Save a Llama as bitsandbytes does, "nf4", "nf4 nested" or "int8", to `path`, and what its weights are
    by the formulas to `plain`.
    """

    def pack(weight):
        packed, values = to_int8(weight) if kind == "int8" else to_nf4(weight, nested="nested" in kind)
        return {end if end[:1].isalpha() else f"weight{end}": part for end, part in packed.items()}, values

    packed_llama(path, plain, pack, **options)
    said = {"load_in_8bit": True} if kind == "int8" else {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    if "nested" in kind:
        said["bnb_4bit_use_double_quant"] = True
    add_method(path, quant_method="bitsandbytes", **said)
    return path


COMPRESSED = {
    "fp8 channel": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "fp8 tensor": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "fp8 block": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [96, 80]},
    "int8 channel": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "int8 group": {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 64},
    "int4 group": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
    "int4 channel": {"num_bits": 4, "type": "int", "strategy": "channel"},
}
"""What compressed-tensors says of the weights of each kind; blocks of "fp8 block" end beyond the matrices."""


def _each_scale(weight, args):
    """Return a matrix's scales, and the same spread over its elements."""
    rows, cols = weight.shape
    block = args.get("block_structure") or [
        rows if args["strategy"] == "tensor" else 1,
        args.get("group_size", cols),
    ]
    grid = -(-rows // block[0]), -(-cols // block[1])
    padded = torch.zeros(grid[0] * block[0], grid[1] * block[1])
    padded[:rows, :cols] = weight.float().abs()
    largest = padded.view(grid[0], block[0], grid[1], block[1]).amax((1, 3))
    highest = 448 if args["type"] == "float" else 2 ** (args["num_bits"] - 1) - 1
    scales = (largest.clamp(min=1e-6) / highest).to(weight.dtype)
    spread = scales.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :cols]
    return scales.view(1) if args["strategy"] == "tensor" else scales, spread


def to_compressed(weight, kind):
    """Return a matrix's tensors in a layout of compressed-tensors, by their names behind that of the layer,
    with scales of the weight's own type, and the values that its formula gives: code times scale, in that.
    """
    args = COMPRESSED[kind]
    scales, spread = _each_scale(weight, args)
    tensors = {"weight_scale": scales}
    if args["type"] == "float":
        codes = (weight.float() / spread.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {"weight": codes, **tensors}, codes.to(weight.dtype) * spread
    highest = 2 ** (args["num_bits"] - 1) - 1
    codes = (weight.float() / spread.float()).round().clamp(-highest - 1, highest).to(torch.int8)
    values = codes.to(weight.dtype) * spread
    if args["num_bits"] == 8:
        return {"weight": codes, **tensors}, values
    nibbles = (codes.int() + 8).view(len(codes), -1, 8)
    packed = sum(nibbles[..., at].long() << 4 * at for at in range(8))
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
    return {"weight_packed": packed, "weight_shape": torch.tensor(codes.shape), **tensors}, values


def compressed_llama(path, kind, plain, **options):
    """Save a Llama as compressed-tensors does to `path`, and what its weights are by its formula to `plain`,
    in 16 bits.
    """
    packed_llama(path, plain, lambda weight: to_compressed(weight, kind), **options)
    form = {"float": "float-quantized", "int": "int-quantized"}[COMPRESSED[kind]["type"]]
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, **COMPRESSED[kind]}}
    add_method(
        path,
        quant_method="compressed-tensors",
        format="pack-quantized" if "int4" in kind else form,
        quantization_status="compressed",
        ignore=["lm_head"],
        config_groups={"group_0": group},
    )
    return path
