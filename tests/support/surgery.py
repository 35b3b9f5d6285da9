"""The usual surgery on models, and nn.Module's methods, as user code does it: what the surgery tests call.

Each takes a model of plain torch, or one built in Init.
"""

import contextlib
import copy
import io
import os
import pickle

import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils import _pytree as pytree

import infinity
from parity import build_both, differences, engine_in, nothing_waits, optimizers

N = 8


def build():
    return nn.Sequential(nn.Linear(N, N), nn.LayerNorm(N), nn.Linear(N, N))


def pair(budget, folder):
    """Return (plain, ours) and their optimizers, at a budget; see sweep.BUDGETS."""
    memory = f"{(1 if budget == 'little' else 16) * int(os.environ.get('WORLD_SIZE', '1'))}MiB"
    models = build_both(build, nvme=None if budget == "host" else folder, memory=memory, waits=True)
    if budget == "little":
        engine_in(models[1]).kept.limit_nbytes = 0
        nothing_waits(models[1])
    return models, optimizers(*models)


def differing(do, models_and_optimizers, *, gathered=False):
    """Do it to both models, and train a step; return where answers or states differ."""
    shown = []
    for model, optimizer in zip(*models_and_optimizers, strict=True):
        ours = engine_in(model) is not None
        with infinity.gathered(model, write=True) if ours and gathered else contextlib.nullcontext():
            answer = pytree.tree_map_only(torch.Tensor, torch.clone, do(model))
        states = [{name: one.clone() for name, one in model.state_dict().items()}]
        model(x(9)).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        shown.append([answer, *states, dict(model.state_dict())])
    return differences(*shown)


def on_ranks(folder, every_nth=1):
    """Return what differs on this rank, by name."""
    wrong = []
    for table, gathered in ((EQUAL, False), (GATHERED, True)):
        for name, do in list(table.items())[::every_nth]:
            wrong += [f"{name}: {one}" for one in differing(do, pair("little", folder), gathered=gathered)]
    return wrong


def x(number=0):
    return torch.randn(3, N, generator=torch.Generator().manual_seed(number)).bfloat16()


def seeded(change):
    def run(model):
        torch.default_generator.manual_seed(5)
        with torch.no_grad():
            change(model)

    return run


def forward_hooked(register):
    def run(model):
        seen = []
        handle = register(model, seen)
        model(x()).float().sum().backward()
        handle.remove()
        model.zero_grad()
        return seen

    return run


def loaded(model):
    return model.load_state_dict({name: one + 1 for name, one in model.state_dict().items()})


def frozen_and_back(model):
    shown = [model[0].requires_grad_(requires_grad=False) is model, model[0].weight.requires_grad]
    model(x()).float().sum().backward()
    shown.append([one.grad is None for one in model.parameters()])
    model.zero_grad()
    model.requires_grad_(requires_grad=True)
    return shown


def saved(model):
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.load(file)


def buffered(model):
    model[0].register_buffer("ema", torch.ones(3))
    model[0].register_module("more", nn.Identity())
    model[0].add_module("again", nn.Identity())
    return [name for name, _ in model.named_buffers()] + [name for name, _ in model.named_modules()]


def clipped(clip):
    def run(model):
        model(x()).float().sum().backward()
        clip(model)
        grads = [one.grad.clone() for one in model.parameters()]
        model.zero_grad()
        return grads

    return run


def averaged(model):
    """An average of weights beside the model, from its state_dict, moved by lerp_."""
    average = {name: one.float() for name, one in model.state_dict().items()}
    for name, one in model.state_dict().items():
        average[name].lerp_(one.float() + 1, 0.1)
    return average


def named(model):
    return [
        [name for name, _ in model.named_parameters()],
        [tuple(one.shape) for one in model.parameters()],
        [name for name, _ in model.named_children()],
        len(list(model.modules())),
        len(list(model.children())),
        len(list(model.buffers())),
        model.get_parameter("0.weight") is model[0].weight,
        model.get_submodule("0") is model[0],
        model.extra_repr(),
        str(model),
        [one.numel() * one.element_size() for one in model.parameters()],
    ]


def modes(model):
    return [model.eval().training, model.train().training, model.train(mode=False)[0].training]


def moved(model):
    same = [model.to("cpu"), model.cpu(), model.bfloat16(), model.to(torch.bfloat16), model.to(x())]
    return [one is model for one in same]


def hooks_of_state_dicts(model):
    seen = []
    handles = [
        model.register_state_dict_pre_hook(lambda *_: seen.append("before")),
        model.register_state_dict_post_hook(lambda *_: seen.append("after")),
        model.register_load_state_dict_pre_hook(lambda *_: seen.append("before load")),
        model.register_load_state_dict_post_hook(lambda *_: seen.append("after load")),
    ]
    loaded(model)
    for handle in handles:
        handle.remove()
    return seen


def tied(model):
    model[2].weight = model[0].weight


def replaced(model):
    model[0].weight = nn.Parameter(torch.ones(N, N, dtype=torch.bfloat16))


EQUAL = {
    "weights tied after the fact": tied,
    "a parameter replaced": replaced,
    "state_dict": lambda model: dict(model.state_dict()),
    "a part's state_dict": lambda model: dict(model[2].state_dict(prefix="part.")),
    "torch.save": saved,
    "load_state_dict": loaded,
    "load_state_dict, some": lambda model: model.load_state_dict(
        {"0.bias": torch.ones(N), "new": torch.ones(1)}, strict=False
    ),
    "hooks of state_dicts": hooks_of_state_dicts,
    "names, shapes, children": named,
    "train and eval": modes,
    "to where it is": moved,
    "requires_grad_": frozen_and_back,
    "register_buffer": buffered,
    "apply": lambda model: [model.apply(lambda module: None) is model],
    "zero_grad": lambda model: [model.zero_grad(set_to_none=False), model.zero_grad()],
    "forward hook": forward_hooked(
        lambda model, seen: model[0].register_forward_hook(lambda _m, _i, output: seen.append(output.clone()))
    ),
    "forward pre hook": forward_hooked(
        lambda model, seen: model[2].register_forward_pre_hook(lambda _m, args: seen.append(args[0].clone()))
    ),
    "full backward hook": forward_hooked(
        lambda model, seen: model[2].register_full_backward_hook(
            lambda _m, _i, out: seen.append(out[0].clone())
        )
    ),
    "full backward pre hook": forward_hooked(
        lambda model, seen: model[2].register_full_backward_pre_hook(
            lambda _m, out: seen.append(out[0].clone())
        )
    ),
    "a parameter's hook": forward_hooked(
        lambda model, seen: model[2].weight.register_hook(lambda grad: seen.append(grad.clone()))
    ),
    "clip_grad_value_": clipped(lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01)),
    "a gradient's rows": clipped(lambda model: model[2].weight.grad[0].zero_()),
    "an average beside the model": averaged,
    "accumulation": clipped(lambda model: model(x(1)).float().sum().backward()),
    "a parameter's attribute": lambda model: [setattr(model[0].weight, "note", 1), model[0].weight.note],
    "identity of parameters": lambda model: [model[0].weight in set(model.parameters())],
    "new state of an RNN": lambda model: [next(model.parameters()).new_zeros(2, 3)],
}
"""What is done without any `with`, as to a plain model."""


def vector_of(model):
    return [nn.utils.parameters_to_vector(model.parameters()).clone()]


def halved(model):
    with torch.no_grad():
        nn.utils.vector_to_parameters(
            nn.utils.parameters_to_vector(model.parameters()) / 2, model.parameters()
        )


def copied(model):
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(torch.full_like(one, 0.25))


def through_data(model):
    for one in model.parameters():
        one.data.mul_(0.5)
    model[0].weight.data[1:3] = 0.5
    model[2].weight.data = torch.full((N, N), 0.125, dtype=torch.bfloat16)


def penalty(model):
    loss = model(x()).float().sum() + sum(one.float().square().sum() for one in model.parameters())
    loss.backward()
    grads = [one.grad.clone() for one in model.parameters()]
    model.zero_grad()
    return grads


INITS = {
    name: seeded(lambda model, name=name: getattr(nn.init, name)(model[0].weight))
    for name in (
        "normal_",
        "uniform_",
        "zeros_",
        "ones_",
        "eye_",
        "xavier_uniform_",
        "xavier_normal_",
        "kaiming_uniform_",
        "kaiming_normal_",
        "trunc_normal_",
    )
}
GATHERED = {
    **INITS,
    "reset_parameters": seeded(lambda model: [model[0].reset_parameters(), model[1].reset_parameters()]),
    "apply init": seeded(
        lambda model: model.apply(lambda one: nn.init.normal_(one.weight) if hasattr(one, "weight") else None)
    ),
    "copy_": copied,
    "through data": through_data,
    "vector_to_parameters": halved,
    "parameters_to_vector": vector_of,
    "lerp_": seeded(lambda model: [one.lerp_(torch.ones_like(one), 0.1) for one in model.parameters()]),
    "foreach": seeded(lambda model: torch._foreach_mul_(list(model.parameters()), 0.5)),
    "numpy": lambda model: [one.detach().float().numpy().sum().item() for one in model.parameters()],
    "tolist and item": lambda model: [model[0].weight.tolist(), model[0].bias.sum().item()],
    "deepcopy of a parameter": lambda model: [copy.deepcopy(model[0].weight).detach().clone()],
    "a penalty, with its backward": penalty,
    "norms": lambda model: [torch.stack([one.float().norm() for one in model.parameters()]).detach()],
    "equal to a copy": lambda model: [torch.equal(model[0].weight, model[0].weight.clone())],
}
"""What needs the values: refused elsewhere, with advice that names gathered, and carried out there."""


def inside(model, change):
    with infinity.gathered(model, write=True), torch.no_grad():
        change(model[0].weight)


def built(**fields):
    """Return a function that builds the model with these settings, and trains it."""

    def run(_model):
        with infinity.Init(host_memory="16MiB", **fields):
            model = build()
        model(x().to(model[0].weight.dtype)).float().sum().backward()

    return run


def made_in_init(change):
    def run(_model):
        with infinity.Init(host_memory="16MiB", dtype="fp32"):  # spectral_norm has buffers of that
            model = build()
            change(model)
        optimizer = infinity.AdamW(model.parameters())
        model(x().float()).sum().backward()
        optimizer.step()

    return run


def shared(model):
    assert all(one.share_memory_().is_shared() for one in model.state_dict().values())


def compiled(model):
    model.compile(backend="eager")
    model(x())


CHANGES = {
    "pruning": lambda model: prune.l1_unstructured(model[0], "weight", 0.5),
    "weight_norm": lambda model: parametrizations.weight_norm(model[0]),
    "spectral_norm": lambda model: parametrizations.spectral_norm(model[0]),
}
REFUSED = {
    "deepcopy": (copy.deepcopy, "state_dict", saved),
    "pickle": (pickle.dumps, "state_dict", saved),
    "torch.save": (lambda model: torch.save(model, io.BytesIO()), "state_dict", saved),
    "share_memory": (lambda model: model.share_memory(), "state_dict", shared),
    "share_memory_": (lambda model: model[0].weight.share_memory_(), "state_dict", shared),
    "to_empty": (lambda model: model.to_empty(device="meta"), "load_state_dict", loaded),
    "to_empty where it is": (lambda model: model.to_empty(device="cpu"), "load_state_dict", loaded),
    "half": (lambda model: model.half(), "dtype=", built(dtype="fp16")),
    "float": (lambda model: model.float(), "dtype=", built(dtype="fp32")),
    "double": (lambda model: model.double(), "dtype=", built(dtype="fp32")),
    "type": (lambda model: model.type(torch.float16), "dtype=", built(dtype="fp16")),
    "assign": (
        lambda model: model.load_state_dict(model.state_dict(), assign=True),
        "without assign",
        loaded,
    ),
    "compile": (compiled, "without it", built()),
    **{name: (change, "infinity.Init", made_in_init(change)) for name, change in CHANGES.items()},
    "a smaller value": (
        lambda model: inside(model, lambda weight: setattr(weight, "data", weight.data[:3])),
        "Nothing is written",
        lambda model: inside(model, lambda weight: weight[:3].zero_()),
    ),
}
"""What a model built in Init cannot do: a word of what its error advises, and that, done."""
