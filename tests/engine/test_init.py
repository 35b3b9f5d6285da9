"""Trusted: torch's random numbers and initialisers, transformers' models. Faked: nothing."""

import contextlib
import copy
import gc
import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from children import ended
from covers import matrix
from infinity import ConfigError, UnsupportedError, reference
from infinity.engine.engine import engine_of
from infinity.planning.budget import least_budget
from parity import (
    differences,
    engine_in,
    halves,
    nothing_waits,
    optimizers,
    resident,
    tokens,
    total,
    train,
)
from places import ROOT

pytestmark = [
    pytest.mark.disk,
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
    pytest.mark.usefixtures("deterministic"),
]
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}

USED = """if True:
    import torch, infinity
    before = torch.get_rng_state()
    for name in infinity.__all__:
        getattr(infinity, name)
    print(torch.equal(torch.get_rng_state(), before), file=open({file!r}, "w"))"""


def test_what_is_imported_when_it_is_used_draws_no_random_numbers(tmp_path):
    """Else the first model after a seed, inside Init, would not be the one that plain PyTorch makes."""

    def anew(_say):
        for name in [one for one in sys.modules if one.partition(".")[0] == "infinity"]:
            del sys.modules[name]
        exec(USED.format(file=f"{tmp_path}/same"), {})  # noqa: S102

    ended(anew)
    assert (tmp_path / "same").read_text() == "True\n"


@pytest.mark.slow
def test_what_other_packages_import_then_draws_none_either(tmp_path):
    subprocess.run([sys.executable, "-c", USED.format(file=f"{tmp_path}/same")], check=True)
    assert (tmp_path / "same").read_text() == "True\n"


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def t5():
    config = transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    return transformers.T5ForConditionalGeneration(config)


def many_kinds():
    return nn.Sequential(
        nn.Conv1d(3, 8, 3),
        nn.BatchNorm1d(8),
        nn.Embedding(16, 8, padding_idx=3),
        nn.EmbeddingBag(16, 8),
        nn.Bilinear(8, 8, 4),
        nn.LSTM(8, 8, 2, bidirectional=True),
        nn.GRUCell(8, 8),
        nn.MultiheadAttention(8, 2, add_bias_kv=True),
        nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
        nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)),
        nn.ParameterList([nn.Parameter(torch.randn(3)), nn.Parameter(torch.rand(2, 2))]),
        nn.PReLU(),
        nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16), 2),
        nn.ConvTranspose2d(2, 4, 3),
        nn.GroupNorm(2, 4),
    )


MODELS = {
    "Llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2)),
    "GPT-2": gpt2,
    "Mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4)
    ),
    "BERT": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(**SIZES, max_position_embeddings=32)
    ),
    "T5": t5,
    "ViT": lambda: transformers.ViTForImageClassification(
        transformers.ViTConfig(
            **{k: v for k, v in SIZES.items() if k != "vocab_size"}, image_size=16, patch_size=8
        )
    ),
    "nn.Transformer": lambda: nn.Transformer(16, 2, 2, 2, 32),
    "many kinds": many_kinds,
}


def init(folder, **fields):
    return infinity.Init(**{"nvme": str(folder), "host_memory": least_budget(), **fields})


def build_both(build, folder, *, window=None):
    """Return what `build` makes plainly and inside Init, of one seed; `window` bytes are real meanwhile."""
    torch.manual_seed(5)
    plain = build()
    after = torch.rand(3)
    torch.manual_seed(5)
    with init(folder) as building:
        if window is not None:
            building._construction._window_nbytes = window
        ours = build()
    assert torch.equal(after, torch.rand(3)), "as many random numbers were drawn"
    return plain, ours


def masters(model):
    """Return every parameter's fp32 master (a plain model's parameters are their own), by name."""
    return {
        name: parameter.detach().float()
        if engine_of(parameter) is None
        else engine_of(parameter).parameters.read(parameter, ["master"])[0]
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def ties(model):
    """Return, for each name, the first name of the same parameter."""
    first = {}
    return {
        name: first.setdefault(id(one), name) for name, one in model.named_parameters(remove_duplicate=False)
    }


def assert_same(plain, ours):
    assert ties(ours) == ties(plain)
    expected, actual = masters(plain), masters(ours)
    assert differences(expected, actual) == []
    assert differences(dict(plain.named_buffers()), dict(ours.named_buffers())) == []
    assert [one.requires_grad for one in ours.parameters()] == [
        one.requires_grad for one in plain.parameters()
    ]
    assert resident(ours) == []


@pytest.mark.parametrize(*matrix(together=1, name=list(MODELS), window=[1, None]))
def test_the_same_seed_gives_the_same_weights_as_building_without(name, window, folder):
    plain, ours = build_both(MODELS[name], folder, window=window)
    assert_same(plain, ours)
    if hasattr(plain, "num_parameters"):
        assert ours.num_parameters() == plain.num_parameters()
    assert all(one.dtype == torch.bfloat16 for one in ours.parameters() if one.is_floating_point())


class Scribbles(nn.Module):
    """Changes parameters that were built long before, in every way that initialisation does."""

    def __init__(self):
        super().__init__()
        for number in range(12):
            self.add_module(f"m{number}", nn.Linear(16, 16))
        nn.init.normal_(self.m0.weight, std=0.02)
        nn.init.constant_(self.m0.bias, 3.0)
        nn.init.trunc_normal_(self.m1.weight)
        nn.init.orthogonal_(self.m2.weight)
        self.m3.weight.data.copy_(torch.arange(256.0).view(16, 16))
        self.m3.bias.data = torch.full((16,), 2.0)
        with torch.no_grad():
            self.m4.weight[3] = 7.0
            self.m4.weight[:, 2].fill_(-1.0)
            self.m4.bias += 1
            self.m5.weight.copy_(self.m6.weight + self.m4.weight)
            self.m5.weight.mul_(2)
        self.m7.load_state_dict({"weight": torch.eye(16), "bias": torch.ones(16)})
        self.m8.weight.data.normal_()
        self.m8.weight.data[0].zero_()
        nn.init.xavier_uniform_(self.m9.weight.data.view(16, 16))
        self.m10.weight.requires_grad_(requires_grad=False)
        self.m11.apply(lambda module: nn.init.kaiming_normal_(module.weight))
        self.total = self.m0.weight.sum().item()
        into, other = self.m1.weight.data, self.m2.weight.data
        into.copy_(other)  # a view that is written to after its parameter might have been evicted
        self.m6.weight.data = torch.full((4, 8), 0.5)
        self.copy = copy.deepcopy(self.m0)


@pytest.mark.parametrize("window", [None, 1, 3000])
def test_initialising_evicted_parameters_works_by_itself(window, folder):
    plain, ours = build_both(Scribbles, folder, window=window)
    assert_same(plain, ours)
    assert plain.total == ours.total


class Ties(nn.Module):
    """Shares weights that were built long before, and replaces and deletes others."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(8)])
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks[3].weight = self.blocks[0].weight
        self.blocks.append(self.blocks[1])
        self.blocks[2].weight = nn.Parameter(torch.ones(8, 8))
        del self.blocks[4].bias
        self.blocks[4].bias = None
        self.blocks[5] = nn.Linear(8, 8)


@pytest.mark.parametrize("window", [None, 1])
def test_tied_parameters_stay_tied_and_replaced_ones_are_gone(window, folder):
    plain, ours = build_both(Ties, folder, window=window)
    assert_same(plain, ours)
    engine = engine_in(ours)
    assert sum(len(unit.parameters) for unit in engine.units) >= len(list(plain.parameters()))


def test_extents_of_what_was_thrown_away_are_used_again(folder):
    def build():
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
        for number in range(4):
            model[number] = nn.Linear(32, 32)
        return model

    _, ours = build_both(build, folder, window=1)
    engine = engine_in(ours)
    assert len(engine.units) == 4
    store = engine.nvme_store
    free = sum(len(offsets) * nbytes for nbytes, offsets in store._free._offsets.items())
    assert free + sum(unit.record.nbytes("nvme") for unit in engine.units) == store._end


def test_integers_stay_ordinary_and_frozen_parameters_have_no_state(folder):
    def build():
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        model.register_parameter("number", nn.Parameter(torch.arange(3), requires_grad=False))
        model.register_buffer("scale", torch.ones(3, dtype=torch.float64))
        model[0].requires_grad_(requires_grad=False)
        return model

    plain, ours = build_both(build, folder, window=1)
    assert engine_of(ours.number) is None
    assert torch.equal(ours.number, plain.number)
    assert ours.scale.dtype == torch.float64
    infinity.AdamW([one for one in ours.parameters() if one.is_floating_point()])
    state = {unit.name: "m" in unit.record for unit in engine_in(ours).units}
    assert state == {"0": False, "1": True}


class Unfinished(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(64, 64)
        raise ZeroDivisionError


def handles():
    """Return every descriptor with what it is open on, and every thread, but for those that end meanwhile."""
    gc.collect()
    there = set(threading.enumerate())
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            there.add((descriptor.name, os.readlink(descriptor)))
    return there


def test_a_constructor_that_raises_leaves_nothing_behind(folder):
    before = handles()
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), init(folder):
            Unfinished()
    assert handles() - before == set()  # an engine of an earlier test may end meanwhile
    assert list(folder.iterdir()) == []
    with init(folder):
        nn.Linear(2, 2)


def test_no_file_is_visible(folder):
    with init(folder):
        model = nn.Linear(64, 64)
        assert list(folder.iterdir()) == []
    assert list(folder.iterdir()) == []
    del model


def test_what_cannot_be_built_is_refused_by_name(folder):
    with init(folder), pytest.raises(UnsupportedError, match="inside another Init"), init(folder):
        pass
    with pytest.raises(UnsupportedError, match=r"2 parameters.*meta device.*weight, bias"), init(folder):
        empty = nn.Linear(2, 2, device="meta")
    assert empty.weight.is_meta
    with pytest.raises(UnsupportedError, match=r"LazyLinear.weight is a lazy parameter"), init(folder):
        nn.LazyLinear(2)
    with pytest.raises(UnsupportedError, match=r"Linear.weight is torch.float64"), init(folder):
        nn.Linear(2, 2, dtype=torch.float64)
    with pytest.raises(ConfigError, match="not both"):
        infinity.Init(infinity.Config(), nvme=str(folder))
    with init(folder):
        nn.Linear(2, 2)


@pytest.mark.parametrize("window", [None, 1])
@pytest.mark.parametrize("how", ["model.bfloat16()", "default dtype", "dtype="])
def test_models_drawn_or_cast_in_other_types_have_their_values_as_masters(how, window, folder):
    def build():
        if how == "default dtype":
            torch.set_default_dtype(torch.bfloat16)
        try:
            model = nn.Sequential(
                *(nn.Linear(8, 8, dtype=torch.bfloat16 if how == "dtype=" else None) for _ in range(4))
            )
        finally:
            torch.set_default_dtype(torch.float32)
        return model.bfloat16() if how == "model.bfloat16()" else model

    plain, ours = build_both(build, folder, window=window)
    assert_same(plain, ours)


def test_two_models_of_one_init_and_of_two_train_in_turns(folder):
    X = halves(2, 3, 8)

    def build():
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    torch.manual_seed(3)
    plain = [reference.prepare(build()) for _ in range(3)]
    torch.manual_seed(3)
    with init(folder):
        ours = [build(), build()]
    with init(folder):
        ours.append(build())
    for model in ours[1:]:
        nothing_waits(model)
    pairs = [optimizers(*both) for both in zip(plain, ours, strict=True)]
    for turn in range(3):
        for number in range(3):
            expected = train(plain[number], pairs[number][0], X, steps=1, seed=turn)
            assert differences(expected, train(ours[number], pairs[number][1], X, steps=1, seed=turn)) == []


def test_parts_built_inside_and_outside_work_together(folder):
    X = halves(2, 8)
    torch.manual_seed(3)
    plain = nn.Sequential(reference.prepare(nn.Linear(8, 8)), nn.Linear(8, 8).bfloat16())
    torch.manual_seed(3)
    with init(folder):
        part = nn.Linear(8, 8)
    ours = nn.Sequential(part, nn.Linear(8, 8).bfloat16())
    nothing_waits(ours)
    with pytest.raises(ValueError, match="was not built inside"):
        infinity.AdamW(ours.parameters())

    def loop(model, kind):
        mine = kind(model[0].parameters(), lr=1e-2)
        other = torch.optim.SGD(model[1].parameters(), lr=0.1)
        shown = []
        for seed in range(3):
            shown += train(model, mine, X, steps=1, seed=seed)[:2]
            total(model(*X(torch.Generator().manual_seed(seed)))).backward()
            other.step()
            mine.step()
            model.zero_grad()
        return shown

    assert differences(loop(plain, reference.ReferenceAdamW), loop(ours, infinity.AdamW)) == []


def test_a_model_that_is_built_and_never_trained_costs_no_state(folder):
    with init(folder):
        model = nn.Linear(64, 64)
    x = halves(1, 64)(torch.Generator())[0]
    with torch.no_grad():
        assert model(x).shape == (1, 64)
    assert engine_in(model).units[0].record.tiers() == (("hi", "nvme"), ("lo", "nvme"))


def test_generating_between_steps_equals_plain_torch(folder):
    plain, ours = build_both(MODELS["Llama"], folder)
    reference.prepare(plain)
    nothing_waits(ours)

    def loop(model, optimizer):
        shown = []
        for seed in range(2):
            model.eval()
            ids = tokens(64, 1, 4)(torch.Generator().manual_seed(seed))[0]
            shown.append(model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0))
            model.train()
            shown += train(
                model,
                optimizer,
                tokens(64, 2, 8),
                steps=1,
                seed=seed,
                loss=lambda model, ids: model(ids[0], labels=ids[0]).loss,
            )
        return shown

    assert differences(*map(loop, (plain, ours), optimizers(plain, ours))) == []


PEAK = """
import resource, sys, torch, transformers
import infinity
def rss():
    return int(open("/proc/self/status").read().split("VmRSS:")[1].split()[0]) * 1024
torch.set_num_threads(1)
config = transformers.LlamaConfig(vocab_size=16000, hidden_size=1024, num_hidden_layers=13,
    num_attention_heads=16,
                                  intermediate_size=2816, tie_word_embeddings=False)
transformers.LlamaForCausalLM
nothing = torch.nn.Linear(8, 8)(torch.zeros(1, 8))
open("/proc/self/clear_refs", "w").write("5")
before = rss()
with infinity.Init(nvme=sys.argv[1], host_memory="64MiB"):
    model = transformers.LlamaForCausalLM(config)
peak = int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024
print(model.num_parameters(), peak - before)
"""


@pytest.mark.slow
def test_building_takes_the_budget_and_the_largest_module_never_the_model(folder):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", PEAK, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    parameters, grown = map(int, done.stdout.split()[-2:])
    assert parameters > 190e6
    largest = 4 * 16000 * 1024
    assert grown <= (64 << 20) + largest + (150 << 20), f"{math.ceil(grown / 2**20)} MiB"
