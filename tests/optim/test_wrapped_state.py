"""Small state of the optimizers that wrap_optimizer takes. Trusted: torch's own class, in memory, and how the
reference rounds moments. A real disk.
"""

import pytest
import torch
import transformers

import infinity
import models
from covers import matrix
from infinity import UnsupportedError
from infinity.engine.engine import engine_of_model
from infinity.reference import recipe as reference
from infinity.reference.moments import STATE_BLOCK, state_key, store, widened, zero_moments
from models import train

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("repeatable")]

models.MODELS["one layer"] = lambda: transformers.LlamaForCausalLM(
    transformers.LlamaConfig(**{**models.SIZES, "num_hidden_layers": 1})
)

# name: class, options, the names of its state that are m and v of 16 bits, and of codes
KINDS = {
    "RMSprop": ("RMSprop", {"weight_decay": 0.1}, ["square_avg"], [None, "square_avg"]),
    "RMSprop with momentum": (
        "RMSprop",
        {"momentum": 0.9},
        ["square_avg", "momentum_buffer"],
        ["momentum_buffer", "square_avg"],
    ),
    "Adadelta": ("Adadelta", {}, ["square_avg", "acc_delta"], ["acc_delta", "square_avg"]),
    "Adamax": ("Adamax", {}, ["exp_avg", "exp_inf"], ["exp_avg", "exp_inf"]),
    "RAdam": ("RAdam", {}, ["exp_avg", "exp_avg_sq"], ["exp_avg", "exp_avg_sq"]),
    "Rprop": ("Rprop", {}, ["prev", "step_size"], ["prev", "step_size"]),
    "SGD": ("SGD", {"momentum": 0.9}, ["momentum_buffer"], ["momentum_buffer"]),
    "Adagrad": ("Adagrad", {}, ["sum"], [None, "sum"]),
}


def wrapped(name, parameters, **more):
    kind, options, *_ = KINDS[name]
    return infinity.wrap_optimizer(getattr(torch.optim, kind), parameters, lr=1e-2, **options, **more)


class Plain:
    """torch's own optimizer on fp32 masters in memory, whose state is rounded after each of its steps."""

    def __init__(self, name, model, state_dtype, seed=0):
        kind, options, *names = KINDS[name]
        self.names = names[0] if state_dtype in ("fp32", "bf16") else names[1]
        self.state_dtype, self.seed, self.count = state_dtype, seed, 0
        self.masters = {
            one: torch.nn.Parameter(reference._adopt(one, one.dtype)) for one in model.parameters()
        }
        self.stored = [zero_moments(one.detach(), state_dtype) for one in self.masters.values()]
        self.torch = getattr(torch.optim, kind)(self.masters.values(), lr=1e-2, foreach=False, **options)

    @torch.no_grad()
    def step(self):
        self.count += 1
        for one, master in self.masters.items():
            master.grad = one.grad.float()
        self.torch.step()
        for number, (one, master) in enumerate(self.masters.items()):
            state, stored = self.torch.state[master], self.stored[number]
            m, v = (state[name] if name else torch.zeros_like(master) for name in [*self.names, None][:2])
            store(stored, m, v, state_key(self.seed, number, self.count), self.state_dtype)
            exact = widened(stored, self.state_dtype)
            state.update({name: new for name, new in zip(self.names, exact, strict=False) if name})
            one.copy_(reference.rounded(master, one.dtype))

    def zero_grad(self):
        for one in self.masters:
            one.grad = None


CASES = [(name, dtype, state) for name in KINDS for dtype in ("bf16", "fp32") for state in ("bf16", "int8")]
CASES += [(name, "bf16", "int4") for name in ("RAdam", "RMSprop", "SGD")]
CASES += [("RAdam", "fp16", "int8"), ("Adadelta", "fp16", "int8")]
DEFAULT = {
    ("RMSprop", "bf16", "int8"),
    ("RMSprop with momentum", "fp32", "bf16"),
    ("Adadelta", "fp16", "int8"),
    ("Rprop", "bf16", "int8"),
    ("RAdam", "bf16", "int4"),
    ("RMSprop", "bf16", "int4"),
}


@pytest.mark.filterwarnings("ignore:.*no loss scaling")
@pytest.mark.parametrize(
    ("name", "dtype", "state_dtype"),
    [pytest.param(*one, marks=[] if one in DEFAULT else pytest.mark.slow) for one in CASES],
)
def test_training_saving_and_setting_state_equal_torchs_own_class_whose_state_is_rounded(
    folder, tmp_path, name, dtype, state_dtype
):
    init = {"host_memory": "64MiB" if dtype == "fp32" else "320KiB", "dtype": dtype}
    init["state_dtype"] = state_dtype
    ours = models.build("one layer", nvme=folder, **init)
    optimizer = wrapped(name, ours.parameters(), seed=5)
    plain = models.build("one layer", computes=dtype)
    theirs = Plain(name, plain, state_dtype, seed=5)
    assert train(ours, optimizer, 3) == train(plain, theirs, 3)
    engine, packed = engine_of_model(ours), optimizer.state_dict()
    for number, (parameter, master) in enumerate(
        zip(ours.parameters(), theirs.masters.values(), strict=True)
    ):
        assert torch.equal(engine.parameters.read(parameter, ["master"])[0], master)
        for key in filter(None, theirs.names):
            assert torch.equal(packed["state"][number][key], theirs.torch.state[master][key]), key
            assert torch.equal(optimizer.state[parameter][key], theirs.torch.state[master][key]), key
    infinity.save(ours, optimizer, tmp_path / "saved")
    expected = train(ours, optimizer, 2, first=3)
    assert expected == train(plain, theirs, 2, first=3)
    again = models.build("one layer", seed=1, nvme=folder, **init)
    loaded = wrapped(name, again.parameters())
    infinity.load(again, loaded, tmp_path / "saved")
    assert train(again, loaded, 2, first=3) == expected
    other = models.build("one layer", nvme=folder, **init)
    infinity.load(other, None, tmp_path / "saved")
    given = wrapped(name, other.parameters(), seed=5)
    given.load_state_dict(packed)
    assert train(other, given, 2, first=3) == expected


@pytest.mark.parametrize(
    *matrix(
        together=1,
        update=["forward", "backward"],
        memory=["256KiB", "1MiB", "64MiB"],
        state_dtype=["bf16", "int8"],
    )
)
def test_the_bits_are_the_same_at_any_budget(folder, memory, state_dtype, update):
    ours = models.build("llama", nvme=folder, host_memory=memory, state_dtype=state_dtype)
    optimizer = wrapped("RMSprop with momentum", ours.parameters(), update=update)
    plain = models.build("llama")
    theirs = Plain("RMSprop with momentum", plain, state_dtype)
    assert train(ours, optimizer, 3) == train(plain, theirs, 3)


@pytest.mark.parametrize("state_dtype", ["bf16", "int8"])
def test_a_durable_run_goes_on_with_the_bits_of_one_that_never_stopped(folder, state_dtype):
    plain = models.build("one layer")
    losses = train(plain, Plain("RMSprop", plain, state_dtype), 5)
    found = []
    for first, last in ((0, 3), (3, 5)):
        init = {"nvme": folder, "host_memory": "1MiB", "state_dtype": state_dtype, "durable": True}
        ours = models.build("one layer", **init)
        optimizer = wrapped("RMSprop", ours.parameters())
        assert infinity.resume(ours, optimizer) == first
        found += train(ours, optimizer, last - first, first=first)
        infinity.commit(ours)
        engine_of_model(ours).close()
    assert found == losses


@pytest.mark.parametrize(("state_dtype", "width"), [("bf16", 2), ("int8", 1)])
def test_a_record_takes_what_the_state_takes(folder, state_dtype, width):
    with infinity.Init(nvme=folder, host_memory="64MiB", state_dtype=state_dtype):
        model = torch.nn.Linear(256, 4096, bias=False)
    wrapped("RMSprop", model.parameters())
    numel = 256 * 4096
    least = numel * (4 + width) + (numel // STATE_BLOCK * 8 if state_dtype == "int8" else 0)
    assert least <= infinity.stats(model).nvme_nbytes <= 1.1 * least


def test_a_checkpoint_of_some_of_a_layers_parameters_has_their_codes(folder, tmp_path):
    shown = []
    for loads in (False, True):
        torch.manual_seed(0)
        with infinity.Init(nvme=folder, host_memory="1MiB", state_dtype="int8"):
            layer = torch.nn.Linear(40, 60)
        optimizer = wrapped("RMSprop", [layer.weight])
        if loads:
            infinity.load(layer, optimizer, tmp_path / "saved")
        for step in range(2, 4) if loads else range(4):
            layer(torch.full((2, 40), 0.1 + step, dtype=torch.bfloat16)).float().square().sum().backward()
            optimizer.step()
            layer.zero_grad()
            if step == 1:
                infinity.save(layer, optimizer, tmp_path / "saved")
        shown.append(layer.state_dict())
    assert all(torch.equal(one, shown[1][key]) for key, one in shown[0].items())


def test_steps_that_experts_have_missed_round_as_those_that_were_made_at_once(folder):
    shown = []
    for looks in (False, True):
        model = models.build("mixtral", nvme=folder, host_memory="1MiB", state_dtype="int8")
        optimizer = wrapped("RMSprop", model.parameters())
        for step in range(4):
            ids = models.batch(step, rows=1, length=2)
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            if looks:
                optimizer.state_dict()
        state = optimizer.state_dict()["state"]
        shown.append((model.state_dict(), {number: one["square_avg"] for number, one in state.items()}))
    for ours, theirs in zip(*shown, strict=True):
        assert all(torch.equal(one, theirs[key]) for key, one in ours.items())


def test_a_layer_of_another_type_keeps_its_state_in_fp32(folder):
    torch.manual_seed(0)
    with infinity.Init(nvme=folder, host_memory="1MiB", state_dtype="int8"):
        layers = torch.nn.ModuleList([torch.nn.Linear(20, 30), torch.nn.Linear(20, 30, dtype=torch.float32)])
    optimizer = wrapped("RMSprop with momentum", layers.parameters())
    plain = torch.nn.Linear(20, 30)
    plain.load_state_dict(layers[1].state_dict())
    theirs = torch.optim.RMSprop(plain.parameters(), lr=1e-2, foreach=False, momentum=0.9)
    for step in range(3):
        x = torch.full((2, 20), 0.1 + step)
        layers[0](x.bfloat16()).float().square().sum().backward()
        for one, its in ((layers[1], optimizer), (plain, theirs)):
            one(x).square().sum().backward()
            its.step()
            its.zero_grad()
    for ours, one in zip(layers[1].parameters(), plain.parameters(), strict=True):
        for key in ("square_avg", "momentum_buffer"):
            assert torch.equal(optimizer.state[ours][key], theirs.state[one][key]), key
    assert all(torch.equal(one, plain.state_dict()[key]) for key, one in layers[1].state_dict().items())


@pytest.mark.parametrize("state_dtype", ["bf16", "int8", "int4"])
def test_another_optimizer_of_the_same_layer_changes_no_bit_of_it(folder, state_dtype):
    shown = []
    for beside in (False, True):
        torch.manual_seed(0)
        with infinity.Init(nvme=folder, host_memory="1MiB", state_dtype=state_dtype):
            layer = torch.nn.Linear(40, 60)
        optimizers = [wrapped("RMSprop", [layer.weight])]
        optimizers += [infinity.AdamW([layer.bias])] if beside else []
        for step in range(4):
            layer(torch.full((2, 40), 0.1 + step, dtype=torch.bfloat16)).float().sum().backward()
            for one in optimizers:
                one.step()
            layer.zero_grad()
        shown.append((layer.state_dict()["weight"], optimizers[0].state[layer.weight]["square_avg"]))
    assert all(map(torch.equal, *shown))


class Elementwise(torch.optim.Optimizer):
    """An optimizer of a user, whose state a test gives by its step."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for one in group["params"]:
                state = self.state[one]
                state["step"] = state.get("step", 0) + 1
                state |= self.state_of(one, state)
                one.sub_(group["lr"] * one.grad)


class TwoSigns(Elementwise):
    def state_of(self, one, state):
        return {"slow": one.grad * 1, "fast": one.grad * 2}


class SignsLate(Elementwise):
    def state_of(self, one, state):
        return {"late": one.grad.abs() * (1 if state["step"] < 4 else -1)}


class Counts(Elementwise):
    def state_of(self, one, state):
        return {"seen": (one.grad != 0).int()}


@pytest.mark.parametrize(
    ("kind", "options", "state_dtype", "says"),
    [
        (TwoSigns, {}, "int8", r"TwoSigns\) keeps its state in fp32 or bf16.*state_dtype='int8'"),
        (Counts, {}, "bf16", r"Counts\) keeps its state in fp32, .*state_dtype='bf16'"),
        (torch.optim.RMSprop, {"centered": True}, "bf16", r"keeps its state in fp32, .*'bf16'"),
        (torch.optim.Adamax, {}, "int4", r"keeps its state in fp32 or bf16 or int8, .*'int4'"),
    ],
)
def test_state_that_finds_no_codes_is_refused_by_name(folder, kind, options, state_dtype, says):
    with infinity.Init(nvme=folder, host_memory="1MiB", state_dtype=state_dtype):
        layer = torch.nn.Linear(8, 8)
    with pytest.raises(UnsupportedError, match=says):
        infinity.wrap_optimizer(kind, layer.parameters(), **options)


def test_state_that_becomes_negative_after_the_test_is_an_error_and_no_code(folder):
    with infinity.Init(nvme=folder, host_memory="1MiB", state_dtype="int8"):
        layer = torch.nn.Linear(8, 8)
    optimizer = infinity.wrap_optimizer(SignsLate, layer.parameters(), update="backward")
    with pytest.raises(UnsupportedError, match=r"SignsLate: late has become negative.*state_dtype='bf16'"):
        for _ in range(4):
            layer(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        layer.state_dict()
