"""Shared by benches that start processes: a contestant's run, a description of the machine, records."""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, is_dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from infinity.bench.places import check_folder
from infinity.cli.interrupted import held_back
from infinity.cli.presets import PRESETS, VOCABULARY
from infinity.errors import InfinityError
from infinity.sizes import format_size

HERE = Path(__file__).resolve().parent
SETTLING = 3
"""Steps that are not counted: in the first an engine learns the order of uses and has no moments to read; in
the
third, after counting the uses of a whole step, it moves fields between tiers."""

SHAPES: dict[str, dict[str, int]] = {
    name: {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocabulary,
    }
    for name, layers, hidden, intermediate, heads, vocabulary in (
        *(
            (name, one.layers, one.hidden, one.intermediate, one.heads, VOCABULARY)
            for name, one in PRESETS.items()
        ),
        ("269m", 20, 1024, 2816, 16, 8192),
        ("3.74b", 32, 3072, 8192, 24, 19456),
        ("4b", 34, 3072, 8192, 24, 24576),
        ("8b", 32, 4096, 14336, 32, 32000),
    )
}
"""Llama models: the presets, and four whose vocabulary is larger than bytes. Names are parameter counts."""
MAX_NORM, NEVER_REACHED = 1.0, 1e9
UPDATES: dict[str, dict[str, Any]] = {
    "backward": {"update": "backward"},
    "auto": {"update": "auto"},
    "forward": {"update": "forward", "speculate": False},
    "clipped": {"update": "forward", "max_norm": MAX_NORM, "speculate": False},
    "foreseen": {"update": "forward", "max_norm": NEVER_REACHED, "speculate": "auto"},
    "speculative": {"update": "forward", "max_norm": NEVER_REACHED, "speculate": True},
    "exceeding": {"update": "forward", "max_norm": MAX_NORM, "speculate": "auto"},
}
"""Infinity's ways to update, and a contestant's settings for them."""
STATE_DTYPES = ("fp32", "bf16", "int8", "int4")
"""The dtypes of moments; the first is exact, and the default."""


def settings_of(
    host_memory: int | str, update: str = "backward", state_dtype: str = STATE_DTYPES[0]
) -> dict[str, Any]:
    """Return the settings of an Infinity contestant; `update` is a key of UPDATES.

    The default dtype of moments is left out, so that older sources without a choice can run too.
    """
    chosen = {} if state_dtype == STATE_DTYPES[0] else {"state_dtype": state_dtype}
    return {"host_memory": host_memory, **UPDATES[update], **chosen}


def parameter_count(shape: str) -> int:
    """Return the parameters of a shape; input and output embeddings are not tied."""
    sizes = SHAPES[shape]
    ends = (2 * sizes["vocab_size"] + 1) * sizes["hidden_size"]
    return sizes["num_hidden_layers"] * block_parameters(sizes) + ends


def block_parameters(sizes: Mapping[str, int]) -> int:
    """Return the parameters of one decoder block."""
    hidden = sizes["hidden_size"]
    return 4 * hidden**2 + 3 * hidden * sizes["intermediate_size"] + 2 * hidden


class RunError(InfinityError, RuntimeError):
    """A contestant's process, or a peer's program, failed; the message ends with the last lines it wrote."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A Python to run contestants in."""

    python: str
    options: tuple[str, ...] = ("-P",) if sys.version_info >= (3, 11) else ("-I",)
    """Keeps this folder off sys.path, where its modules could hide others of the same name."""
    variables: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_venv(cls, folder: Path) -> Environment:
        """Use a virtual environment, isolated; extensions that DeepSpeed compiles stay in it."""
        scripts = folder.absolute() / "bin"
        path = f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}"  # ninja
        built = str(folder.absolute() / "torch_extensions")
        return cls(str(scripts / "python"), ("-I",), {"PATH": path, "TORCH_EXTENSIONS_DIR": built})

    def run(self, arguments: Sequence[str], keep: Sequence[int] = ()) -> tuple[int, str]:
        """Run Python; return its exit code and output. If we are interrupted, all its processes are killed.

        keep: file descriptors that it inherits.
        """
        process = None
        try:
            with held_back():  # an interrupt inside Popen would leave an unknown process running
                process = subprocess.Popen(  # noqa: S603 (the caller's own Python)
                    [self.python, *self.options, *arguments],
                    env={**os.environ, **self.variables},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    pass_fds=keep,
                    start_new_session=True,  # a group of its own, which includes DeepSpeed's compilers
                )
            said, _ = process.communicate()
        except BaseException:
            if process is not None:
                with process:  # waits, and closes the pipe
                    os.killpg(process.pid, signal.SIGKILL)
            raise
        return process.returncode, said


@dataclass(frozen=True, slots=True)
class Measured:
    """One run. The fields' names are the keys of the JSON."""

    parameters: int
    seconds: float
    """Per step: the median of the steady steps."""
    forward_s: float
    backward_s: float
    step_s: float
    read_per_parameter: float
    """Bytes per step, mean of the steady steps, by /proc/self/io; if that counts none, by the engine."""
    written_per_parameter: float
    device_per_parameter: float
    """Bytes read and written per step by the whole device, for all processes."""
    peak_nbytes: int
    """Peak resident memory, building included, above the memory after the imports."""
    build_peak_nbytes: int
    train_peak_nbytes: int
    baseline_nbytes: int
    build_s: float
    loss: float
    """Of the last step."""
    all_seconds: list[float]
    all_losses: list[float]
    load: float
    """Runnable processes at the end, mean of the last minute, including the run's own."""
    engine: dict[str, Any]
    versions: dict[str, str]

    @property
    def read_nbytes(self) -> float:
        """Bytes read per step."""
        return self.read_per_parameter * self.parameters

    @property
    def written_nbytes(self) -> float:
        """Bytes written per step."""
        return self.written_per_parameter * self.parameters

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes read and written per step."""
        return self.read_per_parameter + self.written_per_parameter

    @property
    def bytes_per_s(self) -> float:
        """Bytes read and written per second."""
        return self.bytes_per_parameter * self.parameters / self.seconds


@dataclass(frozen=True, slots=True)
class Model:
    """A training: the name of a shape, tokens per sequence, steps, and sequences per step."""

    shape: str
    tokens: int
    steps: int
    micro_batches: int = 1
    turn: int = 0
    """Steps of a turn, if contestants take turns."""


def counts(step: int, turn: int = 0) -> bool:
    """Whether step number `step` counts: after those that settle, and after the first of each turn."""
    return step >= max(SETTLING, turn) and (turn == 0 or step % turn > 0)


def measure(
    environment: Environment,
    kind: str,
    model: Model,
    folder: Path,
    settings: dict[str, Any],
    program: str = "contestant.py",
    baton: int | None = None,
) -> Measured:
    """Train a contestant in a process of its own, with its files in a temporary folder.

    program: the file in this folder that implements the kind.
    baton: the descriptor of a socket for its turns; see turns.py.

    Raises: RunError with the error's text, or with the process's last lines.
    """
    with (
        tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=folder) as name,
        os.fdopen(os.memfd_create("result"), "w+b") as out,  # the disk may be full
    ):
        spec = {"kind": kind, "shape": SHAPES[model.shape], "steps": model.steps, "tokens": model.tokens}
        spec |= {"micro_batches": model.micro_batches}
        spec |= {"nvme": name, "out": f"/proc/self/fd/{out.fileno()}", "settings": settings}
        keep = [out.fileno()]
        if baton is not None:
            spec |= {"turn": model.turn, "baton": baton}
            keep.append(baton)
        code, said = environment.run([str(HERE / program), json.dumps(spec)], keep)
        result = json.loads(out.read() or "{}")
    if "error" in result:
        raise RunError(f"{kind} on {model.shape}: {result['error']}")
    if code or not result:
        last = "\n".join(said.splitlines()[-15:])
        raise RunError(f"{kind} on {model.shape} ended with exit code {code}; its last lines:\n{last}")
    return _measured(result, model.turn)


def _measured(result: dict[str, Any], turn: int) -> Measured:
    steps = result["steps"]
    steady = [step for number, step in enumerate(steps) if counts(number, turn)] or steps[-1:]
    parameters = result["parameters"]

    def median(key: str) -> float:
        return float(statistics.median(step[key] for step in steady))

    def per_parameter(*keys: str) -> float:
        moved = sum(step["traffic"][key] for step in steady for key in keys)
        return float(moved / len(steady) / parameters)

    counter = "" if per_parameter("read", "written") else "engine_"  # the kernel counts nothing on a tmpfs

    return Measured(
        parameters=parameters,
        seconds=median("seconds"),
        forward_s=median("forward_s"),
        backward_s=median("backward_s"),
        step_s=median("step_s"),
        read_per_parameter=per_parameter(f"{counter}read"),
        written_per_parameter=per_parameter(f"{counter}written"),
        device_per_parameter=per_parameter("device_read", "device_written"),
        peak_nbytes=max(result["peak_nbytes"], result["build_peak_nbytes"]),
        build_peak_nbytes=result["build_peak_nbytes"],
        train_peak_nbytes=result["peak_nbytes"],
        baseline_nbytes=result["baseline_nbytes"],
        build_s=result["build_s"],
        loss=steps[-1]["loss"],
        all_seconds=[round(step["seconds"], 4) for step in steps],
        all_losses=[step["loss"] for step in steps],
        load=os.getloadavg()[0],
        engine=result["engine"],
        versions=result["versions"],
    )


@contextmanager
def folder_on(path: Path) -> Iterator[Path]:
    """Create a temporary folder for the runs' files in the existing folder `path`.

    Raises: ConfigError if `path` is not a writable folder.
    """
    check_folder(path)
    with tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=path) as name:
        yield Path(name)


# The machine, and the record


def here() -> dict[str, Any]:
    """Return the date and the versions of the sources, without which a figure means nothing."""
    now = dt.datetime.now(dt.timezone.utc)
    return {
        "date": f"{now:%Y-%m-%d}",
        "commit": commit(),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def commit() -> str:
    """Return the commit of the sources, with a + if files differ from it; "unknown" outside a checkout."""
    try:
        head = _git("rev-parse", "--short", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", "aio", "infinity", "kernels")
        return head + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(HERE.parents[1]), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 (written above)
    return done.stdout.strip()


def machine(folder: Path | None = None) -> dict[str, str]:
    """Describe the machine in general terms (no names, no paths), and the filesystem of `folder`."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    facts = {
        "cpu": names[0] if names else platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": format_size(psutil.virtual_memory().total),
        "kernel": platform.release().partition("-")[0],
    }
    return facts if folder is None else {**facts, "filesystem": _filesystem(folder)}


def _filesystem(folder: Path) -> str:
    best: tuple[int, str, str] = (-1, "unknown", "")
    for part in psutil.disk_partitions(all=True):
        if folder.absolute().is_relative_to(part.mountpoint) and len(part.mountpoint) >= best[0]:
            best = (len(part.mountpoint), part.fstype, Path(part.device).name)
    kinds = {"vd": "virtio disk", "nv": "NVMe disk", "sd": "SCSI disk", "md": "RAID", "dm": "mapped disk"}
    return f"{best[1]} on a {kinds.get(best[2][:2], 'device of unknown kind')}"


def words(facts: Mapping[str, Any]) -> str:
    """Format facts in one line."""
    return ", ".join(f"{key} {value}" for key, value in facts.items())


def save(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record as JSON."""
    path.write_text(json.dumps(record, indent=1, default=plain) + "\n", encoding="utf-8")


def plain(value: Any) -> Any:
    """Return a dataclass as a dict, for json.dumps. Raises: TypeError for anything else."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{value!r} cannot be part of a record: expected plain values or dataclasses")


OWN = Environment(sys.executable)
"""This Python, with infinity and plain PyTorch."""
