"""The output of `infinity plan`: one plan as a list of facts, several as a table and a picture."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import psutil

from infinity.bench.findings import Column, Findings, asked
from infinity.bench.planning.planned import Planned
from infinity.planning.outline import Outline
from infinity.planning.zero_memory import STAGES, model_states
from infinity.sizes import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DAY_S = 86400.0
Pairs = Sequence[tuple[Mapping[str, Any], Planned]]


def facts(one: Planned, tbw_nbytes: float | None) -> dict[str, Any]:
    """Return all figures of a plan, in SI units; None for unknown ones."""
    need, told, setting = one.demand, one.forecast, one.setting
    found: dict[str, Any] = {
        "model": one.outline.name,
        "parameters": one.outline.parameters,
        "ranks": setting.ranks,
        "tokens": one.tokens,
        "fits": need is not None,
        "refusal": one.refusal or None,
        "host_memory": setting.host_nbytes,
        "least_host_memory": one.least_host_nbytes,
        "planning_s": one.planning_s,
    }
    if need is not None:
        per_step = one.written_nbytes
        found |= {
            "uses": need.uses,
            "units": len(need.units),
            "pinned_nbytes": need.pinned_nbytes,
            "pinned": _by_field(one),
            "kept_gradients_nbytes": need.kept_gradients_nbytes,
            "in_use_nbytes": need.in_use_nbytes,
            "window_nbytes": min(need.limits.window_nbytes, sum(move.waiting_nbytes for move in need.units)),
            "nvme_nbytes": need.nvme_nbytes * setting.local_ranks,
            "read_nbytes": need.read_nbytes,
            "written_nbytes": need.written_nbytes,
            "moved": {f"{field} {way}": nbytes for (field, way), nbytes in sorted(need.moved.items())},
            "machine_written_nbytes": per_step,
            "steps_until_tbw": tbw_nbytes / per_step if tbw_nbytes and per_step else None,
        }
    if told is not None:
        found |= {
            "seconds": told.seconds,
            "tokens_per_s": one.tokens_per_s,
            "compute_s": told.compute_s,
            "stall_s": told.stall_s,
            "busy_s": told.busy_s,
            "limit": limit(one),
            "written_per_day": one.written_nbytes * _DAY_S / told.seconds,
        }
    return found


def limit(one: Planned) -> str:
    """Describe a step's bottleneck in a few words."""
    told = one.forecast
    if told is None:
        return "not known"
    link, work = (told.busy_s[name] / told.seconds for name in ("link", "work"))
    if told.bound.kind != "compute" and max(link, work) > told.bound.disk_share:
        name = "the link" if link > work else "the lane's own work: updating, hashing"
        return f"bound by {name}: busy for {max(link, work):.0%} of the step"
    return str(told.bound)


def _by_field(one: Planned) -> dict[str, float]:
    """Return the fraction of units, by field, that is pinned in host memory."""
    units = len(one.outline.parts)
    counts: dict[str, int] = {}
    for _, name in one.demand.placement if one.demand is not None else ():
        counts[name] = counts.get(name, 0) + 1
    return {name: count / units for name, count in counts.items()}


def single(pairs: Pairs, options: argparse.Namespace) -> Findings:
    """Return the findings of one plan, one fact per row."""
    ((_, one),) = pairs
    found = facts(one, options.tbw and options.tbw * 1e12)
    lines = list(_lines(found))
    return Findings(
        title=f"{one.outline.name}: {short_count(one.outline.parameters)} parameters on {_ranks(one)}",
        rows=[
            {"what": what, "shown": text, **({"facts": found} if not number else {})}
            for number, (what, text) in enumerate(lines)
        ],
        columns=[Column("what", ""), Column("shown", "")],
        verdicts=[
            _fits(found),
            *_planning(found),
            *_missing(one, options),
            *_beyond_here(one, options),
            _zero_line(one.outline, one.setting.ranks),
        ],
        options=asked(options),
    )


def _lines(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    lines = [
        ("host memory, each rank", format_size(found["host_memory"])),
        ("smallest host memory that works", format_size(found["least_host_memory"])),
    ]
    if not found["fits"]:
        return lines
    pinned = ", ".join(f"{share:.0%} of {name}" for name, share in found["pinned"].items()) or "nothing"
    lines += [
        ("pinned in it", f"{format_size(found['pinned_nbytes'])}: {pinned}"),
        ("gradients kept in it", format_size(found["kept_gradients_nbytes"])),
        ("units that wait for their use, at most", format_size(found["window_nbytes"])),
        ("units in use and their gradients, beside it", format_size(found["in_use_nbytes"])),
        ("NVMe, each machine", format_size(found["nvme_nbytes"])),
        ("read in a step, each rank", format_size(found["read_nbytes"])),
        ("written in a step, each rank", format_size(found["written_nbytes"])),
        *((f"  {name}", format_size(nbytes)) for name, nbytes in found["moved"].items()),
        ("written to each machine's NVMe in a step", decimal_size(found["machine_written_nbytes"])),
    ]
    if "seconds" in found:
        lines += [
            ("a step", f"{duration(found['seconds'])}, of which {duration(found['compute_s'])} compute"),
            ("tokens per second", figure(found["tokens_per_s"])),
            ("limited by", found["limit"]),
            ("written to each machine's NVMe in a day", decimal_size(found["written_per_day"])),
        ]
    if found["steps_until_tbw"] is not None:
        lines.append(("steps until the NVMe has been written its TBW", f"{found['steps_until_tbw']:,.0f}"))
    return lines


def _ranks(one: Planned) -> str:
    ranks = one.setting.ranks
    return "one rank" if ranks == 1 else f"{ranks} ranks, {one.setting.local_ranks} on each machine"


def _fits(found: Mapping[str, Any]) -> str:
    return "It fits." if found["fits"] else f"It does not fit. {found['refusal']}"


def _planning(found: Mapping[str, Any]) -> list[str]:
    if not found["fits"]:
        return []
    return [f"planned {found['uses']:,} uses of {found['units']:,} units in {duration(found['planning_s'])}"]


def _missing(one: Planned, options: argparse.Namespace) -> list[str]:
    """Name the options that a forecast would need."""
    if one.forecast is not None or one.demand is None:
        return []
    missing = []
    if not options.no_nvme and not options.nvme and not options.nvme_mixed:
        missing.append("--nvme DIR (or --nvme-read, --nvme-write, --nvme-mixed)")
    if options.ranks > 1 and not options.link:
        missing.append("--link GB/s")
    if not options.compute and not options.compute_seconds:
        missing.append("--compute TFLOPS (or --compute-seconds)")
    return [f"How long a step takes would need {' and '.join(missing)}."]


def _beyond_here(one: Planned, options: argparse.Namespace) -> list[str]:
    """Warn if a budget exceeds this machine's memory although the forecast uses its cores."""
    total_nbytes, host_nbytes = psutil.virtual_memory().total, one.setting.host_nbytes
    here = not options.compute and not options.compute_seconds and one.setting.device_nbytes is None
    if one.forecast is None or not here or one.setting.ranks > 1 or host_nbytes <= total_nbytes:
        return []
    budget, total = format_size(host_nbytes), format_size(total_nbytes)
    return [f"--host-memory {budget} is more than this machine has ({total}); the seconds are of its cores."]


def _zero_line(outline: Outline, ranks: int) -> str:
    stages = ", ".join(f"{stage}: {_gb(model_states(outline.parameters, ranks, stage))}" for stage in STAGES)
    return f"model states in memory alone, each rank, by stage of ZeRO: {stages}"


def zero(outline: Outline, ranks: int) -> Findings:
    """Return the memory of model states by ZeRO stage, for a rising number of ranks."""
    counts = sorted({1, ranks, *(4**power for power in range(6) if 4**power < ranks)})
    rows = [
        {
            "ranks": count,
            **{f"stage_{stage}": model_states(outline.parameters, count, stage) for stage in STAGES},
        }
        for count in counts
    ]
    return Findings(
        title=f"{outline.name}: {short_count(outline.parameters)} parameters, model states of each rank",
        rows=rows,
        columns=[
            Column("ranks", "ranks"),
            *(Column(f"stage_{stage}", f"ZeRO stage {stage}", _gb) for stage in STAGES),
        ],
        verdicts=["2 + 2 + 12 bytes per parameter: weights, gradients, and the optimizer's; no activations"],
        options={"ranks": ranks},
    )


# Several plans


def swept(pairs: Pairs, options: argparse.Namespace) -> Findings:
    """Return the findings of several plans, one per row, drawn over the key that was swept first."""
    names = [name for name, _ in options.sweep]
    rows = []
    for chosen, one in pairs:
        found = facts(one, options.tbw and options.tbw * 1e12)
        rows.append({"swept": {name: _word(name, value) for name, value in chosen.items()}, **found})
        rows[-1] |= {f"swept {name}": _word(name, value) for name, value in chosen.items()}
    columns = [
        *(Column(f"swept {name}", name) for name in names),
        Column("fits", "fits", lambda fits: "yes" if fits else "no"),
        Column("pinned_nbytes", "pinned", format_size),
        Column("read_nbytes", "read", format_size),
        Column("written_nbytes", "written", format_size),
        Column("seconds", "step", duration),
        Column("tokens_per_s", "tokens/s", figure),
        Column("limit", "limited by"),
    ]
    return Findings(
        title=f"{pairs[0][1].outline.name}, by {', '.join(names)}",
        rows=rows,
        columns=columns,
        verdicts=[
            f"{sum(row['fits'] for row in rows)} of {len(rows)} fit",
            *_missing(pairs[0][1], options),
            *dict.fromkeys(line for _, one in pairs for line in _beyond_here(one, options)),
        ],
        options=asked(options),
        draw=lambda axes: _draw(rows, names, axes),
    )


def _word(name: str, value: Any) -> str:
    if name.endswith("memory"):
        return format_size(value)
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _draw(rows: Sequence[Mapping[str, Any]], names: Sequence[str], axes: Axes) -> None:
    timed = any("seconds" in row for row in rows)
    lines: dict[str, list[tuple[str, float]]] = {}
    for row in rows:
        value = row.get("tokens_per_s") if timed else row.get("read_nbytes", 0) + row.get("written_nbytes", 0)
        if row["fits"] and value is not None:
            label = ", ".join(f"{name} {row['swept'][name]}" for name in names[1:])
            lines.setdefault(label, []).append((row["swept"][names[0]], value))
    for label, points in lines.items():
        axes.plot([at for at, _ in points], [value for _, value in points], marker="o", label=label)
    axes.set_xlabel(names[0])
    axes.set_ylabel("tokens per second" if timed else "bytes of NVMe per step and rank")
    axes.set_ylim(bottom=0)
    if len(lines) > 1:
        axes.legend()


# Figures


def figure(value: float) -> str:
    """Format with three significant digits, without an exponent: "0.0412", "31.4", "12,300"."""
    rounded = float(f"{value:.3g}")
    decimals = max(0, 2 - math.floor(math.log10(rounded))) if rounded > 0 else 0
    return f"{rounded:,.{decimals}f}"


def _scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    """Format with three significant digits, in the first unit of which there is at least one, or the last."""
    rounded = float(f"{value:.3g}")
    size, name = next((one for one in units if rounded >= one[0]), units[-1])
    return f"{figure(rounded / size)} {name}"


def short_count(number: float) -> str:
    """Format a number of parameters: "852 k", "7.05 G"."""
    return _scaled(number, ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")))


def decimal_size(nbytes: float) -> str:
    """Format bytes in decimal units, as drives are sold: "12.5 GB"."""
    return _scaled(nbytes, ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")))


def duration(seconds: float) -> str:
    """Format seconds, or milliseconds: "1.25 s", "3.21 ms"."""
    return _scaled(seconds, ((1.0, "s"), (1e-3, "ms")))


def _gb(nbytes: float) -> str:
    """Format GB with one decimal, as ZeRO's tables do; below 1 GB, use a smaller unit."""
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e9 else decimal_size(nbytes)
