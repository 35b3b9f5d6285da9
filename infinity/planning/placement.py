"""Which fields of which records stay above NVMe, and when that is worth changing. Pure: no torch, no I/O.

[Note: density]
A byte kept in memory saves NVMe bytes every step: as many as the step would read and write it. In dense
training with one backward per step that is 3 for `hi` (read in forward and backward, written by the update)
and 2 for `lo`, `m`, `v` and `scale` (read and written by the update). A 16-bit gradient has 2: it is written
and read where it finds no room. An expert used in every fourth step has a quarter of all that.

Dense training touches every unit equally often, in a cycle: a fixed choice is as good as any policy could be
(Belady). Where routing decides, expected uses do: see frequency. Either way what is densest is kept first; of
what is equally dense the same share of every stretch of layers, so that none becomes the bottleneck.

[Note: what lives on the device]
On an accelerator `hi` may live on the device: as a copy, whose original stays on NVMe, or in host memory
where there is no NVMe. An update makes that copy worthless, so only what is updated seldom is placed there:
frozen weights first of all. With the room that is left whole records live there, those of the densest units:
their updates are made on the device, so that neither their weights nor their gradients go over the link. Such
a record takes the room of all its fields, and of gradients that stay there until they are applied.

Before all other records come those of units that open a step, embeddings above all: they are needed first in
a forward, and their gradients come last in a backward, so that nothing would hide the CPU's updates of them.

Of several ranks each has its share of a record there, and of a copy all of the unit: what they have on their
devices is the same, since they fetch the same units in one order. So it is decided from what is the same on
all of them, before what lies in host memory is.

[Note: hysteresis]
Expectations waver, and moves cost bytes. A field that is placed counts as denser, by what it costs to move it
out and another in, spread over the steps within which a move has to pay. All moves together have to pay, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np

from infinity.planning.densest import GOLDEN, GRADIENT_DENSITY, FieldColumns, densest, numbered
from infinity.planning.trace import Phase, Use
from infinity.sizes import format_size

REVISED_EVERY = 8
"""Steps. Expectations change slowly; but where the pattern has changed each step counts: see frequency."""

HORIZON_STEPS = 20
"""Steps within which a move has to pay."""

_MOST_STEPS = 5 / 6
"""Of the steps, that use what counts as in use in each."""

_LINK = 0.1
"""What a byte between host and device costs, in NVMe bytes."""

Key = tuple[int, str]
"""A unit's index and the name of a field."""

Tier = Literal["device", "host", "nvme"]

Placement = Mapping[Key, Tier]
"""What lives above NVMe, and where: immutable, in the order in which it is worth doing."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One field of one unit, and how often a step is expected to read and to write it."""

    unit: int
    field: str
    nbytes: int
    reads: float
    writes: float
    lasts: bool = True
    """Whether it may live on the device: updated seldom enough to pay there."""
    moves: bool = True
    """Whether it may be moved to host memory; False for a field that always lies there."""
    packed_nbytes: int | None = None
    """What is read of it for each use, and what it takes in host memory, where that is packed; None: nbytes,
    which are what it takes on the device.
    """
    whole: bool = False
    """Whether it may live on the device with all other fields of its unit, whose record is updated there."""
    beside_nbytes: int = 0
    """What it takes there beside its own bytes: gradients."""
    opens: bool = False
    """Whether its unit opens a step: see [Note: what lives on the device]."""
    copies: int = 1
    """As how many times its bytes `hi` lives on the device, with the shares of the other ranks."""

    @property
    def in_host(self) -> Candidate:
        """As what it is in host memory."""
        return self if self.packed_nbytes is None else replace(self, nbytes=self.packed_nbytes)

    def nbytes_in(self, *tiers: Tier) -> int:
        """Return the bytes that it takes in a tier, or that move between two."""
        return self.in_host.nbytes if "host" in tiers else self.nbytes

    @property
    def device_nbytes(self) -> int:
        """Bytes that it takes on the device, in its record."""
        return self.nbytes + self.beside_nbytes

    @property
    def lodged(self) -> Candidate:
        """As what lives on the device alone, without its record."""
        return self if self.copies == 1 else replace(self, nbytes=self.copies * self.nbytes)

    @property
    def key(self) -> Key:
        """Its unit and field."""
        return self.unit, self.field

    @property
    def density(self) -> float:
        """NVMe bytes saved per step and byte kept."""
        return self.reads + self.writes


class Move(NamedTuple):
    """One field that changes its tier. Of slices each step moves hundreds, which a dataclass makes slower."""

    unit: int
    field: str
    nbytes: int
    source: Tier
    target: Tier

    def __str__(self) -> str:
        """As text: "3.hi nvme -> host"."""
        return f"{self.unit}.{self.field} {self.source} -> {self.target}"

    @property
    def cost_nbytes(self) -> float:
        """NVMe bytes it moves; a byte that goes to or from the device counts a tenth more."""
        tiers = {self.source, self.target}
        return self.nbytes * (("nvme" in tiers) + _LINK * ("device" in tiers))


@dataclass(frozen=True, slots=True)
class Revision:
    """What `revise` decided: the placement from now on, how to get there, and why."""

    placement: Placement
    moves: tuple[Move, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class PlacementBudget:
    """Bytes for records on the device; on the host, for records and gradients together; and of gradients.
    scratch_nbytes: what whole records on the device need there, all together, beside their own bytes.
    """

    device_nbytes: int
    host_nbytes: int
    gradient_nbytes: int
    scratch_nbytes: int = 0


def spread(count: int) -> list[int]:
    """Return 0 … count-1 in an order of which every beginning is spread evenly."""
    return sorted(range(count), key=lambda index: (index * GOLDEN) % 1.0)


def fields_of_unit(
    unit: int,
    sizes: Mapping[str, int],
    derived: Container[str],
    fetches: float,
    updates: float,
    *,
    lasts: bool,
    beside_nbytes: int | None = None,
    opens: bool = False,
    copies: int = 1,
    moves: bool = True,
    packed_nbytes: int | None = None,
) -> Iterator[Candidate]:
    """Every field of one unit, with what a step, or a round, is expected to read and write of it: alike for a
    run and for a plan of it.

    sizes: of the fields, in their order; derived: those that an update makes without reading them. lasts: of
    `hi`. beside_nbytes: of gradients that stay on the device beside its record; None where that may not live
    there. packed_nbytes: of `hi`. For the others see Candidate.
    """
    *_, last = sizes
    for name, nbytes in sizes.items():
        anew = updates if name in derived else 0.0
        reads = fetches - anew if name == "hi" else updates
        yield Candidate(
            unit,
            name,
            nbytes,
            reads,
            updates,
            lasts=lasts if name == "hi" else not updates,
            moves=moves,
            packed_nbytes=packed_nbytes if name == "hi" else None,
            whole=beside_nbytes is not None,
            beside_nbytes=(beside_nbytes or 0) * (name == last),
            opens=opens,
            copies=copies,
        )


def place_before_first_step(
    frozen: Iterable[tuple[int, int, int]], budget: PlacementBudget
) -> dict[Key, Tier]:
    """Return which frozen weights live on the device before any use is counted, as if each were used in every
    step, so that they come once. What it has no room for stays where it is.

    frozen: of each unit, its number, the bytes of `hi`, and as how many times these it lives there.
    """
    weights = [
        Candidate(unit, "hi", nbytes, 1.0, 0.0, moves=False, copies=copies) for unit, nbytes, copies in frozen
    ]
    return dict(place(weights, budget))


def choose(
    candidates: Iterable[Candidate],
    room_nbytes: int,
    gradient_nbytes: int,
    placed: Container[Key] = (),
    horizon_steps: int = HORIZON_STEPS,
) -> list[Key]:
    """Return what to keep in host memory, in the order to do it: see [Note: density].

    room_nbytes: for gradients and kept fields together. gradient_nbytes: what a step's gradients would take
    of it; only what is denser than a gradient is kept at their expense. placed: see [Note: hysteresis].
    """
    rows = list(candidates)
    field, _ = numbered([one.field for one in rows])
    columns = FieldColumns(
        np.array([one.unit for one in rows], np.int64),
        field,
        np.array([one.nbytes for one in rows], np.int64),
        np.array([one.density for one in rows], np.float64),
        np.array([one.key in placed for one in rows], np.bool_),
    )
    return [rows[row].key for row in densest(columns, room_nbytes, gradient_nbytes, horizon_steps)]


def place(
    candidates: Sequence[Candidate],
    budget: PlacementBudget,
    placed: Placement = MappingProxyType({}),
    horizon_steps: int = HORIZON_STEPS,
) -> Placement:
    """Fill the device with `hi` that lasts, then with whole records; the host with what is left; densest
    first.

    placed: where fields are now, see [Note: hysteresis].
    """
    weights = [one.lodged for one in candidates if one.field == "hi" and one.lasts]
    there = {key for key, tier in placed.items() if tier == "device"}
    on_device = choose(weights, budget.device_nbytes, 0, there, horizon_steps)
    left = budget.device_nbytes - sum(one.nbytes for one in weights if one.key in set(on_device))
    left -= budget.scratch_nbytes
    on_device += _whole_records(candidates, left, set(on_device), there, horizon_steps)
    taken = set(on_device)
    rest = [one.in_host for one in candidates if one.moves and one.key not in taken]
    on_host = choose(rest, budget.host_nbytes, budget.gradient_nbytes, placed, horizon_steps)
    placement: dict[Key, Tier] = dict.fromkeys(on_device, "device")
    placement.update(dict.fromkeys(on_host, "host"))
    return MappingProxyType(placement)


def _whole_records(
    candidates: Sequence[Candidate],
    room_nbytes: int,
    taken: Container[Key],
    there: Container[Key],
    horizon_steps: int,
) -> list[Key]:
    """Return the fields of whole records that live on the device. taken: of other units, which do not."""
    units: dict[int, list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        units[candidate.unit].append(candidate)
    records: dict[bool, list[Candidate]] = {True: [], False: []}
    for unit, fields in units.items():
        if not all(one.whole and one.key not in taken for one in fields):
            continue
        nbytes = sum(one.device_nbytes for one in fields)
        saved = sum(one.nbytes * one.density for one in fields) / max(1, nbytes)
        records[fields[0].opens].append(Candidate(unit, fields[0].field, nbytes, saved, 0.0))
    chosen: list[Key] = []
    for group in records.values():
        found = choose(group, room_nbytes, 0, there, horizon_steps)
        room_nbytes -= sum(one.nbytes for one in group if one.key in set(found))
        chosen += found
    return [one.key for unit, _ in chosen for one in units[unit]]


def opening(uses: Iterable[Use]) -> int:
    """Return how many units open a step, the first ones in the order of the model: those before all that its
    backward uses. uses: of the step.
    """
    return min((use.unit for use in uses if use.phase is Phase.BACKWARD), default=0)


def is_of_most_steps(share: float) -> bool:
    """Whether a unit that this share of the steps uses counts as one of every step."""
    return share >= _MOST_STEPS


def revise(
    old: Placement,
    candidates: Sequence[Candidate],
    budget: PlacementBudget,
    horizon_steps: int = HORIZON_STEPS,
) -> Revision:
    """Return how to change a placement, if that pays within `horizon_steps`, or if it no longer fits.

    The moves are in an order that never needs more than the budget allows: first out, then in. See
    [Note: hysteresis].

    Raises: ValueError naming what is placed and no candidate.
    """
    sizes = {candidate.key: candidate for candidate in candidates}
    if unknown := sorted(old.keys() - sizes.keys()):
        raise ValueError(f"placed, but no candidate: {unknown}; give every field that is placed as one")
    new = place(candidates, budget, old, horizon_steps)
    moves = _moves(old, new, sizes, budget)
    gain = _saved(new, candidates, budget) - _saved(old, candidates, budget) if moves else 0.0
    fits = not moves or _fits(old, candidates, budget)
    return decided(old, new, moves, gain, horizon_steps, fits=fits)


def revise_in_turn(
    old: Placement,
    candidates: Sequence[Candidate],
    budget: PlacementBudget,
    horizon_steps: int = HORIZON_STEPS,
    agreed: Callable[[Placement], bool] = lambda _: False,
) -> Revision:
    """As `revise`, but what lives on the device is decided first, whatever room the host has, and stays as it
    was unless that is `agreed`: so several ranks, whose hosts may have different room, have the same on their
    devices.
    """
    there: dict[Key, Tier] = {key: tier for key, tier in old.items() if tier == "device"}
    on_device = replace(budget, host_nbytes=0, gradient_nbytes=0)
    first = revise(there, candidates, on_device, horizon_steps)
    if agreed(first.placement):
        there = dict(first.placement)
    rest = [replace(one, whole=False, lasts=False) for one in candidates if one.key not in there]
    below = {key: tier for key, tier in old.items() if tier == "host" and key not in there}
    on_host = replace(budget, device_nbytes=0, scratch_nbytes=0)
    then = revise(below, rest, on_host, horizon_steps)
    new = MappingProxyType({**there, **then.placement})
    moves = _moves(old, new, {one.key: one for one in candidates}, budget)
    return Revision(new, moves, f"on the device {first.reason}; below {then.reason}")


def decided(
    old: Placement, new: Placement, moves: tuple[Move, ...], gain: float, horizon_steps: int, *, fits: bool
) -> Revision:
    """Return `new` if that pays within `horizon_steps`, or if `old` no longer fits, else `old`; and why.

    gain: NVMe bytes that it saves more in a step.
    """
    if not moves:
        return Revision(old, (), f"as before: {len(old)} fields placed")
    cost = sum(move.cost_nbytes for move in moves)
    what = f"{len(moves)} moves of {format_size(sum(move.nbytes for move in moves))}"
    saves = f"saving {format_size(gain)} a step"
    if not fits:
        return Revision(new, moves, f"{what}, since there is less room than before; {saves}")
    if gain * horizon_steps <= cost:
        why = f"{what}, {saves}, would not pay within {horizon_steps} steps"
        return Revision(old, (), f"as before: {why}")
    return Revision(new, moves, f"{what}, {saves}: pays in {cost / gain:.0f} steps")


def _held(placement: Placement, sizes: Mapping[Key, Candidate], tier: Tier) -> int:
    return sum(sizes[key].nbytes_in(tier) for key, where in placement.items() if where == tier)


def _fits(placement: Placement, candidates: Iterable[Candidate], budget: PlacementBudget) -> bool:
    there, whole = {"device": 0, "host": 0, "nvme": 0}, False
    for candidate in candidates:
        tier = placement.get(candidate.key, "nvme")
        of_device = max(candidate.device_nbytes, candidate.lasts * candidate.lodged.nbytes)
        there[tier] += of_device if tier == "device" else candidate.nbytes_in(tier)
        whole = whole or (tier == "device" and candidate.whole and not candidate.lasts)
    there["device"] += budget.scratch_nbytes * whole
    return there["device"] <= budget.device_nbytes and there["host"] <= budget.host_nbytes


def _saved(placement: Placement, candidates: Iterable[Candidate], budget: PlacementBudget) -> float:
    """NVMe bytes that a placement saves per step; what comes from the device instead of the host saves a
    tenth more, and gradients without room cost theirs.
    """
    saved = 0.0
    free = budget.host_nbytes
    for candidate in candidates:
        tier = placement.get(candidate.key, "nvme")
        if tier != "nvme":
            saved += candidate.in_host.nbytes * candidate.density
        if tier == "device":
            saved += candidate.nbytes * candidate.reads * _LINK
        if tier == "host":
            free -= candidate.in_host.nbytes
    return saved - GRADIENT_DENSITY * max(0, budget.gradient_nbytes - max(0, free))


def _moves(
    old: Placement, new: Placement, sizes: Mapping[Key, Candidate], budget: PlacementBudget
) -> tuple[Move, ...]:
    """Return the moves from one placement to another, in an order that keeps within the budget all along."""

    def between(source: Tier, target: Tier) -> Iterator[Move]:
        for key in old if target == "nvme" else new:
            if old.get(key, "nvme") == source and new.get(key, "nvme") == target:
                yield Move(*key, sizes[key].nbytes_in(source, target), source, target)

    moves = list(between("host", "nvme"))
    free = budget.host_nbytes - _held(old, sizes, "host") + sum(move.nbytes for move in moves)
    moves += between("device", "nvme")
    late = []
    for move in between("device", "host"):
        if move.nbytes <= free:
            moves.append(move)
            free -= move.nbytes
        else:  # the host is full of what wants to go to the device: by way of NVMe
            moves.append(Move(move.unit, move.field, move.nbytes, "device", "nvme"))
            late.append(Move(move.unit, move.field, move.nbytes, "nvme", "host"))
    moves += between("host", "device")
    return (*moves, *between("nvme", "device"), *late, *between("nvme", "host"))
