"""Modules under torch.func. Trusted: torch on the same module in memory. Faked: nothing."""

import contextlib

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils import _pytree as pytree

import infinity
from infinity import UnsupportedError
from parity import differences, gradients, nothing_waits, resident

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),  # torch's jvp scripts
    pytest.mark.usefixtures("deterministic"),
]

X = torch.linspace(-1, 1, 24).view(3, 2, 4)


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Sequential(nn.Linear(4, 4)))


@pytest.fixture(params=["in memory", pytest.param("on disk", marks=pytest.mark.disk)])
def model(request, tmp_path):
    nvme = str(tmp_path) if request.param == "on disk" else None
    with infinity.Init(nvme=nvme, host_memory="1MiB" if nvme else "16MiB", dtype="fp32"):
        ours = plain()
    return nothing_waits(ours)


def tensors(model):
    return {name: value.detach() for name, value in model.state_dict().items()}


def backward(model):
    vmap(model)(X).square().sum().backward()
    return gradients(model)


WORKS = {
    "grad of plain tensors": lambda m: grad(lambda p: functional_call(m, p, (X,)).sum())(tensors(m)),
    "grad of each sample": lambda m: vmap(grad(lambda p, x: functional_call(m, p, (x,)).sum()), (None, 0))(
        tensors(m), X
    ),
    "several models": lambda m: vmap(lambda p: functional_call(m, p, (X,)))(
        {name: torch.stack([one, 2 * one]) for name, one in tensors(m).items()}
    ),
    "functional_call": lambda m: functional_call(m, tensors(m), (X,)),
    "vmap": lambda m: vmap(m)(X),
    "backward of vmap": backward,
    "jvp": lambda m: jvp(m, (X,), (X,)),
    "jacfwd": lambda m: jacfwd(m)(X[0]),
}
REFUSED = {
    "grad": lambda m: grad(lambda x: m(x).sum())(X),
    "grad of some parameters": lambda m: grad(lambda p: functional_call(m, p, (X,)).sum())(
        {"0.weight": torch.eye(4)}
    ),
    "vjp": lambda m: vjp(m, X)[1](X),
    "jacrev": lambda m: jacrev(m)(X[0]),
    "hessian": lambda m: hessian(lambda x: m(x).square().sum())(X[0]),
}


@pytest.mark.parametrize("name", WORKS)
def test_transforms_that_keep_no_weights_of_ours_work(name, model):
    assert differences(WORKS[name](plain()), WORKS[name](model)) == []
    assert resident(model) == []


@pytest.mark.parametrize("name", REFUSED)
def test_transforms_that_use_released_weights_again_are_refused_and_work_in_gathered(name, model):
    with pytest.raises(UnsupportedError, match=r"torch\.func\.grad.*functional_call plain tensors"):
        REFUSED[name](model)
    assert resident(model) == []
    with torch.no_grad(), infinity.gathered(model):
        found = pytree.tree_map(torch.Tensor.detach, REFUSED[name](model))
    assert differences(pytree.tree_map(torch.Tensor.detach, REFUSED[name](plain())), found) == []
    with contextlib.suppress(UnsupportedError):
        REFUSED[name](model)
    assert torch.equal(model(X), plain()(X))


def test_a_weight_that_another_module_uses_is_brought_under_vmap_and_refused_under_grad():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return torch.nn.functional.linear(x, self.inner.weight.t())

    torch.manual_seed(0)
    other = Tied()
    torch.manual_seed(0)
    with infinity.Init(host_memory="16MiB", dtype="fp32"):
        ours = Tied()
    for transform in (lambda m: vmap(m)(X), lambda m: jvp(m, (X,), (X,))[1]):
        assert torch.equal(transform(other), transform(ours))
    with pytest.raises(UnsupportedError, match=r"inner: torch\.func\.grad"):
        grad(lambda x: ours(x).sum())(X)
