"""tile_ on models of transformers, and the pieces for a model under construction. Trusted: the untiled
model."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.modules import module as registration

from infinity.tiling import Tiled, TiledEmbedding, TiledLinear, assembled, stand_in, tile_
from models import MODELS, batch

pytestmark = pytest.mark.usefixtures("repeatable")
ABOVE = 3000  # bytes: the tiny models' attention and MLP weights and embeddings are larger


def gradients(model):
    """Whole gradients under the names of the state_dict."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, Tiled):
            for part in ("weight", "bias"):
                whole = getattr(module, part, None)
                if whole is not None:
                    grad = torch.empty(tuple(whole.shape))
                    for piece, (rows, columns) in zip(whole.pieces(), whole.grid.slices(), strict=True):
                        grad[(rows, columns) if part == "weight" else rows] = piece.grad
                    found[f"{name}.{part}"] = grad
        else:
            found |= {f"{name}.{key}": one.grad for key, one in module._parameters.items() if one is not None}
    return {name: grad for name, grad in found.items() if ".tiles." not in name}


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_losses_and_gradients_are_those_of_the_untiled_model(name, seed):
    torch.manual_seed(seed)
    model = MODELS[name]()
    tiled = copy.deepcopy(model)
    done = tile_(tiled, ABOVE)
    assert len(done) > 3
    assert all(one.rows * one.columns > 1 for one in done)
    ids = batch(1)
    losses = [one(ids, labels=ids).loss for one in (model, tiled)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    expected, actual = gradients(model), gradients(tiled)
    assert actual.keys() == expected.keys()
    for key, grad in expected.items():
        torch.testing.assert_close(
            actual[key], grad, rtol=1e-4, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}"
        )


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_checkpoints_go_both_ways(name, tmp_path):
    model, tiled = MODELS[name](), MODELS[name]()
    tile_(tiled, ABOVE)
    assert list(tiled.state_dict()) == list(model.state_dict())
    tiled.load_state_dict(model.state_dict())
    tiled.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    for key, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value)


def test_tied_weights_share_tiles_and_are_saved_once(seed):
    model = MODELS["gpt2"]()
    expected = model.state_dict()
    done = tile_(model, ABOVE)
    assert done[0].names == ("transformer.wte", "lm_head")
    embedding, head = model.transformer.wte, model.lm_head
    assert isinstance(embedding, TiledEmbedding)
    assert isinstance(head, TiledLinear)
    assert all(a.weight is b.weight for a, b in zip(embedding.tiles, head.tiles, strict=True))
    model.tie_weights()
    assert len({id(one) for one in model.parameters()}) == len(list(model.parameters()))
    state = model.state_dict()
    assert state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr()
    assert torch.equal(state["lm_head.weight"], expected["lm_head.weight"])


def test_initialised_again_a_tiled_model_has_the_values_of_the_untiled_one(seed):
    states = []
    for above in (1 << 30, ABOVE):
        model = MODELS["llama"]()
        tile_(model, above)
        for module in model.modules():
            module._is_hf_initialized = False
        for parameter in model.parameters():
            parameter._is_hf_initialized = False
        torch.manual_seed(seed)
        model.init_weights()
        states.append(model.state_dict())
    assert all(torch.equal(states[1][key], value) for key, value in states[0].items())


def test_what_is_small_or_special_stays_whole():
    attention = nn.MultiheadAttention(64, 4)
    hooked = nn.Linear(64, 64)
    hooked.register_forward_hook(lambda *_: None)
    renormed = nn.Embedding(64, 64, max_norm=1.0)
    model = nn.ModuleList([attention, hooked, renormed, nn.Linear(4, 4), nn.Conv1d(64, 64, 3)])
    assert tile_(model, 100) == []


@pytest.mark.parametrize("above", ["64MiB", 0, -1, 1.5, True])
def test_a_limit_that_is_no_number_of_bytes_is_refused(above):
    with pytest.raises(ValueError, match="expected a number of bytes"):
        tile_(nn.Sequential(nn.Linear(64, 64)), above)


def test_a_weight_that_others_use_as_well_is_refused_by_name():
    model = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Module()})
    model["b"].shared = model["a"].weight
    with pytest.raises(ValueError, match=r"a \(Linear\), b \(Module\)"):
        tile_(model, 100)


def test_a_layer_cannot_replace_itself():
    with pytest.raises(ValueError, match="its parent"):
        tile_(nn.Linear(64, 64), 100)


def test_one_module_under_two_names_stays_one():
    shared = nn.Linear(64, 64)
    model = nn.ModuleDict({"a": shared, "b": shared})
    (done,) = tile_(model, 5000)
    assert done.names == ("a", "b")
    assert model["a"] is model["b"]
    assert str(done).startswith("a, b: 64 x 64, 16384 bytes, in 4 x 1 tiles")


class Building:
    """What Init would do, with torch's own registration hooks."""

    def __init__(self, above):
        self.largest = 0

        def parameter(module, name, value):
            found = stand_in(module, name, value, above)
            if found is None and value is not None and not value.is_meta:
                self.largest = max(self.largest, value.nbytes)
            return found

        self._hooks = [
            registration.register_module_parameter_registration_hook(parameter),
            registration.register_module_module_registration_hook(
                lambda parent, name, child: assembled(child)
            ),
        ]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for hook in self._hooks:
            hook.remove()


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_a_model_is_built_in_tiles_with_the_same_values(name, seed):
    torch.manual_seed(seed)
    expected = MODELS[name]()
    torch.manual_seed(seed)
    with Building(ABOVE):
        model = MODELS[name]()
    kinds = {type(module).__name__ for module in model.modules() if isinstance(module, Tiled)}
    assert kinds == {"TiledEmbedding", "TiledConv1D" if name == "gpt2" else "TiledLinear", "TiledLinear"}
    state = model.state_dict()
    assert list(state) == list(expected.state_dict())
    assert all(torch.equal(state[key], value) for key, value in expected.state_dict().items())
    if name == "gpt2":
        assert model.lm_head.tiles[0].weight is model.transformer.wte.tiles[0].weight
    ids = batch(1)
    torch.manual_seed(seed)
    loss = model(ids, labels=ids).loss
    torch.manual_seed(seed)
    torch.testing.assert_close(loss, expected(ids, labels=ids).loss, rtol=1e-6, atol=0)


def test_no_parameter_above_the_limit_is_ever_registered(seed):
    with Building(4096) as building:
        nn.Sequential(nn.Linear(64, 512), nn.Embedding(300, 64))
    assert building.largest <= 4096
