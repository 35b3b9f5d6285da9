"""What would help a planned training most: each idea is planned anew, and told with its figures.

Changes are options of `infinity plan`; Config and the optimizers have them by the same names.
"""

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
    enough: str = ""
    """The resource that suffices with it, where another still does not."""


def ideas(one: Planned) -> list[Idea]:
    """Return what makes a training fit that does not, or else what makes it faster; the best first."""
    return _that_fit(one) if not one.fits else _that_speed_up(one)


def told(one: Planned, found: list[Idea]) -> list[str]:
    """Return a sentence for each idea."""
    if not one.fits:
        return [f"{f'enough {idea.enough}' if idea.enough else 'would fit'}: {idea.change}" for idea in found]
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
        for update in ("auto", "backward"):
            yield f"--update {update}", question.changed(update=update)
    for state_dtype in ("bf16", "int8"):
        if setting.state_dtype not in (state_dtype, "int8", "int4"):
            yield f"--state-dtype {state_dtype}", question.changed(state_dtype=state_dtype)
    twice = _rounded(2 * setting.host_nbytes)
    yield f"--host-memory {_option(twice)}", question.changed(host_nbytes=twice)
    for times in (2, 4):
        more = method.tokens * times
        yield f"{more:,} tokens per step and rank", question.changed(tokens=more)
    if method.checkpointing and not (method.offload or method.batch_tile or method.activation_nbytes):
        yield "--no-checkpointing", question.changed(checkpointing=False)


def _speed(planned: Planned) -> float:
    return planned.tokens_per_s or 0.0


def _moved(planned: Planned) -> int:
    return planned.demand.read_nbytes + planned.demand.written_nbytes if planned.demand is not None else 0


# What makes it fit


def _that_fit(one: Planned) -> list[Idea]:
    """Return single changes that make it fit; else one of several, each of which takes less of what lacks;
    else what makes each resource alone suffice.
    """
    question = replace(one.question, seconds=None)
    less: list[tuple[str, dict[str, Any], int | None]] = []
    tried = []
    for change, fields, above in _reductions(question):
        planned = answer(_reduced(question, fields, above))
        tried.append(Idea(change, planned))
        if _shortage(planned) < _shortage(one):
            less.append((change, fields, above))
    tried += _smaller_budgets(one, question)
    fitting = [idea for idea in tried if idea.planned.fits]
    if fitting:
        return fitting[:_MOST]
    strongest = {next(iter(fields), "tile_above"): (change, fields, above) for change, fields, above in less}
    if not strongest:
        return []
    together = question
    for _, fields, above in strongest.values():
        together = _reduced(together, fields, above)
    words = " ".join(change for change, *_ in strongest.values())
    all_of_them = Idea(words, answer(together))
    return [all_of_them] if all_of_them.planned.fits else _for_each_resource(one, [*tried, all_of_them])


def _for_each_resource(one: Planned, tried: list[Idea]) -> list[Idea]:
    """Return, for each resource that lacks, the first change with which it suffices; the last one tried, with
    what lacks then, where none does.
    """
    found = []
    for need in one.needs:
        if not need.short_nbytes:
            continue
        enough = [idea for idea in tried if idea.planned.needs and not _lacks(idea.planned, need.what)]
        if enough:
            found.append(replace(enough[0], enough=need.what))
        elif lacks := _lacks(tried[-1].planned, need.what):
            still = f"nothing that was tried; {tried[-1].change} leave {format_size(lacks)} too little"
            found.append(replace(tried[-1], enough=need.what, change=still))
    return found


def _lacks(planned: Planned, what: str) -> int:
    return sum(need.short_nbytes for need in planned.needs if need.what == what)


def _smaller_budgets(one: Planned, question: Question) -> list[Idea]:
    """Return the host_memory that leaves the machine what else is needed of its memory, and, for a model with
    which none was planned, the least that works.
    """
    short, found = _lacks(one, HOST_MEMORY), []
    left = question.setting.host_nbytes - short
    if short and left > 0:
        found.append(_rounded(left))
    if one.demand is None:
        found.append(one.least_host_nbytes)
    return [
        Idea(f"--host-memory {_option(nbytes)}", answer(question.changed(host_nbytes=nbytes)))
        for nbytes in found
    ]


def _rounded(nbytes: int) -> int:
    """Return a size in whole GiB, MiB or KiB, of which there are at least four, rounded down."""
    unit = next((unit for unit in (1 << 30, 1 << 20) if nbytes >= 4 * unit), 1 << 10)
    return nbytes // unit * unit


def _option(nbytes: int) -> str:
    """Return a size as options take it."""
    for name, unit in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes % unit == 0:
            return f"{nbytes // unit}{name}"
    return str(nbytes)


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
        yield "--checkpointing", {"checkpointing": True}, None
    if not method.loss_tiles:
        yield "--loss-tiles", {"loss_tiles": True}, None
    by_budget = method.activation_nbytes is not None
    if method.checkpointing and method.offload is None and not by_budget:
        where = "nvme" if setting.nvme else "host"
        yield f"--offload-activations {where}", {"offload": where}, None
    if by_budget and method.sequence_tiles is None:
        yield "--sequence-tiles auto", {"sequence_tiles": "auto"}, None
    if (
        method.checkpointing
        and method.batch_tile is None
        and not by_budget
        and method.tokens > method.sequence
    ):
        yield "--batch-tile 1", {"batch_tile": 1}, None
    choice = tile_choice(setting.host_nbytes, setting.device_nbytes)
    yield f"--tile-above {_option(choice.nbytes)}", {}, choice.nbytes
    yield from _smaller(question)


def _smaller(question: Question) -> Iterator[tuple[str, dict[str, Any], int | None]]:
    """Yield what stores less, or takes fewer tokens at once."""
    setting, method = question.setting, question.setting.method
    for state_dtype in ("bf16", "int8"):
        if setting.state_dtype not in (state_dtype, "int8", "int4"):
            yield f"--state-dtype {state_dtype}", {"state_dtype": state_dtype}, None
    if setting.durable:
        yield "no --durable", {"durable": False}, None
    if setting.speculate and not setting.durable:
        yield "no --speculate", {"speculate": False}, None
    sequences = method.tokens // method.sequence
    for part in (2, 8, 64):
        if sequences >= part:
            fewer = method.tokens // part
            yield f"{fewer:,} tokens per micro-batch and rank", {"tokens": fewer}, None


def _shortage(planned: Planned) -> tuple[bool, int]:
    return bool(planned.refusal), sum(need.short_nbytes for need in planned.needs)
