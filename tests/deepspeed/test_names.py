"""infinity.deepspeed: DeepSpeed's names. Trusted: plain torch, infinity.reference, and the state_dicts.

What DeepSpeed's own tests of tensor fragments, schedules, batch sizes and the engine's public calls ask for.
"""

import ast
import logging

import pytest
import torch
from torch import nn

import infinity
from infinity import ConfigError, UnsupportedError, deepspeed
from infinity.deepspeed import comm as dist
from infinity.deepspeed.accelerator import get_accelerator
from infinity.deepspeed.calls import COMPILE, ENGINE, PACKAGE
from infinity.deepspeed.schedules import make_schedule
from infinity.deepspeed.utils import (
    RepeatingLoader,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)
from infinity.reference import ReferenceAdamW, prepare
from infinity.reference import recipe as reference
from places import ROOT, SUPPORT

pytestmark = pytest.mark.usefixtures("repeatable")

DTYPES = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 64}},
}


def configuration(precision="fp32", accumulate=1, **changes):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "infinity": {"host_memory": "16MiB"},
        **DTYPES[precision],
        **changes,
    }


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def build(precision="fp32", accumulate=1, **changes):
    config = configuration(precision, accumulate, **changes)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = make()
    return deepspeed.initialize(model=model, config=config)[0]


def go(engine, number=0):
    dtype = next(engine.parameters()).dtype
    inputs = torch.randn(3, 8, generator=torch.Generator().manual_seed(number)).to(dtype)
    engine.backward(engine(inputs).float().square().mean())


def plain(precision, accumulate, steps):
    """Return the plain model and its optimizer, trained, with the gradients of a further backward."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    model = prepare(make(), dtype)
    optimizer = ReferenceAdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for number in range(steps * accumulate + accumulate):
        inputs = torch.randn(3, 8, generator=torch.Generator().manual_seed(number)).to(dtype)
        (model(inputs).float().square().mean() / accumulate).backward()
        if (number + 1) % accumulate == 0 and number < steps * accumulate:
            infinity.reference.clip_grad_norm_(optimizer, 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fragments_are_the_recipes_masters_moments_and_gradients(precision, accumulate):
    engine = build(precision, accumulate)
    for number in range(3 * accumulate):
        go(engine, number)
        if number < 2 * accumulate:
            engine.step()
    model, optimizer = plain(precision, accumulate, 2)
    states = optimizer.state_dict()["state"]
    masters = engine.optimizer.state_dict()["state"]
    for number, (ours, theirs) in enumerate(zip(engine.parameters(), model.parameters(), strict=True)):
        for key in ("exp_avg", "exp_avg_sq"):
            found = safe_get_full_optimizer_state(ours, key)
            assert torch.equal(found, states[number][key])
            assert torch.equal(found.flatten(), safe_get_local_optimizer_state(ours, key))
            assert torch.equal(found, masters[number][key])
        master = safe_get_full_fp32_param(ours)
        assert (master.dtype, master.shape) == (torch.float32, ours.shape)
        assert torch.equal(master.to(theirs.dtype), theirs)
        assert torch.equal(master.flatten(), safe_get_local_fp32_param(ours))
        value, factor = reference._stored(theirs)
        grad = safe_get_full_grad(ours)
        assert torch.equal(grad, value.float() * float(factor))
        assert torch.equal(grad.flatten(), safe_get_local_grad(ours))
    engine.step()
    engine.zero_grad()
    assert safe_get_full_grad(ours) is None


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "int8", "int4"])
def test_fragments_that_are_set_are_those_that_the_next_step_takes(state_dtype, local):
    engine = build("bf16", infinity={"host_memory": "16MiB", "state_dtype": state_dtype})
    go(engine)
    engine.step()
    go(engine, 1)
    weight, bias = engine.module[0].weight, engine.module[0].bias
    values = {
        "master": torch.full((16, 8), 0.3),
        "exp_avg": torch.zeros(16, 8),
        "exp_avg_sq": torch.ones(16, 8),
    }
    grad = torch.full((16, 8), 1e-3)
    if local:
        safe_set_local_fp32_param(weight, values["master"].flatten())
        safe_set_local_optimizer_state(weight, values["exp_avg"].flatten(), "exp_avg")
        safe_set_local_optimizer_state(weight, values["exp_avg_sq"].flatten(), "exp_avg_sq")
        safe_set_local_grad(weight, grad.flatten())
    else:
        safe_set_full_fp32_param(weight, values["master"])
        safe_set_full_optimizer_state(weight, values["exp_avg"], "exp_avg")
        safe_set_full_optimizer_state(weight, values["exp_avg_sq"], "exp_avg_sq")
        safe_set_full_grad(weight, grad)
    safe_update_full_grad_vectorized([bias], lambda old, parameter: torch.zeros_like(old) * len(parameter))
    assert torch.equal(safe_get_full_fp32_param(weight), values["master"])
    assert torch.equal(safe_get_full_optimizer_state(weight, "exp_avg_sq"), values["exp_avg_sq"])
    assert torch.equal(safe_get_full_grad(weight), grad)
    assert not safe_get_full_grad(bias).any()
    before = safe_get_full_fp32_param(engine.module[2].weight)
    engine.step()
    moved = safe_get_full_fp32_param(weight) - values["master"]
    size = 1e-3 * 0.1 / (1 - 0.9**2) / (0.999 / (1 - 0.999**2)) ** 0.5 * 1e-2
    assert moved.mean().item() == pytest.approx(-size, rel=0.05)
    assert not torch.equal(before, safe_get_full_fp32_param(engine.module[2].weight))


def test_a_gradient_that_is_set_counts_in_the_norm_and_with_accumulation():
    engine = build("fp32", 2)
    go(engine)
    engine.step()
    for one in engine.parameters():
        safe_set_full_grad(one, torch.zeros(one.shape))
    safe_set_full_grad(engine.module[2].bias, torch.tensor([3.0, 0, 4, 0]))
    engine.set_gradient_accumulation_boundary(True)
    engine.step()
    assert engine.get_global_grad_norm() == 5.0


def test_what_cannot_be_looked_at_or_set_says_so():
    engine = build("fp16")
    weight = engine.module[0].weight
    assert safe_get_full_grad(weight) is None
    safe_set_full_grad(weight, torch.ones(16, 8))  # there is none
    assert weight.grad is None
    assert safe_get_full_fp32_param(nn.Linear(1, 1).weight) is None
    frozen = engine.module[2].weight.requires_grad_(False)
    assert safe_get_full_fp32_param(frozen) is None
    with pytest.raises(
        ValueError, match=r"0\.weight: AdamW keeps no 'momentum', but 'exp_avg', 'exp_avg_sq'"
    ):
        safe_get_full_optimizer_state(weight, "momentum")
    with pytest.raises(ValueError, match="a value of 3 elements; it has 128"):
        safe_set_full_fp32_param(weight, torch.ones(3))
    with pytest.raises(ValueError, match="this rank has a part of 128"):
        safe_set_local_fp32_param(weight, torch.ones(3))
    with infinity.gathered(weight), pytest.raises(UnsupportedError, match="set it between steps"):
        safe_set_full_fp32_param(weight, torch.ones(16, 8))
    early = build("fp32", gradient_clipping=0)
    go(early)
    with pytest.raises(UnsupportedError, match=r'update="backward" has applied it'):
        safe_get_full_grad(early.module[0].weight)
    config = configuration(gradient_clipping=0)
    del config["optimizer"]
    late = deepspeed.initialize(
        model=make(), config=config, optimizer=lambda p: infinity.AdamW(p, lr=1e-2, update="forward")
    )[0]
    go(late)
    assert safe_get_full_grad(late.module[0].weight).any()


def test_onecycle_says_its_momentum_as_deepspeed_does():
    """The values of DeepSpeed's test_mom: up and down between the two in steps of 3, then the decay."""
    parameters = [nn.Parameter(torch.zeros(1))]
    options = {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 3}
    options |= {"cycle_min_mom": 0.8, "cycle_max_mom": 0.9, "decay_mom_rate": 0.5, "decay_step_size": 1}
    optimizer = torch.optim.Adam(parameters)
    schedule, seen = make_schedule("OneCycle", options, optimizer), []
    for _ in range(9):
        optimizer.step()
        schedule.step()
        seen += [schedule.get_mom()]
        assert [group["betas"] for group in optimizer.param_groups] == seen[-1]
    firsts = [momentum[0][0] for momentum in seen]
    assert firsts[2] == pytest.approx(0.8)
    assert firsts[:3] == sorted(firsts[:3], reverse=True)
    assert firsts[3:] == sorted(firsts[3:])
    assert firsts[6] > 0.9
    without = make_schedule("OneCycle", {**options, "cycle_momentum": False}, torch.optim.Adam(parameters))
    assert without.get_mom() is None
    assert make_schedule("OneCycle", options, torch.optim.SGD(parameters, lr=1)).get_mom() is None


def test_batch_sizes_change_as_in_deepspeed():
    engine = build("fp32", 2)
    assert engine.get_batch_info() == (4, 2, 2)
    engine.set_train_batch_size(8)
    assert (engine.gradient_accumulation_steps(), engine.train_batch_size()) == (4, 8)
    twice = build("fp32", 4)
    for number in range(8):
        for one in (engine, twice):
            inputs = torch.randn(3, 8, generator=torch.Generator().manual_seed(number))
            loss = one(inputs).square().mean()
            loss.backward() if number % 2 else one.backward(loss)
            one.step()
    assert engine.global_steps == 2
    found = [one.module.state_dict() for one in (engine, twice)]
    assert [name for name, one in found[0].items() if not torch.equal(one, found[1][name])] == []
    engine.set_train_micro_batch_size(3)
    assert engine.get_batch_info() == (12, 3, 4)
    for wrong in (0, 4, 10):
        with pytest.raises(ValueError, match="expected a multiple of 3"):
            engine.set_train_batch_size(wrong)
    early = build("fp32", gradient_clipping=0)
    with pytest.raises(UnsupportedError, match="this optimizer updates in the backward"):
        early.set_train_batch_size(4)


def test_an_engine_that_is_destroyed_trains_no_more_and_its_model_is_there():
    engine = build("fp32", 2)
    go(engine)
    half = engine.module[0].bias.grad.clone()
    before = engine.module_state_dict()
    engine.destroy()
    with pytest.raises(UnsupportedError, match="no optimizer"):
        engine.step()
    assert all(torch.equal(one, before[name]) for name, one in engine.module.state_dict().items())
    engine.module.zero_grad()
    inputs = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    engine.module(inputs).square().mean().backward()
    assert torch.equal(engine.module[0].bias.grad.clone(), 2 * half)
    engine.destroy()


def test_an_unknown_attribute_names_the_engine_and_what_is_there_instead():
    engine = build()
    with pytest.raises(
        AttributeError, match=r"'nothing': neither the DeepSpeedEngine nor its model, Sequential"
    ):
        _ = engine.nothing
    with pytest.raises(AttributeError, match=r"no 'deepspeed_io'; instead: initialize\(training_data"):
        _ = engine.deepspeed_io
    engine.module.get_pld_theta = lambda: 1
    assert engine.get_pld_theta() == 1, "the model's own come first"


def test_the_accelerator_is_the_device_that_computes():
    device = get_accelerator()
    assert deepspeed.get_accelerator() is deepspeed.accelerator.get_accelerator() is device
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    assert (device.device_name(), torch.device(device.current_device_name()).type) == (kind, kind)
    assert device.communication_backend_name() == {"cuda": "nccl", "cpu": "gloo"}[kind]
    assert device.is_available()
    assert device.is_bf16_supported()
    assert torch.float32 in device.supported_dtypes()
    assert device.device_count() >= 1
    assert 0 < device.memory_allocated() <= max(device.max_memory_allocated(), device.total_memory())
    for call in (device.synchronize, device.empty_cache, device.reset_peak_memory_stats):
        call()
    device.manual_seed(3)
    one = torch.rand(2, device=device.current_device_name())
    device.manual_seed_all(3)
    assert torch.equal(one, torch.rand(2, device=device.current_device_name()))
    assert device.on_accelerator(one)
    assert device.is_synchronized_device() is (kind == "cpu")
    assert device.current_stream() == getattr(torch, kind).current_stream()
    with pytest.raises(AttributeError, match=r"get_accelerator\(\) has no 'nothing'"):
        _ = device.nothing


def test_comm_is_torch_distributed():
    assert dist.all_reduce is torch.distributed.all_reduce
    assert (dist.is_initialized(), dist.get_local_rank()) == (torch.distributed.is_initialized(), 0)
    assert dist.init_distributed is deepspeed.init_distributed


def test_small_names_do_what_deepspeeds_do(caplog):
    loader = RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]
    with caplog.at_level(logging.INFO, "infinity"):
        deepspeed.utils.log_dist("here", ranks=[0])
        deepspeed.utils.log_dist("elsewhere", ranks=[1])
    assert (caplog.text.count("here"), deepspeed.utils.logger.name) == (1, "infinity")
    model = make()
    assert deepspeed.utils.set_z3_leaf_modules(model, [nn.Linear]) == [model[0], model[2]]
    assert deepspeed.DeepSpeedConfigError is ConfigError


# The table in docs/deepspeed.md

CLASSES = {"works", "no effect", "refused"}


def table():
    """Return {call: (class, what is said)} of docs/deepspeed.md."""
    rows = {}
    for line in (ROOT / "docs" / "deepspeed.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 3:
            for name in cells[0].replace("`", "").split(", "):
                assert name not in rows, f"{name} stands there twice"
                rows[name] = (cells[1], cells[2])
    return rows


def resolved(path, engine):
    first, *rest = path.split(".")
    found = {"engine": engine, "get_accelerator()": get_accelerator()}.get(first)
    if found is None:
        found, rest = deepspeed, [first, *rest]
    for name in rest:
        found = getattr(found, name)
    return found


def test_the_table_of_the_documentation_is_true():
    engine, rows = build(), table()
    assert {answer for answer, _ in rows.values()} == CLASSES
    refused = {f"engine.{name}": instead for name, instead in ENGINE.items()} | PACKAGE
    written = {name: said for name, (answer, said) in rows.items() if answer == "refused"}
    assert written == {**refused, "engine.compile": COMPILE}
    for name, (answer, _) in rows.items():
        if answer != "refused":
            assert callable(resolved(name, engine)) or not name.endswith("()"), name
            if answer == "no effect":
                assert "o nothing" in (resolved(name, engine).__doc__ or ""), name
        elif name != "engine.compile":
            with pytest.raises(AttributeError) as caught:
                resolved(name, engine)
            assert refused[name] in str(caught.value)
    with pytest.raises(UnsupportedError, match=r"torch\.compile cannot follow"):
        engine.compile()


def test_every_public_name_of_deepspeed_stands_in_the_table():
    """As the names stand in its sources of 0.19, and, where it is installed, as they are."""
    names = (SUPPORT / "deepspeed_names.txt").read_text().split()
    assert len(names) > 200
    assert sorted(set(names) - table().keys()) == []


def test_calls_without_effect_can_be_made():
    engine = build()
    for name, (answer, _) in table().items():
        if answer == "no effect" and name.startswith("engine."):
            resolved(name, engine)()


def test_engine_methods_are_in_the_table():
    text = (ROOT / "infinity/deepspeed/engine.py").read_text()
    own = {
        f"engine.{node.name}"
        for parent in ast.walk(ast.parse(text))
        if isinstance(parent, ast.ClassDef)
        for node in parent.body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }
    assert sorted(own - table().keys()) == []
