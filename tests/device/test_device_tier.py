"""The rules of an accelerator's budget, and models on one; what lives there, to the byte, and what goes over
the link is in test_simulated_device.py. Trusted: the reference recipe in memory. Faked: the accelerator.
"""

import re

import pytest
import torch
from torch import nn

import models
import simulated_tiers
from infinity import AdamW, Config, Init, gathered, stats
from infinity.engine.engine import engine_of_model
from infinity.errors import DeviceMemoryError
from infinity.optim import ownership
from infinity.planning.activations import Method
from infinity.planning.budget import DeviceBudget, divide_device
from infinity.records import tensor_steps
from infinity.records.tensor_steps import Scratch
from infinity.records.update_rules import ADAMW
from infinity.reference import ReferenceAdamW, prepare
from infinity.reference import clip_grad_norm_ as reference_clip
from infinity.units import device_updates
from infinity.units.device_tier import lives_on_device
from planned_units import plan_beside
from streams import compute_late

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("impatient")]

LAYER = simulated_tiers.LAYER_NBYTES


# The rules


def test_the_smallest_device_memory_that_works_is_named_and_works():
    with pytest.raises(
        DeviceMemoryError, match=r"the model needs 5500 bytes of it .*largest unit"
    ) as refused:
        divide_device(5499, 1 << 30, 2000, 4500, 1000)
    least = int(re.search(r"needs (\d+) bytes", str(refused.value))[1])
    assert divide_device(least, 1 << 30, 2000, 4500, 1000) == DeviceBudget(5500, 5500, 2000)


def test_more_than_is_free_on_the_device_is_refused():
    with pytest.raises(DeviceMemoryError, match=r"device_memory=2\.0 GiB is more than .* 1\.0 GiB"):
        divide_device(2 << 30, 1 << 30, 2000, 4000, 0)


def test_what_is_not_in_use_is_for_units_that_wait_and_live_there():
    budget = divide_device(100_000, 1 << 30, 2000, 4000, 1000)
    assert (budget.working_nbytes, budget.window_nbytes, budget.lodging_nbytes) == (9000, 91_000, 87_000)


# A device whose copies are late, and whose memory is the host's


@pytest.fixture
def late(monkeypatch):
    return compute_late(monkeypatch)


def built(folder):
    with Init(nvme=folder, host_memory="1MiB"):
        return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))


@pytest.fixture
def with_memory(monkeypatch):
    """Let the next model have this device_memory, in bytes, though the CPU's device has none of its own."""

    def give(nbytes):
        monkeypatch.setattr(Config, "__post_init__", _then(Config.__post_init__, nbytes))

    return give


def _then(check, nbytes):
    def checked(config):
        check(config)
        object.__setattr__(config, "device_nbytes", nbytes)

    return checked


NEED = 2 * LAYER + 4 * 512  # a layer and its gradient, and the placeholders


def test_a_device_memory_below_the_need_of_the_largest_unit_is_refused_when_the_model_is_built(
    folder, late, with_memory
):
    with_memory(NEED - 1)
    with pytest.raises(DeviceMemoryError, match=f"needs {NEED} bytes"):
        built(folder)


def test_the_smallest_device_memory_trains(folder, late, with_memory):
    with_memory(NEED)
    model = built(folder)
    optimizer = AdamW(model.parameters(), update="backward")
    for _ in range(2):
        model(torch.ones(2, 64, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert NEED - 512 <= stats(model).device_peak_nbytes <= NEED


def test_a_device_memory_above_what_is_free_is_refused(folder, late, with_memory):
    late.free = 1 << 20
    with_memory(2 << 20)
    with pytest.raises(DeviceMemoryError, match=r"device_memory=2\.0 MiB is more than .* 1\.0 MiB"):
        built(folder)


def test_without_a_device_memory_it_is_half_of_what_is_free(folder, late):
    late.free = 1 << 20
    assert stats(built(folder)).device_budget_nbytes == 1 << 19


def test_a_round_between_steps_asks_at_once_for_units_that_live_on_the_device(folder, late):
    model = built(folder)
    model[:3].requires_grad_(requires_grad=False)
    optimizer = AdamW(model[3:].parameters(), update="backward")
    engine, x = engine_of_model(model), torch.ones(2, 64, dtype=torch.bfloat16)
    for _ in range(3):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        expected = model(x)
        assert all(lives_on_device(unit) for unit in engine.units[:3])
        assert engine.residency.are_here(engine.units[:3])
        assert torch.equal(model(x), expected)


def test_gathering_more_than_the_device_has_room_for_is_refused_with_the_numbers(folder, late, with_memory):
    with_memory(NEED + LAYER)
    model = built(folder)
    refused = pytest.raises(
        DeviceMemoryError, match=r"the values take 32\.0 KiB on the device, and .* 24\.0 KiB"
    )
    with refused, gathered(model):
        pass
    with gathered(model[:3]):
        assert all(part.weight.abs().sum() > 0 for part in model[:3])


def with_embedding(layers):
    return nn.Sequential(nn.Embedding(64, 64), *(nn.Linear(64, 64, bias=False) for _ in range(layers)))


def trained_on(model, steps, update="backward", accumulate=1):
    """Train on the tokens 0 to 63; return the names of the units that live on the device then."""
    optimizer = AdamW(model.parameters(), update=update)
    for _ in range(steps):
        for micro in range(accumulate):
            model(torch.arange(micro, 64)).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return sorted(unit.name for unit in engine_of_model(model).units if lives_on_device(unit))


def test_an_embeddings_record_lives_on_the_device_before_those_of_layers_that_are_denser(
    folder, late, with_memory
):
    """A backward's last gradient is its, and a forward's first use: nothing would hide its update. The window
    does not hold all layers from a forward to its backward, so that most are fetched twice, and it once.
    """
    with_memory(simulated_tiers.Tower(frozen=False, layers=13, records=1).device_nbytes)
    with Init(nvme=folder, host_memory="1MiB"):
        model = with_embedding(12)
    assert trained_on(model, 2) == ["0"]


@pytest.mark.parametrize("steps", [2, 10])
@pytest.mark.parametrize(
    ("tower", "method"),
    [
        (simulated_tiers.Tower(frozen=False, layers=13, records=6), {"update": "backward"}),
        (simulated_tiers.Tower(frozen=False, layers=13, records=6, kept=2), {"update": "forward"}),
        (
            simulated_tiers.Tower(frozen=False, layers=13, records=6, kept=4),
            {"update": "forward", "accumulate": 2},
        ),
        (simulated_tiers.Tower(frozen=False, layers=40, records=2), {"update": "backward"}),
    ],
    ids=["in the backward", "later", "accumulated", "in little room"],
)
def test_a_plan_lets_those_units_live_on_the_device_that_a_run_does(
    folder, late, with_memory, tower, method, steps
):
    with_memory(tower.device_nbytes)
    plain = with_embedding(tower.layers - 1)
    with Init(nvme=folder, host_memory="4MiB"):
        model = with_embedding(tower.layers - 1)
    there = trained_on(model, steps, **method)
    setting = {"update": method["update"], "micro_batches": method.get("accumulate", 1)}
    ids = torch.zeros(8, dtype=torch.long, device="meta")
    method = Method(checkpointing=False)
    _, planned, _ = plan_beside(plain, engine_of_model(model), {"input": ids}, **setting, method=method)
    assert there == planned
    assert "0" in there
    assert len(there) == tower.records


def test_a_plan_of_a_transformer_lets_those_units_live_on_the_device_that_a_run_does(
    folder, late, with_memory
):
    with_memory(400 << 10)
    model, optimizer, _ = models.offloaded("llama", {"lr": 1e-2}, {"nvme": folder, "host_memory": "4MiB"})
    models.train(model, optimizer, 2)
    engine = engine_of_model(model)
    there = [unit for unit in engine.units if lives_on_device(unit)]
    _, planned, _ = plan_beside(models.MODELS["llama"](), engine, method=Method(checkpointing=False))
    assert sorted(unit.name for unit in there) == planned
    assert 0.3 < len(there) / len(engine.units) < 0.7


@pytest.fixture
def fused(monkeypatch):
    """Steps of Adam's kind are made in one kernel, which needs no memory: here by torch, in memory apart."""
    apart = Scratch(torch.empty(Scratch.nbytes_of(1024), dtype=torch.uint8))
    given = []

    def is_fused(step, device, grad):
        return step is ADAMW.tensors

    def make_step(step, at, grad, scalars, scratch):
        given.append(scratch)
        tensor_steps.make_step(step, at, grad, scalars, apart if scratch is None else scratch)

    monkeypatch.setattr(ownership, "is_fused", is_fused)
    monkeypatch.setattr(device_updates, "is_fused", is_fused)
    monkeypatch.setattr(device_updates, "make_step", make_step)
    return given


@pytest.mark.parametrize("clip", [None, 0.01])
def test_where_a_step_is_one_kernel_no_memory_of_the_device_is_for_intermediate_values(
    folder, late, fused, clip
):
    torch.manual_seed(0)
    late.free = 64 << 20
    model = built(folder)
    optimizer = AdamW(model.parameters(), **simulated_tiers.SETTINGS)
    torch.manual_seed(0)
    plain = prepare(nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4))), torch.bfloat16)
    reference = ReferenceAdamW(plain.parameters(), **simulated_tiers.SETTINGS)
    for step in range(4):
        for one, clipped, its in (
            (model, torch.nn.utils.clip_grad_norm_, optimizer),
            (plain, None, reference),
        ):
            torch.manual_seed(step)
            one(torch.randn(3, 64).bfloat16()).float().square().mean().backward()
            if clip is not None and clipped is None:
                reference_clip(its, clip)
            elif clip is not None:
                clipped(one.parameters(), clip)
            its.step()
            its.zero_grad()
    engine = engine_of_model(model)
    assert all(unit.record.on_device for unit in engine.units)
    assert set(fused) == {None}
    assert engine.tier.scratch_nbytes == 0
    assert sum(unit.record.nbytes("device") for unit in engine.units) == 4 * simulated_tiers.RECORD_NBYTES
    assert stats(model).device_nbytes == 4 * simulated_tiers.RECORD_NBYTES
    found = model.state_dict()
    assert all(torch.equal(found[key], value) for key, value in plain.state_dict().items())


# Several ranks, of which the others are what they say


def records_there(folder, monkeypatch, refused_elsewhere=(), free=None):
    """Train, with another rank that has no room for some records, and with so many bytes `free` on this
    one for records when the first step is decided; return whose records live there, and which of them this
    one refused first.
    """
    model, said = built(folder), []
    engine = engine_of_model(model)

    def union(refused, count, what):
        assert (count, what) == (4, "find room for records on the device")
        said.append(list(refused))
        return sorted({*refused, *refused_elsewhere})

    monkeypatch.setattr(engine.ranks, "union", union)
    optimizer, ledger = AdamW(model.parameters(), update="backward"), engine.device.room.ledger
    model(torch.ones(2, 64, dtype=torch.bfloat16)).sum().backward()
    taken = 0 if free is None else ledger.limit_nbytes - 4 * 512 - free
    ledger.reserve_anyway(taken)
    optimizer.step()
    ledger.release(taken)
    there = [unit for unit in engine.units if unit.record.on_device]
    held = sum(unit.record.nbytes("device") for unit in there) + engine.tier.scratch_nbytes * bool(there)
    waiting = ledger.held_nbytes - 4 * 512 - held  # for the next step, as far as there was room: no records
    assert waiting in {LAYER * number for number in range(5 - len(there))}
    return [unit.index for unit in there], said[0]


def test_what_another_rank_has_no_room_for_stays_below_on_this_one_and_nothing_is_held_for_it(
    folder, late, monkeypatch
):
    late.free = 64 << 20
    assert records_there(folder, monkeypatch, refused_elsewhere=[1, 3]) == ([0, 2], [])


def test_a_rank_says_which_records_it_has_no_room_for_before_any_comes_up(folder, late, monkeypatch):
    late.free = 64 << 20
    scratch = 11 * LAYER  # for intermediate values
    free = 2 * simulated_tiers.RECORD_NBYTES + scratch + 3 * LAYER  # which a third has no room in
    assert records_there(folder, monkeypatch, free=free) == ([0, 1], [2, 3])
