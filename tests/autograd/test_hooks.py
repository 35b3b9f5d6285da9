"""Trusted: plain torch with the reference recipe. Faked: nothing; every unit is released between uses."""

import dataclasses
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from covers import matrix
from parity import Wrap, build_both, compare, halves, resident, tokens, total

pytestmark = pytest.mark.usefixtures("deterministic")


@dataclasses.dataclass
class Pair:
    first: torch.Tensor
    second: torch.Tensor


class SavesItsWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


class KeepsItsWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad @ ctx.weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


class Recomputes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        ctx.save_for_backward(*inputs)
        return Recomputes.compute(*inputs)

    @staticmethod
    def compute(x, first, second):
        return F.linear(F.linear(x, first).tanh(), second)

    @staticmethod
    def backward(ctx, grad):
        inputs = [one.detach().requires_grad_() for one in ctx.saved_tensors]
        with torch.enable_grad():
            y = Recomputes.compute(*inputs)
        grads = torch.autograd.grad(y, inputs, grad)
        return tuple(one + 0 * two.sum() for one, two in zip(grads, ctx.saved_tensors, strict=True))


def weight_norm(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return torch.nn.utils.weight_norm(module)


def batch_norm(module):
    """Give its buffers the dtype of its parameters, as torch wants them; Init leaves them as they are."""
    for name, buffer in module.named_buffers():
        setattr(module, name, buffer.bfloat16() if buffer.is_floating_point() else buffer)
    return module


def tied():
    model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 32, bias=False))
    model[2].weight = model[0].weight
    return model


def shared():
    one = nn.Linear(16, 16)
    return nn.Sequential(one, nn.Tanh(), nn.Linear(16, 16), one)


def lists():
    return Wrap(
        lambda self, x: (x @ self.list[0]) * self.dict["scale"] + self.list[1],
        list=nn.ParameterList([nn.Parameter(torch.randn(16, 16)), nn.Parameter(torch.randn(16))]),
        dict=nn.ParameterDict({"scale": nn.Parameter(torch.randn(16))}),
    )


def encoder():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.1)
    return nn.TransformerEncoder(layer, 2)


def linear():
    return nn.Linear(16, 16)


def partly_frozen():
    """Two modules of a frozen and a trained parameter each, which the backward recomputes."""

    def scaled(self, x):
        return F.linear(x * self.p, self.q)

    def recomputed(self, x):
        return checkpoint(self.b, checkpoint(self.a, x, use_reentrant=False), use_reentrant=False)

    def part():
        frozen = nn.Parameter(torch.randn(16), requires_grad=False)
        return Wrap(scaled, p=frozen, q=nn.Parameter(torch.randn(16, 16)))

    return Wrap(recomputed, a=part(), b=part())


def inplace(self, x):
    y = F.relu_(self.a(x))
    y = self.b(y)
    y.add_(x)
    return F.relu(self.a(y), inplace=True)


X = halves(2, 5, 16)
MODELS = {
    "linear": (linear, X),
    "MultiheadAttention": (
        lambda: Wrap(lambda self, x: self.a(x, x, x), a=nn.MultiheadAttention(16, 2, batch_first=True)),
        X,
    ),
    "cross attention": (
        lambda: Wrap(
            lambda self, x: self.a(x, x[:, :3].exp(), x[:, :3])[0],
            a=nn.MultiheadAttention(16, 2, batch_first=True, add_bias_kv=True),
        ),
        X,
    ),
    "attention, other sizes": (
        lambda: Wrap(
            lambda self, x: self.a(x, x[..., :8], x[..., :4]), a=nn.MultiheadAttention(16, 2, kdim=8, vdim=4)
        ),
        X,
    ),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), X),
    "TransformerEncoder": (encoder, X),
    "Transformer": (
        lambda: Wrap(lambda self, x: self.t(x, x * 2), t=nn.Transformer(16, 2, 1, 1, 32, batch_first=True)),
        X,
    ),
    "LSTM": (lambda: nn.LSTM(16, 8, num_layers=2, batch_first=True, bidirectional=True), X),
    "GRU": (lambda: nn.GRU(16, 8, num_layers=2), X),
    "LSTMCell": (lambda: Wrap(lambda self, x: self.c(x[0]), c=nn.LSTMCell(16, 8)), X),
    "weight_norm": (lambda: nn.utils.parametrizations.weight_norm(linear()), X),
    "old weight_norm": (lambda: weight_norm(linear()), X),
    "Conv1d": (lambda: nn.Sequential(nn.Conv1d(5, 8, 3), nn.GELU(), nn.ConvTranspose1d(8, 4, 3)), X),
    "Conv2d": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), batch_norm(nn.BatchNorm2d(4)), nn.ReLU()),
        halves(2, 2, 8, 8),
    ),
    "norms": (lambda: nn.Sequential(linear(), nn.LayerNorm(16), nn.GroupNorm(5, 5), nn.RMSNorm(16)), X),
    "BatchNorm1d": (
        lambda: nn.Sequential(linear(), batch_norm(nn.BatchNorm1d(16)), nn.Linear(16, 3)),
        halves(4, 16),
    ),
    "padding": (lambda: nn.Embedding(32, 16, padding_idx=3), tokens(32, 2, 9)),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(32, 16, mode="sum"), tokens(32, 4, 9)),
    "Bilinear": (lambda: Wrap(lambda self, x: self.b(x, x.tanh()), b=nn.Bilinear(16, 16, 4)), X),
    "PReLU": (lambda: nn.Sequential(linear(), nn.PReLU(16), nn.Softplus()), halves(4, 16)),
    "called twice": (lambda: Wrap(lambda self, x: self.a(self.a(x).tanh()), a=linear()), X),
    "tied": (tied, tokens(32, 2, 5)),
    "shared": (shared, X),
    "tuple": (lambda: Wrap(lambda self, x: (self.a(x), (self.b(x), None)), a=linear(), b=linear()), X),
    "dict": (lambda: Wrap(lambda self, x: {"y": self.a(x), "z": [self.b(x)]}, a=linear(), b=linear()), X),
    "dataclass": (
        lambda: Wrap(
            lambda self, x: total([(p := self.p(x)).first, p.second]),
            p=Wrap(lambda self, x: Pair(self.a(x), self.a(x).tanh()), a=linear()),
        ),
        X,
    ),
    "in place": (lambda: Wrap(inplace, a=linear(), b=linear()), X),
    "returns its weight": (
        lambda: Wrap(
            lambda self, x: x @ self.w(), w=Wrap(lambda self: self.p, p=nn.Parameter(torch.randn(16, 4)))
        ),
        X,
    ),
    "returns a view of its weight": (
        lambda: Wrap(
            lambda self, x: (x @ self.w()[0]) * self.w()[1].sum(),
            w=Wrap(lambda self: (self.p.t(), self.p[1:3]), p=nn.Parameter(torch.randn(4, 16))),
        ),
        X,
    ),
    "returns its weight at the end": (
        lambda: Wrap(lambda self, x: self.p.t(), p=nn.Parameter(torch.randn(4, 16))),
        X,
    ),
    "child's weight": (
        lambda: Wrap(
            lambda self, x: F.linear(x, self.a.weight, self.b.bias) + self.a.weight.sum(),
            a=linear(),
            b=linear(),
        ),
        X,
    ),
    "ParameterList": (lists, X),
    "custom Function": (
        lambda: Wrap(lambda self, x: SavesItsWeight.apply(self.b(x), self.a.weight), a=linear(), b=linear()),
        X,
    ),
    "scalar": (lambda: Wrap(lambda self, x: x * self.p, p=nn.Parameter(torch.randn(()))), X),
    "empty": (
        lambda: Wrap(lambda self, x: x * self.p.sum() + x, p=nn.Parameter(torch.randn(0, 3)), a=linear()),
        X,
    ),
    "product of two modules' weights": (
        lambda: Wrap(
            lambda self, x: x @ (self.a.weight @ self.b.weight) * (self.a.bias * self.b.bias),
            a=linear(),
            b=linear(),
        ),
        X,
    ),
    "weight kept in ctx": (
        lambda: Wrap(lambda self, x: KeepsItsWeight.apply(self.b(x), self.a.weight), a=linear(), b=linear()),
        X,
    ),
    "nested backward": (
        lambda: Wrap(
            lambda self, x: Recomputes.apply(x, self.a.weight, self.b.weight), a=linear(), b=linear()
        ),
        X,
    ),
    "partly frozen": (partly_frozen, X),
    "unused": (lambda: Wrap(lambda self, x: self.a(x), a=linear(), b=linear()), X),
}


@pytest.mark.parametrize(
    *matrix(together=1, name=list(MODELS), nvme=["in memory", "on disk"]), indirect=["nvme"]
)
def test_training_equals_plain_training_bit_for_bit(name, nvme):
    compare(*MODELS[name], nvme=nvme)


@pytest.mark.parametrize("need_weights", [True, False])
def test_attention_in_eval_takes_the_path_that_plain_torch_takes(need_weights, nvme):
    def build():
        attention = nn.MultiheadAttention(16, 2, batch_first=True)
        return Wrap(lambda self, x: self.a(x, x, x, need_weights=need_weights)[0], a=attention)

    plain, ours = build_both(build, nvme=nvme)
    x = X(torch.Generator().manual_seed(1))[0]
    with torch.no_grad():
        assert torch.equal(plain.eval()(x), ours.eval()(x))
    assert resident(ours) == []


def test_a_transformer_layer_in_eval_equals_plain_torch_with_hooks(nvme):
    # torch leaves its fast path, whose roundings differ, for a layer that has hooks
    plain, ours = build_both(encoder, nvme=nvme)
    for module in plain.modules():
        module.register_forward_hook(lambda *rest: None)
    x = X(torch.Generator().manual_seed(1))[0]
    with torch.no_grad():
        assert torch.equal(plain.eval()(x), ours.eval()(x))


def test_a_forward_that_no_backward_follows_leaves_no_graph(nvme):
    class Alive:
        pass

    def build():
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Softmax(-1))

    _, ours = build_both(build, nvme=nvme)
    alive = Alive()
    reference = weakref.ref(alive)

    def follow(module, args, output, alive=alive):
        output.grad_fn.register_prehook(lambda *_: alive)

    hook = ours[1].register_forward_hook(follow)
    output = ours(torch.randn(2, 8).bfloat16())
    hook.remove()
    del follow, hook, alive
    assert reference() is not None
    del output
    assert reference() is None
