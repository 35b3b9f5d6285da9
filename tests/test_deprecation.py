"""What users wrote before works for one release, and says what to write now. Nothing is faked."""

import importlib
import warnings

import pytest
import torch

import infinity
from infinity.optim.base import OffloadedOptimizer
from launches import python

OLD = [
    ("DeepSpeedEngine", "infinity.deepspeed.DeepSpeedEngine"),
    ("add_config_arguments", "infinity.deepspeed.add_config_arguments"),
    ("init_distributed", "infinity.deepspeed.init_distributed"),
    ("initialize", "infinity.deepspeed.initialize"),
    ("load_deepspeed", "infinity.deepspeed.load_deepspeed"),
    ("zero", "infinity.deepspeed.zero"),
    ("TrainerCallback", "infinity.huggingface.TrainerCallback"),
]


@pytest.fixture
def as_if_new():
    """Nobody has used an old name yet, before and after."""
    names = [*(name for name, _ in OLD), "Elementwise"]
    for name in names:
        vars(infinity).pop(name, None)
    yield
    for name in names:
        vars(infinity).pop(name, None)


@pytest.mark.usefixtures("as_if_new")
@pytest.mark.parametrize(("old", "new"), OLD)
def test_an_old_name_works_and_warns_once_with_the_new_place(old, new):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = getattr(infinity, old)
        again = getattr(infinity, old)
    (warning,) = caught
    assert str(warning.message) == f"infinity.{old} will be removed in the next release: use {new}"
    assert (warning.category, warning.filename) == (DeprecationWarning, __file__)
    module, _, name = new.rpartition(".")
    assert found is again is getattr(importlib.import_module(module), name)


@pytest.mark.usefixtures("as_if_new")
def test_an_old_name_that_is_imported_warns_at_the_line_that_imports_it():
    with pytest.warns(DeprecationWarning, match="use infinity.deepspeed.initialize") as caught:
        from infinity import initialize
    assert [one.filename for one in caught] == [__file__]
    assert initialize is infinity.deepspeed.initialize


@pytest.mark.usefixtures("as_if_new")
def test_old_names_are_not_public_any_more():
    names = {name for name, _ in OLD} | {"Elementwise", "OffloadedOptimizer"}
    assert not names & {*infinity.__all__}
    assert not names - {"OffloadedOptimizer"} & {*dir(infinity)}


def test_the_base_of_optimizers_is_still_there_for_who_subclasses_it():
    assert infinity.OffloadedOptimizer is OffloadedOptimizer


def test_import_infinity_is_enough_for_deepspeeds_and_hugging_faces_names(tmp_path):
    """In a process that has imported torch, and forgets all of ours."""
    code = "import sys; ours = [name for name in sys.modules if name.partition('.')[0] == 'infinity']\n"
    code += "for name in ours: del sys.modules[name]\n"
    code += "import infinity; infinity.deepspeed.zero.Init; infinity.huggingface.TrainerCallback"
    ended = python("-c", code, folder=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.usefixtures("as_if_new")
def test_elementwise_is_what_wrap_optimizer_returns_and_says_so(folder):
    with infinity.Init(nvme=folder, host_memory="1MiB"):
        layer = torch.nn.Linear(8, 8)
    with pytest.warns(DeprecationWarning, match=r"^infinity\.Elementwise .*: use infinity\.wrap_optimizer$"):
        kind = infinity.Elementwise
    old = kind(torch.optim.RAdam, layer.parameters(), lr=0.5)
    with pytest.warns(UserWarning, match="supersedes"):
        new = infinity.wrap_optimizer(torch.optim.RAdam, layer.parameters(), lr=0.5)
    assert type(new) is type(old)
    assert new.param_groups[0]["lr"] == old.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    "make",
    [
        infinity.AdamW,
        lambda parameters: infinity.wrap_optimizer(torch.optim.RAdam, parameters),
    ],
    ids=["ours", "wrapped"],
)
def test_the_warning_of_a_superseded_optimizer_names_the_line_that_makes_the_later_one(folder, make):
    with infinity.Init(nvme=folder, host_memory="1MiB"):
        layer = torch.nn.Linear(8, 8)
    earlier = make(layer.parameters())
    with pytest.warns(UserWarning, match="supersedes it") as caught:
        make(layer.parameters())
    assert [one.filename for one in caught] == [__file__]
    assert earlier.superseded


def test_no_warning_is_left_over_where_nothing_old_is_used():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in infinity.__all__:
            getattr(infinity, name)
    assert caught == []
