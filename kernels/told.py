"""A parameter's bf16 gradient from the moment before and behind its AdamW step, and exceptions from that."""

from typing import Any

from infinity.kernels.checksums import Checksums
from infinity.kernels.library import ffi, library
from infinity.kernels.operations import as_f32, as_i16, as_u16, check, rounded, summed
from infinity.kernels.scalars import AdamWScalars

EXCEPTION_NBYTES = 6  # of an element's number, and of its gradient
MOST_TOLD = 1 << 32  # elements of a parameter, which have numbers
_ROUNDINGS = 6  # of a step with a gradient of zero, apart from that of the moment


class ToldGradient:
    """The gradient of one parameter, or of some of it: [Note: told gradients].

    The step is made, part by part, by `adamw`, which finds the exceptions. When all parts have made it and
    `is_told`, `recover` gives the gradient of any part, bit for bit.
    """

    def __init__(self, scalars: AdamWScalars, limit: int) -> None:
        """Prepare for a step by these scalars. limit: the most exceptions that are kept."""
        self._scalars = scalars
        self._step = step = rounded(scalars)
        weight = 1 + step.lerp_weight if step.lerp_from_grad else step.lerp_weight
        self._struct = struct = ffi.new("struct infinity_told *")
        struct.inverse_weight = 1 / weight if weight else 0
        struct.inverse_clip = 1 / step.clip if step.clip else 0
        struct.noise = (struct.inverse_weight + _ROUNDINGS) * 2.0**-24
        struct.limit = limit
        self._index: Any = None
        self._bits: Any = None

    @property
    def count(self) -> int:
        """Elements whose gradient the moments do not tell, as far as steps were made."""
        return int(self._struct.count)

    @property
    def is_told(self) -> bool:
        """Whether all of these are kept."""
        return bool(self._struct.count <= self._struct.limit)

    @property
    def nbytes(self) -> int:
        """Bytes of those that are kept."""
        return EXCEPTION_NBYTES * min(self.count, int(self._struct.limit))

    def adamw(
        self,
        n: int,
        fields: tuple[int, int, int, int],
        grad: int,
        scalars: AdamWScalars,
        first: int,
        sums: Checksums | None = None,
    ) -> None:
        """Apply the step to n elements in place, as kernels.adamw does with a bf16 gradient. fields: the
        addresses of hi, lo, m and v. first: the number of the first element.

        Raises:
            ValueError: an element's number does not fit 32 bits; other scalars than these were prepared for.
        """
        check(n, **dict(zip(("hi", "lo", "m", "v"), fields, strict=True)), grad=grad)
        if not 0 <= first <= MOST_TOLD - n:
            message = f"elements {first} to {first + n}: expected numbers below {MOST_TOLD}"
            raise ValueError(message)
        if scalars != self._scalars:
            message = f"{scalars}: expected the scalars that the gradient was prepared for"
            raise ValueError(message)
        if self._index is None:
            self._keep(int(self._struct.limit))
        hi, lo, m, v = fields
        at = as_u16(hi), as_i16(lo), as_f32(m), as_f32(v), as_u16(grad)
        library.infinity_adamw_told(n, *at, self._step, self._struct, first, *summed(sums))

    def _keep(self, limit: int) -> None:
        """Have room for so many exceptions, and keep those that there are."""
        old, kept = (self._index, self._bits), min(self.count, limit)
        self._index, self._bits = ffi.new("uint32_t[]", max(1, limit)), ffi.new("uint16_t[]", max(1, limit))
        if old[0] is not None:
            ffi.memmove(self._index, old[0], 4 * kept)
            ffi.memmove(self._bits, old[1], 2 * kept)
        struct = self._struct
        struct.index, struct.bits = self._index, self._bits

    def end(self) -> None:
        """All steps were made: give back the memory that exceptions do not need; all of it, if too many."""
        if self._index is not None:
            self._keep(self.count if self.is_told else 0)

    def recover(self, n: int, before: int, behind: int, first: int, grad: int) -> None:
        """Write the gradients of n elements to `grad`. before, behind: addresses of m as it was before the
        step, and behind it. first: the number of the first element.

        Raises:
            ValueError: not all exceptions were kept.
        """
        check(n, before=before, behind=behind, grad=grad)
        if not self.is_told:
            message = f"{self.count} exceptions, of which {int(self._struct.limit)} were kept"
            raise ValueError(message)
        library.infinity_recover(n, as_f32(before), as_f32(behind), self._struct, first, as_u16(grad))
