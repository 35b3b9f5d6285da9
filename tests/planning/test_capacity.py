"""Plans that cannot work are refused, with what is missing. Real: the configs of published models."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from infinity.bench.planning.advice import ideas
from infinity.bench.planning.planned import Question, answer
from infinity.errors import ConfigError
from infinity.planning.activations import Method
from infinity.planning.architectures import llama, outline_of_config
from infinity.planning.capacity import CONTEXT_NBYTES, Capacity, Process
from infinity.planning.setting import Setting
from infinity.sizes import format_size

CONFIGS = Path(__file__).parent / "configs"
SMALL = llama("small", 4, 256, 768, 1024)
WIDE = llama("wide", 2, 1024, 4096, 64_000)
MIB, GIB = 1 << 20, 1 << 30


def published(name):
    return outline_of_config(name, json.loads((CONFIGS / f"{name}.json").read_text()))


def asked(outline=SMALL, machine=None, *, tokens=512, sequence=256, **changes):
    names = Method.__dataclass_fields__
    method = Method(tokens, sequence, **{key: value for key, value in changes.items() if key in names})
    rest = {key: value for key, value in changes.items() if key not in names}
    return answer(
        Question(outline, Setting(**{"host_nbytes": 64 * MIB, **rest}, method=method), machine or Capacity())
    )


def need(planned, what):
    return next(one for one in planned.needs if one.what.startswith(what))


def refused(planned, *parts):
    assert not planned.fits
    said = " ".join(planned.reasons)
    for part in parts:
        assert part in said
    return said


def test_nvme_that_is_too_small_is_refused_by_how_much():
    outline = published("llama-3-70b")
    planned = asked(outline, Capacity(nvme_nbytes=76 * GIB), host_nbytes=12 * GIB, update="backward")
    short = 12 * outline.parameters - 76 * GIB
    assert need(planned, "NVMe").short_nbytes == pytest.approx(short, rel=0.01)
    refused(planned, "NVMe of each machine", "has 76.0 GiB", "too little")


def test_a_durable_run_needs_twice_the_space_of_its_records():
    once, twice = asked(update="backward"), asked(update="backward", durable=True)
    records = need(once, "NVMe").nbytes
    assert need(twice, "NVMe").nbytes == 2 * records
    between = Capacity(nvme_nbytes=records + records // 2)
    assert asked(machine=between, update="backward").fits
    planned = asked(machine=between, update="backward", durable=True)
    refused(planned, f"{format_size(records - records // 2)} too little")
    assert "no --durable" in [idea.change for idea in ideas(planned)]


def test_updates_made_ahead_need_a_second_place_for_each_record_once():
    plain, ahead, durable, both = (
        need(asked(**changes), "NVMe").nbytes
        for changes in ({}, {"speculate": True}, {"durable": True}, {"speculate": True, "durable": True})
    )
    assert ahead == durable == both == 2 * plain
    planned = asked(machine=Capacity(nvme_nbytes=(plain + ahead) // 2), speculate=True)
    assert not planned.fits
    assert "no --speculate" in [idea.change for idea in ideas(planned)]


def test_activations_over_the_device_memory_are_refused():
    outline = published("llama-3-70b")
    planned = asked(
        outline,
        Capacity(gpu_nbytes=80 * GIB),
        tokens=64 * 8192,
        sequence=8192,
        host_nbytes=64 * GIB,
        device_nbytes=8 * GIB,
        loss_tiles=True,
    )
    gpu = dict(need(planned, "memory of each GPU").parts)
    assert gpu["activations"] == 80 * 2 * 8192 * 64 * 8192, "80 inputs of blocks, in 16 bits"
    refused(planned, "memory of each GPU", "activations 640.0 GiB", "too little")


def test_a_gpus_memory_is_told_by_what_it_is_for():
    def parts(*, frozen, **settings):
        outline = replace(SMALL, parts=tuple(replace(one, trainable=not frozen) for one in SMALL.parts))
        planned = asked(outline, Capacity(gpu_nbytes=4 * GIB), device_nbytes=3 * GIB, **settings)
        whole = need(planned, "memory of each GPU")
        assert planned.fits
        assert whole.nbytes == sum(nbytes for _, nbytes in whole.parts)
        return dict(whole.parts)

    trained, base = parts(frozen=False, update="backward"), parts(frozen=True)
    assert trained["whole records that live there"] == pytest.approx(12 * SMALL.parameters, rel=0.2)
    assert base["weights that live there"] == pytest.approx(2 * SMALL.parameters, rel=0.1)
    assert trained["weights that live there"] == base["whole records that live there"] == 0
    for found in (trained, base):
        assert min(found["layers in use"], found["activations"], found["CUDA"]) > 0


def test_logits_over_the_device_memory_are_refused_and_the_loss_in_tiles_helps():
    settings = {"tokens": 4096, "host_nbytes": GIB, "device_nbytes": 2 * GIB}
    planned = asked(WIDE, Capacity(gpu_nbytes=2 * GIB), **settings)
    logits = dict(need(planned, "memory of each GPU").parts)["logits and loss"]
    assert logits == pytest.approx(12 * 64_000 * 4096, rel=0.02)
    refused(planned, "logits and loss", "too little")
    assert any("--loss-tiles" in idea.change and idea.planned.fits for idea in ideas(planned))
    assert asked(WIDE, Capacity(gpu_nbytes=2 * GIB), loss_tiles=True, **settings).fits


def test_a_vocabulary_without_tiles_is_refused_on_a_small_device():
    machine = Capacity(gpu_nbytes=900 * MIB)
    settings = {"tokens": 256, "loss_tiles": True, "host_nbytes": GIB, "device_nbytes": 900 * MIB}
    whole = asked(llama("vocabulary", 2, 1024, 2048, 256_000), machine, **settings)
    refused(whole, "alone takes 1000.0 MiB with its gradient, more than the GPU's 900.0 MiB")
    assert any("--tile-above" in idea.change and idea.planned.fits for idea in ideas(whole))


def test_one_layer_that_is_larger_than_the_device_is_named():
    outline = published("llama-3.1-405b")
    planned = asked(outline, Capacity(gpu_nbytes=2 * GIB), host_nbytes=64 * GIB, device_nbytes=2 * GIB)
    size = format_size(4 * 128256 * 16384)
    refused(planned, f"alone takes {size} with its gradient, more than the GPU's 2.0 GiB")


def test_ranks_of_a_machine_divide_its_host_memory_and_add_up_what_comes_on_top():
    process = Process(own_nbytes=300 * MIB, shared_nbytes=100 * MIB)
    one, eight = (
        asked(machine=Capacity(process=process), host_nbytes=64 * MIB, ranks=ranks, local_ranks=ranks)
        for ranks in (1, 8)
    )
    assert eight.demand.budget.total_nbytes == 8 * MIB
    parts = dict(need(eight, "memory of each machine").parts)
    assert parts["host_memory"] == 8 * eight.demand.held_nbytes <= 64 * MIB
    assert parts["Python and torch"] == 8 * 300 * MIB + 100 * MIB
    assert parts["layers in use"] == 8 * eight.demand.in_use_nbytes
    total = need(one, "memory of each machine").nbytes
    machine = Capacity(memory_nbytes=total, process=process)
    assert asked(machine=machine).fits
    planned = asked(machine=machine, ranks=8, local_ranks=8)
    short = need(eight, "memory of each machine").nbytes - total
    refused(planned, "memory of each machine", f"{format_size(short)} too little")


def test_a_host_memory_below_the_least_is_refused_with_the_least_of_the_machine():
    planned = asked(host_nbytes=256 << 10, ranks=8, local_ranks=8)
    refused(planned, "host_memory=256.0 KiB cannot work", "at least 1.0 MiB on each machine with 8 ranks")
    assert asked(host_nbytes=MIB, ranks=8, local_ranks=8).fits


def test_offloaded_activations_without_room_or_nvme_are_refused():
    planned = asked(nvme=False, offload="host", tokens=512 * 256, host_nbytes=160 * MIB)
    refused(planned, 'offload_activations="host"', "plan with NVMe")
    stored = asked(offload="nvme", update="backward")
    left = 4 - 3  # of four blocks' inputs, three are on the device at once
    assert stored.demand.offloaded_nbytes == left * 2 * 256 * 512


def test_parameters_get_what_the_gpu_has_left_and_never_more():
    machine = Capacity(gpu_nbytes=2 * GIB)
    planned = asked(SMALL, machine, device_nbytes=2 * GIB)
    assert planned.fits
    assert planned.setting.device_nbytes == 2 * GIB - CONTEXT_NBYTES - planned.demand.working_nbytes


def test_a_plan_fits_only_where_what_is_known_is_enough():
    total = need(asked(), "memory of each machine").nbytes
    assert asked(machine=Capacity(memory_nbytes=total)).fits
    assert not asked(machine=Capacity(memory_nbytes=total - 1)).fits


def test_a_plan_whose_activations_are_not_known_says_neither_that_it_fits_nor_that_it_does_not():
    unknown = asked(replace(SMALL, activations=None, uncounted="its shapes depend on values"))
    assert not unknown.fits
    assert not unknown.short
    assert unknown.uncounted == "the activations of small (its shapes depend on values)"
    short = asked(replace(SMALL, activations=None), Capacity(memory_nbytes=MIB))
    assert short.short, "what is known is too small already"


def test_a_model_that_is_smaller_than_its_budget_takes_what_it_needs():
    small, large = (asked(host_nbytes=nbytes).demand for nbytes in (64 * MIB, GIB))
    assert small.held_nbytes <= 64 * MIB
    assert large.held_nbytes < GIB // 2
    slots = large.budget.slots * large.budget.slot_nbytes
    assert large.held_nbytes == slots + large.pinned_nbytes + large.gradients_nbytes, "all of it is pinned"


def test_weights_that_updates_of_the_backward_start_from_come_on_top_of_the_budget():
    def lent(**changes):
        planned = asked(**changes)
        return planned.demand, dict(need(planned, "memory of each machine").parts)[
            "weights that updates start from"
        ]

    found, nbytes = lent(host_nbytes=4 * MIB, update="backward")
    assert nbytes == found.budget.outgoing_nbytes + max(one.waiting_nbytes for one in found.units)
    assert lent(host_nbytes=4 * MIB, update="forward")[1] == 0, "a fetch applies them to the unit in use"
    assert lent(host_nbytes=GIB, update="backward")[1] == 0, "weights are updated where they lie"


@pytest.mark.parametrize(
    "changes",
    [
        {"offload": "disk"},
        {"offload": "nvme", "nvme": False},
        {"durable": True, "nvme": False},
        {"speculate": True, "nvme": False},
        {"speculate": True, "update": "backward"},
        {"speculate": True, "ranks": 2},
        {"offload": "host", "checkpointing": False},
    ],
)
def test_ways_that_exclude_each_other_are_refused(changes):
    with pytest.raises(ConfigError):
        asked(**changes)
