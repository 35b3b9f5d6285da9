"""What ranks that send weights and gradients in few bits do in the tests: cases by name, a JSON answer each.

    coded_run.py FOLDER CASE [CASE ...]  # launched by launches.forked

Rank R writes FOLDER/R.json. The reference is one process, rank 0, that has the whole model, takes every
rank's batch in turn, and codes weights and gradients with infinity.reference.codes: once for all cases that
differ in where what lies.
"""

import functools
import os
import sys
import time
import traceback
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import infinity
import models
import parity
from answers import answer_all
from infinity.engine.engine import engine_of_model
from infinity.ranks.machines import LOCAL_SIZE
from infinity.reference import ReferenceAdamW, codes, prepare
from mesh_run import VOCABULARY, MeshModel, local, parallel
from ranks_chosen import Chooser

models.SIZES["num_hidden_layers"] = models.GPT2["n_layer"] = 2  # of 20 units and more
WIDE = {**models.SIZES, "vocab_size": 301, "hidden_size": 96, "intermediate_size": 168}
BITS = {None: 0, "int8": 8, "int4": 4}
BOTH = {"quantized_weights": "int8", "quantized_gradients": "int8"}


class Layers(nn.Module):
    """Parameters of odd sizes, in one unit and in several, and a loss of each batch."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(77, 301), nn.LayerNorm(301)
        self.last = nn.Linear(301, 33, bias=False)

    def forward(self, inputs):
        return self.last(torch.relu(self.norm(self.first(inputs))))


def loss_of(model, seed):
    """Return the loss of one rank's batch."""
    if isinstance(model, Chooser):
        return model(torch.randint(64, (3,), generator=torch.Generator().manual_seed(seed)))
    if not isinstance(model, Layers):
        ids = models.batch(seed)
        return model(input_ids=ids, labels=ids).loss
    random = torch.Generator().manual_seed(seed)
    inputs, wanted = torch.randn(4, 77, generator=random), torch.randn(4, 33, generator=random)
    return (model(inputs.bfloat16()).float() - wanted).square().mean()


MODELS = {
    "layers": Layers,
    "chosen": Chooser,
    "chosen, checkpointed": partial(Chooser, checkpointed=True),
    "routed": partial(models.of_experts, "mixtral", "eager"),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**WIDE)),
    "gpt2": models.MODELS["gpt2"],
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**WIDE, num_local_experts=4, num_experts_per_tok=2)
    ),
}


def in_one_process(
    name, weights, gradients, *, steps, micro=1, once=False, frozen=None, feedback=False, **options
):
    """Train with what ranks send coded as they code it; return the losses of each rank and the weights. once:
    ranks sum their own gradients of a step first. feedback: what codes leave out is added to what comes next.
    """
    torch.manual_seed(0)
    model, ranks = prepare(MODELS[name]()), dist.get_world_size()
    machines = ranks // int(os.environ.get(LOCAL_SIZE, ranks))
    for key, one in model.named_parameters():
        one.requires_grad_(frozen is None or frozen not in key)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = ReferenceAdamW(trained, lr=1e-2, weight_decay=0.1, **options)
    losses = [[] for _ in range(ranks)]
    kept = ranks + machines * (1 < machines < ranks)
    errors = [[torch.zeros(one.shape) for _ in range(kept)] if feedback else () for one in trained]
    for step in range(steps):
        exact = [one.data for one in model.parameters()]
        for one in model.parameters() if weights else ():
            one.data = codes.as_sent(one.data, 8).to(one.dtype)
        of_backwards = []
        for number in range(micro):
            rows = []
            for rank in range(ranks):
                loss = loss_of(model, 1000 * rank + 10 * step + number)
                loss.backward()
                rows.append([one.grad for one in trained])
                losses[rank].append(loss.item())
                model.zero_grad()
            of_backwards.append(rows)
        means = means_of(of_backwards, BITS[gradients], machines, errors, once=once)
        for one, data in zip(model.parameters(), exact, strict=True):
            one.data = data
        for one, *of_one in zip(trained, *means, strict=True):
            store(one, [grad for grad in of_one if grad is not None])
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()


@functools.cache
def reference_of(in_one_process, *args, **options):
    """Return what a training in one process comes to, on all ranks: the losses of this rank, and the rest."""
    losses, *rest = of_rank_0(lambda: in_one_process(*args, **options))
    return losses[dist.get_rank()], *rest


def of_rank_0(work):
    """Return on all ranks what `work()` returns on rank 0: if each did it, they would share the cores.

    Raises: AssertionError on all where it fails.
    """
    given = [None, "another rank"]
    if dist.get_rank() == 0:
        try:
            given = [work(), None]
        except Exception:  # noqa: BLE001 - raised on all
            given = [None, traceback.format_exc()]
    dist.broadcast_object_list(given)
    assert given[1] is None, given[1]
    return given[0]


def means_of(of_backwards, bits, machines, errors, *, once):
    """Return the means of all parameters' gradients, of each backward, or of the sums of all: of_backwards
    has, by rank, a gradient of each parameter; errors: of each parameter, by rank.
    """
    if once:
        by_rank = zip(*of_backwards, strict=True)
        of_backwards = [[[summed(grads) for grads in zip(*of_rank, strict=True)] for of_rank in by_rank]]
    by_parameter = [zip(*rows, strict=True) for rows in of_backwards]
    return [
        [mean(list(of_one), bits, machines, kept) for of_one, kept in zip(some, errors, strict=True)]
        for some in by_parameter
    ]


def store(parameter, means):
    """Let the sum of these, the first in its own type, be a parameter's gradient, as backwards add it up."""
    parameter.grad = means[0].to(parameter.dtype) if means else None
    if means and means[0].dtype != parameter.dtype:
        infinity.reference.recipe._store(parameter, means[0], torch.ones(()))
    for grad in means[1:]:
        value, factor = infinity.reference.recipe._stored(parameter)
        infinity.reference.recipe._store(parameter, value.float() + grad.float(), factor)


def summed(grads):
    """Return the sum of a parameter's gradients of several backwards, in fp32."""
    return sum((grad.float() for grad in grads[1:]), grads[0].float())


def mean(rows, bits, machines, errors=()):
    """Return the mean of the gradients of all ranks, some of which may have none; None where none has."""
    some = next((row for row in rows if row is not None), None)
    if some is None:
        return None
    rows = [torch.zeros_like(some) if row is None else row for row in rows]
    if bits:
        return codes.mean_over_ranks(rows, bits, machines, errors)
    near = len(rows) // machines
    firsts = range(0, len(rows), near)
    sums = [sum(rows[first + 1 : first + near], rows[first].float()) for first in firsts]
    if machines > 1:
        sums = [one.to(rows[0].dtype) for one in sums]
    return (sum(sums[1:], sums[0].float()) / len(rows)).to(rows[0].dtype)


def build(name, frozen=None, checkpoint=None, **fields):
    torch.manual_seed(0)
    with infinity.Init(**{"host_memory": "64MiB", "shared_memory": False, **fields}):
        model = MODELS[name]()
    if checkpoint is not None:
        models.checkpointed(model, checkpoint == "reentrant")
    for key, one in model.named_parameters():
        one.requires_grad_(frozen is None or frozen not in key)
    return model


def train(model, optimizer, *, steps, micro=1, once=False, first=0):
    """Train on this rank's batches; return the losses. once: reduce in the last backward of a step alone."""
    losses = []
    for step in range(first, first + steps):
        for number in range(micro):
            with infinity.no_sync(model) if once and number < micro - 1 else nullcontext():
                loss = loss_of(model, 1000 * dist.get_rank() + 10 * step + number)
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def compare(name, *, steps=3, micro=1, once=False, frozen=None, options=None, ratios=False, **fields):
    """Train, and compare with the reference; ratios: and the bytes with those of ranks that code nothing."""
    coded = {key: fields.get(key) for key in ("quantized_weights", "quantized_gradients")}
    expected_losses, expected = reference_of(
        in_one_process,
        name,
        *coded.values(),
        steps=steps,
        micro=micro,
        once=once,
        frozen=frozen,
        feedback=fields.get("error_feedback", False),
        **{key: one for key, one in (options or {}).items() if key == "max_norm"},
    )
    options, shown = {"lr": 1e-2, "weight_decay": 0.1, **(options or {})}, []
    plain = {**fields, **dict.fromkeys(coded), "error_feedback": False}
    for more in (fields, plain) if ratios else (fields,):
        model = build(name, frozen, **more)
        trained = [one for one in model.parameters() if one.requires_grad]
        optimizer = infinity.AdamW(trained, **options)
        losses = train(model, optimizer, steps=steps, micro=micro, once=once)
        state = model.state_dict()
        engine_of_model(model).lane.drain()
        shown.append((losses, state, infinity.stats(model).exchanged_nbytes))
    (losses, state, moved), all_of = shown[0], shown[-1][2] if ratios else {}
    different = [key for key, one in expected.items() if not torch.equal(one, state[key])]
    return {
        "different": [*different, *(["losses"] if losses != expected_losses else [])],
        "ratios": {kind: moved[kind] / nbytes for kind, nbytes in all_of.items() if nbytes},
    }


def gathered():
    """Read and edit the masters' halves while ranks compute with what they are sent as."""
    model = build("layers", **BOTH)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, steps=2)
    before, wrong = model.state_dict(), []
    with infinity.gathered(model):
        wrong += [f"read {key}" for key, one in model.named_parameters() if not torch.equal(one, before[key])]
    masters = {key: optimizer_master(model, one) for key, one in model.named_parameters()}
    with infinity.gathered(model, write=True), torch.no_grad():
        model.last.weight[3, 5] = 7.0
    for key, one in model.named_parameters():
        expected = masters[key]
        if key == "last.weight":
            expected[3, 5] = 7.0
        wrong += [] if torch.equal(expected, optimizer_master(model, one)) else [f"master of {key}"]
    seen = []
    hook = model.last.register_forward_pre_hook(lambda module, _: seen.append(module.weight.detach().clone()))
    train(model, optimizer, steps=1, first=2)
    hook.remove()
    expected = dict(before)["last.weight"].clone()
    expected[3, 5] = 7.0
    if not torch.equal(seen[0], codes.as_sent(expected, 8).bfloat16()):
        wrong.append("what computes")
    partition, units = engine_of_model(model).partition, engine_of_model(model).units
    wrong += [
        f"{unit.name} is fetched to where it computes" for unit in units if partition.target_of(unit) is unit
    ]
    return {"different": wrong}


def in_files():
    """Compute with weights that stay in a checkpoint's files, and send them coded."""
    path = Path(os.environ["RANKS_DISK"], "checkpoint")
    if dist.get_rank() == 0:
        torch.manual_seed(1)
        MODELS["llama"]().to(torch.bfloat16).save_pretrained(path, max_shard_size="60kB")
    dist.barrier()
    plain = transformers.AutoModelForCausalLM.from_pretrained(path)
    with infinity.Init(host_memory="64MiB", frozen=True, **BOTH):
        ours = transformers.AutoModelForCausalLM.from_pretrained(path)
    for one in plain.parameters():
        one.data = codes.as_sent(one.data, 8).to(one.dtype)
    ids = models.batch(0)
    with torch.no_grad():
        same = all(torch.equal(ours(input_ids=ids).logits, plain(input_ids=ids).logits) for _ in range(2))
    read = infinity.stats(ours).checkpoint_read_nbytes
    return {"different": ([] if same else ["logits"]) + ([] if read else ["nothing was read in place"])}


def optimizer_master(model, parameter):
    return engine_of_model(model).parameters.read(parameter, ["master"])[0]


def overflows(**fields):
    """Let one rank's gradients overflow in fp16; return the scales of all steps."""
    model = build("llama", dtype="fp16", **{**BOTH, **fields})
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    scaler, scales = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2), []
    for step in range(4):
        loss = loss_of(model, 1000 * dist.get_rank() + step)
        if step == 1 and dist.get_rank() == 1:
            loss = loss * 1e6
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return {"scales": scales}


def again(name, **fields):
    """Train twice, with buckets, and unit by unit; return whether the bits are the same."""
    states = []
    for more in ({}, {"gather_bucket": 0, "reduce_bucket": 0}):
        model = build(name, **fields, **more)
        if more:
            parity.nothing_waits(model)
        train(model, infinity.AdamW(model.parameters(), lr=1e-2, max_norm=0.5), steps=3)
        states.append(model.state_dict())
    return {"different": [key for key, one in states[0].items() if not torch.equal(one, states[1][key])]}


def refused(**fields):
    """Return the error of ranks with these settings, of which `other` are rank 1's."""
    other = fields.pop("other", fields)
    try:
        build("layers", **(other if dist.get_rank() == 1 else fields))
    except infinity.ConfigError as error:
        return {"error": str(error)}
    return {"error": "none"}


def hops():
    """Return the bytes that go to other machines, of those with coded payloads and of those without."""
    moved = []
    for fields in (BOTH, {"quantized_gradients": "int4"}, {}):
        model = build("llama", **fields)
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
        train(model, optimizer, steps=2)
        stats = sent_by_now(model)
        moved.append({kind: stats[kind] for kind in ("gather", "reduce", "between machines")})
        del model, optimizer
    return {"moved": moved}


def sent_by_now(model):
    """Return what was exchanged, when what was queued has been sent: units of the next step are counted when
    they are queued.
    """
    grid, end_s = engine_of_model(model).ranks.grid, time.monotonic() + 60
    while True:
        stats = infinity.stats(model).exchanged_nbytes
        expected = (stats["gather"] + stats["reduce"]) * (grid.machines - 1) // grid.size
        if stats["between machines"] == expected or time.monotonic() > end_s:
            return stats
        time.sleep(0.01)


def on_mesh(**fields):
    """Train a tensor-parallel model on a mesh, and return its losses, and the weights that this rank has."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    with infinity.Init(host_memory="64MiB", mesh=mesh, data="dp", **fields):
        model = parallel(MeshModel(), mesh["tp"], replicated=True)
    optimizer, losses = infinity.AdamW(model.parameters(), lr=1e-2), []
    for step in range(3):
        drawn = torch.Generator().manual_seed(step + 1000 * mesh["dp"].get_local_rank())
        ids = torch.randint(VOCABULARY, (2, 7), generator=drawn)
        loss = nn.functional.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    copies = {key: local(one) for key, one in model.state_dict().items() if not is_sharded(one)}
    rows = {key: [torch.empty_like(one) for _ in range(mesh["tp"].size())] for key, one in copies.items()}
    for key, one in copies.items():
        dist.all_gather(rows[key], one, group=mesh["tp"].get_group())
    different = [
        key for key, of_key in rows.items() if not all(torch.equal(of_key[0], one) for one in of_key)
    ]
    return losses, different, len(copies)


def is_sharded(one):
    return isinstance(one, DTensor) and not all(place.is_replicate() for place in one.placements)


def fed_durably():
    """Commit a run that keeps errors of codes, resume it, and compare with one that never stopped."""
    shown = []
    for stops in (False, True):
        folder = Path(os.environ["RANKS_DISK"], f"fed {stops}")
        folder.mkdir(exist_ok=True)
        losses = []
        for first, last in ((0, 3), (3, 6)) if stops else ((0, 6),):
            model = build("layers", nvme=str(folder), durable=True, **FED)
            optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
            begun = infinity.resume(model, optimizer)
            losses += train(model, optimizer, steps=last - first, first=first)
            infinity.commit(model)
            state = model.state_dict()
            engine_of_model(model).close()
            del model, optimizer
        shown.append((begun == first, losses, state))
    (_, losses, state), (resumes, resumed_losses, resumed) = shown
    different = [key for key, one in state.items() if not torch.equal(one, resumed[key])]
    different += [] if resumes else ["the step"]
    return {"different": different + (["losses"] if losses != resumed_losses else [])}


def fed_loaded():
    """Load a checkpoint into a model that has gone on since, and into a new one: return what differs."""
    folder, shown = Path(os.environ["RANKS_DISK"], "fed checkpoint"), []
    model = build("layers", **FED)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, steps=2)
    infinity.save(model, optimizer, folder)
    train(model, optimizer, steps=2, first=2)
    for is_new in (False, True):
        if is_new:
            model = build("layers", **FED)
            optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
        infinity.load(model, optimizer, folder)
        losses = train(model, optimizer, steps=3, first=2)
        shown.append({"losses": torch.tensor(losses), **model.state_dict()})
    gone_on, new = shown
    return {"different": [key for key, one in new.items() if not torch.equal(one, gone_on[key])]}


def mesh():
    """Train on a mesh, with codes and without: return what ranks have different copies of, and losses."""
    losses, different, copies = on_mesh(**BOTH)
    again, _, _ = on_mesh(**BOTH)
    plain, _, _ = on_mesh()
    return {
        "different": different + [one for one, two in zip(losses, again, strict=True) if one != two],
        "copies": copies,
        "apart": max(abs(one / two - 1) for one, two in zip(losses, plain, strict=True)),
        "same": losses == plain,
    }


NVME = {"nvme": os.environ.get("RANKS_DISK"), "host_memory": int(os.environ["WORLD_SIZE"]) << 20}
BACKWARD = {"options": {"update": "backward"}}
FED = {"quantized_gradients": "int4", "error_feedback": True}
CASES = {
    "layers": lambda: compare("layers", **BOTH),
    "layers, int4": lambda: compare("layers", ratios=True, **{**BOTH, "quantized_gradients": "int4"}),
    "gathered": gathered,
    "llama": lambda: compare("llama", ratios=True, **BOTH),
    "llama, int4": lambda: compare("llama", ratios=True, quantized_gradients="int4"),
    "llama, weights": lambda: compare("llama", quantized_weights="int8"),
    "gpt2, backward": lambda: compare("gpt2", **BOTH, **BACKWARD),
    "nvme": lambda: compare("llama", ratios=True, **BOTH, **NVME),
    "nvme, backward": lambda: compare("gpt2", **BOTH, **BACKWARD, **NVME),
    "nvme, accumulated": lambda: compare("llama", micro=2, options={"max_norm": 0.5}, **BOTH, **NVME),
    "accumulated": lambda: compare("llama", micro=2, **BOTH),
    "max_norm": lambda: compare("llama", options={"max_norm": 0.5}, **BOTH),
    "frozen": lambda: compare("llama", frozen="mlp", **BOTH),
    "blocks": lambda: compare("llama", units="block", **BOTH),
    "mixtral": lambda: compare("mixtral", **BOTH),
    "chosen": lambda: compare("chosen", **BOTH),
    "chosen, checkpointed": lambda: compare("chosen, checkpointed", **BOTH),
    "chosen, nvme": lambda: compare("chosen", **BOTH, **NVME),
    "routed": lambda: compare("routed", **BOTH),
    "routed, nvme": lambda: compare("routed", **BOTH, **NVME),
    "experts divided": lambda: again("routed", expert_parallel=2, **BOTH),
    "checkpointed": lambda: compare("llama", checkpoint="not", **BOTH, **BACKWARD),
    "reentrant": lambda: compare("llama", checkpoint="reentrant", **BOTH),
    "mesh": mesh,
    "stage 2": lambda: compare("llama", stage=2, quantized_gradients="int8"),
    "stage 1": lambda: compare("llama", micro=2, once=True, stage=1, quantized_gradients="int4"),
    "no_sync": lambda: compare("llama", micro=3, once=True, **BOTH),
    "overflow": overflows,
    "overflow, int4": lambda: overflows(quantized_gradients="int4"),
    "again": lambda: again("llama", **BOTH),
    "again, nvme": lambda: again("llama", **BOTH, **NVME),
    "in files": in_files,
    "hops": hops,
    "feedback": lambda: compare("layers", quantized_weights="int8", **FED),
    "feedback, llama": lambda: compare("llama", ratios=True, **FED),
    "feedback, nvme": lambda: compare("llama", micro=2, options={"max_norm": 0.5}, **FED, **NVME),
    "feedback, backward": lambda: compare("gpt2", **FED, **BACKWARD, **NVME),
    "feedback, no_sync": lambda: compare("llama", micro=3, once=True, **FED),
    "feedback, stage 1": lambda: compare("llama", micro=2, once=True, stage=1, **FED),
    "feedback, routed": lambda: again("routed", **FED),  # those that no rank uses keep their errors
    "feedback, frozen": lambda: compare("llama", frozen="mlp", units="block", **FED),
    "feedback, again": lambda: again("llama", **FED),
    "feedback, int8 state": lambda: again("llama", state_dtype="int8", **FED),
    "feedback, durable": fed_durably,
    "feedback, loaded": fed_loaded,
    "other weights": lambda: refused(quantized_weights="int8", other={}),
    "other gradients": partial(refused, quantized_gradients="int8", other={"quantized_gradients": "int4"}),
}


def cannot_go_on(answer):
    return "trace" in answer and not answer["error"].startswith("AssertionError")


def main(folder, cases, known):
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    dist.init_process_group("gloo")
    answer_all(folder, cases, lambda case: known[case](), ends=cannot_go_on)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:], CASES)
