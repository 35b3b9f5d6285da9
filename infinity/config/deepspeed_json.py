"""DeepSpeed's JSON: read, checked, and told key by key what becomes of it. Pure: no torch.

DeepSpeedSettings is all that a file says; its `report` has a line for every key. What a key means is decided
in deepspeed_keys; what is done with it, in deepspeed_engine.
"""

from __future__ import annotations

import difflib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from infinity.config.deepspeed_batches import Batches, batches
from infinity.config.deepspeed_keys import (
    ALIASES,
    SECTIONS,
    Key,
    Verdict,
    alike,
    asks,
    find,
    is_section,
    taken,
)
from infinity.config.deepspeed_optimizers import OPTIONS, Chosen, chosen, kind_of, strangers
from infinity.config.deepspeed_schedule_keys import check_schedule
from infinity.config.deepspeed_values import TYPES
from infinity.config.loss_scale import Scaling
from infinity.errors import ConfigError

AUTO = "auto"
_CLIPPING = 1.0  # DeepSpeed's default, and its documentation's
_GATHERS = ("stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save")
_STAGES = (0, 1, 2, 3)
_NEEDS_VALUE = (Verdict.HONOURED, Verdict.UNSUPPORTED)
"""Of these, "auto" is no answer."""


@dataclass(frozen=True, slots=True)
class Line:
    """What became of one key of a file."""

    key: str
    value: Any
    verdict: Verdict
    says: str

    def __str__(self) -> str:
        """The line as it stands in the report."""
        value = json.dumps(self.value, default=str)
        if len(value) > 40:  # a section, which the report need not repeat
            value = value[:37] + "..."
        return f"{self.key} = {value}: {self.verdict.value} ({self.says})"


@dataclass(frozen=True, slots=True)
class Report:
    """Every key of a file, with what became of it. `str()` shows it as text."""

    lines: tuple[Line, ...]

    def of(self, *verdicts: Verdict) -> tuple[Line, ...]:
        """Return the lines with one of these verdicts."""
        return tuple(line for line in self.lines if line.verdict in verdicts)

    def __str__(self) -> str:
        """One line per key, by verdict."""
        return "\n".join(str(line) for verdict in Verdict for line in self.of(verdict))


C = TypeVar("C")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedSettings(Generic[C]):
    """All that a DeepSpeed file says, in Infinity's terms."""

    config: C
    optimizer: Chosen | None
    """None: the file names no optimizer."""
    scheduler: tuple[str, Mapping[str, Any]] | None
    """Type and parameters; None: the file names none."""
    batches: Batches
    gradient_clipping: float
    """The largest global norm; 0 for no clipping."""
    check_overflow: bool
    """Leave out a step whose gradients are not finite."""
    precision: str
    """The type that computes: "bf16", "fp16" or "fp32"."""
    scaling: Scaling | None
    """Of the loss, with fp16."""
    managed_accumulation: bool
    """False: every step() is an update."""
    gathers_on_save: bool
    """Whether save_16bit_model writes."""
    drop_last: bool
    steps_per_print: int | None
    breakdown: bool
    """Whether seconds of forward, backward and step are logged."""
    dump: bool
    """Whether the report is logged."""
    report: Report


def translate(
    source: str | Path | Mapping[str, Any],
    config_type: Callable[..., C],
    *,
    strict: bool = True,
    world_size: int = 1,
    infinity: Mapping[str, Any] | None = None,
    **values: Any,
) -> DeepSpeedSettings[C]:
    """Say DeepSpeed's configuration in Infinity's terms.

    source: a JSON file, or what is in it. config_type: Config, whose fields the file sets.
    strict: refuse what is not supported; False warns of it and goes on without. world_size: ranks.
    infinity: fields of Config for which DeepSpeed has no words (host_memory=...); a section "infinity" in the
    file does the same. values: what "auto" stands for, by the key's last name (lr=3e-4) or its whole path;
    `bf16` for "bf16.enabled".

    Raises: ConfigError naming every unknown key (and what it may have meant), every one that is not supported
    (and the cure), every "auto" without a value, and values of a wrong type.
    """
    found = {path: taken(path, value) for path, value in _leaves(_content(source))}
    _fill_in(found, values)
    lines = [_line(path, value) for path, value in found.items()]
    if infinity:
        lines += [_line(f"infinity.{name}", value) for name, value in infinity.items()]
    relation = batches(found, world_size)
    lines = [_line(line.key, found.get(line.key, line.value)) for line in lines]
    _settle(found, lines)
    _refuse(lines, strict=strict)
    given = {path: value for path, value in found.items() if value is not None}
    name = given.get("scheduler.type")
    schedule = {key.rsplit(".", 1)[1]: given[key] for key in given if key.startswith("scheduler.params.")}
    if name is None and schedule:
        raise ConfigError("scheduler: parameters without a type; name one, such as WarmupLR")
    if name is not None:
        name = check_schedule(name, schedule)
    steps_per_print, precision = given.get("steps_per_print"), _precision(found)
    return DeepSpeedSettings(
        config=config_type(**_fields(given, infinity or {}, precision, config_type)),
        optimizer=chosen(given),
        scheduler=None if name is None else (name, schedule),
        batches=relation,
        gradient_clipping=float(given.get("gradient_clipping", _CLIPPING)),
        check_overflow=precision == "fp16"
        or (precision == "bf16" and given.get("bf16.check_grad_overflow", True)),
        precision=precision,
        scaling=_scaling(given) if precision == "fp16" else None,
        managed_accumulation=given.get("managed_gradient_accumulation", True),
        gathers_on_save=any(given.get(f"zero_optimization.{key}", False) for key in _GATHERS),
        drop_last=given.get("dataloader_drop_last", False),
        steps_per_print=None if steps_per_print is None else int(steps_per_print),
        breakdown=given.get("wall_clock_breakdown", False),
        dump=given.get("dump_state", False),
        report=Report(tuple(lines)),
    )


# The file


def _content(source: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, str | Path):
        raise ConfigError(f"{source!r}: expected a DeepSpeed JSON, or what is in it as a dict")
    path = Path(source)
    if not path.is_file():
        raise ConfigError(f"{path}: no such file. Give a DeepSpeed JSON, or what is in it as a dict.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(f"{path}, {where}: {error.msg}. Comments are not JSON.") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: no JSON ({error})") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected an object in braces")
    return content


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{', '.join(map(repr, twice))} stands there twice; keep one")
    return dict(pairs)


def _leaves(section: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Return path and value of every key that says something by itself."""
    for name, value in section.items():
        path = f"{above}.{name}" if above else ALIASES.get(str(name), str(name))
        if path == "zero_optimization" and isinstance(value, bool):
            yield path + ".stage", int(value)  # DeepSpeed's first versions had a switch there
        elif is_section(path) and path not in SECTIONS:
            if isinstance(value, Mapping):
                yield from _leaves(value, path)
            elif value is not None:
                raise ConfigError(f"{path}={value!r}: expected a section in braces")
        else:
            yield path, value


# "auto"


def _fill_in(found: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Put values where "auto" stands; `values` are used up."""
    used: set[str] = set()
    for path in [path for path in found if _takes_value(path)]:
        names = {path, path.rsplit(".", 1)[-1]} | (
            {path.split(".")[0]} if path.endswith(".enabled") else set()
        )
        names = {name for name in names & values.keys() if name != "enabled"}
        used |= names
        for name in names:
            if found[path] not in (AUTO, taken(path, values[name])):
                raise ConfigError(
                    f"{path} is {found[path]!r} in the file, but {name}={values[name]!r} was given; make "
                    'them equal, or write "auto" in the file'
                )
            found[path] = taken(path, values[name])
    if found.get("bf16.enabled") is True and found.get("fp16.enabled") == AUTO:
        found["fp16.enabled"] = False
    left = sorted(values.keys() - used)
    if left:
        raise ConfigError(f'{", ".join(left)}: given, but the file has no such key with "auto"; leave it out')
    if found.get("scheduler.params.warmup_min_lr") == AUTO:
        found["scheduler.params.warmup_min_lr"] = 0
    if found.get("scheduler.params.warmup_max_lr") == AUTO and found.get("optimizer.params.lr", AUTO) != AUTO:
        found["scheduler.params.warmup_max_lr"] = found["optimizer.params.lr"]


def _takes_value(path: str) -> bool:
    key = find(path)
    return key is not None and path not in SECTIONS and key.verdict is not Verdict.UNNECESSARY


# Verdicts


def _line(path: str, value: Any) -> Line:
    key = find(path)
    if key is None:
        near = alike(path)
        return Line(
            path, value, Verdict.UNSUPPORTED, f"unknown; {near}?" if near else "unknown to DeepSpeed, too"
        )
    if value is None:
        unsupported = key.verdict is Verdict.UNSUPPORTED
        return Line(path, value, Verdict.OFF if unsupported else key.verdict, key.says)
    if value == AUTO and AUTO not in key.neutral:
        return Line(path, value, key.verdict, key.says)
    section = next((name for name in SECTIONS if path == name), None)
    if section is not None:
        return Line(path, value, Verdict.UNSUPPORTED if asks(section, value) else Verdict.OFF, key.says)
    said, fits = TYPES[key.takes]
    if not fits(value) and value not in key.neutral:
        raise ConfigError(f"{path}={value!r}: expected {said}")
    return Line(path, value, _verdict(key, value), key.says)


def _verdict(key: Key, value: Any) -> Verdict:
    if key.verdict is not Verdict.UNSUPPORTED:
        return key.verdict
    return (
        Verdict.OFF if any(value == one and type(value) is type(one) for one in key.neutral) else key.verdict
    )


def _settle(found: Mapping[str, Any], lines: list[Line]) -> None:
    """Judge what depends on more than one key."""
    _settle_precision(found, lines)
    auto = [line.key for line in lines if line.value == AUTO and line.verdict in _NEEDS_VALUE]
    if auto:
        names = ", ".join(f"{path.replace('.enabled', '').rsplit('.', 1)[-1]}=..." for path in auto)
        raise ConfigError(
            f'"auto" without a value: {", ".join(auto)}. Give them: from_deepspeed(..., {names})'
        )
    _settle_optimizer(found, lines)
    _settle_offload(found, lines)
    if "gradient_clipping" not in found:
        says = "not in the file; DeepSpeed's default, as honoured here"
        lines.append(Line("gradient_clipping", _CLIPPING, Verdict.HONOURED, says))


def _precision(found: Mapping[str, Any]) -> str:
    bf16, fp16 = found.get("bf16.enabled"), found.get("fp16.enabled")
    return "bf16" if bf16 else "fp16" if fp16 else "fp32"


def _settle_precision(found: Mapping[str, Any], lines: list[Line]) -> None:
    bf16, fp16 = found.get("bf16.enabled"), found.get("fp16.enabled")
    if bf16 is True and fp16 is True:
        raise ConfigError("bf16 and fp16 are both enabled; choose bf16")
    if not bf16 and not fp16:
        says = "neither bf16 nor fp16: fp32 computes, as DeepSpeed has it"
        _replace(lines, Line("bf16.enabled", bf16, Verdict.HONOURED, says))
    if not fp16:
        for line in [one for one in lines if one.key.startswith("fp16.") and one.key != "fp16.enabled"]:
            _replace(lines, replace(line, verdict=Verdict.UNNECESSARY, says="of fp16, which is not enabled"))


def _settle_optimizer(found: Mapping[str, Any], lines: list[Line]) -> None:
    name = found.get("optimizer.type")
    if name is not None and kind_of(found) is None:
        says = f"{', '.join(OPTIONS)} are there; or give initialize an optimizer"
        _replace(lines, Line("optimizer.type", name, Verdict.UNSUPPORTED, says))
    for path in strangers(found):
        _replace(
            lines, Line(path, found[path], Verdict.UNSUPPORTED, f"{kind_of(found)} has none; leave it out")
        )


def _settle_offload(found: Mapping[str, Any], lines: list[Line]) -> None:
    stage = found.get("zero_optimization.stage")
    if stage is not None and stage not in _STAGES:
        raise ConfigError(f"zero_optimization.stage={stage}: expected 0, 1, 2 or 3")
    for part in ("param", "optimizer"):
        path = f"zero_optimization.offload_{part}.nvme_path"
        on_nvme = found.get(f"zero_optimization.offload_{part}.device") == "nvme"
        if on_nvme and not found.get(path):
            raise ConfigError(f'zero_optimization.offload_{part}: "device": "nvme" needs an "nvme_path"')
        if found.get(path) and not on_nvme:
            _replace(lines, Line(path, found[path], Verdict.UNNECESSARY, "its device is not nvme"))


def _replace(lines: list[Line], new: Line) -> None:
    lines[:] = [line for line in lines if line.key != new.key] + [new]


def _refuse(lines: Sequence[Line], *, strict: bool) -> None:
    refused = [str(line) for line in lines if line.verdict is Verdict.UNSUPPORTED]
    if not refused:
        return
    listed = "\n  ".join(refused)
    if strict:
        raise ConfigError(
            f"{len(refused)} of {len(lines)} keys of the DeepSpeed configuration are not supported; "
            "zero.Init, initialize and Config.from_deepspeed leave them out, with a warning, if told "
            f"strict=False:\n  {listed}"
        )
    warnings.warn(f"left out of the DeepSpeed configuration:\n  {listed}", stacklevel=4)


# Infinity's terms


def _fields(
    given: Mapping[str, Any], more: Mapping[str, Any], precision: str, config_type: Any
) -> dict[str, Any]:
    folders = [
        given[f"zero_optimization.offload_{part}.nvme_path"]
        for part in ("param", "optimizer")
        if given.get(f"zero_optimization.offload_{part}.device") == "nvme"
    ]
    ours: dict[str, Any] = {"dtype": precision}
    if folders:
        ours["nvme"] = list(dict.fromkeys(folders))
    if given.get("zero_optimization.stage"):
        ours["stage"] = int(given["zero_optimization.stage"])
    if given.get("bf16.bf16_optimizer_states"):
        ours["state_dtype"] = "bf16"
    ours.update(
        {path.split(".", 1)[1]: value for path, value in given.items() if path.startswith("infinity.")}
    )
    ours.update(more)
    known = [one.name for one in fields(config_type) if one.init]
    for name in ours:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise ConfigError(f"infinity.{name}: Config has no such field; {near[0] if near else known}?")
    if ours["dtype"] != precision:
        raise ConfigError(
            f"infinity.dtype={ours['dtype']!r}, but the file's sections bf16 and fp16 say {precision}"
        )
    return ours


_SCALING = {
    "fp16.loss_scale": "fixed",
    "fp16.initial_scale_power": "power",
    "fp16.loss_scale_window": "window",
    "fp16.hysteresis": "hysteresis",
    "fp16.consecutive_hysteresis": "consecutive",
    "fp16.min_loss_scale": "least",
    "fp16.auto_cast": "casts",
}


def _scaling(given: Mapping[str, Any]) -> Scaling:
    return Scaling(**{name: given[path] for path, name in _SCALING.items() if path in given})
