"""AdamW as a torch Optimizer: groups, schedulers, zero_grad, state, and wrong use. Nothing is faked."""

import copy
import math
import re

import pytest
import torch
from torch import nn

import models
from fakes import _Transfer
from infinity import AdamW, Init, UnsupportedError
from infinity.engine.engine import engine_of_model
from infinity.errors import HostMemoryError
from infinity.gradients.grad_tensor import OffloadedGradient
from infinity.reference import ReferenceAdamW
from networks import Net, pair, same, x
from parity import build_both

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("one_thread")]


def test_weights_read_after_a_step_are_the_updated_ones(folder):
    model, optimizer, plain, reference = pair(folder)
    for net, one in ((model, optimizer), (plain, reference)):
        net(x()).sum().backward()
        one.step()
    assert same(model, plain)
    with torch.no_grad():
        assert torch.equal(model(x(1)), plain(x(1)))


def test_a_parameter_without_a_gradient_is_not_updated(folder):
    model, optimizer, plain, reference = pair(folder)
    before = model.state_dict()["unused.weight"]
    for net, one in ((model, optimizer), (plain, reference)):
        net(x()).sum().backward()
        one.step()
        one.zero_grad()
    assert model.unused.weight.grad is None
    assert torch.equal(model.state_dict()["unused.weight"], before)
    assert model.unused.weight not in optimizer.state
    assert same(model, plain)


@pytest.mark.parametrize("form", ["set_to_none", "zeros", "model", "by hand"])
def test_zero_grad_in_every_form_starts_anew(folder, form):
    model, optimizer, plain, reference = pair(folder)
    for net, one in ((model, optimizer), (plain, reference)):
        for number in range(4):
            net(x(number)).square().sum().backward()
            if number % 2:
                one.step()
            if form == "set_to_none":
                one.zero_grad()
            elif form == "zeros":
                one.zero_grad(set_to_none=False)
            elif form == "model":
                net.zero_grad()
            else:
                for parameter in net.parameters():
                    parameter.grad = None
        one.step()  # zeros still decay, None does nothing
    assert same(model, plain)


def test_a_forgotten_zero_grad_accumulates_as_in_torch(folder):
    model, optimizer, plain, reference = pair(folder)
    for net, one in ((model, optimizer), (plain, reference)):
        for number in range(4):
            net(x(number)).square().sum().backward()
            one.step()
    assert same(model, plain)


def test_groups_have_their_own_settings_and_may_come_later(folder):
    plain, model = build_both(Net, nvme=folder, memory="1MiB", waits=True)
    for net, kind in ((model, AdamW), (plain, ReferenceAdamW)):
        groups = [
            {"params": [net.first.weight], "weight_decay": 0.0},
            {"params": [net.first.bias], "lr": 0.1, "betas": (0.5, 0.9)},
        ]
        one = kind(groups, lr=0.01)
        one.add_param_group({"params": net.second.parameters(), "eps": 1e-4})
        for number in range(5):
            net(x(number)).square().sum().backward()
            one.step()
            one.param_groups[0]["lr"] *= 0.5
            one.zero_grad()
    assert same(model, plain)


@pytest.mark.parametrize("update", ["forward", "backward"])
def test_members_of_groups_that_change_places_have_the_options_of_their_new_groups(folder, update):
    plain, model = build_both(Net, nvme=folder, memory="1MiB", waits=True)
    for net, kind, more in ((model, AdamW, {"update": update}), (plain, ReferenceAdamW, {})):
        first = {"params": [net.first.weight, net.first.bias], "lr": 0.1}
        second = {"params": [net.second.weight], "weight_decay": 0.0}
        one = kind([first, second], lr=0.01, **more)
        for number in range(5):
            if number == 2:
                ours, others = (group["params"] for group in one.param_groups)
                ours[0], others[0] = others[0], ours[0]
            net(x(number)).square().sum().backward()
            one.step()
            one.zero_grad()
    assert same(model, plain)


def test_the_gradient_that_torch_shows_is_the_stored_one(folder):
    model, _, plain, _ = pair(folder)
    for net in (model, plain):
        net(x()).square().sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        if theirs.grad is None:
            continue
        assert isinstance(ours.grad, OffloadedGradient)
        assert (ours.grad.shape, ours.grad.dtype) == (theirs.grad.shape, theirs.grad.dtype)
        assert torch.equal(ours.grad + 0, theirs.grad)
        assert ours.grad.norm().item() == pytest.approx(theirs.grad.double().norm().item(), rel=1e-6)
        assert not ours.grad.isnan().any()


def test_a_gradient_that_the_user_assigns_is_used(folder):
    model, optimizer, plain, reference = pair(folder)
    for net, one in ((model, optimizer), (plain, reference)):
        net(x()).sum().backward()
        net.first.weight.grad = torch.full((16, 8), 0.25, dtype=torch.bfloat16)
        one.step()
    assert same(model, plain)


@pytest.mark.parametrize("error_if_nonfinite", [False, True])
def test_nan_gradients_do_what_they_do_in_torch(folder, error_if_nonfinite):
    model, optimizer, plain, reference = pair(folder)
    for net, one in ((model, optimizer), (plain, reference)):
        (net(x()).sum() * math.nan).backward()
        if error_if_nonfinite:
            with pytest.raises(RuntimeError, match="non-finite"):
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)
        one.step()
    assert all(
        torch.equal(a.isnan(), b.isnan())
        for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True)
    )


def test_the_norm_of_the_last_step_is_known_with_max_norm(folder):
    model, optimizer, plain, _ = pair(folder, {"max_norm": 0.1})
    for net in (model, plain):
        net(x()).square().sum().backward()
    optimizer.step()
    expected = math.sqrt(
        sum(float(p.grad.double().square().sum()) for p in plain.parameters() if p.grad is not None)
    )
    assert optimizer.grad_norm == pytest.approx(expected, rel=1e-6)


def test_max_norm_together_with_clipping_by_hand_is_refused(folder):
    model, optimizer, _, _ = pair(folder, {"max_norm": 0.1})
    model(x()).square().sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    with pytest.raises(UnsupportedError, match=r"max_norm=0\.1"):
        optimizer.step()


def test_a_closure_is_called_with_gradients_enabled(folder):
    model, optimizer, _, _ = pair(folder)

    def closure():
        optimizer.zero_grad()
        loss = model(x()).square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0


def test_a_scheduler_sees_an_ordinary_optimizer(folder):
    model, optimizer, _, _ = pair(folder)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    for number in range(3):
        model(x(number)).sum().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    assert schedule.get_last_lr() == [optimizer.param_groups[0]["lr"]]


def test_optimizer_state_goes_out_and_comes_back(folder):
    model, optimizer, plain, reference = pair(folder)
    for number in range(2):
        for net, one in ((model, optimizer), (plain, reference)):
            net(x(number)).square().sum().backward()
            one.step()
            one.zero_grad()
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    masters = [engine_of_model(model).parameters.read(p, ["master"])[0] for p in model.parameters()]
    index = next(i for i, p in enumerate(plain.parameters()) if p is plain.first.weight)
    assert torch.equal(state["state"][index]["exp_avg"], reference.state[plain.first.weight]["exp_avg"])
    with Init(nvme=folder, host_memory="1MiB"):
        again = Net()
    resumed = AdamW(again.parameters(), lr=1.0)
    again.load_state_dict(weights)
    for parameter, master in zip(again.parameters(), masters, strict=True):
        engine_of_model(again).parameters.write(parameter, {"master": master})
    resumed.load_state_dict(state)
    for net, one in ((again, resumed), (plain, reference)):
        net(x(9)).square().sum().backward()
        one.step()
    assert same(again, plain)


def test_state_of_another_shape_is_refused_and_changes_nothing(folder):
    model, optimizer, _, _ = pair(folder)
    model(x()).sum().backward()
    optimizer.step()
    before = optimizer.state_dict()
    wrong = copy.deepcopy(before)
    wrong["state"][0]["exp_avg"] = torch.zeros(2, 2)
    with pytest.raises(ValueError, match="exp_avg of parameter 0"):
        optimizer.load_state_dict(wrong)
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], before["state"][0]["exp_avg"])


def test_updating_in_the_backward_keeps_no_gradient_and_says_what_it_cannot_do(folder):
    model, optimizer, plain, reference = pair(folder, {"update": "backward"})
    for number in range(3):
        for net, one in ((model, optimizer), (plain, reference)):
            net(x(number)).square().sum().backward()
            one.step()
            one.zero_grad()
    assert same(model, plain)
    model(x()).sum().backward()
    with pytest.raises(UnsupportedError, match=r'first.*update="forward"'):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(UnsupportedError, match="second backward"):
        model(x()).sum().backward()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"update": "sideways"}, "sideways"),
        ({"lr": -1}, "lr"),
        ({"betas": (1.0, 0.9)}, "beta1"),
        ({"max_norm": 0}, "max_norm"),
        ({"update": "backward", "max_norm": 1.0}, "max_norm"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(folder, settings, named):
    with Init(nvme=folder, host_memory="1MiB"):
        model = Net()
    with pytest.raises(ValueError, match=named):
        AdamW(model.parameters(), **settings)


def test_parameters_that_are_not_ours_are_refused(folder):
    with pytest.raises(ValueError, match=r"\(16, 8\).*infinity\.Init"):
        AdamW(Net().parameters())
    with Init(nvme=folder, host_memory="1MiB"):
        model = Net()
    optimizers = AdamW(model.first.parameters()), AdamW(model.second.parameters())
    with pytest.raises(ValueError, match=r"first\.weight already belongs"):
        optimizers[1].add_param_group({"params": model.first.parameters()})
    assert len(optimizers[1].param_groups) == 1
    for one in optimizers:
        one.step()


def test_frozen_parameters_get_no_state(folder):
    with Init(nvme=folder, host_memory="1MiB"):
        model = Net()
        model.second.weight.requires_grad_(requires_grad=False)
    AdamW(model.parameters())
    units = {unit.name: unit for unit in engine_of_model(model).units}
    assert ("m" in units["first"].record, "m" in units["second"].record) == (True, False)


def test_state_that_does_not_fit_host_memory_is_refused_with_the_least_that_does():
    with Init(host_memory="40MiB"):
        model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(8)])
    with pytest.raises(
        HostMemoryError, match=r"moments 16\.0 MiB.*smallest host_memory that works is 5\d\.0 MiB"
    ):
        AdamW(model.parameters())


@pytest.mark.parametrize("width", [512, 333])
def test_the_least_host_memory_that_is_named_trains(width):
    def trained(memory):
        with Init(host_memory=memory):
            model = nn.Sequential(nn.Linear(8, width), *[nn.Linear(width, width) for _ in range(8)])
        optimizer = AdamW(model.parameters())
        for _ in range(2):
            model(torch.ones(2, 8).bfloat16()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(
        HostMemoryError, match=r"largest unit is 1\).*smallest host_memory that works"
    ) as told:
        trained(24 << 20 if width == 333 else 40 << 20)
    trained(re.search(r"host_memory that works is ([\d.]+ MiB)", str(told.value))[1])


def test_a_step_inside_gathered_is_refused(folder):
    from infinity import gathered

    model, optimizer, _, _ = pair(folder)
    model(x()).sum().backward()
    with pytest.raises(UnsupportedError, match="gathered"), gathered(model):
        optimizer.step()


def test_losses_of_a_model_train_alike_under_update_backward_and_forward(folder):
    results = []
    for update in ("forward", "backward"):
        model = models.build("gpt2", nvme=folder, host_memory="1MiB")
        results.append(models.train(model, AdamW(model.parameters(), lr=1e-2, update=update), 4))
    assert results[0] == results[1]


def test_two_optimizers_may_share_a_model(folder):
    plain, model = build_both(Net, nvme=folder, memory="1MiB", waits=True)
    for net, kind in ((model, AdamW), (plain, ReferenceAdamW)):
        optimizers = [kind(net.first.parameters(), lr=0.1), kind(net.second.parameters(), lr=0.01)]
        for number in range(5):
            net(x(number)).square().sum().backward()
            for one in optimizers:
                one.step()
            net.zero_grad()
    assert same(model, plain)


def test_an_update_that_no_forward_picked_up_is_applied_before_the_next(folder):
    model, optimizer, plain, reference = pair(folder)
    for net, one in ((model, optimizer), (plain, reference)):
        for parameter in net.unused.parameters():
            parameter.grad = (
                torch.ones_like(parameter, memory_format=torch.contiguous_format)
                if one is reference
                else torch.ones(parameter.shape, dtype=torch.bfloat16)
            )
        for _ in range(3):
            one.step()
    assert same(model, plain)


def test_gradients_that_outgrow_host_memory_in_the_first_step_are_refused_with_what_would_do():
    def trained(memory):
        with Init(host_memory=memory):
            model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(8)])
        optimizer = AdamW(model.parameters())
        for _ in range(3):
            model(torch.randn(4, 512).bfloat16()).sum().backward()  # from the second on, gradients are fp32
        optimizer.step()

    with pytest.raises(HostMemoryError, match=r"host_memory=\d+\.0 MiB would do") as caught:
        trained("56MiB")
    trained(re.search(r"host_memory=(\d+)\.0 MiB would do", str(caught.value))[1] + "MiB")


def test_weights_may_be_replaced_right_after_a_backward_that_updates(folder):
    with Init(nvme=folder, host_memory="32MiB"):
        model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)])
    optimizer = AdamW(model.parameters(), lr=0.1, update="backward")
    weights = {name: torch.randn(value.shape).bfloat16() for name, value in model.state_dict().items()}
    for _ in range(10):
        model(torch.randn(4, 512).bfloat16()).square().sum().backward()
        model.load_state_dict(weights)  # while updates are still being applied
        found = model.state_dict()
        assert all(torch.equal(found[name], value) for name, value in weights.items())
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("where", ["by hand", "in a backward"])
def test_a_parameter_that_was_frozen_when_a_new_optimizer_took_it_starts_with_moments_of_zero(folder, where):
    model, optimizer, plain, reference = pair(folder)
    for net, one in ((model, optimizer), (plain, reference)):
        net(x()).square().sum().backward()
        net.unused.weight.grad = torch.ones(3, 3, dtype=torch.bfloat16)
        one.step()  # for `unused`, it waits for a use that does not come
        net.zero_grad()
    del optimizer, reference, one
    for net, kind in ((model, AdamW), (plain, ReferenceAdamW)):
        thawed = net.unused.weight if where == "by hand" else net.second.weight
        thawed.requires_grad_(requires_grad=False)
        new = kind(net.parameters(), lr=0.05)
        thawed.requires_grad_(requires_grad=True)
        net(x(1)).square().sum().backward()
        net.unused.weight.grad = torch.full((3, 3), 2.0, dtype=torch.bfloat16)
        new.step()
    assert same(model, plain)


def test_a_new_optimizer_starts_with_moments_of_zero_even_while_the_last_ones_updates_are_under_way(folder):
    model, optimizer, plain, reference = pair(folder)
    store = engine_of_model(model).nvme_store
    read = store.read
    for net, one in ((model, optimizer), (plain, reference)):
        net(x()).square().sum().backward()
        store.read = lambda request: _Transfer(lambda: read(request).wait(), 0.2, None)
        one.step()  # and the next forward's fetches begin, which apply it
        store.read = read
        net.zero_grad()
    del optimizer, reference, one
    for net, kind in ((model, AdamW), (plain, ReferenceAdamW)):
        new = kind(net.parameters(), lr=0.05)
        net(x(1)).square().sum().backward()
        new.step()
    assert same(model, plain)
