"""What ranks send each other in a step, and over which links: within a machine, or between machines. Pure.

[Note: neighbours]
Ranks are numbered so that those with most to say are neighbours: tensor parallelism first, then those that
share a sequence, then those with other data, and the stages of a pipeline last, as a DeviceMesh of
("pp", "dp", "sp", "tp") has them. With so many ranks on a machine, a group lies within one, or has one rank
of each, or both.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from infinity.planning.exchange import Exchanges, Links
from infinity.planning.expert_tokens import token_traffic
from infinity.planning.outline import Outline
from infinity.planning.setting import Setting

WITHIN, BETWEEN, BOTH = "within machines", "between machines", "within and between machines"


@dataclass(frozen=True, slots=True)
class Crossing:
    """What a rank sends in a step to the others of a group."""

    by: str
    """Which parallelism: data, tensor, sequence, experts or pipeline."""
    what: str
    ranks: int
    """In the group."""
    nbytes: int
    """At most."""
    place: str
    """WITHIN, BETWEEN or BOTH."""
    between_nbytes: int = 0
    """Of these bytes, that go to other machines."""

    def seconds(self, near: float, far: float) -> float:
        """Return how long they take over links of so many bytes a second, within a machine and between
        machines.
        """
        return (self.nbytes - self.between_nbytes) / near + self.between_nbytes / far


def place_of(size: int, stride: int, local: int) -> str:
    """Return where a group of `size` ranks lies, each `stride` ranks from the next, `local` on a machine."""
    if size * stride <= local and local % (size * stride) == 0:
        return WITHIN
    return BETWEEN if stride % local == 0 else BOTH


def crossings(outline: Outline, setting: Setting) -> tuple[Crossing, ...]:
    """Return what the ranks send, by kind of parallelism. outline: what one rank has."""
    tensor, sharers, data = setting.tensor_parallel, setting.method.sequence_parallel, setting.data_ranks
    weights = _of_weights(outline, setting)
    groups: dict[str, tuple[int, int, str, float]] = {
        "tensor": (tensor, 1, "parts of sums of each layer", _of_layers(outline, setting)),
        "sequence": (sharers, tensor, "tokens for heads, in attention", _of_sequences(outline, setting)),
        "experts": (setting.expert_parallel, tensor, "tokens to their experts", _of_tokens(outline, setting)),
        "data": (data, tensor, "weights and gradients", weights.nbytes),
        "pipeline": (
            setting.pipeline_parallel,
            tensor * data,
            "activations, and gradients of them, to neighbours",
            _of_stages(outline, setting),
        ),
    }
    found = []
    for by, (size, stride, what, nbytes) in groups.items():
        place = place_of(size, stride, setting.local_ranks)
        crossing = 0 if place == WITHIN else round(nbytes)
        if by == "data" and place == BOTH and setting.device_nbytes is None:
            crossing = weights.between
        if size > 1:
            found.append(Crossing(by, what, size, round(nbytes), place, crossing))
    return tuple(found)


def _row_nbytes(outline: Outline, setting: Setting) -> float:
    """Return the bytes of a micro-batch's hidden states on one rank; 0 where the hidden size is not known."""
    hidden = outline.activations.hidden if outline.activations is not None else 0
    return hidden * setting.method.tokens * (4 if setting.dtype == "fp32" else 2)


def _passes(outline: Outline, setting: Setting) -> int:
    """Return how often a step goes through a block: forward, backward, and once more where it recomputes."""
    blocks = len(outline.activations.blocks) if outline.activations is not None else 0
    again = setting.method.checkpointing or setting.method.activation_nbytes is not None
    return blocks * (3 if again else 2) * setting.micro_batches


def _of_layers(outline: Outline, setting: Setting) -> float:
    """Two sums of hidden states in each block, one of the embeddings, and the logits, put together; where
    ranks keep parts of the inputs of blocks, these too.
    """
    ranks, row = setting.tensor_parallel, _row_nbytes(outline, setting)
    others = 1 - 1 / ranks
    summed = 2 * _passes(outline, setting) + 2 * setting.micro_batches
    vocabulary = outline.activations.vocabulary if outline.activations is not None else 0
    width = 4 if setting.dtype == "fp32" else 2
    logits = 2 * setting.micro_batches * setting.method.tokens * vocabulary * width
    blocks = len(outline.activations.blocks) if outline.activations is not None else 0
    gathered = row * blocks * setting.micro_batches if setting.method.copies > 1 else 0
    return others * (2 * row * summed + logits + gathered)


def _of_sequences(outline: Outline, setting: Setting) -> float:
    """Queries, keys and values go to the ranks with their heads, and what is attended comes back."""
    others = 1 - 1 / setting.method.sequence_parallel
    return 4 * others * _row_nbytes(outline, setting) * _passes(outline, setting)


def _of_tokens(outline: Outline, setting: Setting) -> float:
    sent = token_traffic(outline, setting) if setting.expert_parallel > 1 else None
    return sent.to_others_nbytes if sent is not None else 0


def _of_weights(outline: Outline, setting: Setting) -> Links:
    """Each use gathers a unit, from second parts where these have its values; each gradient is summed."""
    width = 4 if setting.dtype == "fp32" else 2
    script = outline.script(micro_batches=setting.micro_batches)
    uses = Counter(act.unit for act in script if act.verb == "use")
    total = Links()
    for unit, part in enumerate(outline.parts):
        holders = setting.holders(part)
        if part.elsewhere or part.idle or holders == 1 or not uses[unit]:
            continue
        of_unit, share = Exchanges(setting, width, holders), -(-part.numel // holders)
        again, sums = of_unit.gathered_again(share), 1 if setting.one_bit else setting.micro_batches
        first = uses[unit] if again is None else int(part.trainable)
        sent = of_unit.gathered(share).times(first)
        sent += (again or Links()).times(uses[unit] - first)
        sent += of_unit.reduced(share).times(sums if part.trainable else 0)
        total += sent.times(part.share)
    return total


def _of_stages(outline: Outline, setting: Setting) -> float:
    """A stage between two others sends activations on, and gradients back."""
    ways = min(setting.pipeline_parallel - 1, 2)
    return ways * _row_nbytes(outline, setting) * setting.micro_batches
