"""Training from NVMe equals training in memory, bit for bit. Real files, real models, the reference recipe.

torch runs on one thread, with deterministic algorithms, where it would not repeat itself otherwise.
"""

import pytest
import torch

import models
from covers import matrix
from infinity import stats

pytestmark = [
    pytest.mark.disk,
    pytest.mark.usefixtures("repeatable"),
    pytest.mark.filterwarnings("ignore:.*use_reentrant.*", "ignore:None of the inputs have requires_grad"),
]

SETTINGS = {"lr": 1e-2, "weight_decay": 0.1}


def compare(name, optimizer, init, *, steps=3, checkpoint=None, update="forward", accumulate=1, clip=None):
    ways = {"checkpoint": checkpoint, "update": update, "accumulate": accumulate, "clip": clip}
    return models.compare(name, optimizer, init, steps=steps, scheduled=True, **ways)[0]


@pytest.mark.parametrize(
    *matrix(
        checkpoint=[None, "reentrant", "non-reentrant"],
        memory=["128KiB", "1MiB", "64MiB"],
        name=["llama", "gpt2", "mixtral"],
    )
)
def test_steps_with_clipping_decay_and_schedule_equal_training_in_memory(folder, name, memory, checkpoint):
    compare(
        name,
        {**SETTINGS, "max_norm": 0.5},
        {"nvme": folder, "host_memory": memory},
        checkpoint=checkpoint,
    )


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["128KiB", "1MiB", "64MiB"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_many_steps_equal_training_in_memory(folder, name, memory):
    init = {"nvme": folder, "host_memory": memory}
    compare(name, {**SETTINGS, "max_norm": 0.5}, init, checkpoint="non-reentrant", steps=20)


@pytest.mark.parametrize("aio", ["io_uring", "threads", "buffered"])
@pytest.mark.parametrize(
    "name",
    ["llama", pytest.param("gpt2", marks=pytest.mark.slow), pytest.param("mixtral", marks=pytest.mark.slow)],
)
def test_every_io_engine_gives_the_same_bits(folder, name, aio):
    model = compare(name, {**SETTINGS, "max_norm": 0.5}, {"nvme": folder, "host_memory": "1MiB", "aio": aio})
    assert stats(model).io_engine == aio


@pytest.mark.parametrize(
    *matrix(
        together=1,
        memory=["128KiB", "64MiB"],
        checkpoint=[None, "reentrant", "non-reentrant"],
        name=["llama", "gpt2", "mixtral"],
    )
)
def test_updating_in_the_backward_gives_the_same_bits(folder, name, checkpoint, memory):
    ways = {"checkpoint": checkpoint, "update": "backward"}
    compare(name, SETTINGS, {"nvme": folder, "host_memory": memory}, **ways)


@pytest.mark.parametrize(*matrix(together=1, name=["llama", "gpt2", "mixtral"], memory=["128KiB", "64MiB"]))
def test_accumulated_gradients_are_summed_in_fp32(folder, name, memory):
    compare(
        name, {**SETTINGS, "max_norm": 0.5}, {"nvme": folder, "host_memory": memory}, steps=2, accumulate=3
    )


@pytest.mark.parametrize(*matrix(together=1, accumulate=[1, 2], memory=["64MiB", "128KiB"]))
def test_torchs_own_clipping_is_right_on_offloaded_gradients(folder, memory, accumulate):
    compare("llama", SETTINGS, {"nvme": folder, "host_memory": memory}, accumulate=accumulate, clip=0.5)


def test_without_an_nvme_tier_the_bits_are_the_same():
    compare("mixtral", {**SETTINGS, "max_norm": 0.5}, {"host_memory": "64MiB"}, checkpoint="non-reentrant")


def test_dropout_is_the_same_when_it_is_recomputed(folder):
    ours, plain = models.both(
        "gpt2-dropout", SETTINGS, {"nvme": folder, "host_memory": "1MiB"}, checkpoint="non-reentrant"
    )
    losses = []
    for model, optimizer, schedule in (ours, plain):
        torch.manual_seed(7)
        losses.append(models.train(model, optimizer, 3, schedule=schedule))
    assert losses[0] == losses[1]
    models.assert_same_state(ours[0], ours[1], plain[0], plain[1])


def test_a_step_that_runs_otherwise_costs_a_miss_and_no_bit(folder):
    ours, plain = models.both("llama", SETTINGS, {"nvme": folder, "host_memory": "1MiB"})
    results = []
    for model, optimizer, _ in (ours, plain):
        losses = models.train(model, optimizer, 3)
        with torch.no_grad():
            losses.append(model(input_ids=models.batch(1)).logits.float().sum().item())
        optimizer.zero_grad()
        skipped, model.model.layers = (
            model.model.layers,
            model.model.layers[:-1],
        )  # the last layer is left out for two steps
        losses += models.train(model, optimizer, 2, first=3)
        model.model.layers = skipped
        losses += models.train(model, optimizer, 2, first=5)
        results.append(losses)
    assert results[0] == results[1]
    models.assert_same_state(ours[0], ours[1], plain[0], plain[1])
    assert stats(ours[0]).rounds == 1, "the forward without gradients is no part of a step"


def test_after_the_first_step_units_are_there_when_they_are_used(folder):
    model = compare("llama", SETTINGS, {"nvme": folder, "host_memory": "4MiB"}, steps=6)
    seen = stats(model)
    assert seen.misses <= 1, "the first use of all is asked for, the others are fetched ahead"
    assert seen.uses == seen.hits + seen.misses
    assert {unit.uses for unit in seen.units} == {6, 12}, "an embedding is not needed in the backward"


def test_pinned_fields_leave_the_disk_alone(folder):
    model = compare("llama", SETTINGS, {"nvme": folder, "host_memory": "64MiB"}, steps=6)
    before = stats(model)
    assert (before.nvme_nbytes, before.host_nbytes > 0) == (0, True)
    model(input_ids=models.batch(3))
    assert stats(model).nvme_read_nbytes == before.nvme_read_nbytes


@pytest.mark.parametrize("update", ["forward", "backward"])
def test_two_models_in_one_process_do_not_meet(folder, update):
    first = models.both("llama", SETTINGS, {"nvme": folder, "host_memory": "1MiB"}, update=update)
    second = models.both("gpt2", SETTINGS, {"nvme": folder, "host_memory": "1MiB"}, update=update)
    for step in range(4):
        for ours, plain in (first, second):
            assert models.train(*ours[:2], 1, first=step) == models.train(*plain[:2], 1, first=step)
    for ours, plain in (first, second):
        models.assert_same_state(ours[0], ours[1], plain[0], plain[1])
