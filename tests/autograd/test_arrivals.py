"""Trusted: plain torch with the reference recipe. Faked: nothing; every unit is released between uses."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import infinity
from covers import matrix
from infinity import EngineFailedError, UnsupportedError
from infinity.reference import ReferenceAdamW
from parity import (
    Wrap,
    build_both,
    compare,
    differences,
    engine_in,
    gradients,
    halves,
    optimizers,
    resident,
    total,
    train,
)

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("deterministic")]

PLACES = ["in memory", "on disk"]


@pytest.fixture(params=PLACES)
def nvme(request):
    return None if request.param == "in memory" else request.getfixturevalue("folder")


X = halves(2, 5, 16)


def block():
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.LayerNorm(16))


def blocks(*, forward=None):
    forward = forward or (lambda self, x: self.c(self.b(self.a(x))))
    return lambda: Wrap(forward, a=block(), b=block(), c=block())


def again(reentrant, **options):
    return lambda module, x: checkpoint(module, x, use_reentrant=reentrant, **options)


def each(call):
    return lambda self, x: call(self.c, call(self.b, call(self.a, x)))


def nested(outer, inner):
    def both(self, x):
        return outer(lambda x: inner(self.c, inner(self.b, x)) + x, inner(self.a, x))

    return both


REENTRANT, PLAIN = again(reentrant=True), again(reentrant=False)
LATE = again(reentrant=False, early_stop=False)
NAMED_CALLS = {"plain": lambda module, x: module(x), "reentrant": REENTRANT, "non-reentrant": PLAIN}
CALLS = list(NAMED_CALLS.values())
CHECKPOINTS = {
    "reentrant": each(REENTRANT),
    "non-reentrant": each(PLAIN),
    "without early stop": each(LATE),
    "non-reentrant in non-reentrant": nested(PLAIN, PLAIN),
    "reentrant in reentrant": nested(REENTRANT, REENTRANT),
    "reentrant in non-reentrant": nested(PLAIN, REENTRANT),
    "non-reentrant in reentrant": nested(REENTRANT, PLAIN),
    "sequential": lambda self, x: checkpoint_sequential([self.a, self.b, self.c], 2, x, use_reentrant=False),
    "sequential reentrant": lambda self, x: checkpoint_sequential(
        [self.a, self.b, self.c], 2, x, use_reentrant=True
    ),
    "a block used in two checkpoints": lambda self, x: PLAIN(self.b, PLAIN(self.a, PLAIN(self.b, x))),
    "a block used in two reentrant ones": lambda self, x: REENTRANT(
        self.b, REENTRANT(self.a, REENTRANT(self.b, x))
    ),
    "a block used inside and outside": lambda self, x: self.a(PLAIN(self.b, REENTRANT(self.a, x))),
    "a child's weight": lambda self, x: PLAIN(lambda x: F.linear(x, self.a[0].weight) @ self.b[0].weight, x),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(*matrix(together=1, name=list(CHECKPOINTS), nvme=PLACES), indirect=["nvme"])
def test_checkpointed_training_equals_plain_training(name, nvme):
    compare(blocks(forward=CHECKPOINTS[name]), X, nvme=nvme)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_whole_model_may_be_one_checkpoint(reentrant, nvme):
    def loss(model, inputs):
        return total(checkpoint(model, *inputs, use_reentrant=reentrant))

    compare(blocks(), X, loss=loss, nvme=nvme)


def negated(tensor):
    return -tensor.detach()


HOOKS = {
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
    "a pair": lambda: torch.autograd.graph.saved_tensors_hooks(negated, negated),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_of_the_user_around_the_model_see_what_is_not_a_weight(name, nvme):
    def loss(model, inputs):
        with HOOKS[name]():
            return total(model(*inputs))

    compare(blocks(), X, loss=loss, nvme=nvme)


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_of_the_user_inside_the_model_get_the_weights_too(name, nvme):
    def forward(self, x):
        with HOOKS[name]():
            return self.b(self.a(x))

    compare(lambda: Wrap(forward, a=block(), b=block()), X, nvme=nvme)


def freeze_base():
    model = blocks()()
    model.requires_grad_(requires_grad=False)
    for one in (model.a, model.b, model.c):
        one.append(nn.Linear(16, 4, bias=False))
        one.append(nn.Linear(4, 16, bias=False))
    return model


@pytest.mark.parametrize("call", CALLS, ids=["plain", "reentrant", "non-reentrant"])
def test_frozen_units_do_not_pile_up_in_the_backward(call, nvme):
    def base():
        model = freeze_base()
        model._forward = each(call)
        return model

    ours, _ = compare(base, X, nvme=nvme)
    frozen = [unit for unit in engine_in(ours).units if not unit.trainable]
    assert len(frozen) == 9
    assert all("m" not in unit.record for unit in frozen)
    most = []
    x = X(torch.Generator())[0].requires_grad_()
    loss = total(ours(x))
    for one in ours.parameters():
        if one.requires_grad:
            one.register_hook(lambda grad: most.append(sum(unit.attached for unit in engine_in(ours).units)))
    loss.backward()
    assert max(most) <= 5  # one block's


def test_freezing_and_unfreezing_between_steps_equals_plain_training(nvme):
    def loop(model, optimizer):
        shown = train(model, optimizer, X, steps=1)
        model.a.requires_grad_(requires_grad=False)
        shown += train(model, optimizer, X, steps=2, seed=8)
        model.a.requires_grad_(requires_grad=True)
        model.b[0].weight.requires_grad_(requires_grad=False)
        return shown + train(model, optimizer, X, steps=2, seed=9)

    plain, ours = build_both(blocks(), nvme=nvme)
    expected, actual = map(loop, (plain, ours), optimizers(plain, ours))
    assert differences(expected, actual) == []


def look(model, mode):
    with mode():
        output = model(X(torch.Generator().manual_seed(3))[0])
    return output.clone()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_looking_between_steps_and_before_the_first_changes_nothing(mode, nvme):
    def loop(model, optimizer):
        shown = [look(model, mode)]
        for seed in (7, 8):
            model.train()
            shown += train(model, optimizer, X, steps=1, seed=seed)
            model.eval()
            shown += [look(model, mode), look(model, mode), resident(model)]
        return shown

    plain, ours = build_both(blocks(), nvme=nvme)
    expected, actual = map(loop, (plain, ours), optimizers(plain, ours))
    assert differences(expected, actual) == []


class NoiseError(Exception):
    """What a test throws."""


def throw(*rest):
    raise NoiseError


@pytest.mark.parametrize(
    *matrix(kind=[NoiseError, KeyboardInterrupt], call=NAMED_CALLS, nvme=PLACES), indirect=["nvme"]
)
def test_after_an_exception_in_a_forward_the_next_step_is_right(call, kind, nvme):
    def loop(model, optimizer):
        shown = train(model, optimizer, X, steps=1)

        def interrupt(*rest):
            raise kind

        hook = model.b[2].register_forward_pre_hook(interrupt)
        with pytest.raises(kind):
            model(X(torch.Generator())[0].requires_grad_())
        hook.remove()
        return shown + train(model, optimizer, X, steps=2, seed=8)

    plain, ours = build_both(blocks(forward=each(call)), nvme=nvme)
    expected, actual = map(loop, (plain, ours), optimizers(plain, ours))
    assert differences(expected, actual) == []


@pytest.mark.parametrize(
    *matrix(where=["in a hook", "in the recomputation"], call=NAMED_CALLS, nvme=PLACES), indirect=["nvme"]
)
def test_after_an_exception_in_a_backward_the_next_step_is_right(call, where, nvme):
    def loop(model, optimizer):
        shown = train(model, optimizer, X, steps=1)
        loss = total(model(X(torch.Generator())[0].requires_grad_()))
        hook = model.b[2].weight.register_hook(throw)
        if where != "in a hook":
            hook.remove()
            hook = model.b[2].register_forward_hook(throw)
        if where == "in a hook" or call in (REENTRANT, PLAIN):
            with pytest.raises(NoiseError):
                loss.backward()
        hook.remove()
        del loss
        optimizer.zero_grad()
        return shown + train(model, optimizer, X, steps=2, seed=8)

    plain, ours = build_both(blocks(forward=each(call)), nvme=nvme)
    expected, actual = map(loop, (plain, ours), optimizers(plain, ours))
    assert differences(expected, actual) == []


@pytest.mark.parametrize("call", [lambda module, x: module(x), PLAIN], ids=["plain", "non-reentrant"])
def test_gradients_of_inputs_alone_equal_plain_ones(call, nvme):
    def loop(model, optimizer):
        x = X(torch.Generator().manual_seed(1))[0].requires_grad_()
        shown = [torch.autograd.grad(total(model(x)), x), gradients(model), resident(model)]
        return shown + train(model, optimizer, X, steps=2)

    plain, ours = build_both(blocks(forward=each(call)), nvme=nvme)
    expected, actual = map(loop, (plain, ours), optimizers(plain, ours))
    assert differences(expected, actual) == []


def test_a_second_backward_over_a_retained_graph_adds_as_plain_torch_does(nvme):
    def loop(model, optimizer):
        loss = total(model(X(torch.Generator().manual_seed(1))[0]))
        loss.backward(retain_graph=True)
        loss.backward()
        shown = [gradients(model), resident(model)]
        optimizer.step()
        optimizer.zero_grad()
        return shown + train(model, optimizer, X, steps=2)

    plain, ours = build_both(blocks(), nvme=nvme)
    expected, actual = map(loop, (plain, ours), optimizers(plain, ours))
    assert differences(expected, actual) == []


def test_a_second_backward_over_a_freed_graph_is_torchs_own_error(nvme):
    _, ours = build_both(blocks(), nvme=nvme)
    loss = total(ours(X(torch.Generator())[0]))
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    assert resident(ours) == []


def test_a_backward_over_a_graph_older_than_a_step_is_refused(nvme):
    plain, ours = build_both(blocks(), nvme=nvme)
    _, optimizer = optimizers(plain, ours)
    x = X(torch.Generator())[0].requires_grad_()
    old = total(ours(x))
    total(ours(x)).backward()
    optimizer.step()
    before = gradients(ours)
    with pytest.raises(RuntimeError, match=r"changed .* after the forward"):
        old.backward()
    assert resident(ours) == []
    after = gradients(ours)
    first = [name for name in after if name.startswith("a")]  # what the backward had not reached
    assert differences([before[name] for name in first], [after[name] for name in first]) == []


@pytest.mark.parametrize("call", [lambda module, x: module(x), PLAIN], ids=["plain", "non-reentrant"])
def test_gradients_of_gradients_equal_plain_ones(call, nvme):
    def loop(model, optimizer):
        x = X(torch.Generator().manual_seed(1))[0].float().requires_grad_()
        (slope,) = torch.autograd.grad(total(model(x.bfloat16())), x, create_graph=True)
        gc.collect()
        (slope.square().sum() + total(model(x.bfloat16()))).backward()
        shown = [slope.detach(), x.grad, gradients(model), resident(model)]
        optimizer.step()
        optimizer.zero_grad()
        del slope
        return shown + train(model, optimizer, X, steps=2)

    plain, ours = build_both(blocks(forward=each(call)), nvme=nvme)
    expected, actual = map(loop, (plain, ours), optimizers(plain, ours))
    assert differences(expected, actual) == []


def test_a_loss_of_nan_does_what_it_does_in_plain_torch(nvme):
    def loop(model, optimizer):
        (total(model(X(torch.Generator().manual_seed(1))[0])) * float("nan")).backward()
        optimizer.step()
        optimizer.zero_grad()
        return [
            {name: one.float() for name, one in model.state_dict().items()},
            *train(model, optimizer, X, steps=1),
        ]

    plain, ours = build_both(blocks(), nvme=nvme)
    expected, actual = map(loop, (plain, ours), optimizers(plain, ours))
    assert differences(expected, actual) == []


def test_a_view_that_outlives_its_forward_keeps_its_values(nvme):
    def forward(self, x):
        self.kept.append(self.a.weight.t())
        return self.a(x)

    def build():
        model = Wrap(forward, a=nn.Linear(16, 16))
        model.kept = []
        return model

    def loop(model, optimizer):
        shown = train(model, optimizer, X, steps=1)
        weight = model.state_dict()["a.weight"].clone()
        model.kept.clear()
        shown += train(model, optimizer, X, steps=1)
        return [
            *shown,
            model.kept[0].shape,
            weight if engine_in(model) is None else model.kept[0].t().detach().clone(),
        ]

    plain, ours = build_both(build, nvme=nvme)
    expected, actual = map(loop, (plain, ours), optimizers(plain, ours))
    assert differences(expected, actual) == []


def changes_its_weight(nvme, *, beside_frozen):
    """Return a model whose first forward has changed a weight, and was refused."""

    def forward(self, x):
        with torch.no_grad():
            self.a.weight.clamp_(-0.1, 0.1)
        return self.a(x)

    def build():
        beside = {"b": nn.Linear(16, 16).requires_grad_(False)} if beside_frozen else {}
        return Wrap(forward, a=nn.Linear(16, 16), **beside)

    _, ours = build_both(build, nvme=nvme)
    with pytest.raises(UnsupportedError, match=r"a.weight was changed in place.*gathered"):
        ours(X(torch.Generator())[0])
    return ours


def test_changing_a_weight_in_a_forward_is_refused_by_name(nvme):
    """In host memory, where all of it is from the first fetch on, the weight itself was changed, and its
    master was not.
    """
    ours = changes_its_weight(nvme, beside_frozen=False)
    with pytest.raises(EngineFailedError, match="changed in place"):
        resident(ours)


@pytest.mark.disk
def test_a_weight_that_stays_on_nvme_is_as_it_was_after_that(folder):
    """With a frozen layer nothing is placed before the first step."""
    ours = changes_its_weight(folder, beside_frozen=True)
    assert resident(ours) == []


# Updates of units in memory, which wait in the backward to be applied together


class Tap(torch.autograd.Function):
    """Hands its input on; its backward makes a call."""

    @staticmethod
    def forward(ctx, x, call):
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.call()
        return grad, None


def tapped(call):
    """Three blocks, with a call in the backward when those of c and b are done."""
    return blocks(forward=lambda self, x: self.c(self.b(Tap.apply(self.a(x), call))))


def trained_with_taps(call, prepare=lambda engine: None):
    """Train plainly and offloaded, updating in the backward; return what differs. `call` gets the engine."""
    engines = []
    plain, ours = build_both(tapped(lambda: [call(engine) for engine in engines]), waits=True)
    both = optimizers(plain, ours)
    both[1].update = "backward"

    def loop(model, optimizer):
        losses = []
        for step in range(3):
            value = total(model(X(torch.Generator().manual_seed(step))[0]))
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(value.detach())
        return [losses, {name: one.clone() for name, one in model.state_dict().items()}]

    expected = loop(plain, both[0])
    engines.append(engine_in(ours))
    prepare(engines[0])
    return differences(expected, loop(ours, both[1])), engines[0]


def test_updates_of_units_in_memory_wait_for_the_end_of_the_backward():
    waited = []
    different, engine = trained_with_taps(
        lambda engine: waited.append(engine.outgoing_share.ledger.held_nbytes)
    )
    assert different == []
    assert waited == [2 * sum(one.numel() for part in (block(), block()) for one in part.parameters())] * 3
    assert engine.outgoing_share.ledger.held_nbytes == 0


def test_updates_that_would_not_fit_their_share_of_the_budget_do_not_wait():
    limit, waited = 1500, []

    def prepare(engine):
        engine.outgoing_share.ledger.limit_nbytes = limit
        engine.outgoing_share.ledger.peak_nbytes = 0

    different, engine = trained_with_taps(
        lambda engine: waited.append(engine.outgoing_share.ledger.held_nbytes), prepare
    )
    assert different == []
    assert 0 < min(waited) <= engine.outgoing_share.ledger.peak_nbytes <= limit
    assert engine.outgoing_share.ledger.held_nbytes == 0


def test_after_a_backward_that_failed_only_what_still_has_a_gradient_is_updated():
    failing = []

    def fail():
        if failing:
            raise RuntimeError("the backward dies here")

    def loop(model, optimizer):
        shown = []
        for dies in (False, True, False):
            failing[:] = [True] * dies
            loss = total(model(X(torch.Generator().manual_seed(1))[0]))
            if dies:
                with pytest.raises(RuntimeError, match="dies here"):
                    loss.backward()
            else:
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()
            shown.append(loss.detach())
        return [shown, {name: one.clone() for name, one in model.state_dict().items()}]

    plain, ours = build_both(tapped(fail), waits=True)
    both = optimizers(plain, ours)
    both[1].update = "backward"
    assert differences(loop(plain, both[0]), loop(ours, both[1])) == []
    assert engine_in(ours).outgoing_share.ledger.held_nbytes == 0


def test_the_optimizer_of_now_applies_gradients_in_the_backward_and_not_the_one_before_it(nvme):
    def loop(model, made):
        values = []
        for update in ("forward", "backward", "forward"):
            optimizer = made(model, update)
            for seed in (1, 2):
                total(model(X(torch.Generator().manual_seed(seed))[0])).backward()
                optimizer.step()
                optimizer.zero_grad()
            values.append({name: one.clone() for name, one in model.state_dict().items()})
            del optimizer
        return values

    plain, ours = build_both(blocks(), nvme=nvme)
    expected = loop(plain, lambda model, _: ReferenceAdamW(model.parameters(), lr=1e-2))
    actual = loop(ours, lambda model, update: infinity.AdamW(model.parameters(), lr=1e-2, update=update))
    assert differences(expected, actual) == []


class Negated(torch.autograd.Function):
    """Returns what it is given; its gradient is negated lazily by torch: its memory has another sign."""

    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch._neg_view(-grad)


@pytest.mark.parametrize("numel", [1, 300])
@pytest.mark.parametrize("update", ["forward", "backward"])
def test_a_gradient_that_torch_negates_lazily_counts_as_what_it_is(nvme, update, numel):
    def trained(made):
        torch.manual_seed(0)
        with infinity.Init(nvme=nvme, host_memory="64MiB"):
            model = Wrap(lambda self, x: (made(self.a.weight) * x).sum(), a=nn.Linear(numel, 1, bias=False))
        optimizer = infinity.AdamW(model.parameters(), lr=0.1, update=update)
        for _ in range(3):
            for _ in range(1 + (update == "forward")):
                model(torch.linspace(-1, 2, numel).bfloat16()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()["a.weight"]

    assert torch.equal(trained(Negated.apply), trained(torch.clone))
