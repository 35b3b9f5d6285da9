"""Which experts the next layer is likely to be routed to: its router, run on this layer's hidden states.

[Note: guesses]
A layer's experts are known when it has come to them; until the first has been read, computing waits. A
layer's hidden states are those of the layer before, and little more. So in a round, where a fetch reads two
bytes an element and nothing is updated, the router of the next layer is run on them as well, while this
layer's experts are on their way; what it names is fetched behind them. What the next layer then is routed to
is fetched exactly, as ever: a guess changes no bit.

In training a fetch reads and writes all that an update needs, and merges the updates of all steps in which an
expert was not used: a wrong guess would cost 26 bytes an element where a right one saves some waiting, and no
router is asked. But of an expert that is used in most steps the last gradient waits in host memory, see
`GradientStore.rests`, and such an update is applied in the next step whether the expert is used or not. So of
the experts that the next layer used last, these are fetched ahead, the most frequent first: where one is not
used after all, its fetch was the pass that would have applied the update. A backward guesses nothing: what it
comes to was announced in the forward, see RoutedLayers.

A guess pays where it is right: where fewer than `LEAST_RIGHT` of the experts that were named of late are
used, one is made in every `TRIED_EVERY`th round alone. Of a Mixtral of 4 layers of 32 experts, trained for
1,200 steps on text, 33 % of what was named for its second layer was used, and 90 % of what was named for the
two behind it; of as many experts, by how often they are used in the same text, 66 to 71 %. None is made where
nothing would be fetched, nor with several ranks, which would have to agree on it, nor on an accelerator,
which would have to be waited for. Nor is one made in a module that trains: there are routers that then draw
random numbers, and change what they are given.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from infinity.planning.trace import Phase
from infinity.tiling import TiledExperts
from infinity.units.residency import UnitResidency
from infinity.units.unit import Unit

LEAST_RIGHT = 0.5
TRIED_EVERY = 16
"""See [Note: guesses]."""
_OF_TRANSFORMERS = "topkrouter"
"""How classes of routers end whose forward returns logits, weights, and experts [tokens, k]."""
_CHOSEN = 2
"""Which of the results they are."""
_ROWS = 2
"""Dimensions of hidden states: tokens, features."""
_KEPT = 0.9
"""Of what was counted before, each time a layer is guessed."""


class NextLayer:
    """Guesses the experts of one layer from the hidden states of the one before. Used by the thread that
    computes.
    """

    def __init__(
        self,
        residency: UnitResidency,
        router: nn.Module,
        of_router: Sequence[Unit],
        of_experts: Sequence[Sequence[Unit]],
    ) -> None:
        """router: as those of transformers, whose third result is the experts of each token. of_router: its
        units. of_experts: those of each expert, by number.
        """
        self._residency, self._router, self._of_router = residency, router, list(of_router)
        self._features = router._parameters["weight"].shape[1]  # type: ignore[union-attr]
        self._of_experts = [list(units) for units in of_experts]
        self._all = list(dict.fromkeys(unit for units in of_experts for unit in units))
        self._guessed: set[Unit] = set()
        self._named, self._right, self._rounds = 0.0, 0.0, 0
        self.named = self.right = 0
        """Slices that were guessed since the start, and those of them that were used."""
        self._last: list[Unit] = []
        self._due: set[Unit] = set()
        self.due = self.due_right = 0
        """Slices that were fetched ahead in training since the start, and those of them that were used."""

    def look(self, hidden: torch.Tensor) -> None:
        """Fetch what is guessed from `hidden` [tokens, features], where that is likely to pay; in training,
        what is to be updated in any case.
        """
        if not self._residency.in_round:
            self._fetch_due()
            return
        self._guessed.clear()
        self._rounds += 1
        unlikely = self._right < LEAST_RIGHT * self._named and self._rounds % TRIED_EVERY
        of_another_size = hidden.dim() != _ROWS or hidden.shape[-1] != self._features
        if unlikely or of_another_size or any(one.training for one in self._router.modules()):
            return
        if not self._residency.fetches_any(self._all):
            return
        for unit in self._of_router:
            self._residency.hold(unit, Phase.FORWARD)
        try:
            with torch.no_grad():  # past the router's hooks: to others it has not run
                chosen = type(self._router).forward(self._router, hidden)[_CHOSEN]
            numbers: list[int] = chosen.unique().tolist()
        finally:
            for unit in self._of_router:
                self._residency.drop(unit)
        units = dict.fromkeys(unit for number in numbers for unit in self._of_experts[number])
        self._guessed.update(units)
        self._fetch(units)

    def _fetch_due(self) -> None:
        due = [unit for unit in self._last if unit.must_update and self._residency.fetches_any([unit])]
        due.sort(key=self._residency.share_of_steps, reverse=True)
        self._fetch(due)
        self._due.update(unit for unit in due if unit.residence.fetch is not None)

    def _fetch(self, units: Iterable[Unit]) -> None:
        room_nbytes = self._residency.window_nbytes // 4
        self._residency.foresee(units, room_nbytes, self._residency.before_routed_fetch)

    def came(self, units: Sequence[Unit]) -> None:
        """Count how right the last guess was, now that the layer is about to use `units`."""
        if not self._residency.in_round:
            self._last = list(units)
            self.due += len(self._due)
            self.due_right += len(self._due.intersection(units))
            self._due.clear()
        elif self._guessed:
            right = len(self._guessed.intersection(units))
            self.named += len(self._guessed)
            self.right += right
            self._named = self._named * _KEPT + len(self._guessed)
            self._right = self._right * _KEPT + right
            self._guessed.clear()


def routers_of(named: Sequence[tuple[str, nn.Module]]) -> Iterator[tuple[TiledExperts, nn.Module]]:
    """Yield the experts of a model that have a router of transformers' kind beside them, in order, and it."""
    modules = dict(named)
    for name, module in named:
        block = modules.get(name.rpartition(".")[0])
        if isinstance(module, TiledExperts) and block is not None:
            beside = [one for one in block.children() if _is_router(one, module.num_experts)]
            if len(beside) == 1:
                yield module, beside[0]


def _is_router(module: nn.Module, experts: int) -> bool:
    weight, kind = module._parameters.get("weight"), type(module)
    known = kind.__module__.startswith("transformers.") and kind.__name__.lower().endswith(_OF_TRANSFORMERS)
    if not known or weight is None or weight.dim() != _ROWS or len(weight) != experts:
        return False
    _, *given = inspect.signature(kind.forward).parameters.values()
    return bool(given) and all(
        one.default is not one.empty for one in given[1:]
    )  # some are given a bias, too


@dataclass(frozen=True, slots=True)
class Foresight:
    """What guesses the experts of a layer, and those of the next one: one each, or none."""

    of_this: tuple[NextLayer, ...] = ()
    of_next: tuple[NextLayer, ...] = ()


NONE = Foresight()


def foresight_of(
    named: Sequence[tuple[str, nn.Module]],
    residency: UnitResidency,
    units_of: Mapping[int, Sequence[Unit]],
) -> dict[int, Foresight]:
    """Return what guesses for each layer of experts that has a router, by the id() of the experts. units_of:
    a module's own.
    """
    layers = list(routers_of(named))
    guesses: list[tuple[NextLayer, ...]] = [()]
    for experts, router in layers[1:]:
        each = [units_of[id(experts.tiles[number])] for number in experts.tile_numbers()]
        guesses.append((NextLayer(residency, router, units_of.get(id(router), ()), each),))
    following = [*guesses[1:], ()]
    return {
        id(experts): Foresight(this, after)
        for (experts, _), this, after in zip(layers, guesses, following, strict=False)
    }
