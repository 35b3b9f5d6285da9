"""Gradients that are stored while others of their unit come again. Trusted: the reference in memory."""

import time

import pytest
import torch
from torch import nn

from infinity import AdamW, Init
from infinity.gradients import store
from infinity.lane.lane import StreamLane
from infinity.reference import ReferenceAdamW
from parity import build_both, differences, engine_in

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("repeatable")]

WIDTH = 4096


class Pair(nn.Module):
    """Two parameters in one unit, of which a forward may use one alone."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes = (nn.Parameter(torch.randn(WIDTH) * 0.1) for _ in range(2))

    def forward(self, x, *, both):
        once = (x * self.always).sum()
        return once + (x * x * self.sometimes).sum() if both else once


def build():
    torch.manual_seed(0)
    return nn.ModuleList(Pair() for _ in range(3))


def backward(model, number, *, both):
    x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(number)).bfloat16()
    sum(one(x, both=both) for one in model).float().backward()


def test_a_stored_gradient_is_carried_along_where_its_neighbours_is_added_to_in_fp32(folder, monkeypatch):
    plain, model = build_both(build, nvme=folder)
    engine_in(model).kept.limit_nbytes = 0
    reference = ReferenceAdamW(plain.parameters(), lr=1e-2)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    carried, spill = [], store.SpillPass

    def noted(record, tile_numel, parts, kept, source, target):
        carried.append((len(kept), source, target))
        return spill(record, tile_numel, parts, kept, source, target)

    monkeypatch.setattr(store, "SpillPass", noted)
    for step in range(2):
        for both in (True, False):
            backward(plain, step, both=both)
            backward(model, step, both=both)
        reference.step()
        reference.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    assert differences(plain.state_dict(), model.state_dict()) == []
    assert (1, "grad16", "grad32") in carried


def test_a_sum_is_not_changed_under_the_update_that_is_made_of_it(folder, monkeypatch):
    found, work = [], StreamLane._work
    for seconds in (0, 0.02):
        monkeypatch.setattr(
            StreamLane, "_work", lambda lane, tile, s=seconds: (time.sleep(s), work(lane, tile))
        )
        torch.manual_seed(0)
        with Init(nvme=folder, host_memory="2MiB"):
            model = nn.Sequential(nn.Embedding(256, 256))
        optimizer = AdamW(model.parameters(), lr=1e-2)
        loss = model(torch.arange(256)).float().square().sum()
        for _ in range(2):
            loss.backward(retain_graph=True)
        optimizer.step()
        loss.backward(retain_graph=True)  # to the same gradient, while the step is being applied
        found.append((model.state_dict(), optimizer.state_dict()["state"]))
    assert differences(*found) == []


class Under:
    """Work under way that ends a lease when it is waited for, and notes what gradients have taken by then."""

    done = False

    def __init__(self, share):
        self.share, self.lease = share, share.lease_anyway(share.ledger.free_nbytes)
        self.lent = []

    def wait(self):
        self.lent.append(self.share.buffers.lent_nbytes)
        self.lease.end()
        self.done = True


@pytest.mark.parametrize("update", ["backward", "forward"])
def test_a_gradient_is_copied_to_memory_of_its_own_when_there_is_room_for_it_and_not_before(update, folder):
    with Init(nvme=folder, host_memory="8MiB"):
        model = nn.Linear(512, 512, bias=False)
    optimizer = AdamW(model.parameters(), lr=1e-2, update=update)
    engine = engine_in(model)
    engine.kept.limit_nbytes = 0
    job = Under(engine.outgoing_share)
    engine.outgoing_share.sent(job)
    model(torch.ones(1, 512, dtype=torch.bfloat16)).float().sum().backward()
    assert job.lent == [0], "it waited in the memory that torch had given it"
    optimizer.step()
    assert engine.outgoing_share.ledger.peak_nbytes <= engine.outgoing_share.ledger.limit_nbytes


def test_a_gradient_that_malloc_maps_by_itself_stays_where_it_is(folder, monkeypatch):
    monkeypatch.setattr(store, "is_mapped_apart", lambda nbytes: nbytes >= 1 << 20)
    with Init(nvme=folder, host_memory="16MiB"):
        model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 1024, bias=False))
    engine = engine_in(model)
    engine.kept.limit_nbytes = 0
    share = engine.outgoing_share
    buffers, taken = share.buffers, []
    take = buffers.take
    take(share.ledger.limit_nbytes, torch.uint8)  # and dropped: it stays, free
    assert buffers.free_nbytes == share.ledger.limit_nbytes

    def noted(numel, dtype):
        taken.append((numel * dtype.itemsize, buffers.free_nbytes))
        return take(numel, dtype)

    monkeypatch.setattr(buffers, "take", noted)
    model(torch.ones(1, 512, dtype=torch.bfloat16)).float().sum().backward()
    assert taken == [(512 << 10, 0)], "the smaller one, which would leave a hole; the other had the room"
