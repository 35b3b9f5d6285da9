"""What stands in the place of a held micro-batch's logits, so that a loss made of them is refused by name."""

from __future__ import annotations

from typing import Any, NoReturn

from infinity.errors import UnsupportedError


class HeldLogitsError(UnsupportedError, AttributeError):
    """Logits were used of micro-batches that run together. An AttributeError, so that hasattr() is False."""


class HeldLogits:
    """Stands for logits that are never made; any use raises HeldLogitsError."""

    @classmethod
    def __torch_function__(cls, func: Any, *_: Any, **__: Any) -> NoReturn:
        """Refuse a function of torch."""
        _refuse(f"{getattr(func, '__name__', func)}()")

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse an attribute or a method."""
        _refuse(f".{name}")

    def _operator(self, *_: Any) -> NoReturn:
        _refuse("an operator")

    __getitem__ = __len__ = __iter__ = __neg__ = __matmul__ = _operator
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _operator


def _refuse(use: str) -> NoReturn:
    raise HeldLogitsError(
        f"{use} of the logits of a micro-batch: with TrainerCallback(by_block=True), or accumulate_by_block, "
        "the micro-batches of a step run together, and only the sum of their losses is made, without logits. "
        "Use the model's own loss, or leave by_block out"
    )
