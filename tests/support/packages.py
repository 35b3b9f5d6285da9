"""The packages of the product, in the order in which they stand upon each other."""

from places import ROOT

PACKAGE = ROOT / "infinity"

PACKAGES = [
    "",  # deprecation, errors, sizes, tensors, timeline: what anything may use
    "aio",
    "kernels",
    "tiling",
    "planning",
    "config",
    "reference",
    "ranks",
    "storage",
    "records",
    "device",
    "lane",
    "units",
    "gradients",
    "activations",
    "durable",
    "autograd",
    "engine",
    "optim",
    "checkpoint",
    "huggingface",
    "deepspeed",
    "cli",
    "bench",
]
"""From the ground up. What each is for stands in its docstring."""
