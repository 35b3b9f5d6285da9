"""Our hooks taken off the modules whose units a forward holds at once: see [Note: all at once] in hooks.

A module with hooks, even such as do nothing, takes torch several times as long to call as one without. A
module keeps ours where it has others as well, which are called in the order in which they were registered.
Tiles that the data chooses keep them: they hold their own units.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from infinity.autograd.module_calls import KEEPS_INPUT, Entering, Follower, Leaving
from infinity.units.unit import Unit


class _Off(NamedTuple):
    """The hooks of one module, and where they were."""

    entering: dict[int, Callable[..., Any]]
    entering_key: int
    enters: Entering
    leaving: dict[int, Callable[..., Any]]
    leaving_key: int
    leaves: Leaving

    def put_back(self) -> None:
        """Let them be as they were, before others that came meanwhile."""
        _put_first(self.entering, self.entering_key, self.enters)
        _put_first(self.leaving, self.leaving_key, self.leaves)


def _put_first(hooks: dict[int, Callable[..., Any]], key: int, hook: Callable[..., Any]) -> None:
    others = {} if key in hooks else dict(hooks)
    if others:
        hooks.clear()
    hooks[key] = hook
    hooks.update(others)


class CoveredModules:
    """Takes hooks off, and puts them back."""

    def __init__(self) -> None:
        """Begin with all of them in their places."""
        self.tiles: set[int] = set()
        """The id() of the tiles that the data chooses among, which keep theirs, as do the modules in them."""
        self._off: list[_Off] = []
        self._within: dict[int, tuple[weakref.ref[nn.Module], list[weakref.ref[nn.Module]]]] = {}
        """By the id() of a module, the modules in it when it was seen first."""

    def know_tiles(self, tiles: Iterable[int]) -> None:
        """Know further tiles."""
        self.tiles.update(tiles)

    def take_off(self, follower: Follower, root: nn.Module, units: Sequence[Unit]) -> None:
        """Take a follower's hooks off the modules in `root`, in which a forward has begun that holds all
        `units` in it, unless any of these trains: gradients that are asked for within that forward need them.
        """
        with torch._C.DisableTorchFunctionSubclass():  # that they train is no value: no guard is asked
            if any(one.trainable for one in units):
                return
        known = self._within.get(id(root))
        if known is None or known[0]() is not root:
            known = weakref.ref(root), [weakref.ref(one) for one in self._modules_in(root)]
            self._within[id(root)] = known
        for one in known[1]:
            module = one()
            off = _hooks_of(module, follower) if module is not None else None
            if off is None:
                continue
            self._off.append(off)  # first: after an interrupt they are put back
            del off.leaving[off.leaving_key]
            if isinstance(module, nn.Linear):
                off.entering[off.entering_key] = KEEPS_INPUT
            else:
                del off.entering[off.entering_key]

    def put_back(self) -> None:
        """Put back what was taken off."""
        while self._off:
            self._off[-1].put_back()
            self._off.pop()

    def _modules_in(self, module: nn.Module) -> Iterator[nn.Module]:
        """Yield the modules in `module`, but tiles, and what is in these."""
        for child in module.children():
            if id(child) not in self.tiles:
                yield child
                yield from self._modules_in(child)


def _hooks_of(module: nn.Module, follower: Follower) -> _Off | None:
    """Return a follower's hooks on a module that has no others; None for any other."""
    entering, leaving = module._forward_pre_hooks, module._forward_hooks  # noqa: SLF001 - no public ones
    if len(entering) != 1 or len(leaving) != 1:
        return None
    ((key, enters),), ((other, leaves),) = entering.items(), leaving.items()
    if not isinstance(enters, Entering) or not isinstance(leaves, Leaving) or enters.follower is not follower:
        return None
    return _Off(entering, key, enters, leaving, other, leaves)
