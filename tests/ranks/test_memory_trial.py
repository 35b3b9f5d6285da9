"""What keeps ranks from having memory in common, found before anything depends on it. Trusted: the kernel.
Faked: ranks are threads of this process, and what the system refuses is planted.
"""

import errno
import os
import resource
import socket

import pytest

from infinity.ranks import memory_trial, shared_memory
from infinity.ranks.memory_trial import why_not_by_itself, why_not_together, why_too_large
from infinity.ranks.shared_memory import PAGE, SharedMemory, why_not_here
from leftovers import held, left_since
from machine_ranks import MachineRank, descriptors, mappings
from thread_ranks import on_ranks

pytestmark = pytest.mark.skipif(not shared_memory.has_nameless_memory(), reason="this system has none")


def tried(size=3):
    """Return what each rank says of a trial, and see that nothing is left of it."""
    before = held()
    said = on_ranks(size, lambda group: why_not_together(group, 600.0), kind=MachineRank)
    assert (descriptors(), mappings(), left_since(before)) == ([], {}, [])
    return said


def test_where_nothing_is_refused_there_is_no_reason_and_nothing_is_left():
    assert tried() == [""] * 3


def forbidden(*_, **__):
    raise PermissionError(errno.EPERM, "planted")


def on_last(call):
    """Refuse a call's second use, and all later ones: those of one rank, or of some."""
    uses = []

    def refused(*args, **more):
        uses.append(True)
        return call(*args, **more) if len(uses) < 2 else forbidden()

    return refused


FAULTS = {
    "files in memory": lambda patch: patch.setattr(shared_memory, "make_file", forbidden),
    "sockets": lambda patch: patch.setattr(shared_memory, "_listens", forbidden),
    "connecting, of one rank": lambda patch: patch.setattr(
        shared_memory, "_received", on_last(shared_memory._received)
    ),
    "mappings, of one rank": lambda patch: patch.setattr(
        SharedMemory, "private", on_last(SharedMemory.private)
    ),
    "private copies": lambda patch: patch.setattr(memory_trial, "make_private", forbidden),
    "giving back": lambda patch: patch.setattr(SharedMemory, "drop", forbidden),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_one_rank_or_all_are_refused_is_the_reason_on_all(fault, monkeypatch):
    monkeypatch.setattr(memory_trial, "_TRIAL_S", 0.3)  # for which the first rank waits in vain
    FAULTS[fault](monkeypatch)
    said = tried()
    assert said == [said[0]] * 3
    assert "planted" in said[0] or "did not come for the memory" in said[0] or "another rank" in said[0]


def test_memory_that_shows_nothing_of_what_others_write_is_none(monkeypatch):
    monkeypatch.setattr(SharedMemory, "private", lambda self, _offset, nbytes, **_: bytearray(nbytes))
    assert tried(2) == ["what rank 0 writes is not seen by rank 0"] * 2


def test_memory_that_is_given_back_and_stays_is_none(monkeypatch):
    monkeypatch.setattr(SharedMemory, "drop", lambda *_: None)
    assert tried(2) == ["what is given back stays"] * 2


def test_here_nothing_is_refused_and_what_would_be_is_told(monkeypatch):
    assert why_not_here() == ""
    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "bind", forbidden)
        assert why_not_here() == "PermissionError: [Errno 1] planted"
    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", forbidden)
        assert "makes no files in memory" in why_not_here()
    with monkeypatch.context() as patch:
        patch.setattr(SharedMemory, "private", lambda self, _offset, nbytes: bytes(nbytes))
        assert why_not_here() == "what one process writes another does not see"
    assert not descriptors()


# What grows with the model


def limited(monkeypatch, which, nbytes):
    limits = {which: (nbytes, resource.RLIM_INFINITY)}
    endless = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda one: limits.get(one, endless))


def test_without_limits_no_model_is_too_large_and_nothing_speaks_against_it():
    assert why_not_by_itself() == ""
    assert why_too_large(1 << 40, 1000) == ""


def test_limits_that_memory_in_common_meets_first_speak_against_it(monkeypatch, tmp_path):
    for which, told in (
        (resource.RLIMIT_AS, "RLIMIT_AS=1099511627776 (ulimit -v): "),
        (resource.RLIMIT_FSIZE, "RLIMIT_FSIZE=1099511627776 (ulimit -f)"),
    ):
        with monkeypatch.context() as patch:
            limited(patch, which, 1 << 40)
            assert why_not_by_itself().startswith(told)
            assert why_too_large(PAGE, 1) == why_not_by_itself()
    mode = tmp_path / "overcommit_memory"
    monkeypatch.setattr(memory_trial, "_OVERCOMMIT", mode)
    assert why_not_by_itself() == "", "a system without the file"
    for number, told in (("0", ""), ("1", ""), ("2", "vm.overcommit_memory=2: ")):
        mode.write_text(f"{number}\n")
        assert why_not_by_itself().startswith(told)
        assert bool(why_not_by_itself()) == bool(told)


def test_a_limit_of_private_memory_has_room_for_half_or_is_told(monkeypatch):
    private = memory_trial._private_nbytes()
    limited(monkeypatch, resource.RLIMIT_DATA, private + (1 << 30))
    assert why_too_large(1 << 30, 1) == ""
    assert why_too_large(3 << 30, 1).startswith(f"RLIMIT_DATA={private + (1 << 30)} (ulimit -d): ")


def test_more_layers_than_half_of_the_mappings_are_told_with_the_numbers(monkeypatch, tmp_path):
    most = tmp_path / "max_map_count"
    most.write_text("200000\n")
    monkeypatch.setattr(memory_trial, "_MAP_COUNT", most)
    assert why_too_large(PAGE, 1000) == ""
    assert why_too_large(PAGE, 50_000).startswith("vm.max_map_count=200000: ")
    assert why_too_large(PAGE, 50_000).endswith("mappings are used, and there are 50000 layers")
