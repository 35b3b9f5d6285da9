"""What a manifest says is what was put into it, or it is refused. Nothing is faked."""

import itertools
import json
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.planning.boxes import Box
from infinity.storage.manifest import (
    MASTER,
    RANGE_NBYTES,
    CheckpointError,
    Manifest,
    MeshPlace,
    Tensor,
    TensorPiece,
    compare,
    compare_groups,
    decode,
    encode,
    hash_count,
    names_of,
)

FILE = "weights-00001.safetensors"


def tensor(name="a", numel=10, cuts=(), dtype="F32", kind=MASTER, file=FILE):
    """Return a tensor in pieces."""
    ends = [0, *cuts, numel]
    pieces = [
        TensorPiece(file, f"{name}{start}", start, stop, ("0" * 16,) * hash_count(4 * (stop - start)))
        for start, stop in itertools.pairwise(ends)
    ]
    return Tensor(name, kind, dtype, (numel,), tuple(pieces))


def no_tensor(_value, _what):
    return None


PLAIN_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers(), st.text()), inner)
    ),
    max_leaves=20,
)


@given(PLAIN_VALUES)
def test_plain_values_come_back_with_their_types(value):
    text = json.dumps(encode(value, "value", no_tensor), allow_nan=False)
    assert repr(decode(json.loads(text), no_tensor)) == repr(value)


def test_what_looks_like_our_own_marks_comes_back_too():
    value = {"__tuple__": [1], "__items__": {"__float__": "x"}}
    assert decode(encode(value, "value", no_tensor), no_tensor) == value


def test_a_counter_comes_back_as_the_dict_it_is():
    assert decode(encode(Counter({30: 1}), "milestones", no_tensor), no_tensor) == {30: 1}


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"a": [1, object()]}, r"state\['a'\]\[1\] is a builtins.object"),
        ({"f": math.sqrt}, r"state\['f'\] is a builtins.builtin_function"),
        ({"s": {1}}, r"state\['s'\] is a builtins.set"),
        ({object(): 1}, r"a key of state is a builtins.object"),
        (b"bytes", r"state is a builtins.bytes"),
    ],
)
def test_what_is_not_plain_is_refused_by_its_place(value, named):
    with pytest.raises(CheckpointError, match=named):
        encode(value, "state", no_tensor)


def test_a_manifest_comes_back_from_its_text():
    manifest = Manifest(
        (tensor(cuts=(3, 3, 8)), tensor("b", RANGE_NBYTES)),
        {FILE: 7},
        optimizer={"seed": 3, "lr": 1e-3},
        extra={"at": [1, {"__float__": "nan"}]},
    )
    assert Manifest.from_json(manifest.to_json()) == manifest


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace("1e-3", "1e-2").replace("0.001", "0.01"), "changed or damaged"),
        (lambda text: text.replace('"version": 1', '"version": 2'), "version 2"),
        (lambda text: text[: len(text) // 2], "cannot be read"),
        (lambda _text: "[]", "cannot be read"),
        (lambda _text: "{}", "cannot be read"),
        (lambda _text: "[" * 100_000, "cannot be read"),
        (lambda text: text.replace("infinity checkpoint", "something else"), "something else"),
    ],
)
def test_a_changed_manifest_is_refused(change, said):
    text = Manifest((tensor(),), {FILE: 7}, optimizer={"lr": 1e-3}).to_json()
    assert Manifest.from_json(text)
    with pytest.raises(CheckpointError, match=said):
        Manifest.from_json(change(text))


def test_a_tensor_that_is_named_twice_is_refused():
    text = Manifest((tensor(), tensor()), {}).to_json()
    with pytest.raises(CheckpointError, match="twice"):
        Manifest.from_json(text)


@pytest.mark.parametrize("file", ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "x.pt", ".x"])
def test_files_outside_of_the_folder_are_refused(file):
    with pytest.raises(CheckpointError, match="is not a file name of a checkpoint"):
        tensor(file=file)


@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        ([(0, 4), (5, 10)], "a piece of elements 5 to 10, expected from 4"),
        ([(0, 6), (5, 10)], "a piece of elements 5 to 10, expected from 6"),
        ([(0, 9)], "pieces of 9 elements, expected 10"),
        ([(0, 11)], "pieces of 11 elements, expected 10"),
        ([], "pieces of 0 elements, expected 10"),
    ],
)
def test_pieces_that_do_not_cover_a_tensor_once_are_refused(bounds, said):
    pieces = tuple(TensorPiece(FILE, "a", start, stop, ("0",)) for start, stop in bounds)
    with pytest.raises(CheckpointError, match=said):
        Tensor("a", MASTER, "F32", (10,), pieces)


def boxed(first, shape, start=0, stop=None):
    box = Box(first, shape)
    return TensorPiece(FILE, "a", start, box.numel if stop is None else stop, ("0",), box)


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([boxed((0, 0), (4, 2)), boxed((0, 2), (4, 2), 0, 3), boxed((0, 2), (4, 2), 3)], None),
        ([boxed((0, 0), (4, 2))], "pieces of 8 elements, expected 16"),
        ([boxed((0, 0), (4, 2)), boxed((0, 2), (4, 2), 0, 3)], "3 elements at .0, 2. of .4, 2., expected 8"),
        ([boxed((0, 0), (4, 2)), boxed((0, 1), (4, 2))], "have elements in common"),
        ([boxed((0, 0), (4, 2)), boxed((0, 3), (4, 2))], "pieces of 8 elements at .0, 3. of .4, 2."),
        ([boxed((0,), (16,))], "expected 16"),
        ([TensorPiece(FILE, "a", 0, 16, ("0",)), boxed((0, 0), (1, 1))], "elements in common"),
    ],
)
def test_boxes_have_to_be_a_tensor_once(pieces, said):
    if said is None:
        tensor = Tensor("a", MASTER, "F32", (4, 4), tuple(pieces))
        assert Manifest.from_json(Manifest((tensor,), {}).to_json()).tensors == (tensor,)
        return
    with pytest.raises(CheckpointError, match=said):
        Tensor("a", MASTER, "F32", (4, 4), tuple(pieces))


def test_each_rank_of_another_mesh_gets_the_state_of_its_data():
    places = tuple(MeshPlace(data, beside, 2) for data in (0, 1) for beside in (0, 1))
    further = tuple({"rng": {}, "extra": rank} for rank in (1, 2, 3))
    manifest = Manifest.from_json(Manifest((), {}, extra=0, further=further, places=places).to_json())
    assert manifest.data_size == 2
    assert [manifest.at_place(one)["extra"] for one in places] == [0, 1, 2, 3]
    assert [manifest.at_place(MeshPlace(data))["extra"] for data in (0, 1)] == [0, 2]
    assert [manifest.at_place(MeshPlace(0, beside, 4))["extra"] for beside in (0, 1, 2, 3)] == [0] * 4
    assert manifest.at_place(MeshPlace(2)) is None


def test_a_hash_that_is_missing_is_refused():
    with pytest.raises(CheckpointError, match="1 hashes, expected 2"):
        Tensor("a", MASTER, "U8", (RANGE_NBYTES + 1,), (TensorPiece(FILE, "a", 0, RANGE_NBYTES + 1, ("0",)),))


@pytest.mark.parametrize(("dtype", "shape"), [("F3", (10,)), ("F32", (-10, -1)), ("F32", (10.0,))])
def test_what_is_no_tensor_is_refused(dtype, shape):
    with pytest.raises(CheckpointError, match="is not a valid type and shape"):
        Tensor("a", MASTER, dtype, shape, ())


def test_differences_name_every_tensor():
    saved = {"a": ("F32", (2, 3)), "b": ("F32", (1,)), "d": ("F32", ())}
    expected = {"a": ("F32", (3, 2)), "c": ("F32", (1,)), "d": ("F32", ())}
    assert compare(saved, expected, "parameters") == [
        "1 parameters missing in the checkpoint: c",
        "1 parameters in the checkpoint that the model does not have: b",
        "1 parameters of another shape or type: a: F32 [2, 3], expected F32 [3, 2]",
    ]
    assert compare(saved, saved, "parameters") == []


def test_long_lists_are_cut_but_counted():
    (line,) = compare({}, {f"p{number}": ("F32", ()) for number in range(50)}, "parameters")
    assert line.startswith("50 parameters missing")
    assert line.endswith("p19 and 30 more")


def test_differences_of_groups_name_the_parameters():
    assert compare_groups([["a", "b"]], [["a", "b"]]) == []
    assert compare_groups([["a"]], [["a"], ["b"]]) == ["1 param groups in the checkpoint, 2 in the optimizer"]
    assert compare_groups([["b", "a"]], [["a", "b"]]) == [
        "param group 0 lists its 2 parameters in another order"
    ]
    (line,) = compare_groups([["a", "x"]], [["a", "y", "z"]])
    assert line.endswith("only there x; only here y, z")


def test_tensors_are_found_by_kind():
    tensors = (tensor(), tensor("b", kind="exp_avg"))
    assert names_of(tensors, "exp_avg") == {"b": ("F32", (10,))}
    assert set(Manifest(tensors, {}).by_kind()) == {(MASTER, "a"), ("exp_avg", "b")}
