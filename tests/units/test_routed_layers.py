"""What a backward needs next, by what the layers of its forward have announced. Pure: units are letters."""

from infinity.units import routed_layers
from infinity.units.routed_layers import RoutedLayers


def after(*layers):
    known = RoutedLayers()
    for layer in layers:
        known.announced(list(layer))
    return known


def test_the_first_unit_of_a_layer_brings_the_others_and_the_layer_before():
    known = after("ab", "cd", "ef")
    needed = ["".join(known.needed_with(unit)) for unit in "fedcab"]
    assert needed == ["edc", "", "cba", "", "b", ""]


def test_layers_that_the_backward_left_out_are_forgotten_and_strangers_bring_nothing():
    known = after("ab", "cd", "ef")
    assert known.needed_with("x") == []
    assert known.needed_with("b") == ["a"]
    assert known.needed_with("f") == []
    known = after("ab")
    known.clear()
    assert known.needed_with("a") == []


def test_the_oldest_layers_are_forgotten_where_there_are_too_many(monkeypatch):
    monkeypatch.setattr(routed_layers, "_LAYERS", 2)
    known = after("ab", "cd", "ef")
    assert [known.needed_with(unit) for unit in "eca"] == [["f", "d", "c"], ["d"], []]


def test_what_a_backward_runs_again_comes_in_the_order_of_its_forward():
    known = after("ab", "cd", "efg")
    known.recomputed("efg")
    assert "".join(known.needed_with("e")) == "fgcd"
    assert known.needed_with("f") == []
    assert "".join(known.needed_with("d")) == "cba"
