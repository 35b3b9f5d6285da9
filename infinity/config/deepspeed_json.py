"""DeepSpeed's JSON: read, checked, and reported key by key. Pure: no torch.

DeepSpeedSettings is all that a file says; its `report` has a line for every key. deepspeed_keys has the
verdict on each key; infinity.deepspeed applies the settings.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from infinity.config import curriculum, data_routing, deepspeed_frozen
from infinity.config.batch_sizes import (
    MICRO,
    SEQUENCE,
    SPECULATE,
    STEPS,
    TRAIN,
    Batches,
    batches_of,
    sequences_at_once,
    take_by_block,
    take_switch,
)
from infinity.config.buckets import bounding, bounds
from infinity.config.data_routing import ROUTING, TokenRouting
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
from infinity.config.deepspeed_recipe import (
    LIKE_ONE_BIT,
    OPTIONS,
    Chosen,
    check_schedule,
    chosen,
    foreign_options,
    kind_of,
)
from infinity.config.deepspeed_values import AUTO, TYPES
from infinity.config.loss_scale import Scaling
from infinity.config.quantized import quantized
from infinity.config.secondary import secondary
from infinity.config.sparse_attention import AskedSparsity, asked_sparsity
from infinity.config.tensor_ranks import divide_layers, switch_off, tensor_ranks
from infinity.errors import ConfigError, meant
from infinity.planning.lengths import LengthSchedule

MONITORS = ("tensorboard", "wandb", "csv_monitor")
"""Sections that switch a monitor on with "enabled"."""
_CLIPPING = 1.0  # DeepSpeed's default, and its documentation's
_ZERO = "zero_optimization."
_GATHERS = (
    _ZERO + "stage3_gather_16bit_weights_on_model_save",
    _ZERO + "stage3_gather_fp16_weights_on_model_save",
)
_NEEDS_VALUE = (Verdict.HONOURED, Verdict.UNSUPPORTED)
"""The verdicts on keys for which "auto" is no value."""


@dataclass(frozen=True, slots=True)
class Line:
    """What became of one key of a file."""

    key: str
    value: Any
    verdict: Verdict
    says: str

    def __str__(self) -> str:
        """Return the line of the report."""
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
        """Return one line per key, by verdict."""
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
    """Skip a step whose gradients are not finite."""
    freezes: bool
    """Whether what is loaded is frozen: see config.frozen_dtype."""
    precision: str
    """The compute type: "bf16", "fp16" or "fp32"."""
    scaling: Scaling | None
    """Of the loss, with fp16."""
    managed_accumulation: bool
    """False: every step() is an update."""
    by_block: bool
    """Whether the micro-batches of an update share one fetch of the weights."""
    speculate: bool | None
    """Whether updates are made ahead where norms rarely exceed gradient_clipping; None: not said."""
    gathers_on_save: bool
    """Whether save_16bit_model writes."""
    curriculum: LengthSchedule | None
    """The lengths of the batches, by step; None: as they are."""
    random_ltd: TokenRouting | None
    """Which layers leave tokens out; None: none does."""
    sparsity: AskedSparsity | None
    """Of attention; None: as the model is."""
    tensor_parallel: int
    """Ranks that divide each layer, as the model's own plan says; 1: each has whole layers."""
    drop_last: bool
    steps_per_print: int | None
    breakdown: bool
    """Whether the seconds of forward, backward and step are logged."""
    dump: bool
    """Whether the report is logged."""
    monitors: Mapping[str, Mapping[str, Any]]
    """The monitors that are enabled, of MONITORS, with the other keys of their sections."""
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
    """Translate DeepSpeed's configuration into Infinity's terms.

    source: a JSON file, or its content. config_type: Config, whose fields the file sets.
    strict: refuse unsupported keys; False warns of them and leaves them out. world_size: the number of ranks.
    infinity: fields of Config that DeepSpeed has no key for (host_memory=...); a section "infinity" in the
    file does the same. values: what replaces "auto", by the key's last name (lr=3e-4) or its whole path;
    `bf16` for "bf16.enabled".

    Raises: ConfigError naming every unknown key (and the most similar known one), every unsupported one (and
    the cure), every "auto" without a value, and values of a wrong type.
    """
    found = {path: taken(path, value) for path, value in _leaves(_content(source))}
    _fill_in(found, values)
    lines = {path: _line(path, value) for path, value in found.items()}
    more = dict(infinity or {})
    for name, value in more.items():
        lines[f"infinity.{name}"] = _line(f"infinity.{name}", value)
    by_block = take_by_block(found, more)
    speculate = take_switch(SPECULATE, found, more)
    relation = batches_of(found, sequences_at_once(found, more, divide_layers(found, world_size)))
    lines.update({name: _line(name, found[name]) for name in (TRAIN, MICRO, STEPS) if name in found})
    _settle(found, lines, world_size)
    _refuse(tuple(lines.values()), strict=strict)
    given = {path: value for path, value in found.items() if value is not None}
    steps_per_print, precision = given.get("steps_per_print"), _precision(found)
    return DeepSpeedSettings(
        config=config_type(**_fields(given, more, precision, world_size, config_type)),
        optimizer=chosen(given),
        scheduler=_schedule(given),
        batches=relation,
        gradient_clipping=float(given.get("gradient_clipping", _CLIPPING)),
        check_overflow=precision == "fp16"
        or (precision == "bf16" and given.get("bf16.check_grad_overflow", True)),
        freezes=deepspeed_frozen.freezes(given),
        precision=precision,
        scaling=_scaling(given) if precision == "fp16" else None,
        managed_accumulation=given.get("managed_gradient_accumulation", True),
        by_block=by_block,
        speculate=speculate,
        gathers_on_save=any(given.get(key, False) for key in _GATHERS),
        curriculum=curriculum.length_schedule(given),
        random_ltd=data_routing.token_routing(given),
        sparsity=asked_sparsity(given),
        tensor_parallel=tensor_ranks(found),
        drop_last=given.get("dataloader_drop_last", False),
        steps_per_print=None if steps_per_print is None else int(steps_per_print),
        breakdown=given.get("wall_clock_breakdown", False),
        dump=given.get("dump_state", False),
        monitors={one: _below(given, one) for one in MONITORS if given.get(f"{one}.enabled")},
        report=Report(tuple(lines.values())),
    )


def _below(given: Mapping[str, Any], section: str) -> dict[str, Any]:
    """Return the values of a section, by the rest of their paths."""
    start = section + "."
    return {path.removeprefix(start): value for path, value in given.items() if path.startswith(start)}


def _schedule(given: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    name, parameters = given.get("scheduler.type"), _below(given, "scheduler.params")
    if name is None and parameters:
        raise ConfigError("scheduler: parameters without a type; name one, such as WarmupLR")
    return None if name is None else (check_schedule(name, parameters), parameters)


# The file


def _content(source: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, str | Path):
        raise ConfigError(f"{source!r}: expected a DeepSpeed JSON file, or its content as a dict")
    path = Path(source)
    if not path.is_file():
        raise ConfigError(f"{path}: no such file. Give a DeepSpeed JSON file, or its content as a dict.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(f"{path}, {where}: {error.msg}. Comments are not JSON.") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected an object in braces")
    return content


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{', '.join(map(repr, twice))} is there twice; keep one")
    return dict(pairs)


def _leaves(section: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of every key that has a meaning by itself."""
    for name, value in section.items():
        path = f"{above}.{name}" if above else ALIASES.get(str(name), str(name))
        if path == "zero_optimization" and isinstance(value, bool):
            yield path + ".stage", int(value)  # a switch in DeepSpeed's first versions
        elif is_section(path) and path not in SECTIONS:
            if isinstance(value, Mapping):
                yield from _leaves(value, path)
            elif value is not None:
                raise ConfigError(f"{path}={value!r}: expected a section in braces")
        else:
            yield path, value


# "auto"


def _fill_in(found: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Replace "auto" by the values.

    Raises: ConfigError for a value that contradicts the file, or that no key of it takes.
    """
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
        says = f"unknown; did you mean {near}?" if near else "unknown to DeepSpeed, too"
        return Line(path, value, Verdict.UNSUPPORTED, says)
    if value is None:
        unsupported = key.verdict is Verdict.UNSUPPORTED
        return Line(path, value, Verdict.OFF if unsupported else key.verdict, key.says)
    if value == AUTO and AUTO not in key.neutral:
        return Line(path, value, key.verdict, key.says)
    if path in SECTIONS:
        return Line(path, value, key.verdict if asks(path, value) else Verdict.OFF, key.says)
    expected, fits = TYPES[key.takes]
    if not fits(value) and value not in key.neutral:
        raise ConfigError(f"{path}={value!r}: expected {expected}")
    return Line(path, value, _verdict(key, value), key.says)


def _verdict(key: Key, value: Any) -> Verdict:
    neutral = any(value == one and type(value) is type(one) for one in key.neutral)
    return Verdict.OFF if neutral and key.verdict is Verdict.UNSUPPORTED else key.verdict


Lines = dict[str, Line]
"""By key."""


def _say(lines: Lines, key: str, value: Any, verdict: Verdict, says: str) -> None:
    """Set the line of a key."""
    lines[key] = Line(key, value, verdict, says)


def _settle(found: Mapping[str, Any], lines: Lines, ranks: int) -> None:
    """Set the lines of keys whose verdict depends on other keys."""
    _settle_precision(found, lines)
    auto = [line.key for line in lines.values() if line.value == AUTO and line.verdict in _NEEDS_VALUE]
    if auto:
        names = ", ".join(f"{path.replace('.enabled', '').rsplit('.', 1)[-1]}=..." for path in auto)
        raise ConfigError(
            f'"auto" without a value: {", ".join(auto)}. Give the values to from_deepspeed(..., {names}), or '
            "write them into the file"
        )
    _settle_optimizer(found, lines)
    _settle_offload(found, lines, ranks)
    _settle_efficiency(found, lines)
    for path in switch_off(found):
        lines[path] = replace(lines[path], verdict=Verdict.OFF, says="autotp_size divides no layers")
    for path in bounding(found):
        lines[path] = replace(lines[path], verdict=Verdict.HONOURED)
    for path, says in deepspeed_frozen.misfits(found):
        _say(lines, path, found.get(path), Verdict.UNSUPPORTED, says)
    if "gradient_clipping" not in found:
        says = "not in the file; DeepSpeed's default"
        _say(lines, "gradient_clipping", _CLIPPING, Verdict.HONOURED, says)


def _precision(found: Mapping[str, Any]) -> str:
    return "bf16" if found.get("bf16.enabled") else "fp16" if found.get("fp16.enabled") else "fp32"


def _settle_precision(found: Mapping[str, Any], lines: Lines) -> None:
    bf16, fp16 = found.get("bf16.enabled"), found.get("fp16.enabled")
    if bf16 is True and fp16 is True:
        raise ConfigError("bf16 and fp16 are both enabled; choose bf16")
    if not bf16 and not fp16:
        says = "neither bf16 nor fp16: the model computes in fp32, as in DeepSpeed"
        _say(lines, "bf16.enabled", bf16, Verdict.HONOURED, says)
    if not fp16:
        for path, line in lines.items():
            if path.startswith("fp16.") and path != "fp16.enabled":
                lines[path] = replace(line, verdict=Verdict.UNNECESSARY, says="fp16 is not enabled")


def _settle_optimizer(found: Mapping[str, Any], lines: Lines) -> None:
    name, kind = found.get("optimizer.type"), kind_of(found)
    if name is not None and kind is None:
        says = f"choose one of {', '.join(OPTIONS)}, or give initialize an optimizer"
        says = LIKE_ONE_BIT.get(str(name).lower(), says)
        _say(lines, "optimizer.type", name, Verdict.UNSUPPORTED, says)
    for path in foreign_options(found):
        _say(lines, path, found[path], Verdict.UNSUPPORTED, f"{kind} has no such option; leave it out")


def _settle_efficiency(found: Mapping[str, Any], lines: Lines) -> None:
    """Let keys of a curriculum, or of a routing, that is switched off be off; what else their section asks
    for stays asked for, unless a switch above it is off. Unknown keys stay unknown.
    """
    routed = data_routing.asked(found)
    for section, on in (
        ("data_efficiency.", curriculum.asked(found)),
        (curriculum.LEGACY, curriculum.legacy(found)),
    ):
        for path, line in lines.items():
            switches = curriculum.BESIDE.get(path)
            wanted = on if switches is None else all(found.get(one) is not False for one in switches)
            if path.startswith(ROUTING) or path == data_routing.SWITCHES[0]:
                wanted = routed or (on and not path.startswith(ROUTING))
            if path.startswith(section) and not wanted and find(path) is not None:
                lines[path] = replace(line, verdict=Verdict.OFF, says="not enabled")


def _settle_offload(found: Mapping[str, Any], lines: Lines, ranks: int) -> None:
    stage = found.get(_ZERO + "stage")
    if stage is not None and stage not in (0, 1, 2, 3):
        raise ConfigError(f"zero_optimization.stage={stage}: expected 0, 1, 2 or 3")
    for part in ("param", "optimizer"):
        section = f"{_ZERO}offload_{part}"
        path, on_nvme = section + ".nvme_path", found.get(section + ".device") == "nvme"
        if on_nvme and not found.get(path):
            raise ConfigError(f'{section}: "device": "nvme" needs an "nvme_path"')
        if found.get(path) and not on_nvme:
            _say(lines, path, found[path], Verdict.UNNECESSARY, "its device is not nvme")
    _settle_tiers(found, lines, ranks)


def _settle_tiers(found: Mapping[str, Any], lines: Lines, ranks: int) -> None:
    """Say what becomes of parameters and optimizer state that are to lie on different tiers."""
    param, optimizer = (found.get(f"{_ZERO}offload_{part}.device") for part in ("param", "optimizer"))
    ratio = found.get(_ZERO + "offload_optimizer.ratio")
    if optimizer == "nvme" and ratio is not None and 0 < ratio < 1:
        says = "host_memory says in bytes how much of the state stays in memory: set it, and leave this out"
        _say(lines, _ZERO + "offload_optimizer.ratio", ratio, Verdict.UNSUPPORTED, says)
    if optimizer == "nvme" and ratio == 0:
        _say(lines, _ZERO + "offload_optimizer.ratio", 0, Verdict.HONOURED, "as device: none")
    if param == "nvme" and (optimizer in ("none", "cpu") or ratio == 0):
        says = "in host memory as far as host_memory has room for it, the rest beside the parameters on NVMe"
        _say(lines, _ZERO + "offload_optimizer.device", optimizer, Verdict.HONOURED, says)
    if param == "none" and optimizer == "nvme" and ratio != 0:
        path = _ZERO + "offload_param.device"
        if _keeps_parameters(found, ranks):
            says = "the weights that compute stay on the device, as with stage 2"
            _say(lines, path, param, Verdict.HONOURED, says)
        elif found.get(_ZERO + "stage") in (None, 0, 3):
            says = f'of {ranks} ranks each would hold all weights: write "stage": 2 for that, or "nvme" here'
            _say(lines, path, param, Verdict.UNSUPPORTED, says)


def _keeps_parameters(found: Mapping[str, Any], ranks: int) -> bool:
    """Whether "offload_param": {"device": "none"} beside an NVMe tier asks for weights that stay on the
    device, where one rank holds them all anyway.
    """
    partitioned = found.get(_ZERO + "stage") in (None, 0, 3)
    devices = [found.get(f"{_ZERO}offload_{part}.device") for part in ("param", "optimizer")]
    return ranks == 1 and partitioned and devices == ["none", "nvme"]


def _refuse(lines: Sequence[Line], *, strict: bool) -> None:
    refused = [str(line) for line in lines if line.verdict is Verdict.UNSUPPORTED]
    if refused and strict:
        listed = "\n  ".join(refused)
        raise ConfigError(
            f"{len(refused)} of {len(lines)} keys of the DeepSpeed configuration are not supported; "
            "zero.Init, initialize and Config.from_deepspeed leave them out, with a warning, if given "
            f"strict=False:\n  {listed}"
        )
    left_out = [*refused, *(str(line) for line in lines if line.verdict is Verdict.LEFT_OUT)]
    if left_out:
        listed = "\n  ".join(left_out)
        warnings.warn(f"left out of the DeepSpeed configuration:\n  {listed}", stacklevel=4)


# Infinity's terms


def _fields(
    given: Mapping[str, Any], more: Mapping[str, Any], precision: str, ranks: int, config_type: Any
) -> dict[str, Any]:
    """Return the fields of Config that a file and `more` set."""
    folders = [
        given[f"{_ZERO}offload_{part}.nvme_path"]
        for part in ("param", "optimizer")
        if given.get(f"{_ZERO}offload_{part}.device") == "nvme"
        and (part == "param" or given.get(_ZERO + "offload_optimizer.ratio") != 0)
    ]
    ours: dict[str, Any] = {"dtype": precision}
    if folders:
        ours["nvme"] = list(dict.fromkeys(folders))
    if given.get(_ZERO + "stage"):
        ours["stage"] = int(given[_ZERO + "stage"])
    ours |= quantized(given) | secondary(given)
    if folders and _keeps_parameters(given, ranks):
        ours["stage"] = 2
        for name in ("quantized_weights", "secondary_shard"):
            ours.pop(name, None)  # one rank sends none
    if given.get("bf16.bf16_optimizer_states"):
        ours["state_dtype"] = "bf16"
    ours |= _shared(given)
    ours |= bounds(given, 4 if precision == "fp32" else 2)
    if given.get("activation_checkpointing.cpu_checkpointing"):
        ours["offload_activations"] = "host"
    ours |= {**_below(given, "infinity"), **more}
    ours |= deepspeed_frozen.frozen_dtype(given, ours)
    known = [one.name for one in fields(config_type) if one.init]
    for name in ours:
        if name not in known:
            raise ConfigError(f"infinity.{name}: Config has no such field{meant(name, known)}")
    if ours["dtype"] != precision:
        raise ConfigError(
            f"infinity.dtype={ours['dtype']!r}, but the file's sections bf16 and fp16 say {precision}"
        )
    return ours


def _shared(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return how many ranks share a sequence, or divide experts, and how files are read, where it is said."""
    shared = {"sequence_parallel": given.get(SEQUENCE)}
    if given.get("expert_parallel.enabled"):
        shared["expert_parallel"] = given.get("expert_parallel.autoep_size")
    reads = {"aio": "gds"} if given.get("aio.use_gds") else {}
    return {name: int(size) for name, size in shared.items() if size} | reads


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
