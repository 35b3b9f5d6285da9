"""What would help a planned training most: each idea is planned anew, and told with its figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from infinity.bench.planning.cuts import in_tiles
from infinity.bench.planning.planned import Planned, Question, answer
from infinity.planning.capacity import HOST_MEMORY
from infinity.planning.tile_size import tile_choice
from infinity.sizes import format_size

_LEAST_GAIN = 1.05
"""Of tokens per second, or bytes moved: less is not worth telling."""
_MOST = 5


@dataclass(frozen=True, slots=True)
class Idea:
    """One change, and what a plan with it says."""

    change: str
    planned: Planned


def ideas(one: Planned) -> list[Idea]:
    """Return what makes a training fit that does not, or else what makes it faster; the best first."""
    return _that_fit(one) if not one.fits else _that_speed_up(one)


def told(one: Planned, found: list[Idea]) -> list[str]:
    """Return a sentence for each idea."""
    if not one.fits:
        return [f"would fit: {idea.change}" for idea in found]
    if one.tokens_per_s is not None:
        return [
            f"{idea.change}: {idea.planned.tokens_per_s or 0:,.3g} tokens per second instead of "
            f"{one.tokens_per_s:,.3g} ({(idea.planned.tokens_per_s or 0) / one.tokens_per_s:.2f} times)"
            for idea in found
        ]
    return [
        f"{idea.change}: {format_size(_moved(idea.planned))} from and to NVMe in a step and rank, instead of "
        f"{format_size(_moved(one))}"
        for idea in found
    ]


# What makes it faster


def _that_speed_up(one: Planned) -> list[Idea]:
    found = [Idea(change, answer(other)) for change, other in _faster(one.question)]
    found = [idea for idea in found if idea.planned.fits]
    if one.tokens_per_s is None:
        better = [idea for idea in found if _moved(idea.planned) * _LEAST_GAIN < _moved(one)]
        return sorted(better, key=lambda idea: _moved(idea.planned))[:_MOST]
    faster = [idea for idea in found if _speed(idea.planned) > _LEAST_GAIN * _speed(one)]
    return sorted(faster, key=lambda idea: -_speed(idea.planned))[:_MOST]


def _faster(question: Question) -> Iterator[tuple[str, Question]]:
    setting, method = question.setting, question.setting.method
    if setting.update == "forward" and setting.micro_batches == 1 and setting.dtype != "fp16":
        yield 'update="backward"', question.changed(update="backward")
    for state_dtype in ("bf16", "int8"):
        if setting.dtype == "bf16" and setting.state_dtype not in (state_dtype, "int8"):
            yield f'state_dtype="{state_dtype}"', question.changed(state_dtype=state_dtype)
    twice = 2 * setting.host_nbytes
    yield f'host_memory="{format_size(twice)}"', question.changed(host_nbytes=twice)
    for times in (2, 4):
        more = method.tokens * times
        yield f"{more:,} tokens per step and rank", question.changed(tokens=more)
    if method.checkpointing and not (method.offload or method.batch_tile or method.activation_nbytes):
        yield "no activation checkpointing", question.changed(checkpointing=False)


def _speed(planned: Planned) -> float:
    return planned.tokens_per_s or 0.0


def _moved(planned: Planned) -> int:
    return planned.demand.read_nbytes + planned.demand.written_nbytes if planned.demand is not None else 0


# What makes it fit


def _that_fit(one: Planned) -> list[Idea]:
    """Return single changes that make it fit; else one of several, each of which takes less of what lacks."""
    question = replace(one.question, seconds=None)
    less: list[tuple[str, dict[str, Any], int | None]] = []
    fitting = []
    for change, fields, above in _reductions(question):
        planned = answer(_reduced(question, fields, above))
        if planned.fits:
            fitting.append(Idea(change, planned))
        if _shortage(planned) < _shortage(one):
            less.append((change, fields, above))
    fitting += _smaller_budgets(one, question)
    least = one.least_host_nbytes
    smaller = (answer(question.changed(host_nbytes=least)) if one.demand is None else None,)
    fitting += [Idea(f'host_memory="{format_size(least)}"', each) for each in smaller if each and each.fits]
    if fitting:
        return fitting[:_MOST]
    strongest = {next(iter(fields), "tile_above"): (change, fields, above) for change, fields, above in less}
    together = question
    for _, fields, above in strongest.values():
        together = _reduced(together, fields, above)
    planned = answer(together)
    words = [change for change, *_ in strongest.values()]
    return [Idea(", together with ".join(words), planned)] if planned.fits else []


def _smaller_budgets(one: Planned, question: Question) -> list[Idea]:
    """Return the host_memory that leaves the machine what else is needed of its memory, if that fits."""
    short = sum(need.short_nbytes for need in one.needs if need.what == HOST_MEMORY)
    left = question.setting.host_nbytes - short
    if not short or left <= 0:
        return []
    unit = next((unit for unit in (1 << 30, 1 << 20) if left >= 4 * unit), 1 << 10)
    nbytes = left // unit * unit
    planned = answer(question.changed(host_nbytes=nbytes))
    return [Idea(f'host_memory="{format_size(nbytes)}"', planned)] if planned.fits else []


def _reduced(question: Question, fields: dict[str, Any], above_nbytes: int | None) -> Question:
    changed = question.changed(**fields)
    if above_nbytes is None:
        return changed
    return replace(changed, outline=in_tiles(changed.outline, above_nbytes)[0])


def _reductions(question: Question) -> Iterator[tuple[str, dict[str, Any], int | None]]:
    """Yield what takes less of something: its name, the fields that change, and above which size of a weight
    layers are cut.
    """
    setting, method = question.setting, question.setting.method
    if not method.checkpointing and method.activation_nbytes is None:
        yield "activation checkpointing", {"checkpointing": True}, None
    if not method.loss_tiles:
        yield "the loss without logits (--loss-tiles)", {"loss_tiles": True}, None
    by_budget = method.activation_nbytes is not None
    if method.checkpointing and method.offload is None and not by_budget:
        where = "nvme" if setting.nvme else "host"
        yield f'offload_activations="{where}"', {"offload": where}, None
    if by_budget and method.sequence_tiles is None:
        yield "MLPs in slices (--sequence-tiles auto)", {"sequence_tiles": "auto"}, None
    if (
        method.checkpointing
        and method.batch_tile is None
        and not by_budget
        and method.tokens > method.sequence
    ):
        yield "blocks over one sequence at a time (--batch-tile 1)", {"batch_tile": 1}, None
    choice = tile_choice(setting.host_nbytes, setting.device_nbytes)
    yield f'tile_above="{format_size(choice.nbytes)}"', {}, choice.nbytes
    yield from _smaller(question)


def _smaller(question: Question) -> Iterator[tuple[str, dict[str, Any], int | None]]:
    """Yield what stores less, or takes fewer tokens at once."""
    setting, method = question.setting, question.setting.method
    for state_dtype in ("bf16", "int8"):
        if setting.dtype == "bf16" and setting.state_dtype not in (state_dtype, "int8"):
            yield f'state_dtype="{state_dtype}"', {"state_dtype": state_dtype}, None
    if setting.durable:
        yield "no durable run", {"durable": False}, None
    sequences = method.tokens // method.sequence
    for part in (2, 8, 64):
        if sequences >= part:
            fewer = method.tokens // part
            yield f"{fewer:,} tokens per micro-batch and rank", {"tokens": fewer}, None


def _shortage(planned: Planned) -> tuple[bool, int]:
    return bool(planned.refusal), sum(need.short_nbytes for need in planned.needs)
