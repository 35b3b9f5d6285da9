"""The command line: `infinity train`, `generate`, `doctor`, `export`, `merge`, `bench` and `plan`.

Exit codes: 0 success; 1 an error, with one paragraph on stderr, or (`doctor`, `plan`) a negative answer; 3
(`plan`) no answer, because something cannot be counted; 2 invalid arguments; 130 Ctrl-C; 143 SIGTERM.

Each command imports its modules when it is chosen, so that `infinity --help` answers at once.
"""

from __future__ import annotations

import argparse
import difflib
import math
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol

from rich.console import Console

from infinity.cli.interrupted import Interrupted
from infinity.cli.presets import PRESETS
from infinity.cli.run_file import arguments_of, config_of
from infinity.cli.settings import TrainSettings
from infinity.errors import ConfigError, InfinityError
from infinity.planning.outline import Outline
from infinity.sizes import parse_size

_ENGINES = ("io_uring", "threads", "buffered", "gds")
_DEFAULT = TrainSettings()
_GENERATE = "answer prompts with a model of transformers that need not fit in memory"
_EXPORT = "write a checkpoint as Hugging Face's files, for from_pretrained"
_MERGE = "merge PEFT's adapters into their base, and write that as Hugging Face's files"
_PLAN = "will a model fit, how fast will it train, what limits it: without training it"
_MODEL = "a preset or a config.json of transformers, whose needs are compared with space and memory"
_TRAIN = "train a model of transformers on data, or a byte-level preset on text"
_COMPLETION = 'print the completion of a shell, to be evaluated: eval "$(infinity --completion bash)"'


class Command(Protocol):
    """A module with the arguments and the function of a command.

    spelled_out(arguments), if it has that, translates old spellings of arguments.
    """

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add its arguments."""

    def run(self, options: argparse.Namespace, console: Console) -> int:
        """Run the command; return the exit code."""


Load = Callable[[], Command]
"""Imports a command."""
OutlineOf = Callable[[str], Outline]
"""Returns the outline of a preset, or of a model that a config.json describes."""


def _export() -> Command:
    from infinity.checkpoint import export

    return export


def _merge() -> Command:
    from infinity.cli import merge

    return merge


def _generate() -> Command:
    from infinity.cli import generate

    return generate


def main(
    arguments: Sequence[str] | None,
    benches: Mapping[str, tuple[Load, str]],
    plan: Load,
    outline_of: OutlineOf,
) -> int:
    """Run a command line, and return the exit code.

    arguments: None for the process's. benches (by name, each with its help), plan and outline_of: from
    packages above this one, by `infinity.__main__`.
    """
    parser = _parser(benches, plan, outline_of)
    try:
        options = parser.parse_args(arguments)  # imports the command, which takes seconds
    except KeyboardInterrupt:
        return 130
    try:
        code: int = options.run(options)
    except Interrupted as interrupted:
        return interrupted.exit_code
    except KeyboardInterrupt:
        return 130
    except (InfinityError, OSError) as error:
        if getattr(options, "traceback", False):
            raise
        below = (getattr(options, which, None) for which in ("bench", "question"))
        name = " ".join(("infinity", options.command, *filter(None, below)))
        sys.stderr.write(f"{name}: {describe(error)}\n")
        return 1
    return code


def describe(error: BaseException) -> str:
    """Return an error as one paragraph: its message, its notes, and its cause, unless the message has it."""
    message = str(error) or type(error).__name__
    if type(error).__str__ is OSError.__str__ and isinstance(error, OSError) and error.filename is not None:
        message = f"{error.filename}: {error.strerror}"
    parts = [message, *getattr(error, "__notes__", ())]
    if isinstance(error, InfinityError) and error.__cause__ is not None:
        cause = describe(error.__cause__)
        if cause.splitlines()[0] not in message:
            parts.append(f"cause: {cause}")
    return "\n  ".join(parts)


class _Parser(argparse.ArgumentParser):
    """A parser whose command is imported, and adds its arguments, when it is chosen."""

    def __init__(self, *, load: Load | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self._load = load
        self._spelled_out: Callable[[Any], Any] = list

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.complete()
        args = args if args is None else self._spelled_out(args)
        path = None if args is None or self.get_default("run") is not _train else config_of(args)
        if path is None:
            return super().parse_known_args(args, namespace)
        said = self._of_file(path)
        for action in self._actions:
            action.default = argparse.SUPPRESS  # so that the command line sets what it names alone
        typed, unknown = super().parse_known_args(args, None)
        return argparse.Namespace(**vars(said) | vars(typed)), unknown

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse all of them; an option that no command knows is told with the nearest one."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self._chosen(options).error(f"unrecognized arguments: {' '.join(unknown)}")
        return options

    def _chosen(self, options: argparse.Namespace) -> _Parser:
        """Return the parser of the command that was chosen."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - argparse has no other name
                below = action.choices.get(str(getattr(options, action.dest, "")))
                if isinstance(below, _Parser):
                    return below._chosen(options)  # noqa: SLF001 - its own class's
        return self

    def error(self, message: str) -> NoReturn:
        """Exit with 2; for an unknown word, name the nearest known one."""
        patterns = r"invalid choice: '([^']+)' \(choose from (.*)\)|unrecognized arguments: (--[\w-]+)"
        wrong = re.search(patterns, message)
        if wrong:
            known = re.findall(r"[\w.-]+", wrong[2]) if wrong[1] else [*self._option_string_actions]
            near = difflib.get_close_matches(wrong[1] or wrong[3], known, 1)
            message += f". Did you mean {near[0]}?" if near else f". {self.prog} --help has all of them"
            self.exit(2, f"{self.prog}: error: {message}\n")  # without the usage, above which nobody reads
        super().error(message)

    def _of_file(self, path: str) -> argparse.Namespace:
        """Parse a YAML file's options as if they were typed, with the defaults of all others."""
        try:
            typed = arguments_of(path, self._actions)
        except ConfigError as error:
            self.exit(2, f"{self.prog}: {error}\n")  # without the usage, above which nobody reads
        self.prog, before = f"{self.prog} --config {path}", self.prog
        said, _ = super().parse_known_args(typed, None)
        self.prog = before
        return said

    def complete(self) -> None:
        """Import the command, and add its arguments, unless that is done."""
        if self._load is not None:
            command, self._load = self._load(), None
            self.description = command.HELP
            command.add_arguments(self)
            self.add_argument("--traceback", action="store_true", help="show where an error came from")
            self.set_defaults(run=lambda options: _measure(command.run, options))
            self._spelled_out = getattr(command, "spelled_out", list)


class _Completion(argparse.Action):
    """Prints a shell's completion script, with shtab, and exits. It imports every command."""

    def __call__(self, parser: argparse.ArgumentParser, _: Any, shell: Any, flag: str | None = None) -> None:
        try:
            import shtab
        except ImportError:
            parser.error(f"{flag} needs shtab: pip install 'zero-infinity[completion]'")
        _complete_all(parser)
        sys.stdout.write(shtab.complete(parser, shell=shell) + "\n")
        parser.exit()


def _complete_all(parser: argparse.ArgumentParser) -> None:
    if isinstance(parser, _Parser):
        parser.complete()
    for action in parser._actions:  # noqa: SLF001 - argparse has no other list of its parsers
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - the same
            for below in action.choices.values():
                _complete_all(below)


def _parser(
    benches: Mapping[str, tuple[Load, str]], plan: Load, outline_of: OutlineOf
) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="infinity",
        description="Train models larger than GPU and host memory, by streaming their state from NVMe.",
    )
    parser.add_argument("--version", action="version", version=f"infinity {_version()}")
    parser.add_argument("--completion", choices=("bash", "zsh"), action=_Completion, help=_COMPLETION)
    parser.set_defaults(run=_helping(parser))
    commands = parser.add_subparsers(
        dest="command", metavar="train | generate | doctor | export | merge | bench | plan"
    )
    _add_train(commands.add_parser("train", help=_TRAIN))
    commands.add_parser("generate", help=_GENERATE, load=_generate)
    doctor = commands.add_parser("doctor", help="show what this machine offers, and what to fix")
    nvme = "a folder to examine; may be repeated (default: this one)"
    doctor.add_argument("--nvme", metavar="DIR", action="append", help=nvme)
    measure = "measure the disks again, for some seconds each, and keep the result for training"
    doctor.add_argument("--measure", action="store_true", help=measure)
    doctor.add_argument("--model", metavar="MODEL", help=_MODEL)
    doctor.set_defaults(run=lambda options: _doctor(options, outline_of))
    commands.add_parser("export", help=_EXPORT, load=_export)
    commands.add_parser("merge", help=_MERGE, load=_merge)
    bench = commands.add_parser("bench", help="measure the disk, the kernels, whole steps, copies")
    bench.set_defaults(run=_helping(bench))
    measurements = bench.add_subparsers(dest="bench", metavar=" | ".join(benches))
    for name, (load, summary) in benches.items():
        measurements.add_parser(name, help=summary, load=load)
    commands.add_parser("plan", help=_PLAN, load=plan)
    return parser


def _helping(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    def run(_: argparse.Namespace) -> int:
        parser.print_help()
        return 0

    return run


def _add_train(parser: argparse.ArgumentParser) -> None:
    advanced = parser.add_argument_group("advanced")
    config = "a YAML file of these options, by their names; those of the command line win"
    parser.add_argument("--config", metavar="FILE", help=config)
    _add_data(parser.add_argument, advanced.add_argument)
    _add_model(parser.add_argument, advanced.add_argument)
    _add_recipe(parser.add_argument, advanced.add_argument)
    _add_run(parser.add_argument, advanced.add_argument)
    parser.set_defaults(run=_train)


def _add_data(add: Callable[..., object], add_advanced: Callable[..., object]) -> None:
    model = "a folder of a causal language model of transformers; without weights there they start fresh"
    add("--model", metavar="FOLDER", help=model)
    add_advanced("--tokenizer", metavar="FOLDER", help="the tokenizer's folder (default: the model's)")
    data = "files of text, JSON lines (*.jsonl) or parquet: messages, prompt and completion, or text"
    add("--data", metavar="FILE", nargs="+", action="extend", help=data)
    add(
        "--eval-data", metavar="FILE", nargs="+", action="extend", help="files to evaluate on, not trained on"
    )
    every = "steps from one evaluation to the next (one, after the last step)"
    add("--eval-every", type=_at_least(1), default=0, metavar="STEPS", help=every)
    lora = "train adapters of this rank (8) alone, by PEFT; the model is read, and never written"
    add("--lora", metavar="RANK", type=_at_least(1), nargs="?", const=8, default=0, help=lora)
    add_advanced("--lora-alpha", type=_at_least(1), metavar="X", help="their scale (twice the rank)")
    targets = "modules with adapters (all linear layers but the head)"
    add_advanced("--lora-targets", metavar="NAME", nargs="+", help=targets)
    add("--save", metavar="FOLDER", help="write the trained weights, or adapters, and the tokenizer there")


def _add_model(add: Callable[..., object], add_advanced: Callable[..., object]) -> None:
    presets = ", ".join(f"{name} ({preset.parameters / 1e6:,.0f} M)" for name, preset in PRESETS.items())
    preset = _DEFAULT.preset
    add("--preset", choices=PRESETS, default=preset, metavar="NAME", help=f"a Llama: {presets}; {preset}")
    text = "a text file or folder (default: the sources of Python's standard library)"
    add("--text", metavar="PATH", help=text)
    nvme = (
        "folder for the state (default: the run's own); its files have no names and vanish at the end; "
        "may be repeated: the state is striped over all folders"
    )
    add("--nvme", metavar="DIR", action="append", help=nvme)
    in_host_memory = "keep all state in host memory"
    add_advanced("--no-nvme", dest="in_host_memory", action="store_true", help=in_host_memory)
    budget = 'hard budget, like "512MiB" (default: half of what is available)'
    add("--host-memory", type=_size, metavar="SIZE", help=budget)
    places = '"cpu" or "cuda" (a GPU where torch sees one), or one that nobody has tried: "xpu"'
    add("--device", help=f"where the model computes: {places}")
    add_advanced("--aio", choices=_ENGINES, help="the I/O engine (default: the best that works)")
    computes = "the compute type; fp16 with a dynamic loss scale (bf16)"
    add("--dtype", choices=("bf16", "fp16", "fp32"), default=_DEFAULT.dtype, help=computes)
    state = "how moments are stored: exactly, or in fewer bytes (fp32)"
    add("--state-dtype", choices=("fp32", "bf16", "int8", "int4"), default=_DEFAULT.state_dtype, help=state)
    masters = "how masters are stored: exactly, or, of bf16, in 24 bits, rounded stochastically (fp32)"
    add_advanced("--master-dtype", choices=("fp32", "fp24"), default=_DEFAULT.master_dtype, help=masters)
    frozen = "with --lora: keep the weights beneath the adapters in 8 or 4 bits (as the model has them)"
    add_advanced("--frozen-dtype", choices=("int8", "nf4"), help=frozen)
    on_device = "hard budget on a GPU, beside activations (default: half of what is free there)"
    add_advanced("--device-memory", type=_size, metavar="SIZE", help=on_device)
    tiles = 'build layers with larger weights in tiles of that size; or "auto" (layers stay whole)'
    add_advanced("--tile-above", metavar="SIZE", help=tiles)
    units = "what is fetched together: a module's own weights, a small block's, or what is faster (module)"
    add_advanced("--units", choices=("module", "block", "auto"), default=_DEFAULT.units, help=units)


def _add_recipe(add: Callable[..., object], add_advanced: Callable[..., object]) -> None:
    def number(
        flag: str, kind: Callable[[str], object], what: str, into: Callable[..., object] = add
    ) -> None:
        default = getattr(_DEFAULT, flag[2:].replace("-", "_"))
        into(flag, type=kind, default=default, metavar="N", help=f"{what} ({default})")

    number("--steps", _at_least(1), "updates of the weights")
    number("--batch", _at_least(1), "sequences per forward, or micro-batch")
    number("--sequence", _at_least(2), "tokens per sequence; of a preset, bytes")
    number("--accumulate", _at_least(1), "micro-batches per step; with --checkpointing one fetch serves all")
    number("--lr", _not_negative, "the highest learning rate")
    number("--weight-decay", _not_negative, "decoupled, as in AdamW")
    number("--warmup", _at_least(0), "steps in which the rate rises, before it falls along a cosine")
    number("--seed", _at_least(0), "of weights and data")
    checkpointing = "recompute activations in the backward (on)"
    add("--checkpointing", action=argparse.BooleanOptionalAction, default=True, help=checkpointing)
    offload = "where to keep the blocks' inputs until the backward: in --host-memory, or on NVMe (neither)"
    add_advanced("--offload-activations", choices=("host", "nvme"), help=offload)
    kept = 'memory for activations, or "auto": decides which blocks are recomputed (all)'
    add_advanced("--activation-memory", metavar="SIZE", help=kept)
    add("--max-norm", type=_norm, metavar="X", help="clip the gradients' norm (none)")
    update = "when updates are applied (auto: in the backward, unless gradients are clipped or accumulated)"
    add_advanced("--update", choices=("auto", "forward", "backward"), default="auto", help=update)
    ahead = (
        "make updates in the backward before norms are known, where they rarely exceed --max-norm (on, where "
        "the disk has room for twice the space)"
    )
    add_advanced("--speculate", action=argparse.BooleanOptionalAction, default=None, help=ahead)


def _add_run(add: Callable[..., object], add_advanced: Callable[..., object]) -> None:
    durable = "commit every so many steps, for --resume after a crash (takes twice the space)"
    add("--durable", metavar="STEPS", type=_at_least(1), nargs="?", const=1, default=0, help=durable)
    add("--resume", action="store_true", help="continue the durable run in --nvme, or begin one")
    add("--out", metavar="DIR", help="a new folder for log and picture (default: runs/<time>)")
    add_advanced(
        "--log-every", type=_at_least(1), default=1, metavar="N", help="steps per line of log.jsonl (1)"
    )
    timeline = "write a trace of the lanes, for ui.perfetto.dev, to a new file, *.json"
    add("--timeline", metavar="FILE", help=timeline)
    report = "write a picture of the run, lanes, memory and bytes, to a new file, *.html or *.png"
    add("--report", metavar="FILE", help=report)
    add("--tensorboard", metavar="FOLDER", help="write the figures of each step for TensorBoard")
    add("--wandb", metavar="PROJECT", help="send the figures of each step to Weights & Biases")
    plain = "train in memory, by the reference recipe, for comparison"
    add_advanced("--plain", action="store_true", help=plain)
    add("--traceback", action="store_true", help="show where an error came from")


def _train(options: argparse.Namespace) -> int:
    from infinity.aio import EngineUnavailableError
    from infinity.cli.train import train
    from infinity.config.settings import Config
    from infinity.device.device import choose_device

    asked = {name: getattr(options, name) for name in TrainSettings.__dataclass_fields__}
    settings = TrainSettings(**asked | {"device": choose_device(Config(device=options.device))})
    _check(settings)
    try:
        train(settings, Console())
    except EngineUnavailableError as error:
        if settings.aio is not None:
            error.strerror = f"{error.strerror}; or leave --aio out"
        raise
    return 0


def _check(settings: TrainSettings) -> None:
    """Refuse options that exclude each other, and missing paths, before anything is built.

    Raises: ConfigError naming the options.
    """
    backward = settings.update == "backward"
    fp16 = settings.dtype == "fp16"
    nvme, offload = settings.nvme is not None, settings.offload_activations
    excluded = {
        "--update backward excludes --max-norm: the norm is known only after the backward.": backward
        and settings.max_norm is not None,
        "--update backward excludes --accumulate without --checkpointing: a second backward would come after "
        "the update.": backward and settings.accumulate > 1 and not settings.checkpointing,
        "--speculate excludes --update backward, which makes all updates there.": backward
        and settings.speculate,
        "--speculate excludes --plain.": settings.speculate and settings.plain,
        "--dtype fp16 excludes --update backward, which would apply overflowed gradients.": fp16 and backward,
        "--dtype fp16 excludes --plain: torch's GradScaler refuses gradients of fp16.": fp16
        and settings.plain,
        "--offload-activations excludes --no-checkpointing: it moves the inputs of checkpointed blocks.": (
            offload is not None and not settings.checkpointing
        ),
        "--activation-memory excludes --offload-activations: it decides which inputs wait where.": (
            settings.activation_memory is not None and offload is not None
        ),
        "--activation-memory excludes --plain.": settings.activation_memory is not None and settings.plain,
        "--activation-memory excludes --accumulate with --checkpointing: micro-batches that share one fetch "
        "are recomputed, without --no-checkpointing.": settings.activation_memory is not None
        and settings.accumulate > 1
        and settings.checkpointing,
        "--offload-activations nvme excludes --no-nvme.": offload == "nvme" and settings.in_host_memory,
        "--no-nvme excludes --nvme.": settings.in_host_memory and nvme,
        "--durable needs --nvme DIR, a folder that keeps the run, and excludes --plain.": bool(
            settings.durable
        )
        and (not nvme or settings.plain),
        "--resume continues a durable run, and needs --durable.": settings.resume and not settings.durable,
    }
    for why, so in excluded.items():
        if so:
            raise ConfigError(f"{why} Leave one out.")
    _check_data(settings)
    for what in ("timeline", "report"):
        if settings.plain and getattr(settings, what) is not None:
            raise ConfigError(f"--plain excludes --{what}, which shows an engine's lanes. Leave one out.")
    if settings.text is not None and not Path(settings.text).exists():
        raise ConfigError(
            f"--text {settings.text}: there is no such file or folder. Name a text file, or a folder of them."
        )
    if settings.out is not None and Path(settings.out).exists() and not Path(settings.out).is_dir():
        raise ConfigError(f"--out {settings.out}: that is a file. Name a new folder for the run.")


def _check_data(settings: TrainSettings) -> None:
    """Refuse options of a model without one, and combinations with one that cannot work.

    Raises: ConfigError naming the options.
    """
    for flag in ("tokenizer", "data", "eval_data", "lora"):
        if settings.model is None and getattr(settings, flag):
            name = "--" + flag.replace("_", "-")
            raise ConfigError(f"{name} needs --model FOLDER; presets train on the bytes of --text.")
    wrong = {
        "--model needs --data FILE..., what to train on.": settings.model is not None and not settings.data,
        "--model excludes --text, whose bytes presets train on: name the files by --data.": (
            settings.model is not None and settings.text is not None
        ),
        "--eval-every needs --eval-data FILE...": bool(settings.eval_every) and not settings.eval_data,
        "--frozen-dtype needs --lora: without it all weights are trained.": not settings.lora
        and settings.frozen_dtype is not None,
        "--lora-alpha and --lora-targets need --lora.": not settings.lora
        and not (settings.lora_alpha is None and settings.lora_targets is None),
        "--plain excludes --lora and --save: it serves for comparison.": settings.plain
        and bool(settings.lora or settings.save),
    }
    for why, so in wrong.items():
        if so:
            raise ConfigError(why)
    if settings.save is not None and not settings.resume and Path(settings.save).exists():
        raise ConfigError(f"--save {settings.save} exists, and is never overwritten. Name a new folder.")


def _doctor(options: argparse.Namespace, outline_of: OutlineOf) -> int:
    from infinity.cli.doctor import examine

    model = None if options.model is None else partial(outline_of, options.model)
    examination = examine(options.nvme or ["."], measure=options.measure, model=model)
    Console().print(examination.table())
    return 0 if examination.healthy and examination.complete else 1


def _measure(run: Callable[[argparse.Namespace, Console], int], options: argparse.Namespace) -> int:
    """Run a measurement. SIGTERM ends it as Ctrl-C does, so that it removes its files and processes."""

    def stop(number: int, _: FrameType | None) -> NoReturn:
        raise Interrupted(number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        return run(options, Console())
    finally:
        signal.signal(signal.SIGTERM, before)


def _version() -> str:
    try:
        return version("zero-infinity")
    except PackageNotFoundError:
        return "(not installed)"


# Types of arguments


def _at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, at least {least}")
        return number

    return parse


def _not_negative(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number, at least 0")
    return number


def _norm(text: str) -> float | None:
    return None if text == "none" else _not_negative(text) or None


def _size(text: str) -> str:
    try:
        parse_size(text, "host_memory")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text
