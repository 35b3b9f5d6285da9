"""What training keeps of its tokens: activations and logits, in bytes. Pure: no torch, no I/O.

[Note: the peaks]
A step's activations have two peaks, one behind the other. The first is at the end of the forward: the loss of
all tokens, beside what the blocks have kept. The second is in the backward of one block: what its forward
keeps, made anew where it is recomputed, and gradients. A recomputed block keeps its input alone until then.
With weights in use more moments may be the largest. While the loss is computed, no weight is in use; behind
it the head's weight and its gradient are, beside the gradient of the logits; at the end of the backward those
of the embeddings are, and nothing is kept any more.

[Note: logits]
transformers makes logits in the type that computes and widens them to fp32; the loss keeps their softmax, and
its backward makes two gradients of the same size: 12 bytes per token and entry of the vocabulary at one time.
tiling.tile_loss_ makes blocks of logits instead, a sixteenth of 4 bytes at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace

from infinity.planning.recomputation import (
    HOST,
    KEEP,
    NVME,
    BlockMemory,
    InputTiers,
    StepMemory,
    plan_activations,
)
from infinity.planning.slices import LOGIT_NBYTES, loss_without_logits, mlp_nbytes, slices_within

_LOSS_TILES = 16
"""Parts of the fp32 logits, of which one exists at a time."""
_LOSS_TILE_TOKENS = 128
"""At least, in such a part."""
_LOSS_TILE_NBYTES = 128 << 20
"""At most, of one block of logits."""
_RETURNING = 3
"""Offloaded inputs that are on the device at once: one in use, two on their way back."""


@dataclass(frozen=True, slots=True)
class KeptOfToken:
    """Elements that a block's forward keeps of a token for its backward."""

    narrow: float = 0
    """In the type that computes."""
    wide: float = 0
    """In fp32."""
    pairs: float = 0
    """In the type that computes, for each token of the sequence: attention scores."""
    wide_pairs: float = 0
    """As `pairs`, in fp32."""
    pairs_on_cpu: float = 0
    """As `pairs`, where the CPU computes: torch's attention there keeps scores if values are not as wide as
    keys.
    """
    pairs_beside: float = 0
    """As `pairs`: what the backward makes of them beside."""
    gated: float = 0
    """Width of gated MLPs: of what their backward makes beside."""
    returned: float = 0
    """Bytes that the backward makes of what experts return, of all experts of the token."""
    mlp: float = 0
    """Of `narrow`, what gated MLPs and experts keep: twice what their inner layers make."""
    sliced: float = 0
    """Elements that one slice of an MLP makes again in the backward, for each token of all slices."""

    def __add__(self, other: KeptOfToken) -> KeptOfToken:
        """Return what both keep."""
        return KeptOfToken(*(one + two for one, two in zip(astuple(self), astuple(other), strict=True)))

    def __rmul__(self, times: float) -> KeptOfToken:
        """Return what so many keep."""
        return KeptOfToken(*(times * one for one in astuple(self)))

    def on(self, *, gpu: bool) -> KeptOfToken:
        """Return what is kept there."""
        scores = 0 if gpu else self.pairs_on_cpu
        pairs, beside = self.pairs + scores, self.pairs_beside + scores
        return replace(self, pairs=pairs, pairs_beside=beside, pairs_on_cpu=0)

    def nbytes(self, width: int, tokens: int, sequence: int) -> float:
        """Return the bytes that are kept of `tokens` tokens; width: of an element that computes, in bytes."""
        narrow, wide = self.narrow + self.pairs * sequence, self.wide + self.wide_pairs * sequence
        return tokens * (width * narrow + 4 * wide)

    def backward_nbytes(self, width: int, tokens: int, sequence: int) -> float:
        """Return the bytes that the backward needs at one time beside what is kept."""
        return tokens * max(
            2 * width * self.gated + width * self.sliced, self.returned, width * self.pairs_beside * sequence
        )

    def in_slices(self, slices: int) -> KeptOfToken:
        """Return what is kept where MLPs run in so many slices, and are recomputed."""
        if slices == 1:
            return self
        part = 1 / slices
        return replace(
            self,
            narrow=self.narrow - self.mlp,
            mlp=0,
            sliced=part * self.mlp,
            gated=part * self.gated,
            returned=part * self.returned,
        )


@dataclass(frozen=True, slots=True)
class Activations:
    """What a model keeps of a token."""

    hidden: int
    """Elements of a block's input."""
    vocabulary: int
    blocks: tuple[KeptOfToken, ...]


@dataclass(frozen=True, slots=True)
class Method:
    """How a training goes about its activations."""

    tokens: int = 2048
    """Of a micro-batch on one rank."""
    sequence: int = 2048
    checkpointing: bool = True
    """Whether blocks are recomputed in the backward (torch.utils.checkpoint)."""
    offload: str | None = None
    """Where inputs of recomputed blocks wait, as Config(offload_activations=...)."""
    batch_tile: int | None = None
    """Sequences that a block computes at once, as tiling.tile_batch_ has it; None for all."""
    loss_tiles: bool | str = False
    """Whether tiling.tile_loss_ replaces the logits; "auto": as Config(loss_tiles="auto")."""
    sequence_tiles: int | str | None = None
    """Slices of each MLP, as Config(sequence_tiles=...)."""
    activation_nbytes: int | None = None
    """Config(activation_memory=...), which decides what each block keeps, in the place of `checkpointing`."""
    sequence_parallel: int = 1
    """Ranks that share a sequence: `tokens` are then a part of the rows, and `sequence` is whole."""
    in_flight: int = 1
    """Micro-batches whose backward is to come at one time, as in a pipeline."""
    copies: int = 1
    """Ranks that hold copies of the inputs of recomputed blocks, a part each (tensor parallelism)."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes of one rank."""

    inputs_nbytes: int
    """Inputs of recomputed blocks, all of them, wherever they wait."""
    kept_nbytes: int
    """What waits for the backward on the device: those inputs, or all that blocks keep."""
    block_nbytes: int
    """One block's backward, beside that."""
    logits_nbytes: int
    """The loss, beside that."""
    peak_nbytes: int
    """At one time; see [Note: the peaks]."""
    narrow_logits_nbytes: int
    """Logits in the type that computes; 0 where the loss is computed without them."""
    leaving_nbytes: int = 0
    """Of the inputs, what waits in host memory or on NVMe."""
    on_nvme_nbytes: int = 0
    """Of that, what the budget of activations sends to NVMe."""
    decided: str = ""
    """What that budget decided, for people."""


@dataclass(frozen=True, slots=True)
class PeakMoment:
    """What is there at once where a rank computes, in bytes, beside its budgets."""

    what: str
    """What `beside_nbytes` are for."""
    in_use_nbytes: int
    """Units in use, and a gradient."""
    kept_nbytes: int
    """Of activations, for the backward."""
    beside_nbytes: int
    after_loss: bool = True
    """Whether gradients may wait in host memory then: those of the last step are applied before the loss."""

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.in_use_nbytes + self.kept_nbytes + self.beside_nbytes


def usage(
    model: Activations, method: Method, width: int, *, gpu: bool = False, tiers: InputTiers | None = None
) -> Usage:
    """Return what a model's activations take; width: bytes of an element that computes. tiers: where inputs
    can wait, by the budget of activations.

    Raises: ConfigError for a budget of activations that is too small, with the smallest that works.
    """
    sizes = _sizes(model, method, width, gpu=gpu)
    one_input, last_norm = sizes.one_input, sizes.tokens * model.hidden * (2 * width + 4)
    head = one_input + last_norm + sizes.logits
    narrow = 0 if sizes.loss_tiles else width * model.vocabulary * sizes.tokens
    if method.activation_nbytes is not None:
        step = _step(sizes, last_norm)
        plan = plan_activations(step, method.activation_nbytes, tiers or InputTiers())
        away = sum(place in (HOST, NVME) for place in plan.places)
        nvme = sum(place == NVME for place in plan.places)
        kept = sum(one.held_nbytes(place) for one, place in zip(step.blocks, plan.places, strict=True))
        again = sum(place != KEEP for place in plan.places)
        beside = plan.peak_nbytes - kept
        return Usage(
            *(again * one_input, kept, beside, round(head), plan.peak_nbytes, narrow),
            *(away * one_input, nvme * one_input, plan.reason),
        )
    waiting, part = len(sizes.blocks) * method.in_flight, -(-one_input // method.copies)
    inputs = part * waiting if method.checkpointing else 0
    if method.checkpointing:
        staying = min(waiting, _RETURNING) if method.offload else waiting
        held = float(part * staying)
        block = max(one + two for one, two in sizes.blocks) + one_input - part  # which is gathered
    else:
        held = sum(one for one, _ in sizes.blocks) * method.in_flight
        block = max(two for _, two in sizes.blocks)
    block += 2 * one_input  # the block's output, or its gradient, and that of its input
    leaving = max(0, inputs - round(held)) if method.offload else 0
    peak = round(held + max(block, head))
    return Usage(inputs, round(held), round(block), round(head), peak, narrow, leaving)


def kept_by_budget(model: Activations, method: Method, width: int, *, gpu: bool) -> tuple[bool, ...]:
    """Return which blocks the budget of activations keeps, where inputs have room elsewhere; without such a
    budget those that are not recomputed.
    """
    if method.activation_nbytes is None:
        return (not method.checkpointing,) * len(model.blocks)
    sizes = _sizes(model, method, width, gpu=gpu)
    step = _step(sizes, sizes.tokens * model.hidden * (2 * width + 4))
    if step.peak_nbytes([NVME] * len(step.blocks)) > method.activation_nbytes:
        return (False,) * len(model.blocks)
    tiers = InputTiers(sizes.one_input * len(step.blocks), nvme=True)
    return tuple(one == KEEP for one in plan_activations(step, method.activation_nbytes, tiers).places)


@dataclass(frozen=True, slots=True)
class _RankActivations:
    """Bytes of one rank's activations, by what they are for."""

    tokens: int
    one_input: int
    """Of a block."""
    blocks: tuple[tuple[float, float], ...]
    """What each keeps, and makes beside in its backward."""
    logits: float
    loss_tiles: bool


def _sizes(model: Activations, method: Method, width: int, *, gpu: bool) -> _RankActivations:
    sharers = method.sequence_parallel
    tokens, sequence = method.tokens, min(method.sequence, method.tokens * sharers)
    at_once = min(tokens, (method.batch_tile or tokens) * sequence // sharers)
    at_once = at_once if method.checkpointing or method.activation_nbytes is not None else tokens
    blocks = []
    for of_block in model.blocks:
        one = of_block.on(gpu=gpu).in_slices(_slices(of_block, method, at_once, width))
        blocks.append((one.nbytes(width, at_once, sequence), one.backward_nbytes(width, at_once, sequence)))
    loss_tiles = method.loss_tiles is True
    if method.loss_tiles == "auto" and method.activation_nbytes is not None:
        loss_tiles = loss_without_logits(tokens, model.vocabulary, method.activation_nbytes)
    logits = _logits_nbytes(model.vocabulary, tokens, loss_tiles=loss_tiles)
    return _RankActivations(tokens, width * model.hidden * tokens, tuple(blocks), logits, loss_tiles)


def _slices(one: KeptOfToken, method: Method, tokens: int, width: int) -> int:
    if isinstance(method.sequence_tiles, int):
        return min(method.sequence_tiles, tokens)
    if method.sequence_tiles is None or method.activation_nbytes is None:
        return 1
    nbytes = mlp_nbytes(tokens, round(one.mlp / 2), width)
    return slices_within(nbytes, tokens, method.activation_nbytes)


def _step(sizes: _RankActivations, last_norm: float) -> StepMemory:
    """Return what a first step would measure, but the time, which is taken to be the same for all blocks."""
    one_input = sizes.one_input
    blocks = tuple(
        BlockMemory(one_input, one_input, round(kept), round(beside) + 2 * one_input, 0.0)
        for kept, beside in sizes.blocks
    )
    return StepMemory(blocks, 0, round(last_norm) + one_input, round(sizes.logits))


def _logits_nbytes(vocabulary: int, tokens: int, *, loss_tiles: bool) -> float:
    whole = vocabulary * tokens
    if not loss_tiles:
        return LOGIT_NBYTES * whole
    part = min(4 * whole / _LOSS_TILES, 2 * _LOSS_TILE_NBYTES)
    return min(max(part, 4 * vocabulary * _LOSS_TILE_TOKENS), LOGIT_NBYTES * whole)


def peak_moments(
    in_use: Sequence[int], recomputed: Sequence[bool], used: Usage | None
) -> Iterator[PeakMoment]:
    """Return what is there at once while each stage computes. in_use: bytes of the units in use and a
    gradient, by stage; recomputed: whether a stage is. See [Note: the peaks].
    """
    if used is None:
        yield PeakMoment("", max(in_use), 0, 0)
        return
    for number, nbytes in enumerate(in_use):
        if number == len(in_use) - 1:
            tiled = not used.narrow_logits_nbytes  # the loss in tiles makes the head's gradient beside it
            kept, logits = used.kept_nbytes, used.logits_nbytes
            yield PeakMoment("logits and loss", nbytes if tiled else 0, kept, logits, after_loss=False)
            yield PeakMoment(
                "gradient of the logits", nbytes, kept, used.narrow_logits_nbytes, after_loss=False
            )
        elif number or recomputed[number]:
            yield PeakMoment("one block's backward", nbytes, used.kept_nbytes, used.block_nbytes)
        else:
            yield PeakMoment("embeddings", nbytes, 0, 0)
