"""Cases of ranks_run that need no reference: single layers, and what a rank has of its machine."""

import contextlib
import gc
import logging
import os
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

import infinity
import models
import parity
from infinity import deepspeed, reference
from infinity.engine.engine import engine_of_model
from infinity.ranks import waiting


def different_ways():
    """Let the last rank use another layer than the others."""
    with infinity.Init(host_memory="64MiB", timeout_s=20):
        model = torch.nn.ModuleList([torch.nn.Linear(64, 64) for _ in range(4)])
    inputs = torch.ones(1, 64, dtype=torch.bfloat16)
    last = dist.get_rank() == dist.get_world_size() - 1
    for index in (0, 2 if last else 1, 3):
        inputs = model[index](inputs)
    inputs.sum().backward()
    infinity.AdamW(model.parameters()).step()
    return {"went through": True}


def alone():
    """Let rank 0 alone read the weights."""
    with infinity.Init(host_memory="64MiB", timeout_s=3):
        model = torch.nn.Linear(64, 64)
    told = Path(os.environ["RANKS_DISK"], "told")
    if dist.get_rank():
        until = time.monotonic() + 30
        while not told.exists() and time.monotonic() < until:
            time.sleep(0.05)
        return {"slept": True}
    try:
        model.state_dict()
    finally:
        told.touch()
    return {"went through": True}


def _comes(path):
    """Wait until a file is there, for a minute at most."""
    until = time.monotonic() + 60
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.01)


def evaluating():
    """Let rank 0 alone evaluate, until it says that the others do not come; before that it takes long over
    what it does alone.
    """
    told, folder, rank = [], Path(os.environ["RANKS_DISK"]), dist.get_rank()
    begun, said = folder / "rank 0 is at it", folder / "rank 0 has said so"

    def emit(record):
        told.append(record.getMessage())
        if rank == 0:
            said.touch()

    handler = logging.Handler()
    handler.emit = emit
    usual = waiting.TELLS_S, waiting.LOOKS_S
    with infinity.Init(nvme=os.environ["RANKS_DISK"], host_memory="2MiB", timeout_s=60):
        model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(6)])
    engine = engine_of_model(model)
    inputs = torch.ones(1, 512, dtype=torch.bfloat16)
    model(inputs).sum().backward()
    infinity.AdamW(model.parameters()).step()
    engine.lane.drain()
    dist.barrier()
    logging.getLogger("infinity").addHandler(handler)
    waiting.TELLS_S, waiting.LOOKS_S = 0.2, 0.6
    with engine.ranks.together("writing what takes long"):
        if rank == 0:
            begun.touch()
            time.sleep(1.5)  # meanwhile the others look for it
        else:
            _comes(begun)
    quiet = list(told)
    dist.barrier()
    if rank:
        waiting.TELLS_S, waiting.LOOKS_S = usual
        _comes(said)
    with torch.no_grad():
        model(inputs)
    logging.getLogger("infinity").removeHandler(handler)
    waiting.TELLS_S, waiting.LOOKS_S = usual
    return {"quiet": quiet, "told": told}


def rounds():
    """Two ranks evaluate: the tokens of a plain model, and after two rounds nothing moves where all fits."""
    torch.manual_seed(3)
    with infinity.Init(nvme=os.environ["RANKS_DISK"], host_memory="16MiB", timeout_s=60):
        model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(6)])
    torch.manual_seed(3)
    plain = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(6)]).to(torch.bfloat16)
    inputs, moved = torch.ones(1, 256, dtype=torch.bfloat16) / 16, []
    with torch.no_grad():
        for _ in range(4):
            before = infinity.stats(model)
            same = torch.equal(model(inputs), plain(inputs))
            now = infinity.stats(model).since(before)
            moved.append(now.nvme_read_nbytes + sum(now.exchanged_nbytes.values()))
    loss = model(inputs).float().sum()
    loss.backward()
    return {"same": same, "moved": moved, "rounds": infinity.stats(model).rounds, "loss": loss.item()}


def dropped():
    """Drop models in the middle of whatever; return engines, threads and descriptors left after each."""
    left = []
    for cycle in range(8):
        _train_and_drop(update=("forward", "backward")[cycle % 2], ending=cycle // 2)
        for _ in range(200):
            gc.collect()
            if not parity.engines():
                break
            time.sleep(0.05)
        descriptors, since = open_descriptors(), time.monotonic()
        end_s = since + 30
        while time.monotonic() < end_s:  # gloo closes its sockets on threads of its own
            if len(left) > 1 and descriptors <= left[1][2] and threading.active_count() <= left[1][1]:
                break
            if len(left) < 2 and time.monotonic() > since + 0.3:  # with which the others are compared
                break
            time.sleep(0.02)
            before, descriptors = descriptors, open_descriptors()
            since = since if descriptors == before else time.monotonic()
        left.append((len(parity.engines()), threading.active_count(), descriptors))
        dist.barrier()
    return {"left": left}


def open_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def _train_and_drop(update, ending):
    with infinity.Init(nvme=os.environ["RANKS_DISK"], host_memory="2MiB", timeout_s=60):
        model = torch.nn.Sequential(
            torch.nn.Linear(384, 384), torch.nn.LayerNorm(384), torch.nn.Linear(384, 4)
        )
    optimizer = infinity.AdamW(model.parameters(), update=update)
    inputs = torch.ones(8, 384, dtype=torch.bfloat16)
    for _ in range(2):
        model(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if ending == 1:
        model.state_dict()
    elif ending == 2:
        model(inputs).sum().backward()
    elif ending == 3:
        with contextlib.suppress(RuntimeError):
            model(inputs[:, 1:])


def failing():
    """Let a gradient fail to be stored on the last rank, in the middle of a backward."""
    with infinity.Init(host_memory="64MiB", timeout_s=20):
        model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    if dist.get_rank() == dist.get_world_size() - 1:
        lane = engine_of_model(model).lane
        model[2].weight.register_hook(lambda _: lane.fail(OSError("planted"), raised=False))
    optimizer = infinity.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"went through": True}


def gathered_write(*, differently):
    """Change a weight inside gathered(write=True)."""
    with infinity.Init(host_memory="64MiB"):
        model = torch.nn.Linear(100, 50)
    with infinity.gathered(model, write=True), torch.no_grad():
        model.weight.fill_(float(dist.get_rank()) if differently else 3.0)
    return {"values": model.state_dict()["weight"].unique().tolist()}


def in_files():
    """Load a checkpoint whose files the weights stay in, compute with it, and train its head."""
    path = Path(os.environ["RANKS_DISK"], "checkpoint")
    if dist.get_rank() == 0:
        torch.manual_seed(1)
        models.MODELS["llama"]().to(torch.bfloat16).save_pretrained(path, max_shard_size="60kB")
    dist.barrier()
    plain = transformers.AutoModelForCausalLM.from_pretrained(path)
    with infinity.Init(host_memory="64MiB", frozen=True):
        ours = transformers.AutoModelForCausalLM.from_pretrained(path)
    ids = models.batch(0)
    with torch.no_grad():
        same = torch.equal(ours(input_ids=ids).logits, plain(input_ids=ids).logits)
    read = infinity.stats(ours).checkpoint_read_nbytes
    ours.lm_head.requires_grad_(True)
    optimizer = infinity.AdamW(ours.lm_head.parameters(), lr=1e-2)
    losses = models.train(ours, optimizer, 3)
    own = [unit.name for unit in engine_of_model(ours).units if unit.record.in_files is None]
    return {"same": same, "read": read, "numel": plain.num_parameters(), "losses": losses, "own": own}


def changed_by_one():
    """Let rank 1 alone change two layers as modifier_rank; then the same code on every rank, with values of
    its own; then a rank that is not the modifier_rank, one that raises, and nobody that may change any.
    """
    with infinity.Init(host_memory="64MiB", timeout_s=60):
        model = torch.nn.Sequential(torch.nn.Linear(100, 50), torch.nn.Linear(50, 3))
    rank, found = dist.get_rank(), []

    def change(modifier, who, value):
        began = time.perf_counter()
        try:
            with infinity.deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=modifier):
                if rank in who:
                    model[0].weight.data[1:] = value
                    with torch.no_grad():
                        model[1].bias.fill_(value)
            said = ""
        except (infinity.InfinityError, TypeError) as error:
            said = f"{type(error).__name__}: {error}"
        values = model.state_dict()
        seen = [values["0.weight"][1:].unique().tolist(), values["1.bias"].unique().tolist()]
        found.append({"said": said, "values": seen, "prompt": time.perf_counter() - began < 30})

    change(1, [1], 3.0)
    change(0, [0, 1], float(4 + rank))
    change(0, [1], 5.0)
    change(0, [0, 1], 6.0 if rank else None)
    change(None, [1], 7.0)
    return {"found": found}


def changes():
    """Change a weight on rank 1 alone where it must not be changed; return the errors."""
    with infinity.Init(host_memory="64MiB"):
        model = torch.nn.Sequential(torch.nn.Linear(100, 50), torch.nn.Linear(50, 50))
    weight, x = model[0].weight, torch.ones(1, 100, dtype=torch.bfloat16)
    second = dist.get_rank() == 1

    def change(*_args):
        weight.data = weight.data if not second else torch.ones_like(weight)

    def change_in_place(*_args):
        weight.data.fill_(1) if second else None

    def cut():
        weight.data = weight.data[: 2 if second else None]

    def gathered(write, then):
        with infinity.gathered(model, write=write):
            then()

    def forward():
        model[0].register_forward_pre_hook(change_in_place)
        for _ in range(2):
            model(x).sum().backward()

    found = {}
    before = model.state_dict()["0.weight"]
    cases = {"read": lambda: gathered(False, change), "cut": lambda: gathered(True, cut), "forward": forward}
    for name, case in cases.items():
        try:
            case()
        except infinity.InfinityError as error:
            found[name] = f"{type(error).__name__}: {error}"
        if name != "forward":
            found[f"{name} kept"] = torch.equal(before, model.state_dict()["0.weight"])
    return found


def edited_differently():
    """Change a gradient in another way on each rank; then in the same, as the error says."""
    with infinity.Init(host_memory="64MiB"):
        model = torch.nn.Linear(100, 50)
    model(torch.ones(1, 100, dtype=torch.bfloat16)).sum().backward()
    try:
        model.weight.grad.fill_(float(dist.get_rank()))
    except infinity.UnsupportedError as error:
        noise = torch.full((1,), 3.0 + dist.get_rank())
        dist.broadcast(noise, 0)
        before = model.weight.grad.clone().unique().tolist()
        model.weight.grad.mul_(noise.item())
        return {"said": str(error), "values": before + model.weight.grad.unique().tolist()}
    return {}


def fragments():
    """Go backward by the engine on one model and by the loss on another; then look at and set what their
    engines keep of a parameter.
    """
    shown = []
    for user in (False, True):
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "infinity": {"host_memory": "64MiB"},
        }
        torch.manual_seed(0)
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = torch.nn.Sequential(torch.nn.Linear(100, 50), torch.nn.Linear(50, 3))
        engine = deepspeed.initialize(model=model, config=config)[0]
        for number in range(6):
            draw = torch.Generator().manual_seed(10 * number + dist.get_rank())
            loss = engine(torch.randn(2, 100, generator=draw)).square().sum()
            loss.backward() if user else engine.backward(loss)
            if number < 5:
                engine.step()
        weight = model[0].weight
        grad = deepspeed.utils.safe_get_full_grad(weight)
        shown.append({**model.state_dict(), "grad": grad, "norm": grad.norm()})
    keys = ("exp_avg", "exp_avg_sq")
    state, tools = engine.optimizer.state_dict()["state"][0], deepspeed.utils
    whole = [tools.safe_get_full_optimizer_state(weight, key) for key in keys]
    own = [tools.safe_get_local_optimizer_state(weight, key) for key in keys]
    own += [tools.safe_get_local_fp32_param(weight), tools.safe_get_local_grad(weight)]
    tools.safe_set_full_fp32_param(weight, torch.full((50, 100), 0.25))
    tools.safe_set_local_optimizer_state(weight, torch.full_like(own[0], 1 + dist.get_rank()), "exp_avg")
    tools.safe_set_full_grad(weight, torch.full((50, 100), 1 / 3))
    return {
        "same": all(torch.equal(shown[0][name], one) for name, one in shown[1].items()),
        "whole": all(torch.equal(one, state[key]) for one, key in zip(whole, keys, strict=True)),
        "own": [one.tolist() for one in own],
        "of": [one.flatten().tolist() for one in (*whole, shown[1]["0.weight"], grad)],
        "set": tools.safe_get_full_fp32_param(weight).unique().tolist(),
        "moment": tools.safe_get_full_optimizer_state(weight, "exp_avg").flatten().tolist(),
        "grad": tools.safe_get_full_grad(weight).unique().tolist(),
    }


def seeds():
    """Build on every rank from another seed."""
    torch.manual_seed(dist.get_rank())
    with infinity.Init(host_memory="64MiB"):
        model = torch.nn.Linear(100, 50)
    afterwards = torch.rand(1).item()
    torch.manual_seed(dist.get_rank())
    own = torch.rand(1).item()
    torch.manual_seed(0)
    expected = reference.rounded(torch.nn.Linear(100, 50).weight.detach())
    return {
        "as rank 0 draws": torch.equal(model.state_dict()["weight"], expected),
        "its own afterwards": afterwards,
        "expected afterwards": own,
    }


def node():
    """Return what of a machine's memory and disks an engine of one rank has, and one of all ranks."""
    folders = [Path(os.environ["RANKS_DISK"], name) for name in "ab"]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    found = {}
    for name, group, count in (("alone", alone, 1), ("shared", None, 1), ("dealt", None, 2)):
        nvme = [str(folder) for folder in folders[:count]]
        engine = engine_of_model(models.build("llama", nvme=nvme, host_memory="64MiB", process_group=group))
        store = engine.nvme_store
        found[name] = [
            engine.budget.total_nbytes,
            store.engine.depth,
            [Path(one).name for one in store.folders],
        ]
    return found
