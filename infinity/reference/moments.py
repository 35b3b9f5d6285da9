"""How the reference recipe stores moments: in fp32, bf16, 8 or 4 bits, in plain torch.

A step on moments that are not fp32 widens them to fp32, computes [Note: the small step] of recipe.py on them
(other optimizers their own step), and stores the new moments rounded. The weight is computed from the
unrounded ones. kernels.h has the same rules, and the kernels give the same bits.

[Note: stochastic rounding]
A moment between two stored values becomes the upper one with probability (x - lower) / (upper - lower), else
the lower one: its mean is exact. Rounded to nearest, v would freeze: with beta2 = 0.999 a step changes it by
0.1 %, and half the distance of two bf16 values is 0.2 % to 0.4 %.

[Note: the noise]
In step t each pair of elements of a parameter, 2 j and 2 j + 1, has 32 random bits: a hash of
state_key(seed, parameter, t) and j. They depend on nothing else, such as a generator, an order or threads.
Each rounding uses the lowest or the highest 16 or 20 of them: the even element's m and the odd one's v the
lowest, the odd one's m and the even one's v the highest. So m and v of one element are rounded independently;
that two elements share bits does not change their means. (With 20 bits, 8 are in both: the lowest of one and
the highest of the other.)

[Note: bf16 moments]
The upper 16 bits of (bits of the fp32 + 16 random bits). Zeros, infinities and NaNs are kept; a finite value
beyond the largest finite bf16 is truncated to it.

[Note: 8-bit moments]
Each block of 256 elements of a parameter has a scale for m and one for v (after Dettmers et al., arXiv
2110.02861, whose codes index a table of values; ours are computed). The grid consists of the floats with 3
bits of mantissa; their bits are 2^20 apart. A magnitude is first rounded to it: (bits of the fp32 + 20 random
bits) >> 20. The scale is the block's largest grid point, at least 2^-90 (stored as 0 if all are 0). Code c
stands for the float that is c - 127 (m, which also has a sign bit) or c - 255 (v) grid points from the scale;
c = 0 stands for 0. A value of m below code 1 becomes code 1 or 0, stochastically; a v below it becomes code 1
unless its grid point is 0 (below 2^-129), so that v is never 0 where m is not, which would make a step of
m / eps. v has twice m's range in powers of two, since it has the size of m's square. Infinities and NaNs are
on the grid; a finite value beyond the largest finite grid point is truncated to it.

[Note: 4-bit moments]
The same with coarser grids: of m the floats with one bit of mantissa, 2^22 apart in their bits, and of v the
powers of two, 2^23 apart; the 20 random bits are the highest below a grid step. m has a sign (bit 3) and 7
codes beside 0, of which the smallest is 1/8 of the scale; v 15, of which the smallest is 2^-14 of it. Powers
of two have no NaN: a v that is NaN becomes infinite (its m, and so its weight, stay NaN). An optimizer of one
moment has the same codes of it, and scales of zero for the other.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

StateDtype: TypeAlias = Literal["fp32", "bf16", "int8", "int4"]

STATE_BLOCK = 256  # elements that share a pair of scales
U32_MASK = 2**32 - 1
U64_MASK = 2**64 - 1
SIZE_MASK = 2**31 - 1  # an fp32 without its sign

BF16_MAX = 0x7F7F0000  # bits of the largest finite bf16
INFINITY_BITS = 0x7F800000
SCALE_MIN = 0x12800000  # bits of 2^-90
CODE_NOISE = 20


MASTER_BITS = 0x9E3779B97F4A7C15  # in which the key of masters' random bits differs from that of moments'


class MomentCoding(NamedTuple):
    """The codes of a moment: how many there are beside 0, the bits that its grid drops, and whether they have
    a sign, the bit above them.
    """

    codes: int
    shift: int
    signed: bool


M8, V8 = MomentCoding(127, 20, signed=True), MomentCoding(255, 20, signed=False)
M4, V4 = MomentCoding(7, 22, signed=True), MomentCoding(15, 23, signed=False)
_CODINGS = {"int8": (M8, V8), "int4": (M4, V4)}


def state_key(seed: int, parameter: int, step: int) -> int:
    """Return the 64-bit key of [Note: the noise]: each number goes through a round of splitmix64.

    parameter: its position in the optimizer's flattened param_groups; step: its own step count.
    """
    key = 0
    for number in (seed, parameter, step):
        key = ((key ^ number) + 0x9E3779B97F4A7C15) & U64_MASK
        key = ((key ^ key >> 30) * 0xBF58476D1CE4E5B9) & U64_MASK
        key = ((key ^ key >> 27) * 0x94D049BB133111EB) & U64_MASK
        key ^= key >> 31
    return key


def hashes(key: int, n: int) -> Tensor:
    """Return 32 bits for each of the numbers from 0 to n - 1.

    The hash is Wellons' lowbias32 without its first shift; the key's lower half is added after the first
    product, and its upper half is xored in between the rounds.
    """
    x = torch.arange(n) * 0x7FEB352D  # int64 overflows, but the low 32 bits are right
    x = (x + (key & U32_MASK)) & U32_MASK
    x ^= x >> 15
    x ^= key >> 32
    x = (x * 0x846CA68B) & U32_MASK
    x ^= x >> 16
    return x


def noise(key: int, n: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the random bits of m and of v, `width` each, for elements 0 to n - 1: [Note: the noise]."""
    x = hashes(key, -(-n // 2))
    lowest, highest = x & ((1 << width) - 1), x >> (32 - width)
    m, v = torch.stack((lowest, highest), dim=1), torch.stack((highest, lowest), dim=1)
    return m.flatten()[:n], v.flatten()[:n]


def bits_of(values: Tensor) -> Tensor:
    """Return the bits of fp32 values as non-negative int64."""
    return values.view(torch.int32).long() & U32_MASK


def float_of(bits: Tensor) -> Tensor:
    """Return the fp32 values with these bits."""
    return bits.to(torch.int32).view(torch.float32)


def bf16_at_random(values: Tensor, random: Tensor) -> Tensor:
    """Round fp32 values to bf16 with 16 random bits each: [Note: bf16 moments]."""
    bits = bits_of(values)
    bits = torch.where((bits & SIZE_MASK) < BF16_MAX, bits + random, bits)
    return (bits >> 16).to(torch.int16).view(torch.bfloat16)


def in_blocks(flat: Tensor) -> Tensor:
    """Return the values as (blocks, STATE_BLOCK), the last block padded with zeros."""
    blocks = -(-len(flat) // STATE_BLOCK)
    return torch.nn.functional.pad(flat, (0, blocks * STATE_BLOCK - len(flat))).view(blocks, STATE_BLOCK)


def encode_at_random(values: Tensor, random: Tensor, by: MomentCoding) -> tuple[Tensor, Tensor]:
    """Return the codes of flat fp32 values and their blocks' scales: [Note: 8-bit moments].

    random: CODE_NOISE bits per value.
    """
    step = 1 << by.shift
    bits, random = in_blocks(bits_of(values)), in_blocks(random)
    size = bits & SIZE_MASK
    noisy = size + (random << (by.shift - CODE_NOISE))
    point = torch.where(size < INFINITY_BITS - step, noisy, size) // step * step
    largest = point.amax(dim=1, keepdim=True)
    scale = largest.clamp(min=SCALE_MIN)
    base = scale - by.codes * step
    code = (point - base) // step
    smallest = base + step
    if by.signed:
        needed = ((1 << CODE_NOISE) - random).float() * (float_of(smallest) * 2.0**-CODE_NOISE)  # exact
        code = torch.where(size < smallest, (size >= bits_of(needed)).long(), code)
        code += (bits >> 31) * (by.codes + 1)
    else:
        code = torch.where(point > 0, code.clamp(min=1), 0)
    stored_scale = torch.where(largest > 0, scale, 0)
    return code.flatten()[: len(values)].to(torch.uint8), float_of(stored_scale.flatten())


def decode(code: Tensor, scale: Tensor, by: MomentCoding) -> Tensor:
    """Return the exact fp32 values of flat codes."""
    blocks = in_blocks(code.long())
    magnitude = blocks & by.codes
    base = bits_of(scale).unsqueeze(1) - by.codes * (1 << by.shift)
    sign = blocks // (by.codes + 1) << 31 if by.signed else 0
    bits = sign + torch.where(magnitude > 0, base + magnitude * (1 << by.shift), 0)
    return float_of(bits.flatten()[: len(code)])


def in_24_bits(master: Tensor, key: int | None = None) -> Tensor:
    """Return fp32 masters rounded to 24 bits: at random, by the key of a step, or without one to the nearest.

    [Note: 24-bit masters] Of a split master `hi` stays, and `lo` is divided by 256, rounded, at most 127. To
    round at random, 8 bits are added before the lowest 8 are dropped: byte e mod 4 of the hash of e div 4.
    """
    bits = bits_of(master.flatten())
    hi = bits + 0x8000 >> 16
    random: Tensor | int = 128
    if key is not None:
        four = hashes(key ^ MASTER_BITS, -(-len(bits) // 4))
        random = torch.stack([four >> 8 * byte & 0xFF for byte in range(4)], dim=1).flatten()[: len(bits)]
    lo = ((bits - (hi << 16)) + random >> 8).clamp(max=127)
    return float_of((hi << 16) + (lo << 8) & U32_MASK).view(master.shape)


def zero_moments(master: Tensor, state_dtype: StateDtype) -> dict[str, Tensor]:
    """Return the stored moments of a parameter before its first step.

    `exp_avg` and `exp_avg_sq` have the parameter's shape, also of 4-bit codes, which records keep two in a
    byte; with 8 or 4 bits, `scale` holds the scales of m and v for each block in turn, in fp32.
    """
    types = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8, "int4": torch.uint8}
    dtype = types[state_dtype]
    moments = {name: torch.zeros_like(master, dtype=dtype) for name in ("exp_avg", "exp_avg_sq")}
    if state_dtype in _CODINGS:
        moments["scale"] = torch.zeros(-(-master.numel() // STATE_BLOCK) * 2, device=master.device)
    return moments


def widened(state: dict[str, Any], state_dtype: StateDtype) -> tuple[Tensor, Tensor]:
    """Return m and v in fp32: the stored tensors themselves if they are fp32."""
    m, v = state["exp_avg"], state["exp_avg_sq"]
    if state_dtype in _CODINGS:
        scales = state["scale"].view(-1, 2).unbind(1)
        m, v = (
            decode(one.flatten(), scale.contiguous(), by).view(one.shape)
            for one, scale, by in zip((m, v), scales, _CODINGS[state_dtype], strict=True)
        )
    return m.float(), v.float()


def store(state: dict[str, Any], m: Tensor, v: Tensor, key: int, state_dtype: StateDtype) -> None:
    """Store new fp32 moments in a parameter's state; a narrower state is rounded with the noise of `key`."""
    if state_dtype == "fp32":
        return  # m and v are the stored tensors
    width = CODE_NOISE if state_dtype in _CODINGS else 16
    m_random, v_random = (random.to(m.device) for random in noise(key, m.numel(), width))
    m, v = m.flatten(), v.flatten()
    if state_dtype in _CODINGS:
        of_m, of_v = _CODINGS[state_dtype]
        m, m_scale = encode_at_random(m, m_random, of_m)
        v, v_scale = encode_at_random(v, v_random, of_v)
        state["scale"].copy_(torch.stack((m_scale, v_scale), dim=1).flatten())
    else:
        m, v = bf16_at_random(m, m_random), bf16_at_random(v, v_random)
    state["exp_avg"].copy_(m.view(state["exp_avg"].shape))
    state["exp_avg_sq"].copy_(v.view(state["exp_avg_sq"].shape))


def step_stored(
    state: dict[str, Any], key: int, state_dtype: StateDtype, step: Callable[[Tensor, Tensor], None]
) -> None:
    """Make a step on stored moments: `step` changes m and v, in fp32, in place; one that its optimizer does
    not keep stays zero.
    """
    m, v = widened(state, state_dtype)
    step(m, v)
    store(state, m, v, key, state_dtype)
