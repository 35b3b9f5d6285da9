"""Trainings of a tower of equal layers on the simulated device, whose bytes can be told exactly: what goes
over the link, what the device holds, what is page-locked.
"""

from __future__ import annotations

import itertools
import tempfile
import threading
from dataclasses import dataclass

import torch
from torch import nn

import models
import simulated_faults
from infinity import AdamW, Init, stats
from infinity.engine import engine as engine_module
from infinity.engine.engine import Engine, engine_of_model
from infinity.planning.activations import Method
from infinity.reference import ReferenceAdamW, prepare
from infinity.units.device_tier import lives_on_device
from places import disk
from planned_units import plan_beside
from simulated_counts import Uses, plain_uses
from simulator import Simulator

WIDTH = 64
LAYER_NBYTES = 2 * WIDTH * WIDTH
RECORD_NBYTES = 12 * WIDTH * WIDTH
SCRATCH_SHARE = 31
"""One part in so many of the rest is for intermediate values of updates on the device."""
SETTINGS = {"lr": 1e-2, "weight_decay": 0.1}
BLOCK = 512
"""Of device memory: what every parameter's placeholder takes."""


@dataclass(frozen=True)
class Tower:
    """A tower of `layers`, the first and the last of which are trained, and the others unless `frozen`.

    room: layers that may live on the device; records: whole ones that may, with gradients of `kept` bytes an
    element beside them; nvme: whether records lie there; accumulate: backwards of a
    step; evaluated: forwards without gradients after each step; copy_us, kernel_us, event_us: delays in
    microseconds; fault: of simulated_faults.BUDGETS; embedded: whether the first one looks up rows.
    """

    layers: int = 66
    frozen: bool = True
    room: int = 0
    records: int = 0
    kept: int = 0
    nvme: bool = True
    update: str = "backward"
    accumulate: int = 1
    host: str = "256KiB"
    clip: float | None = None
    evaluated: int = 0
    steps: int = 4
    copy_us: int = 200
    kernel_us: int = 20
    event_us: int = 100
    fault: str = ""
    embedded: bool = False

    @property
    def device_nbytes(self) -> int:
        """device_memory: the placeholders; four layers or gradients in use and two on their way, which share
        five where there is no `room`; and that.
        """
        records = self.records * (RECORD_NBYTES + self.kept * WIDTH * WIDTH)
        layers = (6 + self.room if self.room or records else 5) * LAYER_NBYTES
        nbytes = self.layers * BLOCK + layers + records
        return nbytes + max(-(-nbytes // SCRATCH_SHARE), 16 << 10) if records else nbytes


TOWERS = {
    "frozen, no room": Tower(),
    "frozen, room for half": Tower(room=32),
    "frozen, room for all": Tower(room=64),
    "frozen in host memory, room for all": Tower(room=64, nvme=False, host="4MiB", update="forward"),
    "trained, no room": Tower(frozen=False, layers=12, steps=3),
    "trained, little room": Tower(frozen=False, layers=12, steps=3, room=3, update="forward"),
    "trained, room for all": Tower(frozen=False, layers=12, steps=3, room=12),
    "clipped": Tower(frozen=False, layers=12, steps=3, room=12, update="forward", clip=0.01, host="1MiB"),
    "evaluated": Tower(frozen=False, layers=12, steps=3, room=6, update="forward", evaluated=5),
    "frozen, evaluated": Tower(layers=18, steps=3, room=16, evaluated=3),
    "records, room for all": Tower(frozen=False, layers=12, records=12),
    "records, room for half": Tower(frozen=False, layers=12, records=6, host="1MiB"),
    "records, no room": Tower(frozen=False, layers=12, host="1MiB"),
    "records and an embedding, room for half": Tower(
        frozen=False, layers=12, records=6, host="1MiB", embedded=True
    ),
    "many records, room for half": Tower(frozen=False, layers=66, records=33, host="4MiB"),
    "many records, no room": Tower(frozen=False, layers=66, host="4MiB"),
    "records, later": Tower(frozen=False, layers=12, records=12, kept=2, update="forward", clip=0.01),
    "records, at once": Tower(frozen=False, layers=12, records=12, copy_us=0, kernel_us=0),
    "records, late kernels": Tower(frozen=False, layers=12, records=6, kernel_us=500, steps=3),
    "records, evaluated": Tower(
        frozen=False, layers=12, records=6, kept=2, update="forward", evaluated=3, steps=4
    ),
    "records, accumulated": Tower(
        frozen=False, layers=12, records=6, kept=4, update="forward", accumulate=3, host="1MiB"
    ),
    "records in host memory": Tower(
        frozen=False, layers=12, records=6, kept=2, update="forward", nvme=False, host="8MiB"
    ),
    "accumulated": Tower(frozen=False, layers=12, steps=3, room=2, update="forward", accumulate=3),
}
TOWERS |= {
    f"fault: {name}": Tower(frozen=False, layers=12, steps=2, event_us=2000, fault=name)
    for name in simulated_faults.BUDGETS
}


def build(tower: Tower) -> nn.Sequential:
    """Return the tower, its layers of odd numbers behind an activation."""
    parts: list[nn.Module] = []
    for number in range(tower.layers):
        looks_up = tower.embedded and not number
        parts.append(nn.Embedding(WIDTH, WIDTH) if looks_up else nn.Linear(WIDTH, WIDTH, bias=False))
        parts += [nn.Tanh()] * (number % 2)
    model = nn.Sequential(*parts)
    layers = [part for part in model if isinstance(part, nn.Linear)]
    for layer in layers[1:-1] if tower.frozen else ():
        layer.weight.requires_grad = False
    return model


def _loss(model: nn.Module, number: int, place: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    if isinstance(model[0], nn.Embedding):
        inputs = torch.randint(0, WIDTH, (8,), generator=generator).to(place)
    else:
        inputs = torch.randn(8, WIDTH, generator=generator).bfloat16().to(place)
    return model(inputs).float().square().mean()


def _backward(model: nn.Module, number: int, place: str) -> float:
    loss = _loss(model, number, place)
    loss.backward()
    return loss.item()


def train(tower: Tower, model, optimizer, place, after_step=lambda: None):
    """Return the losses."""
    losses = []
    for step in range(tower.steps):
        losses += [_backward(model, 100 * step + micro, place) for micro in range(tower.accumulate)]
        if tower.clip is not None:
            models.clip_norm(model, optimizer, tower.clip)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses += [_loss(model, 7 + one, place).item() for one in range(tower.evaluated)]
        after_step()
    return losses


def waits_of_clipping(model: nn.Module, simulator: Simulator) -> int:
    """Return how often clipping makes the host wait for the device, when every gradient has left that."""
    _backward(model, 1, "sim")
    torch.accelerator.synchronize()
    for parameter in model.parameters():
        parameter.grad.gradient.await_tensor()
    before = simulator.counts()["host_waits"]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    return simulator.counts()["host_waits"] - before


def planned(tower: Tower, plain: nn.Module, engine: Engine) -> list[str]:
    """Return the units that a plan lets live on the device."""
    accumulate, method = tower.accumulate, Method(checkpointing=False)
    setting = {"nvme": tower.nvme, "update": tower.update, "micro_batches": accumulate, "method": method}
    rows = torch.zeros(8, dtype=torch.long, device="meta")
    inputs = rows if tower.embedded else torch.zeros(8, WIDTH, dtype=torch.bfloat16, device="meta")
    return plan_beside(plain, engine, {"input": inputs}, **setting)[1]


def run(name: str, simulator: Simulator) -> dict[str, object]:
    """Train a tower, here and in memory, and say how they differ, and what every step took."""
    tower = TOWERS[name]
    torch.manual_seed(0)
    model = prepare(build(tower), torch.bfloat16)
    activations, plain_pass = plain_uses(model, lambda model: _backward(model, 0, "sim"), simulator)
    del model
    torch.manual_seed(0)
    plain = prepare(build(tower), torch.bfloat16)
    expected = train(tower, plain, ReferenceAdamW(_trained(plain), **SETTINGS), "cpu")
    simulator.delay(tower.copy_us, tower.kernel_us, 3, tower.event_us)
    simulator.restart()
    before = simulator.counts()["allocated"]
    if tower.fault:
        simulated_faults.BUDGETS[tower.fault].plant(engine_module)
    with tempfile.TemporaryDirectory(prefix="infinity-", dir=disk()) as folder:
        torch.manual_seed(0)
        device = {"device": "sim", "device_memory": tower.device_nbytes}
        with Init(nvme=folder if tower.nvme else None, host_memory=tower.host, **device):
            ours = build(tower)
        engine = engine_of_model(ours)
        engine.timeline.start()
        held = engine.device.room.ledger
        uses = Uses(ours, lambda: simulator.counts()["allocated"] - before - held.held_nbytes)
        optimizer = AdamW(_trained(ours), update=tower.update, **SETTINGS)
        seen, waits, for_room, there = [stats(ours)], [0], [0], []

        def after_step():
            seen.append(stats(ours))
            waits.append(sum(map(simulator.waits_of, uses.threads)))
            for_room.append(engine.device.room.waits)
            there[:] = sorted(unit.name for unit in engine.units if lives_on_device(unit))

        losses = train(tower, ours, optimizer, "sim", after_step)
        uncounted = uses.beside(plain_pass)
        torch.accelerator.synchronize()
        counts = simulator.counts()
        of_clipping = waits_of_clipping(ours, simulator) if tower.clip is not None else 0
        found = {key: value.cpu() for key, value in ours.state_dict().items()}
        timeline = sorted({span.lane for span in engine_of_model(ours).timeline.spans})
    different = [key for key, value in plain.state_dict().items() if not torch.equal(value, found[key])]
    return {
        "losses": losses == expected,
        "different": different,
        "device_memory": tower.device_nbytes,
        "activations": activations,
        "uncounted": uncounted,
        "most": counts["peak"] - before,
        "ledger_peak": seen[-1].device_peak_nbytes,
        "locked": counts["page_locked_peak"],
        "host_memory": seen[-1].budget_nbytes,
        "uploaded": [one.since(other).uploaded_nbytes for other, one in itertools.pairwise(seen)],
        "downloaded": [one.since(other).downloaded_nbytes for other, one in itertools.pairwise(seen)],
        "hi_read": seen[1].read_nbytes.get(("nvme", "hi"), 0),
        "on_device": seen[-1].device_nbytes,
        "there": there,
        "planned": planned(tower, plain, engine),
        "tiers": sorted({tier for unit in seen[-1].units for _, tier in unit.tiers}),
        "waits_of_clipping": of_clipping,
        "waits_of_caller": simulator.waits_of(threading.get_native_id()),
        "waits_of_backward": [after - before for before, after in itertools.pairwise(waits)],
        "waits_for_room": [after - before for before, after in itertools.pairwise(for_room)],
        "plan": seen[-1].plan.splitlines()[0],
        "timeline": timeline,
        "printed": str(seen[-1]),
    }


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [one for one in model.parameters() if one.requires_grad]
