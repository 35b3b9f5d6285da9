"""Every key of DeepSpeed's configuration (0.19), and what becomes of it here. A table and its look-up; pure.

A key is written as its path: "zero_optimization.offload_param.device". A section of which nothing is
supported stands as a whole, in SECTIONS; so do parts of DeepSpeed that its own later versions have removed.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from enum import Enum
from typing import Any

from infinity.config.deepspeed_values import switched


class Verdict(Enum):
    """What becomes of a key."""

    HONOURED = "honoured"
    UNNECESSARY = "unnecessary here"
    OFF = "off"
    """Asks for something that is not supported, with the value that means no."""
    UNSUPPORTED = "not supported"


@dataclass(frozen=True, slots=True)
class Key:
    """One key: what it may hold and what becomes of it."""

    verdict: Verdict
    takes: str
    """A name in deepspeed_values.TYPES."""
    says: str
    """What it sets, why it is unnecessary, or what to use instead."""
    neutral: tuple[Any, ...] = ()
    """Values with which an unsupported key asks for nothing."""


_ZERO = "zero_optimization."
_PARAM, _OPTIMIZER = _ZERO + "offload_param.", _ZERO + "offload_optimizer."
_BUDGET = "host_memory divides itself; nothing to choose"
_FETCH = "what is fetched ahead and kept follows from the plan and the budget"
_REDUCE = "there are no buckets: shards are padded once, when they are laid out"
_PINNED = "pools are pinned where the device copies from them"

HONOURED = {
    "train_batch_size": ("count", "micro batch x accumulation x ranks"),
    "train_micro_batch_size_per_gpu": ("count", "batch size of the data loader"),
    "gradient_accumulation_steps": ("count", "backwards per step; sums are fp32"),
    "managed_gradient_accumulation": ("switch", "false: every step() is an update"),
    "gradient_clipping": ("number", "global norm, in fp32, inside the update; 0 for none"),
    "optimizer.type": ("text", "Adam, AdamW, SGD, Adagrad, Lion: infinity's of that name"),
    "optimizer.params.lr": ("number", "learning rate"),
    "optimizer.params.betas": ("betas", "of the moments"),
    "optimizer.params.eps": ("number", "of the update"),
    "optimizer.params.weight_decay": ("number", "decoupled; of Adam without adam_w_mode, SGD, Adagrad: L2"),
    "optimizer.params.adam_w_mode": ("switch", "false: infinity.Adam, whose decay is L2"),
    "optimizer.params.momentum": ("number", "of SGD"),
    "optimizer.params.dampening": ("number", "of SGD's momentum"),
    "optimizer.params.nesterov": ("switch", "of SGD's momentum"),
    "optimizer.params.lr_decay": ("number", "of Adagrad"),
    "scheduler.type": ("text", "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest"),
    "scheduler.params.*": ("anything", "of the schedule"),
    "bf16.enabled": ("switch", "the type that computes, beside exact fp32 masters"),
    "fp16.enabled": ("switch", "the type that computes, beside fp32 masters, with a scaled loss"),
    "fp16.loss_scale": ("number", "of the loss; 0: follows the gradients"),
    "fp16.initial_scale_power": ("size", "the loss scale begins with 2 to the power of this"),
    "fp16.loss_scale_window": ("count", "good steps until the loss scale doubles"),
    "fp16.hysteresis": ("count", "overflows until the loss scale halves"),
    "fp16.consecutive_hysteresis": ("switch", "a good step makes the hysteresis whole"),
    "fp16.min_loss_scale": ("number", "the least loss scale"),
    "fp16.auto_cast": ("switch", "inputs of engine(...) are cast to fp16"),
    "bf16.check_grad_overflow": ("switch", "a step whose gradients are not finite is left out"),
    "bf16.bf16_optimizer_states": ("switch", 'state_dtype="bf16"; masters stay exact'),
    _ZERO + "stage": ("size", "Config.stage: what ranks divide; 0: as 3"),
    _PARAM + "device": ("device", "nvme: an NVMe tier; else host memory"),
    _PARAM + "nvme_path": ("text", "Config.nvme"),
    _OPTIMIZER + "device": ("device", "nvme: an NVMe tier; else host memory"),
    _OPTIMIZER + "nvme_path": ("text", "Config.nvme"),
    _ZERO + "stage3_gather_16bit_weights_on_model_save": ("switch", "save_16bit_model writes"),
    _ZERO + "stage3_gather_fp16_weights_on_model_save": ("switch", "as ...gather_16bit_weights..."),
    _ZERO + "cpu_offload": ("switch", "as offload_optimizer.device: cpu"),
    _ZERO + "cpu_offload_param": ("switch", "as offload_param.device: cpu"),
    "checkpoint.tag_validation": ("text", "one process names the tag"),
    "dataloader_drop_last": ("switch", "of the data loader that initialize makes"),
    "steps_per_print": ("count", "steps between two lines in the log"),
    "wall_clock_breakdown": ("switch", "seconds of forward, backward and step, in the log"),
    "dump_state": ("switch", "this report, in the log"),
    "infinity.*": ("anything", "fields of infinity.Config, which DeepSpeed has no words for"),
}

UNNECESSARY = {
    **dict.fromkeys(
        [_ZERO + name for name in ("reduce_bucket_size", "allgather_bucket_size")], ("size", _REDUCE)
    ),
    **dict.fromkeys(
        [
            _ZERO + name
            for name in (
                "contiguous_gradients",
                "reduce_scatter",
                "allgather_partitions",
                "use_multi_rank_bucket_allreduce",
                "round_robin_gradients",
                "parameter_alignment",
                "stage3_use_all_reduce_for_fetch_params",
                "stage3_allgather_sequential",
            )
        ],
        ("switch", _REDUCE),
    ),
    **dict.fromkeys(
        [
            _ZERO + name
            for name in (
                "stage3_prefetch_bucket_size",
                "stage3_param_persistence_threshold",
                "stage3_model_persistence_threshold",
                "stage3_max_live_parameters",
                "stage3_max_reuse_distance",
                "stage3_module_granularity_threshold",
            )
        ],
        ("size", _FETCH),
    ),
    **dict.fromkeys(
        [_ZERO + "leaf_module." + name for name in ("classes", "names", "name_suffixes")],
        ("anything", "what a module uses is fetched when it is used, experts too"),
    ),
    **dict.fromkeys([_PARAM + "pin_memory", _OPTIMIZER + "pin_memory"], ("switch", _PINNED)),
    _ZERO + "cpu_offload_use_pin_memory": ("switch", _PINNED),
    _PARAM + "buffer_count": ("size", _BUDGET),
    _PARAM + "buffer_size": ("size", _BUDGET),
    _PARAM + "max_in_cpu": ("size", "what host_memory has left holds what saves the most traffic"),
    _OPTIMIZER + "buffer_count": ("size", _BUDGET),
    _OPTIMIZER + "pipeline_read": ("switch", "reads, updates and writes always overlap"),
    _OPTIMIZER + "pipeline_write": ("switch", "reads, updates and writes always overlap"),
    _OPTIMIZER + "fast_init": ("switch", "moments that are still zero are not written"),
    _OPTIMIZER + "ratio": ("number", "what host_memory has left holds what saves the most traffic"),
    _OPTIMIZER + "super_offload": ("switch", "updates always run while the model computes"),
    _OPTIMIZER + "cpuadam_cores_perc": ("number", "the kernels take the cores that torch leaves"),
    _ZERO + "overlap_comm": ("switch", "moving always overlaps with computing"),
    _ZERO + "sub_group_size": ("size", "updates stream in chunks"),
    _ZERO + "load_from_fp32_weights": ("switch", "masters are saved and loaded as they are"),
    _ZERO + "elastic_checkpoint": ("switch", "checkpoints hold whole tensors"),
    _ZERO + "ignore_unused_parameters": ("switch", "a parameter without a gradient is not updated"),
    _ZERO + "grad_hooks": ("switch", "gradients are taken as soon as they are there"),
    _ZERO + "legacy_stage1": ("switch", "there is one implementation"),
    _ZERO + "memory_efficient_linear": ("switch", "weights are not kept between forward and backward"),
    _ZERO + "pipeline_loading_checkpoint": ("switch", "loading is streamed"),
    _ZERO + "override_module_apply": ("switch", "module.apply works inside Init as it is"),
    _ZERO + "log_trace_cache_warnings": ("switch", "infinity.stats counts steps that ran otherwise"),
    _ZERO + "enable_sanity_checks": ("switch", "every completion and every record is checked"),
    _ZERO + "save_muon_momentum_buffer_in_memory": ("switch", "Muon is not supported"),
    **{
        "aio." + name: ("size", "measured when a disk is first used")
        for name in ("block_size", "queue_depth", "thread_count", "intra_op_parallelism")
    },
    "aio.single_submit": ("switch", "requests are submitted as the kernel takes them best"),
    "aio.overlap_events": ("switch", "submitting and completing always overlap"),
    "bf16.immediate_grad_update": ("switch", "gradients are taken as soon as they are there"),
    "optimizer.params.torch_adam": ("switch", "there is one Adam; it equals torch's arithmetic"),
    "optimizer.params.fused": ("switch", "the update is one pass"),
    "optimizer.params.foreach": ("switch", "the update is one pass"),
    "optimizer.params.max_grad_norm": ("number", "DeepSpeed leaves it out as well; gradient_clipping"),
    "optimizer.legacy_fusion": ("switch", "there is one AdamW"),
    "zero_allow_untested_optimizer": ("switch", "an optimizer is supported or it is not"),
    "zero_force_ds_cpu_optimizer": ("switch", "the update runs where the record is"),
    "communication_data_type": ("text", "gradients are summed in fp32"),
    "seq_parallel_communication_data_type": ("text", "gradients are summed in fp32"),
    "prescale_gradients": ("switch", "gradients are summed in fp32 and divided once"),
    "gradient_predivide_factor": ("number", "gradients are summed in fp32 and divided once"),
    "fp32_allreduce": ("switch", "gradients are summed in fp32"),
    "disable_allgather": ("switch", "shards are laid out for it"),
    "data_types.keep_in_fp32_modules": ("anything", "buffers stay as they are, masters are fp32"),
    "activation_checkpointing.synchronize_checkpoint_boundary": ("switch", "nothing to wait for"),
    "activation_checkpointing.profile": ("switch", "wall_clock_breakdown"),
    "checkpoint.use_node_local_storage": ("switch", "checkpoints go where save_checkpoint is told"),
    "checkpoint.parallel_write.pipeline_stage": ("switch", "there are no pipeline stages"),
    "checkpoint.checkpoint_serialization": ("switch", "safetensors; nothing is pickled"),
    "checkpoint.writer.*": ("anything", "writing is streamed"),
    "memory_breakdown": ("switch", "infinity.stats"),
    "disable_python_gc": ("switch", "no reference cycles are left by a step"),
    "vocabulary_size": ("size", "only a warning in DeepSpeed"),
    "log_level": ("text", 'logging.getLogger("infinity")'),
    "timers.throughput.*": ("anything", "wall_clock_breakdown, infinity.stats"),
    "timers.*": ("anything", "wall_clock_breakdown, infinity.stats"),
    "use_data_before_expert_parallelism": ("switch", "experts are not divided among ranks"),
    "data_parallel_group": ("anything", "the ranks of torch.distributed"),
    "global_rank": ("size", "the rank of torch.distributed"),
}

UNSUPPORTED: dict[str, tuple[str, tuple[Any, ...], str]] = {
    "fp16.fp16_master_weights_and_grads": ("switch", (False,), "masters stay fp32; leave it out"),
    "bf16.bf16_master_weights_and_grads": ("switch", (False,), "masters stay fp32; leave it out"),
    "data_types.grad_accum_dtype": ("text", ("fp32", "auto"), "sums are fp32; leave it out"),
    "torch_autocast.enabled": ("switch", (False,), "torch.autocast around the forward"),
    "torch_autocast.dtype": ("text", ("bfloat16", "bf16"), "torch.autocast around the forward"),
    "torch_autocast.lower_precision_safe_modules": ("anything", ([],), "torch.autocast around the forward"),
    "optimizer.params.bias_correction": ("switch", (True,), "always corrected; leave it out"),
    "optimizer.params.fp32_optimizer_states": ("switch", (True,), 'Config(state_dtype="bf16")'),
    "data_types.param_dtype": ("text", ("bf16", "bfloat16"), '"bf16": {"enabled": true}'),
    "data_types.buffer_dtype": ("text", (), "buffers stay as they are; leave it out"),
    "optimizer.params.amsgrad": ("switch", (False,), "leave it out"),
    "optimizer.params.maximize": ("switch", (False,), "negate the loss"),
    "optimizer.params.capturable": ("switch", (False,), "leave it out"),
    "optimizer.params.differentiable": ("switch", (False,), "leave it out"),
    **{
        "optimizer.params." + name: ("anything", (), "of an optimizer that is not there; AdamW")
        for name in (
            "comm_backend_name",
            "cuda_aware",
            "freeze_step",
            "var_freeze_step",
            "var_update_scaler",
            "local_step_scaler",
            "local_step_clipper",
            "max_coeff",
            "min_coeff",
            "coeff_beta",
            "factor_max",
            "factor_min",
            "factor_threshold",
            "muon_lr",
            "adam_lr",
            "ns_method",
        )
    },
    "aio.use_gds": ("switch", (False,), "records pass through host memory; leave it out"),
    "gradient_allreduce_op": ("text", ("mean",), "scale the loss instead"),
    "checkpoint.load_universal": ("switch", (False,), "any checkpoint loads on any number of ranks"),
    "data_types.gradient_dtype": ("text", (), "gradients have the type of the weights"),
    **{
        _ZERO + name: ("switch", (False,), "weights and gradients move in 16 bits; leave it out")
        for name in (
            "zero_quantized_weights",
            "zero_quantized_nontrainable_weights",
            "zero_quantized_gradients",
        )
    },
    _ZERO + "compute_grad_norm": ("switch", (True,), "gradient_clipping: 0 leaves the norm out"),
    _ZERO + "zero_hpz_partition_size": ("size", (0, 1), "there is one way to divide; leave it out"),
    _ZERO + "mics_shard_size": ("anything", (-1, 0), "DeepSpeed has removed it too"),
    _ZERO + "mics_hierarchical_params_gather": ("switch", (False,), "DeepSpeed has removed it too"),
    _ZERO + "zeropp_loco_param": ("anything", (), "DeepSpeed has removed it too"),
    "activation_checkpointing.partition_activations": (
        "switch",
        (False,),
        "Init(partition_activations=group)",
    ),
    "activation_checkpointing.cpu_checkpointing": ("switch", (False,), "torch.utils.checkpoint"),
    "activation_checkpointing.contiguous_memory_optimization": (
        "switch",
        (False,),
        "torch.utils.checkpoint",
    ),
    "activation_checkpointing.number_checkpoints": ("size", (), "torch.utils.checkpoint"),
    "sequence_parallel_size": ("count", (1,), "infinity.tiling cuts sequences on one rank"),
    "sparse_gradients": ("switch", (False,), "nn.Embedding(sparse=False)"),
    "graph_harvesting": ("switch", (False,), "leave it out"),
    "datastates_ckpt": ("anything", (False,), "save_checkpoint is streamed and atomic"),
}

_LOG = "log engine.get_lr(), the loss and infinity.stats(engine.module) where you want them"
_GONE = "DeepSpeed has removed it too; leave it out"
SECTIONS = {
    "tensorboard": _LOG,
    "wandb": _LOG,
    "csv_monitor": _LOG,
    "comet": _LOG,
    "monitor_config": _LOG,
    "comms_logger": "infinity.stats counts bytes",
    "flops_profiler": "torch.utils.flop_counter",
    "autotuning": "`infinity plan sweep` and `infinity bench step`",
    "hybrid_engine": "model.generate works as it is",
    "pipeline": "a model larger than the device needs no pipeline here",
    "tensor_parallel": "a layer larger than the device: Config(tile_above=...)",
    "expert_parallel": "experts that are not used are not fetched",
    "weight_quantization": "leave it out",
    "compile": "torch.compile cannot follow fetching and releasing; leave it out",
    "data_efficiency": "choose the data in the data loader",
    _ZERO + "zenflow": "updates overlap with computing, and are exact; leave it out",
    "compression_training": _GONE,
    "nebula": _GONE,
    "amp": '"bf16": {"enabled": true}',
    "quantize_training": _GONE,
    "eigenvalue": _GONE,
    "sparse_attention": _GONE,
    "elasticity": _GONE,
    "curriculum_learning": _GONE,
    "progressive_layer_drop": _GONE,
}
"""Sections of which nothing is supported; with "enabled": false, or empty, they ask for nothing."""

ALIASES = {"bfloat16": "bf16"}
"""Other names of sections."""

KEYS: dict[str, Key] = {
    **{path: Key(Verdict.HONOURED, takes, says) for path, (takes, says) in HONOURED.items()},
    **{path: Key(Verdict.UNNECESSARY, takes, says) for path, (takes, says) in UNNECESSARY.items()},
    **{
        path: Key(Verdict.UNSUPPORTED, takes, says, (None, *neutral))
        for path, (takes, neutral, says) in UNSUPPORTED.items()
    },
}
SWITCHES = {"compile": "deepcompile", "tensor_parallel": "autotp_size"}
SWITCHES.update(
    dict.fromkeys(
        (
            "tensorboard",
            "wandb",
            "csv_monitor",
            "comet",
            "comms_logger",
            "flops_profiler",
            "autotuning",
            "hybrid_engine",
            "data_efficiency",
            "expert_parallel",
        ),
        "enabled",
    )
)
"""The key that switches a section on; a section without one is on where it stands."""

_PARENTS = {
    ".".join(parts[:length])
    for path in [*KEYS, *SECTIONS]
    for parts in [path.split(".")]
    for length in range(1, len(parts))
}


def is_section(path: str) -> bool:
    """Whether keys of the table lie below this one."""
    return path in _PARENTS


def find(path: str) -> Key | None:
    """Return what becomes of a key; None for one that the table does not know."""
    if path in KEYS:
        return KEYS[path]
    parts = path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        key = KEYS.get(".".join([*parts[:length], "*"]))
        if key is not None:
            return key
    for length in range(len(parts), 0, -1):
        cure = SECTIONS.get(".".join(parts[:length]))
        if cure is not None:
            return Key(Verdict.UNSUPPORTED, "anything", cure, (None,))
    return None


def taken(path: str, value: Any) -> Any:
    """Return what a key's value means: a switch takes more than true and false."""
    key = find(path)
    return switched(value) if key is not None and key.takes == "switch" else value


def asks(section: str, value: Any) -> bool:
    """Whether a section of SECTIONS, as it stands, asks for something."""
    if not isinstance(value, dict) or not value:
        return bool(value)
    switch = SWITCHES.get(section)
    if switch is None:
        return switched(value.get("enabled", True)) is not False
    return bool(switched(value.get(switch)))


def alike(path: str) -> str | None:
    """Return the known key that a slip of the pen may have meant."""
    known = [*KEYS, *SECTIONS, *_PARENTS]
    near = difflib.get_close_matches(path, known, 1, 0.75)
    if not near:  # the right name in the wrong place
        near = [one for one in known if one.rsplit(".", 1)[-1] == path.rsplit(".", 1)[-1]]
    return near[0] if near else None
