"""What `infinity bench copy` counts and concludes. Faked: the device, the clock; real: reads from the drive.

No CUDA device is used: that the copies run as meant is not proven here.
"""

import argparse
import contextlib
import os
from io import StringIO

import pytest
import torch
from matplotlib.figure import Figure
from rich.console import Console

from infinity import __main__ as cli
from infinity import aio
from infinity.aio.measure import Moved
from infinity.bench.device import copy
from infinity.bench.device.copy import BATCH_NBYTES, DOWN, UP, beside_limits, draw, measured, nvme_reads, rate

MIB = 1 << 20


class FakeLink:
    """A device that carries so many bytes per second in each direction, at the same time."""

    def __init__(self, nbytes, speeds, *, first_s=0.0):
        self.now_s, self.queued = 0.0, {UP: 0.0, DOWN: 0.0}
        self.nbytes, self.speeds, self.extra_s = nbytes, speeds, first_s
        self.copies = 0

    def start(self, direction):
        self.queued[direction] += self.nbytes / self.speeds[direction]
        self.copies += 1

    def wait(self):
        self.now_s += max(self.queued.values()) + self.extra_s
        self.queued, self.extra_s = {UP: 0.0, DOWN: 0.0}, 0.0

    def clock(self):
        return self.now_s


@pytest.mark.parametrize("nbytes", [MIB, 300 * MIB])
@pytest.mark.parametrize(("directions", "expected"), [([UP], 10e9), ([DOWN], 8e9), ([UP, DOWN], 16e9)])
def test_the_bytes_of_all_directions_are_counted(nbytes, directions, expected):
    link = FakeLink(nbytes, {UP: 10e9, DOWN: 8e9})
    assert rate(link, directions, nbytes, 1.0, link.clock) == pytest.approx(expected)
    assert link.now_s >= 1.0


def test_the_first_batch_is_not_counted():
    link = FakeLink(MIB, {UP: 10e9, DOWN: 8e9}, first_s=5.0)
    assert rate(link, [UP], MIB, 0.0, link.clock) == pytest.approx(10e9)


def test_small_copies_are_waited_for_in_batches():
    link = FakeLink(MIB, {UP: 10e9, DOWN: 8e9})
    rate(link, [UP], MIB, 0.0, link.clock)
    assert link.copies == 2 * BATCH_NBYTES // MIB


def test_a_measurement_longer_than_its_time_still_counts_one_batch():
    link = FakeLink(MIB, {UP: 1e6, DOWN: 1e6})
    assert rate(link, [UP], MIB, 0.001, link.clock) == pytest.approx(1e6)


def row(memory, way, bytes_per_s, **more):
    return {"memory": memory, "nbytes": MIB, "way": way, "bytes_per_s": bytes_per_s, **more}


def test_each_rate_stands_beside_the_best_of_one_direction_with_pinned_memory():
    rows = [
        {"way": "NVMe alone", "nvme_bytes_per_s": 4e9},
        row("pinned", UP, 10e9),
        row("pinned", UP, 20e9),
        row("pinned", DOWN, 10e9),
        row("pinned", "both at once", 24e9),
        row("pinned", UP, 99e9, nvme_bytes_per_s=3e9),
        row("pageable", DOWN, 2e9),
    ]
    found = beside_limits(rows)
    assert [one.get("limit_bytes_per_s") for one in found] == [None, 20e9, 20e9, 10e9, 30e9, 20e9, 10e9]
    assert found[4]["share"] == pytest.approx(0.8)
    assert found[5]["nvme_share"] == pytest.approx(0.75)
    assert "share" not in found[0]


class Immediate:
    """A link whose copies cost nothing that counts."""

    made: tuple = ()

    def __init__(self, nbytes, *, pinned):
        Immediate.made += ((nbytes, pinned),)

    def start(self, direction):
        pass

    def wait(self):
        pass


def test_every_memory_size_and_way_is_measured_alone_and_beside_the_drive():
    asked = []

    def busy(seconds):
        asked.append(seconds)
        return Moved(1000, 0.5, [])

    out = StringIO()
    rows = measured(Immediate, [MIB, 2 * MIB], 0.001, busy, Console(file=out))
    assert set(Immediate.made) == {(MIB, True), (2 * MIB, True), (MIB, False), (2 * MIB, False)}
    of_link = [one for one in rows if "nbytes" in one]
    assert len(of_link) == 2 * 2 * 3 * 2
    assert [one.get("nvme_bytes_per_s") for one in of_link] == [None, 2000.0] * 12
    assert asked == [0.001] * 13
    assert len(out.getvalue().splitlines()) == 4
    axes = Figure().add_subplot()
    draw(axes, rows)
    assert len(axes.get_lines()) == 2 * 3 * 2


@pytest.mark.disk
def test_the_drive_is_read_into_memory_that_is_pinned_meanwhile(folder):
    pins = []

    @contextlib.contextmanager
    def pinned(memory):
        pins.append(len(memory))
        yield
        pins.append(0)

    with nvme_reads(folder, 64 * MIB, pinned) as busy:
        moved = busy(0.05)
        assert list(folder.iterdir()) == []
        assert pins == [64 * MIB]
    assert moved.nbytes > 0
    assert moved.wall_s >= 0.05
    assert pins == [64 * MIB, 0]


@pytest.mark.disk
def test_a_full_disk_is_told_with_the_numbers(folder, monkeypatch):
    class Full:
        f_bavail, f_frsize = 1000, 4096

    monkeypatch.setattr(os, "statvfs", lambda _: Full)
    with (
        pytest.raises(aio.StorageFullError, match="4096000 B free"),
        nvme_reads(folder, 1 << 30, contextlib.nullcontext),
    ):
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_cuda_device_it_says_so(capsys, folder):
    assert cli.main(["bench", "copy", "--nvme", str(folder)]) == 1
    assert "no CUDA device is visible" in capsys.readouterr().err
    assert list(folder.iterdir()) == []


def test_a_size_of_nothing_is_refused():
    parser = argparse.ArgumentParser()
    copy.add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--size", "0"])
    assert parser.parse_args(["--size", "1MiB", "2MiB"]).size == [MIB, 2 * MIB]
