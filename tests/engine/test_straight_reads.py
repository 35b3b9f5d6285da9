"""Weights that the drive reads from a checkpoint's files straight to where they compute. Trusted: plain
PyTorch; the recipe.
"""

import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import infinity
from infinity import AdamW, CorruptionError, Init, reference
from infinity.engine.engine import engine_of_model
from infinity.sizes import BLOCK
from infinity.storage.safetensors_file import TensorReader

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("deterministic")]

WIDTH, LAYERS = 1024, 6
X = torch.ones(4, WIDTH, dtype=torch.bfloat16) / 16


def layers(*, bias=False, device="cpu"):
    with torch.device(device):
        return nn.Sequential(
            *[nn.Linear(WIDTH, WIDTH, bias=bias, dtype=torch.bfloat16) for _ in range(LAYERS)]
        )


def saved(folder, **options):
    torch.manual_seed(1)
    plain = layers(**options)
    path = folder / "layers.safetensors"
    save_file(plain.state_dict(), path)
    return plain, path


def loaded(path, *, host_memory="8MiB", bias=False, **options):
    with Init(nvme=str(path.parent), host_memory=host_memory, **options):
        ours = layers(bias=bias, device="meta")
        with safe_open(path, framework="pt") as file:
            for name, _ in list(ours.named_parameters()):
                module, _, kind = name.partition(".")
                setattr(ours[int(module)], kind, nn.Parameter(file.get_slice(name)[...]))
    return ours


def places(model):
    """Have each layer note where its weight lies while it computes; return the notes, by unit."""
    found = {unit: set() for unit in engine_of_model(model).units}
    for layer, unit in zip(model, found, strict=True):
        layer.register_forward_pre_hook(
            lambda module, _, here=found[unit]: here.add(module.weight.data_ptr() % BLOCK)
        )
    return found


@torch.no_grad()
def outputs(model, rounds=3):
    return [model(X) for _ in range(rounds)][-1]


@pytest.mark.parametrize("bias", [False, True])
def test_a_weight_computes_where_the_drive_has_put_it_and_nothing_is_read_twice(folder, bias):
    plain, path = saved(folder, bias=bias)
    ours = loaded(path, bias=bias, frozen=True)
    found = places(ours)
    assert torch.equal(outputs(ours), plain(X))
    engine = engine_of_model(ours)
    with TensorReader(path) as file:
        skews = [file.begins_at(f"{number}.weight") % BLOCK for number in range(LAYERS)]
    assert all(skews)
    streamed = [number for number, unit in enumerate(engine.units) if not unit.in_place]
    assert streamed
    assert all(skews[number] in found[engine.units[number]] for number in streamed)
    engine.lane.drain()
    before = infinity.stats(ours)
    outputs(ours, 1)
    engine.lane.drain()
    read = infinity.stats(ours).since(before).checkpoint_read_nbytes
    weight = 2 * WIDTH * WIDTH
    count = round(read / weight)
    edges = 4 + engine.units[0].record.shard.numel // engine.units[0].record.tile_numel // 8
    assert 0 < count < LAYERS
    assert weight * count <= read <= (weight + 2 * WIDTH + edges * BLOCK) * count
    assert engine.held_nbytes() <= engine.budget.total_nbytes


def test_other_content_than_was_read_first_is_named(folder):
    plain, path = saved(folder)
    ours = loaded(path, frozen=True)
    assert torch.equal(outputs(ours), plain(X))
    status, data = path.stat(), bytearray(path.read_bytes())
    data[-2 * WIDTH * WIDTH * LAYERS :] = bytes(2 * WIDTH * WIDTH * LAYERS)
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(CorruptionError, match=rf"read from {path} at byte .* not those that were read"):
        outputs(ours, 1)


@pytest.mark.parametrize("update", ["forward", "backward"])
def test_what_is_thawed_between_two_rounds_trains_as_the_recipe(folder, update):
    plain, path = saved(folder)
    plain, ours = reference.prepare(plain), loaded(path, host_memory="12MiB")
    assert torch.equal(outputs(ours), outputs(plain))
    optimizers = (
        reference.ReferenceAdamW(plain.parameters(), lr=1e-2),
        AdamW(ours.parameters(), lr=1e-2, update=update),
    )
    for _ in range(3):
        for model, optimizer in zip((plain, ours), optimizers, strict=True):
            model(X).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(outputs(ours, 1), outputs(plain, 1))
