"""Moments rounded at random are right on average, and training shows it.

Trusted: the fp32 step, narrow and dequantize (test_kernels_state.py). Faked: nothing. The random bits are a
hash of fixed keys: nothing here changes from run to run. A mean of n roundings between two stored values, a
part f of the way up, has the standard deviation sqrt(f (1 - f) / n) of their distance; 5 of them are allowed,
which fair bits exceed once in 1.7 million comparisons.
"""

import math

import pytest
import torch

from infinity import kernels
from infinity.reference import moments as reference_state
from kernel_cases import addresses, small_adamw

SIGMAS = 5


def scalars(**changes):
    settings = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-12, "weight_decay": 0.0, "step": 1}
    return kernels.AdamWScalars(**(settings | changes))


class Weights:
    """A split master with moments of one format, and steps upon it."""

    def __init__(self, n, state_dtype):
        self.hi, self.lo = (torch.zeros(n, dtype=torch.int16) for _ in range(2))
        self.moments = list(reference_state.zero_moments(torch.zeros(n), state_dtype).values())
        self.state_dtype = state_dtype

    def step(self, grad, key=0, **changes):
        n = len(grad)
        fields = addresses(self.hi, self.lo, *self.moments, grad)
        if self.state_dtype == "fp32":
            kernels.adamw(n, *fields, "f32", scalars(**changes))
        else:
            small_adamw(self.state_dtype)(n, *fields, "f32", scalars(**changes), key, 0)

    def round_to_nearest(self, state_dtype):
        """Take fp32 moments through bf16 or 8 bits and back, to nearest."""
        n = len(self.hi)
        if state_dtype == "bf16":
            for moment in self.moments:
                bf16 = torch.empty(n, dtype=torch.bfloat16)
                kernels.narrow(n, *addresses(moment, bf16))
                moment.copy_(bf16)
        else:
            codes = reference_state.zero_moments(self.moments[0], "int8").values()
            kernels.quantize(n, *addresses(*self.moments, *codes))
            kernels.dequantize(n, *addresses(*codes, *self.moments))

    def master(self):
        master = torch.empty(len(self.hi))
        kernels.join(len(master), *addresses(self.hi, self.lo, master))
        return master

    def m_v(self):
        m, v = torch.empty(len(self.hi)), torch.empty(len(self.hi))
        if self.state_dtype != "int8":
            return tuple(moment.float() for moment in self.moments)
        kernels.dequantize(len(m), *addresses(*self.moments, m, v))
        return m, v


def stored(m, state_dtype, key):
    """Return m and v as a step stores them that makes them m and m ** 2."""
    weights = Weights(len(m), state_dtype)
    weights.step(m, key, beta1=0.0, beta2=0.0)
    return weights.m_v()


def assert_right_on_average(found, exact):
    """Check the mean of roundings of one value."""
    values = found.double().unique()
    assert len(values) <= 2
    lower, upper = values.min().item(), values.max().item()
    assert lower <= exact <= upper
    f = (exact - lower) / (upper - lower) if upper > lower else 0.0
    allowed = SIGMAS * math.sqrt(f * (1 - f) / len(found)) + 2**-17  # 8 bits: a part of a step in 2 ** 16
    assert abs((found.double().mean().item() - lower) / ((upper - lower) or 1.0) - f) <= allowed


@pytest.mark.parametrize("apart", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("state_dtype", ["bf16", "int8"])
def test_the_mean_over_elements_is_the_value(state_dtype, apart):
    n = 1 << 16
    for number in range(0, 40, apart):
        value = torch.tensor(-1.0 if number % 2 else 1.0) * 1.3**-number * 0.777
        grad = value.repeat(n)
        grad[::256] = 1.0  # one of each block: the scale stays put, and small values are within its range
        m, v = stored(grad, state_dtype, kernels.state_key(0, 0, number))
        others = torch.arange(n) % 256 != 0
        assert_right_on_average(m[others], value.double().item())
        assert_right_on_average(v[others], (value * value).double().item())


@pytest.mark.parametrize("state_dtype", ["bf16", "int8"])
def test_the_mean_over_steps_is_the_value(state_dtype):
    grad = torch.tensor([1.0, 0.7377, -0.0123])
    ms, vs = zip(*(stored(grad, state_dtype, kernels.state_key(3, 1, t)) for t in range(8192)), strict=True)
    for element in (1, 2):
        assert_right_on_average(torch.stack(ms)[:, element], grad[element].double().item())
        assert_right_on_average(torch.stack(vs)[:, element], grad.square()[element].double().item())


def test_an_m_below_the_smallest_code_keeps_its_mean():
    n = 1 << 18
    for part in (0.6, 0.05):
        grad = torch.full((n,), part * 2.0**-15.75)
        grad[::256] = 1.0
        m, _ = stored(grad, "int8", kernels.state_key(7, 7, 7))
        others = torch.arange(n) % 256 != 0
        assert 0 < (m[others] > 0).double().mean() < 1
        assert_right_on_average(m[others], grad[1].double().item())


def correlation(a, b):
    return float(torch.corrcoef(torch.stack((a.double(), b.double())))[0, 1])


def assert_evenly_spread(values, cells):
    """Check integers from 0 to cells - 1 by their chi square."""
    counts = torch.bincount(values, minlength=cells).double()
    expected = len(values) / cells
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_square - (cells - 1)) < SIGMAS * math.sqrt(2 * (cells - 1))


@pytest.mark.parametrize("width", [16, 20])
def test_the_noise_is_fair_and_unrelated_between_moments_elements_steps_and_parameters(width):
    n = 1 << 20
    limit = SIGMAS / math.sqrt(n)
    m, v = reference_state.noise(kernels.state_key(0, 0, 1), n, width)
    for bits in (m, v):
        for bit in range(width):
            assert abs((bits >> bit & 1).double().mean() - 0.5) < limit
        for part in (bits >> (width - 12), bits & 4095, bits >> 2 & 4095):
            assert_evenly_spread(part, 4096)
        for distance in (1, 2, 16, 32, 256, 4096):
            assert abs(correlation(bits[distance:], bits[:-distance])) < limit * 1.01
        for other in ((0, 0, 2), (0, 1, 1), (1, 0, 1)):
            for others in reference_state.noise(kernels.state_key(*other), n, width):
                assert abs(correlation(bits, others)) < limit
    assert abs(correlation(m, v)) < limit


@pytest.mark.parametrize("width", [16, 20])
def test_the_noise_of_two_that_meet_is_independent_and_not_only_uncorrelated(width):
    """Pairs of 6 bits are spread evenly over the square: m and v, neighbours, one element in two steps."""
    m, v = (bits >> (width - 6) for bits in reference_state.noise(kernels.state_key(0, 0, 1), 1 << 20, width))
    later, _ = reference_state.noise(kernels.state_key(0, 0, 2), 1 << 20, width)
    for other in (v, m.roll(1), m.roll(2), m.roll(32), later >> (width - 6)):
        assert_evenly_spread(m * 64 + other, 4096)


def test_a_pair_of_elements_shares_its_bits_crosswise():
    for width in (16, 20):
        m, v = reference_state.noise(kernels.state_key(0, 0, 1), 1000, width)
        assert torch.equal(m[::2], v[1::2])
        assert torch.equal(m[1::2], v[::2])


def test_v_is_never_0_where_it_should_not_be_and_steps_stay_bounded():
    n = 256 * 16
    generator = torch.Generator().manual_seed(1)
    size = 10.0 ** (-15 * torch.rand(n, generator=generator))
    weights = Weights(n, "int8")
    # By Cauchy and Schwarz: what |m| / sqrt(v) can be where nothing is rounded.
    exact_limit = (1 - 0.9) / math.sqrt((1 - 0.999) * (1 - 0.9**2 / 0.999))
    for t in range(1, 200):
        grad = torch.randn(n, generator=generator) * size
        weights.step(grad * (torch.rand(n, generator=generator) < 0.3), kernels.state_key(0, 0, t), step=t)
        m, v = weights.m_v()
        assert (v > 0)[m != 0].all()
        assert (m.abs() / v.sqrt())[v > 0].max() < 3 * exact_limit
    assert ((v == 0) == (m == 0))[v == 0].all()


@pytest.mark.parametrize(("state_dtype", "beta2"), [("bf16", 0.999), ("int8", 0.99)])
def test_to_nearest_v_freezes_and_at_random_it_decays(state_dtype, beta2):
    """A step changes v by less than half of what separates two stored values: nearest gives the old one."""
    n = 4096
    at_random, to_nearest = Weights(n, state_dtype), Weights(n, "fp32")
    for weights in (at_random, to_nearest):
        weights.step(torch.ones(n), beta2=0.0)
    for t in range(1, 1001):
        at_random.step(torch.full((n,), 0.1), kernels.state_key(0, 0, t), beta2=beta2)
        to_nearest.step(torch.full((n,), 0.1), beta2=beta2)
        to_nearest.round_to_nearest(state_dtype)
    assert torch.equal(to_nearest.m_v()[1], torch.ones(n))
    expected = 0.01 + 0.99 * beta2**1000
    assert at_random.m_v()[1].mean().item() == pytest.approx(expected, rel=0.02)


def descend(state_dtype, beta2, rounding=None):
    """Descend noisily on a quadratic whose gradients become 1000 times smaller; return its last two losses.

    AdamW does not mind, once v has followed.
    """
    n, steps = 512, 3000
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(n, generator=generator)
    weights, losses = Weights(n, state_dtype), []
    for t in range(1, steps + 1):
        slope = 1.0 if t <= 100 else 1e-3
        error = weights.master() - target
        grad = slope * (error + 0.1 * torch.randn(n, generator=generator))
        weights.step(grad, kernels.state_key(0, 0, t), step=t, beta2=beta2)
        if rounding:
            weights.round_to_nearest(rounding)
        if t in (200, steps):
            losses.append(error.square().mean().item())
    return losses


@pytest.mark.parametrize(("state_dtype", "beta2"), [("bf16", 0.999), ("int8", 0.99)])
def test_training_goes_on_where_rounding_to_nearest_stalls(state_dtype, beta2):
    before, after = descend("fp32", beta2)
    progress = before - after
    before, after = descend(state_dtype, beta2)
    assert before - after == pytest.approx(progress, rel=0.1)
    before, after = descend("fp32", beta2, rounding=state_dtype)
    assert before - after < 0.5 * progress
