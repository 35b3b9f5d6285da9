"""Requests that others follow: submitted together, and each as safe as alone.

Trusts the kernel, and that Python can run a function at every line. Nothing is faked but a disk that hangs.
"""

import gc
import os
import sys
import threading
import time
import weakref

import pytest

from aio_cases import PIECE, open_or_skip, random_memory
from children import ended
from infinity import aio
from infinity.aio import batch as of_batch
from infinity.aio import faults

pytestmark = pytest.mark.disk


class Owner:
    """Something whose end can be observed."""


class Counted:
    """A C library that knows how often each of its functions was called."""

    def __init__(self, library):
        self.library, self.calls = library, []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append(name)
            return getattr(self.library, name)(*arguments)

        return call


def begin(engine, file, memory, count, *, last, owner=None, write=True):
    """Begin `count` requests of one piece each, each followed by the next; the last by none, if `last`."""
    start = engine.write if write else engine.read
    return [
        start(
            *(file, number * PIECE, memory.address + number * PIECE, PIECE),
            owner=owner or memory,
            what=f"piece {number}",
            more=number < count - 1 or not last,
        )
        for number in range(count)
    ]


def until(condition):
    end_s = time.monotonic() + 30
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.001)
    return condition()


def test_a_batch_is_one_call_and_what_is_over_is_waited_for_without_any(engine, file, monkeypatch):
    memory, counted = random_memory(4 * PIECE), Counted(engine.library)
    monkeypatch.setattr(engine, "library", counted)
    begun = begin(engine, file, memory, 3, last=True, write=False)
    begun += begin(engine, file, memory, 4, last=True)
    assert counted.calls.count("aio_submit") == 2
    assert until(lambda: all(one.done for one in begun))
    counted.calls.clear()
    for one in begun:
        one.wait()
    assert counted.calls == []
    monkeypatch.setattr(of_batch, "_LOOKS_IN_ORDER", False)  # a processor on which C has to ask
    begun = begin(engine, file, memory, 4, last=True)
    assert until(lambda: all(one.done for one in begun))
    assert "aio_done" in counted.calls


@pytest.mark.parametrize("ask", [lambda one: one.done, lambda one: one.began_s > 0 and one.done])
def test_a_look_at_a_request_that_the_last_has_not_followed_begins_it(engine, file, ask):
    memory, read = random_memory(3 * PIECE), aio.AlignedMemory(3 * PIECE)
    begun = begin(engine, file, memory, 3, last=False)
    assert until(lambda: ask(begun[1]))
    engine.drain()
    for one in begin(engine, file, read, 3, last=True, write=False):
        one.wait()
    assert read.view == memory.view


@pytest.mark.parametrize(
    "end",
    [
        lambda engine, file, other: engine.drain(),
        lambda engine, file, other: engine.statistics(),
        lambda engine, file, other: engine.wait_any([other]),
        lambda engine, file, other: file.close(),
        lambda engine, file, other: engine.close(),
        lambda engine, file, other: repr(engine),
    ],
    ids=["drain", "statistics", "wait_any", "file.close", "close", "repr"],
)
@pytest.mark.parametrize("kind", aio.KINDS)
def test_whoever_waits_in_another_thread_begins_what_was_gathered(folder, kind, end):
    memory = random_memory(2 * PIECE)
    with open_or_skip(folder, kind) as engine:
        file = engine.create_named(folder, "written")
        file.allocate(0, 2 * PIECE)
        other = engine.read(file, 0, aio.AlignedMemory(PIECE).address, 0)
        begun = begin(engine, file, memory, 2, last=False)
        thread = threading.Thread(target=end, args=(engine, file, other))
        thread.start()
        thread.join()
        assert until(lambda: all(one._request.state == 2 for one in begun))
        for one in begun:
            one.wait()
    assert (folder / "written").read_bytes() == memory.view


def test_a_long_row_begins_before_its_last_is_there(engine, file):
    memory = random_memory(40 * PIECE)
    begun = begin(engine, file, memory, 40, last=False)
    assert until(lambda: begun[0]._request.state == 2)
    assert begun[-1]._request.state == 0
    begun[-1].wait()
    engine.drain()
    assert all(one.done for one in begun)


def test_owners_are_kept_until_all_of_a_batch_have_ended(engine, file):
    memory = random_memory(3 * PIECE)
    with faults.held(engine):
        for last in (True, False):  # of the second none is submitted yet
            owners = [Owner() for _ in range(3)]
            ends = [weakref.ref(owner) for owner in owners]
            for number, owner in enumerate(owners):
                engine.write(
                    *(file, number * PIECE, memory.address + number * PIECE, PIECE),
                    owner=owner,
                    more=number < 2 or not last,
                )
            del owners, owner
            gc.collect()
            assert all(end() is not None for end in ends)
    engine.drain()
    assert len(engine._in_flight) == 0
    assert all(end() is None for end in ends)


def test_a_completion_that_is_kept_keeps_no_memory_once_all_of_its_batch_are_over(engine, file):
    memory, owner = random_memory(3 * PIECE), Owner()
    end = weakref.ref(owner)
    begun = begin(engine, file, memory, 3, last=True, owner=owner)
    del owner
    for one in begun:
        one.wait()
    assert end() is None
    assert all(one.done for one in begun)


def test_one_that_fails_fails_alone(engine, file):
    memory = random_memory(2 * PIECE)
    good = begin(engine, file, memory, 2, last=False)
    bad = engine.write(file, 0, aio.BLOCK, PIECE, what="nobody's memory", more=True)
    with pytest.raises(ValueError, match="out of range"):
        engine.write(file, -1, memory.address, PIECE)
    for one in good:
        one.wait()
    for _ in range(2):
        with pytest.raises(aio.IoError, match="nobody's memory: Bad address"):
            bad.wait()


def test_those_that_an_engine_refuses_are_over_and_say_why(engine, file):
    memory, owner = random_memory(3 * PIECE), Owner()
    end = weakref.ref(owner)
    begun = begin(engine, file, memory, 2, last=False, owner=owner)
    engine.library.aio_stop(engine.pointer)  # as another thread does that closes it
    with pytest.raises(aio.EngineClosedError):
        engine.write(file, 0, memory.address, PIECE, owner=owner)
    del owner
    assert end() is None
    for one in begun:
        assert one.done
        with pytest.raises(aio.EngineClosedError):
            one.wait()
    alone = engine.read(file, 0, memory.address, PIECE, owner=memory, more=True)
    with pytest.raises(aio.EngineClosedError):
        alone.wait()


@pytest.mark.parametrize("where", ["write", "done", "wait"])
def test_ctrl_c_at_any_line_loses_no_request_and_frees_no_memory(engine, file, where):
    """Neither one that is gathered nor one that is being submitted."""
    lines = 1
    while _interrupted(engine, file, where, lines):
        lines += 1
    assert lines > 10


def _interrupted(engine, file, where, lines):
    """Interrupt the last of three requests, or who asks for one, at the nth line; whether there was one."""
    memory, read = random_memory(3 * PIECE, seed=lines), aio.AlignedMemory(3 * PIECE)
    owner = Owner()
    end = weakref.ref(owner)
    begun = begin(engine, file, memory, 2, last=False, owner=owner)
    left = lines

    def trace(frame, event, _):
        nonlocal left
        if os.sep + "aio" + os.sep not in frame.f_code.co_filename or "test_" in frame.f_code.co_filename:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    calls = {
        "write": lambda: begun.append(
            engine.write(file, 2 * PIECE, memory.address + 2 * PIECE, PIECE, owner=owner)
        ),
        "done": lambda: begun[1].done,
        "wait": begun[1].wait,
    }
    with faults.held(engine):
        if where == "wait":
            engine.library.aio_hold(engine.pointer, 0)
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            calls[where]()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        calls = owner = None
        gc.collect()
        flying = [one for one in begun if one._request.state == 1]
        assert end() is not None or not flying or where == "wait"
    for one in begun:
        one.wait(30)
    engine.drain()
    assert end() is None
    assert len(engine._in_flight) == 0
    reads = begin(engine, file, read, len(begun), last=True, write=False)
    for one in reads:
        one.wait()
    assert read.view[: len(begun) * PIECE] == memory.view[: len(begun) * PIECE]
    return left <= 0


def test_an_owner_that_is_let_go_of_in_between_may_use_the_engine(engine, file):
    """Its finalizer runs wherever the garbage collector does, here at every line."""
    memory, places = random_memory(4 * PIECE), []

    class Chained:
        def __del__(self):
            mine = aio.AlignedMemory(PIECE)
            places.append(engine.read(file, 0, mine.address, PIECE, owner=mine))
            places[-1].wait()

    def trace(frame, event, _):
        if event == "line" and frame.f_code.co_name in ("_begin", "submit", "release"):
            sys.settrace(None)
            Chained()
            sys.settrace(trace)
        return trace

    sys.settrace(trace)
    try:
        begun = begin(engine, file, memory, 4, last=True)
    finally:
        sys.settrace(None)
    for one in (*begun, *places):
        one.wait(30)
    assert len(places) > 20
    engine.drain()
    read = aio.AlignedMemory(4 * PIECE)
    for one in begin(engine, file, read, 4, last=True, write=False):
        one.wait()
    assert read.view == memory.view


def test_many_threads_gather_in_one_batch_and_each_has_its_bytes(engine, file):
    wrong = []

    def work(number):
        written, read = random_memory(4 * PIECE, number), aio.AlignedMemory(4 * PIECE)
        at = number * 4 * PIECE
        for turn in range(30):
            for start, memory in ((engine.write, written), (engine.read, read)):
                begun = [
                    start(
                        file, at + p, memory.address + p, PIECE, owner=memory, more=p < (3 - turn % 2) * PIECE
                    )
                    for p in range(0, 4 * PIECE, PIECE)
                ]
                for one in begun:
                    one.wait()
            if read.view != written.view:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert engine.statistics().failed == 0


def test_a_child_forked_in_between_neither_hangs_nor_begins_what_its_parent_gathered(engine, file):
    memory = random_memory(2 * PIECE)
    before = engine.statistics().requests
    begun = begin(engine, file, memory, 2, last=False)

    def asks(say):
        say(done=[one.done for one in begun])
        for attempt in (begun[0].wait, lambda: engine.read(file, 0, memory.address, PIECE, more=True)):
            with pytest.raises(aio.ForkedError):
                attempt()
        say(refused=True)

    said = ended(asks)
    assert said["done"] == [False, False]
    assert said["refused"]
    assert engine.statistics().requests == before + 2
    for one in begun:
        one.wait()
