"""DeepSpeed's curriculum learning by sequence length, in Infinity's terms. Pure.

Two sections describe it: "data_efficiency.data_sampling.curriculum_learning", with a metric "seqlen", and the
older "curriculum_learning", which DeepSpeed has removed. Both have the same four schedules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infinity.config.deepspeed_values import whole
from infinity.errors import ConfigError
from infinity.planning.lengths import LengthSchedule

SAMPLING = "data_efficiency.data_sampling."
LEARNING = SAMPLING + "curriculum_learning."
METRICS = LEARNING + "curriculum_metrics."
SEQLEN = METRICS + "seqlen."
LEGACY = "curriculum_learning."
SWITCHES = ("data_efficiency.enabled", SAMPLING + "enabled", LEARNING + "enabled")
"""All of them switch the newer section on."""
BESIDE = {SAMPLING + "dynamic_batching": SWITCHES[:2]}
"""What the newer section asks for beside the curriculum -> the switches above it."""
_SCHEDULE = {
    "total_curriculum_step": "steps",
    "difficulty_step": "multiple",
    "root_degree": "degree",
    "difficulty": "lengths",
    "max_step": "until",
}


def asked(found: Mapping[str, Any]) -> bool:
    """Whether the section data_efficiency is switched on."""
    return all(found.get(one) is True for one in SWITCHES)


def legacy(found: Mapping[str, Any]) -> bool:
    """Whether the older section is switched on."""
    return found.get(LEGACY + "enabled") is True


def length_schedule(given: Mapping[str, Any]) -> LengthSchedule | None:
    """Return the schedule of a file's keys; None where none is switched on.

    Raises: ConfigError naming what is missing, or what does not fit.
    """
    sections = [one for one, on in ((SEQLEN, asked(given)), (LEGACY, legacy(given))) if on]
    if len(sections) > 1:
        raise ConfigError("curriculum_learning is there twice, also in data_efficiency; keep one of them")
    if not sections:
        return None
    section = sections[0]
    least, most, kind = (
        given.get(section + one) for one in ("min_difficulty", "max_difficulty", "schedule_type")
    )
    if least is None or most is None or kind is None:
        raise ConfigError(f"{section[:-1]}: needs min_difficulty, max_difficulty and schedule_type")
    start = section + "schedule_config."
    options: dict[str, Any] = {}
    for path, value in given.items():
        if path.startswith(start):
            name = _SCHEDULE.get(path.removeprefix(start))
            if name is None:
                raise ConfigError(f"{path}: unknown; expected one of {', '.join(_SCHEDULE)}")
            options[name] = [whole(one) for one in value] if isinstance(value, list) else whole(value)
    if kind == "custom":
        options = {"function": _unset}
    try:
        return LengthSchedule(shortest=int(least), longest=int(most), schedule=kind, **options)
    except ConfigError as error:
        raise ConfigError(f"{section[:-1]}: {error}") from None


def _unset(step: int) -> int:
    raise ConfigError(
        f"step {step}: the schedule is custom; give its function to "
        "engine.set_custom_curriculum_learning_schedule before the first batch"
    )
