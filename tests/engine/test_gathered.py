"""Trusted: masters as the engine reads them. Faked: nothing."""

import pytest
import torch
from torch import nn

import infinity
from infinity import NotResidentError, UnsupportedError
from infinity.engine.engine import engine_of
from parity import (
    build_both,
    differences,
    gradients,
    halves,
    nothing_waits,
    optimizers,
    resident,
    train,
)

pytestmark = pytest.mark.usefixtures("deterministic")

X = halves(3, 8)


def build():
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))


@pytest.fixture
def both(nvme):
    return build_both(build, nvme=nvme)


def master(parameter):
    return engine_of(parameter).parameters.read(parameter, ["master"])[0]


def test_values_are_ordinary_tensors_inside(both):
    plain, ours = both
    with infinity.gathered(ours):
        assert type(ours[0].weight) is nn.Parameter
        assert differences([*plain.parameters()], [one.clone() for one in ours.parameters()]) == []
        assert ours[0].weight.data_ptr()
    assert resident(ours) == []
    with infinity.gathered(ours[0].weight), pytest.raises(NotResidentError):
        ours[2].weight.sum()
    with infinity.gathered([ours[0].weight, ours[2].bias]):
        assert torch.equal(ours[2].bias, plain[2].bias)


def test_updates_that_are_pending_are_seen(both):
    plain, ours = both
    for model, optimizer in zip(both, optimizers(plain, ours), strict=True):
        train(model, optimizer, X, steps=2)
    with infinity.gathered(ours):
        assert differences([*plain.parameters()], [one.clone() for one in ours.parameters()]) == []


def test_elements_that_change_get_masters_equal_to_them_and_the_others_keep_theirs(both):
    plain, ours = both
    pair = optimizers(plain, ours)

    def loop(model, optimizer, change):
        shown = train(model, optimizer, X, steps=2)
        change(model)
        return shown + train(model, optimizer, X, steps=2, seed=9)

    def change_plain(model):
        with torch.no_grad():
            model[0].weight[2] = 0.5
            model[2].bias.add_(1)

    def change_ours(model):
        before = master(model[0].weight)
        with infinity.gathered(model, write=True):
            change_plain(model)
        after = master(model[0].weight)
        assert torch.equal(after[2], torch.full((8,), 0.5))
        assert torch.equal(after[[0, 1, 3, 4, 5, 6, 7]], before[[0, 1, 3, 4, 5, 6, 7]])

    expected = loop(plain, pair[0], change_plain)
    assert differences(expected, loop(ours, pair[1], change_ours)) == []


def test_it_nests(both):
    _, ours = both
    with infinity.gathered(ours, write=True):
        with infinity.gathered(ours[0], write=True), torch.no_grad():
            ours[0].bias.fill_(3)
        assert ours[0].bias.tolist() == [3.0] * 8
        with torch.no_grad():
            ours[0].weight.fill_(2)
    assert (master(ours[0].bias) == 3).all()
    assert (master(ours[0].weight) == 2).all()
    assert resident(ours) == []


def test_a_model_runs_forward_and_backward_inside(both):
    _, ours = both
    with infinity.gathered(ours):
        shown = []
        for model in both:
            x = X(torch.Generator().manual_seed(1))[0].requires_grad_()
            model(x).float().square().sum().backward()
            shown.append([x.grad, gradients(model)])
    assert differences(*shown) == []
    assert resident(ours) == []


def test_an_exception_inside_writes_nothing(both):
    plain, ours = both

    def zero_and_raise():
        with infinity.gathered(ours, write=True):
            ours[0].weight.data.zero_()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        zero_and_raise()
    assert differences(dict(plain.state_dict()), dict(ours.state_dict())) == []
    assert resident(ours) == []


def test_a_view_kept_beyond_the_with_is_an_error_and_keeps_its_values(both):
    plain, ours = both
    with pytest.raises(NotResidentError, match=r"0: a tensor that shares memory"), infinity.gathered(ours):
        kept = ours[0].weight.detach()
    assert torch.equal(kept, plain[0].weight)
    assert resident(ours) == []
    with infinity.gathered(ours):
        assert torch.equal(ours[0].weight, plain[0].weight)


def test_changing_values_without_write_is_an_error(both):
    plain, ours = both
    with (
        pytest.raises(UnsupportedError, match=r"0.weight.*write=True"),
        infinity.gathered(ours),
        torch.no_grad(),
    ):
        ours[0].weight.zero_()
    assert differences(dict(plain.state_dict()), dict(ours.state_dict())) == []


def test_parameters_that_are_not_ours_are_refused():
    with pytest.raises(ValueError, match="was not built inside"), infinity.gathered(nn.Linear(2, 2)):
        pass


def test_a_step_inside_is_refused_and_works_afterwards(both):
    plain, ours = both
    pair = optimizers(plain, ours)
    x = X(torch.Generator())[0]
    for model in both:
        model(x).float().sum().backward()
    with pytest.raises(UnsupportedError, match="step"), infinity.gathered(ours):
        pair[1].step()
    pair[0].step()
    pair[1].step()
    assert differences(dict(plain.state_dict()), dict(ours.state_dict())) == []


def test_a_graph_older_than_a_change_is_refused(both):
    _, ours = both
    nothing_waits(ours)
    loss = ours(X(torch.Generator())[0].requires_grad_()).float().sum()
    with infinity.gathered(ours, write=True), torch.no_grad():
        ours[0].weight.zero_()
    with pytest.raises(RuntimeError, match="were changed"):
        loss.backward()


# Shapes and types

OTHERS = {
    "smaller": lambda weight: setattr(weight, "data", torch.full((2, 8), 5.0, dtype=torch.bfloat16)),
    "larger": lambda weight: setattr(weight, "data", torch.full((57, 8), 5.0, dtype=torch.bfloat16)),
    "transposed rows": lambda weight: setattr(weight, "data", weight.data.view(4, 16)),
    "another type": lambda weight: setattr(weight, "data", weight.data.float()),
    "set_": lambda weight: weight.set_(torch.ones(9, dtype=torch.bfloat16)),
}


@pytest.mark.parametrize("change", OTHERS)
def test_a_value_of_another_shape_or_type_is_refused_by_name_and_nothing_is_written(both, change):
    plain, ours = both
    with (
        pytest.raises(
            UnsupportedError, match=r"2.weight would become .*record.*\(8, 8\). Nothing is written"
        ),
        infinity.gathered(ours, write=True),
        torch.no_grad(),
    ):
        ours[0].weight.fill_(3)
        OTHERS[change](ours[2].weight)
    assert differences(dict(plain.state_dict()), dict(ours.state_dict())) == []
    assert resident(ours) == []
    shown = []
    for model, optimizer in zip(both, optimizers(plain, ours), strict=True):
        shown.append(train(model, optimizer, X, steps=1))
    assert differences(*shown) == []


def test_values_that_replace_others_of_their_shape_are_written(both):
    _, ours = both
    values = torch.arange(64, dtype=torch.bfloat16).view(8, 8)
    with infinity.gathered(ours, write=True):
        ours[0].weight.data = values.t()
    assert torch.equal(ours.state_dict()["0.weight"], values.t())
    assert torch.equal(master(ours[0].weight), values.t().float())


def test_a_write_inside_a_read_is_kept(both):
    _, ours = both
    with infinity.gathered(ours):
        with infinity.gathered(ours[0], write=True), torch.no_grad():
            ours[0].weight.data.fill_(2)
        assert (ours[0].weight == 2).all()
    assert (master(ours[0].weight) == 2).all()


def test_writing_inside_a_forward_that_uses_the_parameters_is_refused_whatever_the_budget(both):
    _, ours = both

    def before(module, _args):
        with infinity.gathered(module, write=True):
            pass

    hook = ours[0].register_forward_pre_hook(before)
    with pytest.raises(UnsupportedError, match=r"0: gathered\(..., write=True\) inside a forward"):
        ours(X(torch.Generator())[0])
    hook.remove()
    with infinity.gathered(ours, write=True):
        ours(X(torch.Generator())[0])
    assert resident(ours) == []


def test_resizing_embeddings_is_refused_and_the_advice_works(tmp_path):
    import transformers

    config = {"vocab_size": 32, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 1}
    with infinity.Init(host_memory="16MiB"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**config))
    before = model.state_dict()["lm_head.weight"]
    with (
        pytest.raises(
            UnsupportedError, match=r"wte.weight would become .*\(40, 8\).*save_pretrained.*from_pretrained"
        ),
        infinity.gathered(model, write=True),
    ):
        model.resize_token_embeddings(40)
    infinity.save_pretrained(model, tmp_path / "saved")
    with infinity.Init(host_memory="16MiB"):
        larger = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "saved")
        larger.resize_token_embeddings(40)
    after = larger.state_dict()["lm_head.weight"]
    assert after.shape == (40, 8)
    assert torch.equal(after[:32], before)
    optimizer = infinity.AdamW(larger.parameters(), lr=1e-2)
    ids = torch.arange(30, 38)[None]
    larger(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    assert not torch.equal(larger.state_dict()["lm_head.weight"][39], after[39])


def penalized(model, x):
    squares = [one.square().sum() for one in model.parameters()]
    crossed = (model[0].weight @ model[0].weight.t()).square().sum()
    return (model(x).float().square().sum() + sum(squares) + crossed).float()


def test_a_penalty_on_parameters_says_that_its_backward_belongs_inside_where_it_works(both):
    plain, ours = both
    x = X(torch.Generator())[0]
    with pytest.raises(
        NotResidentError, match=r"a backward through what it computes, in `with infinity\.gath"
    ):
        penalized(ours, x)
    penalized(plain, x).backward()
    with infinity.gathered(ours):
        penalized(ours, x).backward()
    assert differences(gradients(plain), gradients(ours)) == []


def test_a_graph_that_outlives_gathered_is_warned_of_before_torch_refuses_its_backward(both, caplog):
    _, ours = both
    with infinity.gathered(ours):
        norms = [one.norm().item() for one in ours.parameters()]
    assert caplog.text == ""
    with infinity.gathered(ours):
        squares = sum(one.square().sum() for one in ours.parameters())
    assert "0.weight: a graph made inside `with infinity.gathered(...)` outlives it" in caplog.text
    assert squares.item() == pytest.approx(sum(norm**2 for norm in norms), rel=0.02)
    with pytest.raises(RuntimeError, match="has been modified"):
        squares.backward()
    with infinity.gathered(ours):
        squares = sum(one.square().sum() for one in ours.parameters())
    assert caplog.text.count("outlives") == 1
    kept = []
    with pytest.raises(NotResidentError, match="where a graph holds it, run"), infinity.gathered(ours):
        kept.append(ours[0].weight @ ours[0].weight.t())


@pytest.mark.disk
def test_updates_in_a_backward_inside_gathered_wait_for_its_end_and_are_the_same(folder):
    masters = []
    for inside in (False, True):
        torch.manual_seed(0)
        with infinity.Init(host_memory="4MiB", nvme=folder):
            model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(12)])
        optimizer = infinity.AdamW(model.parameters(), lr=1e-3, update="backward")
        for step in range(2):
            with infinity.gathered(model if inside else []):
                model(
                    torch.full((2, 512), step + 0.5, dtype=torch.bfloat16)
                ).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        masters.append([master(one) for one in model.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(*masters, strict=True))
