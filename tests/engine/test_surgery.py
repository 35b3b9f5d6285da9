"""nn.Module's methods and the usual surgery: as in torch at three budgets, or an error whose advice works.
Faked: nothing; what is done is in surgery.py.
"""

import warnings
from pathlib import Path

import pytest
from torch import nn

import surgery
from covers import matrix
from infinity import InfinityError
from surgery import EQUAL, GATHERED, REFUSED, x

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("deterministic")]

METHODS = {
    "T_destination": "no method",
    "call_super_init": "no method",
    "dump_patches": "no method",
    "forward": "every test",
    "ipu": "of a device that is not here",
    "mtia": "of a device that is not here",
    "xpu": "of a device that is not here",
    "cuda": "of a device that is not here",
    "get_buffer": "of buffers, which are ordinary",
    "get_extra_state": "of the user's own state",
    "set_extra_state": "of the user's own state",
    "named_buffers": "of buffers, which are ordinary",
    "register_backward_hook": "replaced by register_full_backward_hook",
    "register_parameter": "test_init.py",
    "set_submodule": "test_init.py",
    "named_modules": "of modules, which are ordinary",
}
"""Why methods are not called in surgery.py."""


@pytest.fixture(autouse=True)
def unwarned():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def pair(request, folder):
    """The same model in plain torch and offloaded, with their optimizers."""
    return surgery.pair(request.param, folder)


def by_turns(table):
    """Return parametrize's arguments for all of a table at each budget, by default at one."""
    return matrix(together=1, name=list(table), pair=["host", "little", "pinned"])


@pytest.mark.parametrize(*by_turns(EQUAL), indirect=["pair"])
def test_surgery_outside_of_any_with_is_that_of_torch(name, pair):
    assert surgery.differing(EQUAL[name], pair) == []


@pytest.mark.parametrize(*by_turns(GATHERED), indirect=["pair"])
def test_surgery_on_values_is_refused_and_that_of_torch_in_gathered_as_the_error_says(name, pair):
    with pytest.raises(InfinityError, match="gathered"):
        GATHERED[name](pair[0][1])
    assert surgery.differing(GATHERED[name], pair, gathered=True) == []


@pytest.mark.parametrize(*by_turns(REFUSED), indirect=["pair"])
def test_what_cannot_be_done_to_a_model_says_what_can(name, pair):
    (_, ours), (_, optimizer) = pair
    refused, word, advised = REFUSED[name]
    with pytest.raises(InfinityError, match=word):
        refused(ours)
    if name != "compile":  # whose model calls what was compiled from then on
        ours(x()).float().sum().backward()
        optimizer.step()
    advised(ours)


def test_every_method_of_a_module_is_called_or_said_why_not():
    text = Path(surgery.__file__).read_text(encoding="utf-8")
    torchs = [
        name for name, one in vars(nn.Module).items() if getattr(one, "__module__", "").startswith("torch.")
    ]
    names = [name for name in torchs if not name.startswith("_")]  # transformers puts one of its own there
    assert [name for name in names if f".{name}(" not in text and name not in METHODS] == []
