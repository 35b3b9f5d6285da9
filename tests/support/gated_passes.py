"""Passes and transfers for tests of the lane: they note what is done, and last until their gates open."""

import threading
import time

from infinity.lane.base import Pass
from infinity.planning.layout import ALIGN_NUMEL, tiles

TILE = ALIGN_NUMEL


class Logged(Pass):
    """Notes that it was worked on, once its gate is open."""

    def __init__(self, record, name, log, gate=None):
        super().__init__(record)
        self.name, self.log, self.gate, self.begun = name, log, gate, threading.Event()

    def tiles(self):
        return tiles(TILE, TILE)

    def reads_and_writes(self, start, stop):
        return (), ()

    def process(self, start, stop, at):
        self.begun.set()
        if self.gate:
            self.gate.wait(60)
        self.log.append(self.name)


class Gated:
    """A transfer that is over when its gate is open."""

    ended_s = None

    def __init__(self):
        self.gate, self.began_s = threading.Event(), time.perf_counter()

    @property
    def done(self):
        return self.gate.is_set()

    def wait(self, timeout_s=None):
        if not self.gate.wait(timeout_s or 60):
            raise TimeoutError


class Moving(Logged):
    """A pass that moves something more, such as an upload."""

    def __init__(self, record, transfer):
        super().__init__(record, "", [])
        self.transfer = transfer

    def process(self, start, stop, at):
        return (self.transfer,)
