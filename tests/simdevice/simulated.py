"""Cases on the simulated device, run by simulated_run.py in a process of its own: this one never loads it."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import simulator
from launches import environment

HERE = Path(__file__).parent


class Runner:
    """The process that runs cases, each in a fork of itself: it imports torch and transformers once for all
    tests, and ends with this process.
    """

    def __init__(self):
        paths = environment()
        paths["PYTHONPATH"] = f"{HERE}:{paths['PYTHONPATH']}"
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "simulated_run.py")],
            env=paths,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        self._text = b""
        atexit.register(self._end)

    def run(self, names, at_once, limit_s):
        """Run cases, so many at once; return a line of JSON for each process of each.

        Raises: AssertionError, with what was said, where the process ends or takes longer.
        """
        until = time.monotonic() + limit_s
        asked = json.dumps({"names": names, "at_once": at_once})
        try:
            self._process.stdin.write(f"{asked}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            self._fail("it had ended")
        lines = []
        while (line := self._line(until)) != b"over":
            lines += [json.loads(line)] if line.startswith(b"{") else []
        return lines

    def errors(self):
        """Return the last of what it and the cases have written to stderr."""
        number = self._errors.fileno()
        return os.pread(number, 3000, max(0, os.fstat(number).st_size - 3000)).decode(errors="replace")

    def _line(self, until):
        while b"\n" not in self._text:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, until - time.monotonic()))
            part = os.read(self._process.stdout.fileno(), 1 << 16) if ready else b""
            if not part:
                self._fail("it has ended" if ready else "it took too long")
            self._text += part
        line, _, self._text = self._text.partition(b"\n")
        return line

    def _end(self):
        self._process.kill()
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._errors):
            with contextlib.suppress(BrokenPipeError):  # what was to be written
                file.close()

    def _fail(self, why):
        _runner.cache_clear()  # the next test begins another
        said = self.errors()
        self._end()
        raise AssertionError(f"simulated_run.py: {why}\n{said}")


_runner = functools.cache(Runner)
_SAID = {}
"""What was said of each case, by its name: it runs once."""


def results(*names, at_once=1, limit_s=800.0):
    """Run cases by their names and return what each process of each said, by name; skip, and say why, where
    the device cannot be built.

    at_once: how many cases run beside each other, which hides what they wait for late copies.
    """
    if why := simulator.missing():
        pytest.skip(why)
    new = [name for name in names if name not in _SAID]
    lines = _runner().run(new, at_once, limit_s) if new else []
    found = {name: [line for line in lines if line["case"] == name] for name in new}
    assert all(found.values()), _runner().errors()
    _SAID.update(found)
    return {name: _SAID[name] for name in names}
