"""The kernels as typed functions over addresses, which check their arguments and call C."""

from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias

from infinity.kernels.checksums import Checksums
from infinity.kernels.library import Pointer, UnsupportedIsaError, ffi, isa, library
from infinity.kernels.scalars import AdamWScalars

GradientDtype: TypeAlias = Literal["bf16", "f32"]
AnyGradientDtype: TypeAlias = Literal["bf16", "f32", "f16"]

HALF = 0.5  # torch.lerp changes its form at this weight
STATE_BLOCK = 256  # elements whose 8-bit moments share a pair of scales
_UNSUPPORTED = -1


class Rows(NamedTuple):
    """The place of a matrix in memory; strides are in elements."""

    address: int
    stride: int
    """From one row to the next."""
    step: int = 1
    """Within a row, from one element to the next."""


def check(n: int, **addresses: int) -> None:
    """Refuse a count below 0, and null addresses.

    Raises:
        ValueError: the message names the argument.
    """
    if n < 0:
        message = f"n={n}: expected a count of at least 0"
        raise ValueError(message)
    if n == 0:
        return
    for name, address in addresses.items():
        if address <= 0:
            message = f"{name}={address}: expected an address, for n={n}"
            raise ValueError(message)


def check_dtype(dtype: str) -> None:
    """Refuse a gradient of another type than bf16 and fp32.

    Raises:
        ValueError: the message names it.
    """
    if dtype not in ("bf16", "f32"):
        message = f"dtype={dtype!r}: expected 'bf16' or 'f32'"
        raise ValueError(message)


_U8, _I8, _U16, _I16, _F32 = map(ffi.typeof, ("uint8_t *", "int8_t *", "uint16_t *", "int16_t *", "float *"))
"""Found once: a text is looked up at each cast."""


def as_u8(address: int) -> Any:
    """Return an address as a C pointer."""
    return ffi.cast(_U8, address)


def as_u16(address: int) -> Any:
    """Return an address as a C pointer."""
    return ffi.cast(_U16, address)


def as_i16(address: int) -> Any:
    """Return an address as a C pointer."""
    return ffi.cast(_I16, address)


def as_f32(address: int) -> Any:
    """Return an address as a C pointer."""
    return ffi.cast(_F32, address)


@lru_cache(maxsize=64)  # a step has few different scalars, but calls a kernel for every tile
def rounded(scalars: AdamWScalars) -> Any:
    """Return the C struct: each scalar computed in fp64, then rounded to fp32 by the assignment."""
    struct = ffi.new("struct infinity_adamw *")
    struct.clip = scalars.clip
    struct.decay = 1 - scalars.lr * scalars.weight_decay
    struct.l2 = scalars.weight_decay
    struct.lerp_weight = 1 - scalars.beta1
    if not struct.lerp_weight < HALF:
        struct.lerp_weight = -scalars.beta1
        struct.lerp_from_grad = 1
    struct.beta2 = scalars.beta2
    struct.grad_weight = 1 - scalars.beta2
    struct.denom_divisor = (1 - scalars.beta2**scalars.step) ** 0.5
    struct.eps = scalars.eps
    struct.step_factor = -(scalars.lr / (1 - scalars.beta1**scalars.step))
    return struct


def summed(sums: Checksums | None) -> tuple[Any, ...]:
    """Return the last two arguments of a kernel that takes checksums while it works."""
    return (0, ffi.NULL) if sums is None else (sums.count, sums.pointer)


def adamw(
    n: int,
    hi: int,
    lo: int,
    m: int,
    v: int,
    grad: int,
    dtype: GradientDtype,
    scalars: AdamWScalars,
    sums: Checksums | None = None,
) -> None:
    """Apply one AdamW step to n elements in place: hi and lo (the split fp32 master), m and v (fp32).

    `dtype` is that of the gradient, which is only read. `sums`: checksums to take during the step, of fields
    that begin with the first of the n elements.
    """
    check(n, hi=hi, lo=lo, m=m, v=v, grad=grad)
    check_dtype(dtype)
    fields = (as_u16(hi), as_i16(lo), as_f32(m), as_f32(v))
    struct = rounded(scalars)
    if dtype == "bf16":
        library.infinity_adamw_bf16(n, *fields, as_u16(grad), struct, *summed(sums))
    else:
        library.infinity_adamw_f32(n, *fields, as_f32(grad), struct, *summed(sums))


def sum_squares(n: int, grad: int, dtype: AnyGradientDtype) -> tuple[float, bool]:
    """Return the fp64 sum of the fp64 squares of n gradients, and whether all of them are finite."""
    check(n, grad=grad)
    if dtype == "bf16":
        result = library.infinity_sum_squares_bf16(n, as_u16(grad))
    elif dtype == "f16":
        result = library.infinity_sum_squares_f16(n, as_u16(grad))
    else:
        check_dtype(dtype)
        result = library.infinity_sum_squares_f32(n, as_f32(grad))
    return result.sum, bool(result.finite)


def split(n: int, f32: int, hi: int, lo: int) -> None:
    """Split n fp32 masters into hi (bf16, to nearest, ties away from zero) and lo (int16 remainder)."""
    check(n, f32=f32, hi=hi, lo=lo)
    library.infinity_split(n, as_f32(f32), as_u16(hi), as_i16(lo))


def join(n: int, hi: int, lo: int, f32: int) -> None:
    """Join n pairs of hi and lo into fp32 masters: what `split` was given, bit for bit."""
    check(n, hi=hi, lo=lo, f32=f32)
    library.infinity_join(n, as_u16(hi), as_i16(lo), as_f32(f32))


def widen_lo(n: int, lo8: int, lo: int) -> None:
    """Widen the lower parts of n 24-bit masters, in 8 bits, to those of `split`, in 16."""
    check(n, lo8=lo8, lo=lo)
    library.infinity_widen_lo(n, ffi.cast(_I8, lo8), as_i16(lo))


def round_lo(n: int, lo: int, lo8: int, key: int | None = None, first: int = 0) -> None:
    """Round the lower parts of n masters, as `split` gives them, to 8 bits: stochastically, by the random
    bits of `key` (see `state_key`) and of the elements from `first` on; without a key to the nearest.
    """
    check(n, lo=lo, lo8=lo8)
    library.infinity_round_lo(n, as_i16(lo), key is None, key or 0, first, ffi.cast(_I8, lo8))


def widen(n: int, bf16: int, f32: int) -> None:
    """Convert n bf16 values to fp32, exactly."""
    check(n, bf16=bf16, f32=f32)
    library.infinity_widen(n, as_u16(bf16), as_f32(f32))


def narrow(n: int, f32: int, bf16: int) -> None:
    """Convert n fp32 values to bf16, to nearest, ties to even; every NaN becomes 0x7FC0."""
    check(n, f32=f32, bf16=bf16)
    library.infinity_narrow(n, as_f32(f32), as_u16(bf16))


def widen_f16(n: int, f16: int, f32: int) -> None:
    """Convert n fp16 values to fp32, exactly."""
    check(n, f16=f16, f32=f32)
    library.infinity_widen_f16(n, as_u16(f16), as_f32(f32))


def narrow_f16(n: int, f32: int, f16: int) -> None:
    """Convert n fp32 values to fp16, to nearest, ties to even; from 65520 on they become infinite."""
    check(n, f32=f32, f16=f16)
    library.infinity_narrow_f16(n, as_f32(f32), as_u16(f16))


def accumulate(n: int, acc: int, grad: int) -> None:
    """Add n bf16 gradients to the fp32 accumulator, in fp32."""
    check(n, acc=acc, grad=grad)
    library.infinity_accumulate_bf16(n, as_f32(acc), as_u16(grad))


def accumulate_f32(n: int, acc: int, grad: int) -> None:
    """Add n fp32 gradients to the fp32 accumulator."""
    check(n, acc=acc, grad=grad)
    library.infinity_accumulate_f32(n, as_f32(acc), as_f32(grad))


def accumulate_f16(n: int, acc: int, grad: int) -> None:
    """Add n fp16 gradients to the fp32 accumulator."""
    check(n, acc=acc, grad=grad)
    library.infinity_accumulate_f16(n, as_f32(acc), as_u16(grad))


def multiplies_bf16() -> bool:
    """Whether this CPU has the instructions that `add_product_bf16` needs, and avx512 is in use."""
    return bool(library.infinity_multiplies_bf16())


MOST_ROWS = 512
"""The most rows of `product_bf16`: a sum over more rows would have to be accumulated in memory."""


def add_product_bf16(k: int, m: int, n: int, left: Rows, right: Rows, total: Rows, n_threads: int) -> None:
    """Add the product of left's transpose and right to total: [k, m] and [k, n] of bf16 to [m, n] of fp32.

    Sums are fp32. The elements of each row are contiguous; in `left`, those of each column may be instead.
    n_threads: threads of GNU's OpenMP runtime if the process has it, as with torch; otherwise the pool's
    threads are used.

    Raises:
        UnsupportedIsaError: `multiplies_bf16` is false.
        ValueError: elements are not contiguous.
        MemoryError: for a MiB of packed operands.
    """
    if 0 in (k, m, n):
        return
    sizes = _product_sizes(k, m, n, left, right, total)
    at = as_f32(total.address), total.stride
    _check_product(library.infinity_add_product_bf16(*sizes, *at, n_threads), k, m, n)


def product_bf16(k: int, m: int, n: int, left: Rows, right: Rows, result: Rows, n_threads: int) -> None:
    """Write the same product, rounded to bf16, [m, n], of k = 1 to `MOST_ROWS` rows.

    Raises: as `add_product_bf16`.
    """
    if not 1 <= k <= MOST_ROWS:
        message = f"k={k}: expected 1 to {MOST_ROWS}"
        raise ValueError(message)
    if 0 in (m, n):
        return
    sizes = _product_sizes(k, m, n, left, right, result)
    at = as_u16(result.address), result.stride
    _check_product(library.infinity_product_bf16(*sizes, *at, n_threads), k, m, n)


def _product_sizes(
    k: int, m: int, n: int, left: Rows, right: Rows, out: Rows
) -> tuple[int, int, int, Pointer, int, int, Pointer, int]:
    check(k * m * n, left=left.address, right=right.address, out=out.address)
    if 1 not in left[1:] or right.step != 1 or out.step != 1:
        message = f"left={left}, right={right}, out={out}: expected steps of 1 (left: step or stride of 1)"
        raise ValueError(message)
    return k, m, n, as_u16(left.address), left.stride, left.step, as_u16(right.address), right.stride


def _check_product(code: int, k: int, m: int, n: int) -> None:
    if code == _UNSUPPORTED:
        message = (
            f"products of bf16 need a CPU with AVX512-BF16, and avx512; in use: {isa()}\n"
            "  try: torch.mm, or leave INFINITY_ISA unset to take the best available"
        )
        raise UnsupportedIsaError(message)
    if code != 0:
        message = f"no memory for the packed operands of a product [{k}, {m}] x [{k}, {n}]"
        raise MemoryError(message)


def rewrite(n: int, new_hi: int, hi: int, lo: int) -> None:
    """Apply a user's edit of n 16-bit weights: where new_hi differs from hi, hi becomes new_hi and lo 0."""
    check(n, new_hi=new_hi, hi=hi, lo=lo)
    library.infinity_rewrite(n, as_u16(new_hi), as_u16(hi), as_i16(lo))


def copy(n_bytes: int, dst: int, src: int) -> None:
    """Copy n_bytes from src to dst over the pool.

    Raises:
        ValueError: the two ranges overlap.
    """
    check(n_bytes, dst=dst, src=src)
    if abs(dst - src) < n_bytes:
        message = f"copy of {n_bytes} B from {src:#x} to {dst:#x}: the ranges overlap"
        raise ValueError(message)
    library.infinity_copy(n_bytes, ffi.cast("void *", dst), ffi.cast("void *", src))
