"""What forwards touch of embeddings and 3-D experts. Real models and engines; nothing is faked."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import models
from infinity import AdamW, Init
from infinity.autograd.slices import SlicedParameters
from infinity.engine.engine import engine_of_model

BF16 = torch.bfloat16


class Stacked(nn.Module):
    """Experts held as one 3-D parameter; each token goes through one."""

    def __init__(self, experts=4, width=8):
        super().__init__()
        self.inner = nn.Parameter(torch.randn(experts, width, width) / width)
        self.outer = nn.Parameter(torch.randn(experts, width, width) / width)

    def forward(self, x, routed, scale=1.0):
        routed = routed.reshape(-1).long()
        inner = torch.bmm(self.inner[routed], x.unsqueeze(-1))
        return torch.bmm(self.outer[routed], inner).squeeze(-1) * scale


def offloaded(build):
    with Init(host_memory="16MiB"):
        return build()


def counts(model, name):
    return engine_of_model(model).slices.counted(model.get_parameter(name))


def step(model, optimizer, *calls):
    for call in calls:
        call(model).float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def rows(*numbers):
    return lambda model: model(torch.tensor(numbers))


def tokens(*experts):
    return lambda model: model(torch.ones(len(experts), 8, dtype=BF16), torch.tensor(experts))


def test_the_rows_of_an_embedding_count_once_a_step_however_often_they_are_looked_up():
    model = offloaded(lambda: nn.Sequential(nn.Embedding(10, 4)))
    optimizer = AdamW(model.parameters())
    step(model, optimizer, rows(1, 1, 7), rows(7, 9))
    assert np.flatnonzero(counts(model, "0.weight").frequencies()).tolist() == [1, 7, 9]
    assert counts(model, "0.weight").touched_fraction == pytest.approx(0.3)
    step(model, optimizer, rows(1))
    assert counts(model, "0.weight").steps == 2
    assert counts(model, "0.weight").frequencies()[1] == pytest.approx(1)
    assert 0.4 < counts(model, "0.weight").frequencies()[7] < 0.5


def test_experts_of_3_d_parameters_are_known_from_the_index_of_their_forward():
    model = offloaded(Stacked)
    step(model, AdamW(model.parameters()), tokens(2, 2, 0), tokens(2))
    for name in ("inner", "outer"):
        assert counts(model, name).frequencies().tolist() == [1, 0, 1, 0]


def test_an_index_given_by_name_counts_too():
    model = offloaded(Stacked)
    step(
        model,
        AdamW(model.parameters()),
        lambda model: model(x=torch.ones(1, 8, dtype=BF16), routed=torch.tensor([[3]])),
    )
    assert counts(model, "outer").frequencies().tolist() == [0, 0, 0, 1]


def test_the_experts_of_mixtral_are_counted():
    model = models.build("mixtral", host_memory="16MiB")
    name = "model.layers.1.mlp.experts"
    routed = []
    model.get_submodule(name).register_forward_pre_hook(lambda _, args: routed.append(args[1].clone()))
    optimizer = AdamW(model.parameters())
    ids = models.batch(0, rows=1, length=1)
    model(input_ids=ids, labels=ids).logits.float().sum().backward()
    optimizer.step()
    expected = sorted(set(routed[0].flatten().tolist()))
    assert 0 < len(expected) < 4
    for parameter in ("gate_up_proj", "down_proj"):
        touched = counts(model, f"{name}.{parameter}").frequencies()
        assert np.flatnonzero(touched).tolist() == expected


class Repeated(nn.Module):
    """An embedding whose forward a backward repeats, and then with other indices."""

    def __init__(self, reentrant):
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.reentrant = reentrant
        self.asked = iter([torch.tensor([1, 2]), torch.tensor([3, 4])])

    def forward(self, x):
        return checkpoint(lambda x: self.table(next(self.asked)) * x, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_backward_computes_again_is_not_counted_again(reentrant):
    model = offloaded(lambda: Repeated(reentrant))
    x = torch.ones(2, 4, dtype=BF16, requires_grad=True)
    step(model, AdamW(model.parameters()), lambda model: model(x))
    assert next(model.asked, None) is None, "the backward has computed it again"
    assert np.flatnonzero(counts(model, "table.weight").frequencies()).tolist() == [1, 2]


def test_of_a_tied_embedding_nothing_is_said_for_the_output_layer_uses_every_row():
    def build():
        model = nn.ModuleList([nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)])
        model[1].weight = model[0].weight
        return model

    for order in (build, lambda: build()[::-1]):
        model = offloaded(order)
        table = next(one for one in model if isinstance(one, nn.Embedding))
        table(torch.tensor([1]))
        assert engine_of_model(model).slices.counted(table.weight) is None


@pytest.mark.parametrize(
    "other",
    [
        lambda model: model(torch.ones(1, 8, dtype=BF16), torch.tensor([1]), scale=torch.tensor([2])),
        lambda model: model(torch.ones(1, 8, dtype=BF16), torch.tensor([[[1]]])),
        lambda model: model(torch.ones(1, 8, dtype=BF16), torch.tensor([-1])),
        lambda model: model(torch.ones(1, 8, dtype=BF16), torch.tensor([1.0])),
    ],
    ids=["two integer tensors", "three dimensions", "a number that is no slice", "no integers"],
)
def test_a_forward_that_is_not_sure_to_route_ends_the_claim_for_good(other):
    model = offloaded(Stacked)
    tokens(1)(model)
    assert counts(model, "inner") is not None
    other(model)
    assert (counts(model, "inner"), counts(model, "outer")) == (None, None)
    tokens(1)(model)
    assert counts(model, "inner") is None


def test_an_embedding_with_a_forward_of_its_own_is_not_counted():
    class Shifted(nn.Embedding):
        def forward(self, mask):
            return super().forward(mask + 2)

    model = offloaded(lambda: Shifted(10, 4))
    model(torch.tensor([0, 1]))
    assert counts(model, "weight") is None


def test_modules_without_slices_are_not_watched():
    for module in (
        nn.Linear(4, 4),
        nn.Conv2d(2, 2, 3),
        Stacked(experts=1),
        nn.Sequential(nn.Embedding(3, 3)),
    ):
        assert SlicedParameters().watch(module, lambda _: True) is None
    assert SlicedParameters().watch(nn.Embedding(3, 3), lambda _: False) is None


def test_before_a_first_forward_nothing_is_said():
    model = offloaded(lambda: nn.Sequential(nn.Conv1d(4, 2, 1), nn.Embedding(3, 3)))
    model[0](torch.ones(1, 4, 5, dtype=BF16))
    engine_of_model(model).slices.close_step()
    assert (counts(model, "0.weight"), counts(model, "1.weight")) == (None, None)


def test_an_index_that_is_no_row_raises_as_in_torch():
    model = offloaded(lambda: nn.Embedding(10, 4))
    with pytest.raises(IndexError, match="out of range in self"):
        model(torch.tensor([10]))


def test_indices_that_are_no_plain_tensor_in_this_memory_are_left_alone():
    model = offloaded(lambda: nn.Embedding(10, 4))
    found = torch.func.vmap(model)(torch.arange(6).view(2, 3))
    assert found.shape == (2, 3, 4)
    assert counts(model, "weight") is None
