"""Config: the folders, budgets and types of a run. Checked once, here; trusted everywhere else."""

from __future__ import annotations

import dataclasses
import math
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infinity.config.buckets import DEFAULT, bucket_nbytes
from infinity.config.secondary import check_secondary
from infinity.deprecation import warn_deprecated
from infinity.errors import ConfigError, meant
from infinity.planning.layout import RecordSchema
from infinity.planning.together import Feature, features_of, why_not
from infinity.sizes import format_size, parse_size

_DTYPES = {
    name: ours
    for ours, names in {
        "bf16": ("bf16", "bfloat16"),
        "fp16": ("fp16", "float16", "half"),
        "fp32": ("fp32", "float32", "float"),
    }.items()
    for one in names
    for name in (one, f"torch.{one}")
}
_STATE_DTYPES = ("fp32", "bf16", "int8", "int4")
_OFFLOADS = (None, "host", "nvme")
_EXPERTS = ("slices", "whole")
_UNITS = ("auto", "module", "block")
_FROZEN = (None, "int8", "nf4")
VERIFY = ("always", "sample", "off")
_EVERY = re.compile(r"every (?:(\d{1,9}) steps|step)")
UNPROVEN = ("xpu", "mtia", "hpu", "npu")
"""Types of accelerators that torch.accelerator knows and nobody has run Infinity on: they compute where they
are named, and are never chosen.
"""
ACCELERATORS = {
    "cuda": "infinity.device.cuda:CudaStreams",
    **dict.fromkeys(UNPROVEN, "infinity.device.named:NamedStreams"),
}
"""The class of the streams of each type of accelerator that a model may compute on; tests add one."""
_AIO = (None, "io_uring", "threads", "buffered", "gds")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of one `Init`.

    nvme: a folder on the NVMe device, or a list of folders on as many devices: records are then striped over
        them in proportion to their measured bandwidth. None: no NVMe tier, all state stays in host memory.
    host_memory: bytes, or text like "4GiB": a hard budget for what Infinity keeps in host memory (pools,
        gradients, pinned state) on this machine; its ranks divide it. Units in use, activations and the
        model's buffers come on top where the CPU computes, as in plain training. None: half of the memory
        that is available when `Init` is entered.
    device: where the model computes, "cpu" or "cuda" (one device); or "xpu", "mtia", "hpu" or "npu", on which
        nobody has run it. None: the accelerator, if torch sees one that is proven, else the CPU; `Init` logs
        which, at INFO. INFINITY_DEVICE decides before that.
    device_memory: bytes, or text like "4GiB": a hard budget for what Infinity keeps on the device: parameters
        in use, waiting for their use, or living there, gradients until they have left, what ranks exchange,
        offloaded activations that come back. Activations and the model's buffers come on top. Only for a
        device with memory of its own: with "cpu" there is host_memory alone. None: half of what is free on
        the device when the model is built.
    dtype: the compute type: "bf16"; "fp16", whose gradients need a scaled loss (torch.amp.GradScaler, or
        "fp16" in infinity.deepspeed.initialize's configuration); or "fp32". All have fp32 masters. A
        parameter that is created in another of these types, as by nn.Linear(4, 4, dtype=torch.float32) or
        layer.float() inside Init, computes in that, with fp32 state.
    state_dtype: how the optimizer's moments are stored: "fp32" (exact), "bf16" (rounded stochastically),
        "int8" or "int4" (codes, with scales of blocks), with 26, 18, 14 and 12 bytes of traffic per parameter
        and step of AdamW and dtype="bf16".
    master_dtype: "fp32" (exact), or "fp24", with dtype="bf16": masters keep 16 bits of their mantissa, and
        are rounded stochastically; 1 byte less stored, 2 less moved. For AdamW and Adam.
    tile_above: bytes, or text like "256MiB": every nn.Linear, nn.Embedding and Hugging Face Conv1D with a
        larger weight is built in tiles of at most that, each fetched, used and released on its own; see
        infinity.tiling. "auto": where the budgets require it; see planning.tile_size. None: layers stay
        whole.
    experts: "slices": stacked experts that transformers dispatches (Mixtral, Qwen3-MoE, DeepSeek, gpt-oss and
        others) are built expert by expert, and a step reads, updates and writes those alone that tokens are
        routed to, with the same results. So it is with blocks of the rows of large embeddings that no other
        layer uses, with `nvme`, where host memory does not hold the whole model. "whole": each stack, or
        embedding, is one parameter.
    units: what is fetched, used and released together: "module": each module's own parameters; "block": those
        of all modules in a block, such as a layer of a transformer, where it is small enough (8 MiB as it
        computes, and a sixteenth of each budget); "auto": where moreover its fetch takes no longer than the
        uses that it saves (256 KiB for each with `nvme`, 2 MiB without). With small blocks a step calls less
        of Python, and moves larger pieces; results are the same. A durable run goes on with the units it
        began with, whatever this says; checkpoints fit all.
    frozen_dtype: weights of linear layers and of experts that are frozen when Init ends, as by
        Init(frozen=True), are quantised once, to a file on NVMe, and read packed from there: "int8" (1.0 B a
        parameter; a scale for each row) or "nf4" (0.52 B; QLoRA's, double quantisation). They compute as
        approximations: engine/frozen.py has the figures. The output head, embeddings, and what is packed
        already stay as they are. Init refuses it where nothing is frozen. None: nothing is quantised.
    stage: what the ranks of a run partition, in ZeRO's numbers: 1 the masters and the optimizer's state, 2
        gradients as well, 3 parameters as well. With 1 and 2 the 16-bit parameters, with 1 also their
        gradients, stay whole on the device of every rank.
    gather_bucket: bytes, or text like "16MiB": the most of several layers' weights that ranks assemble in one
        collective; less, where host_memory has less room for that, or for layers that wait for their use. A
        larger one, and with 0 each, is assembled by itself. Results are the same.
    reduce_bucket: as much of several layers' gradients that ranks sum in one collective. A larger layer's,
        those that are applied in the backward, and with 0 each layer's, are summed by themselves.
    quantized_weights: "int8": where ranks assemble a layer, they send its weights in 8 bits, with a scale for
        each 256 of a parameter (ZeRO++'s qwZ): about half of the bytes. All ranks compute with what comes of
        that; masters, and what `gathered`, `state_dict` and checkpoints have, stay exact. For 16-bit weights
        and stage=3; a layer in fp32 is sent as it is. None: as they are.
    quantized_gradients: "int8" or "int4": gradients are sent so to the ranks that sum them, in fp32 (qgZ):
        about half, or a quarter, of the bytes of 16-bit ones. Of several machines the sums of each are sent
        on so, too. None: in their own type.
    error_feedback: with quantized_gradients: what codes leave out of a rank's gradients is added to those
        that it sends next, and of several machines what they leave out of the sums of each. Errors take 4
        bytes per parameter on each rank, of several machines some more, and lie where the state lies.
    shared_memory: whether the ranks of one machine have memory in common: each brings its share of a layer to
        where all see it, so that weights in use exist once there, and none are sent within the machine; and
        so do large buffers. Of one machine gradients are summed there, too. Results are the same; for Linux,
        and where the CPU computes. "auto": where all ranks are on one machine, with stage=3 and nothing that
        excludes or limits it, once they have tried it, and of buffers those that no state_dict has; the log
        and `infinity.stats` say so, or why not.
    secondary_shard: each rank keeps a second part of the 16-bit weights, of as many parts as its machine has
        ranks ("machine"), or of so many as this says, which its neighbours among the ranks have: from the
        first use of a step on they assemble layers from these (ZeRO++'s hpZ), and weights cross between
        machines once per step. Parts lie in host_memory, and on NVMe where that has no room. Results are the
        same. For stage=3. None: no second part.
    timeout_s: seconds that a rank waits for the others before it fails, and names those that are missing.
    sequence_parallel: ranks that share each sequence (Ulysses; see infinity.sequence_parallel), for models of
        transformers: 4 of 8 ranks train two sequences at once, each on a quarter of its tokens. All ranks
        still partition one model. 1: each rank has sequences of its own.
    expert_parallel: ranks that divide the experts of each layer among them, for models whose experts are
        built one by one (see experts): of 8 ranks with expert_parallel=4, each four neighbours have all
        experts, every rank a quarter of them on its own NVMe, and tokens are sent to the experts. Ranks that
        have the same experts partition these; all ranks partition all else. 1: every rank computes with every
        expert that its tokens need. The CPU alone computes so.
    offload_activations: where the inputs of checkpointed blocks are kept until the backward (those of
        torch.utils.checkpoint, and of tiling's slices): "host" is within host_memory as far as that has room,
        else on NVMe; "nvme" is on NVMe alone. None: on the device, beside host_memory.
    activation_memory: bytes, or text like "2GiB": of what forwards keep for their backwards, where the model
        computes. The first step measures what each block needs; then some keep it, the others are recomputed,
        and where that is too much their inputs wait in host_memory or on NVMe. infinity.stats says what was
        decided and why. "auto": nine tenths of what is free there then. None: the model's own checkpointing
        decides, and offload_activations. See planning.recomputation.
    sequence_tiles: in how many slices of the sequence the MLPs of models of transformers run, and their
        experts, recomputed in the backward: a number, as infinity.tiling.tile_sequence, or "auto": as many as
        activation_memory asks for, by the shapes of each call. Sums of gradients are then made in another
        order. None: MLPs stay whole.
    loss_tiles: whether causal language models of transformers make their losses without logits, as
        infinity.tiling.tile_loss_: True, or "auto": for losses of so many tokens that activation_memory asks
        for it. False: the model's own loss. See planning.slices for both.
    aio: the I/O engine, "io_uring", "threads" or "buffered"; None takes INFINITY_AIO, or the best one that
        works. "gds": the same, but weights without updates are read from NVMe to an accelerator directly, by
        kvikio, with verify="off"; where that cannot be, through host memory, and the log says why. Unproven.
    verify: whether what is read is compared with the hash of what was written: "always" (or True), "sample"
        (one tile in 16; each once in 16 reads), or "off" (or False: nothing is hashed).
    durable: commit steps to a folder of their own under `nvme`, from which infinity.resume continues after
        the process was killed: True for every step, or "every 10 steps". Takes twice the space.
    wipe: deprecated, use infinity.wipe: with `durable`, remove the run that is in the folder, and begin a new
        one.

    Raises: ConfigError, naming the field, its value and what it may hold.
    """

    nvme: str | Sequence[str] | None = None
    host_memory: int | str | None = None
    device: str | None = None
    device_memory: int | str | None = None
    dtype: object = "bf16"
    state_dtype: str = "fp32"
    master_dtype: str = "fp32"
    tile_above: int | str | None = None
    experts: str = "slices"
    units: str = "module"
    frozen_dtype: str | None = None
    stage: int = 3
    gather_bucket: int | str = DEFAULT
    reduce_bucket: int | str = DEFAULT
    quantized_weights: str | None = None
    quantized_gradients: str | None = None
    error_feedback: bool = False
    shared_memory: bool | str = "auto"
    secondary_shard: str | int | None = None
    timeout_s: float = 600.0
    sequence_parallel: int = 1
    expert_parallel: int = 1
    offload_activations: str | None = None
    activation_memory: int | str | None = None
    sequence_tiles: int | str | None = None
    loss_tiles: bool | str = False
    aio: str | None = None
    verify: bool | str = "always"
    durable: bool | str = False
    wipe: bool = False
    durable_steps: int = field(init=False)
    """Steps from one commit to the next; 0 without `durable`."""
    host_nbytes: int | None = field(init=False)
    """`host_memory` in bytes, or None."""
    device_nbytes: int | None = field(init=False)
    """`device_memory` in bytes, or None."""
    activation_nbytes: int | None = field(init=False)
    """`activation_memory` in bytes; None for None and "auto"."""
    tile_nbytes: int | None = field(init=False)
    """`tile_above` in bytes; None for None and "auto"."""
    gather_bucket_nbytes: int = field(init=False)
    """`gather_bucket` in bytes."""
    reduce_bucket_nbytes: int = field(init=False)
    """`reduce_bucket` in bytes."""
    nvme_folders: tuple[str, ...] = field(init=False)
    """The folders of `nvme`; none without an NVMe tier."""

    def __new__(cls, *_args: Any, **fields: Any) -> Config:  # noqa: PYI034 - Self is of Python 3.11
        """Refuse unknown fields by name."""
        check_fields(fields)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Check every field, and derive those that have one form from those that have several."""
        object.__setattr__(self, "nvme_folders", self._folders())
        object.__setattr__(self, "host_nbytes", _nbytes("host_memory", self.host_memory))
        object.__setattr__(self, "device_nbytes", _nbytes("device_memory", self.device_memory))
        tile_above = None if self.tile_above == "auto" else self.tile_above
        object.__setattr__(self, "tile_nbytes", _nbytes("tile_above", tile_above))
        activations = None if self.activation_memory == "auto" else self.activation_memory
        object.__setattr__(self, "activation_nbytes", _nbytes("activation_memory", activations))
        object.__setattr__(self, "gather_bucket_nbytes", bucket_nbytes("gather_bucket", self.gather_bucket))
        object.__setattr__(self, "reduce_bucket_nbytes", bucket_nbytes("reduce_bucket", self.reduce_bucket))
        object.__setattr__(self, "verify", _verify(self.verify))
        object.__setattr__(self, "durable_steps", _durable_steps(self.durable))
        self._check_choices()
        self._check_features()
        self._check_tiers()
        self._check_device()

    @property
    def engine_kind(self) -> str | None:
        """The I/O engine of what goes through host memory; None for the best one that works."""
        return None if self.aio == "gds" else self.aio

    @property
    def schema(self) -> RecordSchema:
        """The fields of a record."""
        return RecordSchema(self.state_dtype, str(self.dtype), master_dtype=self.master_dtype)

    @property
    def form(self) -> RecordSchema:
        """The old name of `schema`."""
        warn_deprecated("Config.form", "use Config.schema")
        return self.schema

    def _check_choices(self) -> None:
        if _DTYPES.get(str(self.dtype)) is None:
            raise ConfigError(f'dtype={self.dtype!r}: expected "bf16", "fp16" or "fp32", or torch\'s names')
        object.__setattr__(self, "dtype", _DTYPES[str(self.dtype)])
        choices: dict[str, tuple[Any, ...]] = {
            "state_dtype": _STATE_DTYPES,
            "master_dtype": ("fp32", "fp24"),
            "experts": _EXPERTS,
            "units": _UNITS,
            "frozen_dtype": _FROZEN,
            "stage": (1, 2, 3),
            "quantized_weights": (None, "int8"),
            "quantized_gradients": (None, "int8", "int4"),
            "offload_activations": _OFFLOADS,
            "aio": _AIO,
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                expected = ", ".join(map(repr, known))
                raise ConfigError(f"{name}={getattr(self, name)!r}: expected one of {expected}")
        check_secondary(self.secondary_shard)
        if self.master_dtype != "fp32" and self.dtype != "bf16":
            given = f"master_dtype={self.master_dtype!r} with dtype={self.dtype!r}"
            raise ConfigError(f'{given}: it goes with "bf16"')
        for name in ("sequence_parallel", "expert_parallel"):
            size = getattr(self, name)
            if type(size) is not int or size < 1:
                raise ConfigError(f"{name}={size!r}: expected a number of ranks, 1 or more")
        if not isinstance(self.timeout_s, int | float) or not 0 < self.timeout_s < math.inf:
            raise ConfigError(f"timeout_s={self.timeout_s!r}: expected a number of seconds above 0")

    def _check_features(self) -> None:
        if type(self.error_feedback) is not bool:
            raise ConfigError(f"error_feedback={self.error_feedback!r}: expected True or False")
        if self.shared_memory != "auto" and type(self.shared_memory) is not bool:
            raise ConfigError(f'shared_memory={self.shared_memory!r}: expected True, False or "auto"')
        if self.error_feedback and self.quantized_gradients is None:
            raise ConfigError(
                "error_feedback=True without quantized_gradients: gradients are sent as they are, and "
                'nothing is left out of them; give quantized_gradients="int8" or "int4"'
            )
        if (why := why_not(features_of(self))) is not None:
            raise ConfigError(why)

    def _check_tiers(self) -> None:
        if self.offload_activations == "nvme" and not self.nvme_folders:
            raise ConfigError('offload_activations="nvme" needs a folder on NVMe (nvme=...)')
        if self.activation_memory is not None and self.offload_activations is not None:
            raise ConfigError(
                f"activation_memory={self.activation_memory!r} decides itself which inputs wait where: leave "
                f"offload_activations={self.offload_activations!r} out"
            )
        self._check_tiles()
        if self.durable_steps and not self.nvme_folders:
            raise ConfigError(f"durable={self.durable!r} needs a folder on NVMe (nvme=...)")
        if self.frozen_dtype is not None and not self.nvme_folders:
            raise ConfigError(f"frozen_dtype={self.frozen_dtype!r} needs a folder on NVMe (nvme=...)")
        if self.wipe and not self.durable_steps:
            raise ConfigError("wipe=True removes a durable run: it needs durable=True")
        if self.wipe:
            warn_deprecated("wipe=True", "call infinity.wipe(folder) before Init")

    def _check_tiles(self) -> None:
        tiles, of_loss = self.sequence_tiles, self.loss_tiles
        if tiles is not None and tiles != "auto" and (type(tiles) is not int or tiles < 1):
            raise ConfigError(f'sequence_tiles={tiles!r}: expected a number of slices, "auto" or None')
        if of_loss != "auto" and type(of_loss) is not bool:
            raise ConfigError(f'loss_tiles={of_loss!r}: expected True, False or "auto"')
        if "auto" in (tiles, of_loss) and self.activation_memory is None:
            name = "sequence_tiles" if tiles == "auto" else "loss_tiles"
            raise ConfigError(
                f'{name}="auto" goes by the budget of activations: give it, as activation_memory="2GiB" or '
                f'"auto"; or say {"a number of slices" if tiles == "auto" else "True"}'
            )

    def _check_device(self) -> None:
        if self.device is None:
            return
        object.__setattr__(self, "device", str(self.device))
        self.check_place(self.device)

    def check_place(self, device: str) -> None:
        """See that a model can compute on `device` with these settings.

        Raises: ConfigError.
        """
        if device.split(":", maxsplit=1)[0] not in ("cpu", *ACCELERATORS):
            raise ConfigError(
                f'device={device!r}: expected "cpu", "cuda" or "cuda:N"; or, on which nobody has run it, one '
                f"of {', '.join(UNPROVEN)}"
            )
        divides = features_of(self).get(Feature.EXPERT_PARALLEL)
        if not device.startswith("cpu") and divides is not None:
            used = {Feature.EXPERT_PARALLEL: divides, Feature.ACCELERATOR: f"device={device!r}"}
            if (why := why_not(used)) is not None:
                raise ConfigError(why)
        if device.startswith("cpu") and self.device_memory is not None:
            raise ConfigError(
                f"device_memory={self.device_memory!r}: device={device!r} has no memory of its own; "
                "set host_memory alone"
            )

    def _folders(self) -> tuple[str, ...]:
        if self.nvme is None:
            return ()
        one = isinstance(self.nvme, str) or not isinstance(self.nvme, Sequence)
        folders = (str(self.nvme),) if one else tuple(map(str, self.nvme))
        if not all(folders) or not folders:
            raise ConfigError(
                f"nvme={self.nvme!r}: expected a folder, a list of folders, or None for no NVMe tier"
            )
        # Compared as text: links to one folder are found when the store is opened.
        places = [posixpath.normpath(folder) for folder in folders]
        for folder, place in zip(folders, places, strict=True):
            if places.count(place) > 1:
                raise ConfigError(f"nvme={self.nvme!r}: {folder!r} is named twice; name each folder once")
        return folders

    @classmethod
    def from_deepspeed(
        cls,
        source: str | Path | Mapping[str, Any],
        strict: bool = True,
        *,
        infinity: Mapping[str, Any] | None = None,
        **values: Any,
    ) -> Config:
        """Return the Config that a DeepSpeed JSON describes; infinity.deepspeed.initialize reads the rest.

        source: the file, or its content. strict: refuse unsupported keys; False warns of them. infinity:
        fields of Config that DeepSpeed has no key for, such as host_memory. values: what replaces "auto":
        from_deepspeed("ds.json", lr=3e-4, train_micro_batch_size_per_gpu=4).

        Raises: ConfigError naming every key that is unknown, unsupported, or "auto" without a value.
        """
        from infinity.config.batch_sizes import BY_BLOCK, SPECULATE
        from infinity.config.deepspeed_json import translate

        said = translate(source, cls, strict=strict, infinity=infinity, **values)
        if said.by_block:
            raise ConfigError(
                f"{BY_BLOCK} is for infinity.deepspeed.initialize, whose engine counts micro-batches. Leave "
                "it out, and give the Trainer infinity.huggingface.TrainerCallback(by_block=True)"
            )
        if said.speculate:
            raise ConfigError(
                f"{SPECULATE} is for infinity.deepspeed.initialize, which makes the optimizer. Leave it "
                'out, and make infinity.AdamW(..., speculate="auto")'
            )
        if said.tensor_parallel > 1:
            raise ConfigError(
                f"tensor_parallel.autotp_size={said.tensor_parallel}: no field of Config divides layers. "
                "infinity.deepspeed.zero.Init does as the file says; or infinity.Init(mesh=..., data=...) "
                'and infinity.huggingface.tensor_parallel(model, mesh["tp"]), without the key'
            )
        return said.config

    def __str__(self) -> str:
        """The settings in one line."""
        host = "half of what is available" if self.host_nbytes is None else format_size(self.host_nbytes)
        device = self.device or "as torch finds one"
        if self.device_nbytes is not None:
            device += f" ({format_size(self.device_nbytes)})"
        nvme = ", ".join(self.nvme_folders) or None
        state = "" if self.state_dtype == "fp32" else f", state_dtype={self.state_dtype}"
        state += "" if self.master_dtype == "fp32" else f", master_dtype={self.master_dtype}"
        durable = f", durable={self.durable!r}" if self.durable_steps else ""
        kept = "" if self.activation_memory is None else f", activation_memory={self.activation_memory}"
        dtype = f"dtype={self.dtype}{state}{durable}{kept}"
        return f"nvme={nvme}, host_memory={host}, device={device}, {dtype}"


def check_fields(given: Iterable[str], more: Iterable[str] = ()) -> None:
    """Check that these are fields of Config. more: further names that the caller takes, for the message.

    Raises: TypeError naming the first unknown one, and the most similar known one.
    """
    known = [one.name for one in dataclasses.fields(Config) if one.init]
    for name in given:
        if name not in known:
            raise TypeError(f"Config has no setting {name!r}{meant(name, [*known, *more])}")


def _verify(how: object) -> str:
    found = {True: "always", False: "off"}.get(how, how) if isinstance(how, bool) else how
    if found not in VERIFY:
        raise ConfigError(f"verify={how!r}: expected one of {', '.join(map(repr, VERIFY))}")
    return str(found)


def _durable_steps(how: object) -> int:
    if isinstance(how, bool):
        return int(how)
    match = _EVERY.fullmatch(how) if isinstance(how, str) else None
    if match is None or int(match[1] or 1) == 0:
        raise ConfigError(f'durable={how!r}: expected True, False, or text like "every 10 steps"')
    return int(match[1] or 1)


def _nbytes(name: str, size: int | str | None) -> int | None:
    """Return a budget in bytes.

    Raises: ConfigError naming it.
    """
    if size is None:
        return None
    try:
        nbytes = parse_size(size, name)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if nbytes == 0:
        raise ConfigError(f"{name}=0: expected at least a few MiB; or leave it out")
    return nbytes
