"""The output of `infinity plan`: one plan as a list of facts, several as a table and a picture."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from infinity.bench.findings import Column, Findings, asked
from infinity.bench.planning.advice import ideas, told
from infinity.bench.planning.longest import longest_sequence
from infinity.bench.planning.machine import missing_host_memory, source_of_host_memory
from infinity.bench.planning.planned import Planned, flops
from infinity.planning.gpus import GPUS
from infinity.planning.lookups import row_blocks
from infinity.planning.outline import Outline
from infinity.planning.zero_memory import STAGES, model_states
from infinity.sizes import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DAY_S = 86400.0
_SERVERS = {
    "link": "the link between ranks",
    "work": "the CPU's updates and checksums",
    "up": "the link to the GPU",
    "down": "the link from the GPU",
    "launch": "Python, which launches what the GPU computes",
}
"""What may limit a step beside the disk and computing."""
Pairs = Sequence[tuple[Mapping[str, Any], Planned]]


def facts(one: Planned, tbw_nbytes: float | None) -> dict[str, Any]:
    """Return everything a plan says, in SI units; what is not known is None."""
    need, forecast, setting, method = one.demand, one.forecast, one.setting, one.setting.method
    found: dict[str, Any] = {
        "model": one.outline.name,
        "parameters": one.whole.parameters,
        "active_parameters": one.whole.active_parameters,
        "ranks": setting.ranks,
        "data_ranks": setting.data_ranks,
        "sent": [asdict(each) for each in one.crossings],
        "tokens": one.tokens,
        "sequence": method.sequence,
        "fits": one.fits,
        "uncounted": one.uncounted or None,
        "reasons": list(one.reasons),
        "refusal": one.refusal or None,
        "host_memory": setting.host_nbytes,
        "least_host_memory": one.least_host_nbytes,
        "planning_s": one.planning_s,
        "needs": [
            {
                "what": each.what,
                "nbytes": each.nbytes,
                "has_nbytes": each.has_nbytes,
                "parts": dict(each.parts),
            }
            for each in one.needs
        ],
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
            "activations": asdict(need.activations) if need.activations is not None else None,
            "offloaded_nbytes": need.offloaded_nbytes,
            "window_nbytes": min(need.limits.window_nbytes, sum(move.waiting_nbytes for move in need.units)),
            "nvme_nbytes": need.nvme_nbytes * setting.local_ranks,
            "read_nbytes": need.read_nbytes,
            "written_nbytes": need.written_nbytes,
            "moved": {f"{field} {way}": nbytes for (field, way), nbytes in sorted(need.moved.items())},
            "machine_written_nbytes": per_step,
            "sent_tokens": asdict(one.sent) if one.sent is not None else None,
            "steps_until_tbw": tbw_nbytes / per_step if tbw_nbytes and per_step else None,
        }
    if forecast is not None and one.step_s is not None:
        found |= {
            "seconds": one.step_s,
            "tokens_per_s": one.tokens_per_s,
            "compute_s": forecast.compute_s,
            "stall_s": forecast.stall_s,
            "busy_s": forecast.busy_s,
            "limit": limit(one),
            "updates": asdict(one.split) if one.split is not None else None,
            "written_per_day": one.written_nbytes * _DAY_S / one.step_s,
        }
    return found


def limit(one: Planned) -> str:
    """Say in a few words what a step is up against."""
    step = one.forecast
    if step is None:
        return "not known"
    busiest = max(_SERVERS, key=lambda server: step.busy_s[server])
    share = step.busy_s[busiest] / step.seconds
    if step.bound.kind != "compute" and share > step.bound.disk_share:
        return f"bound by {_SERVERS[busiest]}: busy for {share:.0%} of the step"
    return str(step.bound)


def _by_field(one: Planned) -> dict[str, float]:
    """Return the fraction of units, by field, that is pinned in host memory."""
    if one.demand is None:
        return {}
    counts: dict[str, int] = {}
    for (_, name), tier in one.demand.placement.items():
        counts[name] = counts.get(name, 0) + (tier == "host")
    return {name: count / len(one.demand.units) for name, count in counts.items()}


def single(pairs: Pairs, options: argparse.Namespace) -> Findings:
    """Return the findings of one plan, one fact per row."""
    ((_, one),) = pairs
    found = facts(one, options.tbw and options.tbw * 1e12)
    found["longest_sequence"] = longest_sequence(one)
    advice = told(one, ideas(one))
    lines = [*_assumed(one, options), *_needed(one), *_of_activations(one), *_in_a_step(found), *_sent(one)]
    lines.append(("longest sequence that fits", _longest(one, found["longest_sequence"])))
    if one.setting.device_nbytes is not None and one.forecast is not None:
        lines.append(("each GPU in a step", _busy(one)))
    return Findings(
        title=f"{one.outline.name}: {_parameters(one.whole)} on {_ranks(one)}",
        rows=[
            {"what": what, "shown": text, **({"facts": {**found, "advice": advice}} if not number else {})}
            for number, (what, text) in enumerate(lines)
        ],
        columns=[Column("what", "what"), Column("shown", "planned")],
        verdicts=[
            _verdict(one),
            *filter(None, (missing_host_memory(options),)),
            *_unmeasured(one),
            *_missing(one, options),
            *_advised(one, advice),
        ],
        options=asked(options),
    )


def _parameters(outline: Outline) -> str:
    total, active = outline.parameters, outline.active_parameters
    some = f", {short_count(active)} of them active for a token" if active < total else ""
    return f"{short_count(total)} parameters{some}"


def _assumed(one: Planned, options: argparse.Namespace) -> list[tuple[str, str]]:
    """Return what the plan is for."""
    setting, method, rates = one.setting, one.setting.method, one.question.rates
    rows, recomputed = (
        method.tokens * method.sequence_parallel // method.sequence,
        "blocks recomputed in the backward",
    )
    sharers = method.sequence_parallel * setting.tensor_parallel * setting.pipeline_parallel
    ranks = "each rank" if sharers == 1 else f"every {sharers} ranks"
    batch = f"{rows} x {method.sequence:,} tokens on {ranks}"
    if setting.micro_batches > 1:
        batch += f", {setting.micro_batches} times in a step"
    masters = "" if setting.master_dtype == "fp32" else f", masters in {setting.master_dtype}"
    types = f"{setting.dtype}{masters}, moments in {setting.state_dtype}, {_updates(one)}"
    budget = f"{format_size(setting.host_nbytes)} of each machine, for all its ranks"
    by_budget = method.activation_nbytes is not None
    ways = [
        f"within {format_size(method.activation_nbytes or 0)}" if by_budget else "",
        "" if by_budget else recomputed if method.checkpointing else "no activation checkpointing",
        f"their inputs offloaded ({method.offload})" if method.offload else "",
        f"{method.batch_tile} sequences in a block at once" if method.batch_tile else "",
        _parted("MLPs in {} slices", method.sequence_tiles) if method.sequence_tiles else "",
        _parted("the loss without logits", method.loss_tiles) if method.loss_tiles else "",
    ]
    lines = [
        *_dimensions(one),
        ("micro-batch", batch),
        ("types", types),
        ("activations", ", ".join(filter(None, ways))),
        ("host_memory", ", ".join(filter(None, (budget, source_of_host_memory(options))))),
    ]
    if setting.device_nbytes is not None and one.fits:
        lines.append(("device_memory", _device_memory(one, setting.device_nbytes)))
    if setting.device_nbytes is not None and rates is not None:
        lines.append(("each GPU", _gpu(one, options)))
    if setting.device_nbytes is None and one.question.seconds:
        lines.append(("computing of each rank", _computing(one, options)))
    if rates is not None:
        source = "given" if options.update_rate else "measured here"
        lines.append(("the CPU's updates", f"{short_count(rates.update)} parameters a second ({source})"))
    if setting.nvme and rates is not None:
        disk, source = rates.disk, "given" if options.nvme_read else "measured here"
        shown = [rate * setting.local_ranks for rate in (disk.read, disk.write, disk.mixed)]
        speeds = "read {}/s, write {}/s, both at once {}/s".format(*map(format_size, shown))
        lines.append(("NVMe of each machine", f"{speeds} ({source})"))
    if setting.durable:
        lines.append(("durable", "every record is stored twice"))
    if setting.speculate:
        twice = "" if setting.durable else "every record is stored twice; "
        lines.append(("speculate", f"{twice}seconds are those without it"))
    if setting.expert_parallel > 1:
        lines.append(("experts", _divided(one)))
    lines += [
        ("embeddings", f"a step moves {cut.used} of {cut.blocks} blocks of {cut.rows:,} rows")
        for cut in row_blocks(one.outline, setting).values()
    ]
    return lines


def _dimensions(one: Planned) -> list[tuple[str, str]]:
    """Say how the ranks are divided, and what of the model one has, where they do not all have the same."""
    setting = one.setting
    tensor, stages = setting.tensor_parallel, setting.pipeline_parallel
    if tensor * stages == 1:
        return []
    mesh = f"data {setting.data_ranks} x tensor {tensor} x pipeline {stages}"
    has = f"{short_count(one.outline.parameters)} parameters"
    what = [f"1/{tensor} of each matrix"] * (tensor > 1) + [f"the heaviest of {stages} stages"] * (stages > 1)
    return [
        ("mesh", mesh),
        ("planned is a rank with", f"{', '.join(what)}: {has}, partitioned among {setting.data_ranks} ranks"),
    ]


def _updates(one: Planned) -> str:
    """Say when updates are applied."""
    if one.setting.update != "auto":
        return f"updates in the {one.setting.update}"
    if one.split is None:
        return "updates as steps show, at first in the forward"
    return f"updates of {one.split}"


def _sent(one: Planned) -> list[tuple[str, str]]:
    """Say what a rank sends to others in a step, by kind of parallelism, and over which links."""
    lines = []
    for each in one.crossings:
        speed, seconds = one.link(each.place), one.crossing_s(each)
        divided = 0 < each.between_nbytes < each.nbytes
        at = f" at {format_size(speed)}/s" if speed and not divided else ""
        at = f", {duration(seconds)}{at}" if seconds is not None else ""
        place = f"{each.place} ({format_size(each.between_nbytes)})" if divided else each.place
        what = f"{format_size(each.nbytes)} at most, {place}{at}: {each.what}"
        lines.append((f"sent by a rank in a step: {each.by}, {each.ranks} ranks", what))
    return lines


def _divided(one: Planned) -> str:
    """Say which experts a rank has, and what their records take on its NVMe."""
    setting, parts = one.setting, [part for part in one.outline.parts if part.divided]
    here = sum(part.numel for part in parts if not part.elsewhere)
    share = here * setting.expert_parallel // setting.data_ranks
    copies = setting.data_ranks // setting.expert_parallel
    with_others = f", which {copies} ranks partition" if copies > 1 else ""
    schema = setting.schema
    nbytes = sum(schema.nbytes(name, share) for name in schema.fields)
    return (
        f"divided among {setting.expert_parallel} ranks: each has {short_count(here)} of their "
        f"{short_count(sum(part.numel for part in parts))} parameters{with_others}; "
        f"{format_size(nbytes)} of records on each rank"
    )


def _device_memory(one: Planned, waits_nbytes: int) -> str:
    """Return what of each GPU Config(device_memory=...) has to name, and what it is for."""
    in_use, lodged = (
        (one.demand.in_use_nbytes, one.demand.lodged_nbytes) if one.demand is not None else (0, 0)
    )
    parts = {"in use": in_use, "living there": lodged, "waiting": waits_nbytes - lodged}
    shown = ", ".join(f"{format_size(nbytes)} {what}" for what, nbytes in parts.items())
    return f"{format_size(in_use + waits_nbytes)} of each GPU, for parameters: {shown}"


def _gpu(one: Planned, options: argparse.Namespace) -> str:
    """Say what the forecast takes a GPU to be."""
    name = f"{GPUS[options.gpu].title}: " if options.gpu else ""
    computing = f"{options.compute:,.0f} TFLOPS reached, " if options.compute else ""
    link = one.question.rates.up if one.question.rates is not None else 0.0
    source = "" if options.gpu_link else " (as copies in memory here: give --gpu-link)"
    return f"{name}{computing}{format_size(link)}/s to it, and as much from it{source}"


def _computing(one: Planned, options: argparse.Namespace) -> str:
    """Say how fast a rank without a GPU is taken to compute."""
    method, seconds = one.setting.method, one.question.seconds or math.inf
    done = flops(one.outline, method.tokens, method.sequence, one.setting.micro_batches)
    given = options.compute or options.compute_seconds
    reached = _scaled(done / seconds, ((1e12, "TFLOPS"), (1e9, "GFLOPS"), (1e6, "MFLOPS")))
    return f"{reached} reached ({'given' if given else 'measured here'})"


def _busy(one: Planned) -> str:
    """Say for which shares of a step a GPU, its link and the CPU's updates are busy."""
    step = one.forecast
    if step is None:
        return ""
    shares = {
        "it computes": "compute",
        "uploads": "up",
        "downloads": "down",
        "the CPU's updates": "work",
        "Python's launching": "launch",
    }
    return ", ".join(f"{what} {step.busy_s[name] / step.seconds:.0%}" for what, name in shares.items())


def _needed(one: Planned) -> list[tuple[str, str]]:
    """Return what it takes of each resource, and what is inside host_memory."""
    lines = [("smallest host_memory that works", format_size(one.least_host_nbytes))]
    if one.demand is None:
        return lines
    for need in one.needs:
        lines.append((need.what, f"needs {format_size(need.nbytes)}"))
        lines += [(f"  {name}", format_size(nbytes)) for name, nbytes in need.parts if nbytes]
    state = f"{format_size(one.demand.pinned_nbytes)} of weights and moments on each rank"
    gradients = f"{format_size(one.demand.kept_gradients_nbytes)} of gradients"
    return [*lines, ("kept within host_memory", f"{state}, {gradients}")]


def _parted(what: str, how: int | str) -> str:
    return (
        f"{what.format('')} where the budget asks for it".replace("  ", " ")
        if how == "auto"
        else what.format(how)
    )


def _of_activations(one: Planned) -> list[tuple[str, str]]:
    """Return where each rank's activations wait for the backward, and what a budget of them decided."""
    used = one.demand.activations if one.demand is not None else None
    if one.demand is None or used is None:
        return []
    on_nvme = one.demand.offloaded_nbytes
    places = {
        "where they are made": used.kept_nbytes,
        "in host memory": used.leaving_nbytes - on_nvme,
        "on NVMe": on_nvme,
    }
    shown = ", ".join(f"{format_size(nbytes)} {where}" for where, nbytes in places.items() if nbytes)
    lines = [("activations of each rank wait", shown), ("  at their peak", format_size(used.peak_nbytes))]
    decided, _, why = used.decided.partition("; ")
    return [*lines, *((what, text) for what, text in (("  by their budget", decided), ("", why)) if text)]


def _longest(one: Planned, tokens: int | None) -> str:
    if tokens is None and one.uncounted:
        return "not known: activations are not counted"
    if tokens is None:
        return "not known: give --machine-memory, or --gpu-memory"
    return f"{tokens:,} tokens" if tokens else "none of 1,024 tokens or more"


def _in_a_step(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what a step moves, and how long it takes, or would take where there is no room for it."""
    if "moved" not in found:
        return []
    lines = [
        ("read in a step, each rank", format_size(found["read_nbytes"])),
        ("written in a step, each rank", format_size(found["written_nbytes"])),
    ]
    if found["offloaded_nbytes"]:
        lines.append(("activations to NVMe and back, each rank", format_size(found["offloaded_nbytes"])))
    lines.append(("written to each machine's NVMe in a step", format_size(found["machine_written_nbytes"])))
    if found["sent_tokens"] is not None:
        sent, to_others = found["sent_tokens"]["nbytes"], found["sent_tokens"]["to_others_nbytes"]
        what = (
            f"{format_size(sent)}, {format_size(to_others)} of them to other ranks, if no expert is preferred"
        )
        lines.append(("tokens to experts and back in a step, each rank", what))
    if "seconds" in found:
        lines += [
            (
                "a step" if found["fits"] else "a step, if it had room",
                f"{duration(found['seconds'])}, of which {duration(found['compute_s'])} compute",
            ),
            ("tokens per second", figure(found["tokens_per_s"])),
            ("limited by", found["limit"]),
            ("written to each machine's NVMe in a day", format_size(found["written_per_day"])),
        ]
    if found["steps_until_tbw"] is not None:
        lines.append(("steps until the NVMe has been written its TBW", f"{found['steps_until_tbw']:,.0f}"))
    return lines


def _ranks(one: Planned) -> str:
    setting = one.setting
    if setting.ranks == 1:
        return "one rank"
    shares = ", with memory in common" * setting.shared_memory
    return f"{setting.ranks} ranks, {setting.local_ranks} on each machine{shares}"


def _verdict(one: Planned) -> str:
    """Say whether it fits: never more than is known."""
    if one.short:
        return " ".join(("It does not fit.", *(f"{reason.rstrip('.')}." for reason in one.reasons)))
    if one.uncounted:
        return f"Whether it fits cannot be said. What is not counted: {one.uncounted}."
    open_needs = [need for need in one.needs if need.has_nbytes is None]
    if not open_needs:
        return "It fits."
    return f"It fits where there is: {'; '.join(map(str, open_needs))}."


def _advised(one: Planned, advice: Sequence[str]) -> list[str]:
    lines = [f"Advice: {line}" for line in advice]
    if one.short and not any(line.startswith("would fit") for line in advice):
        nothing = "no change that was tried makes it fit: a larger machine, more ranks, fewer tokens, or LoRA"
        lines.append(f"Advice: {nothing} on frozen weights (4 B per parameter)")
    return lines


def _unmeasured(one: Planned) -> list[str]:
    if one.question.machine.process is not None or one.short:
        return []
    return ["Python and torch are not counted: with INFINITY_MEASURE=0 their memory is not measured."]


def _missing(one: Planned, options: argparse.Namespace) -> list[str]:
    """Say what would have to be known for a forecast."""
    if one.forecast is not None or one.demand is None:
        return []
    missing = []
    if not options.nvme and not options.nvme_read and not options.no_nvme:
        missing.append("--nvme DIR (or --nvme-read, --nvme-write and --nvme-mixed)")
    if one.setting.ranks > 1 and not options.link:
        missing.append("--link GB/s")
    if not options.compute and not options.compute_seconds:
        missing.append("--compute TFLOPS (or --compute-seconds, or --gpu NAME)")
    return [f"How long a step takes would need {' and '.join(missing)}."]


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
        rows[-1]["fits_word"] = "yes" if one.fits else "no" if one.short else "not known"
        rows[-1] |= {f"swept {name}": _word(name, value) for name, value in chosen.items()}
    columns = [
        *(Column(f"swept {name}", name) for name in names),
        Column("fits_word", "fits"),
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
            *(filter(None, (missing_host_memory(options),)) if "host-memory" not in names else ()),
            *_missing(pairs[0][1], options),
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
