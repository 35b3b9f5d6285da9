"""The packages of the product, in the order in which they stand upon each other."""

from pathlib import Path

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
    "sequences",
    "engine",
    "optim",
    "checkpoint",
    "huggingface",
    "deepspeed",
    "cli",
    "bench",
]
"""From the ground up. What each is for stands in its docstring."""


def product() -> list[Path]:
    """Return the product's Python files, each once: links to folders are followed."""
    folders = [PACKAGE, *(one for one in PACKAGE.iterdir() if one.is_dir())]
    return sorted({path.resolve() for folder in folders for path in folder.rglob("*.py")})
