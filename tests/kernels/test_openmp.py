"""Whether OpenMP's threads sleep. Trusted: how libgomp counts its threads, as /proc shows them. What they do
while they wait shows in nothing but time, which no test looks at.
"""

import gc
import time
from pathlib import Path

import pytest
import torch

from children import ended
from infinity.kernels import SleepingThreads, sleep


def threads():
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.fixture(autouse=True)
def _libgomp():
    torch.ones(64, 64) @ torch.ones(64, 64)  # its own threads are there
    if "libgomp" not in Path("/proc/self/maps").read_text():
        pytest.skip("torch runs on another OpenMP here")
    for _ in range(600):  # what a test before has left asks until it is collected
        if not sleep():
            break
        gc.collect()
        time.sleep(0.05)


def test_one_thread_more_is_known_to_openmp_while_anybody_asks():
    before = threads()
    one, other = SleepingThreads(), SleepingThreads()
    assert not sleep()
    for ask in (one, other, one):
        ask.set(asked=True)
        assert sleep()
    one.set(asked=False)
    assert sleep(), "the other asks still"
    del other
    assert not sleep()
    for _ in range(6000):  # threads of a team end by themselves
        if threads() <= before:
            return
        time.sleep(0.01)
    pytest.fail(f"{threads()} threads where there were {before}")


def test_a_forked_child_has_no_such_thread_and_may_ask_for_its_own():
    one = SleepingThreads()
    one.set(asked=True)

    def work(say):
        say(before=sleep())
        mine = SleepingThreads()
        mine.set(asked=True)
        say(asked=sleep())

    said = ended(work)
    assert (said["before"], said["asked"]) == (False, True)
    one.set(asked=False)
    assert not sleep()
