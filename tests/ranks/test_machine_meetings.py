"""Where ranks of one machine wait for each other in memory. Trusted: the kernel. Nothing is faked but the
channel; ranks are processes, and threads of this one where that makes no difference.
"""

import contextlib
import ctypes
import os
import signal
import time
from datetime import timedelta

import pytest

from children import Child, ended
from infinity.errors import RanksError
from infinity.ranks import machine_meetings
from infinity.ranks.machine_meetings import MachineMeetings, open_meetings
from infinity.ranks.shared_memory import PAGE, SharedMemory, has_nameless_memory
from machine_ranks import MachineRank, descriptors
from thread_ranks import on_ranks

pytestmark = pytest.mark.skipif(not has_nameless_memory(), reason="this system has none")


class Channel:
    """Waits for what is begun, as a channel of ranks does."""

    def wait_for(self, begin, _what):
        begin(group=None, async_op=True).wait()


@pytest.fixture
def file():
    file = os.memfd_create("infinity-test")
    os.ftruncate(file, 4 * PAGE)
    yield file
    os.close(file)


def joined(file, own, timeout_s=20.0):
    """Return the meetings of one of two ranks, in this process."""
    memory = SharedMemory(os.dup(file), 4 * PAGE)
    machine_meetings._stay(memory, own)
    return MachineMeetings(memory, PAGE, own, [4, 7], timeout_s)


def come(meetings):
    return meetings.come(0)


def test_two_processes_meet_and_each_sees_what_the_other_wrote_before_and_says(file):
    def numbers(own):
        meetings, wrong = joined(file, own), 0
        words = [(ctypes.c_uint64 * 2).from_address(meetings.memory.address + 64 * one) for one in range(2)]
        for number in range(1, 400):
            words[own][number % 2] = 3 * number + own
            said = meetings.meet(Channel(), 10 * number + own, "meet")
            wrong += said != [10 * number, 10 * number + 1]
            wrong += [one[number % 2] for one in words] != [3 * number, 3 * number + 1]
        return wrong

    other = Child(lambda say: say(wrong=numbers(1)))
    assert numbers(0) == 0
    while not other.over():
        time.sleep(0.005)
    assert other.last["wrong"] == 0


@pytest.mark.parametrize("end", ["killed", "closed"])
def test_a_rank_that_ends_before_it_has_come_is_named(file, end):
    def other(say):
        meetings = joined(file, 1)
        come(meetings).wait()
        say(met=True)
        if end == "closed":
            meetings.memory.close()
            time.sleep(20)
        os.kill(os.getpid(), signal.SIGKILL)

    child, meetings = Child(other), joined(file, 0)
    come(meetings).wait()
    work = come(meetings)
    with pytest.raises(RuntimeError, match="rank 7 has ended"):
        work.wait(timedelta(seconds=20))
    assert not work.is_completed()
    with pytest.raises(RuntimeError, match="rank 7 has ended"):
        work.wait()
    with contextlib.suppress(ProcessLookupError):
        os.kill(child.pid, signal.SIGKILL)


def test_a_rank_that_has_come_and_ended_since_is_not_missed(file):
    ended(lambda _say: come(joined(file, 1)))
    come(joined(file, 0)).wait()


def test_a_rank_that_is_there_and_does_not_come_is_waited_for_until_the_time_is_over(file):
    may_come, let_come = os.pipe()

    def other(say):
        meetings = joined(file, 1)
        say(there=True)
        os.read(may_come, 1)
        come(meetings)
        time.sleep(100)

    child = Child(other)
    while not child.last.get("there"):
        child.over()
    meetings = joined(file, 0, timeout_s=60.0)
    work = come(meetings)
    with pytest.raises(RuntimeError, match="have not come"):
        work.wait(timedelta(seconds=0.05))
    os.write(let_come, b"x")
    work.wait()
    meetings._timeout_s = 0.5
    with pytest.raises(RuntimeError, match="have not come"):
        come(meetings).wait()
    os.kill(child.pid, signal.SIGKILL)
    os.close(may_come)
    os.close(let_come)


@pytest.mark.parametrize(("count", "number"), [(3, 3), (4, 3), (0, (1 << 32)), (2, (1 << 32) + 1)])
def test_a_count_that_begins_anew_is_as_far_as_it_was(count, number):
    assert not machine_meetings._is_behind(count, number)
    assert machine_meetings._is_behind((count - 2) % (1 << 32), number)


def test_a_system_without_futexes_or_locks_is_told_of_on_all_ranks_and_nothing_stays_open(monkeypatch):
    def refused(group):
        with pytest.raises((OSError, RanksError)) as error:
            open_meetings(group, 2, PAGE, 20.0)
        return str(error.value)

    said = on_ranks(2, refused, kind=MachineRank)
    assert any("nothing is seen of the lock of rank" in one for one in said), "they are one process"
    monkeypatch.setattr(machine_meetings, "_FUTEX", -1)
    assert all("is not known" in one for one in on_ranks(2, refused, kind=MachineRank))
    assert descriptors() == []


def test_ranks_meet_on_over_the_number_behind_which_counts_begin_anew(file):
    before = (1 << 32) - 3
    memory = SharedMemory(os.dup(file), 4 * PAGE)
    for one in range(2):
        ctypes.c_uint32.from_address(memory.address + PAGE + 64 * one).value = before

    def said(own):
        meetings = joined(file, own)
        meetings.number = before
        return [meetings.meet(Channel(), 10 * number + own, "meet") for number in range(6)]

    other = Child(lambda say: say(said=said(1)))
    assert said(0) == [[10 * number, 10 * number + 1] for number in range(6)]
    while not other.over():
        time.sleep(0.005)
    assert other.last["said"] == [[10 * number, 10 * number + 1] for number in range(6)]


def test_a_fork_of_a_rank_that_ends_leaves_the_rank_there(file):
    def stays(say):
        say(stays=machine_meetings._stays(SharedMemory(os.dup(file), 4 * PAGE), 0))

    meetings = joined(file, 0)
    for _ in range(
        2
    ):  # each closes what it has inherited; the second sees what the end of the first has left
        assert ended(stays)["stays"]
    meetings.memory.close()
    assert not ended(stays)["stays"]
