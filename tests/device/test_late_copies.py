"""Training through the CUDA device with streams that copy as late as their events allow, beside training in
memory. Trusted: the reference recipe, and LateStreams, which stands in for torch.cuda.
"""

import ctypes
import threading
import time
import weakref

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import infinity
import models
from covers import matrix
from infinity.engine.engine import engine_of_model
from infinity.lane import lane as lanes
from infinity.lane.lane import StreamLane
from infinity.planning.queue import PassProgress, Queue
from infinity.planning.residence import Residence
from streams import LateStreams, compute_late

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("impatient", "repeatable")]

SETTINGS = {"lr": 1e-2, "weight_decay": 0.1}


@pytest.fixture
def late(monkeypatch):
    streams = compute_late(monkeypatch, 256 << 10)  # twice a device_memory in which few records live
    # These copies end no sooner than the lane waits for them: what it waits before that is nothing but time.
    monkeypatch.setattr(lanes, "_PATIENCE_S", 0.005)
    return streams


@pytest.mark.parametrize(
    *matrix(
        together=1,
        way={
            "backward": ("backward", 1, {}),
            "clipped": ("forward", 1, {"max_norm": 0.5}),
            "accumulated": ("forward", 2, {}),
        },
        memory=["128KiB", "64MiB"],
    )
)
def test_nothing_is_read_or_used_again_before_its_copy_is_over(folder, late, memory, way):
    update, accumulate, settings = way
    init = {"nvme": folder, "host_memory": memory}
    ways = {"update": update, "accumulate": accumulate, "scheduled": True}
    models.compare("llama", {**SETTINGS, **settings}, init, steps=3, **ways)
    assert late.copies > 0


def test_updates_that_are_made_before_they_are_decided_change_no_bit(folder, late):
    init = {"nvme": folder, "host_memory": "128KiB"}
    settings = {**SETTINGS, "max_norm": 100.0}
    model, made_first, _ = models.offloaded("llama", settings, init)
    with pytest.warns(UserWarning, match="supersedes"):
        optimizer = infinity.AdamW(model.parameters(), **settings, speculate=True)
    plain, reference, _ = models.in_memory("llama", settings, init)
    reference.param_groups[0]["lr"] = settings["lr"]
    assert models.train(model, optimizer, 3) == models.train(plain, reference, 3)
    models.assert_same_state(model, optimizer, plain, reference)
    assert made_first.superseded
    counts = engine_of_model(model).speculation.counts
    assert counts["confirmed"] > 10, counts
    assert late.copies > 0


@pytest.mark.parametrize(
    ("memory", "update"), [("128KiB", "backward"), ("64MiB", "backward"), ("64MiB", "forward")]
)
def test_downloads_allocate_nothing_in_the_steady_state_however_slow_the_updates_get(
    folder, late, monkeypatch, memory, update
):
    init = {"nvme": folder, "host_memory": memory}
    model, optimizer, _ = models.offloaded("llama", SETTINGS, init, update=update)
    models.train(model, optimizer, 2)
    memory = engine_of_model(model).device.memory
    made = memory.made
    work = StreamLane._work
    monkeypatch.setattr(StreamLane, "_work", lambda lane, tile: (time.sleep(0.004), work(lane, tile)))
    models.train(model, optimizer, 2, first=2)
    assert memory.made == made > 0


class Checkpointed(torch.nn.Module):
    """Layers behind checkpoints, whose copies are over before the next begins."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(12))

    def forward(self, hidden):
        memory = []
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False)
            memory.append(StorageWeakRef(hidden.untyped_storage()))
            engine_of_model(self).device.synchronize()
        return hidden, sum(not one.expired() for one in memory)


@pytest.mark.parametrize(("mode", "there"), [(None, 12), ("host", 3)])
def test_inputs_of_checkpoints_that_were_copied_are_gone_when_the_forward_ends(late, mode, there):
    late.free = 64 << 20
    with infinity.Init(nvme=None, host_memory="64MiB", offload_activations=mode):
        model = Checkpointed()
    hidden, alive = model(torch.zeros(256, 64, dtype=torch.bfloat16))
    assert alive == there
    assert late.copies > 0
    hidden.sum().backward()


class Seen(TorchDispatchMode):
    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


class Asked(TorchFunctionMode):
    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(function.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Seen, Asked])
def test_modes_of_the_thread_that_computes_see_no_copy_of_weights(late, monkeypatch, mode):
    def copy(streams, stream, to, source):
        streams.copies += 1
        to.copy_(source)

    monkeypatch.setattr(LateStreams, "copy", copy)
    with infinity.Init(nvme=None, host_memory="64MiB"):
        model = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(24)])
    seen = []
    with torch.no_grad(), mode(seen):
        model(torch.zeros(1, 128, dtype=torch.bfloat16))
    assert late.copies > 0
    assert "copy_" not in seen
    assert "linear" in seen or "addmm" in seen


def interrupted_once(monkeypatch, owner, name, *, after):
    """Have a Ctrl-C come once, when `owner.name` runs in the main thread and the list that is returned is not
    empty, which it is then.
    """
    original, armed = getattr(owner, name), []

    def call(*args, **named):
        here = armed and threading.current_thread() is threading.main_thread()
        if here and not after:
            armed.clear()
            raise KeyboardInterrupt
        value = original(*args, **named)
        if here and after:
            armed.clear()
            raise KeyboardInterrupt
        return value

    monkeypatch.setattr(owner, name, call)
    return armed


@pytest.mark.parametrize(
    *matrix(
        together=1,
        memory=["128KiB", "64MiB"],
        at={
            "Residence.come": (Residence, "come", False),  # copies are begun, and nobody knows of the fetch
            "PassProgress.begin": (PassProgress, "begin", False),  # begun, and the lane does not know of them
            "LateStreams.copy": (LateStreams, "copy", True),  # one is queued, and nobody knows of it
            "Queue.begin": (Queue, "begin", True),
        },
    )
)
def test_after_an_interrupt_no_copy_goes_to_memory_that_was_freed(folder, late, monkeypatch, memory, at):
    owner, name, after = at
    init = {"nvme": folder, "host_memory": memory}
    *ours, _ = models.offloaded("llama", SETTINGS, init)
    expected, *plain = models.trained_in_memory("llama", tuple(SETTINGS.items()), steps=5)
    device, freed, copy = engine_of_model(ours[0]).device, [], LateStreams.copy

    def watched(streams, stream, to, source):
        if stream is not device.memory.up or to._base is None:
            copy(streams, stream, to, source)
            return
        memory, arguments = weakref.ref(to._base), (to.data_ptr(), source.data_ptr(), to.nbytes)
        stream.put(lambda: freed.append(True) if memory() is None else ctypes.memmove(*arguments))

    monkeypatch.setattr(LateStreams, "copy", watched)
    assert models.train(*ours, 2) == expected[:2]
    armed = interrupted_once(monkeypatch, owner, name, after=after)
    ids, interrupts = models.batch(200), 0
    for _ in range(3):
        armed.append(True)
        try:
            ours[0](input_ids=ids, labels=ids)
        except KeyboardInterrupt:
            interrupts += 1
    armed.clear()
    assert interrupts or memory == "128KiB"  # where the lane's thread may make all copies
    assert models.train(*ours, 3, first=2) == expected[2:]
    models.assert_same_state(*ours, *plain)
    assert not freed
