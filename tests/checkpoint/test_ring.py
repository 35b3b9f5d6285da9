"""Weights to another process of this machine. Trusted: torch's state_dict, and the kernel's count of the
memory of a process. Real processes end, are killed and do not come; another user is faked, by what the
kernel says of one.
"""

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
import models
from children import Child, ended
from infinity.checkpoint import ring
from infinity.checkpoint.ring import SLOT_NBYTES, SLOTS, receives_from, sends_to
from infinity.ranks.shared_memory import has_nameless_memory
from infinity.tensors import digest
from leftovers import held, left_since

pytestmark = [
    pytest.mark.multi,
    pytest.mark.skipif(not has_nameless_memory(), reason="this system has no files in memory"),
]
RING = SLOTS * SLOT_NBYTES
WAITS_S = 60.0
LARGE = torch.arange(RING // 4 + 1000, dtype=torch.int32)  # it takes all slots, and more


@pytest.fixture
def name():
    return f"test-{os.getpid()}-{time.monotonic_ns()}"


def over(child):
    """Wait for a child's end; what it said, by key."""
    while not child.over():
        time.sleep(0.005)
    return child.last


def sender(name, tensors, then=lambda: None):
    """Return a child that sends tensors."""

    def work(_say):
        with sends_to(name, WAITS_S) as send:
            for what, values in tensors:
                send(what, values)
            then()

    return Child(work)


def receiver(name, streams=1, each=lambda: None):
    """Return a child that says, of each stream, the digests of what has come."""

    def work(say):
        torch.set_num_threads(1)
        for number in range(streams):
            found = {}
            for what, values in infinity.receive_weights(name, timeout_s=WAITS_S):
                found[what] = [digest(values), str(values.dtype), [*values.shape]]
                say(came=what)
                each()
            say(**{f"stream {number}": found})

    return Child(work)


def said_of(tensors):
    return {what: [digest(values), str(values.dtype), [*values.shape]] for what, values in tensors.items()}


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def listed(name):
    """Return the sockets of this machine that have the name."""
    return [line for line in Path("/proc/net/unix").read_text().splitlines() if name in line]


@contextlib.contextmanager
def nothing_left(name):
    before = held()
    yield
    assert not left_since(before)
    assert not listed(name)


def test_tensors_arrive_with_their_names_types_shapes_and_bits(name):
    draw = torch.Generator().manual_seed(5)
    tensors = {
        "layers.0.weight": torch.randn(300, 70, generator=draw).bfloat16(),
        "larger than the ring": LARGE,
        "of a slot": torch.randint(0, 255, (SLOT_NBYTES,), generator=draw, dtype=torch.uint8),
        "a byte more": torch.randint(0, 255, (SLOT_NBYTES + 1,), generator=draw, dtype=torch.uint8),
        "half": torch.randn(3, generator=draw).half(),
        "mask": torch.rand(4, 5, generator=draw) > 0.5,
        "of one": torch.tensor(2.5, dtype=torch.float64),
        "empty, größer": torch.empty(0, 3),
        "transposed": torch.randn(6, 4, generator=draw).t(),
        "fp8": torch.randn(40, generator=draw).to(torch.float8_e4m3fn),
    }
    with nothing_left(name):
        child = sender(name, tensors.items())
        found = dict(receives_from(name, WAITS_S))
        over(child)
    assert [*found] == [*tensors]
    assert child.status == 0
    for what, values in tensors.items():
        assert (found[what].dtype, found[what].shape) == (values.dtype, values.shape)
        assert digest(found[what]) == digest(values), what


@pytest.mark.disk
def test_after_each_update_another_process_receives_all_weights_in_two_bytes_a_parameter(folder, name):
    child = receiver(name, streams=3)
    torch.manual_seed(3)
    with infinity.Init(nvme=str(folder), host_memory="2MiB"):
        model = models.MODELS["llama"]()
    model.register_buffer("seen", torch.arange(3))
    optimizer, ids = infinity.AdamW(model.parameters(), lr=1e-2), models.batch(0, rows=1, length=8)
    sent = []
    for _ in range(3):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        nbytes = infinity.stream_weights(model, name, timeout_s=WAITS_S)
        assert nbytes == 2 * sum(one.numel() for one in model.parameters()) + 3 * 8
        sent.append(said_of(model.state_dict()))
    found = over(child)
    assert sent[0] != sent[1] != sent[2]
    assert [found[f"stream {number}"] for number in range(3)] == sent
    assert not listed(name)


@contextlib.contextmanager
def peak(say):
    """Say by how many bytes this process's memory has grown at most."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _most_nbytes()
    yield
    say(grown=_most_nbytes() - before)


def _most_nbytes():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10


@pytest.mark.disk
def test_neither_process_takes_memory_for_more_than_a_tensor_and_the_ring(folder, name):
    count, size = 24, 1024

    def receives(say):
        torch.set_num_threads(1)
        for _ in range(2):  # what is loaded once is there the second time
            with peak(say):
                say(came=sum(1 for _ in infinity.receive_weights(name, timeout_s=WAITS_S)))

    def sends(say):
        torch.set_num_threads(1)
        with infinity.Init(nvme=str(folder), host_memory="4MiB"):
            model = nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(count)))
        for _ in range(2):
            with peak(say):
                infinity.stream_weights(model, name, timeout_s=WAITS_S)

    children = [Child(receives), Child(sends)]
    found = [over(one) for one in children]
    most = 2 * 2 * size * size + RING + (2 << 20)  # the receiver's loop lets go of a tensor for the next one
    assert found[0]["came"] == count
    assert most < count * 2 * size * size / 2
    for one in found:
        assert one["grown"] < most


@pytest.mark.disk
def test_a_receiver_that_is_killed_is_an_error_and_the_next_one_receives_all(folder, name):
    with infinity.Init(nvme=str(folder), host_memory="2MiB"):
        model = models.MODELS["llama"]()
    child = receiver(name, each=killed)
    with (
        nothing_left(name),
        pytest.raises(
            infinity.RanksError, match=rf"process that receives, {child.pid}, has ended.*at tensor"
        ),
    ):
        infinity.stream_weights(model, name, timeout_s=WAITS_S)
    assert over(child)["came"] == next(iter(model.state_dict()))
    child = receiver(name)
    infinity.stream_weights(model, name, timeout_s=WAITS_S)
    assert over(child)["stream 0"] == said_of(model.state_dict())


@pytest.mark.parametrize("after", [[], [("first", torch.ones(3))], [("first", LARGE), ("second", LARGE)]])
def test_a_sender_that_is_killed_is_an_error_and_leaves_nothing(name, after):
    with nothing_left(name):
        child, came = sender(name, after, killed), {}
        says = rf"process that sends, {child.pid}, has ended, or has closed the stream, "
        says += rf"at tensor {len(after)}, '{after[-1][0]}'" if after else "before the first tensor"
        with pytest.raises(infinity.RanksError, match=says):
            for what, values in infinity.receive_weights(name, timeout_s=WAITS_S):
                came[what] = values.numel()
        over(child)
        assert came == {what: values.numel() for what, values in after}
        assert child.status == signal.SIGKILL


def test_a_fork_of_a_process_that_is_killed_does_not_keep_the_stream_open(name, tmp_path):
    file = tmp_path / "pid"

    def forked():
        file.write_text(str(Child(lambda _say: time.sleep(WAITS_S)).pid))
        killed()

    child, began = sender(name, [("first", torch.ones(3))], forked), time.monotonic()
    try:
        with pytest.raises(infinity.RanksError, match="has ended"):
            list(infinity.receive_weights(name, timeout_s=WAITS_S))
        assert time.monotonic() - began < WAITS_S / 2
    finally:
        over(child)
        os.kill(int(file.read_text()), signal.SIGKILL)


@pytest.mark.parametrize("side", ["sends", "receives"])
def test_a_process_that_does_not_come_is_an_error_with_the_seconds_and_the_cure(name, side):
    began = time.monotonic()
    other = "receive_weights" if side == "sends" else "stream_weights"
    with (
        nothing_left(name),
        pytest.raises(
            infinity.RanksError, match=rf"no process has called {other}\(.* for 0\.3 s.*timeout_s="
        ),
    ):
        if side == "sends":
            with sends_to(name, 0.3):
                pass
        else:
            next(infinity.receive_weights(name, timeout_s=0.3))
    assert time.monotonic() - began < WAITS_S / 2


def test_a_receiver_that_takes_nothing_more_is_an_error_with_the_seconds_and_the_tensor(name):
    child = receiver(name, each=lambda: time.sleep(WAITS_S))
    try:
        with (
            pytest.raises(infinity.RanksError, match=r"has said nothing for 0\.5 s, at tensor 2, 'second'"),
            sends_to(name, 0.5) as send,
        ):
            send("first", torch.ones(3))
            send("second", LARGE)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        over(child)


def test_a_sender_that_sends_nothing_more_is_an_error_with_the_seconds(name):
    child = sender(name, [("first", torch.ones(3))], lambda: time.sleep(WAITS_S))
    stream = infinity.receive_weights(name, timeout_s=0.5)
    try:
        assert next(stream)[0] == "first"
        with pytest.raises(infinity.RanksError, match=r"has said nothing for 0\.5 s, at tensor 1, 'first'"):
            next(stream)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        over(child)


def test_the_receiver_is_told_what_the_sender_has_failed_of_behind_all_that_was_sent(name):
    def fails():
        raise OSError("planted")

    child, came = sender(name, [("first", torch.ones(3)), ("second", LARGE)], fails), []
    with pytest.raises(infinity.RanksError, match=r"at tensor 2, 'second'.* has failed: OSError: planted"):
        for what, _ in infinity.receive_weights(name, timeout_s=WAITS_S):
            came.append(what)
    assert came == ["first", "second"]
    assert over(child)["crash"] == "OSError: planted"


def test_a_receiver_that_stops_before_the_end_is_an_error_of_the_sender(name):
    child = sender(name, [("first", torch.ones(3)), ("second", LARGE)])
    stream = infinity.receive_weights(name, timeout_s=WAITS_S)
    next(stream)
    stream.close()
    assert "has closed the stream, at tensor 2, 'second'" in over(child)["crash"]


def test_a_name_is_of_one_sender_and_one_receiver_at_a_time(name):
    child = sender(name, [("first", torch.ones(3))])
    stream = infinity.receive_weights(name, timeout_s=WAITS_S)
    assert next(stream)[0] == "first"  # so the other one is connected
    with (
        pytest.raises(infinity.RanksError, match=r"another process sends there.*the others to None"),
        sends_to(name, 1.0),
    ):
        pass
    assert not list(stream)
    over(child)
    child = Child(lambda _say: list(infinity.receive_weights(name, timeout_s=WAITS_S)))
    while not listed(name):
        time.sleep(0.005)
    with pytest.raises(infinity.RanksError, match="another process receives there"):
        next(infinity.receive_weights(name, timeout_s=1.0))
    with sends_to(name, WAITS_S):
        pass
    over(child)
    assert child.status == 0


def test_processes_of_other_users_are_sent_nothing_and_nothing_is_taken_from_them(name, monkeypatch):
    child, real = receiver(name), ring.process_of
    foreign = lambda peer: (real(peer)[0], os.geteuid() + 1)  # noqa: E731
    with monkeypatch.context() as patched:
        patched.setattr(ring, "process_of", foreign)
        with (
            pytest.raises(
                infinity.RanksError, match=rf"process {child.pid} of user {os.geteuid() + 1} receives"
            ),
            sends_to(name, WAITS_S),
        ):
            pass
    assert "before the first tensor" in over(child)["crash"]
    child = sender(name, [("first", torch.ones(3))])
    monkeypatch.setattr(ring, "process_of", foreign)
    with pytest.raises(infinity.RanksError, match="no process has called stream_weights"):
        next(infinity.receive_weights(name, timeout_s=1.0))
    assert "has ended, or has closed the stream" in over(child)["crash"]


@pytest.mark.parametrize("wrong", ["", "n" * 65, "a\0b"])
def test_what_cannot_be_a_name_or_a_time_is_refused(wrong):
    with pytest.raises(ValueError, match="expected a name of 1 to 64 bytes"):
        infinity.receive_weights(wrong)
    for seconds in (0.0, -1.0, float("inf")):
        with pytest.raises(ValueError, match="expected a number of seconds above 0"):
            infinity.receive_weights("name", timeout_s=seconds)


def test_a_system_without_files_in_memory_and_another_release_are_named(name, monkeypatch):
    def other_release(say):
        ring._PROTOCOL = 0
        with sends_to(name, WAITS_S):
            pass
        say(sent=True)

    child = Child(other_release)
    with pytest.raises(infinity.RanksError, match="another release of Infinity"):
        next(infinity.receive_weights(name, timeout_s=WAITS_S))
    over(child)
    monkeypatch.setattr(ring, "has_nameless_memory", lambda: False)
    with pytest.raises(infinity.UnsupportedError, match=r"memfd_create.*Give stream_weights a function"):
        next(infinity.receive_weights(name))


def test_no_fork_has_the_ring(name):
    child = sender(name, [("first", torch.ones(3))])
    stream = infinity.receive_weights(name, timeout_s=WAITS_S)
    next(stream)

    def look(say):
        say(maps="memfd:infinity" in Path("/proc/self/maps").read_text())

    assert "memfd:infinity" in Path("/proc/self/maps").read_text()
    assert not ended(look)["maps"]
    assert not list(stream)
    over(child)
