"""A parameter belongs to the optimizer that was made last. Trusted: the recipe. Nothing is faked."""

import pytest
from torch import nn

import infinity
from infinity import AdamW, Init, UnsupportedError
from infinity.reference import ReferenceAdamW
from networks import Net, pair, same, x

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("repeatable")]


def test_a_superseded_optimizer_says_so_wherever_it_is_used(folder):
    model, optimizer, _, _ = pair(folder)
    state = optimizer.state_dict()
    with pytest.warns(UserWarning, match=r"AdamW has \(first\.weight and 1 more\)") as told:
        later = AdamW(model.first.parameters(), lr=0.1)
    assert told[0].filename == __file__, "the line that made it"
    model(x()).sum().backward()
    for use in (
        optimizer.step,
        optimizer.state_dict,
        lambda: optimizer.load_state_dict(state),
        lambda: optimizer.add_param_group({"params": []}),
        lambda: infinity.save(model, optimizer, folder / "saved"),
    ):
        with pytest.raises(UnsupportedError, match=r"superseded AdamW.*first\.weight"):
            use()
    optimizer.zero_grad(set_to_none=False)
    later.step()
    AdamW(model.second.parameters())  # which are nobody's now: not a word


def test_what_an_earlier_optimizer_has_applied_in_the_backward_stays(folder):
    model, earlier, plain, reference = pair(folder, {"update": "backward"})
    for net in (model, plain):
        net(x()).square().sum().backward()
    reference.step()
    assert earlier.has_applied
    with pytest.warns(UserWarning, match="those of the last backward among them"):
        later = AdamW(model.parameters(), lr=0.05, weight_decay=0.1, update="backward")
    later.step()
    assert same(model, plain)
    reference = ReferenceAdamW(plain.parameters(), lr=0.05, weight_decay=0.1)
    for net, one in ((model, later), (plain, reference)):
        net.zero_grad()
        net(x(1)).square().sum().backward()
        one.step()
    assert same(model, plain)


def test_an_optimizer_that_is_refused_leaves_the_earlier_one_in_its_place(folder):
    model, optimizer, plain, reference = pair(folder)
    with pytest.raises(ValueError, match="was not built inside"):
        AdamW([*model.parameters(), *Net().parameters()])
    for net, one in ((model, optimizer), (plain, reference)):
        net(x()).square().sum().backward()
        one.step()
    assert same(model, plain)


def test_state_that_is_there_already_takes_no_further_room():
    with Init(host_memory="56MiB"):
        model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(8)])
    optimizer = AdamW(model.parameters())
    with pytest.warns(UserWarning, match="supersedes it"):
        AdamW(model.parameters()).step()
    assert optimizer.superseded
