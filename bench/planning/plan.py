"""`infinity plan`: will it fit, how fast, what limits it.

    infinity plan check --model 7b --host-memory 32GiB --nvme DIR --tokens 4x2048
    infinity plan sweep host-memory=8GiB,32GiB --model 7b --nvme DIR
    infinity plan check --model 1t --ranks 16 --local-ranks 8 --host-memory 128GiB --gpu h200 \
        --nvme-read 25 --nvme-write 20 --nvme-mixed 22 --link 50 --tokens 8x2048

Decisions are those of training (see demand); a step runs on a simulated machine (see forecast).
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from infinity.bench.arguments import batch_of, positive, rate, some_size
from infinity.bench.findings import add_outputs, check_outputs, report
from infinity.bench.places import check_folder
from infinity.bench.planning import cores, cuts, machine, outlook
from infinity.bench.planning.planned import Planned, Question, answer, flops
from infinity.bench.planning.sketch import outline_of
from infinity.cli.presets import PRESETS
from infinity.config.secondary import MACHINE
from infinity.config.sequence_ranks import check_expert_ranks
from infinity.errors import ConfigError
from infinity.planning.activations import Method
from infinity.planning.capacity import Capacity
from infinity.planning.coded import BITS
from infinity.planning.crossing import crossings
from infinity.planning.divided import of_rank
from infinity.planning.gpus import GPUS, LAUNCH_S, REACHED_COMPUTE, REACHED_LINK, USE_S
from infinity.planning.layout import RecordSchema
from infinity.planning.outline import Outline
from infinity.planning.setting import Setting
from infinity.planning.simulator import Disk, Rates
from infinity.storage.disk_speed import DiskSpeed, speed_today

if TYPE_CHECKING:
    from torch import nn

UNCOUNTED = 3
"""The exit code where nothing is known to be too small, and something cannot be counted."""

HELP = "say whether a model fits, how fast a step will be, and what limits it"
_QUESTIONS = {
    "check": "does this model fit these budgets, how fast is a step, what limits it",
    "sweep": "plan for each of several values: a table, and a picture",
    "compare": "hold forecasts against what `infinity bench step --json` has measured",
    "zero": "what each stage of ZeRO takes of memory, and nothing else",
}
_SWEPT = (
    "host-memory",
    "device-memory",
    "tokens",
    "ranks",
    "tensor-parallel",
    "pipeline-parallel",
    "expert-parallel",
    "micro-batches",
    "dtype",
    "state-dtype",
    "master-dtype",
    "update",
    "model",
)


def plan(
    model: nn.Module | Outline,
    setting: Setting,
    *,
    tokens: int = 2048,
    sequence: int | None = None,
    seconds: float | None = None,
    rates: Rates | None = None,
    inputs: Mapping[str, Any] | None = None,
    machine: Capacity | None = None,
) -> Planned:
    """Plan the training of a model, by its shapes alone: the result of `infinity plan`, as data.

    tokens: of a micro-batch on one rank, in sequences of `sequence` (all of them, if None). seconds: what
    forward and backward of a step compute, with recomputation. rates: of one rank; without either there is no
    forecast. inputs: see meta.outline_of_model. machine: what there is; None for nothing that is known.

    Raises: ConfigError for a model without parameters, and for one that was built in Init.
    """
    if isinstance(model, Outline):
        outline = model
    else:
        from infinity.bench.planning.meta import outline_of_model, shapes_alone, with_activations

        outline = outline_of_model(shapes_alone(model), inputs=inputs)
        outline = with_activations(outline, shapes_alone(model))
    method = replace(setting.method, tokens=tokens, sequence=sequence or tokens)
    question = Question(outline, replace(setting, method=method), machine or Capacity(), seconds, rates)
    return answer(question)


# The command


def spelled_out(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with their subcommand. The form from before subcommands still works: --sweep,
    --check and --zero select one, and without these it is `check`.
    """
    given = list(arguments)
    if given and given[0] in (*_QUESTIONS, "-h", "--help"):
        return given
    flags = {one.partition("=")[0] for one in given}
    if "--zero" in flags:
        return ["zero", *(one for one in given if one != "--zero")]
    if "--check" in flags:
        return ["compare", *(one.removeprefix("--check=") for one in given if one != "--check")]
    swept, others, left = [], [], iter(given)
    for one in left:
        name, _, value = one.partition("=")
        if name == "--sweep":
            swept.append(value or next(left, ""))
        else:
            others.append(one)
    return ["sweep", *swept, *others] if swept else ["check", *others]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `infinity plan`."""
    questions = parser.add_subparsers(dest="question", required=True, metavar=" | ".join(_QUESTIONS))
    asks = {
        name: questions.add_parser(name, help=summary, description=summary)
        for name, summary in _QUESTIONS.items()
    }
    for name in ("check", "sweep"):
        _add_training(asks[name])
    asks["check"].set_defaults(sweep=[])
    keys = f"plan for each value, and each combination where there are several keys: {', '.join(_SWEPT)}"
    asks["sweep"].add_argument("sweep", nargs="+", type=_sweep, metavar="KEY=A,B,...", help=keys)
    asks["compare"].add_argument("files", nargs="+", type=Path, metavar="FILE", help="its *.json")
    _add_model(asks["zero"].add_argument)
    _add_ranks(asks["zero"].add_argument)
    for name, one in asks.items():
        add_outputs(one, plots=name in ("sweep", "compare"))
        one.add_argument("--traceback", action="store_true", help="show where an error came from")


def _add_training(parser: argparse.ArgumentParser) -> None:
    """Add the options of the training to plan, and of the machine."""
    add = parser.add_argument
    _add_model(add)
    add(
        "--tokens",
        type=batch_of,
        default=(1, 2048),
        metavar="BxS",
        help="batch x sequence of a micro-batch on one rank, or on those that share sequences (1x2048)",
    )
    rows = "ranks, or groups that divide a model or share sequences, with different data (what --ranks has)"
    add("--data-parallel", type=positive, metavar="N", help=rows)
    shared = "ranks that share each sequence, as Config(sequence_parallel=...) (1)"
    add("--sequence-parallel", type=positive, default=1, metavar="N", help=shared)
    layers = "ranks that divide each layer: tensor parallelism, whose ranks are neighbours (1)"
    add("--tensor-parallel", type=positive, default=1, metavar="N", help=layers)
    stages = "stages of a pipeline; --micro-batches are in flight in it (1)"
    add("--pipeline-parallel", type=positive, default=1, metavar="N", help=stages)
    divided = "ranks that divide the experts of each layer, as Config(expert_parallel=...) (1)"
    add("--expert-parallel", type=positive, default=1, metavar="N", help=divided)
    _add_exchanges(add)
    add(
        "--host-memory",
        type=some_size,
        metavar="SIZE",
        help="budget of each machine, as Config(host_memory=...): its ranks divide it (half of "
        "--machine-memory; without that, half of what is available on this machine now)",
    )
    add(
        "--device-memory",
        type=some_size,
        metavar="SIZE",
        help="of each GPU, for parameters that wait, as Config(device_memory=...) (what --gpu-memory leaves)",
    )
    add(
        "--gpu-memory",
        type=some_size,
        metavar="SIZE",
        help="of each rank's GPU, all of it (--device-memory; without either the CPU computes)",
    )
    of_gpu = "by name: its memory, computing and link, as far as the options beside it say nothing else"
    add("--gpu", choices=GPUS, help=of_gpu)
    add("--nvme", metavar="DIR", help="a folder on the disk to plan for: measured, unless it was before")
    _add_ranks(add)
    add("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="the type that computes (bf16)")
    add("--state-dtype", choices=("fp32", "bf16", "int8", "int4"), default="fp32", help="of moments (fp32)")
    masters = "of masters, as Config(master_dtype=...) (fp32)"
    add("--master-dtype", choices=("fp32", "fp24"), default="fp32", help=masters)
    _add_activations(parser.add_argument_group("activations").add_argument)
    _add_machine(parser.add_argument_group("a machine that is not this one").add_argument)
    add = parser.add_argument_group("advanced").add_argument
    updates = ("forward", "backward", "auto")
    add("--update", choices=updates, default="forward", help="when they are applied, as AdamW(update=...)")
    add("--micro-batches", type=positive, default=1, metavar="N", help="forwards and backwards per step (1)")
    units = "what is fetched and used together, as Config(units=...) (module)"
    add("--units", choices=("module", "block", "auto"), default="module", help=units)
    cuts.add_argument(add)
    add("--durable", action="store_true", help="steps are committed: every record is stored twice")
    ahead = "AdamW(speculate=True): every record is stored twice; seconds are those without it"
    add("--speculate", action="store_true", help=ahead)
    add("--no-nvme", action="store_true", help="keep all state in host memory")
    seconds = "of forward and backward of a step, in the place of --compute"
    add("--compute-seconds", type=rate, metavar="S", help=seconds)
    update_rate = "10^9 parameters that the update steps per second (measured here)"
    add("--update-rate", type=rate, metavar="G", help=update_rate)
    add("--tbw", type=rate, metavar="TB", help="that the NVMe of one machine may be written")


def _add_exchanges(add: Callable[..., object]) -> None:
    """Add how ranks exchange weights and gradients."""
    sent = "in which ranks send them, as Config(quantized_%s=...)"
    add("--quantized-weights", choices=("int8",), help=f"the type {sent % 'weights'}")
    add("--quantized-gradients", choices=tuple(BITS), help=f"the type {sent % 'gradients'}")
    fed = "what codes leave out of gradients is added to the next, as Config(error_feedback=True)"
    add("--error-feedback", action="store_true", help=fed)
    parts = 'neighbours that keep second parts of weights, Config(secondary_shard=...): "machine" or a number'
    add("--secondary-shard", type=_second, metavar="N", help=parts)
    common = "ranks of a machine have memory in common, as Config(shared_memory=...) (where they choose it)"
    add("--shared-memory", action=argparse.BooleanOptionalAction, help=common)
    one_bit = "ranks send momenta at one bit, as OneBitAdam after its freeze"
    add("--one-bit", action="store_true", help=one_bit)


def _add_model(add: Callable[..., object]) -> None:
    names = f"{', '.join(PRESETS)}, or a config.json of Hugging Face (7b)"
    add("--model", default="7b", metavar="NAME", help=names)


def _add_ranks(add: Callable[..., object]) -> None:
    in_all = "in all: data x tensor x pipeline (1, or as many as the other options name)"
    add("--ranks", type=positive, metavar="N", help=in_all)
    add("--local-ranks", type=positive, default=1, metavar="N", help="on each machine, sharing its NVMe (1)")


def _add_activations(add: Callable[..., object]) -> None:
    checkpointing = "recompute blocks in the backward (on)"
    add("--checkpointing", action=argparse.BooleanOptionalAction, default=True, help=checkpointing)
    offload = (
        "where inputs of recomputed blocks wait, as Config(offload_activations=...) (where they are made)"
    )
    add("--offload-activations", choices=("host", "nvme"), help=offload)
    budget = "of what blocks keep, as Config(activation_memory=...): decides which are recomputed"
    add("--activation-memory", type=some_size, metavar="SIZE", help=budget)
    of_loss = (
        'the loss without logits, as Config(loss_tiles=True); "auto": where --activation-memory asks for it'
    )
    add("--loss-tiles", nargs="?", const=True, default=False, type=_auto, metavar="auto", help=of_loss)
    slices = 'slices of each MLP, as Config(sequence_tiles=...); "auto": as --activation-memory asks for (1)'
    add("--sequence-tiles", type=_slices, metavar="N", help=slices)
    batch = "sequences that a block computes at once: tiling.tile_batch_(model, N) (all)"
    add("--batch-tile", type=positive, metavar="N", help=batch)


def _add_machine(add: Callable[..., object]) -> None:
    for name, what in (
        ("read", "reads alone"),
        ("write", "writes alone"),
        ("mixed", "both at once, together"),
    ):
        add(f"--nvme-{name}", type=rate, metavar="GB/s", help=f"of one machine: {what}")
    add("--machine-memory", type=some_size, metavar="SIZE", help="host memory of each machine, all of it")
    add("--nvme-space", type=some_size, metavar="SIZE", help="free on the NVMe of each machine")
    add("--link", type=rate, metavar="GB/s", help="of collectives, per rank (needed for several ranks)")
    add("--local-link", type=rate, metavar="GB/s", help="the same, of ranks of one machine (as --link)")
    add(
        "--compute",
        type=rate,
        metavar="TFLOPS",
        help="of each rank, as reached in training (measured here, where it can be; of a --gpu, "
        f"{REACHED_COMPUTE:.0%}% of its peak)",
    )
    add(
        "--gpu-link",
        type=rate,
        metavar="GB/s",
        help=f"between host memory and each GPU, each way (of a --gpu, {REACHED_LINK:.0%}% of its PCIe; else "
        "what copies in this machine's memory reach)",
    )


def run(options: argparse.Namespace, console: Console) -> int:
    """Plan, and report; returns 0 if something fits, else UNCOUNTED if that cannot be said of something, else
    1. A comparison that fails returns 1.

    Raises: ConfigError; OSError if a disk cannot be measured.
    """
    check_outputs(options)
    code = 0
    _count_ranks(options)
    if getattr(options, "gpu", None):
        _fill_in_gpu(options)
    if options.question == "compare":
        from infinity.bench.planning import hindsight  # needs torch

        findings, good = hindsight.check(options.files, console)
        code = 0 if good else 1
    elif options.question == "zero":
        Setting(1, ranks=options.ranks, local_ranks=options.local_ranks)  # checks that machines are complete
        findings = outlook.zero(outline_of(options.model), options.ranks)
    else:
        planned = list(_planned(options, console))
        if not any(one.fits for _, one in planned):
            code = 1 if all(one.short for _, one in planned) else UNCOUNTED
        tell = outlook.swept if options.question == "sweep" else outlook.single
        findings = tell(planned, options)
    report(findings, options, console)
    return code


def planned_of(arguments: Sequence[str], console: Console) -> Planned:
    """Return what `infinity plan check` plans with these arguments.

    Raises: as `run`.
    """
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = parser.parse_args(["check", *arguments])
    _count_ranks(options)
    ((_, planned),) = _planned(options, console)
    return planned


def _count_ranks(options: argparse.Namespace) -> None:
    """Set the number of ranks where it follows from the other options. Raises: ConfigError for another."""
    names = ("data", "sequence", "tensor", "pipeline")
    each = [getattr(options, f"{name}_parallel", None) or 1 for name in names]
    if getattr(options, "ranks", 0) is None:
        options.ranks = math.prod(each)
    elif getattr(options, "data_parallel", None) and options.ranks != math.prod(each):
        said = " x ".join(map(str, each))
        raise ConfigError(f"--ranks {options.ranks}: data x sequence x tensor x pipeline are {said}")


def _fill_in_gpu(options: argparse.Namespace) -> None:
    """Set what is told of no GPU but its name."""
    gpu = GPUS[options.gpu]
    options.gpu_memory = options.gpu_memory or gpu.memory_nbytes
    options.gpu_link = options.gpu_link or gpu.reached_link / 1e9
    if not options.compute_seconds:
        options.compute = options.compute or gpu.compute / 1e12


def _planned(options: argparse.Namespace, console: Console) -> Iterator[tuple[dict[str, Any], Planned]]:
    """Plan each combination of the swept values; yield the values and the plan."""
    outlines: dict[str, Outline] = {}
    disk = _disk(options)
    seconds: dict[tuple[Any, ...], float | None] = {}
    names = [name for name, _ in options.sweep]
    if len(set(names)) < len(names):
        raise ConfigError(f"sweep of {', '.join(names)}: each key once, with all its values")
    combinations = list(itertools.product(*(values for _, values in options.sweep)))
    for number, values in enumerate(combinations):
        chosen = argparse.Namespace(**vars(options))
        for name, value in zip(names, values, strict=True):
            setattr(chosen, name.replace("-", "_"), value)
        with console.status(f"plan {number + 1} of {len(combinations)}"):
            if chosen.model not in outlines:
                outlines[chosen.model] = outline_of(chosen.model)
            outline = of_rank(outlines[chosen.model], chosen.tensor_parallel, chosen.pipeline_parallel)
            key = chosen.model, chosen.tokens, chosen.tensor_parallel, chosen.pipeline_parallel
            if key not in seconds:
                seconds[key] = _seconds(chosen, outline, console)
            budgets = machine.host_nbytes(chosen), chosen.device_memory or chosen.gpu_memory
            tokens = _tokens_of_rank(chosen)[0] * chosen.micro_batches * _data_ranks(chosen)
            _check_expert_ranks(chosen)
            outline = cuts.sliced(outline, tokens, console, chosen.expert_parallel)
            tiled = cuts.tiled(outline, chosen.tile_above, *budgets, console)
            one = _plan_one(chosen, tiled, disk, seconds[key], outlines[chosen.model])
        if len(combinations) > 1 and not console.is_terminal:
            console.print(f"planned {number + 1} of {len(combinations)}", highlight=False)
        yield dict(zip(names, values, strict=True)), one


def _plan_one(
    chosen: argparse.Namespace, outline: Outline, disk: Disk | None, seconds: float | None, whole: Outline
) -> Planned:
    if "auto" in (chosen.sequence_tiles, chosen.loss_tiles) and chosen.activation_memory is None:
        raise ConfigError(
            "--sequence-tiles auto and --loss-tiles auto go by --activation-memory SIZE: give it"
        )
    method = Method(
        *_tokens_of_rank(chosen),
        checkpointing=chosen.checkpointing,
        offload=chosen.offload_activations,
        batch_tile=chosen.batch_tile,
        loss_tiles=chosen.loss_tiles,
        sequence_parallel=chosen.sequence_parallel,
        sequence_tiles=chosen.sequence_tiles,
        activation_nbytes=chosen.activation_memory,
        in_flight=min(chosen.pipeline_parallel, chosen.micro_batches),
        copies=chosen.tensor_parallel if chosen.checkpointing and chosen.activation_memory is None else 1,
    )
    setting = Setting(
        host_nbytes=machine.host_nbytes(chosen),
        nvme=not chosen.no_nvme,
        device_nbytes=chosen.device_memory or chosen.gpu_memory,
        state_dtype=chosen.state_dtype,
        master_dtype=chosen.master_dtype,
        dtype=chosen.dtype,
        update=chosen.update,
        micro_batches=chosen.micro_batches,
        ranks=chosen.ranks,
        tensor_parallel=chosen.tensor_parallel,
        pipeline_parallel=chosen.pipeline_parallel,
        expert_parallel=chosen.expert_parallel,
        local_ranks=chosen.local_ranks,
        durable=chosen.durable,
        speculate=chosen.speculate,
        units=chosen.units,
        quantized_weights=chosen.quantized_weights,
        quantized_gradients=chosen.quantized_gradients,
        error_feedback=chosen.error_feedback,
        secondary_shard=_neighbours(chosen),
        shared_memory=bool(chosen.shared_memory),
        one_bit=chosen.one_bit,
        method=method,
    )
    if chosen.shared_memory is None:
        setting = setting.by_itself()
    whole_s = (
        seconds * chosen.micro_batches if seconds is not None and not chosen.compute_seconds else seconds
    )
    rates = _rates(chosen, disk) if whole_s is not None else None
    fills_gpu = chosen.device_memory is None or chosen.gpu_memory is None
    near, far = (one * 1e9 if one else None for one in (chosen.local_link or chosen.link, chosen.link))
    shares = next((one for one in crossings(outline, setting) if one.by == "data" and one.nbytes), None)
    if whole_s is not None:  # the first and the last micro-batches leave other stages idle
        whole_s *= 1 + (chosen.pipeline_parallel - 1) / chosen.micro_batches
    if rates is not None and near and far and shares is not None:
        rates = replace(rates, link=shares.nbytes / shares.seconds(near, far))
    question = Question(outline, setting, machine.capacity(chosen), whole_s, rates)
    return answer(replace(question, links=(near, far), whole=whole, fills_gpu=fills_gpu))


def _neighbours(chosen: argparse.Namespace) -> int:
    """Return how many neighbours keep second parts; 0 where none do, as with one, or all of the ranks."""
    given = chosen.secondary_shard or 0
    size = max(1, chosen.local_ranks // chosen.tensor_parallel) if given == MACHINE else int(given)
    return 0 if size in (1, _data_ranks(chosen)) else size


# The machine's speed


def _disk(options: argparse.Namespace) -> Disk | None:
    """Return the bandwidths of one machine's NVMe; None if they are unknown.

    Raises: ConfigError if only some of the rates are given, or a folder cannot be used or measured.
    """
    given = [options.nvme_read, options.nvme_write, options.nvme_mixed]
    if options.nvme is not None:
        check_folder(options.nvme)
    if options.no_nvme:
        return Disk(1.0, 1.0, 1.0)  # never used
    if any(given):
        if not all(given):
            raise ConfigError(
                "--nvme-read, --nvme-write and --nvme-mixed: give all three, or a folder (--nvme)"
            )
        return Disk(*(rate * 1e9 for rate in given))
    if options.nvme is None:
        return None
    speed: DiskSpeed = speed_today(options.nvme)
    if not speed.mixed:
        raise ConfigError(
            f"--nvme {options.nvme}: its disk could not be measured. Give --nvme-read, --nvme-write and "
            "--nvme-mixed."
        )
    beside = min(1.0, speed.beside / speed.mixed) if speed.beside else 1.0
    return Disk(speed.read, speed.write, speed.mixed, beside, speed.taken)


def _rates(options: argparse.Namespace, disk: Disk | None) -> Rates | None:
    """Return one rank's share of its machine's rates; None if too little is known."""
    if disk is None or (options.ranks > 1 and not options.link):
        return None
    kernels = _kernels(options)
    on_host = options.device_memory is None and options.gpu_memory is None
    shared = Disk(*(rate / options.local_ranks for rate in (disk.read, disk.write, disk.mixed)))
    link = options.link * 1e9 if options.link else kernels.link
    rates = replace(kernels, disk=shared, moving=disk.beside, moved_s=disk.taken, link=link)
    if on_host:
        return replace(rates, **cores.BESIDE) if rates.shared else rates
    gpu_link = options.gpu_link * 1e9 if options.gpu_link else kernels.copied
    update = GPUS[options.gpu].update if options.gpu else rates.device_update
    linked = replace(rates, shared=False, up=gpu_link, down=gpu_link, device_update=update)
    schema = RecordSchema(options.state_dtype, options.dtype, master_dtype=options.master_dtype)
    memory = max(rates.update * schema.stepped_nbytes, 2 * rates.copied)  # copying reads, and writes
    return replace(linked, use_s=USE_S, launch_s=LAUNCH_S, memory=memory)


def _kernels(options: argparse.Namespace) -> Rates:
    """Return the rates of this machine's cores."""
    found = cores.cores(options.state_dtype)
    update = options.update_rate * 1e9 if options.update_rate else found.update
    return Rates(Disk(1.0, 1.0, 1.0), update, checked=found.checked, copied=found.copied, shared=found.shared)


def _seconds(options: argparse.Namespace, outline: Outline, console: Console) -> float | None:
    """Return the seconds of a micro-batch's forward and backward (with --compute-seconds: of a step's); None
    if it is too large to be timed here.
    """
    tokens, sequence = _tokens_of_rank(options)
    if options.compute_seconds:
        return float(options.compute_seconds)
    if options.compute:
        return flops(outline, tokens, sequence) / (float(options.compute) * 1e12)
    if options.ranks > 1 or options.device_memory is not None or options.gpu_memory is not None:
        return None
    from infinity.bench.planning import pace  # needs torch

    try:
        return pace.compute_seconds(options.model, outline, tokens, sequence)
    except ConfigError as error:
        console.print(str(error), highlight=False, markup=False)
        return None


def _tokens_of_rank(options: argparse.Namespace) -> tuple[int, int]:
    """Return the tokens of a micro-batch on one rank, and those of a whole sequence.

    Raises: ConfigError where ranks, or tokens, cannot be divided among those that share a sequence.
    """
    (batch, sequence), sharers = options.tokens, options.sequence_parallel
    ranks = _data_ranks(options)
    if ranks % sharers or sequence % sharers:
        beside = f" / {options.ranks // ranks} = {ranks}" if ranks < options.ranks else ""
        raise ConfigError(
            f"--sequence-parallel {sharers}: it has to divide --ranks {options.ranks}{beside}, and the "
            f"sequences of {sequence} tokens of --tokens"
        )
    return batch * sequence // sharers, sequence


def _data_ranks(options: argparse.Namespace) -> int:
    """Return how many ranks have different data, or parts of sequences.

    Raises: ConfigError where the ranks cannot be divided so.
    """
    each: int = options.tensor_parallel * options.pipeline_parallel
    if options.ranks % each:
        raise ConfigError(
            f"--ranks {options.ranks}: expected a multiple of --tensor-parallel {options.tensor_parallel} x "
            f"--pipeline-parallel {options.pipeline_parallel} = {each}"
        )
    return int(options.ranks) // each


def _check_expert_ranks(chosen: argparse.Namespace) -> None:
    """See that experts can be divided among ranks as it was asked for.

    Raises: ConfigError where they cannot, or accelerators would compute.
    """
    check_expert_ranks(chosen.expert_parallel, _data_ranks(chosen))
    if chosen.expert_parallel > 1 and (chosen.device_memory or chosen.gpu_memory):
        raise ConfigError(
            f"--expert-parallel {chosen.expert_parallel} with memory of GPUs: ranks that divide experts "
            "compute on CPUs. Leave --gpu, --gpu-memory and --device-memory out, or --expert-parallel"
        )


# Types of arguments


def _auto(text: str) -> str:
    if text != "auto":
        raise argparse.ArgumentTypeError(f'{text!r}: expected "auto", or nothing behind it')
    return text


def _second(text: str) -> int | str:
    return text if text == MACHINE else positive(text)


def _slices(text: str) -> int | str:
    return text if text == "auto" else positive(text)


def _sweep(text: str) -> tuple[str, list[Any]]:
    name, _, values = text.partition("=")
    if name not in _SWEPT or not values:
        raise argparse.ArgumentTypeError(f"{text!r}: expected KEY=A,B,... with a KEY of {', '.join(_SWEPT)}")
    kinds: dict[str, Any] = {
        "tokens": batch_of,
        **dict.fromkeys([one for one in _SWEPT if one == "ranks" or one.endswith("-parallel")], positive),
        "micro-batches": positive,
    }
    kinds |= {"host-memory": some_size, "device-memory": some_size}
    return name, [kinds.get(name, str)(value) for value in values.split(",")]
