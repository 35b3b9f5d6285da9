"""What stays in memory, as other policies would decide it: simulated, in NVMe bytes.

A run is a list of steps, a step the list of the units it uses. Each use reads a unit's record and changes it.
So a use of a unit that is in memory costs nothing, any other one read and one write: at once, or when a cache
gives the unit up again.
"""

import itertools
from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass, field

import numpy as np

from infinity.planning.frequency import Frequencies
from infinity.planning.placement import Candidate, Placement, PlacementBudget, revise


def zipf_routing(seed, steps, *, layers=4, experts=32, tokens=24, exponent=1.2, drift=0.5):
    """Steps of a mixture of experts: in each layer, the experts that some token is routed to.

    The expert of rank r is drawn in proportion to r^-exponent. drift: chance that after a step, in a layer,
    one random expert becomes as popular as another was, and all between move up or down by one.
    """
    random = np.random.default_rng(seed)
    weights = np.arange(1, experts + 1) ** -float(exponent)
    weights /= weights.sum()
    by_rank = [list(random.permutation(experts)) for _ in range(layers)]
    run = []
    for _ in range(steps):
        used = []
        for layer, ranked in enumerate(by_rank):
            ranks = random.choice(experts, size=tokens, p=weights)
            used += sorted({layer * experts + int(ranked[rank]) for rank in ranks})
            if random.random() < drift:
                ranked.insert(random.integers(experts), ranked.pop(random.integers(experts)))
        run.append(used)
    return run


def dense(units, steps):
    """Steps that use every unit once, in the same order: the fields of an optimizer."""
    return [list(range(units))] * steps


def lru(run, sizes, room):
    """Keep what was used last. Returns NVMe bytes, and the hits."""
    cache, nbytes, hits = OrderedDict(), 0, 0
    for unit in itertools.chain.from_iterable(run):
        hits += unit in cache
        nbytes += 0 if unit in cache else sizes[unit]
        cache[unit] = sizes[unit]
        cache.move_to_end(unit)
        while sum(cache.values()) > room:
            nbytes += cache.popitem(last=False)[1]
    return nbytes, hits


def lfu(run, sizes, room):
    """Keep what was used most often ever since the start. Returns NVMe bytes."""
    cache, nbytes, uses = set(), 0, Counter()
    for unit in itertools.chain.from_iterable(run):
        uses[unit] += 1
        nbytes += 0 if unit in cache else sizes[unit]
        cache.add(unit)
        while sum(sizes[one] for one in cache) > room:
            least = min(cache, key=lambda one: (uses[one], one == unit))
            cache.discard(least)
            nbytes += sizes[least]
    return nbytes


def static(run, sizes, room, order):
    """Keep, for good, from their first use on, what fits, in the given order. Returns NVMe bytes."""
    kept = set()
    for unit in order:
        if sizes[unit] <= room:
            kept.add(unit)
            room -= sizes[unit]
    nbytes, seen = 0, set()
    for unit in itertools.chain.from_iterable(run):
        nbytes += 0 if unit in kept & seen else 2 * sizes[unit]
        seen.add(unit)
    return nbytes


def belady(run, size, room):
    """Give up what is used furthest in the future: the fewest bytes, for units of one size. Returns them."""
    uses = list(itertools.chain.from_iterable(run))
    positions = defaultdict(list)
    for position in reversed(range(len(uses))):
        positions[uses[position]].append(position)
    cache, nbytes = set(), 0
    for unit in uses:
        nbytes += 0 if unit in cache else 2 * size
        positions[unit].pop()
        cache.add(unit)
        if len(cache) * size > room:
            cache.discard(max(cache, key=lambda one: positions[one][-1] if positions[one] else len(uses)))
    return nbytes


@dataclass
class Followed:
    """What the frequency policy did: NVMe bytes with its moves, and the placement after every revision."""

    nbytes: int = 0
    moved_nbytes: int = 0
    placements: list[Placement] = field(default_factory=lambda: [{}])


def follow(run, sizes, room, *, every=4, half_life_steps=20.0, horizon_steps=20):
    """Keep what `Frequencies` expects to be used most, revised every few steps."""
    frequencies, done = Frequencies(len(sizes), half_life_steps), Followed()
    for number, step in enumerate(run, 1):
        for unit in step:
            frequencies.used(unit)
            frequencies.updated(unit)
            done.nbytes += 0 if (unit, "m") in done.placements[-1] else 2 * sizes[unit]
        frequencies.close_step()
        if number % every == 0 or frequencies.unsettled:
            candidates = [
                Candidate(unit, "m", nbytes, frequencies.fetches(unit), frequencies.updates(unit))
                for unit, nbytes in enumerate(sizes)
            ]
            revision = revise(done.placements[-1], candidates, PlacementBudget(0, room, 0), horizon_steps)
            done.moved_nbytes += sum(move.nbytes for move in revision.moves)
            done.placements.append(revision.placement)
    done.nbytes += done.moved_nbytes
    return done


def fewest_read(units, sizes, window, *, held_back=False):
    """Bytes that a step must read, found by trying every choice of what is kept between two uses.

    held_back: whether to try such choices alone as leave room, just before each use, for a unit read for it.
    """

    def count(position, waiting):
        """Bytes read from use `position` on. waiting: what may be kept till then, by unit."""
        if position == len(units):
            return 0
        unit = units[position]
        best = None
        for keep in itertools.chain.from_iterable(
            itertools.combinations(waiting, number) for number in range(len(waiting) + 1)
        ):
            kept = set(keep)
            needed = sum(sizes[one] for one in kept)
            if held_back and unit not in kept and sizes[unit] <= window:
                needed += sizes[unit]
            if needed <= window:
                read = 0 if unit in kept else sizes[unit]
                total = read + count(position + 1, frozenset(kept | {unit}))
                best = total if best is None else min(best, total)
        return best

    return count(0, frozenset())


def in_order_read(units, sizes, window):
    """Bytes that a step reads that looks ahead in the order of the trace as far as the window reaches, and
    keeps what it finds there.
    """
    ahead, waiting, reach, read = Counter(), 0, 0, 0
    for position in range(-1, len(units)):
        in_use = units[position] if position >= 0 else None
        if position >= 0 and reach > position:
            ahead[in_use] -= 1
            waiting -= 0 if ahead[in_use] else sizes[in_use]
        elif position >= 0:
            read += sizes[in_use]
            reach = position + 1
        while reach < len(units) and (ahead[units[reach]] or waiting + sizes[units[reach]] <= window):
            unit = units[reach]
            if not ahead[unit]:
                waiting += sizes[unit]
                read += sizes[unit] if unit != in_use else 0
            ahead[unit] += 1
            reach += 1
    return read
