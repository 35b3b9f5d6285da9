"""What a training is planned for: budgets, types, ranks, and how activations are kept. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from infinity.errors import ConfigError
from infinity.planning.activations import Method
from infinity.planning.coded import BITS
from infinity.planning.layout import RecordSchema
from infinity.planning.outline import UnitOutline
from infinity.planning.together import Feature, excluded, said, why_not


@dataclass(frozen=True, slots=True)
class Setting:
    """What a plan is for: see Config and AdamW."""

    host_nbytes: int
    """Of each machine, whose ranks divide it: Config(host_memory=...)."""
    nvme: bool = True
    device_nbytes: int | None = None
    """Of each rank, for parameters that wait for their use or live on the device; with those in use they are
    Config(device_memory=...). None where the CPU computes.
    """
    state_dtype: str = "fp32"
    master_dtype: str = "fp32"
    dtype: str = "bf16"
    update: str = "forward"
    micro_batches: int = 1
    ranks: int = 1
    """In all."""
    tensor_parallel: int = 1
    """Ranks that divide each layer; the outline is what one of them has."""
    pipeline_parallel: int = 1
    """Stages of a pipeline; the outline is the heaviest one."""
    expert_parallel: int = 1
    """Ranks that divide the experts of each layer among them; the outline says which they are."""
    local_ranks: int = 1
    """That share one machine: its NVMe, and its memory."""
    durable: bool = False
    """Whether steps are committed, which keeps every record twice."""
    speculate: bool = False
    """Whether updates are made before step() decides them, which keeps every record twice, too."""
    units: str = "module"
    """What is fetched and used together: see Config."""
    quantized_weights: str | None = None
    quantized_gradients: str | None = None
    """In which type ranks send them: see Config."""
    error_feedback: bool = False
    """Whether what codes leave out of gradients is added to the next: see Config."""
    secondary_shard: int = 0
    """Neighbours that keep second parts of weights: see Config; 0: none do."""
    shared_memory: bool = False
    """Whether the ranks of a machine have memory in common: see Config."""
    one_bit: bool = False
    """Whether ranks exchange momenta at one bit, as OneBitAdam once the variance is frozen."""
    method: Method = field(default_factory=Method)
    """How activations are kept, and of how many tokens."""

    def __post_init__(self) -> None:
        """Check what no engine would take.

        Raises: ConfigError.
        """
        counts = (
            "micro_batches ranks tensor_parallel pipeline_parallel expert_parallel local_ranks host_nbytes"
        )
        for name in counts.split():
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: expected at least 1")
        self._check_activations()
        self._check_ranks()
        self._check_feedback()
        self._check_speculation()
        if self.update not in ("forward", "backward", "auto"):
            raise ConfigError(f'update={self.update!r}: expected "forward", "backward" or "auto"')
        if self.update == "backward" and self.micro_batches > 1:
            raise ConfigError(
                f'{self.micro_batches} micro-batches need update="forward": with "backward" the second '
                "would come after the update"
            )
        if self.units not in ("auto", "module", "block"):
            raise ConfigError(f'units={self.units!r}: expected "auto", "module" or "block"')
        if self.state_dtype not in ("fp32", "bf16", "int8", "int4"):
            raise ConfigError(f'state_dtype={self.state_dtype!r}: expected "fp32", "bf16", "int8" or "int4"')
        if self.dtype not in ("bf16", "fp16", "fp32"):
            raise ConfigError(f'dtype={self.dtype!r}: expected "bf16", "fp16" or "fp32"')
        if self.master_dtype not in ("fp32", *["fp24"] * (self.dtype == "bf16")):
            given = f"master_dtype={self.master_dtype!r}"
            raise ConfigError(f'{given}: expected "fp32", or "fp24" with dtype="bf16"')
        if self.dtype == "fp16" and self.update == "backward":
            raise ConfigError('update="backward" with fp16 would apply overflows: update="forward"')

    def _check_speculation(self) -> None:
        if self.speculate and self.update != "forward":
            raise ConfigError(
                f'speculate with update="{self.update}", where nothing is foreseen: update="forward"'
            )
        if self.speculate and self.ranks > 1:
            raise ConfigError(f"speculate on {self.ranks} ranks: updates are made ahead on one rank alone")

    def _check_ranks(self) -> None:
        for name, known in (("quantized_weights", ("int8",)), ("quantized_gradients", tuple(BITS))):
            kind = getattr(self, name)
            if kind is not None and kind not in known:
                raise ConfigError(f"{name}={kind!r}: expected {' or '.join(map(repr, known))}, or None")
        if self.ranks % self.local_ranks:
            raise ConfigError(
                f"{self.ranks} ranks, {self.local_ranks} on each machine: expected a whole number of machines"
            )
        if self.ranks % (self.tensor_parallel * self.pipeline_parallel):
            raise ConfigError(
                f"{self.ranks} ranks, {self.tensor_parallel} that divide layers x {self.pipeline_parallel} "
                "stages of a pipeline: expected a whole number of such groups"
            )
        if self.data_ranks % self.expert_parallel:
            with_data = f", of which {self.data_ranks} have different data" * (self.data_ranks < self.ranks)
            raise ConfigError(
                f"{self.ranks} ranks{with_data}, {self.expert_parallel} that divide experts: expected a "
                "whole number of such groups"
            )
        if self.secondary_shard and self.near(self.data_ranks) % self.secondary_shard:
            raise ConfigError(
                f"secondary_shard={self.secondary_shard}: {self.near(self.data_ranks)} ranks of a machine "
                "share a model, of which neighbours keep second parts together: expected a divisor of that"
            )
        if self.one_bit and (self.dtype == "fp16" or self.master_dtype != "fp32"):
            raise ConfigError(
                f"one_bit with dtype={self.dtype!r}, master_dtype={self.master_dtype!r}: OneBitAdam has "
                "weights in bf16 or fp32, with exact masters"
            )
        if (why := why_not(self._features())) is not None:
            raise ConfigError(why)
        if self.pipeline_parallel > 1 and self.method.activation_nbytes is not None:
            raise ConfigError(
                "activation_memory with a pipeline: what its micro-batches keep at once is not planned by a "
                "budget. Leave one of the two out"
            )

    def _features(self) -> dict[Feature, str]:
        """Return what ranks do that may not go together."""
        on_gpu = self.device_nbytes is not None
        used = {
            Feature.QUANTIZED_WEIGHTS: ("quantized_weights", self.quantized_weights is not None),
            Feature.QUANTIZED_GRADIENTS: ("quantized_gradients", self.quantized_gradients is not None),
            Feature.ERROR_FEEDBACK: ("error_feedback", self.error_feedback),
            Feature.SECONDARY_SHARD: ("secondary_shard", self.secondary_shard > 0),
            Feature.SHARED_MEMORY: ("shared_memory", self.shared_memory),
            Feature.ONE_BIT: ("one_bit", self.one_bit),
            # of experts on accelerators a plan says what they would take, though no engine divides them yet
            Feature.EXPERT_PARALLEL: ("expert_parallel", self.expert_parallel > 1 and not on_gpu),
            Feature.MESH: ("tensor_parallel", self.tensor_parallel > 1),
            Feature.PIPELINE: ("pipeline_parallel", self.pipeline_parallel > 1),
            Feature.ACCELERATOR: ("device_nbytes", on_gpu),
            Feature.FP32: ("dtype", self.dtype == "fp32"),
            Feature.FP16: ("dtype", self.dtype == "fp16"),
        }
        return {one: said(name, getattr(self, name)) for one, (name, is_asked) in used.items() if is_asked}

    def by_itself(self) -> Setting:
        """Return it with memory in common where the ranks choose that by themselves, as Config has it where
        nothing is said: all that share a model are on one machine, and nothing excludes it.
        """
        against = excluded(Feature.SHARED_MEMORY, self._features())
        on_one = self.near(self.data_ranks) == self.data_ranks > 1
        return replace(self, shared_memory=on_one and against is None)

    def _check_feedback(self) -> None:
        if self.error_feedback and self.quantized_gradients is None:
            raise ConfigError(
                "error_feedback without quantized_gradients: nothing is left out of gradients that are sent "
                "as they are"
            )

    def _check_activations(self) -> None:
        if self.method.offload not in (None, "host", "nvme"):
            raise ConfigError(f'offload_activations={self.method.offload!r}: expected None, "host" or "nvme"')
        for name, asked in (
            ('offload_activations="nvme"', self.method.offload == "nvme"),
            ("durable", self.durable),
            ("speculate", self.speculate),
        ):
            if asked and not self.nvme:
                raise ConfigError(f"{name} needs a folder on NVMe: leave one of the two out")
        if self.method.activation_nbytes is not None and (self.method.offload or self.method.batch_tile):
            raise ConfigError(
                "activation_memory decides itself which blocks are recomputed, and which inputs wait where: "
                "leave offload_activations and tiles of the batch out"
            )
        if not self.method.checkpointing and (self.method.offload or self.method.batch_tile):
            raise ConfigError(
                "offload_activations and tiles of the batch need blocks that are recomputed: with activation "
                "checkpointing, or neither of them"
            )

    def holders(self, part: UnitOutline) -> int:
        """Return how many ranks have a share of a unit that this one has, too."""
        return self.data_ranks // self.expert_parallel if part.divided else self.data_ranks

    def near(self, holders: int) -> int:
        """Return how many of the ranks that have shares of a unit are on one machine; 1 where they do not lie
        evenly on machines.
        """
        apart = self.tensor_parallel * (self.data_ranks // holders)
        count = min(holders, self.local_ranks // apart)
        return count if count > 0 and self.local_ranks % apart == 0 and holders % count == 0 else 1

    @property
    def schema(self) -> RecordSchema:
        """The fields of a record."""
        return RecordSchema(self.state_dtype, self.dtype, master_dtype=self.master_dtype)

    @property
    def may_split_updates(self) -> bool:
        """Whether update="auto" makes some updates in the backward: where the CPU computes, gradients of one
        backward, which cannot have overflowed.
        """
        return (
            self.update == "auto"
            and self.device_nbytes is None
            and self.micro_batches == 1
            and self.dtype != "fp16"
        )

    @property
    def data_ranks(self) -> int:
        """Ranks with different data, or parts of sequences, which partition the same state."""
        return self.ranks // (self.tensor_parallel * self.pipeline_parallel)

    @property
    def rank_host_nbytes(self) -> int:
        """One rank's share of its machine's host_memory."""
        return self.host_nbytes // self.local_ranks
