"""Traces of routing with stated skew and drift, and what stays in memory by several policies. Pure.

A trace is a list of steps, a step the list of the experts that it uses, each once. Memory has room for some
experts, all of one size. A use that finds its expert in memory is a hit; any other reads it and writes it
back. Caches (LRU, LFU) take in what was used, and give up something else. Infinity's placement is decided
between steps, from the expected uses: what moves into memory is written once less, what leaves once more.

[Note: what can be known]
The tokens of a step are drawn anew, so that nothing of the past says more than how popular each expert is
now. A step uses each expert once: what is taken in for a use is used again in a later step alone. So a step's
hits are at most the experts that were in memory when it began and that it uses, and in the mean they are
most where these are the most popular ones. Belady's rule knows what is drawn: of 128 experts, 32 tokens a
step and a skew of 1.2, that choice has 90 % of its hits with room for 16, 92 % for 32, 96 % for 64.

And how popular an expert is has to be learnt. Ranks are dealt to experts by chance, so that two of them
differ for nobody but by what was routed to them since; the probability of what was is a product, in which an
expert to which more tokens were routed is the more likely one to have the better rank. So in the mean a step
has most hits where memory holds the experts with most tokens since ranks were dealt last. The policy of
`most_learnt` does that: it is told when that was, sees each token, and moves experts for nothing.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from infinity.planning.admission import Admission
from infinity.planning.frequency import Frequencies
from infinity.planning.placement import REVISED_EVERY, Candidate, Placement, PlacementBudget, revise

Run = list[list[int]]


@dataclass(frozen=True, slots=True)
class RoutingTrace:
    """How tokens are routed. skew: the expert of rank r is drawn in proportion to r^-skew. drift: the chance,
    after a step, that an expert becomes as popular as another was. change_every: steps after which all
    experts change places; 0: never.
    """

    name: str
    skew: float
    drift: float = 0.0
    change_every: int = 0

    def most_hits(self, experts: int, tokens: int, room: int) -> float:
        """Return the hit rate that no policy exceeds in the mean which does not know what is drawn next, even
        where it knows how popular each expert is now: see [Note: what can be known].
        """
        weights = np.arange(1, experts + 1) ** -self.skew
        used = 1 - (1 - weights / weights.sum()) ** tokens  # the chance that a step uses it
        return float(used[:room].sum() / used.sum())

    def most_learnt(self, seed: int, steps: int, experts: int, tokens: int, room: int) -> float:
        """Return the hit rate, on `run`, of a policy that none exceeds in the mean which has to learn how
        popular each expert is: see [Note: what can be known]. Of a trace that does not drift.
        """
        counts, known = np.zeros(experts), np.zeros(experts, np.bool_)
        hits = uses = 0
        for step, routed in enumerate(self._routed(seed, steps, experts, tokens), 1):
            used = np.unique(routed)
            there = np.argsort(np.where(known, -counts, np.inf), kind="stable")[: min(room, int(known.sum()))]
            hits += int(np.isin(used, there).sum())
            uses += len(used)
            known[used] = True
            np.add.at(counts, routed, 1)
            if self.change_every and step % self.change_every == 0:
                counts[:] = 0
        return hits / max(1, uses)

    def run(self, seed: int, steps: int, experts: int, tokens: int) -> Run:
        """Return the experts that each step's tokens are routed to, each once."""
        return [sorted(set(one)) for one in self._routed(seed, steps, experts, tokens)]

    def _routed(self, seed: int, steps: int, experts: int, tokens: int) -> Iterator[list[int]]:
        """Yield the expert of each token, step by step."""
        random = np.random.default_rng(seed)
        weights = np.arange(1, experts + 1) ** -self.skew
        weights /= weights.sum()
        ranked = [int(one) for one in random.permutation(experts)]
        for step in range(1, steps + 1):
            ranks = random.choice(experts, size=tokens, p=weights)
            yield [ranked[rank] for rank in ranks]
            if random.random() < self.drift:
                ranked.insert(int(random.integers(experts)), ranked.pop(int(random.integers(experts))))
            if self.change_every and step % self.change_every == 0:
                ranked = [int(one) for one in random.permutation(experts)]


TRACES = (
    RoutingTrace("even", 0.0),
    RoutingTrace("skewed", 1.2),
    RoutingTrace("skewed, drifting", 1.2, drift=0.5),
    RoutingTrace("very skewed, drifting", 2.0, drift=0.2),
    RoutingTrace("skewed, all change every 40 steps", 1.2, change_every=40),
)


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """What a policy did: hits among uses, and records that were read or written, in experts."""

    hits: int
    uses: int
    moved: int

    @property
    def hit_rate(self) -> float:
        """Share of the uses that found their expert in memory."""
        return self.hits / max(1, self.uses)


def _cached(run: Run, room: int, give_up: Callable[[set[int], int, int], int]) -> PolicyResult:
    """Follow a cache. give_up: which of the experts in it, after a use, at this place in the run, goes."""
    cache: set[int] = set()
    hits = moved = 0
    uses = list(itertools.chain.from_iterable(run))
    for place, expert in enumerate(uses):
        hits += expert in cache
        moved += expert not in cache
        cache.add(expert)
        if len(cache) > room:
            cache.discard(give_up(cache, expert, place))
            moved += 1
    return PolicyResult(hits, len(uses), moved)


def lru(run: Run, room: int) -> PolicyResult:
    """Give up what was used longest ago."""
    last: dict[int, int] = {}
    uses = list(itertools.chain.from_iterable(run))

    def give_up(cache: set[int], _used: int, place: int) -> int:
        last.update({uses[one]: one for one in range(max(last.values(), default=-1) + 1, place + 1)})
        return min(cache, key=last.__getitem__)

    return _cached(run, room, give_up)


def lfu(run: Run, room: int) -> PolicyResult:
    """Give up what was used least often since the start."""
    counted: Counter[int] = Counter()
    uses = list(itertools.chain.from_iterable(run))

    def give_up(cache: set[int], used: int, place: int) -> int:
        counted.update(uses[counted.total() : place + 1])
        return min(cache, key=lambda one: (counted[one], one == used))

    return _cached(run, room, give_up)


def static(run: Run, room: int) -> PolicyResult:
    """Keep, from their first use on, the experts that the whole run uses most, as if that were known."""
    counted = Counter(itertools.chain.from_iterable(run))
    kept = {expert for expert, _ in counted.most_common(room)}
    hits = moved = 0
    seen: set[int] = set()
    uses = list(itertools.chain.from_iterable(run))
    for expert in uses:
        there = expert in kept and expert in seen
        hits += there
        moved += 0 if there else 1 if expert in kept else 2
        seen.add(expert)
    return PolicyResult(hits, len(uses), moved)


def belady(run: Run, room: int) -> PolicyResult:
    """Give up what is used furthest in the future: no policy has more hits."""
    uses = list(itertools.chain.from_iterable(run))
    positions: defaultdict[int, list[int]] = defaultdict(list)
    for place in reversed(range(len(uses))):
        positions[uses[place]].append(place)

    def give_up(cache: set[int], _used: int, place: int) -> int:
        for expert in cache:
            while positions[expert] and positions[expert][-1] <= place:
                positions[expert].pop()
        return max(cache, key=lambda one: positions[one][-1] if positions[one] else len(uses))

    return _cached(run, room, give_up)


def ours(run: Run, room: int) -> PolicyResult:
    """Keep what `Frequencies` expects to be used most, as units/pinning.py decides it, and take newcomers in
    as `Admission` has it.
    """
    count = 1 + max(itertools.chain.from_iterable(run))
    frequencies = Frequencies(count)
    admission = Admission(frequencies)
    placed: Placement = MappingProxyType({})
    there: set[int] = set()
    hits = moved = uses = 0
    for number, step in enumerate(run):
        for expert in step:
            frequencies.used(expert)
            frequencies.updated(expert)
            uses += 1
            hits += expert in there
            if expert not in there:
                if (expert, "m") not in placed and admission.wants(expert, 1) and len(placed) < room:
                    placed = MappingProxyType({**placed, (expert, "m"): "host"})
                comes = (expert, "m") in placed  # with the pass that updates it anyway
                moved += 1 if comes else 2
                there |= {expert} if comes else set()
        frequencies.close_step()
        if number % REVISED_EVERY == 0 or frequencies.unsettled:
            candidates = [
                Candidate(one, "m", 1, frequencies.fetches(one), frequencies.updates(one))
                for one in range(count)
            ]
            budget = PlacementBudget(0, room - admission.reserve_nbytes, 0)
            placed = revise(placed, candidates, budget).placement
        kept = np.array(sorted(one for one, _ in placed), np.int64)
        leaving = admission.close_step(kept, np.ones_like(kept), room - len(placed))
        placed = MappingProxyType({key: tier for key, tier in placed.items() if key[0] not in leaving})
        gone = {one for one in there if (one, "m") not in placed}
        moved += len(gone)
        there -= gone
    return PolicyResult(hits, uses, moved)


POLICIES: Mapping[str, Callable[[Run, int], PolicyResult]] = {
    "Infinity": ours,
    "LRU": lru,
    "LFU": lfu,
    "static": static,
    "Belady": belady,
}


def compared(
    run: Run, rooms: Sequence[int], policies: Mapping[str, Callable[[Run, int], PolicyResult]] = POLICIES
) -> list[dict[str, object]]:
    """Return a row for each room: hit rates and records moved per use, by policy."""
    rows: list[dict[str, object]] = []
    for room in rooms:
        kept = {name: policy(run, room) for name, policy in policies.items()}
        rates = {f"{name} hits": one.hit_rate for name, one in kept.items()}
        moved = {f"{name} moved": one.moved / one.uses for name, one in kept.items()}
        rows.append({"room": room, **rates, **moved})
    return rows
