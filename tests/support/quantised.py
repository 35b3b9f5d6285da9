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
    (path / "model.safetensors.index.json").unlink()
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
