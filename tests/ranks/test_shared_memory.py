"""Memory that ranks of one machine share. Trusted: the kernel. Faked: ranks are threads of this process, but
for forks and kills.
"""

import contextlib
import ctypes
import errno
import gc
import os
import resource
import signal
import socket

import pytest

import infinity
from children import Child, ended
from infinity.ranks import shared_memory
from infinity.ranks.shared_memory import PAGE, SharedMemory, make_private, open_shared
from leftovers import held, left_since
from machine_ranks import MachineRank, descriptors, mappings
from thread_ranks import on_ranks

pytestmark = pytest.mark.skipif(not shared_memory.has_nameless_memory(), reason="this system has none")


def opened(size=2, nbytes=4 * PAGE):
    """Return the memory of each rank."""
    return on_ranks(size, lambda group: open_shared(group, nbytes, 20.0), kind=MachineRank)


def write(memory, offset, values):
    ctypes.memmove(memory.address + offset, values, len(values))


def test_what_a_rank_writes_all_see_and_what_one_changes_of_that_it_sees_alone():
    first, second, third = opened(3)
    write(first, 0, b"one")
    write(second, PAGE, b"two")
    seen = [one.private(0, 2 * PAGE) for one in (first, second, third)]
    assert [bytes(one[:3] + one[PAGE : PAGE + 3]) for one in seen] == [b"onetwo"] * 3
    seen[1][0:3] = b"ONE"
    assert [bytes(one[:3]) for one in seen] == [b"one", b"ONE", b"one"]
    write(first, 0, b"new")
    assert [bytes(one[:3]) for one in seen] == [b"new", b"ONE", b"new"], "what was changed is a copy"
    assert bytes(second.private(0, PAGE)[:3]) == b"new"


def test_a_mapping_that_was_made_private_keeps_what_it_shows():
    first, second = opened()
    write(first, PAGE, b"kept")
    shown = second.private(PAGE, 2 * PAGE)
    make_private(shown)
    write(first, PAGE, b"lost")
    first.drop(PAGE, 2 * PAGE)
    assert shown[:4] == b"kept"
    assert bytes(first.private(PAGE, PAGE)[:4]) == bytes(4)


def test_memory_that_is_dropped_is_the_machines_again():
    first, _ = opened(nbytes=64 * PAGE)
    size = lambda: os.stat(descriptors()[0]).st_blocks * 512  # noqa: E731
    write(first, 0, b"x" * 32 * PAGE)
    assert size() == 32 * PAGE
    first.drop(8 * PAGE, 16 * PAGE)
    assert size() == 16 * PAGE


def test_no_core_dump_has_it_and_no_fork_inherits_it_and_nothing_has_a_name():
    before = held()
    first, second = opened()
    shown = [first.private(0, PAGE), second.private(PAGE, PAGE)]
    flags = mappings()
    assert len(flags) == 4
    assert all({"dd", "dc"} <= one for one in flags.values())
    del flags

    def look(say):
        gc.collect()
        say(mappings=len(mappings()), descriptors=len(descriptors()))

    assert dict(ended(look)) == {"mappings": 0, "descriptors": 0}
    write(first, 0, b"here")
    assert shown[0][:4] == b"here", "the child's end has unmapped nothing of its parent's"
    assert [one.stat().st_nlink for one in descriptors()] == [0, 0]
    first.close()
    second.close()
    assert not descriptors()
    del first, second
    assert len(mappings()) == 2, "what is in use stays until it is let go of"
    del shown
    assert not mappings()
    assert not left_since(before)


def test_memory_that_is_let_go_of_is_closed():
    memory = opened()
    assert len(descriptors()) == 2
    del memory
    gc.collect()
    assert not descriptors()
    assert not mappings()


def test_a_rank_that_does_not_come_is_named_and_a_stranger_gets_nothing(monkeypatch):
    monkeypatch.setattr(shared_memory, "_PEER_S", 0.05)
    memory = SharedMemory(shared_memory.make_file(PAGE), PAGE)
    name = b"test" + str(os.getpid()).encode()
    with shared_memory._listens(name, 3) as listening, socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(listening.getsockname())
        with pytest.raises(infinity.RanksError, match="rank 1, 2 did not come for the memory"):
            shared_memory._pass_on(listening, memory, {1, 2}, 0.2)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        shared_memory._received(name, 1, 0.2)


def test_other_users_are_given_nothing(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    monkeypatch.setattr(shared_memory, "_PEER_S", 0.05)
    memory = SharedMemory(shared_memory.make_file(PAGE), PAGE)
    here, there = socket.socketpair(socket.AF_UNIX)
    with here, there:
        there.sendall(bytes(8))
        assert shared_memory._answer(here, memory) == -1


def test_a_process_that_is_killed_leaves_the_memory_to_the_others_alone():
    name = b"killed" + str(os.getpid()).encode()
    memory = SharedMemory(shared_memory.make_file(PAGE), PAGE)
    with shared_memory._listens(name, 1) as listening:

        def other(say):
            mine = SharedMemory(shared_memory._received(name, 1, 10.0), PAGE)
            write(mine, 0, b"mine")
            say(wrote=True)
            os.kill(os.getpid(), signal.SIGKILL)

        child = Child(other)
        shared_memory._pass_on(listening, memory, {1}, 10.0)
        while not child.over():
            pass
    assert child.last["wrote"]
    assert bytes(memory.private(0, PAGE)[:4]) == b"mine"
    assert len(descriptors()) == 1


def test_a_limit_of_file_sizes_is_told_with_both_sizes_and_the_cure():
    def work(say):
        resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE, PAGE))
        try:
            shared_memory.make_file(1 << 20)
        except OSError as error:
            say(number=error.errno, told=str(error))

    last = ended(work)
    assert last["number"] == errno.EFBIG
    assert "memory that ranks share, of 1.0 MiB" in last["told"]
    assert f"RLIMIT_FSIZE={PAGE} (ulimit -f) limits files of this process" in last["told"]
    assert "Config(shared_memory=False) needs none" in last["told"]
