"""What ranks do in the tests of how many collectives they need, and of leaving what was foreseen."""

import os
import signal
import time

import torch
import torch.distributed as dist
import transformers

import infinity
import models
import parity
from infinity.engine.engine import engine_of_model
from infinity.ranks.group import open_ranks

LAYERS = 12 if os.environ["WORLD_SIZE"] == "2" else 4
"""Of the model whose collectives are counted: on more ranks each takes longer."""


def many_layers(**settings):
    """Return a Llama of LAYERS layers, and its optimizer."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**models.SIZES, "num_hidden_layers": LAYERS})
    with infinity.Init(host_memory="128MiB", **settings):
        model = transformers.LlamaForCausalLM(config)
    return model, infinity.AdamW(model.parameters(), lr=1e-3)


def step(model, optimizer, number):
    """Train one step on this rank's batch; return its loss."""
    ids = models.batch(1000 * dist.get_rank() + number)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def repeated(**settings):
    """Return what a step exchanges once steps repeat, by kind, and the weights after some."""
    model, optimizer = many_layers(**settings)
    for number in range(3):
        step(model, optimizer, number)
    before = infinity.stats(model)
    step(model, optimizer, 3)
    done = infinity.stats(model).since(before)
    counts = {kind: done.collectives.get(kind, 0) for kind in ("gather", "reduce", "agree")}
    moved = {kind: done.exchanged_nbytes[kind] for kind in ("gather", "reduce")}
    return {"collectives": counts, "bytes": moved}, model.state_dict()


def counted():
    """Train with buckets, and without: return what steps exchange, and whether the weights are the same."""
    buckets, weights = repeated()
    one_by_one, expected = repeated(gather_bucket=0, reduce_bucket=0)
    same = all(torch.equal(one, weights[name]) for name, one in expected.items())
    return {"buckets": buckets, "one by one": one_by_one, "same": same}


def hops():
    """Return how the ranks lie on machines, and the bytes that this one sends to others in steps."""
    model, optimizer = many_layers()
    for number in range(2):
        step(model, optimizer, number)
    ranks, end_s = engine_of_model(model).ranks, time.monotonic() + 60
    while True:  # the next step's first units are counted when they are queued, and sent a little later
        moved = infinity.stats(model).exchanged_nbytes
        expected = (moved["gather"] + moved["reduce"]) * (ranks.grid.machines - 1) // ranks.size
        if moved["between machines"] == expected or time.monotonic() > end_s:
            break
        time.sleep(0.01)
    return {
        "grid": [ranks.grid.machines, ranks.grid.ranks],
        "local_size": ranks.local_size,
        "between": moved["between machines"],
        "by formula": expected,
    }


def layers(number=4, width=64, **settings):
    """Return some layers, of which a forward may leave any out, and their optimizer."""
    torch.manual_seed(0)
    with infinity.Init(host_memory="64MiB", **settings):
        model = torch.nn.ModuleList([torch.nn.Linear(width, width) for _ in range(number)])
    return model, infinity.AdamW(model.parameters())


def through(model, optimizer, order):
    """Train one step through the layers of these numbers."""
    inputs = torch.ones(1, model[0].in_features, dtype=torch.bfloat16)
    for index in order:
        inputs = model[index](inputs)
    inputs.sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def leaving(after=3):
    """Let the last rank use another layer than the others, when the steps have repeated for a while."""
    model, optimizer = layers(timeout_s=20)
    parity.nothing_waits(model)
    last = dist.get_rank() == dist.get_world_size() - 1
    try:
        for number in range(after + 2):
            through(model, optimizer, (0, 2, 3) if last and number == after else (0, 1, 3))
    except infinity.RanksError as error:
        return {"error": str(error)}
    return {"error": "none"}


def leaving_behind():
    """Let the last rank say that it does something else, where the others did not wait for it and went on to
    the next place, as past a unit without elements.
    """
    ranks = open_ranks(None, "cpu", 20)
    channel = ranks.channel(foresees=True)
    mine = torch.zeros(4)
    try:
        if ranks.rank == ranks.size - 1:
            time.sleep(0.2)  # the others are in what is foreseen
            channel.agree_aloud("assemble 2", 3)
        else:
            with channel.foreseen("assemble 1", 3, 2):
                pass
            with channel.foreseen("assemble 3", 4, 2):
                channel.gather(torch.zeros(4 * ranks.size), mine, "assemble 3")
    except infinity.RanksError as error:
        return {"error": str(error)}
    return {"error": "none"}


def leaving_together():
    """Let all ranks leave what was foreseen, as an evaluation, a longer step and state_dict() do."""
    model, optimizer = layers()
    agreed = []
    for order in [(0, 1, 3)] * 4 + [(3, 1, 0)] + [(0, 1, 3)] * 3 + [(0, 1, 2, 3)] * 4 + [(0,)] * 4:
        before = infinity.stats(model)
        through(model, optimizer, order)
        weights = model.state_dict() if len(agreed) == 1 else None
        if len(agreed) == 2:
            with torch.no_grad():
                model[2](torch.ones(1, 64, dtype=torch.bfloat16))
        engine_of_model(model).lane.drain()
        agreed.append(infinity.stats(model).since(before).collectives.get("agree", 0))
    weights = {name: one.tolist() for name, one in model.state_dict().items()}
    return {"agreed": agreed, "weights": weights}


def killed(after=3):
    """Let the last rank be killed when the steps have repeated for a while."""
    model, optimizer = layers(timeout_s=30)
    for number in range(after + 2):
        if number == after and dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(0.3)  # the others are in what is foreseen
            os.kill(os.getpid(), signal.SIGKILL)
        through(model, optimizer, (0, 1, 2, 3))
    return {"went through": True}


BUCKETS = {
    "hops": hops,
    "counted": counted,
    "leaving": leaving,
    "leaving behind": leaving_behind,
    "leaving together": leaving_together,
    "killed": killed,
}
