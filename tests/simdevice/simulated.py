"""Cases on the simulated device, run by simulated_run.py in a process of its own: this one never loads it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import simulator
from launches import environment

HERE = Path(__file__).parent


def results(*names, limit_s=280.0):
    """Run cases by their names and return what each process of each said, by name; skip, and say why, where
    the device cannot be built.
    """
    if why := simulator.missing():
        pytest.skip(why)
    command = [sys.executable, str(HERE / "simulated_run.py"), *names]
    paths = environment()
    paths["PYTHONPATH"] = f"{HERE}:{paths['PYTHONPATH']}"
    done = subprocess.run(command, env=paths, capture_output=True, text=True, timeout=limit_s, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = {name: [line for line in lines if line["case"] == name] for name in names}
    assert all(found.values()), done.stderr[-3000:]
    return found
