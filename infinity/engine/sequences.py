"""sequence_parallel: which ranks share a model's sequences, beside those that share its parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from infinity.config.sequence_ranks import check_sequences
from infinity.engine.engine import Engine, engine_of
from infinity.errors import ConfigError
from infinity.ranks.group import Ranks, open_ranks
from infinity.ranks.groups import backend_of
from infinity.sequences.group import SequenceGroup
from infinity.sequences.parallel import SequenceParallel

_TIMEOUT_S = 600.0


def models_of_transformers(models: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the models of transformers in `models`, none of them in another one, the outermost first."""
    found: dict[nn.Module, None] = {}
    within: set[nn.Module] = set()
    for model in [one for root in models for one in root.modules()]:  # from the outermost
        if hasattr(model, "set_attn_implementation") and model not in within:
            found[model] = None
            within.update(model.modules())
    return list(found)


def sequence_parallel(
    model: nn.Module, group: Any = None, *, attention: str | None = None
) -> SequenceParallel:
    """Divide the sequences of a model of transformers among ranks (Ulysses): each rank computes on a part of
    the tokens, and in attention on a part of the heads with all tokens. No code of the model changes.

    model: built in Init, whose ranks are those of all sequences (data x sequence parallelism); or a plain
    model, whose gradients you reduce. group: the ranks that share a sequence: a group of torch.distributed, a
    DeviceMesh of one dimension such as mesh["sp"], or a number N: ranks 0 to N - 1 share one, the next N
    another. None: as Config(sequence_parallel=N) says, which needs no call. attention: what attends with a
    rank's heads, "sdpa" (with gpt-oss's sinks, too) or "flex_attention"; None: what the model has.

    Every rank calls it, and then the model with its part of each batch (infinity.SequenceParallelLoader, or
    `split`). `model(..., labels=...)` returns the mean over the whole sequence, the same on all its ranks.

    Raises: ConfigError for heads or ranks that cannot be divided; UnsupportedError for a model, or an
    attention, that cannot; RanksError for ranks that do not come.
    """
    engine = next((found for one in model.parameters() if (found := engine_of(one)) is not None), None)
    if group is None and engine is not None and engine.config.sequence_parallel > 1:
        group = engine.config.sequence_parallel
    if group is None:
        raise ConfigError(
            'sequence_parallel(model): name the ranks that share a sequence, as a group, mesh["sp"] or '
            "their number; or build the model with Config(sequence_parallel=...)"
        )
    ranks, data = _ranks(engine, group)
    if engine is not None:
        engine.ranks.closing.append(ranks.close)  # first: also where the model is refused
    try:
        return SequenceParallel(model, SequenceGroup(ranks), data, attention)
    except BaseException:
        if engine is None:
            ranks.close()
        raise


def _ranks(engine: Engine | None, group: Any) -> tuple[Ranks, tuple[int, int]]:
    """Return the ranks that share a sequence; its place among the sequences, and their number."""
    device, timeout_s = (
        ("cpu", _TIMEOUT_S) if engine is None else (engine.ranks.device, engine.config.timeout_s)
    )
    whole = open_ranks(None, device, timeout_s) if engine is None else engine.ranks
    if isinstance(group, int):
        size = group
        check_sequences(size, whole.size)
        place = whole.rank // size
        members = whole.members[place * size : (place + 1) * size]
        return Ranks(members, whole.rank % size, backend_of(device), timeout_s, device), (
            place,
            whole.size // size,
        )
    ranks = open_ranks(group, device, timeout_s)
    if not {*ranks.members} <= {*whole.members}:
        raise ConfigError(
            f"sequence_parallel: ranks {ranks.members} share a sequence, but the model's gradients are "
            f"summed over ranks {whole.members}. Build it in Init(process_group=...) with the ranks of all "
            "sequences, or without one"
        )
    firsts = sorted({int(one) for one in whole.each(str(ranks.members[0]).encode(), "find the sequences")})
    return ranks, (firsts.index(ranks.members[0]), len(firsts))
