"""Which blocks of keys each block of queries attends to: the layouts of DeepSpeed's sparse attention.

A layout is boolean, [heads, blocks, blocks]: query blocks are rows, key blocks columns. It has one head where
all attend alike. "unidirectional" layouts have nothing above their diagonal but, as in DeepSpeed,
blocks of a group that all attend to, and random ones of "variable". What a model's own mask forbids, as a
decoder's does the future, is forbidden besides.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from infinity.errors import ConfigError, meant

_ATTENTION = ("unidirectional", "bidirectional")
_GLOBAL = {"global_block_indices": (0,), "global_block_end_indices": None}
DEFAULTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "fixed": {
        "num_local_blocks": 4,
        "num_global_blocks": 1,
        "attention": "bidirectional",
        "horizontal_global_attention": False,
        "num_different_global_patterns": 1,
    },
    "variable": {
        "num_random_blocks": 0,
        "local_window_blocks": (4,),
        **_GLOBAL,
        "attention": "bidirectional",
        "horizontal_global_attention": False,
    },
    "bigbird": {
        "num_random_blocks": 1,
        "num_sliding_window_blocks": 3,
        "num_global_blocks": 1,
        "attention": "bidirectional",
    },
    "bslongformer": {"num_sliding_window_blocks": 3, **_GLOBAL, "attention": "bidirectional"},
    "sliding": {"num_sliding_window_blocks": 3, "attention": "unidirectional"},
}
"""The options of each mode, with DeepSpeed's defaults."""


_NUMBERS = """
block seed num_local_blocks num_global_blocks num_different_global_patterns num_random_blocks
num_sliding_window_blocks local_window_blocks global_block_indices global_block_end_indices
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseLayout:
    """A pattern of blocks, for sequences of any length; the names are DeepSpeed's.

    mode: one of DEFAULTS, which has the options of each, and their defaults. block: tokens of a block.
    different_layout_per_head: random blocks, and the global blocks of "fixed", differ by head. seed: of the
    random blocks; row and head decide with it.

    Raises: ConfigError naming the option that does not fit.
    """

    mode: str = "fixed"
    block: int = 16
    different_layout_per_head: bool = False
    seed: int = 0
    num_local_blocks: int | None = None
    num_global_blocks: int | None = None
    attention: str | None = None
    horizontal_global_attention: bool | None = None
    num_different_global_patterns: int | None = None
    num_random_blocks: int | None = None
    local_window_blocks: Sequence[int] | None = None
    global_block_indices: Sequence[int] | None = None
    global_block_end_indices: Sequence[int] | None = None
    num_sliding_window_blocks: int | None = None

    def __post_init__(self) -> None:
        """Fill in the defaults of the mode, and check."""
        if self.mode not in DEFAULTS:
            expected = ", ".join(map(repr, DEFAULTS))
            raise ConfigError(
                f"mode={self.mode!r}: expected one of {expected}{meant(str(self.mode), DEFAULTS)}"
            )
        takes = DEFAULTS[self.mode]
        for one in fields(self):
            if one.name in ("mode", "block", "different_layout_per_head", "seed"):
                continue
            value = getattr(self, one.name)
            if value is not None and one.name not in takes:
                raise ConfigError(
                    f"{one.name}={value!r}: mode={self.mode!r} takes {', '.join(takes) or 'none'}"
                )
            if value is None:
                object.__setattr__(self, one.name, takes.get(one.name))
            elif isinstance(value, list):
                object.__setattr__(self, one.name, tuple(value))
        self._check_numbers()
        self._check_relations()

    def _check_numbers(self) -> None:
        least = {"num_random_blocks": 0, "global_block_indices": 0, "seed": 0}
        for name in _NUMBERS.split():
            value = getattr(self, name)
            for one in value if isinstance(value, tuple) else () if value is None else (value,):
                if type(one) is not int or one < least.get(name, 1):
                    raise ConfigError(
                        f"{name}={value!r}: expected whole numbers from {least.get(name, 1)} on"
                    )
        for name in ("different_layout_per_head", "horizontal_global_attention"):
            if getattr(self, name) not in (True, False, None):
                raise ConfigError(f"{name}={getattr(self, name)!r}: expected True or False")
        if self.local_window_blocks == ():
            raise ConfigError("local_window_blocks=[]: expected a number of blocks at least")

    def _check_relations(self) -> None:
        if self.attention not in (*_ATTENTION, None):
            raise ConfigError(f"attention={self.attention!r}: expected {' or '.join(map(repr, _ATTENTION))}")
        if self.horizontal_global_attention and self.attention != "bidirectional":
            raise ConfigError("horizontal_global_attention=True needs attention='bidirectional'")
        local, shared = self.num_local_blocks, self.num_global_blocks
        patterns = self.num_different_global_patterns
        if local and shared and patterns:
            if local % shared:
                raise ConfigError(f"num_local_blocks={local} is no multiple of num_global_blocks={shared}")
            if patterns > (local // shared if self.different_layout_per_head else 1):
                raise ConfigError(
                    f"num_different_global_patterns={patterns}: at most num_local_blocks / num_global_blocks "
                    f"= {local // shared}, and more than one with different_layout_per_head=True alone"
                )
        starts, ends = self.global_block_indices or (), self.global_block_end_indices
        if ends is not None and (
            len(starts) != len(ends) or any(one >= end for one, end in zip(starts, ends, strict=True))
        ):
            raise ConfigError(
                f"global_block_indices={list(starts)}, global_block_end_indices={list(ends)}: expected as "
                "many ends as beginnings, each behind its beginning"
            )

    @property
    def is_unidirectional(self) -> bool:
        """Whether windows end with the block itself."""
        return self.attention == "unidirectional"

    def blocks(self, blocks: int, heads: int) -> torch.Tensor:
        """Return the layout of so many blocks of tokens: bool, [heads, blocks, blocks], or [1, ...] where
        all heads are alike.
        """
        number = heads if self.different_layout_per_head else 1
        layout = torch.zeros(number, blocks, blocks, dtype=torch.bool, device="cpu")
        for head in range(number):
            getattr(self, f"_{self.mode}")(layout[head], head)
        return layout

    def _dense(self, layout: torch.Tensor, _head: int) -> None:
        layout.fill_(True)

    def _fixed(self, layout: torch.Tensor, head: int) -> None:
        """Windows one behind the other, and of each window some blocks that all attend to."""
        blocks, local, width = len(layout), self.num_local_blocks or 1, self.num_global_blocks or 1
        self._windows(layout, range(0, blocks, local), local)
        first = local - (1 + head % (self.num_different_global_patterns or 1)) * width
        whole = blocks - blocks % local
        starts = list(range(first, whole, local))
        if whole < blocks:  # the last window is short
            starts.append(max(min(whole + first, blocks - width), 0))
        for start in starts:
            self._attended(layout, start, start + width)

    def _variable(self, layout: torch.Tensor, head: int) -> None:
        """Windows of given sizes, the last one again and again; blocks that all attend to; random ones."""
        self._random(layout, head, to_itself=False)
        start, windows = 0, list(self.local_window_blocks or (1,))
        for size in windows:
            self._windows(layout, range(start, start + 1), size)
            start += size
        self._windows(layout, range(start, len(layout), windows[-1]), windows[-1])
        for begin, end in self._globals():
            self._attended(layout, begin, end)

    def _bigbird(self, layout: torch.Tensor, head: int) -> None:
        """A sliding window, the first blocks, and random ones."""
        self._random(layout, head, to_itself=self.is_unidirectional)
        self._slide(layout)
        layout[: self.num_global_blocks] = True
        layout[:, : self.num_global_blocks] = True
        self._cut(layout)

    def _bslongformer(self, layout: torch.Tensor, _head: int) -> None:
        """A sliding window, and blocks that attend to all and all attend to."""
        self._slide(layout)
        for begin, end in self._globals():
            layout[begin:end] = True
            layout[:, begin:end] = True
        self._cut(layout)

    def _sliding(self, layout: torch.Tensor, _head: int) -> None:
        """A sliding window alone."""
        self._slide(layout)
        self._cut(layout)

    def _globals(self) -> list[tuple[int, int]]:
        starts = self.global_block_indices or ()
        ends = self.global_block_end_indices or [one + 1 for one in starts]
        return list(zip(starts, ends, strict=True))

    def _windows(self, layout: torch.Tensor, starts: range, size: int) -> None:
        for start in starts:
            window = layout[start : start + size, start : start + size]
            window |= torch.ones_like(window).tril() if self.is_unidirectional else True

    def _attended(self, layout: torch.Tensor, start: int, end: int) -> None:
        """Let all blocks attend to those from start to end; in one direction, those behind the first."""
        layout[start if self.is_unidirectional else 0 :, start:end] = True
        if self.horizontal_global_attention:
            layout[start:end] = True

    def _slide(self, layout: torch.Tensor) -> None:
        half = (self.num_sliding_window_blocks or 1) // 2
        layout |= torch.ones_like(layout).triu(-half).tril(half)

    def _cut(self, layout: torch.Tensor) -> None:
        if self.is_unidirectional:
            layout.tril_()

    def _random(self, layout: torch.Tensor, head: int, *, to_itself: bool) -> None:
        for row in range(len(layout)):
            among = row + 1 if to_itself else len(layout)
            drawn = random.Random(f"{self.seed} {head} {row}")  # noqa: S311 - a pattern, and no secret
            layout[row, drawn.sample(range(among), min(self.num_random_blocks or 0, among))] = True
