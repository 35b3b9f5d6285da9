"""Steps of LoRA on a Llama of 1.1B parameters whose base is nf4, within 256 MiB.

    python tests/support/qlora_run.py FOLDER

Writes the base to FOLDER first, streamed: any codes, with scales of 0.02, nested as bitsandbytes nests them.
Prints a line of JSON: parameters, of the base and of the adapters; bytes that the base takes packed, that its
largest unit takes in use, that loading and each step have read, and that were written; and the peak of
resident memory above what was resident before the base was loaded.
"""

import json
import sys
import warnings
from pathlib import Path

import peft
import torch
import transformers

import infinity
import models
import quantised
from infinity.engine.engine import engine_of_model
from infinity.storage.safetensors_file import TensorEntry, TensorWriter
from infinity.tensors import as_bytes

SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "intermediate_size": 5632,
}
"""TinyLlama's."""
_NAMES = {torch.uint8: "U8", torch.float32: "F32", torch.bfloat16: "BF16"}


def tensors_of(name, shape):
    """Return the tensors of one weight in files, by their names: nf4 of linear layers, else bf16."""
    if not name.endswith("proj.weight"):
        return {name: torch.randn(shape, dtype=torch.bfloat16) * 0.02}
    numel = shape.numel()
    blocks = numel // 64
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(shape)}
    state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.02}
    return {
        name: torch.randint(256, (numel // 2, 1), dtype=torch.uint8),
        f"{name}.absmax": torch.randint(256, (blocks,), dtype=torch.uint8),
        f"{name}.nested_absmax": torch.full((-(-blocks // 256),), 0.01),
        f"{name}.nested_quant_map": torch.linspace(-1, 1, 256),
        f"{name}.quant_map": torch.tensor(quantised.NF4),
        f"{name}.quant_state.bitsandbytes__nf4": torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        ),
    }


def write_base(folder):
    """Write the base, tensor by tensor; return how many parameters it has."""
    folder.mkdir()
    config = transformers.LlamaConfig(**SHAPE)
    with torch.device("meta"):
        hollow = transformers.LlamaForCausalLM(config)
    shapes = {name: one.shape for name, one in hollow.named_parameters()}
    entries = []
    for name, shape in shapes.items():
        entries += [
            TensorEntry(key, _NAMES[one.dtype], tuple(one.shape))
            for key, one in tensors_of(name, shape).items()
        ]
    writer = TensorWriter(folder / "model.safetensors", entries, {"format": "pt"})
    for name, shape in shapes.items():
        for key, one in tensors_of(name, shape).items():
            writer.write(key, 0, as_bytes(one.contiguous()))
    writer.close()
    method = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    said = {**config.to_dict(), "dtype": "bfloat16", "architectures": ["LlamaForCausalLM"]}
    said["quantization_config"] = {**method, "bnb_4bit_use_double_quant": True}
    (folder / "config.json").write_text(json.dumps(said))
    return sum(shape.numel() for shape in shapes.values())


def resident(which):
    """Return bytes of resident memory, now (VmRSS) or at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(which))


def main(folder):
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    parameters = write_base(folder / "base")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
    before = resident("VmRSS")
    with infinity.Init(nvme=str(folder), host_memory="256MiB", device="cpu", frozen=True):
        base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    loaded = infinity.stats(base)
    adapters = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, adapters)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-4)
    read = []
    for number in range(2):
        ids = models.batch(number)
        at = infinity.stats(model)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        engine_of_model(model).lane.drain()
        read.append(infinity.stats(model).since(at).checkpoint_read_nbytes)
    units = [one for one in engine_of_model(model).units if one.record.in_files is not None]
    said = {
        "parameters": parameters,
        "adapters": sum(one.numel() for one in model.parameters() if one.requires_grad),
        "packed": sum(one.record.packed_nbytes or one.record.field_nbytes("hi") for one in units),
        "largest": max(one.resident_nbytes for one in units),
        "loading": loaded.checkpoint_read_nbytes,
        "read": read,
        "written": sum(infinity.stats(model).written_nbytes.values()),
        "peak": resident("VmHWM") - before,
    }
    sys.stdout.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
