"""The settings of `infinity train`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

PASSED_ON = ("state_dtype", "master_dtype", "frozen_dtype", "device_memory", "tile_above", "units")
"""Settings that Config has by the same names, with the same defaults; it is given those that are others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """The settings of `infinity train`, as its options set them."""

    preset: str = "25m"
    text: str | None = None
    """A file or folder; None: the standard library's sources."""
    model: str | None = None
    """A folder of a causal language model, or its config.json; None: the preset."""
    tokenizer: str | None = None
    """A folder; None: the model's."""
    data: Sequence[str] | None = None
    """The model's files of text, JSON lines or parquet."""
    eval_data: Sequence[str] | None = None
    eval_every: int = 0
    """Steps from one evaluation to the next; 0 for one, after the last step."""
    lora: int = 0
    """The rank of adapters; 0 trains all weights."""
    lora_alpha: int | None = None
    """None: twice the rank."""
    lora_targets: Sequence[str] | None = None
    """Names of modules; None: all linear layers but the head."""
    nvme: Sequence[str] | None = None
    """Folders; None: the run's own."""
    in_host_memory: bool = False
    """No NVMe tier at all."""
    host_memory: str | None = None
    device: str = "cpu"
    device_memory: str | None = None
    """Of what is kept on an accelerator; see Config."""
    aio: str | None = None
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """The compute type; with fp16 the loss is scaled."""
    state_dtype: Literal["fp32", "bf16", "int8", "int4"] = "fp32"
    """The type in which moments are stored."""
    master_dtype: Literal["fp32", "fp24"] = "fp32"
    """The type of the masters; see Config."""
    frozen_dtype: Literal["int8", "nf4"] | None = None
    """The type in which the weights beneath adapters are kept; see Config."""
    tile_above: str | None = None
    """Of larger layers' weights, which are built in tiles; see Config."""
    units: Literal["auto", "module", "block"] = "module"
    """What is fetched together; see Config."""
    durable: int = 0
    """Steps from one commit to the next; 0 for none."""
    resume: bool = False
    """Continue the durable run in `nvme`, if there is one."""
    steps: int = 100
    batch: int = 1
    """Sequences in one micro-batch."""
    sequence: int = 256
    """Tokens in one sequence; of a preset, bytes of text."""
    checkpointing: bool = True
    offload_activations: str | None = None
    """Where the blocks' inputs are kept until the backward; see Config."""
    activation_memory: str | None = None
    """Of what blocks keep until the backward, instead of checkpointing; see Config."""
    accumulate: int = 1
    """Micro-batches per step; with `checkpointing` they share one fetch of the weights."""
    lr: float = 3e-4
    weight_decay: float = 0.1
    warmup: int = 10
    """Steps in which the learning rate rises."""
    max_norm: float | None = None
    update: Literal["auto", "forward", "backward"] = "auto"
    speculate: bool | None = None
    """Whether updates are made in the backward that the norm may still forbid; see AdamW."""
    seed: int = 0
    out: str | None = None
    log_every: int = 1
    save: str | None = None
    """A new folder for the trained weights, in Hugging Face's files."""
    tensorboard: str | None = None
    """A folder for event files."""
    wandb: str | None = None
    """A project."""
    timeline: str | None = None
    """A new file for a trace of the lanes."""
    report: str | None = None
    """A new file for a picture of the run."""
    plain: bool = False

    @property
    def updates_in(self) -> Literal["forward", "backward"]:
        """The phase of updates; "auto" is the backward unless gradients have to be kept."""
        if self.update == "auto":
            kept = self.speculate or self.max_norm is not None or self.accumulate > 1 or self.dtype == "fp16"
            return "forward" if kept else "backward"
        return self.update
