"""The sweep: every method of torch.Tensor in four situations at three budgets, beside plain torch.

Each either gives what it gives in torch, with the same state afterwards, or raises an InfinityError whose
advice is carried out here, and works. Nothing is ever different, and no error is another's.
"""

import contextlib
import gc
import os
import tempfile
import warnings
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

import infinity
from infinity import reference
from infinity.errors import InfinityError
from parity import differences, engine_in, nothing_waits, repeatable
from sweep_calls import ADDRESSES, UNDEFINED, N, arguments, methods, use

BUDGETS = ("host", "little", "pinned")
"""All in host memory; NVMe with next to nothing kept; NVMe with everything kept."""


BASE = torch.rand(N, N, generator=torch.Generator().manual_seed(1))
BASE = (BASE + BASE.t()) / 2 + torch.eye(N)
"""The weight that every case starts from: symmetric, and all of it between 0 and 2."""


class Probed(nn.Module):
    """A layer whose forward hands its weight to `probe`."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(BASE.clone())
        self.bias = nn.Parameter(torch.zeros(N))
        self.probe = None

    def forward(self, x):
        if self.probe is not None:
            self.probe(self.weight)
        return torch.tanh(x @ self.weight.t() + self.bias)


def build():
    return nn.Sequential(Probed(), nn.Linear(N, N, bias=False))


@dataclass
class Pair:
    """The same model in plain torch and offloaded."""

    plain: nn.Module
    ours: nn.Module
    optimizers: list = field(default_factory=list)

    @property
    def models(self):
        return self.plain, self.ours

    def step(self):
        """Train a step; return whether both models are the same afterwards."""
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            model(torch.linspace(-1, 1, 2 * N).view(2, N)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return self.same()

    def same(self):
        return differences(dict(self.plain.state_dict()), dict(self.ours.state_dict())) == []


@contextlib.contextmanager
def pair_at(budget):
    """Build a pair that has trained a few steps at a budget."""
    with tempfile.TemporaryDirectory(prefix="infinity-sweep-", dir=os.environ.get("RANKS_DISK")) as folder:
        nvme = None if budget == "host" else folder
        torch.manual_seed(0)
        plain = reference.prepare(build(), torch.float32)
        torch.manual_seed(0)
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        memory = ranks << 20 if budget == "little" else ranks << 24
        with infinity.Init(nvme=nvme, host_memory=memory, dtype="fp32"):
            ours = build()
        if budget == "little":
            engine_in(ours).kept.limit_nbytes = 0
            nothing_waits(ours)
        options = {"lr": 1e-2}
        pair = Pair(plain, ours)
        pair.optimizers = [
            reference.ReferenceAdamW(plain.parameters(), **options),
            infinity.AdamW(ours.parameters(), **options),
        ]
        for _ in range(3):
            pair.step()
        yield pair


@dataclass(frozen=True)
class Case:
    """One method: how it is called, what torch makes of it, and whether it changes the parameter."""

    name: str
    call: object
    expected: object
    changes: bool
    reshapes: bool


def cases():
    """Return a Case for every method, as plain torch shows it."""
    found = []
    for name in methods():
        call = use(name, arguments(name, BASE))
        parameter = nn.Parameter(BASE.clone())
        version, place = parameter._version, parameter.data_ptr()
        with torch.no_grad():
            expected = told(name, call, parameter)
        changes = parameter._version != version or parameter.data_ptr() != place
        changes = changes or not torch.equal(parameter, BASE)
        reshapes = (parameter.shape, parameter.dtype) != ((N, N), torch.float32)
        found.append(Case(name, call, expected, changes or reshapes, reshapes))
    return found


def told(name, call, parameter):
    """Return what a call makes, as values that hold nothing of the parameter; an error as it is."""
    try:
        return shown(call(parameter), name, parameter)
    except Exception as error:  # noqa: BLE001 - every error is an answer here
        return error.with_traceback(None)


def shown(value, name, parameter):  # noqa: PLR0911 - one for each kind of answer
    """Return an answer as plain values that can be compared."""
    if value is parameter:
        return ["the parameter itself"]
    if name in ADDRESSES:
        return [type(value).__name__]
    if isinstance(value, torch.Tensor):
        about = [value.dtype, tuple(value.shape), str(value.layout), isinstance(value, nn.Parameter)]
        about += [value.requires_grad, type(value.grad_fn).__name__]
        if value.layout == torch.strided:
            about.append(value.stride())
        dense = value.detach() if value.layout == torch.strided else value.detach().to_dense()
        dense = dense.to(torch.complex64) if dense.is_complex() else dense  # torch compares no complex halves
        return [*about, None if name in UNDEFINED else dense.resolve_conj().clone()]
    if isinstance(value, (list, tuple)):
        return [shown(one, name, parameter) for one in value]
    if isinstance(value, np.ndarray):
        return ["array", value.dtype.str, value.tolist()]
    if isinstance(value, (torch.UntypedStorage, torch.TypedStorage)):
        return ["storage", type(value).__name__]  # several parameters lie in one
    if value is None or isinstance(value, (int, float, complex, str, bytes, torch.dtype, torch.device)):
        return [value]
    return [type(value).__name__]


def wrong(expected, actual, *, refused=True):
    """Return what is wrong with an answer, empty if it is torch's; `refused`: or an error of ours."""
    if refused and isinstance(actual, InfinityError):
        return ""
    if isinstance(expected, Exception):
        if not isinstance(actual, Exception):
            return f"torch raises {type(expected).__name__}, ours gives {str(actual)[:80]}"
        return (
            ""
            if type(actual) is type(expected) or isinstance(actual, InfinityError)
            else f"raises {actual!r}"
        )
    if isinstance(actual, Exception):
        return f"raises {type(actual).__name__}: {str(actual)[:160]}"
    found = differences(expected, actual)
    return f"differs at {found}: {str(actual)[:100]} for {str(expected)[:100]}" if found else ""


class Sweep:
    """The cases at one budget; what went wrong is collected."""

    def __init__(self, pair, budget, found):
        self.pair, self.budget, self.found = pair, budget, found
        self.weights = [model[0].weight for model in pair.models]

    def note(self, situation, case, what):
        if what:
            self.found.append(f"{case.name} ({situation}, {self.budget}): {what}")

    def on_plain(self, case, *, grad=False):
        """Return what the call gives on the plain model's weight, which starts from the base."""
        weight = self.weights[0]
        weight.data = BASE.clone()
        weight.requires_grad_()
        with torch.set_grad_enabled(grad and not case.changes):
            answer = told(case.name, case.call, weight)
        if case.reshapes:
            weight.data = BASE.clone()
        return answer

    def reset(self):
        """Let both weights be the base."""
        self.weights[0].data = BASE.clone()
        with infinity.gathered(self.weights[1], write=True), torch.no_grad():
            self.weights[1].copy_(BASE)

    def in_gathered(self, case, *, write, grad=False):
        """Return what the call gives in `gathered`, and the error with which that ends, if it does."""
        answer = error = None
        weight = self.weights[1]
        try:
            with infinity.gathered(weight, write=write):
                if write:
                    with torch.no_grad():
                        weight.copy_(BASE)
                with torch.set_grad_enabled(grad and not case.changes):
                    answer = told(case.name, case.call, weight)
        except Exception as raised:  # noqa: BLE001
            error = raised.with_traceback(None)
        return answer, error

    def in_forward(self, case, model, weight):
        """Return what the call gives in a forward of `model`, and the error with which that ends."""
        answer, error = [], None
        model[0].probe = lambda weight: answer.append(told(case.name, case.call, weight))
        try:
            with torch.set_grad_enabled(not case.changes):
                model(torch.ones(1, N))
        except Exception as raised:  # noqa: BLE001
            error = raised.with_traceback(None)
        model[0].probe = None
        return (answer or [None])[0], error

    def released(self, case):
        """On a released parameter; where that is refused, in `gathered` as the error says."""
        expected = self.on_plain(case)
        with torch.no_grad():
            actual = told(case.name, case.call, self.weights[1])
        self.note("released", case, wrong(expected, actual))
        if not isinstance(actual, InfinityError) or isinstance(expected, Exception):
            return
        if "gathered" not in str(actual):
            self.note("released", case, f"advice without gathered: {actual}")
        answer, error = self.in_gathered(case, write=case.changes)
        if not case.reshapes:
            self.note("released, as advised", case, wrong(expected, error or answer, refused=False))
            if case.changes and not self.pair.same():
                self.note("released, as advised", case, "the weights differ")

    def gathered(self, case):
        """In `gathered` without write, where every change is refused, and with."""
        expected = self.on_plain(case, grad=True)
        answer, error = self.in_gathered(case, write=False, grad=True)
        if not case.changes or isinstance(expected, Exception):
            self.note("gathered", case, wrong(expected, error or answer, refused=False))
        elif not isinstance(error, InfinityError) or "write=True" not in str(error):
            self.note("gathered", case, f"expected a refusal that names write=True, got {error!r}")
        answer, error = self.in_gathered(case, write=True, grad=True)
        if case.reshapes:
            if not isinstance(error, InfinityError) or "save_pretrained" not in str(error):
                self.note("write", case, f"expected a refusal that says how to resize, got {error!r}")
            return
        self.note("write", case, wrong(expected, error or answer, refused=False))
        if case.changes and not self.pair.step():
            self.note("write", case, "after a step the models differ")

    def forward(self, case):
        """In a forward, where every change is refused; as the error says, in a forward within gathered."""
        if case.reshapes:
            return  # plain torch's forward ends there, too
        plain, ours = self.pair.models
        expected, _ = self.in_forward(case, plain, self.weights[0])
        if not case.changes or isinstance(expected, Exception):
            answer, error = self.in_forward(case, ours, self.weights[1])
            self.note("forward", case, wrong(expected, error or answer, refused=False))
            return
        if self.dies_of_changes:
            return
        answer, error = self.in_forward(case, ours, self.weights[1])
        if not isinstance(error, InfinityError) or "gathered" not in str(error):
            self.note("forward", case, f"expected a refusal that names gathered, got {error!r}")
        with infinity.gathered(ours, write=True):
            with torch.no_grad():
                self.weights[1].copy_(BASE)
            answer, error = self.in_forward(case, ours, self.weights[1])
        self.note("forward, as advised", case, wrong(expected, error or answer, refused=False))
        if not self.pair.same():
            self.note("forward, as advised", case, "the weights differ")

    @property
    def dies_of_changes(self):
        """Whether a change in a forward is the end of the engine: in place, and on several ranks."""
        return self.budget != "little" or "WORLD_SIZE" in os.environ


def sweep(budgets=BUDGETS, only=None, *, every_nth=1):
    """Run the cases in every situation at these budgets; return what is wrong, a line each.

    only: names of methods. every_nth: of n cases, one at each budget, and at each budget another one.
    """
    found = []
    with repeatable(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        every = [case for case in cases() if only is None or case.name in only]
        for number, budget in enumerate(budgets):
            with pair_at(budget) as pair:
                run = Sweep(pair, budget, found)
                run.reset()
                for case in every[number % every_nth :: every_nth]:
                    for situation in (run.released, run.gathered, run.forward):
                        situation(case)
                        if case.changes:
                            run.reset()
                        run.weights[1].requires_grad_()  # detach_() takes it
                if not pair.step():
                    found.append(f"{budget}: after all cases a step differs")
                del run, pair
            gc.collect()
    return found
