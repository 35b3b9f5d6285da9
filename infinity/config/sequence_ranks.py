"""How many ranks may share a sequence, or divide experts among them. Pure."""

from __future__ import annotations

from typing import Any

from infinity.errors import ConfigError


def check_sequences(size: Any, ranks: int) -> None:
    """See that `ranks` ranks can be divided into sequences of `size` ranks.

    Raises: ConfigError, with the numbers that work.
    """
    if not isinstance(size, int) or size < 1 or ranks % size:
        raise ConfigError(
            f"sequence_parallel={size}: {ranks} ranks cannot be divided into sequences of {size} ranks each. "
            f"Of {ranks} ranks, {_divisors(ranks)} may share a sequence"
        )


def check_data(size: Any, sequences: int) -> None:
    """See that a file's data_parallel_size is the number of sequences that are trained at once.

    Raises: ConfigError, with both.
    """
    if size not in (None, "auto", sequences):
        raise ConfigError(
            f"data_parallel_size={size}, but the ranks train {sequences} sequences at once; leave it out"
        )


def check_expert_ranks(size: int, ranks: int) -> None:
    """See that `ranks` ranks can be divided into groups of `size` that have all experts.

    Raises: ConfigError, with the numbers that work.
    """
    if ranks % size:
        raise ConfigError(
            f"expert_parallel={size}: {ranks} ranks cannot be divided into groups of {size} that have all "
            f"experts between them. Of {ranks} ranks, {_divisors(ranks)} may divide experts"
        )


def check_experts(count: int, size: int, name: str) -> None:
    """See that `size` ranks can have equal parts of the experts of a stack.

    Raises: ConfigError, with the numbers that work.
    """
    if count % size:
        raise ConfigError(
            f"expert_parallel={size}: the {count} experts of {name} cannot be divided into equal parts for "
            f"{size} ranks. Of {count} experts, {_divisors(count)} ranks may have equal parts"
        )


def _divisors(number: int) -> str:
    return ", ".join(str(one) for one in range(1, number + 1) if number % one == 0)
