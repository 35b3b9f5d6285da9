"""1-bit Adam on one rank, which exchanges nothing, and what it refuses. Trusted: infinity.reference. Several
ranks: tests/ranks/test_one_bit.py.
"""

import pytest
import torch

import infinity
from infinity import ConfigError, UnsupportedError
from infinity.engine.engine import engine_of_model
from infinity.reference import ReferenceAdamW, one_bit, prepare
from infinity.reference.moments import state_key, step_stored, widened
from infinity.reference.recipe import f32, rounded

GROUP = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.99), "eps": 1e-8}


def layers():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(30, 50), torch.nn.ReLU(), torch.nn.Linear(50, 3))


def loss_of(model, step):
    inputs = torch.randn(4, 30, generator=torch.Generator().manual_seed(step))
    return model(inputs.to(next(model.parameters()).dtype)).float().square().mean()


def in_memory(steps, freeze_step, dtype, state_dtype):
    """Return the weights, and the moments, which are rounded by the reference's rules."""
    model = layers() if dtype == "fp32" else prepare(layers())
    optimizer = ReferenceAdamW(model.parameters(), **GROUP, state_dtype=state_dtype, seed=3)
    for step in range(steps):
        loss_of(model, step).backward()
        if step < freeze_step:
            optimizer.step()
            model.zero_grad()
            continue
        for number, one in enumerate(model.parameters()):
            state = optimizer.state[one]
            state["step"] += 1

            def frozen(m, v, one=one, state=state):
                m.mul_(f32(0.9)).add_(one.grad.float() * f32(1 - 0.9))
                group = {**GROUP, "freeze_step": freeze_step}
                one_bit.frozen_step(state["master"], m, v, state["step"], group)

            step_stored(state, state_key(3, number, state["step"]), state_dtype, frozen)
            one.data.copy_(rounded(state["master"], one.dtype))
        model.zero_grad()
    return model.state_dict(), [widened(optimizer.state[one], state_dtype) for one in model.parameters()]


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_one_rank_freezes_the_variance_and_exchanges_nothing(dtype, state_dtype):
    with infinity.Init(host_memory="16MiB", dtype=dtype, state_dtype=state_dtype):
        model = layers()
    optimizer = infinity.OneBitAdam(model.parameters(), freeze_step=3, seed=3, **GROUP)
    variances = []
    for step in range(6):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= 2:
            variances.append([optimizer.state[one]["exp_avg_sq"] for one in model.parameters()])
    expected, moments = in_memory(6, 3, dtype, state_dtype)
    for key, value in model.state_dict().items():
        assert torch.equal(value, expected[key]), key
    for number, (one, (m, v)) in enumerate(zip(model.parameters(), moments, strict=True)):
        assert torch.equal(optimizer.state[one]["exp_avg"], m)
        assert all(torch.equal(of_step[number], v) for of_step in variances)
    assert infinity.stats(model).exchanged_nbytes == {}


@pytest.mark.disk
@pytest.mark.parametrize("state_dtype", ["bf16", "int8"])
def test_on_nvme_and_resumed_after_the_freeze_moments_in_fewer_bits_are_the_same(folder, state_dtype):
    expected, _ = in_memory(6, 2, "bf16", state_dtype)
    for first, last in ((0, 4), (4, 6)):
        init = {"nvme": folder, "host_memory": "256KiB", "state_dtype": state_dtype, "durable": True}
        with infinity.Init(**init):
            model = layers()
        optimizer = infinity.OneBitAdam(model.parameters(), freeze_step=2, seed=3, **GROUP)
        assert infinity.resume(model, optimizer) == first
        for step in range(first, last):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        infinity.commit(model)
        weights = model.state_dict()
        engine_of_model(model).close()
    assert all(torch.equal(value, expected[key]) for key, value in weights.items())


def test_weights_without_a_gradient_up_to_the_freeze_stay_where_they_are():
    with infinity.Init(host_memory="16MiB"):
        model = torch.nn.Embedding(6, 40)
    optimizer = infinity.OneBitAdam(model.parameters(), freeze_step=2, lr=1e-3, weight_decay=0.0)
    before = model.state_dict()["weight"]
    for step in range(5):
        model(torch.tensor([0, 1] if step < 2 else [0, 5])).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = (model.state_dict()["weight"].float() - before.float()).abs()
    assert moved[2:].eq(0).all(), "a token that comes after the freeze has no variance"
    assert 0 < moved[:2].max() < 0.1


def test_a_schedule_that_changes_a_tensor_does_not_change_steps_before():
    states = []
    for of in (float, torch.tensor):
        with infinity.Init(host_memory="16MiB"):
            model = layers()
        optimizer = infinity.OneBitAdam(model.parameters(), freeze_step=1, lr=of(1e-2))
        for step in range(4):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            group = optimizer.param_groups[0]
            group["lr"] = group["lr"].mul_(0.5) if of is torch.tensor else 0.5 * group["lr"]
        states.append(model.state_dict())
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key]), key


@pytest.mark.parametrize("freeze_step", [0, -1, 1.5, True])
def test_a_freeze_step_below_1_is_refused(freeze_step):
    with infinity.Init(host_memory="16MiB"):
        model = layers()
    with pytest.raises(ValueError, match=f"freeze_step={freeze_step}: expected a number of steps, 1 or more"):
        infinity.OneBitAdam(model.parameters(), freeze_step=freeze_step)


def test_what_cannot_go_with_exchanged_momenta_is_refused_with_what_to_use_instead():
    with infinity.Init(host_memory="16MiB", dtype="fp16"):
        model = layers()
    with pytest.raises(
        UnsupportedError,
        match=r"OneBitAdam does not update weights of dtype=.fp16.: .* another optimizer, as AdamW",
    ):
        infinity.OneBitAdam(model.parameters())
    with infinity.Init(host_memory="16MiB"):
        model = layers()
    with pytest.raises(
        UnsupportedError, match=r'max_norm=1.0.*use AdamW; Config\(quantized_gradients="int4"'
    ):
        infinity.OneBitAdam(model.parameters(), max_norm=1.0)
    optimizer = infinity.OneBitAdam(model.parameters(), freeze_step=1)
    for step in range(2):
        loss_of(model, step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-4)
        if step:
            with pytest.raises(UnsupportedError, match=r"gradients were scaled .* in step 2"):
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("kind", "instead"),
    [("ZeroOneAdam", "OneBitAdam sends momenta"), ("OneBitLamb", "OneBitAdam, or Adam with")],
)
def test_its_relatives_are_refused_by_name_with_what_to_use_instead(kind, instead):
    with pytest.raises(ConfigError, match=f"optimizer.type = .{kind}.*{instead}"):
        infinity.Config.from_deepspeed({"bf16": {"enabled": True}, "optimizer": {"type": kind, "params": {}}})
    with pytest.raises(AttributeError, match=rf"{kind}.*infinity.OneBitAdam"):
        getattr(infinity, kind)


def test_deepspeeds_json_makes_one_unless_gradients_are_clipped():
    from infinity import deepspeed

    content = {
        "train_batch_size": 1,
        "bf16": {"enabled": True},
        "optimizer": {
            "type": "OneBitAdam",
            "params": {"lr": 1e-3, "freeze_step": 7, "comm_backend_name": "nccl"},
        },
    }
    for clipping in (0, 1.0):
        config = {**content, "gradient_clipping": clipping}
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = layers()
        if clipping:
            with pytest.raises(ConfigError, match=r"OneBitAdam with gradient_clipping=1\.0 "):
                deepspeed.initialize(model=model, config=config)
        else:
            _, optimizer, _, _ = deepspeed.initialize(model=model, config=config)
            assert [group["freeze_step"] for group in optimizer.param_groups] == [7]
