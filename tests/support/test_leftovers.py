"""Leftovers: what is new is named, what is gone is no matter."""

import os
import threading

from leftovers import held, left_since


def test_a_new_descriptor_and_a_new_thread_are_named(tmp_path):
    before, done = held(), threading.Event()
    thread = threading.Thread(target=done.wait, name="waits")
    thread.start()
    with (tmp_path / "open").open("w") as file:
        assert left_since(before) == [f"descriptor {file.fileno()}: {tmp_path / 'open'}", "thread waits"]
    done.set()
    thread.join()
    assert left_since(before) == []


def test_what_is_closed_meanwhile_hides_no_leak(tmp_path):
    closed = (tmp_path / "closed").open("w")
    before = held()
    closed.close()
    leak = os.open(tmp_path / "leak", os.O_CREAT | os.O_WRONLY)
    assert left_since(before) == [f"descriptor {leak}: {tmp_path / 'leak'}"]
    os.close(leak)
    assert left_since(before) == []
