"""What measurements that start processes share: a contestant's run, the machine in words, the record."""

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
the third, with uses of a whole step counted, it moves fields between tiers.
"""

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
    )
}
"""Llama models: the presets, and 269m, with more tokens than bytes. A name says about how many parameters."""
MAX_NORM = 1.0
UPDATES: dict[str, dict[str, Any]] = {
    "backward": {"update": "backward"},
    "forward": {"update": "forward"},
    "clipped": {"update": "forward", "max_norm": MAX_NORM},
}
"""Infinity's ways to update, and the settings of a contestant that uses them."""
STATE_DTYPES = ("fp32", "bf16", "int8")
"""What moments can be kept in; the first is exact, and the default."""


def settings_of(
    host_memory: int | str, update: str = "backward", state_dtype: str = STATE_DTYPES[0]
) -> dict[str, Any]:
    """Return the settings of an Infinity contestant; `update` is a key of UPDATES.

    The default dtype of moments is left out, so that sources from before there was a choice run too.
    """
    chosen = {} if state_dtype == STATE_DTYPES[0] else {"state_dtype": state_dtype}
    return {"host_memory": host_memory, **UPDATES[update], **chosen}


def parameter_count(shape: str) -> int:
    """Return the parameters of a shape; input and output embeddings are not tied."""
    sizes = SHAPES[shape]
    hidden = sizes["hidden_size"]
    block = 4 * hidden**2 + 3 * hidden * sizes["intermediate_size"] + 2 * hidden
    return sizes["num_hidden_layers"] * block + 2 * sizes["vocab_size"] * hidden + hidden


class RunError(InfinityError, RuntimeError):
    """A contestant's process, or a peer's program, failed; the message ends with the last lines it wrote."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A Python to run contestants in."""

    python: str
    options: tuple[str, ...] = ("-P",) if sys.version_info >= (3, 11) else ("-I",)
    """Keep this folder off its sys.path: the file copy.py here is not the standard library's."""
    variables: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_venv(cls, folder: Path) -> Environment:
        """A virtual environment of its own, seen from nowhere else; what DeepSpeed compiles stays in it."""
        scripts = folder.absolute() / "bin"
        path = f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}"  # ninja
        built = str(folder.absolute() / "torch_extensions")
        return cls(str(scripts / "python"), ("-I",), {"PATH": path, "TORCH_EXTENSIONS_DIR": built})

    def run(self, arguments: Sequence[str], keep: Sequence[int] = ()) -> tuple[int, str]:
        """Run Python; return its exit code and all it wrote. Whatever it starts ends when we are interrupted.

        keep: file descriptors that it gets too.
        """
        process = None
        try:
            with held_back():  # an interrupt inside Popen would leave a process that nobody knows
                process = subprocess.Popen(  # noqa: S603 (the caller's own Python)
                    [self.python, *self.options, *arguments],
                    env={**os.environ, **self.variables},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    pass_fds=keep,
                    start_new_session=True,  # a group of its own: what DeepSpeed compiles with is in it
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
    """Bytes per step, mean of the steady steps, by /proc/self/io; where that counts none, by the engine."""
    written_per_parameter: float
    device_per_parameter: float
    """Bytes read and written per step by the whole device, whoever asked for them."""
    peak_nbytes: int
    """Peak resident memory above that after the imports, building included."""
    build_peak_nbytes: int
    train_peak_nbytes: int
    baseline_nbytes: int
    build_s: float
    loss: float
    """Of the last step."""
    all_seconds: list[float]
    all_losses: list[float]
    load: float
    """Runnable processes at the end, mean of the last minute; the run's own among them."""
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
    """What is trained: the name of a shape, tokens of a sequence, steps, and sequences in each step."""

    shape: str
    tokens: int
    steps: int
    micro_batches: int = 1
    turn: int = 0
    """Steps of a turn, where contestants take turns."""


def counts(step: int, turn: int = 0) -> bool:
    """Whether a step, from 0, counts: behind those that settle; of each turn, behind its first."""
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
    """Train a contestant in a process of its own, with its files in a folder that is removed afterwards.

    program: the file in this folder that knows the kind.
    baton: the descriptor of a socket on which it is told its turns; see `bench.turns`.
    Raises: RunError with the error's words, or with the process's last lines.
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
    """Make a folder for the runs' files below `path`, which has to be there, and remove it at the end.

    Raises: ConfigError for a `path` that is no folder to write in.
    """
    check_folder(path)
    with tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=path) as name:
        yield Path(name)


# The machine, and the record


def here() -> dict[str, Any]:
    """Say when, and of which sources: what a figure is worth nothing without."""
    now = dt.datetime.now(dt.timezone.utc)
    return {
        "date": f"{now:%Y-%m-%d}",
        "commit": commit(),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def commit() -> str:
    """Return the commit of the sources, with a + where files differ from it; "unknown" outside a checkout."""
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
    """Describe the machine in general terms (no names, no paths), and what `folder` lies on, if given."""
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
    """Return the facts in one line."""
    return ", ".join(f"{key} {value}" for key, value in facts.items())


def save(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record as JSON."""
    path.write_text(json.dumps(record, indent=1, default=_plain) + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{value!r} is not for a record")


OWN = Environment(sys.executable)
"""This Python: where infinity is, and plain PyTorch beside it."""
