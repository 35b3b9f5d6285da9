"""What leaves memory while models are built. Trusted: nn.Module. Nothing is faked: parameters are real, and
what is to leave is taken off the list as Construction does.
"""

import gc

import pytest
import torch
from torch import nn

import infinity
from infinity.engine.built_parameter import BuiltParameter
from infinity.engine.real_parameters import RealParameters

NBYTES = 64 * 4


class Building:
    """Modules that come one after the other, and a window."""

    def __init__(self, window):
        self.real, self.window, self.gone, self.modules = RealParameters(), window, [], []

    def come(self, *names, keep=None):
        """A module comes with these parameters, and what has no room leaves."""
        module = nn.Module()
        for name in names:
            module.register_parameter(name, nn.Parameter(torch.zeros(64)))
            parameter = module._parameters[name]
            self.real.add(parameter, BuiltParameter(parameter, module, name, None))
        self.modules.append(module)
        self.make_room(keep or module)
        return module

    def make_room(self, *keep):
        for together in self.real.first_out(self.window, keep):
            self.gone.append([entry.name for entry in together])
            for entry in together:
                if (parameter := entry.parameter()) is not None:
                    self.real.remove(id(parameter))


def test_the_modules_that_were_touched_longest_ago_leave_with_all_their_parameters():
    building = Building(4 * NBYTES)
    building.come("a", "b")
    building.come("c", "d")
    assert building.gone == []
    building.come("e")
    assert building.gone == [["a", "b"]]
    building.come("f", "g")
    assert building.gone == [["a", "b"], ["c", "d"]]


def test_what_is_kept_and_what_others_have_views_of_stays():
    building = Building(2 * NBYTES)
    first = building.come("a")
    view = building.come("b").b.data
    building.come("c", keep=first)
    assert building.gone == [["c"]]
    building.come("d", "e")
    assert building.gone == [["c"], ["a"]]
    assert view.shape == (64,)


def test_parameters_that_are_no_more_take_no_room():
    building = Building(2 * NBYTES)
    building.come("a")
    building.modules.clear()
    gc.collect()
    building.come("b")
    building.come("c")
    assert building.gone == []
    building.come("d")
    assert building.gone == [["b"]]


@pytest.mark.parametrize("later", [False, True])
def test_a_parameter_that_was_given_other_memory_counts_as_what_it_is_now(later):
    building = Building(10 * NBYTES)
    first = building.come("a")
    if later:
        for name in "bc":
            building.come(name)
    first.a.data = torch.zeros(10 * 64)
    for name in "defg":
        building.come(name)
    assert ["a"] in building.gone


def test_a_parameter_that_comes_back_was_touched_last():
    building = Building(2 * NBYTES)
    first = building.come("a")
    building.come("b")
    building.real.add(first.a, BuiltParameter(first.a, first, "a", None))
    building.come("c")
    assert building.gone == [["b"]]


def counted(modules, window, monkeypatch):
    """Return how often the bytes of a parameter are asked for while so many modules are built."""
    asked, nbytes = [], BuiltParameter.nbytes.fget
    with monkeypatch.context() as patched:
        patched.setattr(BuiltParameter, "nbytes", property(lambda one: (asked.append(0), nbytes(one))[1]))
        with infinity.Init(host_memory="16MiB") as init:
            init._construction._window_nbytes = window
            model = nn.Sequential(*(nn.LayerNorm(8) for _ in range(modules)))
    assert len(model) == modules
    return len(asked)


@pytest.mark.parametrize("window", [1 << 10, 1 << 30])
def test_a_model_of_many_parameters_is_built_in_a_time_that_grows_as_their_number(window, monkeypatch):
    few, many = (counted(count, window, monkeypatch) for count in (50, 200))
    assert many < 5 * few
