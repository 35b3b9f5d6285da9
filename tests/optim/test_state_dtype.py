"""Training with 16-, 8- and 4-bit moments equals the reference bit for bit. Real models, a real disk."""

import pytest
import torch

import models
from covers import matrix
from infinity import AdamW, ConfigError, Init, stats
from infinity.engine.engine import engine_of_model
from infinity.reference.moments import STATE_BLOCK

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("repeatable")]

SETTINGS = {"lr": 1e-2, "weight_decay": 0.1}
LEAST = {"bf16": "128KiB", "int8": "256KiB", "int4": "256KiB"}


@pytest.mark.parametrize(
    *matrix(
        together=1,
        update=["forward", "backward"],
        memory=["least", "1MiB", "64MiB"],
        state_dtype=["bf16", "int8", "int4"],
        name=["llama", "gpt2", "mixtral"],
    )
)
def test_training_equals_the_reference_at_any_budget(folder, name, state_dtype, memory, update):
    budget = LEAST[state_dtype] if memory == "least" else memory
    init = {"nvme": folder, "host_memory": budget, "state_dtype": state_dtype}
    models.compare(name, SETTINGS, init, steps=4, update=update)


@pytest.mark.parametrize("state_dtype", ["bf16", "int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_clipping_and_accumulation_change_nothing_about_that(folder, state_dtype):
    init = {"nvme": folder, "host_memory": "1MiB", "state_dtype": state_dtype}
    models.compare("llama", {**SETTINGS, "max_norm": 0.5}, init, steps=4, accumulate=2)


def test_another_seed_rounds_otherwise(folder):
    masters = []
    for seed in (0, 0, 1):
        model = models.build("llama", nvme=str(folder), host_memory="1MiB", state_dtype="bf16")
        optimizer = AdamW(model.parameters(), **SETTINGS, seed=seed)
        models.train(model, optimizer, 4)
        masters.append(optimizer.state_dict()["state"][0]["exp_avg"])
    assert torch.equal(masters[0], masters[1])
    assert not torch.equal(masters[0], masters[2])


@pytest.mark.parametrize(("state_dtype", "width"), [("fp32", 8), ("bf16", 4), ("int8", 2), ("int4", 1)])
def test_the_records_take_what_their_format_takes(folder, state_dtype, width):
    with Init(nvme=str(folder), host_memory="64MiB", state_dtype=state_dtype):
        model = torch.nn.Linear(256, 4096, bias=False)
    AdamW(model.parameters())
    numel = 256 * 4096
    scales = numel // STATE_BLOCK * 8 if state_dtype in ("int8", "int4") else 0
    taken = stats(model).nvme_nbytes
    assert numel * (4 + width) + scales <= taken <= 1.1 * (numel * (4 + width) + scales)


@pytest.mark.parametrize(("memory", "tile_numel"), [("512KiB", 4096), ("4MiB", 8192)])
def test_in_small_tiles_scales_move_about_as_many_bytes_as_they_have(folder, memory, tile_numel):
    with Init(nvme=str(folder), host_memory=memory, state_dtype="int8"):
        model = torch.nn.Linear(1024, 2048, bias=False)
    engine, optimizer = engine_of_model(model), AdamW(model.parameters(), update="backward")
    assert engine.budget.tile_numel == tile_numel
    engine.pins = None  # host memory would keep them
    moved = []
    for _ in range(3):
        engine.lane.drain()
        moved.append(engine.traffic.read["nvme", "scale"] + engine.traffic.written["nvme", "scale"])
        model(torch.ones(1, 1024, dtype=torch.bfloat16)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    scales = 1024 * 2048 // STATE_BLOCK * 8
    assert moved[2] - moved[1] == 2 * scales


@pytest.mark.parametrize("state_dtype", ["bf16", "int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_a_loaded_state_is_the_saved_one(folder, state_dtype):
    init = {"nvme": str(folder), "host_memory": "1MiB", "state_dtype": state_dtype}
    model = models.build("llama", **init)
    optimizer = AdamW(model.parameters(), **SETTINGS)
    models.train(model, optimizer, 3)
    saved = optimizer.state_dict()
    other = models.build("llama", **init)
    loaded = AdamW(other.parameters(), **SETTINGS)
    other.load_state_dict(model.state_dict())
    loaded.load_state_dict(saved)
    again = loaded.state_dict()["state"]
    for number, state in saved["state"].items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[key], again[number][key]), (number, key)


def test_a_type_that_is_none_is_refused_by_name(folder):
    with pytest.raises(ConfigError, match=r"state_dtype='fp8'.*'fp32', 'bf16', 'int8', 'int4'"):
        Init(nvme=str(folder), host_memory="1MiB", state_dtype="fp8")
