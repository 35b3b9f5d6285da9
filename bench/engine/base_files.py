"""A Llama's checkpoint to put adapters on: made-up weights in safetensors files, in bf16 or packed as fp8."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from infinity.storage.safetensors_file import TensorEntry, TensorWriter

PACKINGS = ("bf16", "fp8")
_PIECE_NBYTES = 1 << 22
_BLOCK = 128


def write_base(folder: Path, shape: Mapping[str, int], packing: str) -> Path:
    """Write the files of a Llama of this shape to a new folder, streamed; return it.

    packing: "bf16"; or "fp8", e4m3 with an fp32 scale for each block of 128 x 128 (of all rows or columns,
    where they are no multiple), norms, embeddings and head in bf16.
    """
    folder.mkdir()
    config, shapes = llama_files(shape)
    if packing == "fp8":
        config["quantization_config"] = {
            "quant_method": "fp8",
            "weight_block_size": [_BLOCK, _BLOCK],
            "activation_scheme": "dynamic",
        }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    entries: list[TensorEntry] = []
    for name, (rows, *cols) in shapes.items():
        if packing == "fp8" and name.endswith("proj.weight"):
            grid = tuple(size // _BLOCK if size % _BLOCK == 0 else 1 for size in (rows, *cols))
            entries += [
                TensorEntry(name, "F8_E4M3", (rows, *cols)),
                TensorEntry(f"{name}_scale_inv", "F32", grid),
            ]
        else:
            entries.append(TensorEntry(name, "BF16", (rows, *cols)))
    with closing(TensorWriter(folder / "model.safetensors", entries, {"format": "pt"})) as writer:
        for entry in entries:
            piece = _values(entry.dtype)
            for at in range(0, entry.nbytes, len(piece)):
                writer.write(entry.name, at, piece[: entry.nbytes - at])
    return folder


def llama_files(shape: Mapping[str, int]) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Return a Llama's configuration, and the shapes of its weights by name."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {**shape, "num_key_value_heads": shape["num_attention_heads"]}
    config = LlamaConfig(**sizes)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    shapes = {name: tuple(one.shape) for name, one in model.named_parameters()}
    return {**config.to_dict(), "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}, shapes


def _values(dtype: str) -> memoryview:
    """Return the bytes that fill tensors of a type, again and again: small finite numbers."""
    draws = random.Random(0)  # noqa: S311 - numbers to fill files with
    if dtype == "F8_E4M3":
        some = bytes(draws.choice((0, 128)) + draws.randrange(96) for _ in range(4096))
    elif dtype == "F32":
        some = bytes.fromhex("6f12833a") * 1024  # 0.001
    else:  # the sign and the exponents of about 0.01 to 0.03, any mantissa
        some = b"".join(bytes((draws.randrange(256), draws.choice((0x3C, 0xBC)))) for _ in range(2048))
    return memoryview(some * (_PIECE_NBYTES // len(some)))
