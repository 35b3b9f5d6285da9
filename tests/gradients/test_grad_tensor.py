"""In-place operations on gradients that are elsewhere, and views of them, beside plain torch. Faked: nothing.

With several ranks: test_ranks.py, "edited".
"""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import infinity
from covers import matrix
from infinity import UnsupportedError
from infinity.gradients.gradient import Form
from parity import build_both, differences, engine_in, gradients, optimizers

pytestmark = pytest.mark.usefixtures("deterministic")


@pytest.fixture(params=["in memory", pytest.param("spilled", marks=pytest.mark.disk)])
def both(request):
    if request.param == "in memory":
        return build_both(build)
    pair = build_both(build, nvme=request.getfixturevalue("folder"))
    engine_in(pair[1]).kept.limit_nbytes = 0
    return pair


def build():
    return nn.Sequential(nn.Linear(12, 12), nn.GELU(), nn.Linear(12, 12, bias=False))


def backward(model, number=0):
    x = torch.randn(4, 12, generator=torch.Generator().manual_seed(number)).bfloat16()
    model(x).float().square().sum().backward()


def grads(model):
    return [one.grad for one in model.parameters()]


def each(change):
    return lambda model: [change(one) for one in grads(model)]


def last(change):
    return lambda model: change(model[2].weight.grad)


EDITS = {
    "clip_grad_value_": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01),
    "clip_grad_value_ foreach": lambda model: nn.utils.clip_grad_value_(
        model.parameters(), 0.01, foreach=True
    ),
    "div_": each(lambda grad: grad.div_(3)),
    "mul_": each(lambda grad: grad.mul_(0.3)),
    "mul_ by a tensor": each(lambda grad: grad.mul_(torch.tensor(0.3, dtype=torch.float64))),
    "through data": each(lambda grad: grad.data.mul_(0.3)),
    "data": each(lambda grad: setattr(grad, "data", torch.full_like(grad, 0.25))),
    "clamp_": each(lambda grad: grad.clamp_(-1e-2, 1e-2)),
    "add_": each(lambda grad: grad.add_(0.123 * torch.ones_like(grad))),
    "add_ alpha": each(lambda grad: grad.add_(torch.ones_like(grad), alpha=0.1)),
    "sub_ of its mean": each(lambda grad: grad.sub_(grad.mean())),
    "copy_": each(lambda grad: grad.copy_(grad.sign())),
    "detach_": each(lambda grad: grad.detach_().zero_()),
    "out": each(lambda grad: torch.mul(grad, 0.3, out=grad)),
    "foreach": lambda model: torch._foreach_add_(torch._foreach_mul_(grads(model), 0.3) or grads(model), 0.1),
    "rows": last(lambda grad: grad.__setitem__(slice(0, 3), 0)),
    "a row": last(lambda grad: grad[1].fill_(0.5)),
    "a row of a part": last(lambda grad: grad[2:9][1].mul_(3)),
    "a mask": last(lambda grad: grad.__setitem__(grad > 0, 0.25)),
    "flat": last(lambda grad: grad.view(-1)[5:9].mul_(7)),
    "transposed": last(lambda grad: grad.t().copy_(grad.clone())),
    "t_": last(lambda grad: grad.t_()),
    "chunks": last(lambda grad: [one.mul_(number) for number, one in enumerate(grad.chunk(4))]),
    "iterated": last(lambda grad: [one.neg_() for one in grad]),
    "with itself": last(lambda grad: grad[0].add_(grad[1])),
    "as a source": last(lambda grad: torch.ones_like(grad).add_(grad).copy_(grad)),
}


@pytest.mark.parametrize(*matrix(together=1, name=list(EDITS), backwards=[2, 1]))
def test_what_changes_a_gradient_in_place_does_what_it_does_in_torch(name, backwards, both):
    shown = []
    for model, optimizer in zip(both, optimizers(*both), strict=True):
        for step in range(2):
            for number in range(backwards):
                backward(model, 2 * step + number)
            EDITS[name](model)
            shown.append(gradients(model))
            optimizer.step()
            optimizer.zero_grad()
        shown.append(dict(model.state_dict()))
    assert differences(shown[:3], shown[3:]) == []


@pytest.mark.parametrize("name", ["div_", "a row"])
def test_a_gradient_of_zeros_and_one_that_is_decided_may_be_changed(name, both):
    shown = []
    for model, optimizer in zip(both, optimizers(*both), strict=True):
        backward(model)
        optimizer.step()
        EDITS[name](model)  # the step has what it was
        shown.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        EDITS["add_"](model)
        shown.append(gradients(model))
        optimizer.step()
        EDITS[name](model)
        backward(model, 1)
        optimizer.step()
        shown.append([gradients(model), dict(model.state_dict())])
    assert differences(shown[:3], shown[3:]) == []


def test_clipping_before_and_after_a_change_is_what_the_recipe_says(both):
    shown = []
    for model, optimizer in zip(both, optimizers(*both), strict=True):
        clip = nn.utils.clip_grad_norm_ if model is both[1] else infinity.reference.clip_grad_norm_
        what = model.parameters() if model is both[1] else optimizer
        backward(model)
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        clip(what if model is not both[1] else list(model.parameters()), 0.1)
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        shown.append([gradients(model), dict(model.state_dict())])
    assert differences(*shown) == []


def test_a_gradient_kept_beyond_zero_grad_keeps_its_values(both):
    shown = []
    for model, optimizer in zip(both, optimizers(*both), strict=True):
        backward(model)
        kept = grads(model)
        optimizer.zero_grad()
        backward(model, 1)
        for one, before in zip(model.parameters(), kept, strict=True):
            one.grad = one.grad + before
        shown.append([one.clone() for one in kept])
        optimizer.step()
        shown[-1].append(dict(model.state_dict()))
    assert differences(*shown) == []


def test_a_step_that_is_decided_is_made_whatever_is_assigned_after_it(both):
    shown = []
    for model, optimizer in zip(both, optimizers(*both), strict=True):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        model[0].bias.grad = torch.full((12,), 0.25, dtype=torch.bfloat16)
        optimizer.step()
        shown.append(dict(model.state_dict()))
    assert differences(*shown) == []


def test_the_gradient_of_one_parameter_may_be_given_to_another(both):
    shown = []
    for model, optimizer in zip(both, optimizers(*both), strict=True):
        backward(model)
        model[0].weight.grad = model[2].weight.grad
        optimizer.step()
        shown.append(dict(model.state_dict()))
    assert differences(*shown) == []


def test_a_view_may_take_the_place_of_a_gradient(both):
    shown = []
    for model, optimizer in zip(both, optimizers(*both), strict=True):
        backward(model)
        model[2].weight.grad = model[2].weight.grad.view(-1).view(12, 12)
        backward(model, 1)
        optimizer.step()
        shown.append([gradients(model), dict(model.state_dict())])
    assert differences(*shown) == []


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda grad: pickle.loads(pickle.dumps(grad)),  # noqa: S301
    "float": lambda grad: torch.from_numpy(grad.float().numpy()).bfloat16(),
    "tolist": lambda grad: torch.tensor(grad.tolist()).bfloat16(),
    "clone": lambda grad: grad.clone(),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_of_a_gradient_are_plain_tensors(name, both):
    for model in both:
        backward(model)
    plain, ours = (model[2].weight.grad for model in both)
    for one in (ours, ours[1:3]):
        made = COPIES[name](one)
        assert type(made) is torch.Tensor
        assert torch.equal(made, plain if one is ours else plain[1:3])
    file = io.BytesIO()
    torch.save({"grad": ours}, file)
    file.seek(0)
    assert torch.equal(torch.load(file)["grad"], plain)


def test_arrays_of_a_gradient_are_to_be_read(tmp_path):
    with infinity.Init(host_memory="16MiB", dtype="fp32"):
        model = nn.Linear(4, 4)
    model(torch.ones(1, 4)).sum().backward()
    for one in (model.weight.grad, model.weight.grad[0]):
        assert np.asarray(one).sum() == one.sum().item()
        with pytest.raises(ValueError, match="read-only"):
            one.numpy()[0] = 1


@pytest.mark.parametrize(
    "use",
    [
        lambda grad: grad.data_ptr(),
        lambda grad: grad.untyped_storage(),
        lambda grad: grad.share_memory_(),
        torch.from_dlpack,
        lambda grad: grad[0].data_ptr(),
        lambda grad: grad.resize_(3, 3),
        lambda grad: grad.unsqueeze_(0),
        lambda grad: setattr(grad, "data", torch.ones(3)),
        lambda grad: setattr(grad, "data", grad.double()),
    ],
)
def test_what_a_gradient_cannot_do_is_done_on_its_clone(use, both):
    _, ours = both
    backward(ours)
    with pytest.raises(UnsupportedError, match=r"p\.grad\.clone\(\)"):
        use(ours[2].weight.grad)
    use(ours[2].weight.grad.clone())


def test_unscaled_fp16_gradients_are_changed_in_fp32():
    with infinity.Init(host_memory="16MiB", dtype="fp16"):
        model = nn.Linear(4, 1, bias=False)
    optimizer = infinity.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    x = torch.full((1, 4), 2.0**-24, dtype=torch.float16)
    scaler.scale(model(x).float().sum() * 2.0**-10).backward()
    scaler.unscale_(optimizer)  # to 2**-34, which fp16 has not
    model.weight.grad.mul_(2.0**32)
    nn.utils.clip_grad_value_(model.parameters(), 2.0**-3)
    assert model.weight.grad.tolist() == [[2.0**-3] * 4]
    scaler.step(optimizer)


def test_a_gradient_that_was_applied_cannot_be_changed(both):
    _, ours = both
    optimizer = infinity.AdamW(ours.parameters(), update="backward")
    backward(ours)
    assert ours[2].weight.grad.gradient.form is Form.APPLIED
    with pytest.raises(UnsupportedError, match=r'clamp_.*update="forward"'):
        ours[2].weight.grad.clamp_(-1, 1)
    optimizer.step()


def test_the_budget_counts_what_updates_keep_of_gradients_after_zero_grad():
    plain, model = build_both(build)
    _, optimizer = optimizers(plain, model)
    engine = engine_in(model)
    before = engine.kept.held_nbytes
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    waiting = [update.tensor.nbytes for unit in engine.units for update in unit.pending.values()]
    assert sum(waiting) > 0
    assert engine.kept.held_nbytes == before + sum(waiting)
    model(torch.zeros(1, 12, dtype=torch.bfloat16))
    assert engine.kept.held_nbytes == before
