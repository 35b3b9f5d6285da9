"""DeepSpeed's names that infinity.deepspeed does not have, and what to use instead. A table; pure."""

from __future__ import annotations

_REPORT = "print(engine.settings.report): what became of every key of the configuration"
_GROUPS = "of the mpu or DeviceMesh that you gave, or of torch.distributed"
COMPILE = "torch.compile cannot follow fetching and releasing; leave it out"
_GONE = "off or not supported, see print(engine.settings.report); leave it out"
_REDUCING = "gradients are summed when they are complete, in fp32; engine.no_sync() postpones that"

_SETTINGS = """
aio_config amp_enabled amp_params bf16_master_weights_and_gradients bf16_optimizer_states
checkpoint_serialization_enabled checkpoint_tag_validation_enabled checkpoint_tag_validation_fail
checkpoint_writer_enabled communication_data_type cpuadam_cores_perc dataloader_drop_last dump_state
dynamic_loss_scale_args fp16_auto_cast fp16_master_weights_and_gradients get_data_types graph_harvesting
gradient_predivide_factor initial_dynamic_scale is_sanity_checks_enabled load_universal_checkpoint
log_level memory_breakdown mics_shard_size optimizer_legacy_fusion optimizer_name optimizer_params
postscale_gradients scheduler_name scheduler_params sparse_gradients_enabled steps_per_print super_offload
random_ltd_config random_ltd_enabled
swap_tensor_config tensor_parallel_config torch_autocast_dtype torch_autocast_enabled
torch_autocast_lower_precision_safe_modules use_node_local_storage zenflow_config
zero_allgather_bucket_size zero_allgather_partitions zero_allgather_sequential
zero_allow_untested_optimizer zero_contiguous_gradients zero_cpu_offload zero_elastic_checkpoint
zero_force_ds_cpu_optimizer zero_gather_16bit_weights_on_model_save zero_grad_hooks
zero_hpz_partition_size zero_ignore_unused_parameters zero_legacy_stage1 zero_load_from_fp32_weights
zero_log_trace_cache_warnings zero_max_live_parameters zero_max_reuse_distance
zero_model_persistence_threshold zero_module_granularity_threshold zero_multi_rank_bucket_allreduce
zero_nvme_offload_optimizer zero_offload_optimizer zero_offload_param zero_overlap_comm
zero_param_persistence_threshold zero_partial_offload zero_prefetch_bucket_size zero_quantized_gradients
zero_quantized_nontrainable_weights zero_quantized_weights zero_reduce_bucket_size zero_reduce_scatter
zero_round_robin_gradients zero_save_muon_momentum_buffer_in_memory zero_sub_group_size
zero_use_cpu_optimizer zeropp_loco_param
"""
_FEATURES = """
autotuning_enabled autotuning_end_profile_step autotuning_metric autotuning_metric_path
autotuning_model_info_path autotuning_profile_model_info autotuning_start_profile_step
curriculum_enabled_legacy curriculum_learning_config curriculum_learning_enabled curriculum_params_legacy
data_efficiency_config data_efficiency_enabled data_sampling_config data_sampling_enabled
eigenvalue_enabled eigenvalue_gas_boundary_resolution eigenvalue_layer_name eigenvalue_layer_num
eigenvalue_max_iter eigenvalue_stability eigenvalue_tol eigenvalue_verbose elasticity_enabled
flops_profiler_detailed flops_profiler_enabled flops_profiler_module_depth flops_profiler_output_file
flops_profiler_profile_step flops_profiler_recompute_fwd_factor flops_profiler_top_modules get_pld_theta
is_elastic_model_parallel_supported pld_enabled pld_gamma pld_params pld_theta quantize_training
set_data_post_process_func
"""
_COMPILING = """
compile_autosp compile_autotp compile_zero_optimization_stage get_autosp_backend get_autotp_backend
get_compile_time get_deepcompile_backend get_deepspeed_compile_backend is_compiled is_deepcompile_active
is_deepcompile_enabled register_compile_pass uses_parallelization_pass_only
"""
_SUMMING = """
all_gather_scalar allreduce_and_copy allreduce_bucket allreduce_no_retain buffered_allreduce_fallback
coalesce_grad_reduction sparse_all_gather sparse_allreduce sparse_allreduce_bucket
sparse_allreduce_no_retain
"""
_PARALLEL = """
get_model_parallel_rank get_sequence_parallel_group get_tensor_parallel_rank
is_first_weights_partition_group
"""

ENGINE: dict[str, str] = {
    **dict.fromkeys(_SETTINGS.split(), _REPORT),
    **dict.fromkeys(_FEATURES.split(), _GONE),
    **dict.fromkeys(_COMPILING.split(), COMPILE),
    **dict.fromkeys(_SUMMING.split(), _REDUCING),
    **dict.fromkeys(_PARALLEL.split(), _GROUPS),
    "clip_fp32_gradients": "step() clips, as gradient_clipping says",
    "deepspeed_io": "initialize(training_data=...), or a torch DataLoader with a DistributedSampler",
    "get_wall_clock_timers": '"wall_clock_breakdown": true logs seconds; infinity.stats(engine.module)',
    "is_iterable_style_dataset": "isinstance(data, torch.utils.data.IterableDataset)",
    "is_map_style_dataset": "hasattr(data, '__getitem__')",
    "load_moe_state_dict": "engine.load_checkpoint loads experts, too",
    "load_module_state_dict": "engine.module.load_state_dict(state_dict)",
    "random_ltd_initialize": "initialize does it, as the configuration says; see engine.random_ltd",
    "print_forward_breakdown": '"wall_clock_breakdown": true logs seconds; infinity.stats(engine.module)',
}
"""Public names of DeepSpeedEngine (0.19)."""

_HIDDEN = """
utils.fragment_address utils.get_full_hp_grad utils.get_full_hp_param utils.get_hp_fragment_mapping
utils.lazy_init_hp_params_optimizer_state utils.link_hp_params utils.map_to_flat_opt_states
utils.set_full_hp_grad utils.set_full_hp_param utils.tensor_fragment
"""
_LEAVES = """
utils.get_z3_leaf_modules utils.set_z3_leaf_modules_by_name utils.set_z3_leaf_modules_by_suffix
utils.z3_leaf_module utils.z3_leaf_parameter
"""
_CURES = {
    "infinity.deepspeed.launch.read(file)": "DeepSpeedConfig",
    "initialize(training_data=...), or a torch DataLoader": "DeepSpeedDataLoader",
    "model.generate works as it is": "DeepSpeedHybridEngine",
    "model.generate works as it is, on a model built in Init": """
        DeepSpeedInferenceConfig InferenceEngine default_inference_config init_inference
    """,
    "torch's and transformers' own layers": """
        DeepSpeedTransformerConfig DeepSpeedTransformerLayer module_inject replace_transformer_layer
        revert_transformer_layer
    """,
    "torch.distributed.pipelining, with Init(pipeline_group=...): docs/ranks.md, examples/mesh.py": """
        LayerSpec PipelineEngine PipelineModule pipe
    """,
    "zero.Init never holds the whole model while it is built": """
        OnDevice zero.DeepSpeedTensorOverride zero.DeepSpeedZeRoOffload zero.MiCS_Init utils.OnDevice
    """,
    '"scheduler" in the configuration': "add_tuning_arguments",
    "torch.utils.checkpoint, or model.activation_checkpointing_enable()": "checkpointing",
    "for a layer larger than the device: Config(tile_above=...)": """
        zero.TiledLinear zero.TiledLinearReturnBias
    """,
    '"tensor_parallel": {"autotp_size": N} in the configuration, of zero.Init too': """
        domino set_autotp_mode tp_model_init
    """,
    "transformers' experts work as they are": "moe",
    '"optimizer" in the configuration, or infinity.AdamW, Adam, SGD, Adagrad, Lion, Muon; '
    "infinity.SparseAttention, and torch's attention": "ops",
    "what scripts need of it is in infinity.deepspeed and infinity.deepspeed.zero": "runtime",
    '"optimizer" in the configuration': "set_optimizer_flags",
    "infinity.stats(model) shows where parameters are": "zero.ZeroParamStatus zero.ZeroParamType",
    "engine.module.generate works as it is": "zero.unwrap_model_for_generation",
    "sys._getframe": "utils.get_caller_func",
    "`infinity doctor` shows the machine; torchrun starts ranks": "utils.get_numactl_cmd",
    _GROUPS: "utils.groups",
    "torch.cuda.nvtx.range": "utils.instrument_w_nvtx",
    "utils.log_dist": "utils.log_dist_once",
    'logging.getLogger("infinity").setLevel(level)': "utils.set_log_level_from_string",
    "utils.safe_get_full_fp32_param and the like": _HIDDEN,
    "parameters are fetched when they are used; leave it out": _LEAVES,
}
"""What to use instead -> public names of the package."""

PACKAGE: dict[str, str] = {name: cure for cure, names in _CURES.items() for name in names.split()}


def missing(module: str, name: str) -> str:
    """Return the error text for a name that a module of infinity.deepspeed does not have."""
    path = name if module == "" else f"{module}.{name}"
    instead = PACKAGE.get(path)
    where = f"infinity.deepspeed{'.' if module else ''}{module}"
    return f"{where} has no {name!r}" + (f"; instead: {instead}" if instead else "")
