"""Experts that are fetched because the next layer's router names them ahead: rightly, or for nothing.

Real models on a real disk. Trusted: transformers' models in memory.
"""

import pytest
import torch
import transformers
from torch import nn

import models
from infinity import AdamW, Init, stats
from infinity.engine import foresight
from infinity.engine.engine import engine_of_model
from infinity.engine.foresight import routers_of
from infinity.planning.trace import Phase
from infinity.reference import ReferenceAdamW, prepare
from infinity.tiling import TiledExperts

pytestmark = pytest.mark.disk
GIVEN = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
IDS = torch.tensor([[3, 5, 7, 9]])


def built(folder, name="mixtral", **changes):
    with Init(nvme=folder, host_memory="512KiB"):
        return models.of_experts(name, "grouped_mm", **changes)


def guesses_of(model):
    """Return what guesses the layers of a model, in their order."""
    layers = [one._follower._foresight for one in model.modules() if isinstance(one, TiledExperts)]
    assert [one.of_next for one in layers[:-1]] == [one.of_this for one in layers[1:]]
    return [guess for one in layers for guess in one.of_this]


@pytest.mark.parametrize("name", models.OF_EXPERTS)
def test_the_routers_of_transformers_are_found_beside_their_experts(folder, name):
    model = built(folder, name)
    experts = [one for one in model.modules() if isinstance(one, TiledExperts)]
    found = list(routers_of(list(model.named_modules())))
    assert [one for one, _ in found] == experts != []
    assert all("Router" in type(router).__name__ for _, router in found)
    assert len(guesses_of(model)) == len(experts) - 1


def test_what_is_guessed_is_fetched_ahead_and_no_token_is_another(folder):
    plain = models.prepared_of_experts("mixtral", "grouped_mm").eval()
    model = built(folder).eval()
    (guess,) = guesses_of(model)
    assert torch.equal(model.generate(IDS, **GIVEN), plain.generate(IDS, **GIVEN))
    assert guess.named >= guess.right > 0
    engine = engine_of_model(model)
    engine.lane.drain()
    assert engine.held_nbytes() <= engine.budget.total_nbytes


def test_guesses_that_are_wrong_are_made_seldom_and_cost_no_bit(folder, monkeypatch):
    monkeypatch.setattr(foresight, "LEAST_RIGHT", 1.1)
    plain = models.prepared_of_experts("mixtral", "grouped_mm").eval()
    model = built(folder).eval()
    (guess,), seen = guesses_of(model), []
    came = guess.came
    monkeypatch.setattr(guess, "came", lambda units: (seen.append(bool(guess._guessed)), came(units)))
    given = {**GIVEN, "max_new_tokens": 40}
    assert torch.equal(model.generate(IDS, **given), plain.generate(IDS, **given))
    assert seen[0]
    assert 1 <= sum(seen) <= 1 + len(seen) // foresight.TRIED_EVERY


def test_a_router_is_not_seen_by_others_when_it_guesses_and_none_guesses_in_training(folder):
    model = built(folder)
    calls = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda *_: calls.append(1))
    optimizer = AdamW(model.parameters(), lr=1e-2)
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    (guess,) = guesses_of(model)
    assert (len(calls), guess.named) == (2, 0)
    model.eval()
    with torch.no_grad():
        model(input_ids=IDS)
    assert len(calls) == 4
    assert guess.named > 0
    assert stats(model).rounds == 1


def of_phimoe():
    return transformers.PhimoeForCausalLM(
        transformers.PhimoeConfig(**{**models.ROUTED, "num_local_experts": 12}, input_jitter_noise=0.1)
    )


def test_a_router_that_draws_numbers_and_changes_its_input_in_training_is_not_run_then(folder):
    losses = []
    for build in (lambda: prepare(of_phimoe()), lambda: built_by(of_phimoe, folder)):
        torch.manual_seed(0)
        model = build()
        torch.manual_seed(1)
        with torch.no_grad():
            losses.append([model(input_ids=IDS, labels=IDS).loss.item() for _ in range(3)])
    assert losses[0] == losses[1]
    guesses = guesses_of(model)
    assert len(guesses) == 1
    assert guesses[0].named == 0


def built_by(build, folder):
    with Init(nvme=folder, host_memory="512KiB"):
        return build()


class _Given(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(12, 64))

    def forward(self, hidden, bias):
        raise NotImplementedError


def test_a_router_that_is_given_more_than_hidden_states_does_not_guess():
    one = _Given()
    _Given.__module__, _Given.__name__ = "transformers.some", "SomeTopKRouter"
    assert not foresight._is_router(one, 12)


def test_hidden_states_of_another_size_than_the_routers_are_not_looked_at(folder):
    model = built(folder).eval()
    (guess,) = guesses_of(model)
    with torch.no_grad():
        model(input_ids=IDS)
        guess.look(torch.zeros(3, 7, dtype=torch.bfloat16))  # experts of a latent size
    assert torch.isfinite(model(input_ids=IDS).logits).all()


def test_where_memory_holds_all_experts_none_is_guessed():
    with Init(host_memory="64MiB"):
        model = models.of_experts("mixtral", "grouped_mm")
    assert guesses_of(model) == []


CHECKPOINTS = {"none": None, "reentrant": {"use_reentrant": True}, "not": {"use_reentrant": False}}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_backward_has_the_experts_of_a_layer_on_their_way_when_it_comes_to_the_layer_behind(folder, kind):
    losses, late = [], []
    plain = models.prepared_of_experts("mixtral", "grouped_mm", num_hidden_layers=4)
    model = built(folder, num_hidden_layers=4)
    residency = engine_of_model(model).residency
    use = residency._use_routed

    def watched(unit, phase):
        if phase is Phase.BACKWARD:
            late.append((int(unit.name.split(".")[2]), unit.residence.fetch is None))
        use(unit, phase)

    residency._use_routed = watched
    for one, optimizer in ((plain, ReferenceAdamW), (model, AdamW)):
        if CHECKPOINTS[kind] is not None:
            one.gradient_checkpointing_enable(CHECKPOINTS[kind])
        step = optimizer(one.parameters(), lr=1e-2)
        for _ in range(3):
            loss = one(input_ids=IDS, labels=IDS, use_cache=False).loss
            loss.backward()
            step.step()
            step.zero_grad()
            losses.append(loss.item())
    assert losses[:3] == losses[3:]
    assert {layer for layer, _ in late} == {0, 1, 2, 3}
    assert {layer for layer, is_late in late if is_late} <= {3}


def test_in_training_experts_are_fetched_ahead_whose_update_is_due_in_any_case(folder):
    plain = models.prepared_of_experts("mixtral", "grouped_mm")
    with Init(nvme=folder, host_memory="4MiB"):
        model = models.of_experts("mixtral", "grouped_mm")
    (guess,), losses = guesses_of(model), []
    for one, optimizer in ((plain, ReferenceAdamW), (model, AdamW)):
        step = optimizer(one.parameters(), lr=1e-2)
        for _ in range(8):
            loss = one(input_ids=IDS, labels=IDS).loss
            loss.backward()
            step.step()
            step.zero_grad()
            losses.append(loss.item())
    assert losses[:8] == losses[8:]
    assert guess.due >= guess.due_right > 0
    assert guess.named == 0
