"""Loss curves of the dtypes of moments, and of masters in 24 bits, with the same text, model and seed, in one
picture.

    python -m infinity.bench.engine.losses --nvme DIR --png FILE.png --json FILE.json
    python -m infinity.bench.engine.losses --draw FILE.json [FILE.json ...] --png FILE.png

The second draws what was measured before, a panel for each optimizer, and trains nothing.
This trains as `infinity train` does, on its default text, the standard library's sources with a byte per
token. All curves have the same initial weights and batches, so they differ only by the rounding of moments.
Time does not matter: this may run on a busy
machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import infinity
from infinity.bench.engine.runs import STATE_DTYPES, folder_on, here, machine, save, words
from infinity.bench.places import check_folder
from infinity.cli.presets import PRESETS, llama
from infinity.cli.schedule import learning_rate
from infinity.cli.text import Text, Windows, default_text
from infinity.engine.engine import engine_of_model
from infinity.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVES = (*STATE_DTYPES, "int4+fp24")
"""The types of moments, and behind a "+" that of masters, for AdamW; the first is exact."""
OPTIMIZERS = ("AdamW", "Adam", "SGD", "Adagrad", "Lion", "Muon")
"""SGD with momentum 0.9; Muon with updates of AdamW's size, so that its learning rate is AdamW's."""
_COLUMNS = 2
"""Of panels in a picture."""
SMOOTHED = 20
"""Steps in the moving mean, which the picture shows as strong lines and by which last losses are compared."""


@dataclass(frozen=True, slots=True)
class CurveSettings:
    """The settings that all curves share."""

    preset: str
    steps: int
    batch: int
    """Sequences per step."""
    sequence: int
    """Bytes per sequence."""
    lr: float
    warmup: int
    weight_decay: float
    seed: int
    host_memory: str
    optimizer: str = "AdamW"


def _optimizer(settings: CurveSettings, model: torch.nn.Module) -> torch.optim.Optimizer:
    given: dict[str, Any] = {"lr": settings.lr, "weight_decay": settings.weight_decay}
    if settings.optimizer == "Muon":
        groups = infinity.muon_groups(model, given, **given, adjust_lr_fn="match_rms_adamw")
        return infinity.Muon(groups, update="backward")
    if settings.optimizer == "SGD":
        given["momentum"] = 0.9
    kind: Callable[..., torch.optim.Optimizer] = getattr(infinity, settings.optimizer)
    return kind(model.parameters(), **given, update="backward")


def losses(settings: CurveSettings, state_dtype: str, text: Text, folder: Path) -> Iterator[float]:
    """Train with state of these types, one of CURVES; yield the loss of each step, in nats per byte."""
    torch.manual_seed(settings.seed)
    moments, _, masters = state_dtype.partition("+")
    types: dict[str, Any] = {"state_dtype": moments, "master_dtype": masters or "fp32"}
    with infinity.Init(nvme=str(folder), host_memory=settings.host_memory, device="cpu", **types):
        model = llama(PRESETS[settings.preset], settings.sequence)
    model.train()
    optimizer = _optimizer(settings, model)
    schedule = LambdaLR(optimizer, lambda step: learning_rate(step, settings.warmup, settings.steps))
    count = settings.steps * settings.batch
    windows = Windows(text, sequence=settings.sequence, count=count, seed=settings.seed)
    with closing(engine_of_model(model)):
        for batch in DataLoader(windows, settings.batch):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            yield float(loss.detach())


def smooth(values: Sequence[float], width: int = SMOOTHED) -> list[float]:
    """Return the moving mean over `width` values (fewer at the beginning)."""
    return [statistics.fmean(values[max(0, end - width) : end]) for end in range(1, len(values) + 1)]


def last(curves: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Return each curve's smoothed last loss, and how far it lies above that of exact state."""
    ends = {name: smooth(values)[-1] for name, values in curves.items()}
    base = ends.get(STATE_DTYPES[0])
    return {
        name: {"loss": end, **({} if base is None else {"above_exact": end - base})}
        for name, end in ends.items()
    }


def plot(path: Path, panels: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Draw all curves of each title in a panel of one PNG: each step as a faint line, the mean as a strong
    one.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(len(panels), _COLUMNS)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(8 if columns == 1 else 6 * columns, 4.5 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for place, (title, curves) in enumerate(panels.items(), start=1):
        _draw(figure.add_subplot(rows, columns, place), title, curves)
    figure.savefig(path, dpi=120 if columns == 1 else 80)


def _draw(axes: Axes, title: str, curves: Mapping[str, Sequence[float]]) -> None:
    styles = ("-", "--", ":", "-.")  # the curves may lie on each other
    for name, values in curves.items():
        number = CURVES.index(name)  # a type has its color in all panels
        color, steps = f"C{number}", range(1, len(values) + 1)
        axes.plot(steps, values, color=color, alpha=0.2, linewidth=0.8)
        style = styles[number % len(styles)]
        label = f"{name}: {smooth(values)[-1]:.3f} at the end"
        axes.plot(steps, smooth(values), color=color, linestyle=style, linewidth=2, label=label)
    axes.legend(title=f"moments; mean of the last {SMOOTHED} steps")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title=title)
    axes.grid(visible=True, alpha=0.3)


def measured(files: Sequence[Path]) -> dict[str, dict[str, list[float]]]:
    """Return the curves of files that `--json` wrote, by titles.

    Raises: ConfigError naming a file that is none of these, or whose title another has.
    """
    panels: dict[str, dict[str, list[float]]] = {}
    for file in files:
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
            title, curves = title_of(CurveSettings(**record["recipe"])), dict(record["losses"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{file} has no loss curves: {error!r}. Name files of --json.") from error
        if title in panels:
            raise ConfigError(f"{file}: its curves, {title!r}, are in the picture. Leave one of the two out.")
        if unknown := sorted(set(curves) - set(CURVES)):
            raise ConfigError(f"{file}: curves of {', '.join(unknown)}, expected {', '.join(CURVES)}")
        panels[title] = curves
    return panels


def title_of(settings: CurveSettings) -> str:
    """Name what is trained, and on how much."""
    parameters = PRESETS[settings.preset].parameters / 1e6
    step = f"{settings.batch}x{settings.sequence} bytes of source text per step"
    return f"{settings.optimizer}, {parameters:.1f} M parameters, {step}"


def table(curves: Mapping[str, Sequence[float]]) -> Table:
    """Return a table of the curves' last losses."""
    lines = Table(title=f"Loss, mean of the last {SMOOTHED} steps, nats per byte")
    lines.add_column("moments")
    for heading in ("first step", "at the end", "above exact state"):
        lines.add_column(heading, justify="right")
    for name, end in last(curves).items():
        above = f"{end['above_exact']:+.4f}" if "above_exact" in end else ""
        lines.add_row(name, f"{curves[name][0]:.4f}", f"{end['loss']:.4f}", above)
    return lines


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m infinity.bench.engine.losses",
        description="Loss curves of the dtypes of optimizer state",
    )
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--nvme", type=Path, metavar="DIR", help="a folder on the disk, to train there")
    task.add_argument("--draw", nargs="+", type=Path, metavar="FILE", help="draw files of --json instead")
    parser.add_argument("--state-dtype", nargs="+", choices=CURVES, default=list(CURVES))
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="AdamW")
    parser.add_argument("--preset", choices=PRESETS, default="25m")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    parser.add_argument("--sequence", type=int, default=256, help="bytes per sequence")
    parser.add_argument("--lr", type=float, default=6e-4, help="the highest learning rate")
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--host-memory", default="256MiB", metavar="SIZE")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the curves")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all losses")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error("--steps has to be at least 1")
    if options.png and importlib.util.find_spec("matplotlib") is None:
        parser.error("--png needs matplotlib: pip install matplotlib")
    if options.draw and not options.png:
        parser.error("--draw needs --png FILE, the picture to draw")
    try:
        if options.draw:
            options.draw = measured(options.draw)
        else:
            check_folder(options.nvme)
    except ConfigError as error:
        parser.error(str(error))
    return options


def main(arguments: list[str] | None = None) -> None:
    """Train once per dtype; print the ends, draw the curves, write the record."""
    options = options_of(arguments)
    if options.draw:
        plot(options.png, options.draw)
        return
    console = Console()
    settings = CurveSettings(**{name: getattr(options, name) for name in CurveSettings.__dataclass_fields__})
    text, about = default_text(), here()
    curves: dict[str, list[float]] = {}
    with folder_on(options.nvme) as folder:
        facts = machine(folder)
        for name in options.state_dtype:
            progress: dict[str, Any] = {"total": settings.steps, "console": console}
            found = track(losses(settings, name, text, folder), f"{name} state", **progress)
            curves[name] = list(found)
    title = title_of(settings)
    console.print(table(curves))
    console.print(title)
    console.print(words(about))
    if options.png:
        plot(options.png, {title: curves})
    if options.json:
        read = {"files": text.files, "nbytes": text.nbytes}
        record = {"about": about, "machine": facts, "text": read, "recipe": settings}
        record |= {"smoothed_over_steps": SMOOTHED, "at_the_end": last(curves), "losses": curves}
        save(options.json, record)


if __name__ == "__main__":
    main()
