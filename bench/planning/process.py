"""Measures, once, what a process takes that trains next to nothing: Python, torch, transformers and Infinity.

It is measured in a process of its own, which imports them and trains one step of a tiny model, and is kept
beside the measurements of disks until one of them has another version.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinity.errors import InfinityError
from infinity.planning.capacity import Process
from infinity.storage.disk_speed import cache_folder

if TYPE_CHECKING:
    from torch import nn

_FILE = "process.json"
_SECONDS = 120
_TINY_NBYTES = 16 << 20
_PROGRAM = "from infinity.bench.planning.process import say; say()"


class ProcessMemoryError(InfinityError, RuntimeError):
    """The memory of a process that trains could not be measured."""


def process_memory() -> Process | None:
    """Return what a process takes before it trains: measured at the first call, in some seconds. None with
    INFINITY_MEASURE=0, if it was not measured before.

    Raises: ProcessMemoryError where such a process fails.
    """
    key = _versions()
    with contextlib.suppress(OSError, ValueError, TypeError):
        content = json.loads((cache_folder() / _FILE).read_text())
        if content["of"] == key:
            return Process(int(content["own_nbytes"]), int(content["shared_nbytes"]))
    if os.environ.get("INFINITY_MEASURE") == "0":
        return None
    found = _measured()
    content = {"of": key, "own_nbytes": found.own_nbytes, "shared_nbytes": found.shared_nbytes}
    with contextlib.suppress(OSError):  # without a cache it is measured each time
        place = cache_folder()
        place.mkdir(parents=True, exist_ok=True)
        unfinished = place / f"{_FILE}.{os.getpid()}"
        unfinished.write_text(json.dumps(content))
        unfinished.replace(place / _FILE)
    return found


def _versions() -> str:
    names = [f"python {platform.python_version()}"]
    for name in ("torch", "transformers", "zero-infinity"):
        with contextlib.suppress(PackageNotFoundError):
            names.append(f"{name} {version(name)}")
    return ", ".join(names)


def _measured() -> Process:
    if importlib.util.find_spec("torch") is None:
        raise ProcessMemoryError("torch is not installed: pip install torch")
    command = [sys.executable, "-c", _PROGRAM]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)  # noqa: S603
    except subprocess.TimeoutExpired as error:
        raise ProcessMemoryError(
            f"a process that imports torch and transformers was not ready after {_SECONDS} s: its memory is "
            "not known. Likely cause: a very busy machine; try again, or set INFINITY_MEASURE=0"
        ) from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ProcessMemoryError(
            f"a process that imports torch and transformers ended with exit code {done.returncode}: {last}. "
            "Its memory is not known; mend the installation, or set INFINITY_MEASURE=0"
        )
    own, shared = json.loads(done.stdout.splitlines()[-1])
    return Process(own, shared)


# In the process that is measured


def warm_up() -> None:
    """Import what a training imports, train two steps of a tiny model, and multiply large matrices; give
    back what malloc then holds free.
    """
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    import infinity

    with infinity.Init(device="cpu", host_memory=_TINY_NBYTES, dtype="fp32"):
        model = _tiny() if importlib.util.find_spec("transformers") else nn.Linear(64, 64)
    optimizer = infinity.AdamW(model.parameters())
    given = torch.zeros(2, 64) if isinstance(model, nn.Linear) else torch.zeros(2, 64, dtype=torch.long)
    for _ in range(2):
        output = checkpoint(model, given, use_reentrant=False)
        getattr(output, "logits", output).float().logsumexp(-1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    del model, optimizer, output
    gc.collect()
    for dtype in (torch.float32, torch.bfloat16):  # the library keeps buffers of the size that these take
        layer = nn.Linear(2048, 8192).to(dtype)
        layer(torch.ones(1024, 2048, dtype=dtype)).sum().backward()
        del layer
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _tiny() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    model: nn.Module = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=256, use_cache=False))
    return model


def say() -> None:
    """Print the bytes of this process's own memory and of files that it maps, as JSON."""
    warm_up()
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    rows = dict(line.split(":", 1) for line in lines)
    sys.stdout.write(
        json.dumps([1024 * int(rows[name].split()[0]) for name in ("RssAnon", "RssFile")]) + "\n"
    )
