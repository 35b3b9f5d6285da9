"""What Hugging Face's Trainer and Accelerate do on several ranks in the tests of them; see ranks_run.

Beside each run of ours the same Trainer trains the reference of several ranks (ranks_run.build_reference),
which Accelerate is told not to wrap: its gradients are means over the ranks as they come.
"""

import logging
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file
from torch.utils.data import DataLoader

import infinity
import models
import ranks_run
import trainers_of_ranks
from infinity.reference import ReferenceAdamW, rounded
from infinity.reference import clip_grad_norm_ as reference_clip
from trainers import ADAM, RecipeTrainer, logged
from trainers_of_ranks import HELD, OPTIONS, ROWS

FOLDER = Path(os.environ["RANKS_DISK"])
models.MODELS["llama"] = trainers_of_ranks.build_llama


def build(name="llama", seed=0, **init):
    torch.manual_seed(seed)
    with infinity.Init(timeout_s=60, **{"host_memory": "64MiB", **init}):
        return models.MODELS[name]()


def trainer_of(model, place, *, by_block=False, **options):
    """Return a Trainer of an offloaded model, or of a function that builds one, or of the reference."""
    built = not isinstance(model, torch.nn.Module)
    ours = built or infinity.engine.engine.engine_of(next(model.parameters())) is not None
    args = transformers.TrainingArguments(str(FOLDER / place), **{**OPTIONS, **options})
    if not ours:
        model._is_accelerate_prepared = True
    return (transformers.Trainer if ours else RecipeTrainer)(
        **{"model_init" if built else "model": model},
        args=args,
        train_dataset=ROWS,
        eval_dataset=HELD,
        compute_metrics=lambda given: {"sum": float(given.predictions.astype("float64").sum())},
        optimizer_cls_and_kwargs=(infinity.AdamW if ours else ReferenceAdamW, {**ADAM, "weight_decay": 0.1}),
        callbacks=[infinity.huggingface.TrainerCallback(by_block=by_block)] if ours else [],
    )


def state_of(model, optimizer):
    return {**model.state_dict(), **ranks_run.state_of(optimizer)}


def different(expected, found):
    return [key for key, one in expected.items() if not ranks_run.same(one, found[key])]


def compare(name="llama", init=None, **options):
    """Train both under the Trainer; return what differs, and the logs."""
    logs, states = [], []
    for ours in (False, True):
        model = build(name, **(init or {})) if ours else ranks_run.build_reference(name)
        trainer = trainer_of(model, "ours" if ours else "plain", **options)
        torch.manual_seed(7)
        trainer.train()
        names = ("loss", "learning_rate"), ("eval_loss", "eval_sum"), ("grad_norm",)
        logs.append([logged(trainer, *one) for one in names])
        states.append(state_of(model, trainer.optimizer.optimizer))
    return {
        "different": different(*states),
        "logs": logs,
        "wrapped": type(trainer.model_wrapped).__name__,
        "autocast": hasattr(model, "_original_forward"),  # what Accelerate keeps when it puts autocast around
        "nvme": infinity.stats(model).nvme_written_nbytes,
    }


def build_anew():
    return build()


def built():
    """Train what a function builds, twice, and the same model as it is."""
    trainers = [trainer_of(one, "built") for one in (build_anew, build())]
    logs = []
    for trainer in (trainers[0], *trainers):
        trainer.train()
        logs.append(logged(trainer, "loss", "grad_norm"))
    ends = [state_of(one.model, one.optimizer.optimizer) for one in trainers]
    return {"logs": logs, "different": different(*ends), "wrapped": type(trainers[0].model_wrapped).__name__}


def resumed():
    """Train, and train again from the checkpoint in the middle; hold both ends against each other."""
    options = {"save_strategy": "steps", "save_steps": 2}
    whole = trainer_of(build(), "whole", **options)
    whole.train()
    saved = FOLDER / "whole" / "checkpoint-2"
    names = sorted(path.name for path in saved.iterdir())
    again = trainer_of(build(seed=1), "whole", **options)
    again.train(resume_from_checkpoint=str(saved))
    ends = [state_of(one.model, one.optimizer.optimizer) for one in (whole, again)]
    weights = whole.model.state_dict()
    last = FOLDER / "whole" / "checkpoint-4"
    plain = transformers.LlamaForCausalLM.from_pretrained(last, dtype=torch.bfloat16).state_dict()
    return {
        "different": different(*ends),
        "files": names,
        "losses": [logged(one, "loss") for one in (whole, again)],
        "saved": different({key: weights[key] for key in plain}, plain),
    }


def best():
    """Load the best checkpoint at the end."""
    trainer = trainer_of(
        build(),
        "best",
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="sum",
        greater_is_better=True,  # which the first is
    )
    trainer.train()
    return {
        "best step": trainer.state.best_global_step,
        "best": trainer.state.best_metric,
        "evaluated": trainer.evaluate()["eval_sum"],
        "losses": logged(trainer, "loss"),
    }


def by_block():
    """Micro-batches that share a fetch beside those that fetch once each, in fp32; of ranks whose batches
    differ in length, and of those of which one has none that are a batch.
    """
    shown = {}
    for way in ("apart", "together"):
        model = build(nvme=str(FOLDER), host_memory="512KiB", dtype="fp32")
        together = way == "together"
        options = {"gradient_accumulation_steps": 4, "gradient_checkpointing": not together}
        trainer = trainer_of(model, f"by block {way}", by_block=together, **options)
        torch.manual_seed(7)
        before = infinity.stats(model)
        trainer.train()
        now = infinity.stats(model).since(before)
        nbytes = now.nvme_read_nbytes + now.nvme_written_nbytes
        shown[way] = {"logs": logged(trainer, "loss", "grad_norm"), "nbytes": nbytes}
    for lengths, name in (((5, 7 + 2 * dist.get_rank()), "other lengths"), ((6, 6), "apart here")):
        losses = []
        for together in (False, True):
            model = build(dtype="fp32", seed=3).train()
            optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
            left = [0]
            if together:
                infinity.huggingface.accumulate_by_block(model, optimizer, lambda left=left: left[0] == 0)
            batches = [models.batch(9 + dist.get_rank(), rows=2, length=one) for one in lengths]
            more = [{"num_items_in_batch": 20}] * 2
            if name == "apart here" and dist.get_rank() == 1:
                more = [{"num_items_in_batch": 20}, {"num_items_in_batch": 21}]
            total = 0.0
            for left[0], ids, one in zip((1, 0), batches, more, strict=True):
                loss = model(input_ids=ids, labels=ids, **one).loss
                loss.backward()
                total += loss.item()
            optimizer.step()
            losses.append([total, float(model.state_dict()["lm_head.weight"].double().sum())])
        shown[name] = losses
    return shown


def afterwards():
    """Train one step; then generate on each rank from its own prompt, texts that end at other lengths, and
    save as rank 0 alone would.
    """
    model = build("gpt2")
    trainer = trainer_of(model, "afterwards", max_steps=1)
    trainer.train()
    prompt = models.batch(20 + dist.get_rank(), rows=1, length=4)
    length = 3 + 4 * dist.get_rank()
    model.eval()
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    text = model.generate(prompt, max_new_tokens=length, **options)
    plain = models.MODELS["gpt2"]()
    plain.load_state_dict(model.state_dict())
    expected = plain.to(torch.bfloat16).eval().generate(prompt, max_new_tokens=length, **options)
    told = []
    logging.getLogger("infinity").addFilter(lambda record: told.append(record.rank))
    logging.getLogger("infinity").warning("a record")
    said = ""
    try:
        trainer.save_model(str(FOLDER / "final"))
    except infinity.UnsupportedError as error:
        said = str(error)
    infinity.save_pretrained(model, FOLDER / "final")
    return {
        "same": torch.equal(text, expected),
        "length": text.shape[1],
        "said": said,
        "rank in the log": told[0],
        "files": sorted(path.name for path in (FOLDER / "final").iterdir()),
    }


def accelerated():
    """Train a loop of Accelerate, as its documentation writes it; return what differs."""
    shown = []
    for ours in (False, True):
        AcceleratorState._reset_state()
        GradientState._reset_state()
        accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
        model = build() if ours else ranks_run.build_reference("llama")
        kind = infinity.AdamW if ours else ReferenceAdamW
        optimizer = kind(model.parameters(), lr=1e-2, weight_decay=0.1)
        model = accelerator.prepare_model(model, evaluation_mode=True)  # no DistributedDataParallel
        loader = DataLoader(models.batch(0, rows=16), batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        losses = []
        for ids in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=ids, labels=ids).loss
                accelerator.backward(loss)
                losses.append(float(accelerator.gather(loss.detach()).mean()))
                if accelerator.sync_gradients and ours:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                elif accelerator.sync_gradients:
                    reference_clip(optimizer.optimizer, 0.5)
                optimizer.step()
                optimizer.zero_grad()
        shown.append({"losses": losses, **state_of(model, optimizer.optimizer)})
    accelerator.save_state(str(FOLDER / "state"))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    changed = different(shown[1], {"losses": losses, **state_of(model, optimizer.optimizer)})
    accelerator.load_state(str(FOLDER / "state"))
    AcceleratorState._reset_state()
    GradientState._reset_state()
    return {
        "different": different(*shown),
        "losses": losses,
        "changed": len(changed),
        "lost": different(shown[1], {"losses": losses, **state_of(model, optimizer.optimizer)}),
    }


NVME = {"nvme": str(FOLDER), "host_memory": "2MiB"}


def adapters():
    """Train adapters, ordinary ones, on our base and on one in memory; Accelerate wraps both for them."""
    import peft

    shown = []
    for ours in (False, True):
        torch.manual_seed(0)
        base = build() if ours else models.MODELS["llama"]()
        if not ours:
            for parameter in base.parameters():
                parameter.data = rounded(parameter.data)
        torch.manual_seed(dist.get_rank())  # each rank draws its own, and rank 0's are everybody's
        config = peft.LoraConfig(target_modules=["q_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")
        place = "adapters" if ours else "plain adapters"
        args = transformers.TrainingArguments(
            str(FOLDER / place),
            **{**OPTIONS, "learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 4},
        )
        trainer = transformers.Trainer(
            peft.get_peft_model(base, config),
            args,
            train_dataset=ROWS,
            callbacks=[infinity.huggingface.TrainerCallback()] if ours else [],
        )
        trainer.train()
        saved = load_file(FOLDER / place / "checkpoint-4" / "adapter_model.safetensors")
        shown.append({"losses": logged(trainer, "loss", "grad_norm"), **saved})
    return {
        "different": different(*shown),
        "wrapped": type(trainer.model_wrapped).__name__,
        "files": sorted(path.name for path in (FOLDER / "adapters" / "checkpoint-4").iterdir()),
        "own": different(peft.get_peft_model_state_dict(trainer.model), saved),
    }


CASES = {
    "joined": lambda: compare(bf16=True, gradient_checkpointing=True),
    "nvme": lambda: compare(
        "gpt2",
        {"nvme": str(FOLDER), "host_memory": "2MiB"},
        eval_strategy="steps",
        eval_steps=2,
        label_smoothing_factor=0.1,
        average_tokens_across_devices=False,
    ),
    "built": built,
    "resumed": resumed,
    "best": best,
    "accelerated": accelerated,
    "afterwards": afterwards,
    "adapters": adapters,
    "by block": by_block,
}

if __name__ == "__main__":
    ranks_run.CASES.update(CASES)
    ranks_run.main(sys.argv[1], sys.argv[2:])
