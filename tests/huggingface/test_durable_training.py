"""A Trainer that goes on with a durable run. Trusted: the same Trainer, never stopped. Nothing is faked."""

import pytest
import torch
import transformers

import infinity
import models
from infinity.engine.engine import engine_of_model
from infinity.errors import ConfigError
from infinity.huggingface import TrainerCallback, train_durably
from infinity.storage.manifest import CheckpointError
from trainers import HELD, ROWS, logged

pytestmark = pytest.mark.disk


class StopError(Exception):
    pass


class Stop(transformers.TrainerCallback):
    """Ends a training in the middle, as an error does."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise StopError


def trainer_of(folder, *callbacks, durable=True, model="llama", **options):
    torch.manual_seed(0)
    folder.mkdir(exist_ok=True)
    with infinity.Init(nvme=str(folder), host_memory="1MiB", durable=durable):
        model = models.MODELS[model]()
    args = {"max_steps": 8, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "warmup_steps": 3}
    args |= {"per_device_train_batch_size": 2, "max_grad_norm": 0.5, "use_cpu": True, "disable_tqdm": True}
    return transformers.Trainer(
        model,
        transformers.TrainingArguments(str(folder / "out"), **args | options),
        train_dataset=ROWS,
        eval_dataset=HELD,
        optimizer_cls_and_kwargs=(infinity.AdamW, {"lr": 1e-2}),
        callbacks=[TrainerCallback(), *callbacks],
    )


def test_a_training_that_an_error_ended_goes_on_with_the_bits_of_one_that_never_stopped(folder, caplog):
    """Twenty-four rows, four a step: it ends in the second of two epochs. The rate rises, and falls."""
    whole = trainer_of(folder / "whole", gradient_accumulation_steps=2)
    assert train_durably(whole).global_step == 8
    stopped = trainer_of(folder / "stopped", Stop(7), gradient_accumulation_steps=2)
    with pytest.raises(StopError):
        train_durably(stopped)
    infinity.commit(stopped.model)
    engine_of_model(stopped.model).close()
    again = trainer_of(folder / "stopped", gradient_accumulation_steps=2)
    with pytest.raises(
        ConfigError, match=r"committed at step 7, and the Trainer begins at step 0.*train_durably"
    ):
        again.train()
    assert train_durably(again).global_step == 8
    assert [one.getMessage() for one in caplog.records if one.levelname == "WARNING"] == []
    names = ("loss", "learning_rate", "grad_norm")
    assert logged(again, *names) == logged(whole, *names)[7:]
    engine_of_model(again.model).close()
    complete = trainer_of(folder / "stopped", gradient_accumulation_steps=2)
    assert train_durably(complete) is None
    states = [one.model.state_dict() for one in (whole, complete)]
    assert all(torch.equal(one, states[1][name]) for name, one in states[0].items())


def test_a_run_goes_on_behind_its_end_with_draws_checkpoints_and_the_best_step(folder):
    options = {"model": "gpt2-dropout", "lr_scheduler_type": "constant", "load_best_model_at_end": True}
    options |= {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 2, "eval_steps": 2}
    options["metric_for_best_model"] = "loss"
    whole = trainer_of(folder / "whole", max_steps=6, **options)
    train_durably(whole)
    short = trainer_of(folder / "parts", max_steps=4, **options | {"load_best_model_at_end": False})
    train_durably(short)
    engine_of_model(short.model).close()
    rest = trainer_of(folder / "parts", max_steps=6, **options)
    train_durably(rest)
    assert logged(rest, "loss") == logged(whole, "loss")[4:]
    assert (folder / "parts" / "out" / "checkpoint-6").is_dir()
    best = [(one.state.best_metric, one.state.best_global_step) for one in (whole, rest)]
    assert best[0] == best[1]
    assert not {"_load_from_checkpoint", "_load_rng_state"} & set(vars(rest))


def test_a_run_that_a_loop_of_its_own_began_is_refused_and_goes_on_there(folder):
    def begun():
        with infinity.Init(nvme=str(folder), host_memory="1MiB", durable=True):
            model = models.MODELS["llama"]()
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
        return model, optimizer, infinity.resume(model, optimizer)

    model, optimizer, _ = begun()
    ids = models.batch(0)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    infinity.commit(model)
    engine_of_model(model).close()
    trainer = trainer_of(folder)
    with pytest.raises(CheckpointError, match=r"committed at step 1, was not begun by a Trainer.*go on with"):
        train_durably(trainer)
    engine_of_model(trainer.model).close()
    assert begun()[2] == 1


def test_a_model_that_keeps_no_run_is_refused(folder):
    with pytest.raises(ConfigError, match="built without durable=True"):
        train_durably(trainer_of(folder / "run", durable=False))
