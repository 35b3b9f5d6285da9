"""What each block keeps for its backward, so that all of it fits a budget: from measured blocks. Pure.

[Note: four ways to keep a block]
    keep       all that its forward made for the backward, which computes nothing again
    recompute  its input alone, where it computes; the backward makes the rest again
    host       as `recompute`, while the input waits in host memory, within that budget
    nvme       as `recompute`, while the input waits on NVMe
What a block makes is ten to twenty times as large as its input, and to write and read that would take longer
than to compute it again, on every tier. So inputs alone wait elsewhere, and only where they do not fit.

[Note: which blocks]
First all are recomputed. Where that fits, blocks are kept, those first that save most time for a byte, until
the next one does not fit. A larger budget so keeps all that a smaller one keeps, and no step takes longer
with it. Equal blocks have equal times (their median): of these the last ones are kept, which the backward
frees first. Where it does not fit, inputs leave, those of the first blocks first, which wait longest.

[Note: the peak of a forward and backward]
At each moment there is what blocks keep of the forward so far, and what one block, or the head and the loss,
makes beside. In the backward of block i the blocks behind it are free, and block i has all that it keeps,
computed again or not. While inputs are on their way to another tier, and back, three of them are counted;
on an accelerator so are those that wait to be written, as many as the budget of host memory lets wait.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from statistics import median
from typing import Any

from infinity.errors import ConfigError
from infinity.sizes import format_size

KEEP, RECOMPUTE, HOST, NVME = "keep", "recompute", "host", "nvme"
"""Places of what a block keeps: see [Note: four ways to keep a block]."""
ON_THE_WAY = 3
"""Inputs that are where they compute although they wait elsewhere: the newest, and one each way."""


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """What one call of a block was measured to need, in bytes."""

    input_nbytes: int
    """Of what it is given, and its recomputation begins with."""
    leaving_nbytes: int
    """Of that, what can wait in another tier."""
    kept_nbytes: int
    """That its forward keeps for its backward, beside the input."""
    working_nbytes: int
    """That its forward or its backward makes beside, at one time."""
    seconds: float
    """Of its forward."""

    def held_nbytes(self, place: str) -> int:
        """Return what is held between its forward and its backward."""
        if place == KEEP:
            return self.input_nbytes + self.kept_nbytes
        return self.input_nbytes - (self.leaving_nbytes if place in (HOST, NVME) else 0)


@dataclass(frozen=True, slots=True)
class StepMemory:
    """What one forward and backward was measured to need, in bytes."""

    blocks: tuple[BlockMemory, ...]
    """By call, in the order of the forward."""
    shared_nbytes: int = 0
    """All the time: masks and tables that all blocks are given, and what the model returns."""
    head_kept_nbytes: int = 0
    """That everything but the blocks keeps for its backward: norms, the head, the loss."""
    head_working_nbytes: int = 0
    """That it makes beside, at one time."""
    sent_nbytes: int = 0
    """Of inputs that leave, what may still be where it was made, at most, until it has been written."""

    def peak_nbytes(self, places: Sequence[str]) -> int:
        """Return the most that is there at one time: see [Note: the peak of a forward and backward]."""
        before = most = leaving = away = 0
        for block, place in zip(self.blocks, places, strict=True):
            most = max(most, before + block.input_nbytes + block.kept_nbytes + block.working_nbytes)
            before += block.held_nbytes(place)
            if place in (HOST, NVME):
                leaving = max(leaving, block.leaving_nbytes)
                away += block.leaving_nbytes
        most = max(most, before + self.head_kept_nbytes + self.head_working_nbytes)
        return self.shared_nbytes + ON_THE_WAY * leaving + min(away, self.sent_nbytes) + most


@dataclass(frozen=True, slots=True)
class InputTiers:
    """Where inputs of recomputed blocks can wait, beside the device."""

    host_nbytes: int = 0
    """That host_memory has for them."""
    nvme: bool = False

    def place_of(self, nbytes: int, in_host_nbytes: int) -> str | None:
        """Return where an input goes, with so much in host memory already; None for nowhere."""
        if in_host_nbytes + nbytes <= self.host_nbytes:
            return HOST
        return NVME if self.nvme else None


@dataclass(frozen=True, slots=True)
class ActivationPlan:
    """What each call of a block keeps."""

    places: tuple[str, ...]
    """KEEP, RECOMPUTE, HOST or NVME, by call."""
    budget_nbytes: int
    peak_nbytes: int
    recomputed_s: float
    """Seconds of the forwards that the backward repeats."""
    reason: str
    """For people: one line."""


def plan_activations(step: StepMemory, budget_nbytes: int, tiers: InputTiers) -> ActivationPlan:
    """Choose what each block keeps: see [Note: which blocks].

    Raises: ConfigError with the smallest budget that works, where nothing fits.
    """
    places = [RECOMPUTE] * len(step.blocks)
    if step.peak_nbytes(places) <= budget_nbytes:
        waits = _keep(step, places, budget_nbytes)
    else:
        waits = _send_away(step, places, budget_nbytes, tiers)
    peak = step.peak_nbytes(places)
    if peak > budget_nbytes:
        raise ConfigError(_too_small(step, places, budget_nbytes, tiers))
    again = sum(one.seconds for one, place in zip(step.blocks, places, strict=True) if place != KEEP)
    return ActivationPlan(
        tuple(places), budget_nbytes, peak, again, _reason(places, peak, budget_nbytes, again, waits)
    )


def _keep(step: StepMemory, places: list[str], budget_nbytes: int) -> str:
    """Let blocks be kept as far as they fit; return why the next one is not."""
    for number in _most_worth_first(step.blocks):
        places[number] = KEEP
        peak = step.peak_nbytes(places)
        if peak > budget_nbytes:
            places[number] = RECOMPUTE
            return f"keeping one more would take {format_size(peak)}"
    return ""


def _send_away(step: StepMemory, places: list[str], budget_nbytes: int, tiers: InputTiers) -> str:
    """Let inputs wait in other tiers until the rest fits; return why."""
    stayed = step.peak_nbytes(places)
    least, best = stayed, list(places)
    in_host = 0
    for number, block in enumerate(step.blocks):
        place = tiers.place_of(block.leaving_nbytes, in_host) if block.leaving_nbytes else None
        if place is None:
            continue
        places[number] = place
        in_host += block.leaving_nbytes if place == HOST else 0
        peak = step.peak_nbytes(places)
        if peak < least:
            least, best = peak, list(places)
        if peak <= budget_nbytes:
            break
    places[:] = best  # where few inputs can leave, what is on the way would be more than what they free
    return f"with all inputs where they are made it would take {format_size(stayed)}"


def _most_worth_first(blocks: Sequence[BlockMemory]) -> list[int]:
    """Return the numbers of the blocks, those first whose time costs the least memory."""
    alike = defaultdict(list)
    for one in blocks:
        alike[one.input_nbytes, one.kept_nbytes, one.working_nbytes].append(one.seconds)
    middle = {key: median(seconds) for key, seconds in alike.items()}

    def worth(number: int) -> tuple[float, int]:
        one = blocks[number]
        seconds = middle[one.input_nbytes, one.kept_nbytes, one.working_nbytes]
        return (seconds / one.kept_nbytes if one.kept_nbytes else float("inf")), number

    return sorted(range(len(blocks)), key=worth, reverse=True)


def _counted(places: Iterable[str], place: str) -> int:
    return sum(one == place for one in places)


def _reason(places: Sequence[str], peak: int, budget_nbytes: int, again_s: float, waits: str) -> str:
    kept = _counted(places, KEEP)
    parts = [f"{kept} of {len(places)} blocks kept"]
    if kept < len(places):
        took = f" in {again_s:.3g} s" if again_s else ""
        parts.append(f"{len(places) - kept} recomputed{took}")
    for place, where in ((HOST, "in host memory"), (NVME, "on NVMe")):
        if number := _counted(places, place):
            parts.append(f"{number} of their inputs wait {where}")
    why = f"; {waits}" if waits else ""
    return f"{', '.join(parts)}: {format_size(peak)} of {format_size(budget_nbytes)} at the peak{why}"


def _too_small(step: StepMemory, places: Sequence[str], budget_nbytes: int, tiers: InputTiers) -> str:
    peak = step.peak_nbytes(places)
    largest = max((one.input_nbytes + one.kept_nbytes + one.working_nbytes for one in step.blocks), default=0)
    inputs = sum(one.held_nbytes(place) for one, place in zip(step.blocks, places, strict=True))
    cures = ['sequence_tiles="auto", MLPs in slices', "fewer or shorter sequences in a batch"]
    if step.head_kept_nbytes + step.head_working_nbytes > largest:
        cures.insert(0, 'loss_tiles="auto" or infinity.tiling.tile_loss_(model), the loss without logits')
    if RECOMPUTE in places and not tiers.nvme:
        cures.insert(0, "a folder on NVMe (nvme=...), where inputs can wait")
    return (
        f"activation_memory={format_size(budget_nbytes)} does not hold this batch, even with all "
        f"{len(places)} blocks recomputed: one block takes {format_size(largest)}, the blocks' inputs that "
        f"stay {format_size(inputs)}, the rest of the model and its loss "
        f"{format_size(step.shared_nbytes + step.head_kept_nbytes + step.head_working_nbytes)}. The smallest "
        f"that works is activation_memory={peak} ({format_size(peak)}). Give that, or {', or '.join(cures)}."
    )


def combined(measured: Sequence[Mapping[str, Any]]) -> StepMemory:
    """Return the largest of what ranks measured of the same calls; each as dataclasses.asdict has it."""
    steps = [
        StepMemory(**{**one, "blocks": tuple(BlockMemory(**block) for block in one["blocks"])})
        for one in measured
    ]
    blocks = (
        BlockMemory(*map(max, zip(*(astuple(one) for one in same), strict=True)))
        for same in zip(*(one.blocks for one in steps), strict=True)
    )
    rest = [astuple(replace(one, blocks=()))[1:] for one in steps]
    return StepMemory(tuple(blocks), *map(max, zip(*rest, strict=True)))
