"""Hugging Face's Trainer, unmodified, on a model built in Init. Trusted: the reference recipe, trained by the
same Trainer, which clips it as the recipe does.
"""

import os
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file

import architectures
import infinity
import models
from allocations import Allocations
from infinity import ConfigError, UnsupportedError
from infinity.engine.engine import engine_of_model
from infinity.reference import ReferenceAdamW, prepare
from infinity.storage.manifest import CheckpointError
from trainers import ADAM, CLIPPED, HELD, ROWS, RecipeTrainer, build, logged

pytestmark = [
    pytest.mark.disk,
    pytest.mark.usefixtures("repeatable"),
    pytest.mark.filterwarnings(
        "ignore:.*pin_memory.*:UserWarning",  # the Trainer's default, without an accelerator
        "ignore:`gradient_checkpointing.*` is deprecated:FutureWarning",  # and still what users write
        "ignore:.*use_reentrant.*",
        "ignore:None of the inputs have requires_grad",
        "ignore:.*lr_scheduler.step.*:UserWarning",
        "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning",  # transformers 4's import
    ),
]


@pytest.fixture(autouse=True)
def environment():
    """What TrainingArguments asks of Accelerate through the environment ends with the test: torch_compile,
    refused here, would otherwise compile whatever is trained after it.
    """
    before = set(os.environ)
    yield
    for name in set(os.environ) - before:
        if name.startswith("ACCELERATE_"):
            del os.environ[name]


def trainer_of(model, folder, **options):
    """Return a Trainer of an offloaded model, or of a prepared one."""
    ours = any(infinity.engine.engine.engine_of(parameter) for parameter in model.parameters())
    options = {**CLIPPED, "max_steps": 6, "per_device_train_batch_size": 2, **options}
    args = transformers.TrainingArguments(output_dir=str(folder / ("ours" if ours else "plain")), **options)
    kind = infinity.AdamW if ours else ReferenceAdamW
    return (transformers.Trainer if ours else RecipeTrainer)(
        model=model,
        args=args,
        train_dataset=ROWS,
        eval_dataset=HELD,
        optimizer_cls_and_kwargs=(kind, {**ADAM, "weight_decay": args.weight_decay}),
        callbacks=[infinity.huggingface.TrainerCallback()] if ours else [],
    )


def compare(folder, name="llama", **options):
    """Train both; hold losses, norms, rates and the state at the end against each other."""
    plain, ours = build(name), build(name, folder)
    trainers = []
    for model in (plain, ours):
        trainers.append(trainer_of(model, folder, **options))
        torch.manual_seed(7)
        trainers[-1].train()
    expected, found = (logged(one, "loss", "grad_norm", "learning_rate") for one in trainers)
    assert len(expected) > 0
    assert [(loss, lr) for loss, _, lr in found] == [(loss, lr) for loss, _, lr in expected]
    norms = [[-1 if norm is None else norm for _, norm, _ in one] for one in (found, expected)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6), "none without clipping, before transformers 5.1"
    recipe, optimizer = (one.optimizer.optimizer for one in trainers)
    models.assert_same_state(ours, optimizer, plain, recipe)
    return trainers[1]


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt2-dropout", "mixtral"])
def test_losses_norms_and_weights_are_the_recipes(folder, name):
    trainer = compare(folder, name)
    groups = trainer.optimizer.param_groups
    assert sorted({group["weight_decay"] for group in groups}) == [0.0, 0.1], "the Trainer's decay groups"


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 3, "max_steps": 3},
        {"max_grad_norm": 0.0},
        {"bf16": True},
        {"label_smoothing_factor": 0.1},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"max_steps": -1, "num_train_epochs": 1, "gradient_accumulation_steps": 5},
    ],
    ids="-".join,
)
def test_the_trainers_options_keep_the_recipes_bits(folder, options):
    compare(folder, **options)


def test_evaluation_and_generation_between_and_after_steps(folder):
    trainer = compare(folder, eval_strategy="steps", eval_steps=2)
    assert len(logged(trainer, "eval_loss")) == 3
    prompt = models.batch(3, rows=1, length=4)
    texts = []
    for model in (trainer.model, build("llama")):
        if model is not trainer.model:
            model.load_state_dict(trainer.model.state_dict())
        model.eval()
        texts.append(model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0).tolist())
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        ("gpt2-dropout", {"accelerator_config": {"use_seedable_sampler": False}}),
    ],
    ids=["order by seed", "order and dropout by torch's generator"],
)
def test_a_training_resumes_with_the_bits_of_one_that_never_stopped(folder, name, options):
    options = {"save_strategy": "steps", "save_steps": 2, **options}
    whole = trainer_of(build(name, folder), folder / "whole", **options)
    whole.train()
    saved = folder / "whole" / "ours" / "checkpoint-2"
    assert {"infinity", "model.safetensors", "optimizer.pt", "trainer_state.json"} <= {
        path.name for path in saved.iterdir()
    }
    assert torch.load(saved / "optimizer.pt", weights_only=True)["state"] == {}
    again = trainer_of(build(name, folder, seed=1), folder / "whole", **options)
    again.train(resume_from_checkpoint=str(saved))
    assert logged(again, "loss", "learning_rate")[2:] == logged(whole, "loss", "learning_rate")[2:]
    engines = [engine_of_model(one.model) for one in (whole, again)]
    for ours, theirs in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        for field, other in zip(
            engines[0].parameters.read(ours, ["master", "m", "v"]),
            engines[1].parameters.read(theirs, ["master", "m", "v"]),
            strict=True,
        ):
            assert torch.equal(field, other)
    assert whole.optimizer.optimizer.state_dict()["state"][0]["exp_avg"].any(), "whole again after training"


def test_a_model_may_be_built_by_a_function(folder):
    args = transformers.TrainingArguments(
        str(folder / "out"), max_steps=2, report_to="none", use_cpu=True, disable_tqdm=True, logging_steps=1
    )
    trainer = transformers.Trainer(
        model_init=lambda: build("llama", folder),
        args=args,
        train_dataset=ROWS,
        optimizer_cls_and_kwargs=(infinity.AdamW, ADAM),
        callbacks=[infinity.huggingface.TrainerCallback()],
    )
    trainer.train()
    first = logged(trainer, "loss", "grad_norm")
    trainer.train()
    assert logged(trainer, "loss", "grad_norm") == first


def test_translations_are_generated_and_measured_between_steps(folder):
    rows = [{"input_ids": row, "labels": row[:8]} for row in models.batch(2, rows=8).clamp(min=3)]

    def measure(prediction):
        return {"sum": float(prediction.predictions.clip(min=0).sum())}

    shown = []
    for place in (None, folder):
        torch.manual_seed(0)
        kind = ReferenceAdamW if place is None else infinity.AdamW
        build_t5 = architectures.ARCHITECTURES["t5, tied"][0]
        if place is None:
            model = prepare(build_t5())
        else:
            with infinity.Init(nvme=str(place), host_memory="1MiB"):
                model = build_t5()
        args = transformers.Seq2SeqTrainingArguments(
            str(folder / "out"),
            max_steps=4,
            eval_strategy="steps",
            eval_steps=2,
            predict_with_generate=True,
            generation_max_length=6,
            max_grad_norm=0.0,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            seed=3,
        )
        trainer = transformers.Seq2SeqTrainer(
            model,
            args,
            train_dataset=rows,
            eval_dataset=rows[:4],
            compute_metrics=measure,
            optimizers=(kind(model.parameters(), **ADAM), None),  # this Trainer takes no class
            callbacks=[] if place is None else [infinity.huggingface.TrainerCallback()],
        )
        torch.manual_seed(7)
        trainer.train()
        shown.append(logged(trainer, "eval_sum", "eval_loss"))
    assert len(shown[0]) == 2
    assert shown[0] == shown[1]


def test_a_checkpoint_that_was_moved_is_found_where_the_arguments_say_or_refused(folder):
    first = trainer_of(
        build("llama", folder), folder / "old", max_steps=2, save_strategy="steps", save_steps=2
    )
    first.train()
    shutil.move(folder / "old", folder / "new")
    moved = str(folder / "new" / "ours" / "checkpoint-2")
    again = trainer_of(build("llama", folder, seed=1), folder / "other", max_steps=3)
    with pytest.raises(CheckpointError, match="masters and moments of step 2 are missing"):
        again.train(resume_from_checkpoint=moved)
    again = trainer_of(
        build("llama", folder, seed=1), folder / "other", max_steps=3, resume_from_checkpoint=moved
    )
    again.train(resume_from_checkpoint=moved)
    assert again.state.global_step == 3


def test_the_best_model_is_loaded_at_the_end(folder):
    trainer = trainer_of(
        build("llama", folder),
        folder,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
    )
    seen = {}
    evaluate = trainer.evaluate

    def remember(*args, **kwargs):
        metrics = evaluate(*args, **kwargs)
        weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        seen[metrics["eval_loss"]] = weights
        return metrics

    trainer.evaluate = remember
    trainer.train()
    best = seen[min(seen)]
    assert len(seen) == 3
    assert trainer.state.best_metric == min(seen)
    found = trainer.model.state_dict()
    assert [name for name in best if not torch.equal(best[name], found[name])] == []


def test_saving_the_model_alone_saves_nothing_beside_it(folder):
    trainer = trainer_of(
        build("llama", folder), folder, max_steps=2, save_strategy="steps", save_steps=2, save_only_model=True
    )
    trainer.train()
    assert not (folder / "ours" / "checkpoint-2" / "infinity").exists()
    trainer.save_model(str(folder / "final"))
    plain = transformers.LlamaForCausalLM.from_pretrained(folder / "final", dtype=torch.bfloat16)
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(plain.state_dict()[name], value)


@pytest.mark.parametrize("given", ["a model", "a function"])
def test_checkpoints_and_models_are_streamed_to_files_and_are_those_of_transformers(
    folder, monkeypatch, given
):
    """Four chunks are in memory, of a layer at most: read, waiting, written, and one that the lane's thread,
    which may be held up by others, has not let go of yet.
    """
    torch.manual_seed(0)
    with infinity.Init(nvme=str(folder), host_memory="1MiB"):
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**{**models.SIZES, "num_hidden_layers": 12})
        )
    trainer = trainer_of(model, folder, max_steps=1, save_strategy="steps", save_steps=1)
    if given == "a function":  # which is called when training begins
        del model.save_pretrained
    most = []

    def watched(save):
        def call(*args, **kwargs):
            with Allocations() as memory:
                save(*args, **kwargs)
            most.append(memory.peak_nbytes)

        return call

    for name in ("_save_checkpoint", "save_model"):
        monkeypatch.setattr(trainer, name, watched(getattr(trainer, name)))
    trainer.train()
    trainer.save_model(str(folder / "final"))
    layer = max(unit.layout.numel for unit in engine_of_model(model).units) * 2
    assert len(most) == 3, "the checkpoint, the model in it, and the model alone"
    assert all(layer < one <= 4 * layer for one in most), (most, layer)
    assert sum(one.numel() for one in model.parameters()) * 2 > 30 * layer
    type(model).save_pretrained(model, folder / "theirs")
    theirs = {path.name: path.read_bytes() for path in (folder / "theirs").iterdir()}
    for saved in (folder / "final", folder / "ours" / "checkpoint-1"):
        assert load_file(saved / "model.safetensors").keys() == model.state_dict().keys()
        for name, content in theirs.items():
            if name.endswith(".json"):
                assert (saved / name).read_bytes() == content
        found = load_file(saved / "model.safetensors")
        assert [key for key, one in model.state_dict().items() if not torch.equal(found[key], one)] == []


@pytest.mark.parametrize("way", ["a file", "a file above", "a checkpoint's place", "a checkpoint's folder"])
def test_what_is_in_the_way_of_a_checkpoint_is_told_before_anything_is_trained(folder, way):
    trainer = trainer_of(build("llama", folder), folder, max_steps=2, save_strategy="steps", save_steps=2)
    checkpoint = folder / "ours" / "checkpoint-2"
    if way in ("a file", "a file above"):
        trainer.args.output_dir = str(folder / "text" / ("" if way == "a file" else "below"))
        (folder / "text").touch()
    elif way == "a checkpoint's place":
        checkpoint.parent.mkdir(exist_ok=True)
        checkpoint.touch()
    else:
        (checkpoint / "infinity").mkdir(parents=True)
        (checkpoint / "infinity" / "thesis.txt").touch()
    error, says = (
        (ConfigError, "is not a folder, so that nothing could be saved")
        if "a file" in way
        else (FileExistsError, r"move this file away|thesis\.txt.*never replaced")
    )
    with pytest.raises(error, match=says):
        trainer.train()
    assert trainer.state.global_step == 0


def test_files_of_an_earlier_save_give_way_and_others_stay(folder):
    trainer = trainer_of(build("llama", folder), folder, max_steps=1)
    final = folder / "final"
    trainer.model.save_pretrained(final, max_shard_size="20kB")
    (final / "notes.txt").write_text("mine")
    assert len(list(final.glob("model-*"))) > 2
    trainer.save_model(str(final))
    names = {path.name for path in final.iterdir()}
    assert {"notes.txt", "model.safetensors", "config.json"} <= names
    assert not any("index" in name or "-of-" in name or name == "infinity-weights" for name in names)


def test_what_only_transformers_can_save_it_saves(folder, caplog):
    trainer = trainer_of(build("llama", folder), folder, max_steps=1)
    own = {name: one + 1 for name, one in trainer.model.state_dict().items()}
    trainer.model.save_pretrained(folder / "own", state_dict=dict(own))  # which takes from it
    assert torch.equal(
        load_file(folder / "own" / "model.safetensors")["lm_head.weight"], own["lm_head.weight"]
    )
    with infinity.gathered(trainer.model, write=True):
        trainer.model.lm_head.weight.data.fill_(2)
        trainer.model.save_pretrained(folder / "changed")
    assert (load_file(folder / "changed" / "model.safetensors")["lm_head.weight"] == 2).all()
    trainer.model.lm_head.register_state_dict_post_hook(lambda *_: None)
    trainer.save_model(str(folder / "hooked"))
    assert "lm_head (Linear) gives its state_dict other names or values" in caplog.text
    assert load_file(folder / "hooked" / "model.safetensors").keys() == own.keys()


class Board(transformers.TrainerCallback):
    """Shows what it is told, as TensorBoard's and W&B's do, and what the engine says at that moment."""

    def __init__(self):
        self.shown, self.stats = [], []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.shown.append(dict(logs))
        self.stats.append(infinity.stats(kwargs["model"]))


class Settled(transformers.TrainerCallback):
    """Lets what is read ahead and written behind be over: it moves between two looks at it."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        engine_of_model(kwargs["model"]).lane.drain()


def test_what_moved_stands_in_the_trainers_logs_and_on_boards_named_after_the_callback(folder):
    trainer = trainer_of(build("llama", folder), folder, max_steps=3)
    ours, board = trainer.pop_callback(infinity.huggingface.TrainerCallback), Board()
    for one in (Settled(), ours, board):
        trainer.add_callback(one)
    engine_of_model(trainer.model).lane.drain()
    before = infinity.stats(trainer.model)
    trainer.train()
    names = "infinity_nvme_read_gb", "infinity_nvme_written_gb", "infinity_misses", "infinity_host_gb"
    assert len(board.shown) == 4, "three steps, and the summary"
    assert logged(trainer, *names) == [tuple(map(one.get, names)) for one in board.shown]
    for shown, now in zip(board.shown, board.stats, strict=True):
        moved, before = now.since(before), now
        assert shown["infinity_nvme_read_gb"] == round(moved.nvme_read_nbytes / 1e9, 6)
        assert shown["infinity_nvme_written_gb"] == round(moved.nvme_written_nbytes / 1e9, 6)
        assert shown["infinity_host_gb"] == round(now.budget_held_nbytes / 1e9, 6)
        assert shown["infinity_stall_s"] >= 0
    assert board.shown[0]["infinity_nvme_read_gb"] > 0, "before anything was pinned"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"torch_compile": True}, "torch_compile=True.*leave it out"),
        ({"fp16": True}, "fp16=True.*set bf16=True"),
        ({"fp16_full_eval": True}, "fp16_full_eval=True"),
    ],
)
def test_arguments_that_cannot_work_are_refused_before_training(folder, options, says):
    with pytest.raises(UnsupportedError, match=says):
        trainer_of(build("llama", folder), folder, **options)


def test_fp16_weights_without_a_scaled_loss_are_refused_before_training(folder):
    with pytest.raises(UnsupportedError, match=r"fp16=False.*need a scaled loss: set fp16=True"):
        trainer_of(build("llama", folder, dtype="fp16"), folder)


def test_fp16_weights_are_refused_where_accelerate_makes_no_scaler(folder):
    trainer = trainer_of(build("llama", folder, dtype="fp16"), folder, fp16=True)
    with pytest.raises(UnsupportedError, match=r"no GradScaler.*train on a GPU"):
        trainer.train()


def test_data_parallel_and_other_optimizers_are_refused(folder, monkeypatch):
    model = build("llama", folder)
    monkeypatch.setattr(transformers.TrainingArguments, "n_gpu", 2)
    with pytest.raises(UnsupportedError, match=r"DataParallel.*torchrun"):
        trainer_of(model, folder)
    monkeypatch.undo()
    for kwargs, says in (
        ({"optimizer_cls_and_kwargs": (infinity.AdamW, {"max_norm": 1.0})}, "leave max_norm out"),
        (
            {"optimizer_cls_and_kwargs": (infinity.AdamW, {"update": "backward"})},
            "max_grad_norm=1.0 needs their norm; set max_grad_norm=0",
        ),
        ({}, r"torch\.optim.* cannot step .*For the Trainer: optimizer_cls_and_kwargs=\(infinity\.AdamW, {"),
    ):
        args = transformers.TrainingArguments(
            str(folder / "out"), max_steps=1, report_to="none", use_cpu=True, disable_tqdm=True
        )
        trainer = transformers.Trainer(
            model, args, train_dataset=ROWS, callbacks=[infinity.huggingface.TrainerCallback()], **kwargs
        )
        with pytest.raises(UnsupportedError, match=says):
            trainer.train()
    with pytest.raises(ValueError, match="no parameter built inside"):
        transformers.Trainer(build("gpt2"), args, callbacks=[infinity.huggingface.TrainerCallback()])


@pytest.mark.parametrize(("how", "norm"), [({"update": "backward"}, 0.0), ({"max_norm": 0.5}, 0.5)])
def test_where_the_trainer_clips_nothing_the_optimizer_clips_or_updates_in_the_backward(folder, how, norm):
    """Held against a Trainer that clips itself, or clips nothing."""
    trained = []
    for max_grad_norm, options in ((norm, {}), (0.0, how)):
        trainer = trainer_of(build("llama", folder), folder, max_grad_norm=max_grad_norm, max_steps=3)
        trainer.optimizer_cls_and_kwargs = (infinity.AdamW, {**ADAM, **options})
        torch.manual_seed(7)
        trainer.train()
        trained.append(logged(trainer, "loss", "grad_norm"))
    assert [row[0] for row in trained[1]] == [row[0] for row in trained[0]]
    norms = [None] * 3 if "update" in how else pytest.approx([row[1] for row in trained[0]], rel=1e-6)
    assert [row[1] for row in trained[1]] == norms
    one = torch.nn.Parameter(torch.zeros(4))
    one.grad = torch.ones(4)
    assert float(trainer.accelerator.clip_grad_norm_([one], 1.0)) == 2, "elsewhere, it clips as ever"
    assert one.grad.norm() == pytest.approx(1)
