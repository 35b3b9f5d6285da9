"""Every key of DeepSpeed's configuration (0.19), and what becomes of it here. A table and its look-up; pure.

A key is written as its path: "zero_optimization.offload_param.device". A section of which no key is honoured
has one entry in SECTIONS; so has a part of DeepSpeed that its own later versions have removed.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from enum import Enum
from typing import Any

from infinity.config.curriculum import BESIDE, LEARNING, LEGACY, METRICS, SAMPLING, SEQLEN
from infinity.config.data_routing import LTD, RATES, ROUTING, SCHEDULE, STEPS
from infinity.config.deepspeed_frozen import LOADED, NONTRAINABLE
from infinity.config.deepspeed_values import switched
from infinity.config.quantized import KEYS as QUANTIZED
from infinity.config.secondary import KEY as HPZ
from infinity.config.secondary import SAYS as HPZ_SAYS
from infinity.config.sparse_attention import LISTS, NUMBERS, SPARSE, TEXTS
from infinity.config.sparse_attention import SWITCHES as SPARSE_SWITCHES


class Verdict(Enum):
    """What becomes of a key."""

    HONOURED = "honoured"
    UNNECESSARY = "unnecessary here"
    OFF = "off"
    """An unsupported key, with the value that switches it off."""
    LEFT_OUT = "left out"
    """Not supported, but it only observes, and changes no number: a warning."""
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
    """Values that switch an unsupported key off."""


_ZERO = "zero_optimization."
_PARAM, _OPTIMIZER = _ZERO + "offload_param.", _ZERO + "offload_optimizer."
_BUDGET = "host_memory is divided automatically"
_PLACED = "what host_memory has left holds the fields that save the most traffic"
_FETCH = "the plan and the budget decide what is prefetched and kept"
_REDUCE = "shards are padded once, when they are laid out"
_SUMS = "Config(reduce_bucket=...); a number here, in elements, is an upper bound of it"
_GATHERS = "Config(gather_bucket=...); a number here, in elements, is an upper bound of it"
_PINNED = "buffers are pinned where the device copies from them"
_OVERLAP = "reads, updates and writes always overlap"
_SUMMED = "gradients are summed in fp32"
_STATS = "wall_clock_breakdown, infinity.stats"
_SAVED = "each saved input is stored by itself"
_MONITOR = "losses, rates and seconds are written there"
_PLANNED = "a model of transformers has a plan of its own, model.tp_plan"
_ON_USE = "parameters are fetched when they are used, experts' too"
_LOADED = "the data loader decides"
_CURRICULUM = "infinity.SequenceWarmup around the data loader that initialize makes"
_ROUTED = "infinity.RandomLTD of the model"
_SPARSE = "infinity.SparseAttention of the model"
_FOUND = "transformers' interface of experts tells which modules have them"
_MEASURED = "measured when a disk is first used"
_FROZEN = "frozen weights in fewer bits, made once: Config(frozen_dtype=...)"


def _all(sections: str, names: str, takes: str, says: str) -> dict[str, tuple[str, str]]:
    """Return the same entry for each of several names in each of several sections."""
    return {section + name: (takes, says) for section in sections.split() for name in names.split()}


HONOURED = {
    "aio.use_gds": ("switch", 'Config(aio="gds"): from NVMe to the GPU, by kvikio, with verify="off"'),
    "train_batch_size": ("count", "micro batch x accumulation x ranks"),
    "train_micro_batch_size_per_gpu": ("count", "batch size of the data loader"),
    "gradient_accumulation_steps": ("count", "backwards per step; sums are fp32"),
    "managed_gradient_accumulation": ("switch", "false: every step() is an update"),
    "gradient_clipping": ("number", "global norm, in fp32, inside the update; 0 for none"),
    "optimizer.type": ("text", "Adam, AdamW, SGD, Adagrad, Lion, Muon, OneBitAdam: infinity's of that name"),
    "optimizer.params.lr": ("number", "learning rate"),
    "optimizer.params.betas": ("betas", "of the moments"),
    "optimizer.params.eps": ("number", "of the update"),
    "optimizer.params.weight_decay": ("number", "decoupled; of Adam without adam_w_mode, SGD, Adagrad: L2"),
    "optimizer.params.adam_w_mode": ("switch", "false: infinity.Adam, whose decay is L2"),
    "optimizer.params.momentum": ("number", "of SGD, Muon"),
    "optimizer.params.muon_lr": ("number", "of Muon's matrices, before lr"),
    "optimizer.params.adam_lr": ("number", "of what AdamW steps beside Muon, before lr"),
    "optimizer.params.dampening": ("number", "of SGD's momentum"),
    "optimizer.params.nesterov": ("switch", "of SGD's momentum"),
    "optimizer.params.lr_decay": ("number", "of Adagrad"),
    "optimizer.params.freeze_step": ("count", "steps of OneBitAdam before its variance is frozen"),
    "scheduler.type": ("text", "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest"),
    "scheduler.params.*": ("anything", "of the schedule"),
    "bf16.enabled": ("switch", "the compute type, beside exact fp32 masters"),
    "fp16.enabled": ("switch", "the compute type, beside fp32 masters, with a scaled loss"),
    "fp16.loss_scale": ("number", "of the loss; 0: adjusted after overflows"),
    "fp16.initial_scale_power": ("size", "the first loss scale is 2 to the power of this"),
    "fp16.loss_scale_window": ("count", "good steps until the loss scale doubles"),
    "fp16.hysteresis": ("count", "overflows until the loss scale halves"),
    "fp16.consecutive_hysteresis": ("switch", "a good step resets the hysteresis"),
    "fp16.min_loss_scale": ("number", "the least loss scale"),
    "fp16.auto_cast": ("switch", "inputs of engine(...) are cast to fp16"),
    "bf16.check_grad_overflow": ("switch", "a step whose gradients are not finite is skipped"),
    "bf16.bf16_optimizer_states": ("switch", 'state_dtype="bf16"; masters stay exact'),
    **{path: ("switch", says) for path, says in QUANTIZED.items()},
    HPZ: ("size", HPZ_SAYS),
    _ZERO + "stage": ("size", "Config.stage: what is partitioned among the ranks; 0: as 3"),
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
    "activation_checkpointing.cpu_checkpointing": ("switch", 'Config(offload_activations="host")'),
    **_all("tensorboard. csv_monitor. wandb.", "enabled", "switch", _MONITOR),
    **_all("tensorboard. csv_monitor.", "output_path job_name", "text", _MONITOR),
    **_all("wandb.", "group team project", "text", _MONITOR),
    "steps_per_print": ("count", "steps between two lines in the log"),
    "wall_clock_breakdown": ("switch", "seconds of forward, backward and step, in the log"),
    "dump_state": ("switch", "this report, in the log"),
    "sequence_parallel_size": ("count", "Config.sequence_parallel: ranks that share each sequence"),
    "data_parallel_size": ("count", "compared with the ranks"),
    "tensor_parallel.autotp_size": ("size", "ranks that divide each layer, by the model's own tp_plan"),
    "expert_parallel.enabled": ("switch", "whether expert_parallel.autoep_size holds"),
    "expert_parallel.autoep_size": ("count", "Config.expert_parallel: ranks that divide the experts"),
    "data_efficiency.enabled": ("switch", _CURRICULUM),
    SAMPLING + "enabled": ("switch", _CURRICULUM),
    LEARNING + "enabled": ("switch", _CURRICULUM),
    LEGACY + "enabled": ("switch", _CURRICULUM),
    **_all(f"{SEQLEN} {LEGACY}", "min_difficulty max_difficulty", "count", _CURRICULUM),
    **_all(f"{SEQLEN} {LEGACY}", "schedule_type", "text", _CURRICULUM),
    **_all(f"{SEQLEN} {LEGACY}", "schedule_config.*", "anything", _CURRICULUM),
    ROUTING + "enabled": ("switch", _ROUTED),
    LTD + "enabled": ("switch", _ROUTED),
    LTD + "random_ltd_layer_id": ("anything", "numbers of the layers that leave tokens out"),
    **_all(LTD, "total_layer_num random_ltd_layer_num", "count", "compared with the layers that are there"),
    **_all(SCHEDULE, "min_value max_value", "count", "tokens of a row that are kept, first and at the end"),
    SCHEDULE + "schedule_type": ("text", "fixed_linear"),
    **_all(STEPS, "require_steps seq_per_step", "count", _ROUTED),
    LTD + "model_mask_name": ("text", "the layers' argument that is a mask; its kept tokens are taken"),
    LTD + "hidden_state_order": ("text", "batch_seq_dim or seq_batch_dim"),
    **_all(SPARSE, f"block {NUMBERS}", "size", _SPARSE),
    **_all(SPARSE, LISTS, "anything", _SPARSE),
    **_all(SPARSE, SPARSE_SWITCHES, "switch", _SPARSE),
    **_all(SPARSE, TEXTS, "text", _SPARSE),
    NONTRAINABLE: ("switch", 'frozen_dtype="int8", of what is frozen when Init ends'),
    LOADED + "num_bits": ("count", '8: frozen_dtype="int8", 4: "nf4"; what is loaded is frozen'),
    LOADED + "group_size": ("size", _FROZEN),
    LOADED + "group_dim": ("size", _FROZEN),
    LOADED + "symmetric": ("switch", _FROZEN),
    "infinity.*": ("anything", "fields of infinity.Config that DeepSpeed has no key for"),
}

UNNECESSARY = {
    **_all("data_efficiency.", "seed", "size", _LOADED),
    **_all(SAMPLING, "num_epochs num_workers", "size", _LOADED),
    **_all(SAMPLING, "pin_memory", "switch", _LOADED),
    LTD + "model_type": ("text", "masks of decoders and of encoders are cut alike"),
    **_all(LTD, "global_batch_size micro_batch_size", "size", "as the batches are"),
    **_all(RATES, "total_layer_tokens warmup_layer_tokens warmup_type", "anything", "its section is off"),
    LEARNING + "data_cluster_path": ("text", "rows are cut to the length of the step; nothing is indexed"),
    _ZERO + "reduce_bucket_size": ("size", _SUMS),
    **_all(_ZERO, "allgather_bucket_size stage3_prefetch_bucket_size", "size", _GATHERS),
    **_all(
        _ZERO,
        "contiguous_gradients reduce_scatter allgather_partitions use_multi_rank_bucket_allreduce "
        "round_robin_gradients parameter_alignment stage3_use_all_reduce_for_fetch_params "
        "stage3_allgather_sequential",
        "switch",
        _REDUCE,
    ),
    **_all(
        _ZERO,
        "stage3_param_persistence_threshold stage3_model_persistence_threshold "
        "stage3_max_live_parameters stage3_max_reuse_distance stage3_module_granularity_threshold",
        "size",
        _FETCH,
    ),
    **_all(_ZERO + "leaf_module.", "classes names name_suffixes", "anything", _ON_USE),
    **_all(f"{_PARAM} {_OPTIMIZER}", "pin_memory", "switch", _PINNED),
    _ZERO + "cpu_offload_use_pin_memory": ("switch", _PINNED),
    **_all(_PARAM, "buffer_count buffer_size", "size", _BUDGET),
    _PARAM + "max_in_cpu": ("size", _PLACED),
    _OPTIMIZER + "buffer_count": ("size", _BUDGET),
    **_all(_OPTIMIZER, "pipeline_read pipeline_write", "switch", _OVERLAP),
    _OPTIMIZER + "fast_init": ("switch", "moments that are still zero are not written"),
    _OPTIMIZER + "ratio": ("share", _PLACED),
    _OPTIMIZER + "super_offload": ("switch", "updates always run while the model computes"),
    _OPTIMIZER + "cpuadam_cores_perc": ("number", "the kernels use the cores that torch leaves idle"),
    _ZERO + "overlap_comm": ("switch", "transfers always overlap with computing"),
    _ZERO + "sub_group_size": ("size", "updates stream in chunks"),
    _ZERO + "load_from_fp32_weights": ("switch", "masters are saved and loaded as they are"),
    _ZERO + "elastic_checkpoint": ("switch", "checkpoints hold whole tensors"),
    _ZERO + "ignore_unused_parameters": ("switch", "a parameter without a gradient is not updated"),
    _ZERO + "grad_hooks": ("switch", "each gradient is stored as soon as it is complete"),
    _ZERO + "legacy_stage1": ("switch", "there is one implementation"),
    _ZERO + "memory_efficient_linear": ("switch", "weights are not kept between forward and backward"),
    _ZERO + "pipeline_loading_checkpoint": ("switch", "loading is streamed"),
    _ZERO + "override_module_apply": ("switch", "module.apply works inside Init as it is"),
    _ZERO + "log_trace_cache_warnings": ("switch", "infinity.stats counts divergences from the plan"),
    _ZERO + "enable_sanity_checks": ("switch", "every completion and every record is checked"),
    _ZERO + "save_muon_momentum_buffer_in_memory": ("switch", _PLACED),
    "optimizer.params.ns_method": ("text", "Newton-Schulz in the operations of torch.optim.Muon"),
    **_all("aio.", "block_size queue_depth thread_count intra_op_parallelism", "size", _MEASURED),
    "aio.single_submit": ("switch", "requests are submitted as the kernel takes them best"),
    "aio.overlap_events": ("switch", "submitting and completing always overlap"),
    "bf16.immediate_grad_update": ("switch", "each gradient is stored as soon as it is complete"),
    "optimizer.params.torch_adam": ("switch", "there is one Adam; it equals torch's arithmetic"),
    "optimizer.params.fused": ("switch", "the update is one pass"),
    "optimizer.params.foreach": ("switch", "the update is one pass"),
    "optimizer.params.max_grad_norm": ("number", "DeepSpeed leaves it out as well; gradient_clipping"),
    "optimizer.params.comm_backend_name": ("text", "ranks exchange momenta as everything else"),
    "optimizer.params.cuda_aware": ("switch", "ranks exchange momenta as everything else"),
    "optimizer.legacy_fusion": ("switch", "there is one AdamW"),
    "zero_allow_untested_optimizer": ("switch", "an optimizer is either supported or refused"),
    "zero_force_ds_cpu_optimizer": ("switch", "the update runs on the CPU"),
    "communication_data_type": ("text", _SUMMED),
    "seq_parallel_communication_data_type": ("text", _SUMMED),
    "prescale_gradients": ("switch", "gradients are summed in fp32 and divided once"),
    "gradient_predivide_factor": ("number", "gradients are summed in fp32 and divided once"),
    "fp32_allreduce": ("switch", _SUMMED),
    "disable_allgather": ("switch", _REDUCE),
    "data_types.keep_in_fp32_modules": ("anything", "buffers stay as they are, masters are fp32"),
    "activation_checkpointing.partition_activations": (
        "switch",
        "ranks that divide layers keep parts by themselves; for others: Init(partition_activations=group)",
    ),
    "activation_checkpointing.contiguous_memory_optimization": ("switch", _SAVED),
    "activation_checkpointing.number_checkpoints": ("size", _SAVED),
    "activation_checkpointing.synchronize_checkpoint_boundary": ("switch", _SAVED),
    "activation_checkpointing.profile": ("switch", "wall_clock_breakdown"),
    "checkpoint.use_node_local_storage": ("switch", "checkpoints go where save_checkpoint is told"),
    "checkpoint.parallel_write.pipeline_stage": ("switch", "every stage saves to a folder of its own"),
    "checkpoint.checkpoint_serialization": ("switch", "safetensors; nothing is pickled"),
    "checkpoint.writer.*": ("anything", "writing is streamed"),
    "memory_breakdown": ("switch", "infinity.stats"),
    "disable_python_gc": ("switch", "a step leaves no reference cycles"),
    "vocabulary_size": ("size", "only a warning in DeepSpeed"),
    "log_level": ("text", 'logging.getLogger("infinity")'),
    "timers.*": ("anything", _STATS),
    "use_data_before_expert_parallelism": ("switch", "ranks that are neighbours divide experts"),
    **_all(
        "expert_parallel.",
        "expert_pattern expert_w1 expert_w2 expert_w3 has_shared_experts moe_layer_pattern num_experts_attr "
        "preset_model router_pattern top_k_attr",
        "anything",
        _FOUND,
    ),
    "data_parallel_group": (
        "anything",
        "the ranks of torch.distributed; or zero.Init(data_parallel_group=...)",
    ),
    "tensor_parallel.preset_model": ("text", _PLANNED),
    "tensor_parallel.tp_overlap_comm": ("switch", "torch's DTensors decide"),
    "tensor_parallel.dtype": ("anything", "bf16 and fp16 say in which type the model computes"),
    "tensor_parallel.keep_module_on_host": ("switch", "what a rank has is always offloaded"),
    "tensor_parallel.tp.*": ("anything", _PLANNED),
    "global_rank": ("size", "the rank of torch.distributed"),
}

_OTHER_OPTIMIZERS = """
var_freeze_step var_update_scaler local_step_scaler
local_step_clipper max_coeff min_coeff coeff_beta factor_max factor_min factor_threshold
"""
UNSUPPORTED: dict[str, tuple[str, tuple[Any, ...], str]] = {
    "fp16.fp16_master_weights_and_grads": ("switch", (False,), "masters stay fp32; leave it out"),
    "bf16.bf16_master_weights_and_grads": ("switch", (False,), "masters stay fp32; leave it out"),
    "data_types.grad_accum_dtype": ("text", ("fp32", "auto"), "sums are fp32; leave it out"),
    "torch_autocast.enabled": ("switch", (False,), "torch.autocast around the forward"),
    "torch_autocast.dtype": ("text", ("bfloat16", "bf16"), "torch.autocast around the forward"),
    "torch_autocast.lower_precision_safe_modules": ("anything", ([],), "torch.autocast around the forward"),
    "optimizer.params.per_head_muon": ("switch", (False,), "matrices are orthogonalized whole; leave it out"),
    "optimizer.params.bias_correction": ("switch", (True,), "always corrected; leave it out"),
    "optimizer.params.fp32_optimizer_states": ("switch", (True,), 'Config(state_dtype="bf16")'),
    "data_types.param_dtype": ("text", ("bf16", "bfloat16"), '"bf16": {"enabled": true}'),
    "data_types.buffer_dtype": ("text", (), "buffers stay as they are; leave it out"),
    "optimizer.params.amsgrad": ("switch", (False,), "leave it out"),
    "optimizer.params.maximize": ("switch", (False,), "negate the loss"),
    "optimizer.params.capturable": ("switch", (False,), "leave it out"),
    "optimizer.params.differentiable": ("switch", (False,), "leave it out"),
    **{
        "optimizer.params." + name: ("anything", (), "of an optimizer that is not supported; AdamW")
        for name in _OTHER_OPTIMIZERS.split()
    },
    **{
        f"tensor_parallel.{name}": ("anything", (), "model.tp_plan = {...} before zero.Init ends")
        for name in ("partition_config", "partition_config.*", "injection_policy_tuple")
    },
    "tensor_parallel.replace_with_kernel_inject": ("switch", (False,), "leave it out"),
    "tensor_parallel.kernel_inject": ("switch", (False,), "leave it out"),
    "gradient_allreduce_op": ("text", ("mean",), "scale the loss instead"),
    "checkpoint.load_universal": ("switch", (False,), "any checkpoint loads on any number of ranks"),
    "data_types.gradient_dtype": ("text", (), "gradients have the type of the weights"),
    **{
        f"weight_quantization.{name}": ("anything", (), f"{LOADED}num_bits quantises frozen weights")
        for name in ("post_init_quant", "post_init_quantization", "enabled", "num_bits", "q_type", "q_groups")
    },
    _ZERO + "compute_grad_norm": ("switch", (True,), "gradient_clipping: 0 leaves the norm out"),
    _ZERO + "mics_shard_size": ("anything", (-1, 0), "DeepSpeed has removed it too"),
    _ZERO + "mics_hierarchical_params_gather": ("switch", (False,), "DeepSpeed has removed it too"),
    _ZERO + "zeropp_loco_param": ("anything", (), "DeepSpeed has removed it too"),
    RATES + "enabled": ("switch", (False,), "DeepSpeed has not made it either; a scheduler of your own"),
    METRICS + "*": ("anything", (), "batches can be chosen by length alone: seqlen"),
    SEQLEN + "difficulty_type": ("text", ("value",), "lengths are tokens; leave it out"),
    **{
        SEQLEN + name: ("anything", (), "rows are cut to the length, not chosen by an index; leave it out")
        for name in ("index_to_sample_path", "index_to_metric_path")
    },
    SEQLEN + "clustering_type": ("text", ("single_cluster",), "rows are cut, not clustered; leave it out"),
    LEGACY + "curriculum_type": ("text", ("seqlen",), "batches can be chosen by length alone: seqlen"),
    "sparse_gradients": ("switch", (False,), "nn.Embedding(sparse=False)"),
    "graph_harvesting": ("switch", (False,), "leave it out"),
    "datastates_ckpt": ("anything", (False,), "save_checkpoint is streamed and atomic"),
}

_LOG = (
    "tensorboard, wandb and csv_monitor are written; or log engine.get_lr() and the loss where you want them"
)
_GONE = "DeepSpeed has removed it, too; instead: "
_PACKS = '"infinity": {"frozen_dtype": "nf4"}, or "int8", packs a frozen base, beneath adapters that train'
OBSERVING = {
    "comet": _LOG,
    "monitor_config": _LOG,
    "trackio": _LOG,
    "comms_logger": "infinity.stats counts bytes",
    "flops_profiler": "torch.utils.flop_counter counts operations",
}
"""Sections that only observe: they are left out with a warning."""

REFUSED = {
    "autotuning": "`infinity plan sweep` and `infinity bench step`",
    "hybrid_engine": "model.generate works as it is",
    "pipeline": "stages are torch.distributed.pipelining's, beside Init(pipeline_group=...): docs/ranks.md, "
    "examples/mesh.py",
    "compile": "torch.compile cannot follow fetching and releasing; leave it out",
    SAMPLING + "dynamic_batching": "choose batches in the data loader",
    _ZERO + "zenflow": "updates overlap with computing, and are exact; leave it out",
    "compression_training": _GONE + _PACKS,
    "nebula": _GONE + "a durable run commits each step as it is written: docs/durable.md",
    "amp": '"bf16": {"enabled": true}',
    "quantize_training": _GONE + _PACKS,
    "eigenvalue": "of quantize_training, and gone with it; leave it out",
    "elasticity": _GONE + "torchrun restarts ranks, and a checkpoint loads on any number of them",
    "progressive_layer_drop": _GONE + "data_efficiency.data_routing.random_ltd leaves tokens of layers out",
}
"""Unsupported sections."""

SECTIONS = {
    **{path: Key(Verdict.LEFT_OUT, "anything", says, (None,)) for path, says in OBSERVING.items()},
    **{path: Key(Verdict.UNSUPPORTED, "anything", says, (None,)) for path, says in REFUSED.items()},
}
"""Sections of which no key is honoured; with "enabled": false, or empty, they are off."""

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
SWITCHES = {
    "compile": "deepcompile",
    **dict.fromkeys(("autotuning", "hybrid_engine", *BESIDE), "enabled"),
    **dict.fromkeys(("comet", "trackio", "comms_logger", "flops_profiler"), "enabled"),
}
"""The key that switches a section on; a section without one is on where it is present."""

_PARENTS = {
    ".".join(parts[:length])
    for path in [*KEYS, *SECTIONS]
    for parts in [path.split(".")]
    for length in range(1, len(parts))
}


def is_section(path: str) -> bool:
    """Whether the table has keys below this one."""
    return path in _PARENTS


def find(path: str) -> Key | None:
    """Return the entry of a key; None for an unknown one."""
    if path in KEYS:
        return KEYS[path]
    parts = path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        key = KEYS.get(".".join([*parts[:length], "*"]))
        if key is not None:
            return key
    for length in range(len(parts), 0, -1):
        if (section := ".".join(parts[:length])) in SECTIONS:
            return SECTIONS[section]
    return None


def taken(path: str, value: Any) -> Any:
    """Return a key's value, with a switch as a bool: DeepSpeed accepts more than true and false."""
    key = find(path)
    return switched(value) if key is not None and key.takes == "switch" else value


def asks(section: str, value: Any) -> bool:
    """Whether a section of SECTIONS is switched on."""
    if not isinstance(value, dict) or not value:
        return bool(value)
    switch = SWITCHES.get(section)
    if switch is None:
        return switched(value.get("enabled", True)) is not False
    return bool(switched(value.get(switch)))


def alike(path: str) -> str | None:
    """Return the known key that a misspelt one may mean; None if none is similar."""
    known = [*KEYS, *SECTIONS, *_PARENTS]
    near = difflib.get_close_matches(path, known, 1, 0.75)
    if not near:  # the right name in the wrong place
        near = [one for one in known if one.rsplit(".", 1)[-1] == path.rsplit(".", 1)[-1]]
    return near[0] if near else None
