"""Every key that DeepSpeed documents, or its classes know, is classified. Trusted: the list in
deepspeed_keys.txt, taken from DeepSpeed's page; where DeepSpeed is installed, its own classes.
"""

import importlib
from typing import ClassVar

import pytest

from infinity import Config, ConfigError
from infinity.config.deepspeed_keys import KEYS, Verdict, alike, asks, find, is_section
from infinity.config.deepspeed_values import TYPES, switched
from places import SUPPORT

CLASSES = {
    "runtime.precision_config.DeepSpeedBF16Config": "bf16",
    "runtime.precision_config.DeepSpeedFP16Config": "fp16",
    "runtime.zero.config.DeepSpeedZeroConfig": "zero_optimization",
    "runtime.zero.offload_config.DeepSpeedZeroOffloadParamConfig": "zero_optimization.offload_param",
    "runtime.zero.offload_config.DeepSpeedZeroOffloadOptimizerConfig": "zero_optimization.offload_optimizer",
    "runtime.zero.leaf_module_config.DeepSpeedZeroLeafModuleConfig": "zero_optimization.leaf_module",
    "runtime.zenflow.zenflow_config.ZenFlowConfig": "zero_optimization.zenflow",
    "comm.config.CommsLoggerConfig": "comms_logger",
    "compile.config.CompileConfig": "compile",
    "inference.config.WeightQuantConfig": "weight_quantization",
    "monitor.config.TensorBoardConfig": "tensorboard",
    "monitor.config.WandbConfig": "wandb",
    "monitor.config.CometConfig": "comet",
    "monitor.config.CSVConfig": "csv_monitor",
    "runtime.config.HybridEngineConfig": "hybrid_engine",
    "runtime.tensor_parallel.config.TPTrainingConfig": "tensor_parallel",
    "utils.config.DeepSpeedThroughputTimerConfig": "timers.throughput",
}
"""DeepSpeed's pydantic classes of 0.19, and the section that each of them reads."""


def documented():
    """Return the paths of deepspeed_keys.txt."""
    lines = (SUPPORT / "deepspeed_keys.txt").read_text().splitlines()
    section, paths = "", []
    for line in lines:
        if line.startswith("#"):
            continue
        head, _, names = line.rpartition(":")
        section = head or section
        paths += [name if section == "-" else f"{section}.{name}" for name in names.split()]
    return paths


def test_every_documented_key_is_classified():
    paths = documented()
    assert len(paths) > 200
    assert [path for path in paths if find(path) is None] == []


def test_the_table_says_of_every_key_what_it_takes_and_why():
    assert [path for path, key in KEYS.items() if key.takes not in TYPES or not key.says] == []
    assert [
        path for path, key in KEYS.items() if key.verdict is Verdict.UNSUPPORTED and None not in key.neutral
    ] == []


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("gradient_acumulation_steps", "gradient_accumulation_steps"),
        ("zero_optimization.offload_param.nvme_pth", "zero_optimization.offload_param.nvme_path"),
        ("zero_optimization.nvme_path", "zero_optimization.offload_param.nvme_path"),
        ("offload_optimizer", "zero_optimization.offload_optimizer"),
        ("nothing like it", None),
    ],
)
def test_a_slip_of_the_pen_finds_what_was_meant(slip, meant):
    assert find(slip) is None
    assert alike(slip) == meant


@pytest.mark.parametrize(
    ("section", "value", "expected"),
    [
        ("comet", {"project": "x"}, False),
        ("comet", {"enabled": True}, True),
        ("comet", {"enabled": 0}, False),
        ("elasticity", {"enabled": "false"}, False),
        ("compile", {"deepcompile": 0}, False),
        ("compile", {"deepcompile": 1}, True),
        ("compile", {"deepcompile": False, "passes": []}, False),
        ("compile", {"deepcompile": True}, True),
        ("elasticity", {"enabled": False}, False),
        ("elasticity", {"max_gpus": 4}, True),
        ("pipeline", {}, False),
        ("nebula", True, True),
    ],
)
def test_a_section_asks_for_something_or_not(section, value, expected):
    assert asks(section, value) is expected


@pytest.mark.parametrize(
    ("value", "means"),
    [
        (1, True),
        (0, False),
        (1.0, True),
        ("True", True),
        ("off", False),
        ("auto", "auto"),
        (2, 2),
        (None, None),
    ],
)
def test_a_switch_takes_what_deepspeed_takes_for_a_bool(value, means):
    assert switched(value) is means


@pytest.mark.parametrize(
    ("section", "instead"),
    [
        ("compression_training", "frozen_dtype"),
        ("quantize_training", "frozen_dtype"),
        ("progressive_layer_drop", "data_efficiency.data_routing.random_ltd"),
        ("elasticity", "torchrun restarts ranks"),
        ("nebula", "durable"),
    ],
)
def test_a_section_that_deepspeed_has_removed_is_refused_with_what_replaces_it(section, instead):
    says = rf"{section}.*: not supported .*removed it, too; instead: .*{instead}"
    with pytest.raises(ConfigError, match=says):
        Config.from_deepspeed({section: {"enabled": True}})


class Asked(dict):
    """A configuration that notes which of its keys are looked for."""

    paths: ClassVar = set()

    def __init__(self, content=(), above=""):
        super().__init__(content)
        self.above = above

    def get(self, key, default=None):
        self.paths.add(self.above + key)
        return super().get(key, default)

    def __contains__(self, key):
        self.paths.add(self.above + key)
        return super().__contains__(key)

    def keys(self):
        return self


SECTIONS_READ = (
    "aio",
    "activation_checkpointing",
    "checkpoint",
    "data_types",
    "flops_profiler",
    "autotuning",
)


def test_every_key_that_deepspeed_itself_looks_for_is_classified():
    pytest.importorskip("deepspeed", reason="compared where DeepSpeed is installed")
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    paths = set()
    for name, section in CLASSES.items():
        module, _, kind = f"deepspeed.{name}".rpartition(".")
        fields = getattr(importlib.import_module(module), kind).model_fields
        paths |= {f"{section}.{field.alias or name}" for name, field in fields.items()}
    read = {name: Asked(above=f"{name}.") for name in SECTIONS_READ}
    DeepSpeedConfig(Asked({"train_batch_size": 1, **read}))
    paths |= Asked.paths
    known = {kind.rsplit(".", 1)[1] for kind in CLASSES} | {"DeepSpeedMonitorConfig"}
    others = {
        kind.__name__
        for kind in _below(DeepSpeedConfigModel)
        if ".inference." not in kind.__module__ and kind.__name__ not in known
    }
    assert others == {"TPConfig"}, "further classes of DeepSpeed: put them into CLASSES"
    assert {"aio.use_gds", "fp16.loss_scale", "zero_optimization.stage"} < paths
    assert sorted(path for path in paths - {"bfloat16"} if find(path) is None and not is_section(path)) == []


def _below(kind):
    for one in kind.__subclasses__():
        yield one
        yield from _below(one)
