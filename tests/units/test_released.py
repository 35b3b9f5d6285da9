"""Trusted: torch's own dispatch of operations. Faked: nothing."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import infinity
from infinity import NotResidentError, UnsupportedError
from parity import differences, engine_in, resident


@pytest.fixture
def model():
    torch.manual_seed(0)
    with infinity.Init(host_memory="16MiB"):
        return nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4))


X = torch.zeros(4, 4).bfloat16()

USES = {
    "mean": lambda p: p.mean(),
    "data": lambda p: p.data,
    "setting data": lambda p: setattr(p, "data", X),
    "indexing": lambda p: p[0],
    "assigning": lambda p: p.__setitem__(0, 1),
    "iterating": list,
    "tolist": lambda p: p.tolist(),
    "item": lambda p: p.item(),
    "numpy": lambda p: p.numpy(),
    "asarray": np.asarray,
    "detach": lambda p: p.detach(),
    "clone": lambda p: p.clone(),
    "as_subclass": lambda p: p.as_subclass(torch.Tensor),
    "set_": lambda p: p.set_(X.clone()),
    "T": lambda p: p.T,
    "view": lambda p: p.view(-1),
    "data_ptr": lambda p: p.data_ptr(),
    "storage": lambda p: p.untyped_storage(),
    "equality": lambda p: p == X,
    "truth": bool,
    "matmul": lambda p: X @ p,
    "in a list": lambda p: torch.stack([X, p]),
    "as source": lambda p: X.clone().copy_(p),
    "as target": lambda p: torch.add(X, X, out=p),
    "as index": lambda p: X[p],
    "foreach": lambda p: torch._foreach_norm([p]),
    "nn.functional": lambda p: F.linear(X, p),
    "nn.init": nn.init.normal_,
    "nn.Parameter": nn.Parameter,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "save": lambda p: torch.save(p, io.BytesIO()),
}


@pytest.mark.parametrize("name", USES)
def test_using_a_released_parameter_is_refused_by_name(name, model):
    named = "" if name in {"copy", "pickle", "save"} else r"'0.weight'.*"
    with pytest.raises(NotResidentError, match=named + r"not resident.*\n?.*infinity.gathered"):
        USES[name](model[0].weight)
    assert resident(model) == []


def test_a_released_parameter_answers_what_is_known_without_values(model):
    p = model[0].weight
    assert (p.shape, p.dtype, p.device, p.numel(), len(p)) == (
        (4, 4),
        torch.bfloat16,
        torch.device("cpu"),
        16,
        4,
    )
    assert (p.requires_grad, p.is_leaf, p.grad, p.ndim, p.size(0), p.nbytes) == (True, True, None, 2, 4, 32)
    assert (p.is_floating_point(), p.element_size(), p.layout, p.is_cuda) == (True, 2, torch.strided, False)
    assert p.type() == "torch.BFloat16Tensor"
    assert isinstance(p, nn.Parameter)
    assert p.requires_grad_(requires_grad=False) is p
    assert not p.requires_grad
    assert {p: 1}[p] == 1
    assert any(p is one for one in model.parameters())
    assert sum(one.numel() for one in model.parameters()) == 180


BY_SHAPE = {
    "stride": lambda p: (p.stride(), p.stride(0), p.stride(-1), p.storage_offset(), p.dim_order()),
    "contiguous": lambda p: (p.is_contiguous(), torch.Tensor.is_contiguous(p), p.is_set_to(p)),
    "bytes": lambda p: (p.nbytes, p.itemsize, p.element_size(), p.dense_dim(), p.sparse_dim()),
    "result_type": lambda p: torch.result_type(p, 1.0),
    "new": lambda p: p.new(2, 3).zero_(),
    "new_zeros": lambda p: p.new_zeros(2, 3),
    "new_ones": lambda p: p.new_ones((2, 3), dtype=torch.float32),
    "new_full": lambda p: p.new_full((2,), 3.0, requires_grad=True),
    "new_empty": lambda p: p.new_empty(2, 3, device="cpu").zero_(),
    "new_empty_strided": lambda p: p.new_empty_strided((2, 2), (2, 1)).zero_(),
    "new_tensor": lambda p: p.new_tensor([1.0, 2.0]),
    "zeros_like": torch.zeros_like,
    "of a name": lambda p: torch.ones_like(input=p),
    "in another dtype": lambda p: torch.zeros_like(p, dtype=torch.float64),
    "full_like": lambda p: torch.full_like(p, 2.5, memory_format=torch.preserve_format),
    "empty_like": lambda p: torch.empty_like(p, memory_format=torch.contiguous_format).zero_(),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda p: torch.randint_like(p, 1, 9),
    "to": lambda p: torch.ones(3).to(p),
    "type_as": lambda p: torch.ones(3).type_as(p),
    "view_as": lambda p: torch.arange(16).view_as(p),
    "reshape_as": lambda p: torch.arange(16).reshape_as(p),
    "expand_as": lambda p: torch.arange(4).expand_as(p),
}


UNASKED = {
    "torch.tensor": torch.tensor,
    "torch.Tensor": torch.Tensor,
    "new_tensor": lambda p: torch.ones(1).new_tensor(p),
    "set_": lambda p: torch.ones(4, 4).set_(p),
}


@pytest.mark.parametrize("name", UNASKED)
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")
def test_where_torch_does_not_ask_the_parameter_there_are_nans_and_no_other_values(name):
    with infinity.Init(host_memory="16MiB", dtype="fp32"):
        layer = nn.Linear(4, 4)
    use = UNASKED[name]
    assert use(layer.weight).isnan().all()
    with infinity.gathered(layer):
        assert not use(layer.weight).isnan().any()


def described(answer):
    """What a tensor shows beside its values."""
    if not isinstance(answer, torch.Tensor):
        return answer
    return [
        type(answer),
        answer.stride(),
        answer.device,
        answer.requires_grad,
        answer.is_leaf,
        answer.detach(),
    ]


@pytest.mark.parametrize("name", BY_SHAPE)
def test_what_needs_no_values_is_answered_as_the_attached_parameter_would(name, model):
    p, shown = model[0].weight, []
    plain = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    for one in (plain, p):
        torch.manual_seed(1)
        shown.append(described(BY_SHAPE[name](one)))
    assert differences(*shown) == []
    assert resident(model) == []


def test_printing_says_that_a_parameter_is_released(model):
    p = model[0].weight
    assert repr(p) == (
        "Parameter (released; see infinity.gathered), shape=(4, 4), dtype=torch.bfloat16, "
        "device='cpu', requires_grad=True"
    )
    assert f"{p}" == str(p) == repr(p)
    assert "Linear(in_features=4, out_features=4, bias=True)" in repr(model)
    with infinity.gathered(p):
        assert repr(p).startswith("Parameter containing:\ntensor(")


@pytest.mark.parametrize(
    "copied",
    [lambda model: torch.save(model, io.BytesIO()), copy.deepcopy, pickle.dumps],
    ids=["save", "deepcopy", "pickle"],
)
def test_copying_a_model_is_refused(copied, model):
    with pytest.raises(NotResidentError, match="state_dict"):
        copied(model)


def test_a_state_dict_is_saved_and_loaded_as_ever(model):
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    assert differences(dict(model.state_dict()), dict(torch.load(file))) == []


SAME = {
    "device": lambda model: model.to("cpu"),
    "dtype": lambda model: model.to(torch.bfloat16),
    "like a tensor": lambda model: model.to(X),
    "cpu": lambda model: model.cpu(),
    "bfloat16": lambda model: model.bfloat16(),
}


@pytest.mark.parametrize("name", SAME)
def test_moving_a_model_to_where_it_is_changes_nothing(name, model):
    before = list(model.parameters())
    assert SAME[name](model) is model
    assert all(one is other for one, other in zip(before, model.parameters(), strict=True))
    assert resident(model) == []


OTHER = {
    "half": lambda model: model.half(),
    "float": lambda model: model.float(),
    "double": lambda model: model.double(),
    "type": lambda model: model.type(torch.float32),
    "dtype": lambda model: model.to(torch.float32),
    "device": lambda model: model.to("meta"),
}


@pytest.mark.parametrize("name", OTHER)
def test_moving_a_model_elsewhere_is_refused_by_name(name, model):
    with pytest.raises(UnsupportedError, match=r"0.weight: a model built in Init stays on 'cpu'.*Config"):
        OTHER[name](model)


@pytest.mark.parametrize("how", ["torch.compile(model)", "model.compile()", "compiled caller"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_torch_compile_is_refused_by_name(how, model):
    model = model[0]
    call = model
    if how == "torch.compile(model)":
        call = torch.compile(model, backend="eager")
    elif how == "model.compile()":
        model.compile(backend="eager")
    else:
        call = torch.compile(lambda x: model(x) + 1, backend="eager")
    with pytest.raises(UnsupportedError, match=r"torch\.compile"):
        call(X)


def test_data_parallel_is_refused_by_name(model):
    model[0]._is_replica = True  # what nn.DataParallel sets on the copies it makes, with more than one device
    with pytest.raises(UnsupportedError, match="DataParallel"):
        model[0](X)


def test_after_the_engine_is_closed_uses_and_forwards_fail_clearly(model):
    engine_in(model).close()
    with pytest.raises(infinity.EngineFailedError, match="closed"):
        model(X[None])
