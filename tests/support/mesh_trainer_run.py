"""What Hugging Face's Trainer does over a mesh in the tests of it: cases by name, an answer as JSON each.

    torchrun --nproc-per-node 2 tests/support/mesh_trainer_run.py FOLDER DATA CASE [CASE ...]  # or forked

Rank R writes FOLDER/R.json. DATA: how many ranks have different data; the others are tensor parallel. The
reference is the same parallel model in memory, given the batches that the Trainer has given ours: plain
DTensors, whose local tensors the reference recipe steps.
"""

import functools
import sys
from functools import partial

import accelerate
import torch
import torch.distributed as dist
import transformers

import infinity
import trainers
from answers import answer_all, error_of
from infinity.tensors import digest
from mesh_kinds import VOCABULARY, by_plan, from_transformers, of_kind
from mesh_run import COMPUTES, TIGHT, ParallelReference, Place, local

ADAM = {"lr": 0.01, "betas": (0.9, 0.95)}
ACCUMULATED, LIMIT = 2, 0.5
OPTIONS = {
    "max_steps": 4,
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 2,
    "gradient_accumulation_steps": ACCUMULATED,
    "max_grad_norm": LIMIT,
    "learning_rate": ADAM["lr"],
    "lr_scheduler_type": "constant",
    "weight_decay": 0.0,
    **trainers.LOGGED,
}


def rows_of(number, count):
    """Return rows, of which some labels do not count."""
    drawn = torch.Generator().manual_seed(number)
    rows = torch.randint(1, VOCABULARY, (count, 7), generator=drawn)
    labels = rows.clone()
    for index in range(count):
        labels[index, : index % 4] = -100
    return [{"input_ids": one, "labels": other} for one, other in zip(rows, labels, strict=True)]


ROWS, HELD = rows_of(0, 24), rows_of(1, 6)


def offloaded(place, dtype="fp32", made=by_plan):
    settings = {"nvme": place.folder, "host_memory": TIGHT, "dtype": dtype, "timeout_s": 60}
    with infinity.Init(mesh=place.mesh, data="dp", **settings):
        return made(place, "Llama")


def sizes_of(place):
    """Return what Accelerate is to be told of the mesh."""
    return accelerate.ParallelismConfig(tp_size=place.tensor.size(), dp_shard_size=place.data.size())


def trainer_of(model, place, name, *, callbacks=None, **options):
    """Return a Trainer of an offloaded model, with our callback, or these."""
    return transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(f"{place.folder}/{name}", **{**OPTIONS, **options}),
        train_dataset=ROWS,
        eval_dataset=HELD,
        compute_metrics=lambda given: {
            "sum": float(abs(given.predictions).astype("float64").sum()),
            "rows": len(given.predictions),
        },
        optimizer_cls_and_kwargs=(infinity.AdamW, ADAM),
        callbacks=[infinity.huggingface.TrainerCallback()] if callbacks is None else callbacks,
    )


def watched(model):
    """Note what a model is given for its training, from now on; return the list."""
    seen, usual = [], model.forward

    @functools.wraps(usual)
    def forward(*args, **kwargs):
        if torch.is_grad_enabled():
            seen.append(kwargs)
        return usual(*args, **kwargs)

    model.forward = forward
    return seen


def replayed(place, batches, dtype):
    """Train the same parallel model in memory on batches; return its weights and moments, and the losses."""
    plain = by_plan(place, "Llama")
    optimizer = ParallelReference(place, plain, COMPUTES[dtype], weight_decay=0.0, **ADAM)
    losses = []
    for number, batch in enumerate(batches):
        loss = plain.train()(**batch).loss * place.data.size()
        loss.backward()
        losses.append(float(loss.detach()))
        if number % ACCUMULATED == ACCUMULATED - 1:
            optimizer.clip(LIMIT)
            optimizer.step()
            optimizer.zero_grad()
    state = [optimizer.state[one] for one in optimizer.param_groups[0]["params"]]
    moments = [(one["exp_avg"], one["exp_avg_sq"]) for one in state]
    return [local(one) for one in plain.parameters()], moments, losses


def state_of(model, optimizer):
    """Return this rank's weights and moments, in the order of the model's parameters."""
    weights = model.state_dict()
    states = [optimizer.state[one] for one in model.parameters()]
    moments = [(local(one["exp_avg"]), local(one["exp_avg_sq"])) for one in states]
    return [local(weights[name]) for name, _ in model.named_parameters()], moments


def different(one, other):
    """Return the numbers of parameters of which weights or moments are not the same."""
    pairs = zip(*one, *other, strict=True)
    return [
        number
        for number, (weight, moments, expected, wanted) in enumerate(pairs)
        if not torch.equal(weight, expected) or not all(map(torch.equal, moments, wanted))
    ]


def size_of(logits):
    return logits.double().abs().sum()


def of_all(value):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def trained(place, dtype, made=by_plan, **options):
    """Train, evaluate; return what differs from the parallel model in memory, and what ranks were given."""
    model = offloaded(place, dtype, made)
    seen = watched(model)
    trainer = trainer_of(model, place, "trained", eval_strategy="steps", eval_steps=2, **options)
    accelerator = trainer.accelerator
    trainer.train()
    *expected, losses = replayed(place, seen, dtype)
    model.eval()
    with torch.no_grad():
        rows = torch.stack([one["input_ids"] for one in HELD])
        answers = [model(input_ids=pair).logits for pair in rows.split(2)]
        labels = torch.stack([one["labels"] for one in HELD])
        loss = model(input_ids=rows, labels=labels).loss
    evaluated = trainer.evaluate()
    given = of_all([digest(one["input_ids"]) for one in seen])
    per_step = [sum(losses[at : at + ACCUMULATED]) for at in range(0, len(losses), ACCUMULATED)]
    everyones = of_all(per_step)
    return {
        "different": different(state_of(model, trainer.optimizer.optimizer), expected),
        "losses": [logged(trainer, "loss"), [sum(one) / len(one) for one in zip(*everyones, strict=True)]],
        "norms": logged(trainer, "grad_norm"),
        "rows": [evaluated["eval_rows"], evaluated["eval_sum"], float(sum(map(size_of, answers)))],
        "same in a row": all(
            given[one] == given[other] for row in place.mesh.mesh.tolist() for one in row for other in row
        ),
        "eval loss": [evaluated["eval_loss"], float(loss)],
        "batches": len({one for of_rank in given for one in of_rank}),
        "nvme": infinity.stats(model).nvme_written_nbytes,
        "left to accelerate": [
            trainer.get_tp_size(),
            accelerator.parallelism_config is None,
            accelerator.torch_device_mesh is None,
        ],
    }


def resumed(place):
    """Go on from a checkpoint in the middle; load the best at the end; return what differs."""
    options = {"save_strategy": "steps", "save_steps": 2, "parallelism_config": sizes_of(place)}
    whole = trainer_of(offloaded(place, "bf16"), place, "whole", **options)
    whole.train()
    again = trainer_of(offloaded(place, "bf16"), place, "whole", **options)
    again.train(resume_from_checkpoint=f"{place.folder}/whole/checkpoint-2")
    ends = [state_of(one.model, one.optimizer.optimizer) for one in (whole, again)]
    best = trainer_of(
        offloaded(place),
        place,
        "best",
        **options,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="sum",
        greater_is_better=False,
    )
    best.train()
    plain = transformers.LlamaForCausalLM.from_pretrained(f"{place.folder}/whole/checkpoint-4")
    names = [name for name, _ in whole.model.named_parameters()]
    return {
        "different": different(*ends),
        "best": [best.state.best_metric, best.evaluate()["eval_sum"]],
        "shapes": [list(one.shape) for name, one in plain.named_parameters()]
        == [list(one.shape) for one in whole.model.parameters()],
        "names": names == [name for name, _ in plain.named_parameters()],
    }


def loaded_divided(place):
    """Train a model that transformers has divided while it was loaded; return what differs."""
    from_transformers(place, "Llama")  # outside of Init, where a rank writes the files
    return trained(place, "fp32", from_transformers, save_strategy="steps", save_steps=2)


def refused(place):
    """Return the errors of what does not go with a mesh."""
    model = offloaded(place)
    trainer_of(model, place, "told")
    late = trainer_of(model, place, "late", callbacks=[])
    late.add_callback(infinity.huggingface.TrainerCallback())
    ordinary = offloaded(place)
    ordinary.register_parameter("own", torch.nn.Parameter(torch.zeros(3)))
    kind, config = of_kind("Llama")
    with infinity.Init(nvme=place.folder, host_memory=TIGHT, dtype="fp32"):
        undivided = kind(config)
    sizes = {"tp_size": place.tensor.size(), "dp_shard_size": place.data.size()}
    both = {"save_only_model": True, "load_best_model_at_end": True}
    steps = {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 2, "eval_steps": 2}
    return {
        "late": error_of(late.train),
        "ordinary": error_of(lambda: trainer_of(ordinary, place, "ordinary")),
        "objects": error_of(lambda: trainer_of(model, place, "objects", eval_use_gather_object=True)),
        "weights alone": error_of(lambda: trainer_of(model, place, "alone", **both, **steps)),
        "by block": error_of(lambda: by_block(model, place)),
        "apart": error_of(lambda: trainer_of(model, place, "apart", average_tokens_across_devices=False)),
        "counted": error_of(lambda: trainer_of(model, place, "counted", include_num_input_tokens_seen="all")),
        "other place": error_of(lambda: resumed_elsewhere(model, place)),
        "undivided": error_of(lambda: sized(undivided, place, **sizes)),
        "tp_size": error_of(lambda: sized(model, place, tp_size=4)),
        "data": error_of(lambda: sized(model, place, tp_size=2)),
    }


def sized(model, place, **sizes):
    return trainer_of(model, place, "sized", parallelism_config=accelerate.ParallelismConfig(**sizes))


def by_block(model, place):
    shares = [infinity.huggingface.TrainerCallback(by_block=True)]
    trainer_of(model, place, "by block", callbacks=shares).train()


def resumed_elsewhere(model, place):
    trainer_of(model, place, "elsewhere").train(resume_from_checkpoint=f"{place.folder}/none")


CASES = {
    "fp32": lambda place: trained(place, "fp32"),
    "bf16": lambda place: trained(place, "bf16"),
    "by its keyword": lambda place: trained(place, "bf16", parallelism_config=sizes_of(place)),
    "loaded divided": loaded_divided,
    "resumed": resumed,
    "refused": refused,
}


def main(folder, data, *names):
    """Do cases. data: how many ranks have different data."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    place = Place(folder, int(data))
    answer_all(folder, names, partial(run, place))


def run(place, name):
    return CASES[name](place)


if __name__ == "__main__":
    main(*sys.argv[1:])
