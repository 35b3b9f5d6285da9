"""A loop of Accelerate, as its documentation writes it, on a model built in Init. Trusted: the recipe."""

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import infinity
import models
from infinity.reference import ReferenceAdamW, prepare
from infinity.reference import clip_grad_norm_ as reference_clip

pytestmark = [
    pytest.mark.disk,
    pytest.mark.usefixtures("fresh_accelerate", "repeatable"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]


def train(model, optimizer, clip, mixed_precision):
    """Train as the documentation of Accelerate does; return losses, norms and what was prepared."""
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True, mixed_precision=mixed_precision)
    loader = DataLoader(models.batch(0, rows=12), batch_size=2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 3)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    model.train()
    losses, norms = [], []
    for ids in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            losses.append(loss.item())
            if accelerator.sync_gradients:
                norms.append(float(clip(accelerator, model, optimizer)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return losses, norms, (accelerator, model, optimizer)


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_loop_has_the_recipes_bits(folder, name, mixed_precision):
    torch.manual_seed(0)
    plain = prepare(models.MODELS[name]())
    torch.manual_seed(0)
    with infinity.Init(nvme=str(folder), host_memory="1MiB"):
        ours = models.MODELS[name]()
    recipe = ReferenceAdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    optimizer = infinity.AdamW(ours.parameters(), lr=1e-2, weight_decay=0.1)
    expected, expected_norms, _ = train(
        plain,
        recipe,
        lambda _, __, prepared: reference_clip(prepared.optimizer, 0.5),
        mixed_precision,
    )
    found, norms, (accelerator, model, _) = train(
        ours,
        optimizer,
        lambda accelerator, model, _: accelerator.clip_grad_norm_(model.parameters(), 0.5),
        mixed_precision,
    )
    assert found == expected
    assert norms == pytest.approx(expected_norms, rel=1e-6)
    assert accelerator.unwrap_model(model) is ours
    models.assert_same_state(ours, optimizer, plain, recipe)


def test_an_optimizer_of_torch_is_refused_before_anything_is_prepared(folder):
    with infinity.Init(nvme=str(folder), host_memory="1MiB"):
        model = models.MODELS["gpt2"]()
    with pytest.raises(infinity.UnsupportedError, match=r"use `infinity\.AdamW\(params, lr=0\.01\)`"):
        torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = infinity.AdamW(model.parameters(), lr=0.01)
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    before = model.state_dict()["transformer.h.0.attn.c_attn.weight"]
    accelerator.backward(model(input_ids=models.batch(0), labels=models.batch(0)).loss)
    optimizer.step()
    assert not torch.equal(before, model.state_dict()["transformer.h.0.attn.c_attn.weight"])


def test_states_are_saved_and_loaded(folder):
    with infinity.Init(nvme=str(folder), host_memory="1MiB"):
        ours = models.MODELS["llama"]()
    optimizer = infinity.AdamW(ours.parameters(), lr=1e-2)
    *_, (accelerator, model, prepared) = train(
        ours,
        optimizer,
        lambda accelerator, model, _: accelerator.clip_grad_norm_(model.parameters(), 1.0),
        "no",
    )
    accelerator.save_state(str(folder / "state"))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    moments = prepared.state_dict()["state"][3]["exp_avg"].clone()
    ids = models.batch(9)
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    prepared.step()
    assert not torch.equal(prepared.state_dict()["state"][3]["exp_avg"], moments)
    accelerator.load_state(str(folder / "state"))
    found = model.state_dict()
    assert [name for name in weights if not torch.equal(weights[name], found[name])] == []
    assert torch.equal(prepared.state_dict()["state"][3]["exp_avg"], moments)
