"""Muon and AdamW in memory, in plain steps, and a model for the tests of infinity.Muon."""

import torch
from torch import nn

import infinity
from infinity import reference
from infinity.engine.engine import engine_of_model
from infinity.reference import recipe
from infinity.reference.moments import state_key, step_stored, widened, zero_moments
from infinity.reference.steps import muon_step

MUON = {"lr": 2e-2, "weight_decay": 0.1}
ADAMW = {"lr": 1e-2, "weight_decay": 0.2}
KNOBS = {"momentum": 0.95, "nesterov": True, "ns_coefficients": (3.4445, -4.7750, 2.0315)}
KNOBS |= {"eps": 1e-7, "ns_steps": 5, "adjust_lr_fn": None}
BETAS = {"betas": (0.9, 0.999), "eps": 1e-8}


class PlainMuon:
    """Muon and AdamW in memory, on a prepared model. muons: names of the parameters that are Muon's.
    positions: by name, where the slices of each are in the optimizer that it is compared with, which decides
    how they are rounded; by default Muon's parameters come first.
    """

    def __init__(
        self, model, muons, muon=MUON, adamw=ADAMW, clip=None, *, state_dtype="fp32", positions=None
    ):
        self.model, self.muons, self.clip, self.state_dtype = model, muons, clip, state_dtype
        self.muon, self.adamw = {**KNOBS, **muon}, {**BETAS, **adamw}
        self.count = dict.fromkeys((name for name, _ in model.named_parameters()), 0)
        self.masters = {
            name: recipe._adopt(one, one.dtype) if one.requires_grad else one
            for name, one in model.named_parameters()
        }
        first = sorted(self.masters, key=lambda name: name not in muons)
        self.positions = positions or {name: [number] for number, name in enumerate(first)}
        self.stored = {
            name: [zero_moments(one, state_dtype) for one in self._pieces(name, self.masters[name])]
            for name in self.masters
        }

    def _pieces(self, name, values):
        return [values] if len(self.positions[name]) == 1 else list(values)

    @property
    def state(self):
        """Both moments of each parameter, in fp32."""
        found = {}
        for name, parts in self.stored.items():
            both = zip(*(widened(one, self.state_dtype) for one in parts), strict=True)
            found[name] = [
                torch.cat([one.flatten() for one in of]).view_as(self.masters[name]) for of in both
            ]
        return found

    @torch.no_grad()
    def step(self):
        total = 0.0
        factor = torch.ones(())
        given = {n: one for n, one in self.model.named_parameters() if one.grad is not None}
        if self.clip is not None:
            total = sum(recipe.sum_squares(recipe._stored(one)[0]) for one in given.values())
            norm = torch.tensor(total, dtype=torch.float64).sqrt().float()
            factor = torch.clamp(torch.tensor(self.clip) / (norm + 1e-6), max=1.0)
        for name, one in given.items():
            grad, scale = recipe._stored(one)
            self.count[name] += 1
            master = self.masters[name]
            recipe._take_edits(one, master)
            pieces = (self._pieces(name, values) for values in (master, grad))
            for position, state, *values in zip(
                self.positions[name], self.stored[name], *pieces, strict=True
            ):
                key, rest = state_key(0, position, self.count[name]), (*values, scale * factor, name)
                step_stored(state, key, self.state_dtype, lambda m, v, rest=rest: self._step(m, v, *rest))
            one.copy_(reference.rounded(master, one.dtype))

    def _step(self, m, v, master, grad, factor, name):
        if name in self.muons:
            muon_step(master, m, grad, factor, self.muon)
            return
        make = reference.adamw_step if self.state_dtype == "fp32" else recipe.adamw_small_step
        make(master, m, v, grad, factor, self.count[name], self.adamw)

    def zero_grad(self):
        for one in self.model.parameters():
            one.grad = None


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Net(nn.Module):
    """Matrices that are wide, tall and larger than a tile, each beside a bias; a stack of them; a norm."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(40, 60)
        self.up = nn.Linear(60, 211)
        self.down = nn.Linear(211, 60)
        self.norm = nn.LayerNorm(60)
        self.stack = nn.Parameter(torch.randn(3, 60, 40) / 8)
        self.head = nn.Linear(40, 40, bias=False)

    def forward(self, ids):
        hidden = self.embedding(ids)
        hidden = hidden + self.down(torch.tanh(self.up(hidden)))
        return self.head(torch.einsum("btd,edf->btf", self.norm(hidden), self.stack))


def built(dtype="fp32", **init):
    torch.manual_seed(0)
    if not init:
        return reference.prepare(Net(), DTYPES[dtype])
    with infinity.Init(dtype=dtype, **init):
        return Net()


MUONS = {"up.weight", "down.weight", "stack"}


def groups_of(model, muons=MUONS, muon=MUON, adamw=ADAMW):
    named = dict(model.named_parameters())
    return [
        {"params": [one for name, one in named.items() if name in muons], **muon},
        {"params": [one for name, one in named.items() if name not in muons], "use_muon": False, **adamw},
    ]


def ids_of(number):
    return torch.randint(0, 40, (2, 5), generator=torch.Generator().manual_seed(number))


def backward(model, number):
    loss = model(ids_of(number)).float().square().mean()
    loss.backward()
    return loss.item()


def train(model, optimizer, steps, first=0, accumulate=1, after=lambda _step: None):
    losses = []
    for step in range(first, first + steps):
        losses += [backward(model, 10 * step + micro) for micro in range(accumulate)]
        optimizer.step()
        optimizer.zero_grad()
        after(step)
    return losses


def assert_same(model, optimizer, plain):
    engine, named = engine_of_model(model), dict(model.named_parameters())
    weights, expected = model.state_dict(), plain.model.state_dict()
    assert [name for name in expected if not torch.equal(weights[name], expected[name])] == []
    for name, one in named.items():
        assert torch.equal(engine.parameters.read(one, ["master"])[0], plain.masters[name]), name
        if name in plain.muons:
            assert set(optimizer.state[one]) == {"step", "momentum_buffer"}
            assert torch.equal(optimizer.state[one]["momentum_buffer"], plain.state[name][0]), name
        else:
            assert torch.equal(optimizer.state[one]["exp_avg_sq"], plain.state[name][1]), name
