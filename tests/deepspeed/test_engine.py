"""deepspeed.initialize and its engine: DeepSpeed's calls, the reference recipe's bits. Nothing is faked."""

import argparse
import functools
import json
import logging
import re

import pytest
import torch

import infinity
import models
from covers import matrix
from infinity import ConfigError, UnsupportedError
from infinity.deepspeed.launch import read, settings_of
from infinity.reference import ReferenceAdamW, prepare
from infinity.reference import clip_grad_norm_ as reference_clip
from infinity.storage.manifest import CheckpointError

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("repeatable")]

ADAM = {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1}


def configuration(folder, **changes):
    nvme = {"device": "nvme", "nvme_path": str(folder)}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": ADAM},
        "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
        "infinity": {"host_memory": "1MiB"},
        **changes,
    }


def llama(config=None, seed=0):
    """Build a model from a seed: within zero.Init, given a configuration; else plain."""
    torch.manual_seed(seed)
    if config is None:
        return models.MODELS["llama"]()
    with infinity.deepspeed.zero.Init(config_dict_or_path=config):
        return models.MODELS["llama"]()


def run(engine, backwards, first=0):
    losses = []
    for number in range(first, first + backwards):
        ids = models.batch(number)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@functools.cache
def reference(backwards, accumulate, clip, schedule=None):
    """Train the same model in memory; return it, its optimizer, losses and norms."""
    model = prepare(llama()).train()
    optimizer = ReferenceAdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = None if schedule is None else schedule(optimizer)
    losses, norms = [], []
    for number in range(backwards):
        ids = models.batch(number)
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        (loss / accumulate if accumulate > 1 else loss).backward()
        if (number + 1) % accumulate == 0:
            norms.append(float(reference_clip(optimizer, clip or float("inf"))))
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
    return model, optimizer, losses, norms


@pytest.mark.parametrize(
    *matrix(
        together=1,
        ways={"1, clipped": (1, 0.5), "3, clipped": (3, 0.5), "2": (2, 0)},
        built=["in Init", "before"],
    )
)
def test_training_has_the_recipes_bits(folder, ways, built):
    accumulate, clip = ways
    config = configuration(folder, gradient_accumulation_steps=accumulate, gradient_clipping=clip)
    model = llama(config if built == "in Init" else None)
    engine, optimizer, loader, scheduler = infinity.deepspeed.initialize(model=model, config=config)
    assert (engine.module, engine.optimizer, loader, scheduler) == (model, optimizer, None, None)
    engine.train()
    norms, losses = [], []
    for number in range(6):
        losses += run(engine, 1, number)
        norms.append(engine.get_global_grad_norm())
    plain, recipe, expected, expected_norms = reference(6, accumulate, clip)
    assert losses == expected
    assert norms[accumulate - 1 :: accumulate] == pytest.approx(expected_norms, rel=1e-6)
    models.assert_same_state(model, optimizer, plain, recipe)
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (6 // accumulate, 6, 12)


def test_accumulation_by_block_is_the_engines_and_no_field_of_config(folder):
    asked = configuration(folder, infinity={"accumulate_by_block": True, "host_memory": "1GiB"})
    settings = read(asked)
    assert (settings.by_block, settings.config.host_nbytes) == (True, 1 << 30)
    assert [line.value for line in settings.report.lines if line.key == "infinity.accumulate_by_block"] == [
        True
    ]
    assert read(configuration(folder), infinity={"accumulate_by_block": True}).by_block
    assert not read(configuration(folder)).by_block
    with pytest.raises(ConfigError, match=r"TrainerCallback\(by_block=True\)"):
        infinity.Config.from_deepspeed(asked)


@pytest.mark.parametrize(
    ("asked", "speculates"), [({"speculate": True}, True), ({}, True), ({"speculate": False}, False)]
)
def test_updates_ahead_are_the_optimizers_and_no_field_of_config(folder, asked, speculates):
    config = configuration(folder, gradient_clipping=0.5, infinity={"host_memory": "1MiB", **asked})
    _, optimizer, *_ = infinity.deepspeed.initialize(model=llama(config), config=config)
    assert optimizer.update == "forward"
    assert optimizer.speculation.decides is speculates
    if asked:
        with pytest.raises(ConfigError, match=r'out: infinity.AdamW\(..., speculate="auto" or False\)'):
            infinity.Config.from_deepspeed(config)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_every_stage_has_the_recipes_bits(folder, stage):
    config = configuration(folder, gradient_clipping=0.5)
    config["zero_optimization"]["stage"] = stage
    engine, optimizer, _, _ = infinity.deepspeed.initialize(model=llama(config), config=config)
    losses = run(engine, 4)
    plain, recipe, expected, _ = reference(4, 1, 0.5)
    assert (losses, engine.zero_optimization_stage()) == (expected, stage or 3)
    models.assert_same_state(engine.module, optimizer, plain, recipe)


def test_updates_happen_in_the_backward_where_nothing_needs_the_norm(folder):
    config = configuration(folder, gradient_clipping=0, bf16={"enabled": True, "check_grad_overflow": False})
    engine, optimizer, _, _ = infinity.deepspeed.initialize(model=llama(config), config=config)
    assert optimizer.update == "backward"
    losses = run(engine, 4)
    plain, recipe, expected, _ = reference(4, 1, 0)
    assert (losses, engine.get_global_grad_norm()) == (expected, None)
    models.assert_same_state(engine.module, optimizer, plain, recipe)


def test_the_schedule_of_the_file_steps_with_the_engine(folder):
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 3}}
    config = configuration(folder, scheduler=scheduler, gradient_accumulation_steps=2)
    engine, _, _, schedule = infinity.deepspeed.initialize(model=llama(config), config=config)
    rates = []
    for number in range(8):
        rates += engine.get_lr()
        run(engine, 1, number)
    assert rates == pytest.approx([0, 0, 0, 0, 0.0063093, 0.0063093, 1e-2, 1e-2], rel=1e-5)
    assert schedule.get_last_lr() == engine.get_lr()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_with_gradients_that_are_not_finite_is_left_out(folder, bad, caplog):
    config = configuration(folder)
    engine, _, _, _ = infinity.deepspeed.initialize(model=llama(config), config=config)
    run(engine, 2)
    before = {name: value.clone() for name, value in engine.module.state_dict().items()}
    ids = models.batch(2)
    engine.backward(engine(input_ids=ids, labels=ids).loss * bad)
    with caplog.at_level(logging.WARNING, "infinity"):
        engine.step()
    assert "step 2 skipped" in caplog.text
    assert (engine.skipped_steps, engine.global_steps, engine.was_step_applied()) == (1, 3, False)
    after = engine.module.state_dict()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    run(engine, 1, 3)
    assert engine.was_step_applied()


def test_the_boundary_may_be_the_scripts_own(folder):
    config = configuration(folder)
    engine, _, _, _ = infinity.deepspeed.initialize(model=llama(config), config=config)
    engine.set_gradient_accumulation_boundary(False)
    run(engine, 2)
    assert (engine.global_steps, engine.micro_steps) == (0, 2)
    engine.set_gradient_accumulation_boundary(True)
    run(engine, 1, 2)
    assert engine.global_steps == 1
    config = configuration(folder, managed_gradient_accumulation=False, gradient_accumulation_steps=2)
    engine, optimizer, _, _ = infinity.deepspeed.initialize(model=llama(config), config=config)
    with engine.no_sync():
        ids = models.batch(0)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        with pytest.raises(UnsupportedError, match=r"step.. inside no_sync"):
            engine.step()
    run(engine, 1, 1)
    plain, recipe, _, _ = reference(2, 2, 1.0)
    models.assert_same_state(engine.module, optimizer, plain, recipe)
    assert engine.global_samples == 4


@pytest.mark.parametrize("how", ["object", "function"])
def test_an_optimizer_and_a_scheduler_of_torch_are_taken_over(folder, how):
    def make(parameters):
        return torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)

    def schedule(optimizer):
        return torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 5)

    config = configuration(folder, gradient_clipping=0.5)
    del config["optimizer"]
    model = llama()
    optimizer = make(model.parameters()) if how == "object" else make
    scheduler = schedule(optimizer) if how == "object" else schedule
    engine, ours, _, line = infinity.deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config
    )
    assert (type(ours), line.optimizer) == (infinity.AdamW, ours)
    losses = run(engine, 6)
    plain, recipe, expected, _ = reference(6, 1, 0.5, schedule)
    assert losses == expected
    models.assert_same_state(model, ours, plain, recipe)
    assert engine.get_lr() == pytest.approx([1e-2])


def test_data_become_batches_of_the_files_size(folder):
    config = configuration(folder, train_micro_batch_size_per_gpu=3, dataloader_drop_last=True)
    rows = [torch.full((4,), float(number)) for number in range(10)]
    _, _, loader, _ = infinity.deepspeed.initialize(model=llama(config), training_data=rows, config=config)
    assert [tuple(batch.shape) for batch in loader] == [(3, 4)] * 3


def test_a_checkpoint_brings_everything_back(folder):
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}
    config = configuration(folder, gradient_accumulation_steps=2, scheduler=scheduler)
    engine, _, _, _ = infinity.deepspeed.initialize(model=llama(config), config=config)
    run(engine, 4)
    state = {"epoch": 1, "seen": [1, 2], "table": torch.arange(3)}
    assert engine.save_checkpoint(folder / "saved", client_state=state)
    assert engine.save_checkpoint(folder / "saved", tag=0.25, save_latest=False)
    assert sorted(path.name for path in (folder / "saved").iterdir()) == ["0.25", "global_step2", "latest"]
    losses = run(engine, 4, 4)

    again, restored, _, _ = infinity.deepspeed.initialize(model=llama(config, seed=1), config=config)
    path, found = again.load_checkpoint(folder / "saved")
    assert path == str(folder / "saved" / "global_step2")
    assert (found["epoch"], found["seen"], found["table"].tolist()) == (1, [1, 2], [0, 1, 2])
    assert (again.global_steps, again.micro_steps, again.global_samples) == (2, 4, 8)
    assert again.get_lr() != [1e-2]
    assert run(again, 4, 4) == losses
    assert again.get_lr() == engine.get_lr()
    for name, value in engine.module.state_dict().items():
        assert torch.equal(value, again.module.state_dict()[name]), name
    assert restored.state_dict()["state"][0]["step"] == 4

    third, _, _, _ = infinity.deepspeed.initialize(model=llama(config, seed=2), config=config)
    third.load_checkpoint(folder / "saved", tag=0.25, load_module_only=True)
    assert (third.global_steps, third.get_lr()) == (0, [0.0])


WARMUP = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 4,
    "max_difficulty": 16,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 6, "difficulty_step": 4},
}


def warming(config, seed=0):
    rows = [{"input_ids": torch.arange(16) + row} for row in range(24)]
    engine, _, loader, _ = infinity.deepspeed.initialize(
        model=llama(config, seed=seed), training_data=rows, config=config
    )
    return engine, loader


def warm(engine, loader, backwards):
    """Train; return the tokens of a row in each batch."""
    found = []
    for _, batch in zip(range(backwards), loader, strict=False):
        ids = batch["input_ids"]
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        found.append(ids.shape[1])
    return found


def test_the_lengths_of_a_curriculum_are_those_of_the_updates(folder):
    config = configuration(folder, curriculum_learning=WARMUP, gradient_accumulation_steps=2)
    engine, loader = warming(config)
    assert warm(engine, loader, 4) == [4, 4, 8, 8]
    engine.save_checkpoint(folder / "saved")
    engine.set_train_batch_size(2)
    assert warm(engine, loader, 3) == [8, 12, 12]

    again, loader = warming(config, seed=1)
    again.load_checkpoint(folder / "saved")
    assert again.global_steps == 2
    assert warm(again, loader, 6) == [8, 8, 12, 12, 12, 12]


def test_a_curriculum_that_begins_at_a_checkpoint_without_one_knows_its_steps(folder):
    config = configuration(folder)
    engine, _, _, _ = infinity.deepspeed.initialize(model=llama(config), config=config)
    run(engine, 3)
    engine.save_checkpoint(folder / "saved")
    again, loader = warming(config | {"curriculum_learning": WARMUP})
    again.load_checkpoint(folder / "saved")
    assert warm(again, loader, 3) == [12, 12, 16]


def test_what_cannot_be_loaded_or_saved_says_so(folder):
    config = configuration(folder, gradient_accumulation_steps=2)
    engine, _, _, _ = infinity.deepspeed.initialize(model=llama(config), config=config)
    with pytest.warns(UserWarning, match="latest does not exist"):
        assert engine.load_checkpoint(folder / "nowhere") == (None, None)
    for tag in ("../up", "", "latest"):
        with pytest.raises(ValueError, match="expected the name of a folder"):
            engine.save_checkpoint(folder / "saved", tag=tag)
    with pytest.raises(CheckpointError, match="client_state"):
        engine.save_checkpoint(folder / "saved", client_state={"model": engine})
    run(engine, 1)
    with pytest.warns(UserWarning, match="after 1 of 2 backwards"):
        engine.save_checkpoint(folder / "saved")
    (folder / "theirs" / "tag").mkdir(parents=True)
    (folder / "theirs" / "tag" / "zero_pp_rank_0_mp_rank_00_model_states.pt").touch()
    with pytest.raises(CheckpointError, match=r"infinity.deepspeed.load_deepspeed"):
        engine.load_checkpoint(folder / "theirs", tag="tag")


def test_weights_in_16_bits_are_saved_where_the_file_says_so(folder):
    config = configuration(folder)
    engine, _, _, _ = infinity.deepspeed.initialize(model=llama(config), config=config)
    assert not engine.save_16bit_model(folder / "weights")
    assert not (folder / "weights").exists()
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    engine, _, _, _ = infinity.deepspeed.initialize(model=llama(config), config=config)
    assert engine.save_16bit_model(folder / "weights")
    saved = torch.load(folder / "weights" / "pytorch_model.bin", weights_only=True)
    assert {value.dtype for value in saved.values()} == {torch.bfloat16}
    plain = prepare(llama())
    assert [name for name, value in plain.state_dict().items() if not torch.equal(value, saved[name])] == []


def test_an_engine_answers_for_its_model(folder):
    config = configuration(folder, train_batch_size=4)
    model = llama(config)
    engine, _, _, _ = infinity.deepspeed.initialize(model=model, config=config)
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (4, 2)
    assert (engine.gradient_accumulation_steps(), engine.gradient_clipping()) == (2, 1.0)
    assert (engine.local_rank, engine.device, engine.world_size) == (0, torch.device("cpu"), 1)
    assert engine.config is model.config
    assert not engine.eval().module.training
    assert len(list(engine.parameters())) == len(list(model.parameters()))
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = engine.nothing_like_it


def test_progress_and_seconds_are_logged_as_asked(folder, caplog):
    config = configuration(folder, steps_per_print=2, wall_clock_breakdown=True, dump_state=True)
    with caplog.at_level(logging.INFO, "infinity"):
        engine, _, _, _ = infinity.deepspeed.initialize(model=llama(config), config=config)
        run(engine, 3)
    assert "train_micro_batch_size_per_gpu = 2: honoured" in caplog.text
    assert caplog.text.count("skipped=0, lr=[0.01]") == 1
    assert len(re.findall(r"step \d: forward [\d.]+ s, backward [\d.]+ s, step", caplog.text)) == 3


@pytest.mark.parametrize(
    ("changes", "arguments", "error", "says"),
    [
        ({}, {"config": None}, ConfigError, "no configuration: .*--deepspeed_config"),
        ({}, {"mpu": object()}, UnsupportedError, r"has no get_data_parallel_group\(\): expected Megatron"),
        ({}, {"mesh_param": (1, 2)}, ConfigError, "1 sequences x 2 ranks that share each are 2 ranks, and"),
        ({}, {"mesh_param": 2}, ConfigError, r"mesh_param=2: expected \(data, sequences\)"),
        ({}, {"mpu": object(), "mesh_param": (1, 1)}, ConfigError, "mpu and mesh_param: each says"),
        (
            {},
            {"optimizer": torch.optim.RMSprop},
            UnsupportedError,
            r"RMSprop cannot be replaced: give torch's",
        ),
        (
            {},
            {"optimizer": lambda p: torch.optim.AdamW(p, amsgrad=True)},
            UnsupportedError,
            "amsgrad=True",
        ),
        (
            {},
            {"optimizer": lambda p: infinity.AdamW(p, max_norm=1.0)},
            ConfigError,
            r"max_norm=1.0, the configuration gradient_clipping=1.0",
        ),
        (
            {"train_micro_batch_size_per_gpu": None},
            {"training_data": [1]},
            ConfigError,
            "training_data needs",
        ),
    ],
)
def test_what_initialize_cannot_do_is_refused_by_name(folder, changes, arguments, error, says):
    config = configuration(folder, **changes)
    with pytest.raises(error, match=says):
        infinity.deepspeed.initialize(**{"model": llama(config), "config": config, **arguments})


def test_a_model_and_its_configuration_have_to_agree_on_the_drive(folder, tmp_path):
    with pytest.raises(ConfigError, match="the model was built in Init with nvme="):
        infinity.deepspeed.initialize(model=llama(configuration(folder)), config=configuration(tmp_path))


def test_without_an_optimizer_a_model_can_be_used_and_not_trained(folder):
    config = configuration(folder)
    del config["optimizer"]
    engine, optimizer, _, scheduler = infinity.deepspeed.initialize(model=llama(config), config=config)
    assert (optimizer, scheduler) == (None, None)
    loss = engine(input_ids=models.batch(0), labels=models.batch(0)).loss
    with pytest.raises(UnsupportedError, match="no optimizer"):
        engine.backward(loss)


def test_zero_init_takes_deepspeeds_arguments(folder):
    config = configuration(folder)
    with infinity.deepspeed.zero.Init(enabled=False, config_dict_or_path=config):
        plain = llama()
    weight = plain.lm_head.weight
    infinity.deepspeed.zero.Init(
        module=plain, config_dict_or_path=config, remote_device="nvme", dtype=torch.bfloat16
    )
    assert plain.lm_head.weight is weight
    expected = prepare(llama()).lm_head.weight
    with infinity.deepspeed.zero.GatheredParameters(weight):
        assert torch.equal(weight, expected)
    with infinity.deepspeed.zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
        weight.zero_()
    assert not plain.state_dict()["lm_head.weight"].any()
    with infinity.deepspeed.zero.GatheredParameters(torch.nn.Linear(1, 1)):
        pass
    for arguments, error in (
        ({"mpu": object()}, UnsupportedError),
        ({"zero_param_parallel_group": object()}, UnsupportedError),
        ({"zero_quantized_weights": True, "dtype": torch.float32}, ConfigError),
        ({"remote_device": "nvme"}, ConfigError),
        ({"dtype": torch.float16, "config": config}, ConfigError),
    ):
        with pytest.raises(error):
            infinity.deepspeed.zero.Init(**arguments)
    with pytest.raises(ValueError, match="a part of it was built inside Init"):
        infinity.deepspeed.zero.Init(module=plain)


def test_what_read_has_made_of_a_file_may_stand_for_it(folder):
    config = configuration(folder, autotuning={"enabled": True}, gradient_clipping="auto")
    with pytest.warns(UserWarning, match="autotuning"):
        settings = read(config, strict=False, gradient_clipping=0.5)
    engine, _, _, _ = infinity.deepspeed.initialize(model=llama(settings), config=settings)
    assert run(engine, 3) == reference(3, 1, 0.5)[2]


def test_init_and_initialize_leave_out_what_is_not_supported_if_told_so(folder):
    config = configuration(folder, autotuning={"enabled": 1}, zero_allow_untested_optimizer=1)
    with pytest.raises(ConfigError, match=r"zero\.Init, initialize .* if given strict=False:\n.*autotuning"):
        infinity.deepspeed.zero.Init(config_dict_or_path=config)
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="autotuning"):
        building = infinity.deepspeed.zero.Init(config=config, strict=False)
    with building:
        model = models.MODELS["llama"]()
    with pytest.raises(ConfigError, match="autotuning"):
        infinity.deepspeed.initialize(model=model, config=config)
    with pytest.warns(UserWarning, match="autotuning"):
        engine, _, _, _ = infinity.deepspeed.initialize(model=model, config=config, strict=False)
    assert run(engine, 2) == reference(2, 1, 1.0)[2]


def test_where_there_is_a_gpu_a_rank_computes_on_its_own_unless_told(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "3")
    config = configuration(folder)
    assert settings_of(config).config.device == settings_of(read(config)).config.device == "cuda:3"
    config["infinity"]["device"] = "cpu"
    assert settings_of(config).config.device == "cpu"


def test_the_arguments_of_a_script_name_the_file(folder):
    parser = infinity.deepspeed.add_config_arguments(argparse.ArgumentParser())
    file = folder / "ds.json"
    file.write_text(json.dumps(configuration(folder)))
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(file)])
    engine, _, _, _ = infinity.deepspeed.initialize(args=args, model=llama(str(file)))
    assert args.deepspeed
    assert engine.settings.config.host_nbytes == 1 << 20


def test_parameters_that_are_not_offloaded_stay_on_the_device_and_change_no_bit(folder):
    nvme = {"device": "nvme", "nvme_path": str(folder)}
    tiers = {"stage": 3, "offload_param": {"device": "none"}, "offload_optimizer": nvme}
    config = configuration(folder, zero_optimization=tiers)
    engine, _, _, _ = infinity.deepspeed.initialize(model=llama(config), config=config)
    assert run(engine, 3) == reference(3, 1, 1.0)[2]
    assert (engine.zero_optimization_stage(), infinity.stats(engine.module).nvme_nbytes > 0) == (2, True)


def routing(**changes):
    """Return a section data_efficiency with random-LTD, as DeepSpeed's page has it."""
    section = {
        "enabled": True,
        "total_layer_num": 3,
        "random_ltd_layer_num": 1,
        "random_ltd_layer_id": [1],
        "model_mask_name": "attention_mask",
        "model_type": "decoder",
        "hidden_state_order": "batch_seq_dim",
        "random_ltd_schedule": {
            "min_value": 4,
            "max_value": 16,
            "schedule_type": "fixed_linear",
            "schedule_config": {"require_steps": 3, "seq_per_step": 4},
        },
        **changes,
    }
    return {"enabled": True, "seed": 1234, "data_routing": {"enabled": True, "random_ltd": section}}


@pytest.mark.usefixtures("three_layers")
def test_layers_leave_out_tokens_by_the_updates_so_far(folder):
    config = configuration(folder, gradient_accumulation_steps=2, data_efficiency=routing())
    engine, _, _, _ = infinity.deepspeed.initialize(model=llama(config), config=config)
    kept = []

    def train(engine, updates):
        kept.clear()
        for _ in range(2 * updates):
            ids = torch.arange(32).view(2, 16)
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            kept.append(engine.random_ltd.kept)
            engine.step()
        return list(kept)

    assert train(engine, 2) == [4, 4, 8, 8]
    assert engine.random_ltd.left_out == 2 * 2 * (12 + 8)
    engine.save_checkpoint(folder / "saved")
    again, _, _, _ = infinity.deepspeed.initialize(model=llama(config, seed=1), config=config)
    again.load_checkpoint(folder / "saved")
    assert train(again, 2) == [12, 12, 16, 16]
    again.destroy()
    assert all("forward" not in block.__dict__ for block in again.module.model.layers)
    wrong = configuration(
        folder, data_efficiency=routing(total_layer_num=24), sparse_attention={"mode": "fixed"}
    )
    model = llama(wrong)
    with pytest.raises(infinity.ConfigError, match=r"total_layer_num=24, but LlamaForCausalLM has 3 layers"):
        infinity.deepspeed.initialize(model=model, config=wrong)
    assert model.config._attn_implementation == "sdpa"  # the other change was undone


def test_attention_is_sparse_where_the_configuration_says_so(folder):
    losses = []
    for section in ({}, {"sparse_attention": {"mode": "bslongformer", "block": 2}}):
        config = configuration(folder, **section)
        engine, _, _, _ = infinity.deepspeed.initialize(model=llama(config), config=config)
        ids = torch.arange(32).view(2, 16)
        losses.append(engine(input_ids=ids, labels=ids).loss.item())
    model = llama(config)
    infinity.SparseAttention(model, "bslongformer", block=2)
    assert losses[0] != losses[1] == model(input_ids=ids, labels=ids).loss.item()
    wrong = configuration(folder, sparse_attention={"mode": "bslongformer", "num_local_blocks": 2})
    with pytest.raises(infinity.ConfigError, match="num_local_blocks=2: mode='bslongformer' takes"):
        infinity.deepspeed.initialize(model=llama(wrong), config=wrong)
