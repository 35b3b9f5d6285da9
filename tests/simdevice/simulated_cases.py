"""What is trained on the simulated device: cases by name, and how each trains beside the recipe in memory."""

from __future__ import annotations

import functools
import gc
import itertools
import re
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import peft
import torch
import transformers

import models
import quantised
import simulated_faults
from infinity import AdamW, Init, stats
from infinity.config import settings
from infinity.engine import engine as engine_module
from infinity.engine.engine import engine_of_model
from infinity.errors import DeviceMemoryError
from infinity.reference import ReferenceAdamW, prepare
from infinity.reference import clip_grad_norm_ as reference_clip
from places import disk
from simulated_counts import Uses, plain_uses
from simulator import Simulator

SETTINGS = {"lr": 1e-2, "weight_decay": 0.1}
EAGER = "eager"  # transformers' other implementations of experts choose by the type of the device


@dataclass(frozen=True)
class Case:
    """model: a name of models.MODELS, or "lora" or "experts"; device: device_memory; interrupted: a hook
    raises in one backward; evaluated: parts of the model run before each step; speculates: updates are made
    before they are decided, and clipping is the optimizer's; length: of the sequences;
    by_name: the device is one that has no vendor's part;
    copy_us, kernel_us, event_us: delays in microseconds, with `jitter`, a seed, 0 to twice as long; fault: of
    simulated_faults.
    """

    model: str = "llama"
    memory: str = "128KiB"
    device: str | None = "48KiB"
    update: str = "backward"
    checkpoint: str | None = None
    offload: str | None = None
    accumulate: int = 1
    clip: float | None = None
    interrupted: bool = False
    evaluated: bool = False
    speculates: bool = False
    steps: int = 3
    length: int = 16
    by_name: bool = False
    copy_us: int = 200
    kernel_us: int = 0
    event_us: int = 50
    jitter: int = 0
    fault: str = ""


def experts():
    config = transformers.MixtralConfig(**models.SIZES, num_local_experts=4, num_experts_per_tok=2)
    config._experts_implementation = EAGER
    return transformers.MixtralForCausalLM(config)


def lora(build=models.MODELS["llama"]):
    model = build()
    adapters = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
    return peft.get_peft_model(model, adapters)


@functools.cache
def checkpoint():
    """Save a Llama's weights in bf16, once a process; return the folder, which it keeps."""
    folder = tempfile.TemporaryDirectory(dir=disk())
    state = torch.get_rng_state()
    models.MODELS["llama"]().to(torch.bfloat16).save_pretrained(folder.name)
    torch.set_rng_state(state)
    return folder


def from_files():
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint().name)


@functools.cache
def packed_checkpoint():
    """Save a Llama's weights in fp8, once a process; return the folder, which it keeps."""
    folder = tempfile.TemporaryDirectory(dir=disk())
    state = torch.get_rng_state()
    quantised.fp8_llama(Path(folder.name), 16, **models.SIZES)
    torch.set_rng_state(state)
    return folder


def from_packed_files():
    return transformers.AutoModelForCausalLM.from_pretrained(packed_checkpoint().name)


models.MODELS["lora from packed files"] = lambda: lora(from_packed_files)
models.MODELS["lora from files"] = lambda: lora(from_files)
models.MODELS["experts"] = experts
models.MODELS["lora"] = lora

LLAMA = Case()
CLIPPED = Case(update="forward", accumulate=2, clip=0.5, memory="64MiB")
WIDER = "160KiB"  # of device_memory: a recomputed block, or the experts of a layer, in use at once
OFFLOADED = Case(device=WIDER, checkpoint="non-reentrant", offload="host", memory="512KiB", length=64)
BASES = {
    "llama": LLAMA,
    "llama in the least": replace(LLAMA, device="the least", update="forward"),
    "gpt2 in the least": replace(CLIPPED, model="gpt2", device="the least", clip=1.0),
    "llama in much memory": replace(LLAMA, memory="64MiB", device=None),
    "clipped": CLIPPED,
    "clipped on the device": replace(CLIPPED, device=None, steps=4),
    "interrupted on the device": replace(LLAMA, device=None, interrupted=True, update="forward", steps=4),
    "evaluated on the device": replace(LLAMA, device=None, evaluated=True, memory="64MiB", steps=4),
    "recomputed on the device": replace(LLAMA, model="gpt2", device=None, checkpoint="reentrant", steps=4),
    "experts on the device": replace(LLAMA, model="experts", memory="256KiB", device=None, steps=4),
    "speculated": replace(CLIPPED, accumulate=1, clip=100.0, memory="128KiB", speculates=True),
    "accumulated": replace(CLIPPED, clip=None, memory="128KiB", accumulate=3),
    "reentrant": replace(LLAMA, model="gpt2", device=WIDER, update="forward", checkpoint="reentrant"),
    "non-reentrant": replace(LLAMA, model="gpt2", device=WIDER, checkpoint="non-reentrant"),
    "dropout": replace(LLAMA, model="gpt2-dropout", device=WIDER, update="forward", checkpoint="reentrant"),
    "offloaded": OFFLOADED,
    "offloaded to nvme": replace(OFFLOADED, offload="nvme", checkpoint="reentrant"),
    "lora": replace(LLAMA, model="lora", update="forward"),
    "lora from files": replace(LLAMA, model="lora from files", update="forward"),
    "lora from packed files": replace(LLAMA, model="lora from packed files", update="forward"),
    "lora from packed files in host memory": replace(
        LLAMA, model="lora from packed files", update="forward", memory="384KiB", steps=5
    ),
    "lora on the device": replace(LLAMA, model="lora", device=None, steps=4),
    "experts": replace(LLAMA, model="experts", memory="256KiB", device=WIDER),
    "interrupted": replace(LLAMA, interrupted=True, update="forward", memory="64MiB"),
    "evaluated": replace(LLAMA, evaluated=True),
    "by name": replace(CLIPPED, by_name=True, device=None, steps=2),
}
DELAYS = {
    "at once": {"copy_us": 0, "kernel_us": 0},
    "0.2 ms": {"copy_us": 200, "kernel_us": 50},
    "jitter": {"copy_us": 1000, "kernel_us": 100, "jitter": 7},
    "20 ms": {"copy_us": 20_000, "kernel_us": 200, "steps": 2},
}
UNHURRIED = {"copy_us": 0, "kernel_us": 0, "event_us": 0, "jitter": 0}
"""What cases have in common that differ in delays alone."""
CASES = {
    f"{name}, {delay}": replace(case, **DELAYS[delay]) for name, case in BASES.items() for delay in DELAYS
}
CASES |= {
    f"fault: {name}": replace(BASES[fault.case], **fault.settings, fault=name)
    for name, fault in simulated_faults.FAULTS.items()
}


def optimizer_of(case, model):
    """Return ours, for a model built in Init."""
    trained = [one for one in model.parameters() if one.requires_grad]
    ahead = {"max_norm": case.clip, "speculate": True} if case.speculates else {}
    return AdamW(trained, update=case.update, **SETTINGS, **ahead)


def ready(model, checkpoint):
    if checkpoint is None:
        return model.train()
    models.checkpointed(model, checkpoint == "reentrant")
    return model


def interrupt(model, place):
    """Let a backward end in the middle, by an exception of a hook."""

    def refuse(grad):
        raise ValueError("planted")

    def watch(module, inputs, made):
        if made.requires_grad:
            made.register_hook(refuse)

    handle = model.model.layers[1].mlp.register_forward_hook(watch)
    ids = models.batch(7).to(place)
    try:
        model(input_ids=ids, labels=ids).loss.backward()
        raise AssertionError("the backward was to raise")
    except ValueError as error:
        if str(error) != "planted":
            raise
    # What is left of it goes when that backward's thread is done with it: at the latest before its next one.
    torch.ones(1, device=place, requires_grad=True).sum().backward()
    handle.remove()
    torch.ones(
        1, device=place, requires_grad=True
    ).sum().backward()  # autograd's thread has let go of the other
    for parameter in model.parameters():
        parameter.grad = None


def backward(case, model, number, place):
    ids = models.batch(number, length=case.length).to(place)
    if case.evaluated:
        with torch.no_grad():
            model.model.layers[0].mlp(model.model.embed_tokens(ids))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item()


def train(case, model, optimizer, place, after_step=lambda: None):
    """Return the losses."""
    losses = []
    for step in range(case.steps):
        if case.interrupted and step == 1:
            interrupt(model, place)
        losses += [backward(case, model, 100 * step + micro, place) for micro in range(case.accumulate)]
        if case.clip is not None and isinstance(optimizer, ReferenceAdamW):
            reference_clip(optimizer, case.clip)
        elif case.clip is not None and not case.speculates:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad()
        after_step()
    return losses


@functools.cache
def expected(case):
    """Return the losses and the weights of the recipe in memory."""
    torch.manual_seed(0)
    model = ready(prepare(models.MODELS[case.model](), torch.bfloat16), case.checkpoint)
    optimizer = ReferenceAdamW([one for one in model.parameters() if one.requires_grad], **SETTINGS)
    return train(case, model, optimizer, "cpu"), model.state_dict()


def opened(case, folder, device_memory, place="sim", **more):
    more |= {"offload_activations": case.offload} if case.offload else {}
    torch.manual_seed(0)
    with Init(nvme=folder, host_memory=case.memory, device=place, device_memory=device_memory, **more):
        return models.MODELS[case.model]()


def least(case, place="sim"):
    """Return the smallest device_memory that works, as the error for a smaller one names it."""
    try:
        with tempfile.TemporaryDirectory(prefix="infinity-", dir=disk()) as folder:
            opened(case, folder, 1024, place)
    except DeviceMemoryError as error:
        return int(re.search(r"needs (\d+) bytes", str(error))[1])
    raise AssertionError("1 KiB of device_memory was not refused")


def found(case, simulator, plain_pass):
    """Return the losses and the weights on the simulated device, and what that held."""
    device_memory = least(case) if case.device == "the least" else case.device
    gc.collect()
    before = simulator.counts()["allocated"]
    simulator.restart()
    with tempfile.TemporaryDirectory(prefix="infinity-", dir=disk()) as folder:
        model = opened(case, folder, device_memory)
        model.to("sim")
        ready(model, case.checkpoint)
        optimizer = optimizer_of(case, model)
        room = engine_of_model(model).device.room
        before += sum(room.nbytes(one.nbytes) for one in model.buffers())
        uses = Uses(model, lambda: simulator.counts()["allocated"] - before - room.ledger.held_nbytes)
        seen = [stats(model)]
        losses = train(case, model, optimizer, "sim", lambda: seen.append(stats(model)))
        if case.speculates and not engine_of_model(model).speculation.counts["confirmed"]:
            raise AssertionError("no update was made before it was decided")
        if case.model == "experts":  # which of them a later batch uses depends on the weights by then
            del uses.passes[1:]
        held = {
            "most": simulator.counts()["peak"] - before,
            "device_memory": stats(model).device_budget_nbytes,
            "uncounted": uses.beside(plain_pass),
            "uploaded": [one.since(other).uploaded_nbytes for other, one in itertools.pairwise(seen)],
        }
        return losses, {key: value.cpu() for key, value in model.state_dict().items()}, held


@functools.cache
def plain(case: Case, simulator: Simulator) -> tuple[int, list[int]]:
    """Return what a first backward takes on the device in plain PyTorch, see plain_uses."""
    torch.manual_seed(0)
    model = ready(prepare(models.MODELS[case.model](), torch.bfloat16), case.checkpoint)
    return plain_uses(model, lambda model: backward(case, model, 0, "sim"), simulator)


def run(case: Case, simulator: Simulator) -> dict[str, object]:
    """Train a case, here and in memory, and say how they differ, and what the device held."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        losses, weights = expected(replace(case, **UNHURRIED))
        activations, plain_pass = plain(replace(case, **UNHURRIED, steps=1), simulator)
        gc.collect()
        simulator.delay(case.copy_us, case.kernel_us, case.jitter, case.event_us)
        simulator.restart()
        if case.by_name:
            settings.ACCELERATORS["sim"] = settings.ACCELERATORS["xpu"]
        if case.fault:
            simulated_faults.FAULTS[case.fault].plant(engine_module)
        here, values, held = found(case, simulator, plain_pass)
    torch.accelerator.synchronize()
    different = [key for key, value in weights.items() if not torch.equal(value, values[key])]
    return {"losses": here == losses, "different": different, "activations": activations, **held}
