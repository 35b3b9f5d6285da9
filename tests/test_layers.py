"""Imports go one way. Trusted: the text of the files, read with ast; nothing is imported.

A module may import its own layer and those below it. A new module of `infinity` goes into the table.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "infinity"

LAYERS = [
    {
        "__main__",
        "bench",
        "cli",
        "doctor",
        "going_on",
        "picture",
        "presets",
        "recording",
        "report",
        "run_folder",
        "scaling",
        "text",
        "train",
    },
    {"deepspeed"},  # DeepSpeed's names, of all below
    {"__init__"},  # what users import: everything below
    {"deepspeed_checkpoint", "deepspeed_engine", "deepspeed_initialize", "trainer_callback"},
    {"trainer_ranks", "zero"},
    {  # what they are made of
        "accumulation",
        "adapters",
        "checkpoint",
        "checkpoint_writer",
        "construction",
        "deepspeed_answers",
        "deepspeed_backward",
        "elementwise",
        "entry",
        "export",
        "fragments",
        "gather",
        "imported",
        "init",
        "inventory",
        "joining",
        "optim",
        "optimizer_view",
        "optimizers",
        "overflow",
        "ownership",
        "resume",
        "snapshot",
        "stats",
        "tracking",
    },
    {"engine"},
    {"arrivals", "ending", "partition", "strangers"},
    {
        "deepspeed_launch",
        "deepspeed_schedules",
        "exchange",
        "hooks",
        "hub",
        "offloaded",
        "optimizer_state",
        "slices",
    },
    {"calls"},
    {"activation_parts", "executor", "gradient_values", "needs", "pins", "reduction", "tiers"},
    {"activations", "durable"},
    {"collectives", "gradient_store"},
    {"gradient", "keeping", "ranges"},
    {"unit"},
    {"activation_passes", "fetch"},
    {"updates"},
    {"passes", "recipes"},
    {"lanes"},
    {"blocks", "changes", "queueing"},
    {"packing"},
    {"record"},
    {"sums", "weights"},
    {
        "atomic",
        "buffers",
        "cuda",
        "demand",
        "device",
        "disk",
        "failure",
        "generations",
        "memory",
        "nvme",
        "sharedfolder",
        "paths",
        "runfolder",
        "store",
        "streams",
        "stripes",
        "taking_over",
        "tensorfile",
    },
    {"commits"},
    {
        "asked",
        "bound",
        "budget",
        "choice",
        "config",
        "cursor",
        "deepspeed_batches",
        "deepspeed_calls",
        "deepspeed_config",
        "deepspeed_keys",
        "deepspeed_optimizers",
        "deepspeed_schedule_keys",
        "deepspeed_values",
        "forecast",
        "manifest",
        "placement",
        "plan",
        "pretrained",
        "reference",
        "reference_steps",
        "released",
        "simulated",
    },
    {
        "advice",
        "attached",
        "frequency",
        "generators",
        "loss_scale",
        "machine_memory",
        "optimizer_options",
        "outline",
        "reference_state",
        "scripting",
        "shard",
        "tensors",
        "timeline",
        "trace",
        "tracked",
    },
    {"ranks", "waiting"},
    {"cores", "counts", "errors", "groups", "interrupted", "sizes", "zero_memory"},
]
# Packages that import nothing of ours, but for what stands below, and the lowest layer that may import them.
LEAVES = {"aio": "store", "kernels": "reference", "tiling": "calls"}
BELOW = {("tiling", "kernels")}
# Modules that decide and compute, and never touch torch or the machine: they run anywhere, in milliseconds.
PURE = {
    "bound",
    "choice",
    "commits",
    "config",
    "cursor",
    "deepspeed_batches",
    "deepspeed_calls",
    "deepspeed_config",
    "deepspeed_keys",
    "deepspeed_optimizers",
    "deepspeed_schedule_keys",
    "deepspeed_values",
    "demand",
    "errors",
    "forecast",
    "frequency",
    "loss_scale",
    "manifest",
    "outline",
    "placement",
    "plan",
    "shard",
    "simulated",
    "sizes",
    "trace",
    "zero_memory",
}
IMPURE = {"aio", "io", "kernels", "mmap", "os", "shutil", "socket", "subprocess", "tempfile", "torch"}

LEVEL = {module: level for level, layer in enumerate(LAYERS) for module in layer}


def files() -> list[tuple[str, Path]]:
    """Every Python file of the package, with the module or subpackage it belongs to."""
    here = [(path.stem, path) for path in PACKAGE.glob("*.py")]
    below = [
        (folder.name, path)
        for folder in PACKAGE.iterdir()
        if folder.is_dir()
        for path in folder.glob("**/*.py")
    ]
    return sorted(here + below)


def imported(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield (line, dotted name in parts) of all that a file imports, at its top or within a function.

    What stands under `if TYPE_CHECKING:` names types and imports nothing.
    """
    package = list(path.relative_to(ROOT).with_suffix("").parts[:-1])
    tree = ast.parse(path.read_text(), str(path))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = base + (node.module.split(".") if node.module else [])
            yield from ((node.lineno, [*origin, alias.name]) for alias in node.names)


def target(name: list[str], modules: set[str]) -> str | None:
    """Name the module of ours that an import reaches, if any: `infinity` itself is `__init__`."""
    if name[0] != "infinity":
        return None
    return name[1] if len(name) > 1 and name[1] in modules else "__init__"


def complaint(module: str, other: str) -> str | None:
    """Say why `module` may not import `other`, or nothing."""
    if module == other or (module, other) in BELOW:
        return None
    if module in LEAVES:
        return f"{module} is a leaf: it does not import {other}"
    if other in LEAVES:
        lowest = LEAVES[other]
        return f"{other} is for {lowest} and above" if LEVEL[module] > LEVEL[lowest] else None
    return f"{other} is above {module}" if LEVEL[module] > LEVEL[other] else None


def test_every_module_has_a_layer() -> None:
    unknown = {module for module, _ in files()} - LEVEL.keys() - LEAVES.keys()
    assert unknown == set(), "put these into the table LAYERS (or LEAVES) above"


def test_imports_go_down_the_layers() -> None:
    modules = {module for module, _ in files()}
    wrong = []
    for module, path in files():
        for line, name in imported(path):
            other = target(name, modules)
            if (
                other
                and {module, other} <= LEVEL.keys() | LEAVES.keys()
                and (why := complaint(module, other))
            ):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {'.'.join(name)}: {why}")
    assert wrong == []


def test_what_decides_touches_neither_torch_nor_the_machine() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {'.'.join(name)}"
        for module, path in files()
        if module in PURE
        for line, name in imported(path)
        if IMPURE & {name[0], name[1] if name[0] == "infinity" else ""}
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("module", "other", "allowed"),
    [
        ("cli", "engine", True),
        ("engine", "cli", False),
        ("engine", "__init__", False),
        ("store", "aio", True),
        ("plan", "aio", False),
        ("shard", "kernels", False),
        ("optim", "kernels", True),
        ("aio", "errors", False),
        ("tiling", "kernels", True),
        ("tiling", "aio", False),
        ("plan", "trace", True),
    ],
)
def test_the_table_reads_as_meant(module: str, other: str, *, allowed: bool) -> None:
    assert (complaint(module, other) is None) is allowed
