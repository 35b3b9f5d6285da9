"""TorchScript inside Init. Trusted: torch.jit. Faked: nothing."""

import io

import pytest
import torch
from torch import nn

import infinity
from infinity import UnsupportedError

X = torch.linspace(-1, 1, 8).view(2, 4)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Twice(nn.Module):
    def forward(self, x):
        return 2 * x


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Twice()
        self.register_buffer("scale", torch.full((1,), 3.0))

    def forward(self, x):
        return self.inner(x) * self.scale


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


def loaded():
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(plain()), file)
    file.seek(0)
    return torch.jit.load(file)


def init(**settings):
    return infinity.Init(**{"host_memory": "16MiB", "dtype": "fp32", **settings})


@pytest.mark.parametrize("how", ["script", "trace", "within a model"])
def test_a_scripted_module_with_parameters_is_refused_inside_init(how):
    make = {"script": torch.jit.script, "trace": lambda model: torch.jit.trace(model, X)}
    with pytest.raises(UnsupportedError, match=r"torch\.jit: a module with \d parameters \(.*weight"), init():
        nn.Sequential(nn.Linear(4, 4), make.get(how, torch.jit.script)(plain()))
    assert torch.equal(torch.jit.script(plain())(X), plain()(X))


def test_a_scripted_module_that_was_loaded_is_refused_inside_init_and_works_when_it_is_added_later():
    other = loaded()
    with (
        pytest.raises(UnsupportedError, match="put a scripted module into the model after the `with`"),
        init(),
    ):
        nn.Sequential(nn.Linear(4, 4), other)
    with init():
        model = plain()
    model.append(other)
    expected = plain().append(plain())
    assert torch.equal(model(X), expected(X))
    for one in (model, expected):
        one(X).sum().backward()
    theirs = dict(expected.named_parameters())
    for name, one in model.named_parameters():
        torch.testing.assert_close(one.grad.clone(), theirs[name].grad)


@pytest.mark.parametrize("tile_above", [None, "32B"])
def test_modules_without_parameters_are_scripted_inside_init_as_ever(tile_above):
    with init(tile_above=tile_above):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(Scaled()))
    torch.manual_seed(0)
    torch.testing.assert_close(model(X), 6 * nn.Linear(4, 4)(X))
