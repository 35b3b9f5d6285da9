"""Trusted: the kernel's lists of file descriptors, threads and mappings, and what Python's collector knows.
Faked: torch.cuda, on the paths of a device.
"""

import gc
import threading
import weakref
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.device.device import AcceleratorDevice
from infinity.engine import engine as engine_module
from infinity.engine.engine import Engine
from infinity.lane.fetch import FetchAndUpdatePass, UpdatePass
from infinity.storage.memory import Arena
from infinity.units.device_updates import DeviceUpdates
from parity import engine_in, engines, halves, total
from reach import collected, reached
from streams import LateStreams

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("impatient")]


def mappings():
    """Count the pages that are mapped as io_uring, pools and host stores map theirs."""
    return len(Path("/proc/self/maps").read_text().splitlines())


def handles():
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count(), len(engines())


def build(nvme, *, memory="16MiB"):
    with infinity.Init(nvme=nvme, host_memory=memory):
        return nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 4))


def step(model, optimizer):
    x = halves(3, 32)(torch.Generator().manual_seed(1))[0]
    total(model(x)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("on_disk", [False, True])
def test_everything_is_given_back_when_model_and_optimizer_are_gone(on_disk, folder):
    nvme = str(folder) if on_disk else None

    def cycles(number):
        for cycle in range(number):
            model = build(nvme)
            optimizer = infinity.AdamW(model.parameters())
            for _ in range(cycle % 3):
                step(model, optimizer)

    cycles(6)  # what torch and malloc keep for good
    before, mapped = handles(), mappings()
    cycles(20)
    assert collected(lambda: all(now <= was for now, was in zip(handles(), before, strict=True))), (
        handles(),
        before,
    )
    assert abs(mappings() - mapped) < 20
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("memory", ["16MiB", "640KiB"])
def test_gradients_left_on_a_model_do_not_keep_its_engine(memory, folder):
    model = build(str(folder), memory=memory)
    optimizer = infinity.AdamW(model.parameters())
    engine = weakref.ref(engine_in(model))
    for _ in range(2):
        total(model(halves(3, 32)(torch.Generator())[0])).backward()
    kept = model[0].weight.grad
    assert kept.norm() > 0
    del model, optimizer
    assert collected(lambda: engine() is None), reached()
    with pytest.raises(infinity.NotResidentError, match="after its model and optimizer are gone"):
        kept.norm()


def test_the_engine_lives_as_long_as_model_or_optimizer(folder):
    model = build(str(folder))
    optimizer = infinity.AdamW(model.parameters())
    engine = weakref.ref(engine_in(model))
    step(model, optimizer)
    del optimizer
    gc.collect()
    assert engine() is not None
    assert torch.isfinite(model(halves(3, 32)(torch.Generator())[0])).all()
    del model
    assert collected(lambda: engine() is None), reached()


def test_a_parameter_that_outlives_its_model_is_refused_clearly(folder):
    model = build(str(folder))
    parameter = model[0].weight
    del model
    gc.collect()
    assert parameter.shape == (32, 32)
    with pytest.raises(infinity.NotResidentError, match="engine is gone"):
        parameter.sum()


def test_a_graph_that_outlives_its_model_still_gives_gradients(folder):
    model = build(str(folder))
    x = halves(3, 32)(torch.Generator())[0].requires_grad_()
    loss = total(model(x))
    del model
    gc.collect()
    loss.backward()
    assert torch.isfinite(x.grad).all()


# Every path, at sizes that take it

WIDTH = 384  # a weight's gradient is lent, and the weight more than a tile
CYCLES, FIRST = 24, 8  # each ending after 0, 1 and 2 steps; the first: what torch and malloc keep for good


class Block(nn.Module):
    """A large layer and a small one, recomputed in the backward."""

    def __init__(self):
        super().__init__()
        self.wide, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x):
        return x + checkpoint(lambda y: self.norm(self.wide(y)), x, use_reentrant=False)


@dataclass
class Way:
    """How a model is kept and trained."""

    update: str = "forward"
    memory: str = "64MiB"
    nvme: bool = False
    late: bool = False
    micro: int = 1
    init: dict = field(default_factory=dict)


WAYS = {
    "in host memory": Way(),
    "in host memory, backward": Way("backward"),
    "pinned": Way(nvme=True),
    "on disk": Way(nvme=True, memory="1MiB"),
    "on disk, backward": Way("backward", nvme=True, memory="1MiB"),
    "spilled": Way(nvme=True, memory="1MiB", micro=2),
    "int8": Way(nvme=True, memory="2MiB", init={"state_dtype": "int8"}),
    "activations in host memory": Way(init={"offload_activations": "host"}),
    "activations on disk": Way("backward", nvme=True, memory="1MiB", init={"offload_activations": "nvme"}),
    "durable": Way(nvme=True, init={"durable": True}),
    "durable, on disk, backward": Way("backward", nvme=True, memory="1MiB", init={"durable": True}),
    "device": Way(late=True),
    "device, on disk": Way("backward", nvme=True, memory="1MiB", late=True),
    "device, activations": Way(late=True, init={"offload_activations": "host"}),
}


class PlantedError(Exception):
    pass


def plant(*_):
    raise PlantedError


def fails_in_forward(model, optimizer, x):
    with pytest.raises(RuntimeError, match="shape"):
        model(x[:, 1:])


def fails_in_the_middle_of_a_forward(model, optimizer, x):
    hook = model[2].register_forward_pre_hook(plant)
    with pytest.raises(PlantedError):
        model(x)
    hook.remove()


def fails_in_backward(model, optimizer, x):
    model[1].register_full_backward_hook(plant)
    with pytest.raises(PlantedError):
        total(model(x)).backward()


def fails_in_an_update(model, optimizer, x):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(PlantedError):
        for kind in (FetchAndUpdatePass, UpdatePass, DeviceUpdates):
            patch.setattr(kind, "_apply", plant)
            patch.setattr(kind, "run_in_memory", plant, raising=False)
        for _ in range(2):
            total(model(x)).backward()
            optimizer.step()
            engine_in(model).lane.drain()
    # torch keeps what is left of a backward that failed, and its parameters, until the next: without us, too
    torch.ones(1, requires_grad=True).sum().backward()


ENDINGS = [
    lambda model, optimizer, x: None,  # with what the last step has left
    lambda model, optimizer, x: model.state_dict(),
    lambda model, optimizer, x: total(model(x)).backward(),  # and gradients are left
    lambda model, optimizer, x: model(x),
    fails_in_forward,
    fails_in_the_middle_of_a_forward,
    fails_in_backward,
    fails_in_an_update,
]


FAILING = {
    *("in host memory, backward", "on disk", "spilled", "activations on disk", "device, on disk"),
    *("durable", "device, activations"),
}
"""Ways in which by default an update fails, each part of them in one; in the others, none does."""


@pytest.fixture(params=WAYS)
def way(request, monkeypatch, frozen):
    way = WAYS[request.param]
    if way.late:
        device = torch.device("cpu")
        monkeypatch.setattr(engine_module, "open_device", lambda _: AcceleratorDevice(device, LateStreams()))
    return way


@pytest.fixture
def frozen(thawed):
    """The collector looks at what the test has made, and at nothing else: a hundred times faster."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def thawed():
    """What was frozen for these tests alone, the collector looks at once when they are over."""
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def trained(way, folder, steps=2):
    init = {"host_memory": way.memory, "nvme": str(folder) if way.nvme else None, **way.init}
    with infinity.Init(**init):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), nn.Linear(WIDTH, 4))
    optimizer = infinity.AdamW(model.parameters(), update=way.update)
    if "durable" in way.init:
        infinity.resume(model, optimizer)
    x = torch.ones(32, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(steps):
        for _ in range(way.micro):
            total(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, x


def held():
    """Return all that a forgotten engine would hold, by name: exact counts."""
    there = handles()
    arenas = [one.nbytes for one in gc.get_objects() if type(one) is Arena]
    return (*there, sum(arenas), sum(issubclass(type(one), nn.Parameter) for one in gc.get_objects()))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_models_that_are_dropped_after_whatever_do_not_add_up(way, folder):
    def cycles(first, last):
        for cycle in range(first, last):
            here = folder / str(cycle)
            here.mkdir()
            ENDINGS[cycle % len(ENDINGS)](*trained(way, here, steps=cycle % 3))
            collected(lambda: not [one for one in gc.get_objects() if type(one) is Engine])

    cycles(0, FIRST)
    before, mapped, rss = held(), mappings(), psutil.Process().memory_info().rss
    cycles(FIRST, FIRST + CYCLES)
    assert collected(lambda: held() == before), (before, held(), reached())
    assert abs(mappings() - mapped) < 20
    assert psutil.Process().memory_info().rss - rss < 16 << 20


@pytest.mark.parametrize(
    "way",
    [pytest.param(one, marks=[pytest.mark.slow] if one in FAILING else []) for one in WAYS],
    indirect=True,
)
def test_neither_a_thread_nor_a_finalizer_keeps_a_model_that_nobody_has(way, folder):
    model, optimizer, _ = trained(way, folder)
    engine = engine_in(model)
    engine.lane.drain()
    assert collected(lambda: not reached()), reached()
    engine = weakref.ref(engine)
    del model, optimizer, _
    assert collected(lambda: engine() is None), reached()


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_model_is_freed_however_its_training_ended(ending, folder, frozen):
    def run():
        model, optimizer, x = trained(Way(), folder)
        ending(model, optimizer, x)
        return weakref.ref(engine_in(model))

    engine = run()
    assert collected(lambda: engine() is None), reached()


@pytest.mark.parametrize(
    "way",
    [pytest.param(one, marks=[] if one in FAILING else [pytest.mark.slow]) for one in WAYS],
    indirect=True,
)
def test_an_update_that_failed_keeps_no_model(way, folder):
    def run(steps):
        here = folder / str(steps)
        here.mkdir()
        model, optimizer, x = trained(way, here, steps)
        fails_in_an_update(model, optimizer, x)
        return weakref.ref(engine_in(model))

    gone = [
        run(steps) for steps in (2, 1, 0)
    ]  # whether a pass failed on the lane or here is a matter of timing
    assert collected(lambda: not any(engine() for engine in gone)), reached()


def test_a_forward_that_failed_while_a_commit_waits_for_it_keeps_nothing(folder, frozen):
    def run():
        model, optimizer, x = trained(WAYS["durable"], folder)
        fails_in_the_middle_of_a_forward(model, optimizer, x)
        return weakref.ref(engine_in(model))

    engine = run()
    assert collected(lambda: engine() is None), reached()
