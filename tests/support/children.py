"""Forked children of a test: what they say reaches it, and a skip in a child skips the test."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import pytest


class Said(dict):
    """What a child said, by key; the last one counts."""

    def __missing__(self, key):
        raise AssertionError(f"the child did not come to say {key!r}; it said {dict(self)}")


class Child:
    """A forked process that runs `work(say)` and ends without any clean-up, at the latest after `limit_s`;
    `say` sends a line.
    """

    def __init__(self, work, limit_s=300.0):
        read, write = os.pipe()
        sys.stdout.flush()
        self._until = time.monotonic() + limit_s
        self.pid = os.fork()
        if self.pid == 0:
            os.close(read)
            code = 1
            try:
                os.environ["INFINITY_MEASURE"] = "0"
                work(lambda **what: _send(write, what))
                code = 0
            except pytest.skip.Exception as skip:
                _send(write, {"skip": str(skip)})
            except BaseException as error:  # noqa: BLE001
                _send(write, {"crash": f"{type(error).__name__}: {error}"[:2000]})
            finally:
                os._exit(code)
        os.close(write)
        self._read = read
        os.set_blocking(read, False)
        self._text = b""
        self.status = None

    def over(self):
        """Whether it has ended. If that was by a skip, skip here."""
        try:
            while part := os.read(self._read, 1 << 16):
                self._text += part
        except BlockingIOError:
            pass
        if self.status is None and time.monotonic() > self._until:
            os.kill(self.pid, signal.SIGKILL)
            self._text += b'{"hang": true}\n'
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if not pid:
                return False
            self.status = status
            return self.over()
        os.close(self._read)
        if "skip" in self.last:
            pytest.skip(self.last["skip"])
        return True

    @property
    def said(self):
        """Everything it said, whole lines."""
        return [json.loads(line) for line in self._text.split(b"\n")[:-1]]

    @property
    def last(self):
        """What it said, by key."""
        return Said({key: value for line in self.said for key, value in line.items()})


def _send(write, what):
    os.write(write, (json.dumps(what) + "\n").encode())


def ended(work, **options):
    """Run `work(say)` in a forked child to its end; what it said, by key."""
    child = Child(work, **options)
    while not child.over():
        time.sleep(0.005)
    return child.last
