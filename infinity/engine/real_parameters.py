"""The parameters of models under construction whose values are in memory, and which of them leave it first.

[Note: counting what is real]
Each parameter that comes asks for room. Were all that are there counted for each, a model of many parameters
would be built in a time that grows with the square of their number. So their bytes are added up as they come
and go. A parameter may be given other memory meanwhile (`p.data = ...`), which nothing tells: so those of the
modules that came last are counted again when the next one comes, and all of them once in as many times as
there are parameters.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from infinity.engine.built_parameter import BuiltParameter


@dataclass(frozen=True, slots=True)
class _Real:
    """One of them. module: the id() of the one that it came with. reference: tells when it is no more."""

    entry: BuiltParameter
    module: int
    reference: weakref.KeyedRef[int, nn.Parameter]


class RealParameters:
    """Knows them by the parameter's id()."""

    def __init__(self) -> None:
        """There are none."""
        self._all: dict[int, _Real] = {}
        self._of_module: dict[int, dict[int, BuiltParameter]] = {}
        """By the id() of the module that they came with."""
        self._sizes: OrderedDict[int, int] = OrderedDict()
        """Bytes of those that take any, the one touched longest ago first."""
        self._nbytes = 0
        self._gone: list[weakref.KeyedRef[int, nn.Parameter]] = []
        """Of parameters that are no more: noted wherever garbage is collected, seen to later."""
        self._last: set[int] = set()
        """The id() of the modules that came last."""
        self._until = 0
        """How often more parameters come until all are counted again."""

    def __contains__(self, key: int) -> bool:
        """Whether the parameter with this id() is real."""
        return key in self._all

    def __getitem__(self, key: int) -> BuiltParameter:
        """Return what is known of it."""
        return self._all[key].entry

    def add(self, parameter: nn.Parameter, entry: BuiltParameter) -> None:
        """A parameter is real from now on, and was touched last."""
        key, module = id(parameter), id(entry.module())
        self.remove(key)
        self._all[key] = _Real(entry, module, weakref.KeyedRef(parameter, self._gone.append, key))
        self._of_module.setdefault(module, {})[key] = entry
        self._count(key)

    def remove(self, key: int) -> None:
        """A parameter, by its id(), is real no more, if it was."""
        real = self._all.pop(key, None)
        if real is None:
            return
        self._nbytes -= self._sizes.pop(key, 0)
        beside = self._of_module[real.module]
        del beside[key]
        if not beside:
            del self._of_module[real.module]

    def clear(self) -> None:
        """None is real any more."""
        self._all.clear()
        self._of_module.clear()
        self._sizes.clear()
        self._nbytes = 0

    def first_out(self, window_nbytes: int, keep: Iterable[nn.Module | None]) -> list[list[BuiltParameter]]:
        """Return what is to leave so that the rest takes `window_nbytes` at most: the modules touched longest
        ago, the parameters of each together.

        Never a part of `keep`, nor what others hold a view of (`w = p.data`): they may yet write to it.
        """
        kept = {id(part) for module in keep if module is not None for part in module.modules()}
        self._look_again(kept)
        over, chosen = self._nbytes - window_nbytes, set[int]()
        leaving: list[list[BuiltParameter]] = []
        for key in self._sizes:
            if over <= 0:
                break
            module = self._all[key].entry.module()
            if key in chosen or id(module) in kept:
                continue
            together = self._beside(key, module)
            if not any(one.has_views for one in together.values()):
                chosen.update(together)
                leaving.append(list(together.values()))
                over -= sum(self._sizes.get(one, 0) for one in together)
        return leaving

    def _beside(self, key: int, module: nn.Module | None) -> dict[int, BuiltParameter]:
        """Return the parameters that came with a module, this one among them; it alone, without one."""
        real = self._all[key]
        if module is None:
            return {key: real.entry}
        beside = self._of_module[real.module].items()  # and those of one that had its id() before
        return {one: entry for one, entry in beside if entry.module() is module}

    def _look_again(self, modules: set[int]) -> None:
        """Count again what may have changed: see [Note: counting what is real]. modules: those that come, by
        their id().
        """
        while self._gone:
            reference = self._gone.pop()
            if (real := self._all.get(reference.key)) is not None and real.reference is reference:
                self.remove(reference.key)
        self._until -= 1
        if self._until <= 0:
            self._until, again = len(self._all), list(self._all)
        else:
            again = [one for module in modules | self._last for one in self._of_module.get(module, ())]
        for key in again:
            self._count(key)
        self._last = modules

    def _count(self, key: int) -> None:
        nbytes, before = self._all[key].entry.nbytes, self._sizes.get(key, 0)
        if nbytes == before:
            return
        self._nbytes += nbytes - before
        if nbytes:
            self._sizes[key] = nbytes
        else:
            del self._sizes[key]
