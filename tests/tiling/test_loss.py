"""cross_entropy without logits. Trusted: F.cross_entropy on fp64 logits, and its gradients."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from covers import examples
from infinity.tiling import TiledLinear, cross_entropy, products
from infinity.tiling import logits as blocks

pytestmark = pytest.mark.usefixtures("repeatable")


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Blocks of 16 rows, so that small examples have several."""
    monkeypatch.setattr(blocks, "SMALLEST_NBYTES", 1)
    monkeypatch.setattr(blocks, "FEWEST_TOKENS", 16)


def reference(hidden, weight, bias, labels, *, shift, smoothing, z_loss, reduction, count):
    hidden, weight = (one.detach().double().requires_grad_() for one in (hidden, weight))
    bias = None if bias is None else bias.detach().double().requires_grad_()
    logits = F.linear(hidden, weight, bias)
    if shift:
        logits, labels = logits[..., :-1, :], labels[..., 1:]
    logits, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    loss = F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum")
    loss = loss + z_loss * torch.logsumexp(logits, -1)[labels != -100].square().sum()
    if reduction == "mean":
        loss = loss / ((labels != -100).sum() if count is None else count)
    loss.backward()
    return loss.detach(), hidden.grad, weight.grad, None if bias is None else bias.grad


def head(weight, bias, form):
    """The weight as it is, in a list of pieces, or as a TiledLinear; with a way to its gradients."""
    if form == "whole":
        return weight, bias, lambda: (weight.grad, None if bias is None else bias.grad)
    classes = len(weight)
    tiled = TiledLinear(
        weight.shape[1], classes, bias is not None, dtype=weight.dtype, out_tiles=min(3, classes)
    )
    tiled.load_state_dict({"weight": weight.detach()} | ({} if bias is None else {"bias": bias.detach()}))
    if form == "pieces":
        pieces = [tile.weight for tile in tiled.tiles]
        return (
            pieces,
            bias,
            lambda: (torch.cat([one.grad for one in pieces]), None if bias is None else bias.grad),
        )
    return (
        tiled,
        None,
        lambda: (
            torch.cat([tile.weight.grad for tile in tiled.tiles]),
            None if bias is None else torch.cat([tile.bias.grad for tile in tiled.tiles]),
        ),
    )


@settings(max_examples=examples(40, 150))
@given(
    shape=st.sampled_from([(5,), (2, 9), (1, 1), (3, 40), (2, 3, 4)]),
    classes=st.integers(1, 120),
    form=st.sampled_from(["whole", "pieces", "tiled"]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    with_bias=st.booleans(),
    shift=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.1]),
    z_loss=st.sampled_from([0.0, 1e-2]),
    reduction=st.sampled_from([("mean", None), ("sum", None), ("mean", 37)]),
    number=st.integers(0, 999),
)
@example((3, 40), 1, "whole", torch.float32, False, False, 0.1, 0.0, ("sum", None), 339)
def test_loss_and_gradients_are_those_of_fp64_logits(
    shape, classes, form, dtype, with_bias, shift, smoothing, z_loss, reduction, number
):
    torch.manual_seed(number)
    hidden = torch.randn(*shape, 12, dtype=dtype, requires_grad=True)
    weight = torch.randn(classes, 12, dtype=dtype).mul_(0.3).requires_grad_()
    bias = torch.randn(classes, dtype=dtype, requires_grad=True) if with_bias else None
    labels = torch.randint(classes, shape)
    labels.view(-1)[1::4] = -100
    if not bool((labels[..., 1:] if shift else labels).ne(-100).any()):
        return
    options = {"shift": shift, "z_loss": z_loss, "reduction": reduction[0], "count": reduction[1]}
    expected = reference(hidden, weight, bias, labels, smoothing=smoothing, **options)
    given_weight, given_bias, grads = head(weight, bias, form)
    loss = cross_entropy(hidden, given_weight, labels, bias=given_bias, label_smoothing=smoothing, **options)
    loss.backward()
    # Logits are sums of 12 terms of size 1 and off by some eps, and so are probabilities; the label's
    # loses 1: a token's gradient is off by some eps of its share in the loss, however small it is itself.
    # A token's loss is the difference of such logits, as far off however small it is: the tokens' shares add.
    counted = int((labels[..., 1:] if shift else labels).ne(-100).sum())
    share = 1.0 if reduction[0] == "sum" else 1.0 / (reduction[1] or counted)
    eps = torch.finfo(dtype).eps
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(
        loss.detach().double(), expected[0], rtol=16 * eps, atol=16 * eps * counted * share
    )
    for actual, exact in zip((hidden.grad, *grads()), expected[1:], strict=True):
        if exact is not None:
            assert (actual.double() - exact).abs().max() <= 32 * eps * (exact.abs().max() + share)


@pytest.mark.parametrize("form", ["whole", "pieces"])
def test_products_in_fp32_are_as_good_as_16_bit_ones(form, monkeypatch):
    """[Note: products in fp32]: whichever this machine takes, both are right."""
    monkeypatch.setattr(blocks, "FEWEST_ROWS", 7)
    monkeypatch.setattr(blocks, "WIDENED_NBYTES", 1)
    torch.manual_seed(0)
    hidden, labels = torch.randn(90, 16).bfloat16(), torch.randint(50, (90,))
    weight = torch.randn(50, 16).bfloat16()
    expected = F.cross_entropy(hidden.double() @ weight.double().t(), labels)
    found = []
    for native in (True, False):
        monkeypatch.setattr(products, "_multiplies_16_bit", lambda native=native: native)
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = cross_entropy(x, w if form == "whole" else [w[:30], w[30:]], labels)
        loss.backward()
        torch.testing.assert_close(loss.double(), expected, rtol=2e-3, atol=0)
        found.append((x.grad, w.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=4e-4)


@pytest.mark.parametrize("form", ["whole", "pieces", "tiled"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_without_a_label_that_counts_the_loss_is_what_torch_says(form, reduction):
    weight, hidden = torch.randn(20, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    labels = torch.full((3,), -100)
    given_weight, _, grads = head(weight, None, form)
    loss = cross_entropy(hidden, given_weight, labels, reduction=reduction)
    expected = F.cross_entropy(hidden @ weight.t(), labels, reduction=reduction)
    torch.testing.assert_close(loss, expected, equal_nan=True)
    if reduction == "sum":
        loss.backward()
        assert not hidden.grad.any()
        assert not grads()[0].any()


def test_large_logits_overflow_nothing():
    hidden = torch.tensor([[300.0], [-300.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.5]])
    labels = torch.tensor([0, 0])
    for given_weight in (weight, [weight[:2], weight[2:]]):
        torch.testing.assert_close(
            cross_entropy(hidden, given_weight, labels), F.cross_entropy(hidden @ weight.t(), labels)
        )


def test_ignored_tokens_do_not_touch_the_loss_whatever_they_hold():
    hidden = torch.randn(4, 3)
    hidden[2] = float("nan")
    hidden.requires_grad_()
    weight = torch.randn(9, 3, requires_grad=True)
    cross_entropy(hidden, weight, torch.tensor([1, 2, -100, 3])).backward()
    assert weight.grad.isfinite().all()
    assert not hidden.grad[2].any()


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
@pytest.mark.parametrize("form", ["whole", "tiled"])
def test_what_is_frozen_gets_no_gradient_and_the_rest_the_right_one(frozen, form):
    hidden, weight = torch.randn(5, 3, requires_grad=True), torch.randn(70, 3, requires_grad=True)
    labels = torch.tensor([1, 2, 3, 4, 69])
    expected = reference(
        hidden, weight, None, labels, shift=False, smoothing=0, z_loss=0, reduction="mean", count=None
    )
    hidden.requires_grad_(frozen != "hidden")
    weight.requires_grad_(frozen != "weight")
    given_weight, _, grads = head(weight, None, form)
    if form == "tiled":
        given_weight.weight.requires_grad_(frozen != "weight")
    cross_entropy(hidden, given_weight, labels).backward()
    if frozen == "weight":
        torch.testing.assert_close(hidden.grad, expected[1].float())
    else:
        assert hidden.grad is None
        torch.testing.assert_close(grads()[0], expected[2].float())


def test_under_autocast_products_are_16_bit_and_gradients_reach_fp32_weights():
    hidden, weight = torch.randn(6, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
    labels = torch.randint(50, (6,))
    with torch.autocast("cpu", torch.bfloat16):
        loss = cross_entropy(hidden, weight, labels)
        exact = F.cross_entropy(F.linear(hidden, weight).float(), labels)
    torch.testing.assert_close(loss, exact, rtol=1e-5, atol=0)
    loss.backward()
    assert (hidden.grad.dtype, weight.grad.dtype) == (torch.float32, torch.float32)


def test_a_scaled_loss_scales_the_gradients_and_they_are_handed_out_once():
    hidden, weight = torch.randn(5, 3, requires_grad=True), torch.randn(7, 3, requires_grad=True)
    labels = torch.arange(5)
    plain = torch.autograd.grad(F.cross_entropy(hidden @ weight.t(), labels) * 0.25, [hidden, weight])
    loss = cross_entropy(hidden, weight, labels) * 0.25
    for actual, expected in zip(
        torch.autograd.grad(loss, [hidden, weight], retain_graph=True), plain, strict=True
    ):
        torch.testing.assert_close(actual, expected)
    with pytest.raises(RuntimeError, match="second backward"):
        loss.backward()


def test_tiles_are_used_one_after_another_through_their_modules():
    tiled, events = TiledLinear(3, 64, out_tiles=4), []
    for number, tile in enumerate(tiled.tiles):
        tile.register_forward_hook(lambda *_, number=number: events.append(number))
        tile.weight.register_post_accumulate_grad_hook(lambda _, number=number: events.append(-number))
    cross_entropy(torch.randn(5, 3, requires_grad=True), tiled, torch.arange(5)).backward()
    assert events[:4] == [0, 1, 2, 3]
    assert sorted(events[4:]) == [-3, -2, -1, 0]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"labels": torch.tensor([1, 9])}, IndexError, "from 1 to 9, but there are 9 classes"),
        ({"labels": torch.tensor([-1, 2])}, IndexError, "from -1 to 2"),
        ({"labels": torch.tensor([1])}, ValueError, r"needs labels \(2,\)"),
        ({"reduction": "none"}, ValueError, "'mean' or 'sum'"),
        ({"reduction": "sum", "count": 3}, ValueError, "only with 'mean'"),
        ({"weight": TiledLinear(4, 9, in_tiles=2)}, ValueError, "out_features only"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, error, message):
    fitting = {"weight": torch.randn(9, 4), "labels": torch.tensor([1, 2])}
    with pytest.raises(error, match=message):
        cross_entropy(torch.randn(2, 4), **{**fitting, **arguments})


def test_derivatives_pass_gradcheck():
    labels = torch.tensor([0, 3, 4])
    hidden = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(
        lambda h, w: cross_entropy(h, w.split(2), labels, label_smoothing=0.2, z_loss=0.1), [hidden, weight]
    )


def test_gradients_of_fp16_do_not_vanish_before_the_loss_is_scaled():
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(4096, 8, generator=generator).half().requires_grad_()
    weight = (torch.randn(8192, 8, generator=generator) / 8).half().requires_grad_()
    labels = torch.zeros(4096, dtype=torch.int64)
    (cross_entropy(hidden, weight, labels) * 2**15).backward()
    plain = [one.detach().float().requires_grad_() for one in (hidden, weight)]
    (F.cross_entropy(F.linear(*plain), labels) * 2**15).backward()
    others, exact = weight.grad[1:].float(), plain[1].grad[1:]  # of classes that no token has
    assert (others - exact).norm() < 1e-2 * exact.norm()
