"""Micro-batches that share one fetch. Trusted: the same loop, whose micro-batches fetch once each; bytes as
the engine counts them, and transformers' own loss of each micro-batch.
"""

import inspect
import logging

import peft
import pytest
import torch
import transformers
from accelerate import Accelerator
from torch.utils.data import DataLoader

import infinity
import infinity.deepspeed
import models
from infinity import UnsupportedError
from infinity.engine.engine import engine_of_model
from infinity.huggingface import TrainerCallback, accumulate_by_block
from infinity.huggingface.accumulation import together
from trainers import LOGGED

pytestmark = [
    pytest.mark.disk,
    pytest.mark.usefixtures("fresh_accelerate", "repeatable"),
    pytest.mark.filterwarnings(
        "ignore:.*pin_memory.*:UserWarning",
        "ignore:`(is_)?gradient_checkpointing.*` is deprecated:FutureWarning",
        "ignore:.*use_reentrant.*",
        "ignore:None of the inputs have requires_grad",
        "ignore:.*lr_scheduler.step.*:UserWarning",
    ),
]
STEPS = 3
ROWS = models.batch(0, rows=4 * STEPS * 2)


def build(folder, name="llama", dtype="bf16", host_memory="128KiB"):
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    with infinity.Init(nvme=folder, host_memory=host_memory, dtype=dtype):
        return models.MODELS[name]()


def moved(now):
    return now.nvme_read_nbytes + now.nvme_written_nbytes


def trainer_of(folder, callback, rows=ROWS, kind=transformers.Trainer, extra=None, **options):
    options = {"gradient_accumulation_steps": 4, "gradient_checkpointing": True, **options}
    model = build(folder)
    args = transformers.TrainingArguments(
        output_dir=str(folder / "out"),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        **{**LOGGED, **options},
    )
    return kind(
        model=model,
        args=args,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        eval_dataset=[{"input_ids": row, "labels": row} for row in models.batch(1, rows=2)],
        optimizer_cls_and_kwargs=(infinity.AdamW, {"lr": 1e-2, "speculate": False}),
        callbacks=[callback],
        **(extra or {}),
    )


def trained(folder, callback, **options):
    """Train by the Trainer; return what it logged, the bytes that moved, and the weights."""
    trainer = trainer_of(folder, callback, **options)
    model = trainer.model
    before = infinity.stats(model)
    trainer.train()
    engine_of_model(model).lane.drain()
    nbytes = moved(infinity.stats(model).since(before))
    logged = [(one["loss"], one["grad_norm"]) for one in trainer.state.log_history if "loss" in one]
    return logged, nbytes, dict(model.state_dict())


def test_the_trainers_micro_batches_share_one_fetch_and_give_the_gradients_of_accumulation(folder):
    apart, many_nbytes, _ = trained(folder / "apart", TrainerCallback())
    by_block, nbytes, _ = trained(folder / "by_block", TrainerCallback(by_block=True))
    _, least_nbytes, _ = trained(folder / "one", TrainerCallback(), gradient_accumulation_steps=1)
    assert torch.tensor(by_block) == pytest.approx(torch.tensor(apart), rel=2e-3)
    assert nbytes < 1.1 * least_nbytes < 0.5 * many_nbytes


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # PEFT asks
@pytest.mark.parametrize("inside", [True, False], ids=["adapters in Init", "adapters in memory"])
def test_a_step_of_four_micro_batches_over_adapters_reads_the_bytes_of_one(folder, inside):
    config = transformers.LlamaConfig(**models.SIZES | {"hidden_size": 128, "intermediate_size": 256})
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=2)

    def read(micro_batches):
        torch.manual_seed(0)
        with infinity.Init(nvme=folder, host_memory="256KiB", frozen=not inside):
            model = transformers.LlamaForCausalLM(config).requires_grad_(inside)
            model = peft.get_peft_model(model, lora) if inside else model
        model = model if inside else peft.get_peft_model(model, lora)
        trained = [one for one in model.parameters() if one.requires_grad]
        optimizer = (infinity.AdamW if inside else torch.optim.AdamW)(trained, lr=1e-3)
        left = [0]
        accumulate_by_block(model.train(), optimizer, lambda: left[0] == 0)
        for step in range(6):
            if step == 2:
                engine_of_model(model).lane.drain()
                before = infinity.stats(model)
            for left[0] in reversed(range(micro_batches)):
                model(input_ids=ROWS[:2], labels=ROWS[:2]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        engine_of_model(model).lane.drain()
        return infinity.stats(model).since(before).nvme_read_nbytes

    one, four = read(1), read(4)
    assert 0 < four <= 1.02 * one


def test_a_training_that_an_error_ended_leaves_nothing_to_the_next(folder):
    model = build(folder)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    model.gradient_checkpointing_enable()
    forward, checkpointed = model.forward, [one for one in model.modules() if is_checkpointed(one)]
    signature = inspect.signature(model.forward)
    held = accumulate_by_block(model.train(), optimizer, lambda: False)
    assert inspect.signature(model.forward) == signature
    model(**rows_of(7)[0])
    again = accumulate_by_block(model, optimizer, lambda: True)
    loss = model(**rows_of(7)[0]).loss
    assert (held is not again, loss.item() > 0) == (True, True)
    again.undo()
    assert (model.forward, model.config.use_cache) == (forward, True)
    assert [one for one in model.modules() if is_checkpointed(one)] == checkpointed != []


def is_checkpointed(module):
    return getattr(module, "gradient_checkpointing", False)


def test_the_callback_says_what_accumulation_costs(folder, caplog):
    with caplog.at_level(logging.INFO, "infinity"):
        trained(folder, TrainerCallback())
    said = [one.getMessage() for one in caplog.records if "gradient_accumulation_steps=4" in one.getMessage()]
    assert len(said) == 1
    assert "each micro-batch fetches the weights anew" in said[0]
    assert "TrainerCallback(by_block=True)" in said[0]


# Loops


def loop_of_accelerate(model, held=None):
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    accelerator = Accelerator(gradient_accumulation_steps=4, cpu=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(ROWS, batch_size=2))
    if held is not None:
        held.append(accumulate_by_block(model, optimizer).undo)
    model.train()
    losses, norms = [], []
    for ids in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            losses.append(loss.item())
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
    return [sum(losses[step : step + 4]) for step in range(0, len(losses), 4)], norms


def loop_of_deepspeed(model, held=None):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "infinity": {"accumulate_by_block": held is not None},
    }
    engine, *_ = infinity.deepspeed.initialize(
        model=model, optimizer=infinity.AdamW(model.parameters(), lr=1e-2), config=config
    )
    if held is not None:
        held.append(engine.destroy)
    losses, norms = [], []
    for ids in ROWS.split(2):
        loss = engine(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
        norms.append(engine.get_global_grad_norm())
    assert engine.global_samples == len(ROWS)
    return [sum(losses[step : step + 4]) for step in range(0, len(losses), 4)], norms[3::4]


@pytest.mark.parametrize("loop", [loop_of_accelerate, loop_of_deepspeed])
def test_loops_that_are_told_of_the_steps_share_one_fetch(folder, loop):
    alone = build(folder / "apart", dtype="fp32")
    apart = loop(alone)
    model, held = build(folder / "by_block", dtype="fp32"), []
    forward = model.forward
    by_block = loop(model, held)
    assert torch.tensor(by_block) == pytest.approx(torch.tensor(apart), rel=1e-4)
    assert moved(infinity.stats(model)) < 0.6 * moved(infinity.stats(alone))
    held[0]()
    assert model.forward == forward


def test_an_engine_of_deepspeed_says_what_accumulation_costs(folder, caplog):
    model = build(folder)
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    with caplog.at_level(logging.INFO, "infinity"):
        infinity.deepspeed.initialize(
            model=model, optimizer=infinity.AdamW(model.parameters()), config=config
        )
    again = infinity.sizes.format_size(2 * 3 * 2 * sum(one.numel() for one in model.parameters()))
    assert "gradient_accumulation_steps=4: each micro-batch fetches the weights anew" in caplog.text
    assert f"of these {again} more" in caplog.text
    assert '"infinity": {"accumulate_by_block": true}' in caplog.text


# One batch of several


def rows_of(*lengths, left=False):
    generator = torch.Generator().manual_seed(3)
    batches = []
    for length in lengths:
        ids = torch.randint(1, 64, (2, length), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, slice(0, 2) if left else slice(-2, None)] = 0
        labels = ids.where(mask == 1, -100)
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return batches


def test_micro_batches_of_other_lengths_are_padded_and_have_the_sum_of_their_losses():
    torch.manual_seed(0)
    model = models.MODELS["llama"]()
    batches = [{**one, "num_items_in_batch": torch.tensor(40)} for one in rows_of(7, 12, 9)]
    whole = together(batches)
    assert whole["input_ids"].shape == (6, 12)
    with torch.no_grad():
        apart = [model(**one).loss.item() for one in batches]
        assert model(**whole).loss.item() == pytest.approx(sum(apart), rel=1e-5)


def test_means_over_other_numbers_of_labels_are_no_mean_of_one_batch():
    assert together(rows_of(7, 12)) is None
    assert together(rows_of(7, 7))["num_items_in_batch"] == 2 * 6 - 2
    assert together(rows_of(7, 7, left=True)) is not None
    assert together([{**one, "num_items_in_batch": 40} for one in rows_of(7, 12, left=True)]) is None
    assert together([{**one, "scale": number} for number, one in enumerate(rows_of(7, 7))]) is None
    first, second = rows_of(7, 7)
    assert together([first, {**second, "position_ids": second["input_ids"]}]) is None


def test_micro_batches_that_are_no_batch_run_apart_with_their_own_bits_and_a_warning(folder, caplog):
    model = build(folder)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    last = []
    accumulate_by_block(model.train(), optimizer, lambda: bool(last))
    batches = rows_of(7, 12)
    assert model(**batches[0]).loss == 0
    last.append(True)
    with caplog.at_level(logging.WARNING, "infinity"):
        loss = model(**batches[1]).loss
    loss.backward()
    with torch.no_grad():
        assert loss.item() == pytest.approx(sum(model(**one).loss.item() for one in batches), rel=1e-2)
    assert "the 2 micro-batches of a step fetch the weights once each" in caplog.text
    optimizer.step()


def test_a_step_that_would_leave_micro_batches_out_is_refused(folder):
    model = build(folder)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    held = accumulate_by_block(model.train(), optimizer, lambda: False)
    model(**rows_of(7)[0]).loss.backward()
    with pytest.raises(UnsupportedError, match="while 1 micro-batches are held for the step's last one"):
        optimizer.step()
    held.undo()


def test_models_whose_layers_record_what_they_return_are_refused(folder):
    model = build(folder, "mixtral")
    model.config.output_router_logits = True
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    with pytest.raises(UnsupportedError, match="output_router_logits=True"):
        accumulate_by_block(model, optimizer)
    model = build(folder)
    model.config.is_encoder_decoder = True
    with pytest.raises(UnsupportedError, match="is no plain causal language model"):
        accumulate_by_block(model, infinity.AdamW(model.parameters(), lr=1e-2))


def test_a_buffer_that_a_loop_fills_again_is_held_as_it_was(folder):
    model = build(folder, dtype="fp32")
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    last, losses = [], []
    accumulate_by_block(model.train(), optimizer, lambda: bool(last))
    first, second = (one["input_ids"] for one in rows_of(7, 7))
    for ids, other in ((first.clone(), second), (first, second.clone())):
        last.clear()
        model(input_ids=ids, labels=ids, num_items_in_batch=24)
        if ids is not first:
            ids.copy_(other)
        last.append(True)
        losses.append(model(input_ids=other, labels=other, num_items_in_batch=24).loss.item())
    assert losses[0] == losses[1]


# What ends or empties a step


class StoppedError(Exception):
    """Ends a training in the middle of a step."""


class Stopped(transformers.Trainer):
    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        raise StoppedError(str(loss))


def test_a_model_is_itself_again_after_an_error_in_the_trainers_train(folder):
    trainer = trainer_of(folder, TrainerCallback(by_block=True), kind=Stopped)
    model = trainer.model
    with pytest.raises(StoppedError):
        trainer.train()
    output = model.train()(**rows_of(7)[0])
    assert output.loss > 1
    assert output.logits.shape == (2, 7, 64)
    assert any(is_checkpointed(one) for one in model.modules())
    assert "zero_grad" not in vars(model)


@pytest.mark.parametrize("of_model", [False, True])
def test_zero_grad_forgets_the_micro_batches_that_are_held(folder, of_model):
    first, second, third = ({**one, "num_items_in_batch": 20} for one in rows_of(7, 7, 7))
    losses = []
    for batches in ([first, second, third], [second, third]):
        model = build(folder, dtype="fp32").train()
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
        last = []
        held = accumulate_by_block(model, optimizer, lambda last=last: bool(last))
        for batch in batches:
            if batch is third:
                last.append(True)
            loss = model(**batch).loss
            if batch is first:
                (model if of_model else optimizer).zero_grad()
        losses.append(loss.item())
        held.undo()
        assert "zero_grad" not in vars(model) | vars(optimizer)
    assert losses[0] == losses[1] > 0


def test_an_error_in_a_steps_last_forward_leaves_the_others_held(folder):
    model = build(folder).train()
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    last = []
    accumulate_by_block(model, optimizer, lambda: bool(last))
    first, bad = rows_of(7, 7)
    model(**first)
    last.append(True)
    with pytest.raises(IndexError):
        model(**{**bad, "input_ids": bad["input_ids"] + 999})
    with pytest.raises(UnsupportedError, match="while 1 micro-batches are held"):
        optimizer.step()


# What cannot share a fetch is refused by name, or said


def test_models_that_cannot_be_cut_by_sequences_are_refused():
    sizes = {"vocab_size": 64, "hidden_size": 32, "n_layer": 1, "n_head": 4}
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(**sizes))
    with pytest.raises(UnsupportedError, match="BloomForCausalLM gives its blocks an alibi table"):
        accumulate_by_block(bloom, torch.optim.SGD(bloom.parameters()))
    prefixes = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(models.MODELS["llama"](), prefixes)
    with pytest.raises(UnsupportedError, match="PEFT's PREFIX_TUNING gives the model a cache"):
        accumulate_by_block(model, torch.optim.SGD(model.parameters()))


def held_twice(model, **more):
    """Run a step of two micro-batches; return the loss of the last."""
    model.train()
    rest = [False, True]
    accumulate_by_block(model, torch.optim.SGD(model.parameters(), lr=0.0), lambda: rest.pop(0))
    first, second = rows_of(7, 7)
    model(**first, **more)
    return model(**second, **more)


def test_arguments_that_ask_for_what_layers_record_are_refused_before_anything_is_held():
    with pytest.raises(UnsupportedError, match="output_router_logits=True in arguments of its forward"):
        held_twice(models.MODELS["mixtral"](), output_router_logits=True)


def test_a_step_needs_no_cache_that_its_arguments_ask_for():
    losses = []
    for more in ({}, {"use_cache": True}):
        torch.manual_seed(0)
        losses.append(held_twice(models.MODELS["llama"](), **more).loss)
    assert losses[0] == losses[1] > 0


def test_outputs_are_tuples_where_they_are_asked_for():
    loss, _ = held_twice(models.MODELS["llama"](), return_dict=False)
    assert loss > 0


def test_the_trainers_compute_loss_func_is_refused(folder):
    trainer = trainer_of(
        folder, TrainerCallback(by_block=True), extra={"compute_loss_func": lambda *_, **__: None}
    )
    with pytest.raises(UnsupportedError, match=r"by_block=True\) with compute_loss_func"):
        trainer.train()


def test_forwards_that_share_no_fetch_are_said_once(caplog):
    model = models.MODELS["llama"]().train()
    accumulate_by_block(model, torch.optim.SGD(model.parameters(), lr=0.0), lambda: False)
    batch = rows_of(7)[0]
    with caplog.at_level(logging.WARNING, "infinity"):
        with torch.no_grad():
            model(batch["input_ids"])
        assert not caplog.records
        for _ in range(2):
            model.train()(batch["input_ids"])
            model.eval()(**batch)
    assert [one.getMessage().split(": ")[1].split(",")[0] for one in caplog.records] == [
        "the model is called without labels",
        "the model is called in eval mode",
    ]


class OfLogits(transformers.Trainer):
    def compute_loss(self, model, inputs, **_):
        return model(**inputs).logits.float().mean()


def test_a_loss_made_of_logits_is_refused_by_name(folder):
    trainer = trainer_of(folder, TrainerCallback(by_block=True), kind=OfLogits)
    with pytest.raises(UnsupportedError, match=r"\.float of the logits .* TrainerCallback\(by_block=True\)"):
        trainer.train()
    logits = held_twice(models.MODELS["llama"]()).logits
    for use in (
        lambda: torch.nn.functional.log_softmax(logits, -1),
        lambda: logits[:, :-1],
        lambda: 2 * logits,
        lambda: logits.shape,
    ):
        with pytest.raises(UnsupportedError, match="of the logits of a micro-batch"):
            use()
    assert not hasattr(logits, "dtype")  # what casts outputs leaves it alone
