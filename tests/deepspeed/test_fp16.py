"""fp16, fp32 and other optimizers through deepspeed.initialize. Trusted: the reference recipe, DeepSpeed's
rules as test_loss_scale has them; a loss that is made too large is the only thing planted.
"""

import math

import pytest
import torch

import infinity
import models
from covers import matrix
from infinity import ConfigError
from infinity.config.loss_scale import LossScale, Scaling
from infinity.reference import ReferenceAdamW, prepare
from infinity.reference import recipe as reference

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("repeatable")]

ADAM = {"lr": 1e-2, "weight_decay": 0.1}
FP16 = {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 2, "hysteresis": 1}


SECTIONS = {
    "usual": FP16,
    "hysteresis": {**FP16, "hysteresis": 2},
    "fixed": {"enabled": True, "loss_scale": 64},
}


def configuration(folder, **changes):
    nvme = {"device": "nvme", "nvme_path": str(folder)}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "fp16": FP16,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": ADAM},
        "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
        "infinity": {"host_memory": "1MiB"},
        **changes,
    }


def llama(config, seed=0):
    torch.manual_seed(seed)
    with infinity.deepspeed.zero.Init(config_dict_or_path=config):
        return models.MODELS["llama"]()


def planted(number):
    return 1e5 if number in (1, 2, 6) else 1.0


def run(engine, backwards, first=0):
    """Return losses, scales, and whether each step was applied."""
    shown = []
    for number in range(first, first + backwards):
        ids = models.batch(number)
        loss = engine(input_ids=ids, labels=ids).loss * planted(number)
        engine.backward(loss)
        engine.step()
        shown.append((loss.item(), engine.loss_scale(), engine.was_step_applied()))
    return shown


def recipe(backwards, scaling, accumulate=1):
    """Do the same in memory; return the model, its optimizer, and what `run` returns."""
    torch.manual_seed(0)
    model = prepare(models.MODELS["llama"](), torch.float16)
    optimizer = ReferenceAdamW(model.parameters(), **ADAM)
    scale, shown = LossScale(scaling), []
    for number in range(backwards):
        ids = models.batch(number)
        loss = model(input_ids=ids, labels=ids).loss * planted(number)
        (loss / accumulate * scale.value).backward()
        applied = False
        if (number + 1) % accumulate == 0:
            for one in model.parameters():
                value, factor = reference._stored(one)
                reference._store(one, value, factor * torch.tensor(1 / scale.value))
            applied = math.isfinite(float(reference.clip_grad_norm_(optimizer, 0.5)))
            if applied:
                optimizer.step()
            scale.update(overflow=not applied)
            optimizer.zero_grad()
        shown.append((loss.item(), scale.value, applied))
    return model, optimizer, shown


@pytest.mark.parametrize(*matrix(together=1, section=SECTIONS, accumulate=[1, 2]))
def test_planted_overflows_give_deepspeeds_scales_and_the_recipes_weights(folder, section, accumulate):
    config = configuration(folder, fp16=section, gradient_accumulation_steps=accumulate)
    engine, optimizer, _, _ = infinity.deepspeed.initialize(model=llama(config), config=config)
    names = {"initial_scale_power": "power", "loss_scale_window": "window", "loss_scale": "fixed"}
    given = {names.get(name, name): value for name, value in section.items() if name != "enabled"}
    plain, theirs, expected = recipe(8, Scaling(**given), accumulate)
    assert run(engine, 8) == expected
    skipped = sum(not applied for _, _, applied in expected[accumulate - 1 :: accumulate])
    assert engine.skipped_steps == skipped > 0
    assert (engine.fp16_enabled(), engine.dynamic_loss_scale()) == (True, "loss_scale" not in section)
    models.assert_same_state(engine.module, optimizer, plain, theirs)


def test_a_checkpoint_knows_the_loss_scale(folder, tmp_path):
    config = configuration(folder)
    engine, _, _, _ = infinity.deepspeed.initialize(model=llama(config), config=config)
    run(engine, 3)
    engine.save_checkpoint(tmp_path)
    expected = run(engine, 4, first=3)
    again, _, _, _ = infinity.deepspeed.initialize(model=llama(config, seed=1), config=config)
    again.load_checkpoint(tmp_path)
    assert run(again, 4, first=3) == expected


def test_inputs_are_cast_where_the_file_asks_for_it(folder):
    config = configuration(folder, fp16={**FP16, "auto_cast": True})
    with infinity.deepspeed.zero.Init(config_dict_or_path=config):
        layer = torch.nn.Linear(8, 8)
    engine, _, _, _ = infinity.deepspeed.initialize(model=layer, config=config)
    assert engine(torch.ones(2, 8)).dtype == torch.float16


def test_a_loss_that_overflows_even_unscaled_ends_the_training_by_name(folder):
    config = configuration(folder, fp16={"enabled": True, "initial_scale_power": 0, "hysteresis": 1})
    engine, _, _, _ = infinity.deepspeed.initialize(model=llama(config), config=config)
    ids = models.batch(0)
    engine.backward(engine(input_ids=ids, labels=ids).loss * 1e9)
    with pytest.raises(OverflowError, match=r"least loss scale, 1\.0.*smaller learning rate"):
        engine.step()


def test_without_a_section_for_16_bits_fp32_computes_as_in_deepspeed(folder):
    config = configuration(folder, gradient_clipping=0)
    del config["fp16"]
    engine, optimizer, _, _ = infinity.deepspeed.initialize(model=llama(config), config=config)
    assert (engine.fp16_enabled(), engine.bfloat16_enabled(), optimizer.update) == (False, False, "backward")
    torch.manual_seed(0)
    plain = prepare(models.MODELS["llama"](), torch.float32)
    theirs = ReferenceAdamW(plain.parameters(), **ADAM)
    losses = []
    for number in range(3):
        ids = models.batch(number)
        loss = plain(input_ids=ids, labels=ids).loss * planted(number)
        loss.backward()
        theirs.step()
        theirs.zero_grad()
        losses.append((loss.item(), 1.0, True))
    assert run(engine, 3) == losses
    models.assert_same_state(engine.module, optimizer, plain, theirs)


@pytest.mark.parametrize(
    ("optimizer", "kind", "options"),
    [
        ({"type": "Adam", "params": {"lr": 0.1, "weight_decay": 0.2}}, "AdamW", {"weight_decay": 0.2}),
        ({"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.2}}, "Adam", {"lr": 1e-3}),
        ({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, "SGD", {"momentum": 0.9, "lr": 0.1}),
        ({"type": "Adagrad"}, "Adagrad", {"lr": 1e-2, "eps": 1e-10}),
        ({"type": "Lion", "params": {"betas": [0.9, 0.95]}}, "Lion", {"betas": (0.9, 0.95)}),
    ],
)
def test_the_optimizer_that_the_file_names_is_made_with_its_options(folder, optimizer, kind, options):
    config = configuration(folder, optimizer=optimizer, gradient_clipping=0)
    engine, ours, _, _ = infinity.deepspeed.initialize(model=llama(config), config=config)
    assert type(ours) is getattr(infinity, kind)
    assert {name: ours.param_groups[0][name] for name in options} == options
    run(engine, 1)
    assert engine.get_mom() == [ours.param_groups[0].get("betas", ours.param_groups[0].get("momentum"))]


def test_a_file_that_names_muon_gives_it_the_matrices_and_adamw_the_rest(folder):
    params = {"lr": 0.1, "muon_lr": 0.05, "weight_decay": 0.01, "ns_method": "standard", "eps": 1e-9}
    config = configuration(folder, optimizer={"type": "Muon", "params": params}, gradient_clipping=0)
    engine, ours, _, _ = infinity.deepspeed.initialize(model=llama(config), config=config)
    assert type(ours) is infinity.Muon
    muon, adamw = ours.param_groups
    assert (muon["use_muon"], muon["lr"], muon["momentum"], muon["weight_decay"]) == (True, 0.05, 0.95, 0.01)
    assert (adamw["use_muon"], adamw["lr"], adamw["betas"], adamw["eps"]) == (False, 0.1, (0.9, 0.95), 1e-9)
    names = {id(one): name for name, one in engine.module.named_parameters()}
    assert all(names[id(one)].endswith("_proj.weight") for one in muon["params"])
    assert len(muon["params"]) + len(adamw["params"]) == len(names)
    run(engine, 2)
    config = configuration(folder, optimizer={"type": "Muon", "params": {"per_head_muon": True}})
    with pytest.raises(ConfigError, match=r"per_head_muon = true: not supported .*orthogonalized whole"):
        llama(config)


def test_an_option_of_another_optimizer_is_refused_by_name(folder):
    config = configuration(folder, optimizer={"type": "Lion", "params": {"eps": 1e-8}})
    with pytest.raises(
        ConfigError, match=r"optimizer.params.eps = 1e-08: not supported \(Lion has no such option"
    ):
        llama(config)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda p: torch.optim.Adam(p, weight_decay=0.1), "Adam"),
        (torch.optim.Adam, "AdamW"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), "SGD"),
        (lambda p: torch.optim.Muon([one for one in p if one.dim() == 2], ns_steps=4), "Muon"),
    ],
)
def test_ours_takes_the_place_of_torchs(folder, make, kind):
    config = configuration(folder)
    engine, ours, _, _ = infinity.deepspeed.initialize(model=llama(config), optimizer=make, config=config)
    assert type(ours) is getattr(infinity, kind)
    run(engine, 1)
