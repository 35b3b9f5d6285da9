"""How the reference recipe stores Adam's moments: in fp32, bf16 or 8 bits, in plain torch.

A step on bf16 or 8-bit moments widens them to fp32, computes [Note: the small step] of recipe.py on them, and
stores the new moments rounded. The weight is computed from the unrounded ones. kernels.h has the same rules,
and the kernels give the same bits.

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
"""

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

StateDtype: TypeAlias = Literal["fp32", "bf16", "int8"]

STATE_BLOCK = 256  # elements that share a pair of scales
U32_MASK = 2**32 - 1
U64_MASK = 2**64 - 1
SIZE_MASK = 2**31 - 1  # an fp32 without its sign

BF16_MAX = 0x7F7F0000  # bits of the largest finite bf16
GRID_STEP = 1 << 20
GRID_MAX = 0x7F700000  # bits of the largest finite grid point
SCALE_MIN = 0x12800000  # bits of 2^-90
M_CODES, V_CODES = 127, 255


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


def noise(key: int, n: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the random bits of m and of v, `width` each, for elements 0 to n - 1: [Note: the noise].

    The hash is Wellons' lowbias32 without its first shift; the key's lower half is added after the first
    product, and its upper half is xored in between the rounds.
    """
    x = torch.arange(-(-n // 2)) * 0x7FEB352D  # int64 overflows, but the low 32 bits are right
    x = (x + (key & U32_MASK)) & U32_MASK
    x ^= x >> 15
    x ^= key >> 32
    x = (x * 0x846CA68B) & U32_MASK
    x ^= x >> 16
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


def encode_at_random(values: Tensor, random: Tensor, codes: int) -> tuple[Tensor, Tensor]:
    """Return the 8-bit codes of flat fp32 values and their blocks' scales: [Note: 8-bit moments].

    random: 20 bits per value; codes: M_CODES (signed) or V_CODES (non-negative values).
    """
    bits, random = in_blocks(bits_of(values)), in_blocks(random)
    size = bits & SIZE_MASK
    point = torch.where(size < GRID_MAX, size + random, size) // GRID_STEP * GRID_STEP
    largest = point.amax(dim=1, keepdim=True)
    scale = largest.clamp(min=SCALE_MIN)
    base = scale - codes * GRID_STEP
    code = (point - base) // GRID_STEP
    smallest = base + GRID_STEP
    if codes == M_CODES:
        needed = (GRID_STEP - random).float() * (float_of(smallest) * 2.0**-20)  # exact
        code = torch.where(size < smallest, (size >= bits_of(needed)).long(), code)
        code += bits >> 31 << 7
    else:
        code = torch.where(point > 0, code.clamp(min=1), 0)
    stored_scale = torch.where(largest > 0, scale, 0)
    return code.flatten()[: len(values)].to(torch.uint8), float_of(stored_scale.flatten())


def decode(code: Tensor, scale: Tensor, codes: int) -> Tensor:
    """Return the exact fp32 values of flat 8-bit codes."""
    blocks = in_blocks(code.long())
    magnitude = blocks & codes
    base = bits_of(scale).unsqueeze(1) - codes * GRID_STEP
    sign = (blocks >> 7 << 31) if codes == M_CODES else 0
    bits = sign + torch.where(magnitude > 0, base + magnitude * GRID_STEP, 0)
    return float_of(bits.flatten()[: len(code)])


def zero_moments(master: Tensor, state_dtype: StateDtype) -> dict[str, Tensor]:
    """Return the stored moments of a parameter before its first step.

    `exp_avg` and `exp_avg_sq` have the parameter's shape; with 8 bits, `scale` holds the scales of m and v
    for each block in turn, in fp32.
    """
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}[state_dtype]
    moments = {name: torch.zeros_like(master, dtype=dtype) for name in ("exp_avg", "exp_avg_sq")}
    if state_dtype == "int8":
        moments["scale"] = torch.zeros(-(-master.numel() // STATE_BLOCK) * 2, device=master.device)
    return moments


def widened(state: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return m and v in fp32: the stored tensors themselves if they are fp32."""
    m, v = state["exp_avg"], state["exp_avg_sq"]
    if "scale" in state:
        m_scale, v_scale = state["scale"].view(-1, 2).unbind(1)
        m = decode(m.flatten(), m_scale.contiguous(), M_CODES).view(m.shape)
        v = decode(v.flatten(), v_scale.contiguous(), V_CODES).view(v.shape)
    return m.float(), v.float()


def store(state: dict[str, Any], m: Tensor, v: Tensor, key: int) -> None:
    """Store new fp32 moments in a parameter's state; a narrower state is rounded with the noise of `key`."""
    if state["exp_avg"].dtype == torch.float32:
        return  # m and v are the stored tensors
    width = 20 if "scale" in state else 16
    m_random, v_random = (random.to(m.device) for random in noise(key, m.numel(), width))
    m, v = m.flatten(), v.flatten()
    if "scale" in state:
        m, m_scale = encode_at_random(m, m_random, M_CODES)
        v, v_scale = encode_at_random(v, v_random, V_CODES)
        state["scale"].copy_(torch.stack((m_scale, v_scale), dim=1).flatten())
    else:
        m, v = bf16_at_random(m, m_random), bf16_at_random(v, v_random)
    state["exp_avg"].copy_(m.view(state["exp_avg"].shape))
    state["exp_avg_sq"].copy_(v.view(state["exp_avg_sq"].shape))
