"""Where ranks are in a mesh and in a pipeline, as messages name them: "rank 1 (dp=0, tp=1, stage 2)". Pure.

A group numbers its own ranks, and a launcher those of the world: of a mesh of three dimensions neither says
where a rank is. So a group knows the place of each of its members, and each error that names ranks has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Place = Mapping[str, int]
"""A rank's number along each dimension of a mesh, by the dimensions' names, and in its pipeline."""
Places = Mapping[int, Place]
"""Of ranks of the world."""

STAGE = "stage"
"""The name, in a Place, of the number in a pipeline."""


class Names:
    """What messages call the ranks of a group."""

    def __init__(self, members: Sequence[int], rank: int) -> None:
        """Name `members`, ranks of the world; this process is the one at index `rank`."""
        self._members, self._rank = list(members), rank
        self.places: Places = {}

    def lie_at(self, places: Places) -> None:
        """Note where ranks are."""
        self.places = {rank: dict(place) for rank, place in places.items()}

    def __str__(self) -> str:
        """This process's own, of how many."""
        return f"rank {self._rank} of {len(self._members)}{self._place(self._rank)}"

    def of(self, *numbers: int) -> str:
        """Return those of some of the ranks, by their numbers in the group."""
        return f"rank {', '.join(f'{number}{self._place(number)}' for number in numbers)}"

    def told(self, texts: Sequence[str]) -> str:
        """Return what each rank says, those together that say the same."""
        of_each: dict[str, list[int]] = {}
        for number, text in enumerate(texts):
            of_each.setdefault(text, []).append(number)
        return "; ".join(f"{self.of(*numbers)}: {text}" for text, numbers in of_each.items())

    def _place(self, number: int) -> str:
        rank = self._members[number]
        place = self.places.get(rank, {})
        parts = [f"{name} {at}" if name == STAGE else f"{name}={at}" for name, at in place.items()]
        if parts and rank != number:
            parts.append(f"rank {rank} of the world")
        return f" ({', '.join(parts)})" if parts else ""


def with_stages(places: Places, rank: int, members: Sequence[int]) -> dict[int, Place]:
    """Return the places of the ranks that have a stage with `rank`, and of those that have the other stages.

    places: without stages, of the former; members: one rank of each stage, which are where `rank` is but for
    that.
    """
    own = places.get(rank, {})
    others = {one: {**own, STAGE: stage} for stage, one in enumerate(members)}
    return {**others, **{one: {**place, STAGE: members.index(rank)} for one, place in places.items()}}
