"""What `dev.py faults` and `dev.py soak` train beside fragile's own small model, each by a name.

Bits of all are repeatable, and what each says of a step is one number.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import transformers

import fragile
import infinity
import infinity.engine.engine
import models
from infinity.device.device import AcceleratorDevice
from streams import LateStreams

BOUND = 50.0
"""A norm that some steps exceed, and others do not."""


class _Llama(fragile.Run):
    """A causal language model of transformers."""

    def forward(self):
        ids = self.loader.next()
        return self.model(input_ids=ids, labels=ids).loss

    def state(self):
        found = {name: [one] for name, one in self.model.state_dict().items()}
        for number, one in self.optimizer.state_dict()["state"].items():
            found[str(number)] = [one["exp_avg"], one["exp_avg_sq"]]
        return found


class Experts(_Llama):
    """Stacks of experts, slice by slice: few tokens leave most of them unused in a step."""

    def build(self, _blocks):
        return models.of_experts("mixtral")


class InFiles(_Llama):
    """Weights that lie in a checkpoint's own files until they are trained, those of one layer for good."""

    base = None
    """Where the checkpoint is."""

    def build(self, _blocks):
        model = transformers.AutoModelForCausalLM.from_pretrained(base_of_files())
        model.model.layers[0].requires_grad_(requires_grad=False)
        return model

    def trained(self):
        return [one for one in self.model.parameters() if one.requires_grad]


def base_of_files():
    """Return the folder of a checkpoint, which is made when it is first asked for."""
    if InFiles.base is None:
        InFiles.base = tempfile.mkdtemp(prefix="infinity-base-")
        torch.manual_seed(1)
        models.MODELS["llama"]().to(torch.bfloat16).save_pretrained(InFiles.base)
    return InFiles.base


class Generating(_Llama):
    """A model that generates between its steps; the tokens count for what it says of a step."""

    def build(self, _blocks):
        return models.MODELS["llama"]()

    def step(self):
        loss = super().step()
        return loss + sum(self.generate(4))

    def generate(self, count):
        """Return so many new tokens."""
        self.model.eval()
        ids = torch.arange(6).view(1, 6) + self.done % 8
        told = self.model.generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=0)
        self.model.train()
        return told[0, 6:].tolist()


class OnDevice(fragile.Run):
    """Three tiers: an accelerator that is simulated holds some records."""

    def __init__(self, folder, **settings):
        device = AcceleratorDevice(torch.device("cpu"), LateStreams())
        real = infinity.engine.engine.open_device
        infinity.engine.engine.open_device = lambda *_: device
        try:
            super().__init__(folder, **settings)
        finally:
            infinity.engine.engine.open_device = real


KINDS = {
    "speculation": (fragile.Run, {"of_adamw": {"speculate": True, "max_norm": BOUND}, "update": "forward"}),
    "speculation by turns": (
        fragile.Run,
        {"of_adamw": {"speculate": "auto", "max_norm": BOUND}, "update": "forward"},
    ),
    "slices": (Experts, {"host_memory": "2MiB", "state_dtype": "fp32"}),
    "foreign files": (InFiles, {"host_memory": "2MiB", "state_dtype": "fp32"}),
    "three tiers": (OnDevice, {"host_memory": "4MiB", "state_dtype": "fp32"}),
    "generation": (Generating, {"host_memory": "2MiB", "state_dtype": "fp32"}),
    "updates by turns": (fragile.Run, {"update": "auto"}),
    "delayed updates": (
        fragile.Run,
        {
            "of_adamw": {"delayed_after": 1},
            "update": "delayed",
            "host_memory": "64MiB",
            "state_dtype": "fp32",
        },
    ),
    "masters in 24 bits": (fragile.Run, {"master_dtype": "fp24"}),
}
"""What each trains, and the settings that it has to have."""


def begin(folder, *, kind="", **settings):
    """Begin, or resume, a training of a kind; fragile's own without one."""
    if not kind:
        return fragile.Run(folder, **settings)
    run, own = KINDS[kind]
    return run(folder, **{**settings, **own})


def warm_up():
    """Import, and make, what all children share."""
    base_of_files()


def clean_up():
    """Remove the checkpoint, if there is one."""
    if InFiles.base is not None:
        for path in Path(InFiles.base).iterdir():
            path.unlink()
        Path(InFiles.base).rmdir()
        InFiles.base = None
