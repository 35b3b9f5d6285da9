"""Parameters asked for in a type of their own keep it, and train in it, bit for bit as in memory.

Trusted: the reference recipe, each parameter in its own type; transformers' from_pretrained.
"""

import copy

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

import infinity
import models
from infinity import HostMemoryError, UnsupportedError, reference
from infinity.engine.engine import engine_of_model
from parity import differences, nothing_waits, same

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("repeatable")]

HEAD = "llama with a head in fp32"
OPTIONS = {"lr": 1e-2, "weight_decay": 0.1, "max_norm": 1.0}


class Mixed(nn.Module):
    """A module of 16 bits with a layer, and a parameter of its own, that `how` makes in another type."""

    def __init__(self, how, dtype):
        super().__init__()
        self.into = nn.Linear(8, 16)
        self.inner = _asked(how, dtype)
        self.gain = nn.Parameter(torch.full((16,), 1.5, dtype=dtype))
        self.shift = nn.Parameter(torch.zeros(16))
        self.out = nn.Linear(16, 8)

    def forward(self, x):
        x = self.into(x).tanh()
        y = self.inner(x.to(self.gain.dtype)) * self.gain
        return self.out(y.to(x.dtype) + self.shift)

    def alone(self):
        """Return what is asked for."""
        return nn.ModuleList([self.inner, nn.ParameterList([self.gain])])


def _asked(how, dtype):
    layer = nn.Linear(16, 16, dtype=dtype if how == "dtype=" else None)
    if how == "layer.to(dtype)":
        layer.to(dtype)
    elif how == "layer.float()":
        layer.float()
    elif how == "nn.Parameter(p.to(dtype))":
        layer.weight = nn.Parameter(layer.weight.to(dtype))
        layer.bias = nn.Parameter(layer.bias.to(dtype))
    elif how == "p.data = p.data.to(dtype)":
        for parameter in layer.parameters():
            parameter.data = parameter.data.to(dtype)
    elif how == "a deepcopy":
        layer = copy.deepcopy(nn.Linear(16, 16, dtype=dtype))
    elif how == "as another":
        like = nn.Linear(1, 1, dtype=dtype)
        layer = nn.Linear(16, 16, device=like.weight.device, dtype=like.weight.dtype)
    return layer


def train(model, optimizer, steps=3, micro=1):
    shown = []
    for step in range(steps):
        for one in range(micro):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + one))
            loss = model(x.to(model.into.weight.dtype)).float().square().mean()
            loss.backward()
            shown.append(loss.item())
        shown.append({name: one.grad.clone() for name, one in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return [*shown, {name: one.clone() for name, one in model.state_dict().items()}]


def both(how, dtype=torch.float32, *, config="bf16", window=None, waits=False, **fields):
    """Return a model of mixed types in memory, prepared, and the same built inside Init."""
    torch.manual_seed(3)
    plain = Mixed(how, dtype)
    reference.prepare(plain.alone(), dtype)
    reference.prepare(plain, models.COMPUTES[config])
    torch.manual_seed(3)
    with infinity.Init(**{"host_memory": "4MiB", "dtype": config, **fields}) as init:
        if window is not None:
            init._construction._window_nbytes = window
        ours = Mixed(how, dtype)
    return plain, ours if waits else nothing_waits(ours)


HOWS = [
    *("dtype=", "layer.to(dtype)", "layer.float()", "nn.Parameter(p.to(dtype))"),
    *("p.data = p.data.to(dtype)", "a deepcopy", "as another"),
]


@pytest.mark.parametrize("window", [None, 1])
@pytest.mark.parametrize("how", HOWS)
def test_what_is_asked_for_in_fp32_trains_in_it_among_16_bits(folder, how, window):
    plain, ours = both(how, window=window, nvme=str(folder))
    recipe = reference.ReferenceAdamW(plain.parameters(), **OPTIONS)
    optimizer = infinity.AdamW(ours.parameters(), **OPTIONS)
    assert differences(train(plain, recipe, micro=2), train(ours, optimizer, micro=2)) == []
    models.assert_same_state(ours, optimizer, plain, recipe)
    found = {name: one.dtype for name, one in ours.named_parameters()}
    assert {name for name, dtype in found.items() if dtype == torch.float32} == {
        "gain",
        "inner.weight",
        "inner.bias",
    }
    optimizer_state, expected = optimizer.state_dict()["state"], plain.state_dict()
    assert {one["exp_avg"].dtype for one in optimizer_state.values()} == {torch.float32}
    with infinity.gathered(ours):
        assert (
            differences(dict(expected), {name: one.clone() for name, one in ours.state_dict().items()}) == []
        )


@pytest.mark.parametrize(
    ("config", "dtype", "fields"),
    [
        ("fp32", torch.bfloat16, {}),
        ("fp16", torch.bfloat16, {}),
        ("fp16", torch.float32, {"host_memory": "1MiB"}),
        ("bf16", torch.float16, {}),
        ("fp32", torch.float16, {"host_memory": "2MiB"}),
        ("bf16", torch.float32, {"state_dtype": "int8"}),
        ("bf16", torch.float32, {"host_memory": "64MiB", "nvme": None}),
        ("bf16", torch.float32, {"durable": True}),
    ],
)
@pytest.mark.filterwarnings("ignore:.*no loss scaling:UserWarning")
def test_every_type_stands_beside_every_other(folder, config, dtype, fields):
    plain, ours = both("dtype=", dtype, config=config, **{"nvme": str(folder), **fields})
    alone = list(plain.alone().parameters())
    rest = [one for one in plain.parameters() if not any(one is other for other in alone)]
    options = {"lr": 1e-2, "weight_decay": 0.1}
    recipes = [
        reference.ReferenceAdamW(alone, **options),
        reference.ReferenceAdamW(rest, state_dtype=fields.get("state_dtype", "fp32"), **options),
    ]
    optimizer = infinity.AdamW(
        [
            one
            for _, one in sorted(ours.named_parameters(), key=lambda pair: pair[0] not in _names(plain, rest))
        ],
        **options,
    )

    class Both:
        def step(self):
            for one in recipes:
                one.step()

        def zero_grad(self):
            for one in recipes:
                one.zero_grad()

    if fields.get("durable"):
        infinity.resume(ours, optimizer)
    assert differences(train(plain, Both()), train(ours, optimizer)) == []


def _names(model, parameters):
    return {name for name, one in model.named_parameters() if any(one is other for other in parameters)}


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "Lion", "Adam"])
@pytest.mark.parametrize("update", ["forward", "backward"])
def test_every_optimizer_updates_each_type_as_it_does_alone(folder, kind, update):
    X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    shown = []
    for nvme, memory in ((str(folder), "1MiB"), (None, "64MiB")):
        _, ours = both("dtype=", nvme=nvme, host_memory=memory)
        optimizer = getattr(infinity, kind)(ours.parameters(), lr=1e-2, update=update)
        found = []
        for _ in range(2):
            ours(X.bfloat16()).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append({name: one.clone() for name, one in ours.state_dict().items()})
        shown.append(found)
    assert differences(*shown) == []
    torch.manual_seed(3)
    start = Mixed("dtype=", torch.float32).gain.detach()
    moved = shown[0][0]["gain"]
    assert moved.dtype == torch.float32
    assert not torch.equal(moved, start)
    assert not torch.equal(moved, moved.bfloat16().float()), "its update is not rounded to 16 bits"


def test_a_type_that_others_decide_is_configs(folder):
    with infinity.Init(nvme=str(folder), host_memory="1MiB"):
        first = nn.Linear(4, 4)
        first.weight.float().sum()  # in passing
        first.to("cpu")
        model = nn.ModuleList([first])
        model.append(nn.Linear(4, 4, dtype=first.weight.dtype))
        model.append(nn.Linear(4, 4).to(first.weight.dtype))
        derived = nn.Module()
        derived.w = nn.Parameter(torch.log(torch.arange(1, 9, dtype=torch.float32)))
        model.append(derived)
        previous = torch.get_default_dtype()
        torch.set_default_dtype(torch.float16)
        model.append(nn.Linear(4, 4))
        torch.set_default_dtype(previous)
    assert {one.dtype for one in model.parameters()} == {torch.bfloat16}
    with infinity.Init(nvme=str(folder), host_memory="1MiB"):
        first = nn.Linear(4, 4)
        said = str(first.weight.dtype)
        own = nn.Linear(4, 4, dtype=torch.float32)
    assert (said, first.weight.dtype, own.weight.dtype) == ("torch.float32", torch.bfloat16, torch.float32)


def test_the_last_word_counts_and_a_replacement_inherits(folder):
    with infinity.Init(nvme=str(folder), host_memory="1MiB") as init:
        init._construction._window_nbytes = 1
        back = nn.Linear(4, 4, dtype=torch.float32).to(torch.bfloat16)
        late = nn.Linear(4, 4)
        nn.Linear(64, 64)
        late.float()  # out of its record
        kept = nn.Linear(4, 4, dtype=torch.float32)
        kept.weight = nn.Parameter(torch.ones(4, 4))
        kept.load_state_dict({"weight": torch.ones(4, 4), "bias": torch.ones(4)}, assign=True)
        model = nn.ModuleList([back, late, kept])
    found = [one.dtype for one in model.parameters()]
    assert found == [torch.bfloat16] * 2 + [torch.float32] * 4


def test_tiles_are_what_the_layer_was_asked_for_in(folder):
    torch.manual_seed(0)
    plain = nn.Linear(64, 64, dtype=torch.float32)
    torch.manual_seed(0)
    with infinity.Init(nvme=str(folder), host_memory="1MiB", tile_above="4KiB"):
        ours = nn.Sequential(nn.Linear(64, 64, dtype=torch.float32))
    assert {one.dtype for one in ours.parameters()} == {torch.float32}
    x = torch.randn(2, 64)
    assert torch.allclose(ours(x), plain(x), atol=1e-6)


def test_a_checkpoint_and_files_carry_each_type(folder, tmp_path):
    plain = models.build(HEAD)
    recipe = reference.ReferenceAdamW(plain.parameters(), **OPTIONS)
    ours = models.build(HEAD, nvme=str(folder), host_memory="1MiB")
    optimizer = infinity.AdamW(ours.parameters(), **OPTIONS)
    assert models.train(ours, optimizer, 2) == models.train(plain, recipe, 2)
    infinity.save(ours, optimizer, tmp_path / "saved")
    again = models.build(HEAD, seed=9, host_memory="64MiB")
    other = infinity.AdamW(again.parameters(), **OPTIONS)
    infinity.load(again, other, tmp_path / "saved")
    assert models.train(again, other, 2, first=2) == models.train(plain, recipe, 2, first=2)
    models.assert_same_state(again, other, plain, recipe)
    infinity.save_pretrained(again, tmp_path / "own")
    infinity.save_pretrained(again, tmp_path / "bf16", torch.bfloat16)
    infinity.save_pretrained(again, tmp_path / "fp32", torch.float32)
    masters = {name: recipe.state[one]["master"] for name, one in plain.named_parameters()}
    expected = {
        "own": dict(plain.state_dict()),
        "bf16": {name: reference.rounded(one) for name, one in masters.items()},
        "fp32": masters,
    }
    for kind, values in expected.items():
        found = load_file(tmp_path / kind / "model.safetensors")
        assert found.keys() == values.keys()
        assert [name for name, one in values.items() if not same(found[name], one)] == [], kind


def test_from_pretrained_keeps_what_the_model_asks_for(folder, tmp_path):
    config = transformers.Ernie4_5_MoeConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        moe_intermediate_size=24,
        moe_num_experts=4,
        moe_k=2,
        moe_layer_start_index=0,
    )
    kind = transformers.Ernie4_5_MoeForCausalLM
    kind(config).to(torch.bfloat16).save_pretrained(tmp_path)
    plain = kind.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with infinity.Init(nvme=str(folder), host_memory="4MiB"):
        ours = kind.from_pretrained(tmp_path, dtype=torch.bfloat16)
    expected = {name: one.dtype for name, one in plain.named_parameters()}
    assert torch.float32 in expected.values()
    assert {name: one.dtype for name, one in ours.named_parameters()} == expected
    assert differences(dict(plain.state_dict()), dict(ours.state_dict())) == []


class Complex(nn.Module):
    """Multiplies by complex numbers, kept as the error says, or as torch has them."""

    def __init__(self, *, real):
        super().__init__()
        self.into = nn.Linear(8, 8)
        w = torch.randn(4, dtype=torch.complex64)
        self.w = nn.Parameter(torch.view_as_real(w)) if real else nn.Parameter(w)

    def forward(self, x):
        w = torch.view_as_complex(self.w) if not self.w.is_complex() else self.w
        y = torch.view_as_complex(self.into(x).float().unflatten(-1, (4, 2)))
        return torch.view_as_real(y * w).square().mean()


def test_a_complex_parameter_is_refused_and_its_parts_train(folder):
    with (
        pytest.raises(UnsupportedError, match=r"Complex.w is torch.complex64.*view_as_real\(w\).*self.w"),
        infinity.Init(nvme=str(folder), host_memory="1MiB"),
    ):
        Complex(real=False)
    with (
        pytest.raises(UnsupportedError, match=r"Complex.w is torch.complex64"),
        infinity.Init(nvme=str(folder), host_memory="1MiB"),
        torch.device("meta"),
    ):
        Complex(real=False)
    torch.manual_seed(0)
    plain = Complex(real=False)
    reference.prepare(plain.into)
    torch.manual_seed(0)
    with infinity.Init(nvme=str(folder), host_memory="1MiB"):
        ours = Complex(real=True)
    assert ours.w.dtype == torch.float32
    x = torch.randn(3, 8).bfloat16()
    losses = [model(x) for model in (plain, ours)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == losses[1].item()
    assert torch.equal(torch.view_as_real(plain.w.grad), ours.w.grad.clone())
    assert torch.equal(plain.into.weight.grad, ours.into.weight.grad.clone())
    infinity.AdamW(ours.parameters()).step()


def test_what_no_record_holds_is_refused_by_name(folder):
    with (
        pytest.raises(UnsupportedError, match=r"Module.w is torch.float8_e4m3fn.*register_buffer"),
        infinity.Init(nvme=str(folder), host_memory="1MiB"),
    ):
        module = nn.Module()
        module.w = nn.Parameter(torch.zeros(4).to(torch.float8_e4m3fn), requires_grad=False)
    with (
        pytest.raises(HostMemoryError, match=r"fp16 moves in blocks of 36.0 KiB. 2.0 MiB works"),
        infinity.Init(nvme=str(folder), host_memory="128KiB"),
    ):
        model = nn.Linear(4, 4, dtype=torch.float16)
    with infinity.Init(nvme=str(folder), host_memory="2MiB"):
        model = nn.Linear(4, 4, dtype=torch.float16)
    assert model.weight.dtype == torch.float16


@pytest.mark.parametrize("window", [None, 1])
def test_an_optimizer_made_inside_init_is_told_to_come_later(folder, window):
    with infinity.Init(nvme=str(folder), host_memory="1MiB") as init:
        if window is not None:
            init._construction._window_nbytes = window
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        with pytest.raises(UnsupportedError, match=r"make it after the `with`"):
            infinity.AdamW(model.parameters())
        with pytest.raises(UnsupportedError, match=r"do this after the `with`"), infinity.gathered(model):
            pass
    infinity.AdamW(model.parameters())


def test_a_parameter_of_integers_stays_ordinary_and_an_optimizer_says_so(folder):
    with infinity.Init(nvme=str(folder), host_memory="1MiB"):
        model = nn.Linear(4, 4)
        model.index = nn.Parameter(torch.arange(4), requires_grad=False)
    assert type(model.index) is nn.Parameter
    assert engine_of_model(model).units[0].layout.segments[0].name == "weight"
    with pytest.raises(ValueError, match=r"is torch.int64: it has no gradient.*is_floating_point"):
        infinity.AdamW(model.parameters())
    infinity.AdamW([p for p in model.parameters() if p.is_floating_point()])
