"""The device as a tier: what lives there, its budget to the byte, and what goes over the link.

Trusted: the reference recipe in memory, the simulated device and its count of bytes. Nothing is faked, except
where rules of the budget are tried without a device.
"""

import re

import pytest
import torch
from torch import nn

import simulated
import simulated_faults
import simulated_tiers
from infinity import AdamW, Config, Init, gathered, stats
from infinity.device.device import AcceleratorDevice
from infinity.engine import engine as engine_module
from infinity.engine.engine import engine_of_model
from infinity.errors import DeviceMemoryError
from infinity.optim import ownership
from infinity.planning.budget import DeviceBudget, divide_device
from infinity.records import tensor_steps
from infinity.records.tensor_steps import Scratch
from infinity.records.update_rules import ADAMW
from infinity.reference import ReferenceAdamW, prepare
from infinity.reference import clip_grad_norm_ as reference_clip
from infinity.units import device_updates
from infinity.units.device_tier import lives_on_device
from streams import LateStreams

pytestmark = [pytest.mark.disk, pytest.mark.multi]

FROZEN = ["frozen, no room", "frozen, room for half", "frozen, room for all"]
RECORDS = ["records, no room", "records, room for half", "records, room for all", "records, later"]
PLANTED = [f"fault: {name}" for name in simulated_faults.BUDGETS]
QUICK = [*FROZEN, *RECORDS, "trained, no room", "trained, room for all", "clipped"]
LAYER = simulated_tiers.LAYER_NBYTES
SETTLED = 2
"""Steps after which nothing moves to another place."""


@pytest.fixture(scope="module")
def quick():
    """What the quick cases said."""
    return {name: one for name, (one,) in simulated.results(*QUICK, *PLANTED).items()}


def assert_within_its_budget(one):
    assert (one.get("crash"), one["killed"], one["raised"], one["failure"]) == (None, "", "", ""), one
    assert (one["losses"], one["different"], one["warned"]) == (True, [], []), one
    assert one["ledger_peak"] <= one["device_memory"], one
    assert one["most"] <= one["device_memory"] + one["activations"], one
    assert one["uncounted"] == [0], one
    assert min(one["late_copies"], one["late_kernels"]) > 0, one
    assert 0 < one["locked"] <= one["host_memory"], one


def per_step(one, way="uploaded"):
    settled = one[way][SETTLED:]
    return sum(settled) / len(settled)


@pytest.mark.parametrize("name", QUICK)
def test_bits_are_the_recipes_and_budgets_are_kept(quick, name):
    assert_within_its_budget(quick[name])


@pytest.mark.parametrize("name", PLANTED)
def test_memory_that_is_held_beyond_what_is_counted_is_seen(quick, name):
    assert (quick[name]["raised"], quick[name]["failure"], quick[name]["losses"]) == ("", "", True)
    assert max(quick[name]["uncounted"]) >= LAYER


def test_a_frozen_base_that_fits_the_device_is_uploaded_once(quick):
    one, layers = quick["frozen, room for all"], simulated_tiers.TOWERS["frozen, room for all"].layers
    assert one["on_device"] == (layers - 2) * LAYER
    assert per_step(one) <= 2 * 2 * LAYER  # of the two layers that are trained


def test_with_room_for_half_of_a_frozen_base_half_of_the_bytes_go_over_the_link(quick):
    none, half = (per_step(quick[f"frozen, {room}"]) for room in ("no room", "room for half"))
    assert quick["frozen, no room"]["on_device"] == 0
    assert half / none == pytest.approx(0.5, abs=0.03)


def test_records_that_fit_the_device_are_updated_there_and_nothing_goes_over_the_link(quick):
    one, layers = quick["records, room for all"], simulated_tiers.TOWERS["records, room for all"].layers
    assert one["on_device"] == layers * simulated_tiers.RECORD_NBYTES
    assert (per_step(one), per_step(one, "downloaded")) == (0, 0)
    assert one["tiers"] == ["device"]
    assert "update" in one["timeline"]


def test_with_room_for_half_of_the_records_half_of_the_bytes_go_over_the_link(quick):
    none, half = (quick[f"records, {room}"] for room in ("no room", "room for half"))
    layers = simulated_tiers.TOWERS["records, no room"].layers
    assert (none["on_device"], half["on_device"]) == (0, layers // 2 * simulated_tiers.RECORD_NBYTES)
    gradients = [per_step(one, "downloaded") for one in (none, half)]
    assert gradients == [layers * LAYER, layers // 2 * LAYER]
    assert per_step(half) / per_step(none) == pytest.approx(0.5, abs=0.15)  # some wait on the device


def test_clipping_brings_a_sum_for_each_gradient_from_the_device_and_no_gradient(quick):
    one, layers = quick["records, later"], simulated_tiers.TOWERS["records, later"].layers
    assert (per_step(one), per_step(one, "downloaded")) == (0, 8 * layers)
    assert 1 <= one["waits_of_clipping"] <= 2


def test_an_update_in_the_backward_reads_no_weights_from_nvme_again(quick):
    """Each layer is used twice in the first step, and read once for a use at most: updates read none."""
    one, layers = quick["trained, no room"], simulated_tiers.TOWERS["trained, no room"].layers
    assert 0 < one["hi_read"] <= 2 * layers * LAYER


def test_clipping_makes_the_host_wait_for_the_device_once_and_not_for_each_parameter(quick):
    assert 1 <= quick["clipped"]["waits_of_clipping"] <= 2


def test_stats_timeline_and_plan_show_three_tiers(quick):
    one = quick["frozen, room for half"]
    assert one["tiers"] == ["device", "host", "nvme"]
    assert {"upload", "download", "read", "write"} <= set(one["timeline"])
    assert re.search(r"^open( fetch [\d ]+)? device( \d+){32}$", one["plan"])
    assert "256.0 KiB of units that live there" in one["printed"]


@pytest.mark.slow
def test_other_towers_stay_within_their_budgets():
    names = [name for name in simulated_tiers.TOWERS if name not in (*QUICK, *PLANTED)]
    for (one,) in simulated.results(*names).values():
        assert_within_its_budget(one)


@pytest.mark.slow
def test_with_room_for_half_of_many_records_half_of_the_bytes_go_over_the_link():
    names = [f"many records, {room}" for room in ("no room", "room for half")]
    none, half = (one for (one,) in simulated.results(*names).values())
    for way in ("uploaded", "downloaded"):
        assert per_step(half, way) / per_step(none, way) == pytest.approx(0.5, abs=0.03)


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
    streams = LateStreams()
    device = AcceleratorDevice(torch.device("cpu"), streams)
    monkeypatch.setattr(engine_module, "open_device", lambda *_: device)
    return streams


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
