"""loss.backward(), output.backward(gradient), engine.scale(loss).backward(): the updates of engine.backward.

Trusted: engine.backward, which test_deepspeed_engine and test_deepspeed_fp16 hold against the recipe; where
accumulation steps are no power of two, plain torch.
"""

import gc
import weakref

import pytest
import torch
from torch import nn

import infinity
from covers import matrix
from infinity import UnsupportedError
from infinity.deepspeed import backward as deepspeed_backward
from infinity.reference import ReferenceAdamW, prepare
from infinity.tiling import tile_sequence

pytestmark = pytest.mark.usefixtures("repeatable")

PRECISIONS = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16, in the backward": {"bf16": {"enabled": True, "check_grad_overflow": False}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
    "fp16, fixed": {"fp16": {"enabled": True, "loss_scale": 96}},
}


class Net(nn.Module):
    """Returns a loss that follows from the other output, and keeps one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 24), nn.Linear(24, 8)
        self.kept = None

    def forward(self, inputs, *, checkpointed=False):
        hidden = self.first(inputs.to(self.first.weight.dtype))
        if checkpointed:
            logits = torch.utils.checkpoint.checkpoint(self.second, hidden.tanh(), use_reentrant=True)
        else:
            logits = self.second(hidden.tanh())
        self.kept = hidden.float().square().mean()
        return {"loss": (logits.float() - 1).square().mean(), "logits": logits}


def settings(precision, accumulate=1, clip=0.0, **changes):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": clip,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "infinity": {"host_memory": "16MiB"},
        **PRECISIONS[precision],
        **changes,
    }


def build(precision, accumulate=1, clip=0.0, seed=0, **changes):
    config = settings(precision, accumulate, clip, **changes)
    torch.manual_seed(seed)
    with infinity.deepspeed.zero.Init(config_dict_or_path=config):
        model = Net()
    return infinity.deepspeed.initialize(model=model, config=config)[0]


def batch(number):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(number))


def by_engine(engine, number):
    engine.backward(engine(batch(number))["loss"])


def by_loss(engine, number):
    engine(batch(number))["loss"].backward()


def by_scale(engine, number):
    engine.scale(engine(batch(number))["loss"]).backward()


def mixed(engine, number):
    (by_engine, by_loss, by_scale)[number % 3](engine, number)


def mixed_scaled(engine, number):
    (by_scale, by_engine)[number % 2](engine, number)


def state(engine):
    sums = engine.optimizer.state_dict()["state"]
    moments = {f"{key}.{name}": one[name] for key, one in sums.items() for name in ("exp_avg", "exp_avg_sq")}
    return {**engine.module.state_dict(), **moments}


def different(one, other):
    return [name for name, value in one.items() if not torch.equal(value, other[name])]


def trained(precision, accumulate, clip, how, steps=4):
    engine = build(precision, accumulate, clip)
    for number in range(steps * accumulate):
        how(engine, number)
        engine.step()
    return engine


@pytest.mark.parametrize(*matrix(accumulate=[1, 2], clip=[0.0, 0.05], precision=list(PRECISIONS)))
def test_every_backward_makes_the_updates_of_the_engines_own(precision, clip, accumulate):
    expected = trained(precision, accumulate, clip, by_engine)
    scaled = "fp16" in precision
    early = accumulate == 1 and clip == 0 and precision in ("fp32", "bf16, in the backward")
    assert expected.optimizer.update == ("backward" if early else "forward")
    for how in (by_scale, mixed_scaled) if scaled else (by_loss, by_scale, mixed):
        engine = trained(precision, accumulate, clip, how)
        assert different(state(expected), state(engine)) == [], how.__name__
        counted = (engine.global_samples, engine.global_steps, engine.get_global_grad_norm())
        assert counted == (expected.global_samples, 4, expected.get_global_grad_norm())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_three_accumulation_steps_divide_once_whatever_the_way(precision):
    """A scaled loss has engine.backward's bits; else each gradient is divided, as plain torch shows it."""
    expected = trained(precision, 3, 0.0, by_engine, steps=2)
    assert different(state(expected), state(trained(precision, 3, 0.0, by_scale, steps=2))) == []
    if precision == "fp16":
        return
    torch.manual_seed(0)
    plain = Net()
    for one in plain.parameters():
        one.register_hook(lambda grad: grad / 3)
    prepare(plain, {"fp32": torch.float32, "bf16": torch.bfloat16}[precision])
    optimizer = ReferenceAdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
    for number in range(6):
        plain(batch(number))["loss"].backward()
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    engine = trained(precision, 3, 0.0, by_loss, steps=2)
    assert different(dict(plain.state_dict()), engine.module.state_dict()) == []


def two_losses(engine, number, go):
    found = engine(batch(number))
    go(engine, found["loss"], retain_graph=True)
    go(engine, found["logits"].float().square().mean())


def own_loss(engine, number, go):
    go(engine, torch.nn.functional.mse_loss(engine(batch(number))["logits"].float(), torch.zeros(4, 8)))


def kept_by_a_module(engine, number, go):
    found = engine(batch(number))
    go(engine, found["loss"] + found["logits"].float().mean() + 0.5 * engine.module.kept)


def around_the_engine(engine, number, go):
    go(engine, engine.module(batch(number))["loss"])


def penalty(engine, number, go):
    found = engine(batch(number))
    with infinity.gathered(engine.module):
        go(engine, found["loss"] + sum(one.float().square().sum() for one in engine.module.parameters()))


def checkpointed(engine, number, go):
    go(engine, engine(batch(number).requires_grad_(), checkpointed=True)["loss"])


def two_forwards(engine, number, go):
    go(engine, engine(batch(number))["loss"] + engine(batch(number + 100))["loss"])


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize(
    "how",
    [two_losses, own_loss, kept_by_a_module, around_the_engine, penalty, checkpointed, two_forwards],
)
def test_every_way_that_a_gradient_takes_is_divided_and_scaled_once(how, precision):
    def its_own(engine, loss, **options):
        engine.backward(loss, **options)

    def plainly(engine, loss, **options):
        (engine.scale(loss) if precision == "fp16" else loss).backward(**options)

    pair = [build(precision, 2, 0.05) for _ in range(2)]
    for number in range(4):
        for engine, go in zip(pair, (its_own, plainly), strict=True):
            how(engine, number, go)
            engine.step()
    assert different(*map(state, pair)) == []


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_output_that_is_no_number_goes_backward_from_a_gradient(precision):
    pair = [build(precision, 2) for _ in range(2)]
    for number in range(4):
        weights = batch(50 + number)
        for engine, user in zip(pair, (False, True), strict=True):
            logits = engine(batch(number))["logits"]
            if user:
                logits.backward(weights.to(logits.dtype))
            else:
                engine.backward((logits * weights.to(logits.dtype)).sum())
            engine.step()
    assert different(*map(state, pair)) == []
    with pytest.raises(ValueError, match=r"a loss of shape \(4, 8\).*output\.backward\(gradient\)"):
        pair[0].scale(pair[0](batch(0))["logits"])
    with pytest.raises(ValueError, match="without a graph"):
        pair[0].backward(torch.tensor(1.0))


def test_sgd_of_rate_1_makes_the_mean_of_two_micro_steps_as_in_deepspeed():
    for precision, how in (("fp32", by_loss), ("fp16", by_scale)):
        engine = build(precision, 2, optimizer={"type": "SGD", "params": {"lr": 1.0}})
        before = engine.module.state_dict()["second.bias"].float().clone()
        for _ in range(2):
            logits = engine(batch(0))["logits"]
            (engine.scale(logits.sum()) if precision == "fp16" else logits.sum()).backward()
            engine.step()
        moved = engine.module.state_dict()["second.bias"].float() - before
        assert moved.tolist() == pytest.approx([-4.0] * 8, rel=1e-3), how


@pytest.mark.parametrize(
    "how", [by_loss, lambda engine, number: engine.module(batch(number))["loss"].backward()]
)
def test_fp16_without_a_scaled_loss_is_refused_at_the_first_gradient_and_the_cures_work(how):
    expected, engine = (build("fp16", 2) for _ in range(2))
    for number in range(4):
        with pytest.raises(UnsupportedError, match=r"engine\.scale\(loss\)\.backward\(\)"):
            how(engine, number)
        by_scale(engine, number)
        engine.step()
        by_engine(expected, number)
        expected.step()
    assert different(state(expected), state(engine)) == []
    with pytest.raises(UnsupportedError, match="multiplied by 256"):
        torch.amp.GradScaler("cpu").scale(engine(batch(0))["loss"]).backward()


def test_gradients_of_inputs_are_plain_torchs():
    engine, plain = build("fp32", 2), build("fp32", 1)
    found = []
    for one in (engine, plain):
        inputs = batch(0).requires_grad_()
        found += torch.autograd.grad(one(inputs)["loss"], inputs)
    assert torch.equal(*found)


def test_a_backward_that_raised_leaves_nothing_behind():
    engine = build("fp16", 1)

    def fail(_grad):
        raise ZeroDivisionError

    loss = engine(batch(0))["logits"]
    loss.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        engine.scale(loss.sum()).backward()
    gc.collect()
    assert deepspeed_backward.running() is None
    with pytest.raises(UnsupportedError, match="fp16"):
        by_loss(engine, 0)


def test_two_engines_with_one_loss_step_as_each_alone():
    """DeepSpeed's own case, and two engines one after the other, of which each is divided once."""
    for chained in (False, True):
        runs = []
        for user in (True, False):
            first, second = build("fp32", 2, 0.05), build("fp32", 2, 0.05, seed=1)
            for number in range(4):
                outputs = first(batch(number))["logits"]
                loss = second(outputs if chained else batch(number + 10))["loss"]
                if not chained:
                    loss = loss + outputs.mean()
                loss.backward() if user else first.backward(loss)
                first.step()
                second.step()
            runs.append({**state(first), **{f"second {key}": one for key, one in state(second).items()}})
        assert different(*runs) == []


def test_gradients_of_another_engines_backward_with_other_settings_are_no_step():
    first, second = build("fp32", 2, 0.05), build("fp16", 1, seed=1)
    loss = second(first(batch(0))["logits"])["loss"]
    second.backward(loss)
    with pytest.raises(
        UnsupportedError, match=r"step\(\): gradients are from another engine's backward.*256"
    ):
        first.step()
    first.optimizer.zero_grad()  # as a GAN's discriminator does it
    second.step()
    by_engine(first, 1)
    first.step()
    second.backward(second(first(batch(0))["logits"])["loss"])
    first.zero_grad()
    by_loss(first, 2)
    first.step()
    assert first.global_steps == 1
    early = build("fp32", seed=2)
    assert early.optimizer.update == "backward"
    with pytest.raises(UnsupportedError, match="applies gradients in the backward: give initialize"):
        first.backward(first(early(batch(0))["logits"])["loss"])


def test_a_step_of_the_scripts_own_gradients_is_not_divided():
    engine = build("fp32", 2)
    by_loss(engine, 0)
    before = engine.module.first.bias.grad.clone()
    engine.module.first.bias.grad.add_(torch.ones(24))
    assert torch.equal(engine.module.first.bias.grad.clone(), before + 1)


def test_an_engine_that_is_gone_or_superseded_divides_no_more():
    engine = build("fp32", 2)
    model = engine.module
    by_loss(engine, 0)
    half = model.first.bias.grad.clone()
    with pytest.warns(UserWarning, match="supersedes"):
        again = infinity.deepspeed.initialize(model=model, config=settings("fp32", 2))[0]
    again.zero_grad()
    by_loss(again, 0)
    assert torch.equal(model.first.bias.grad.clone(), half)
    again.zero_grad()
    watched = weakref.ref(again)
    del engine, again
    gc.collect()
    assert watched() is None
    model(batch(0))["loss"].backward()
    assert torch.equal(model.first.bias.grad.clone(), 2 * half)


def test_tiles_and_slices_of_a_layer_are_divided_once():
    tiled = {"infinity": {"host_memory": "16MiB", "tile_above": 256}}
    pair = [build("fp32", 2, 0.05, **tiled) for _ in range(2)]
    for engine in pair:
        tile_sequence(engine.module.first, 2, dim=0)
    for number in range(4):
        for engine, how in zip(pair, (by_engine, by_loss), strict=True):
            how(engine, number)
            engine.step()
    assert different(*map(state, pair)) == []
