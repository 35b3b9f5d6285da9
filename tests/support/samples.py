"""A commit, DeepSpeed's JSON and a safetensors file, each as it should be: tests change one thing of it."""

import dataclasses

import torch

from infinity.durable.commit import Commit, FieldAt, PlainTensor, RecordAt
from infinity.storage.safetensors_file import TensorEntry, TensorWriter
from infinity.tensors import as_bytes, name_of_dtype

FIELDS = tuple(
    FieldAt(name, 8192, ([0, 8192], None), ((4096, 0), (8192, 1)), bytes(range(16))) for name in ("hi", "lo")
)
RECORD = RecordAt("layers.0", (("layers.0.weight", (3, 4)),), FIELDS)
COMMIT = Commit(
    run="00ff00ff00ff00ff",
    sequence=7,
    step=3,
    tile_numel=4096,
    state_dtype="fp32",
    paths=1,
    records=(RECORD, dataclasses.replace(RECORD, name="layers.1")),
    said={"rng": {"torch": "00"}, "tracked": {}},
    tensors={"plain.mean": PlainTensor("F32", (2,), bytes(8))},
)

BF16 = {"bf16": {"enabled": True}}

FINE_TUNE = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {
            "device": "nvme",
            "nvme_path": "/local_nvme",
            "pin_memory": True,
            "buffer_count": 4,
            "fast_init": False,
        },
        "offload_param": {
            "device": "nvme",
            "nvme_path": "/local_nvme",
            "pin_memory": True,
            "buffer_count": 5,
            "buffer_size": 1e8,
            "max_in_cpu": 1e9,
        },
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "aio": {
        "block_size": 262144,
        "queue_depth": 32,
        "thread_count": 1,
        "single_submit": False,
        "overlap_events": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
"""The ZeRO-Infinity file of the Hugging Face documentation."""

TENSORS = {
    "odd": torch.arange(5, dtype=torch.int8),
    "w": torch.randn(3, 4),
    "half": torch.randn(7).bfloat16(),
    "scalar": torch.tensor(3, dtype=torch.int64),
    "none": torch.empty(0, 3),
    "flags": torch.tensor([True, False, True]),
}


def entries(tensors):
    return [TensorEntry(name, name_of_dtype(one, name), tuple(one.shape)) for name, one in tensors.items()]


def written(path, tensors, piece=3):
    """Write tensors in small pieces, the last tensor first."""
    writer = TensorWriter(path, entries(tensors), {"format": "pt"})
    for name, tensor in reversed(tensors.items()):
        values = as_bytes(tensor)
        for at in range(0, len(values), piece):
            writer.write(name, at, values[at : at + piece])
    writer.check_whole()
    return path
