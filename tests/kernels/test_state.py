"""Bf16 and 8-bit moments. Trusted: the fp32 step (test_kernels.py), torch's integers. Faked: nothing."""

import itertools
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest
import torch

from infinity import kernels, reference
from infinity.kernels import operations
from infinity.planning import layout as shard
from infinity.reference import moments as reference_state
from kernel_cases import (
    addresses,
    bits,
    f32_of_bits,
    join,
    random_bits,
    same_on_any_threads,
    same_under_every_isa,
    scalars,
    shifted,
    small_adamw,
    split,
)

BLOCK = kernels.STATE_BLOCK
# Either side of every vector width, of a block that shares scales, of a piece for the pool, and odd ones.
SIZES = (0, 1, 7, 8, 9, 15, 16, 17, 31, 63, 100, 255, 256, 257, 511, 16383, 16385, 65536 + 29)
KEY = kernels.state_key(seed=1, parameter=2, step=3)


def scales(n):
    return torch.zeros(-(-n // BLOCK) * 2)


def quantized(m, v):
    n = len(m)
    codes = torch.empty(n, dtype=torch.uint8), torch.empty(n, dtype=torch.uint8), scales(n)
    kernels.quantize(n, *addresses(m, v, *codes))
    return codes


def dequantized(m, v, scale):
    values = torch.empty(len(m)), torch.empty(len(m))
    kernels.dequantize(len(m), *addresses(m, v, scale, *values))
    return values


def narrowed(values):
    bf16 = torch.empty(len(values), dtype=torch.bfloat16)
    kernels.narrow(len(values), *addresses(values, bf16))
    return bf16


def fresh(n, state_dtype):
    """Return hi, lo and the stored moments of a parameter of zeros."""
    weight = [torch.zeros(n, dtype=torch.int16) for _ in range(2)]
    return [*weight, *reference_state.zero_moments(torch.zeros(n), state_dtype).values()]


def step(fields, grad, key=KEY, first=0, **changes):
    """Run the step that the number and type of fields ask for."""
    dtype = "bf16" if grad.dtype == torch.bfloat16 else "f32"
    run = small_adamw("int8" if len(fields) == 5 else "bf16")
    run(len(grad), *addresses(*fields, grad), dtype, scalars(**changes), key, first)
    return fields


def stored_as(values, state_dtype, key=KEY):
    """Return m and v, in fp32, as a step stores them that makes m = values and v = values ** 2."""
    fields = step(fresh(len(values), state_dtype), values, key, beta1=0.0, beta2=0.0)
    return dequantized(*fields[2:]) if state_dtype == "int8" else (fields[2].float(), fields[3].float())


def every_operation(n, offset, seed):
    """Run each kernel on slices that start `offset` elements into their storage; return what each gave."""
    slice_of = partial(shifted, offset=offset)
    hi, lo = (slice_of(field) for field in split(random_bits(n, seed)))
    m, v, grad = (slice_of(random_bits(n, seed + i)) for i in (1, 2, 3))
    moderate = slice_of(torch.randn(n, generator=torch.Generator().manual_seed(seed)).exp())
    results = {"narrow": narrowed(m)}
    for name, pair in (("wild", (m, v)), ("moderate", (moderate, moderate**3))):
        codes = [slice_of(field) for field in quantized(*pair)]
        results |= {f"quantize {name} {i}": field for i, field in enumerate(codes)}
        results |= {f"dequantize {name} {i}": field for i, field in enumerate(dequantized(*codes))}
        bf16s = [slice_of(narrowed(field)) for field in pair]
        for gradient in (grad, slice_of(narrowed(grad)), moderate):
            for moments in (codes, bf16s):
                fields = [slice_of(field) for field in (hi, lo, *moments)]
                step(fields, gradient, first=offset, clip=0.3)
                label = f"adamw {len(moments)} moments {name} {gradient.dtype}"
                results |= {f"{label} {i}": field for i, field in enumerate(fields)}
    return results


@pytest.mark.parametrize(("n", "offset"), list(itertools.product(SIZES, (0, 1))))
def test_every_isa_gives_the_scalar_bits_at_any_size_and_alignment(n, offset):
    same_under_every_isa(every_operation, n, offset)


def test_any_number_of_threads_gives_the_same_bits():
    same_on_any_threads(every_operation)


def test_all_who_know_the_size_of_a_block_that_shares_scales_say_the_same():
    assert operations.STATE_BLOCK == shard.STATE_BLOCK == reference_state.STATE_BLOCK
    source = (Path(operations.__file__).parent / "internal.h").read_text()
    assert f"#define STATE_BLOCK ((size_t){operations.STATE_BLOCK})\n" in source


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("state_dtype", ["bf16", "int8"])
def test_blocks_of_every_range_of_moments_equal_the_scalar_ones(isa, state_dtype, grad_dtype):
    """Whole blocks may have kernels of their own: plain ones, and those with one moment out of the common."""
    n, generator = BLOCK * 400, torch.Generator().manual_seed(3)
    grad = torch.randn(n, generator=generator).view(-1, BLOCK)
    odd = [0.0, -0.0, 1e-30, 2.0**-16, 2.0**-15, 2.0**-8, 1e19, 3e38, torch.inf, torch.nan, -torch.nan]
    for block in range(40, 400):
        grad[block, block % BLOCK] = odd[block % len(odd)]
        grad[block] *= 10.0 ** (block % 7 - 3)
    grad[380:] = 0
    smallest = f32_of_bits([0x3F800000 - 126 * 2**20])  # of an m beside 1.0
    grad[20:30] = smallest * (0.9 + 0.2 * torch.rand(10, BLOCK, generator=generator))
    grad[20:30, 7] = 1.0
    grad[30], grad[31] = 3.3e38, -torch.nan
    grad = grad.flatten().to(grad_dtype)
    chosen = kernels.isa()
    results = []
    for name in ("scalar", chosen):
        kernels.set_isa(name)
        fields = [*split(torch.randn(n, generator=torch.Generator().manual_seed(4)))]
        fields += fresh(n, state_dtype)[2:]
        for count in range(1, 5):
            step(
                fields, grad if count % 2 else grad.flip(0), KEY + count, step=count, beta1=0.3 * (count % 4)
            )
        results.append(fields)
    for expected, found in zip(*results, strict=True):
        assert torch.equal(bits(expected), bits(found))


@pytest.mark.parametrize(
    ("state_dtype", "cuts"),
    [("bf16", (0, 1, 300, 16384, 20_000, 50_021)), ("int8", (0, 256, 16384, 19_968, 50_021))],
)
def test_a_range_cut_in_pieces_gives_the_same_bits(state_dtype, cuts):
    n = 50_021
    grad = torch.randn(n, generator=torch.Generator().manual_seed(1))
    whole, pieces = fresh(n, state_dtype), fresh(n, state_dtype)
    for key in (KEY, KEY + 1, KEY + 2):
        step(whole, grad, key)
        for start, end in itertools.pairwise(cuts):
            piece = [field[start:end] for field in pieces[:4]]
            piece += [field[start // BLOCK * 2 :] for field in pieces[4:]]
            step(piece, grad[start:end], key, first=start)
    for expected, found in zip(whole, pieces, strict=True):
        assert torch.equal(bits(expected), bits(found))


@pytest.mark.parametrize("state_dtype", ["bf16", "int8"])
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
def test_adamw_equals_the_reference_recipe_bit_for_bit(isa, state_dtype, grad_dtype):
    n, generator = 5_021, torch.Generator().manual_seed(1)
    master = torch.randn(n, generator=generator)
    state = reference_state.zero_moments(master, state_dtype)
    fields = [*split(master), *(moment.clone() for moment in state.values())]
    for count in range(1, 8):
        magnitude = 10.0 ** torch.randint(-30, 3, (n,), generator=generator)
        grad = (torch.randn(n, generator=generator) * magnitude).to(grad_dtype)
        if count == 6:
            grad[::999] = torch.inf
            grad[3::999] = torch.nan
        m, v = reference_state.widened(state, state_dtype)
        group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
        reference.adamw_small_step(master, m, v, grad, torch.tensor(0.37), count, group)
        reference_state.store(state, m, v, reference_state.state_key(5, 6, count), state_dtype)
        clip = torch.tensor(0.37).item()
        step(fields, grad, kernels.state_key(5, 6, count), step=count, clip=clip)
        assert torch.equal(bits(master), bits(join(*fields[:2])))
        for expected, found in zip(state.values(), fields[2:], strict=True):
            assert torch.equal(bits(expected), bits(found))


def test_optimizer_and_kernels_agree_on_parameter_numbers_and_step_counts():
    drawn = [torch.randn(300, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(3)]
    parameters = [torch.nn.Parameter(values.clone()) for values in drawn]
    groups = [{"params": parameters[:1]}, {"params": parameters[1:]}]
    optimizer = reference.ReferenceAdamW(groups, state_dtype="int8", seed=11, weight_decay=0.1)
    fields = [[*split(values.float()), *fresh(300, "int8")[2:]] for values in drawn]
    for count in range(1, 4):
        for number, parameter in enumerate(parameters):
            parameter.grad = None
            if number == 1 and count == 2:
                continue  # no gradient, no step: its own count stays behind
            own = count - 1 if number == 1 and count == 3 else count
            grad = torch.randn(300, generator=torch.Generator().manual_seed(9 * count + number))
            parameter.grad = grad.bfloat16()
            step(fields[number], parameter.grad, kernels.state_key(11, number, own), step=own)
        optimizer.step()
    for parameter, (hi, lo, *moments) in zip(parameters, fields, strict=True):
        state = optimizer.state[parameter]
        assert torch.equal(bits(state["master"]), bits(join(hi, lo)))
        for name, found in zip(("exp_avg", "exp_avg_sq", "scale"), moments, strict=True):
            assert torch.equal(bits(state[name]), bits(found))


def test_a_key_is_64_bits_and_changes_with_every_number():
    numbers = list(itertools.product((0, 1, 2, 2**63), repeat=3))
    keys = [kernels.state_key(*triple) for triple in numbers]
    assert keys == [reference_state.state_key(*triple) for triple in numbers]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**64 for key in keys)


def test_the_weight_has_seen_the_unrounded_moments(isa):
    n = 3 * BLOCK + 5
    grad = torch.randn(n, generator=torch.Generator().manual_seed(2))
    halves, bytes_ = (step(fresh(n, state_dtype), grad) for state_dtype in ("bf16", "int8"))
    assert torch.equal(halves[0], bytes_[0])
    assert torch.equal(halves[1], bytes_[1])


def places(found, exact, scale):
    """Return by how many last places of an fp32 as large as `scale` what was found is off, at most."""
    return ((found.double() - exact).abs() / 2.0 ** (scale.abs().log2().floor() - 23)).max().item()


def test_the_small_step_is_within_a_few_last_places_of_the_exact_one():
    """Over 20 steps whose moments are kept in fp32, each beside the same step in fp64."""
    n, generator = 20_000, torch.Generator().manual_seed(6)
    m, v = torch.zeros(n), torch.zeros(n)
    clip, group = torch.tensor(0.37), {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    for count in range(1, 21):
        grad = torch.randn(n, generator=generator) * 10.0 ** -torch.randint(0, 9, (n,), generator=generator)
        g = grad.double() * clip.double()
        exact_m, exact_v = m.double() * 0.9 + g * (1 - 0.9), v.double() * 0.999 + g * g * (1 - 0.999)
        largest_m = torch.maximum(m.abs().double(), g.abs() * (1 - 0.9))  # of two terms that may cancel
        p = torch.zeros(n)  # so that the move is seen alone
        reference.adamw_small_step(p, m, v, grad, clip, count, group)
        denom = (exact_v / (1 - 0.999**count)).sqrt() + 1e-8
        assert places(m, exact_m, largest_m) <= 3
        assert places(v, exact_v, exact_v) <= 5
        exact_move = -1e-3 * (m.double() / (1 - 0.9**count)) / denom
        assert places(p, exact_move, exact_move) <= 7


def test_the_references_fused_operation_rounds_the_exact_result_once():
    """Beside exact fractions, rounded by hand; a third of the cases are hard: sums near a tie."""
    generator = torch.Generator().manual_seed(7)
    a, b, c = (torch.randn(3000, generator=generator) for _ in range(3))
    c[::3] *= 2.0 ** torch.randint(-60, 60, (1000,), generator=generator)
    a[1::3], b[1::3] = 1 + 2.0**-12, 1 + 2.0**-12  # a product of 1 + 2^-11 + 2^-24: a tie, but for c
    c[1::3] = torch.tensor([1.0, -1.0]).repeat(500) * 2.0 ** -torch.randint(40, 120, (1000,)).float()
    c[1], c[4] = 0.0, -0.0
    for values in zip(a, b, c, reference.fused(a, b, c), strict=True):
        x, y, z, found = (Fraction(value.item()) for value in values)
        lower, upper = (
            Fraction(values[3].nextafter(torch.tensor(end)).item()) for end in (-torch.inf, torch.inf)
        )
        exact = x * y + z
        is_even = bits(values[3].view(1)).item() % 2 == 0
        below, above = exact - (lower + found) / 2, (found + upper) / 2 - exact
        assert min(below, above) > 0 or (min(below, above) == 0 and is_even)
    extremes = torch.tensor([torch.inf, -torch.inf, torch.nan, 3e38, 0.0, -0.0, 1e-45])
    p, q, r = (one.flatten() for one in torch.meshgrid(extremes, extremes, extremes, indexing="ij"))
    expected, found = (p.double() * q.double() + r.double()).float(), reference.fused(p, q, r)
    assert torch.equal(bits(expected.nan_to_num(7.0)), bits(found.nan_to_num(7.0)))


def test_zeros_stay_zeros_down_to_their_bytes(isa):
    for state_dtype in ("bf16", "int8"):
        fields = step(fresh(1000, state_dtype), torch.zeros(1000))
        assert not any(bits(field).any() for field in fields)


def test_infinities_and_nans_stay_what_they_are_and_do_not_spread(isa):
    values = torch.full((BLOCK * 2,), 0.5)
    values[3], values[4], values[5] = torch.inf, -torch.inf, torch.nan
    for state_dtype in ("bf16", "int8"):
        start = fresh(len(values), state_dtype)
        fields = step(start, values, beta1=0.5, beta2=0.5)
        m, v = dequantized(*fields[2:]) if state_dtype == "int8" else [f.float() for f in fields[2:]]
        assert torch.equal(m[3:5], values[3:5])
        assert m[5].isnan()
        # Infinite or NaN, a gradient makes its weight NaN: it is never passed over in silence.
        assert join(*fields[:2])[3:6].isnan().all()
        assert v[3:6].isinf().tolist() == [True, True, False]
        assert v[5].isnan()
        assert m[6:].isfinite().all()
        assert v[6:].isfinite().all()
        assert (v[6:] > 0).all()
        expected = torch.full((BLOCK,), 0.25)
        assert torch.equal(m[BLOCK:], expected)
    wild = torch.cat([random_bits(BLOCK, 5), f32_of_bits([0x7F812345, 0xFFC12345])])
    m, v = dequantized(*quantized(wild, wild))
    assert torch.equal(wild.isnan(), m.isnan() & v.isnan())
    assert torch.equal(wild.isinf(), m.isinf())
    assert torch.equal(m[wild.isinf()], wild[wild.isinf()])


def test_rounding_at_random_never_makes_an_infinity(isa):
    for state_dtype, largest in (("bf16", 0x7F7F0000), ("int8", 0x7F700000)):
        patterns = [largest - 1, largest, largest + 1, 0x7F7FFFFF, 0xFF7FFFFF] * 200
        m, _ = stored_as(f32_of_bits(patterns), state_dtype)
        assert m.isfinite().all()
        assert torch.equal(m[1:5].abs(), f32_of_bits([largest] * 4))


def test_narrow_is_torchs_rounding_with_one_nan(isa):
    values = random_bits(70_001, 3)
    expected = bits(values.bfloat16()).masked_fill(values.isnan(), 0x7FC0)
    assert torch.equal(expected, bits(narrowed(values)))


def test_quantize_and_back_is_within_a_sixteenth_or_half_the_smallest_code(isa):
    generator = torch.Generator().manual_seed(4)
    for spread in (1, 5, 12):
        n = 20 * BLOCK + 77
        m = torch.randn(n, generator=generator) * 10.0 ** (-spread * torch.rand(n, generator=generator))
        v = m**2
        codes = quantized(m, v)
        m_back, v_back = dequantized(*codes)
        one = torch.ones(n, dtype=torch.uint8)
        m_smallest, v_smallest = dequantized(one, one, codes[2])
        assert ((m_back - m).abs() <= torch.maximum(m.abs() / 16, m_smallest / 2)).all()
        assert ((v_back - v).abs() <= v / 16)[v >= v_smallest].all()
        assert torch.equal(v_back[v < v_smallest], v_smallest[v < v_smallest])
        m_scale, v_scale = codes[2].view(-1, 2).repeat_interleave(BLOCK, dim=0)[:n].unbind(1)
        for smallest, scale, range_ in ((m_smallest, m_scale, 15.75), (v_smallest, v_scale, 31.75)):
            assert ((scale / smallest).log2() - range_).abs().max() < 0.1
        for expected, found in zip((m_back, v_back), dequantized(*quantized(m_back, v_back)), strict=True):
            assert torch.equal(expected, found)


def test_to_nearest_an_m_of_half_the_smallest_code_goes_up_and_a_smaller_one_to_0(isa):
    smallest = f32_of_bits([0x3F800000 - 126 * 2**20])
    half = (smallest / 2).view(torch.int32)
    m = torch.cat([half, half - 1, half + 1]).view(torch.float32).repeat(20)
    m[-1] = 1.0
    back, _ = dequantized(*quantized(-m, m))
    expected = -torch.cat([smallest, smallest * 0, smallest]).repeat(20)
    expected[-1] = -1.0
    assert torch.equal(bits(expected), bits(back))


def test_what_cannot_be_meant_is_refused_at_the_border():
    with pytest.raises(ValueError, match="key=-1"):
        small_adamw("bf16")(0, 0, 0, 0, 0, 0, "bf16", scalars(), -1, 0)
    with pytest.raises(ValueError, match="first=18446744073709551616"):
        small_adamw("int8")(0, 0, 0, 0, 0, 0, 0, "bf16", scalars(), 0, 2**64)
    with pytest.raises(ValueError, match="scale=0"):
        small_adamw("int8")(1, 8, 8, 8, 8, 0, 8, "bf16", scalars(), 0, 0)
    with pytest.raises(ValueError, match="v_f32=0"):
        kernels.quantize(1, 8, 0, 8, 8, 8)
    with pytest.raises(ValueError, match="step=-1"):
        kernels.state_key(0, 0, -1)
