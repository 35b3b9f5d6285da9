"""A picture of a run, as a PNG or one HTML page: lanes and memory over time, and bytes by field."""

from __future__ import annotations

import html
import io
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from infinity.sizes import format_size
from infinity.timeline import Span, Timeline, busy_s, lanes_of, new_file, rows

SUFFIXES = (".png", ".html")
STEPS_SHOWN = 3
"""Steps whose lanes are drawn: more would be too fine to see."""
BARS_SHOWN = 60
"""Steps whose bytes are drawn."""
_ROWS = 3
"""The deepest overlap that is drawn span by span; deeper ones are drawn as the amount in flight."""
_EDGED = 200
"""Bars in a row that leave room for their edges."""
_BINS = 2000
"""About the number of columns of pixels in a lane."""
_COLORS = {"compute": "#4878a8", "work": "#6a9f58", "read": "#85b6b2", "write": "#d1915e"}
_PHASE = "phase"
_PHASES = {"forward": "#7ba3cc", "backward": "#4878a8", "step": "#2f5277"}
_CAUSES = {"read": "#c44e52", "slot": "#e39c37", "update": "#8d6cab", "gradients": "#967662"}
_OTHERS = "#7f7f7f"
_FIELDS = {"hi": "#4878a8", "lo": "#85b6b2", "m": "#e39c37", "v": "#d1615d"}
_FIELDS |= {"grad16": "#6a9f58", "grad32": "#3f6b33", "scale": "#967662", "mv": "#e39c37"}
_FIELDS |= {"m4": _FIELDS["m"], "v4": _FIELDS["v"]}
_TIERS = {"device": "#6a9f58", "host": "#4878a8", "nvme": "#e39c37", "process": "#7f7f7f"}
_TIER_NAMES = {"process": "process, above imports"}
_SHARES = {"pinned": "#4878a8", "gradients": "#6a9f58", "outgoing": "#a9c99b", "ahead": "#e39c37"}
_SHARES |= {"slots": "#bfb3a8"}
_BUDGET = {"color": "#4878a8", "linestyle": "--", "linewidth": 1}
_TITLE_WIDTH = 120
_STYLE = """:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1280px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.3em } h1, td { overflow-wrap: anywhere }
td { padding: .15em 1em .15em 0; vertical-align: top }
td:first-child { font-weight: 600; overflow-wrap: normal; min-width: 8em }
figure { margin: 1em 0; overflow-x: auto; background: white }
svg { display: block; width: 100%; min-width: 900px; height: auto }"""
_Point = TypeVar("_Point", bound=tuple[Any, ...])


@dataclass(frozen=True, slots=True)
class Story:
    """The data of a picture."""

    title: str
    timeline: Timeline
    moved: Sequence[Mapping[tuple[str, str], int]] = ()
    """For each step, the NVMe bytes by ("read" or "written", field)."""
    budget_nbytes: int | None = None
    summary: Sequence[tuple[str, str]] = field(default_factory=list)
    """Rows of a table, for the page."""


def save(story: Story, path: Path) -> None:
    """Write the picture: PNG or HTML, as the suffix says. Needs matplotlib.

    Raises: FileExistsError where `path` exists; OSError where it cannot be written.
    """
    kind = "png" if path.suffix == ".png" else "svg"
    drawn, shown = io.BytesIO(), figure(story)
    if kind == "png":  # a page has its title above the table
        shown.suptitle(textwrap.fill(story.title, _TITLE_WIDTH))
    shown.savefig(drawn, format=kind, dpi=110)
    content = drawn.getvalue() if kind == "png" else page(story, drawn.getvalue().decode()).encode()
    with new_file(path) as file:
        file.write(content)


def page(story: Story, svg: str) -> str:
    """Return a self-contained page of HTML: the table, and the picture inline."""
    table = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>\n"
        for name, value in story.summary
    )
    title = html.escape(story.title)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>\n'
        f"<style>{_STYLE}</style></head>\n<body><h1>{title}</h1>\n<table>\n{table}</table>\n"
        f"<figure>{svg[svg.index('<svg') :]}</figure></body></html>\n"
    )


def figure(story: Story) -> Any:
    """Draw the four parts on a matplotlib Figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(13, 10.5), layout="constrained")
    FigureCanvasAgg(drawn)
    places = drawn.add_gridspec(3, 2, height_ratios=(1.35, 0.7, 1))
    lanes = drawn.add_subplot(places[0, :])
    _draw_lanes(lanes, story.timeline)
    _draw_host(drawn.add_subplot(places[1, :]), story)
    _draw_memory(drawn.add_subplot(places[2, 0]), story)
    _draw_bytes(drawn.add_subplot(places[2, 1]), story.moved)
    return drawn


# Lanes over time


def _draw_lanes(axes: Any, timeline: Timeline) -> None:
    """Draw one band per lane, from top to bottom, for the last steps."""
    steps = timeline.steps[-STEPS_SHOWN:]
    if not steps or not timeline.spans:
        _say(axes, "no spans were recorded")
        return
    since, until = steps[0][0], steps[-1][1]
    spans = [one for one in timeline.spans if one.ended_s > since and one.began_s < until]
    bands: dict[str, list[Span]] = {}
    for one in spans:
        bands.setdefault(_PHASE if _is_phase(one) else one.lane, []).append(one)
    lanes = [*([_PHASE] if _PHASE in bands else []), *lanes_of(spans)]
    colors = _colors(spans)
    for place, lane in enumerate(lanes):
        _draw_band(axes, -place, bands.get(lane, []), (since, until), colors)
    busy_s = {lane: _busy_s(spans, lane, since, until) for lane in lanes}
    axes.set_yticks(
        [-place for place in range(len(lanes))],
        [lane if lane == _PHASE else f"{lane}\n{busy_s[lane] / (until - since):.0%}" for lane in lanes],
    )
    last = len(timeline.steps)
    for number, (began, ended) in enumerate(steps, last - len(steps) + 1):
        axes.axvline(began - since, color="black", linewidth=0.8, linestyle=":")
        axes.text((began + ended) / 2 - since, 0.56, f"step {number}", ha="center", va="bottom", fontsize=9)
    axes.set(xlim=(0, until - since), ylim=(0.45 - len(lanes), 0.85), xlabel="seconds")
    axes.set_title("lanes, and the share of these steps in which each is busy", fontsize=10, loc="left")
    _legend_of_causes(axes, colors)


def _is_phase(one: Span) -> bool:
    return one.lane == "compute" and one.name in _PHASES


def _busy_s(spans: Sequence[Span], lane: str, since: float, until: float) -> float:
    """Return the seconds in which a lane is busy; the compute lane is not while it waits within a phase."""
    waits = [one for one in spans if one.lane == "stall"] if lane == "compute" else []
    of_lane = [one for one in spans if one.lane == lane]
    return busy_s([*of_lane, *waits], since, until) - busy_s(waits, since, until)


def _colors(spans: Sequence[Span]) -> dict[tuple[str, str], str]:
    """Return a colour for each (lane, name): by lane, but stalls by cause, the longest cause first."""
    causes: dict[str, float] = {}
    for one in spans:
        if one.lane == "stall":
            causes[one.name] = causes.get(one.name, 0.0) + one.ended_s - one.began_s
    ordered = sorted(causes, key=lambda name: -causes[name])
    colors = {("stall", name): _CAUSES.get(name, _OTHERS) for name in ordered}
    for one in spans:
        colors.setdefault((one.lane, one.name), _COLORS.get(one.lane, _OTHERS))
    return colors | {("compute", name): color for name, color in _PHASES.items()}


def _legend_of_causes(axes: Any, colors: Mapping[tuple[str, str], str]) -> None:
    from matplotlib.patches import Patch

    causes = [(name, color) for (lane, name), color in colors.items() if lane == "stall"]
    if causes:
        patches = [Patch(color=color, label=f"waits for {name}") for name, color in causes]
        _legend_above(axes, handles=patches)


def _draw_band(
    axes: Any,
    place: float,
    spans: Sequence[Span],
    window: tuple[float, float],
    colors: Mapping[tuple[str, str], str],
) -> None:
    """Draw the spans of one lane between place - 0.4 and place + 0.4."""
    if not spans:
        return
    since, until = window
    filled = rows(spans)
    if len(filled) > _ROWS or any(one.nbytes for one in spans):
        _draw_under_way(axes, place, spans, window)
        return
    height = 0.8 / len(filled)
    for number, row in enumerate(filled):
        bottom = place + 0.4 - (number + 1) * height
        bars = _merged(row, (until - since) / _BINS)
        axes.broken_barh(
            [(one.began_s - since, one.ended_s - one.began_s) for one in bars],
            (bottom, height),
            facecolors=[colors[one.lane, one.name] for one in bars],
            edgecolors="white",
            linewidth=0.3 if len(bars) < _EDGED else 0,
        )
        for one in bars:
            began, ended = max(one.began_s, since), min(one.ended_s, until)
            if one.lane != "stall" and ended - began > 0.006 * (until - since) * len(one.name):
                middle = (began + ended) / 2 - since
                axes.text(
                    middle, bottom + height / 2, one.name, ha="center", va="center", fontsize=8, color="white"
                )


def _merged(row: Sequence[Span], gap_s: float) -> list[Span]:
    """Join neighbours of one name that are closer than a pixel: a long step has more spans than pixels."""
    joined: list[Span] = []
    for one in row:
        last = joined[-1] if joined else None
        near = last is not None and one.began_s - last.ended_s < gap_s and one.ended_s - one.began_s < gap_s
        if last is not None and near and one.name == last.name:
            joined[-1] = last._replace(ended_s=one.ended_s)
        else:
            joined.append(one)
    return joined


def _draw_under_way(axes: Any, place: float, spans: Sequence[Span], window: tuple[float, float]) -> None:
    """Draw the amount in flight: bytes, or spans where they move none."""
    since, until = window
    in_bytes = any(one.nbytes for one in spans)
    changes = sorted(
        change
        for one in spans
        for change in (
            (one.began_s, one.nbytes if in_bytes else 1),
            (one.ended_s, -one.nbytes if in_bytes else -1),
        )
    )
    points, flying = [(since, 0)], 0
    for when_s, change in changes:
        flying += change
        points.append((min(max(when_s, since), until), flying))
    most = max(amount for _, amount in points)
    thinned = thin(points, since, until)
    axes.fill_between(
        [when_s - since for when_s, _ in thinned],
        place - 0.4,
        [place - 0.4 + 0.8 * amount / most for _, amount in thinned],
        step="post",
        color=_COLORS.get(spans[0].lane, _OTHERS),
        linewidth=0,
    )
    text = f"at most {format_size(most)} in flight" if in_bytes else f"at most {most} at once"
    axes.text(
        0.998 * (until - since), place + 0.41, text, ha="right", va="bottom", fontsize=7.5, color="#444444"
    )


def thin(points: Sequence[_Point], since: float, until: float) -> list[_Point]:
    """Keep the highest and the last value in each column of pixels of a step function's (when, value, …)."""
    columns: dict[int, tuple[_Point, _Point]] = {}
    width = (until - since) / _BINS or 1.0
    for point in points:
        column = int((point[0] - since) / width)
        highest, _ = columns.get(column, (point, point))
        columns[column] = (point if point[1] > highest[1] else highest, point)
    return [point for both in columns.values() for point in dict.fromkeys(both)]


# Host memory within steps


def _draw_host(axes: Any, story: Story) -> None:
    """Draw the shares of host_memory, stacked, in the steps whose lanes are drawn."""
    steps = story.timeline.steps[-STEPS_SHOWN:]
    samples = [one for one in story.timeline.samples if one.name == "host"]
    if not steps or not samples:
        _say(axes, "host memory was not sampled")
        return
    since, until = steps[0][0], steps[-1][1]
    within = [one for one in samples if since <= one.when_s <= until] or samples[-1:]
    points = [(one.when_s, sum(one.values.values()), at) for at, one in enumerate(within)]
    shown = [within[at] for *_, at in thin(points, since, until)]
    times = [*(one.when_s - since for one in shown), until - since]
    base = [0.0] * len(times)
    for name in (*_SHARES, *(name for name in shown[0].values if name not in _SHARES)):
        values = [one.values.get(name, 0) / 2**20 for one in shown]
        most = max(one.values.get(name, 0) for one in within)
        if most:
            top = [below + value for below, value in zip(base, [*values, values[-1]], strict=True)]
            label = f"{name}: {format_size(most)}"
            color = _SHARES.get(name, _OTHERS)
            axes.fill_between(times, base, top, step="post", color=color, linewidth=0, label=label)
            base = top
    if story.budget_nbytes is not None:
        axes.axhline(story.budget_nbytes / 2**20, **_BUDGET, label=_budget(story.budget_nbytes))
    axes.set(xlim=(0, until - since), xlabel="seconds", ylabel="MiB")
    axes.set_ylim(0, 1.1 * max(axes.dataLim.y1, 1e-3))
    axes.set_title("host_memory in these steps: the most that each held", fontsize=10, loc="left")
    _legend_above(axes)


def _budget(nbytes: int) -> str:
    return f"host_memory: {format_size(nbytes)}"


def _legend_above(axes: Any, **options: Any) -> None:
    """Put the legend beside the title, where it covers nothing."""
    place = {"loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": 6, "fontsize": 8, "frameon": False}
    axes.legend(**place | options)


# Memory by tier


def _draw_memory(axes: Any, story: Story) -> None:
    lines: dict[str, list[tuple[float, int]]] = {}
    for sample in (one for one in story.timeline.samples if one.name == "memory"):
        for key, value in sample.values.items():
            lines.setdefault(key, []).append((sample.when_s, value))
    if not lines:
        _say(axes, "memory was not sampled")
        return
    since = min(points[0][0] for points in lines.values())
    until = max(points[-1][0] for points in lines.values())
    small = max((value for key in lines if key != "nvme" for _, value in lines[key]), default=0)
    for key, points in lines.items():
        now = points[-1][1]
        label = f"{_TIER_NAMES.get(key, key)}: {format_size(max(value for _, value in points))} at most"
        if key == "nvme" and small and max(value for _, value in points) > 2 * small:
            axes.plot([], [], " ", label=f"nvme: {format_size(now)} now, not drawn: too large")
            continue
        drawn = [*thin(points, since, until), (until, now)]
        axes.step(
            [when_s - since for when_s, _ in drawn],
            [value / 2**20 for _, value in drawn],
            where="post",
            label=label,
            color=_TIERS.get(key),
        )
    if story.budget_nbytes is not None:
        axes.axhline(story.budget_nbytes / 2**20, **_BUDGET, label=_budget(story.budget_nbytes))
    axes.set(xlabel="seconds", ylabel="MiB")
    axes.set_ylim(0, 1.5 * axes.dataLim.y1)  # room for the legend
    axes.set_title("memory by tier, of the whole run", fontsize=10, loc="left")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=7.5, loc="upper left", ncols=2)


# Bytes by field


def _draw_bytes(axes: Any, moved: Sequence[Mapping[tuple[str, str], int]]) -> None:
    """Draw reads above zero and writes below, a bar per step."""
    if not any(nbytes for step in moved for nbytes in step.values()):
        _say(axes, "nothing was read from NVMe or written to it")
        return
    first = max(0, len(moved) - BARS_SHOWN)
    shown = moved[first:]
    numbers = [first + at + 1 for at in range(len(shown))]
    there = dict.fromkeys(field for step in shown for _, field in step)
    fields = [*(name for name in _FIELDS if name in there), *(name for name in there if name not in _FIELDS)]
    for verb, sign in (("read", 1), ("written", -1)):
        base = [0.0] * len(shown)
        for name in fields:
            heights = [sign * step.get((verb, name), 0) / 1e9 for step in shown]
            label = name if verb == "read" else None
            axes.bar(numbers, heights, bottom=base, width=0.85, color=_FIELDS.get(name, _OTHERS), label=label)
            base = [below + height for below, height in zip(base, heights, strict=True)]
    axes.use_sticky_edges = False
    axes.axhline(0, color="black", linewidth=0.8)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.yaxis.set_major_formatter(lambda value, _: f"{abs(value):g}")
    axes.set(xlabel="step", ylabel="GB written      GB read")
    axes.set_title("NVMe bytes by field", fontsize=10, loc="left")
    _legend_above(axes)


def _say(axes: Any, text: str) -> None:
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, color="#666666")
    axes.set_axis_off()
