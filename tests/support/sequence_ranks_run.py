"""What ranks that share sequences do in the tests of them, over gloo: cases by name, an answer as JSON each.

    torchrun --nproc-per-node 2 tests/support/sequence_ranks_run.py FOLDER CASE [CASE ...]  # or
    launches.forked

Rank R writes FOLDER/R.json: {case: answer, or {"error": text}}.
"""

import contextlib
import gc
import json
import os
import sys
import traceback
from functools import partial
from pathlib import Path

import accelerate
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard
from accelerate.state import AcceleratorState, GradientState
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler
from transformers import AttentionInterface, AttentionMaskInterface

import infinity
import sequence_models
from infinity import tiling
from infinity.reference import ReferenceAdamW, prepare
from infinity.sequences.parallel import sequences_of
from thread_ranks import on_ranks

HOST = "64MiB"


def offloaded(name, size, *, seed=0, model=None, **settings):
    """Build a model in Init, whose sequences are on `size` ranks each."""
    torch.manual_seed(seed)
    with infinity.Init(**{"host_memory": HOST, "dtype": "fp32", "sequence_parallel": size, **settings}):
        return sequence_models.model_of(name, **(model or {})).train()


def part_of(batch, size):
    """Return this rank's part of a batch, by slices: the model does the rest."""
    rank, tokens = dist.get_rank() % size, batch["input_ids"].shape[1] // size
    return {name: one[:, rank * tokens :][:, :tokens].contiguous() for name, one in batch.items()}


def train(model, size, *, steps, lr=1e-2, rows=2, style="labels"):
    """Train on whole batches, in parts; return the losses."""
    optimizer = infinity.AdamW(model.parameters(), lr=lr)
    losses = []
    for step in range(steps):
        loss = model(**part_of(sequence_models.batch_of(step, rows=rows, style=style), size)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def weights(model):
    return {name: one.clone() for name, one in model.state_dict().items()}


def as_one_rank(name):
    """Ten steps in fp32, with the sequences on all ranks, and with whole ones on one alone."""
    size, first = dist.get_world_size(), dist.new_group([0])
    apart = train(offloaded(name, size), size, steps=10)
    alone = of_first_rank(lambda: train(offloaded(name, 1, process_group=first), 1, steps=10))
    return {"apart": apart, "alone": alone}


def of_first_rank(work):
    """Return what the first rank's work returns: no other has to do it again."""
    said = [work() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(said, src=0)
    return said[0]


def by_hand(name, size, steps):
    """Train as `size` ranks do with arithmetic of one process alone: slices, sums in the order of ranks."""
    torch.manual_seed(0)
    models = [sequence_models.model_of(name).train() for _ in range(1)]
    states = models[0].state_dict()

    def work(group):
        model = replicas[group.rank]
        name_of_ours = f"by_hand_{group.rank}"
        AttentionInterface.register(name_of_ours, sequence_models.attention_by_hand(group))
        AttentionMaskInterface.register(name_of_ours, lambda **_: None)
        model.set_attn_implementation(name_of_ours)
        for parameter in model.parameters():
            parameter.register_hook(partial(mean_of, group))
        optimizer = ReferenceAdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(steps):
            batch = sequence_models.batch_of(step)
            labels = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
            tokens = labels.shape[1] // group.size
            here = slice(group.rank * tokens, (group.rank + 1) * tokens)
            count = int((labels != -100).sum())
            total = model(
                input_ids=batch["input_ids"][:, here],
                position_ids=torch.arange(here.start, here.stop).unsqueeze(0),
                labels=labels[:, here],
                shift_labels=labels[:, here].contiguous(),
                num_items_in_batch=1,
                use_cache=False,
            ).loss
            everywhere = group.gather(total, "")
            losses.append((sum(one[0] for one in everywhere) / count).float().item())
            total.backward(torch.tensor(group.size / count))
            optimizer.step()
            optimizer.zero_grad()
        return losses

    replicas = []
    for _ in range(size):
        replica = sequence_models.model_of(name).train()
        replica.load_state_dict(states)
        replicas.append(prepare(replica, torch.bfloat16))
    losses = on_ranks(size, work)[0]
    return losses, replicas[0].state_dict()


def mean_of(group, gradient):
    rows = group._all(gradient)
    total = rows[0].float()
    for one in rows[1:]:
        total = total + one.float()
    return (total / group.size).to(gradient.dtype)


def exact(name):
    """Three steps in bf16 against the same arithmetic in one process."""
    size = dist.get_world_size()
    model = offloaded(name, size, dtype="bf16")
    losses = train(model, size, steps=3)
    found = weights(model)
    expected, state = of_first_rank(lambda: by_hand(name, size, 3))
    return {"losses": losses, "expected": expected, "different": parity_of(found, state)}


def parity_of(found, expected):
    return [name for name, one in found.items() if not torch.equal(one, expected[name].to(one.dtype))]


def in_slices(name):
    """Checkpoints offloaded, MLPs in slices, no logits: as without, in fp32; twice, with the same bits."""
    size = dist.get_world_size()
    plain = train(offloaded(name, size), size, steps=2)
    runs = []
    for _ in range(2):
        model = offloaded(name, size, nvme=os.environ["RANKS_DISK"], offload_activations="nvme")
        model.gradient_checkpointing_enable()
        for block in model.model.layers:
            tiling.tile_sequence(block.mlp, tiles=2)
        tiling.tile_loss_(model)
        runs.append(train(model, size, steps=2))
        del model
        gc.collect()
    return {"plain": plain, "runs": runs}


def dropout(name):
    """Attention with dropout: twice from the same seeds, and with recomputation, the same bits."""
    size, runs = dist.get_world_size(), []
    for checkpointed in (False, False, True):
        model = offloaded(name, size, model={"attention_dropout": 0.2})
        if checkpointed:
            model.gradient_checkpointing_enable()
        torch.manual_seed(7 + dist.get_rank())
        runs.append(train(model, size, steps=2))
        del model
        gc.collect()
    return {"runs": runs, "without": train(offloaded(name, size), size, steps=2)}


def two_sequences():
    """Four ranks, two sequences of two: by Config, and over a mesh whose sequences are not neighbours."""
    answers = {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sp", "dp"))
    for way in ("config", "mesh"):
        model = offloaded("llama", 2 if way == "config" else 1)
        by_mesh = way == "mesh"
        sequences = infinity.sequence_parallel(model, mesh["sp"]) if by_mesh else sequences_of(model)
        optimizer = infinity.SGD(model.parameters(), lr=1.0)  # whose steps show the scale of gradients
        data = [sequence_models.batch_of(number) for number in range(4)]
        sampler = DistributedSampler(
            data, num_replicas=sequences.data_ranks, rank=sequences.data_rank, shuffle=False
        )
        loader = DataLoader(data, batch_size=None, sampler=sampler)
        losses = []
        for batch in infinity.SequenceParallelLoader(loader, model):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        answers[way] = [sequences.data_rank, losses, float(weights(model)["lm_head.weight"].double().sum())]
    model = offloaded("llama", 1)
    optimizer = infinity.SGD(model.parameters(), lr=1.0)  # whose steps show the scale of gradients
    losses = []
    for step in range(2):  # all ranks as two: ranks 2 and 3 repeat what 0 and 1 do
        loss = model(**sequence_models.batch_of(2 * step + dist.get_rank() % 2)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    answers["plain"] = [dist.get_rank() % 2, losses, float(weights(model)["lm_head.weight"].double().sum())]
    return answers


def said_of(work):
    """Return the error of something that fails on every rank."""
    try:
        work()
    except infinity.InfinityError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refused():
    """What cannot be divided, on every rank alike."""
    size = dist.get_world_size()
    answers = {"ranks": said_of(lambda: offloaded("llama", size + 1))}
    answers["heads"] = said_of(
        lambda: offloaded(
            "llama", size, model={"num_attention_heads": 9, "hidden_size": 36, "num_key_value_heads": 9}
        )
    )
    answers["eager"] = said_of(lambda: offloaded("llama", size, model={"attn_implementation": "eager"}))

    def lengths():
        model = offloaded("llama", size)
        model(input_ids=torch.ones(1, 3 + dist.get_rank(), dtype=torch.long))

    answers["lengths"] = said_of(lengths)
    return answers


def deepspeed():
    """The JSON's sequence_parallel_size and its curriculum: batches in parts, of the step's length."""
    from infinity import deepspeed as ds

    size = dist.get_world_size()
    config = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "sequence_parallel_size": size,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "infinity": {"host_memory": HOST},
        "data_efficiency": {
            "enabled": True,
            "data_sampling": {
                "enabled": True,
                "curriculum_learning": {
                    "enabled": True,
                    "curriculum_metrics": {
                        "seqlen": {
                            "min_difficulty": 8,
                            "max_difficulty": 16,
                            "schedule_type": "fixed_linear",
                            "schedule_config": {"total_curriculum_step": 2, "difficulty_step": 4},
                        }
                    },
                },
            },
        },
    }
    torch.manual_seed(0)
    with ds.zero.Init(config_dict_or_path=config):
        model = sequence_models.model_of("llama")
    data = [{name: one[0] for name, one in sequence_models.batch_of(n, rows=1).items()} for n in range(8)]
    engine, _, loader, _ = ds.initialize(model=model, config=config, training_data=data)
    shapes, losses = [], []
    for batch in loader:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        shapes.append(list(batch["input_ids"].shape))
        losses.append(loss.item())
    return {"shapes": shapes, "losses": losses, "counts": [engine.global_steps, engine.global_samples]}


def trainer_of(folder, way, model, data, **more):
    """Return a Trainer with the data in its order. way: who splits batches, "callback" or "loader"."""
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):
        """The Trainer as it is, with the data in its order."""

        def _get_train_sampler(self, *_):
            return SequentialSampler(self.train_dataset)

    class InTurn(InOrder):
        """Each rank is given batches of its own, and the ranks work on them in turn."""

        def get_train_dataloader(self):
            loader = super().get_train_dataloader()
            return infinity.SequenceParallelLoader(loader, self.model, batches="in turn")

    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        gradient_accumulation_steps=2,
        learning_rate=1.0,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
        **{"max_steps": 2, "save_strategy": "no", **more},
    )
    return {"callback": InOrder, "loader": InTurn}[way](
        model=model,
        args=arguments,
        train_dataset=data,
        eval_dataset=data,
        optimizer_cls_and_kwargs=(infinity.SGD, {"lr": 1.0}),
        callbacks=[infinity.huggingface.TrainerCallback()],
    )


def losses_of(trainer):
    return [one["loss"] for one in trainer.state.log_history if "loss" in one]


def trainer():
    """The Trainer: the losses and the weights of a plain loop over the same batches, whole; and resumed in
    the middle of an epoch.
    """
    size, folder = dist.get_world_size(), Path(os.environ["RANKS_DISK"], "trainer")
    data = [{name: one[0] for name, one in sequence_models.batch_of(n, rows=1).items()} for n in range(4)]
    plain = offloaded("llama", 1)
    optimizer = infinity.SGD(plain.parameters(), lr=1.0)
    expected, evaluated = [], []
    for pair in (data[:2], data[2:]):
        count = sum(int((one["labels"][1:] != -100).sum()) for one in pair)
        losses = []
        for one in pair:
            batch = {name: values.unsqueeze(0) for name, values in one.items()}
            loss = plain(**batch, num_items_in_batch=count).loss
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        expected.append(sum(losses))
    with torch.no_grad():
        for one in data:
            batch = {name: values.unsqueeze(0) for name, values in one.items()}
            evaluated.append(plain(**batch).loss.item())
    state = weights(plain)
    answers = {"expected": expected, "evaluated": sum(evaluated) / len(evaluated)}
    for way in ("callback", "loader"):
        model = offloaded("llama", size)
        asked = (
            {"parallelism_config": accelerate.ParallelismConfig(sp_size=size)} if way == "callback" else {}
        )
        ours = trainer_of(folder, way, model, data, save_strategy="steps", save_steps=1, **asked)
        ours.train()
        apart = max(float((one - state[name]).abs().max()) for name, one in weights(model).items())
        answers[way] = {"losses": losses_of(ours), "apart": apart}
        if way == "callback":
            answers[way]["evaluated"] = ours.evaluate()["eval_loss"]
            again = trainer_of(folder, way, offloaded("llama", size, seed=1), data)
            again.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
            answers["resumed"] = {"losses": losses_of(again), "seen": again.state.num_train_epochs}
        else:
            again = trainer_of(folder, way, offloaded("llama", size, seed=1), data)
            first = str(folder / "checkpoint-1")
            answers["skipped"] = said_of(partial(again.train, resume_from_checkpoint=first))
    answers["refused"] = said_of(lambda: late(folder, offloaded("llama", size), data))
    other = accelerate.ParallelismConfig(sp_size=3)
    answers["other"] = said_of(
        lambda: trainer_of(folder, "callback", offloaded("llama", size), data, parallelism_config=other)
    )
    return answers


def forget_accelerate():
    """Accelerate keeps its settings in the process, also for those that are forked from it."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def epoch_of(accelerator, model, optimizer, schedule, loader, *, steps):
    """Train for an epoch, two batches a step, as Accelerate's documentation writes it where the loader is
    prepared. steps: of the schedule, after each of the optimizer's.
    """
    parts = isinstance(loader, infinity.SequenceParallelLoader)
    shown = {"losses": [], "norms": [], "metrics": [], "shapes": []}
    for number, batch in enumerate(loader, 1):
        synced = number % 2 == 0 or number == len(loader)
        with accelerator.accumulate(model) if parts else contextlib.nullcontext():
            loss = model(**batch).loss
            accelerator.backward(loss)
            if synced:
                clip = accelerator.clip_grad_norm_ if parts else torch.nn.utils.clip_grad_norm_
                shown["norms"].append(float(clip(model.parameters(), 0.5)))
            if parts or synced:
                optimizer.step()
                for _ in range(steps):
                    schedule.step()
                optimizer.zero_grad()
        if parts:
            assert accelerator.sync_gradients is synced
            shown["metrics"] += accelerator.gather_for_metrics(loss.detach().repeat(2)).tolist()
        shown["losses"].append(loss.item())
        shown["shapes"].append(list(batch["input_ids"].shape))
    total = float(weights(accelerator.unwrap_model(model))["lm_head.weight"].double().sum())
    return {**shown, "rate": schedule.get_last_lr()[0], "total": total}


def accelerated(kind):
    """A loop of Accelerate with sp_size=2 beside one over the same batches, whole. kind: "kept" by Init, or
    "plain": in memory, where DistributedDataParallel adds gradients.
    """
    forget_accelerate()
    config = infinity.huggingface.ParallelismConfig(sp_size=2)
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True, parallelism_config=config)
    plain, sequences, answers = kind == "plain", dist.get_world_size() // 2, {}
    batches = [sequence_models.batch_of(number, rows=1) for number in range(4 * sequences + 1)]
    data = [{name: one[0] for name, one in batch.items()} for batch in batches]

    def built(size):
        torch.manual_seed(0)
        model = sequence_models.model_of("llama").train() if plain else offloaded("llama", size)
        if plain and size > 1:
            infinity.sequence_parallel(model, size)
        optimizer = (torch.optim.SGD if plain else infinity.SGD)(model.parameters(), lr=1.0)
        return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))

    model, optimizer, schedule = built(2)
    loader = DataLoader(data, batch_size=2)
    loader, optimizer, model, schedule = accelerator.prepare(loader, optimizer, model, schedule)
    answers["wrapped"] = type(model).__name__
    answers["parts"] = epoch_of(accelerator, model, optimizer, schedule, loader, steps=1)
    left = accelerator.skip_first_batches(loader, len(loader) - 1)
    answers["left"] = [list(one["input_ids"].shape) for one in left]
    sampler = BatchSampler(range(len(data)), batch_size=2, drop_last=False)
    sampler = BatchSamplerShard(sampler, sequences, loader.sequences.data_rank)
    if plain:
        loader.sequences.close()  # an engine closes its own
    whole = DataLoader(data, batch_sampler=sampler)
    answers["whole"] = epoch_of(accelerator, *built(1), whole, steps=sequences)
    if not plain:
        answers["other"] = said_of(lambda: accelerator.prepare(offloaded("llama", 1)))
    forget_accelerate()
    return answers


def late(folder, model, data):
    """Give a Trainer its callback when its loader is there already."""
    ours = trainer_of(folder, "callback", model, data)
    for name in ("get_train_dataloader", "get_batch_samples", "evaluation_loop"):
        delattr(ours, name)
    ours.train()


CASES = {
    "trainer": trainer,
    "accelerate": partial(accelerated, "kept"),
    "accelerate in memory": partial(accelerated, "plain"),
    **{f"as one rank {name}": partial(as_one_rank, name) for name in sequence_models.MODELS},
    **{f"exact {name}": partial(exact, name) for name in sequence_models.MODELS},
    "in slices": partial(in_slices, "llama"),
    "dropout": partial(dropout, "llama"),
    "two sequences": two_sequences,
    "refused": refused,
    "deepspeed": deepspeed,
}


def main():
    folder, *names = sys.argv[1:]
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo")
    answers = {}
    for name in names:
        try:
            answers[name] = CASES[name]()
        except Exception as error:  # noqa: BLE001 - the test shows it
            answers[name] = {"error": str(error), "trace": traceback.format_exc()}
        gc.collect()
    dist.barrier()
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main()
