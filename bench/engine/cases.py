"""The cases of `infinity bench step`: contestants, numbers of tokens, settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from infinity.bench.engine import rival
from infinity.bench.engine.runs import parameter_count, settings_of
from infinity.errors import ConfigError

ALL, EQUAL = "all", "deepspeed"
"""Budgets given as words: enough for everything; the memory of DeepSpeed's run in the same round."""
PEERS = {"deepspeed": ("deepspeed",), "torch": ("plain", "plain_kernels")}
"""The choices of --peer, and their kinds in contestant.py."""
NAMES = {
    "forward_backward": "forward and backward alone",
    "beside_updates": "forward and backward beside updates",
    "deepspeed": "DeepSpeed NVMe",
    "plain": "PyTorch",
    "plain_kernels": "PyTorch, same kernels",
}
STATE_AND_GRADIENTS = 16
"""Bytes per parameter: 12 of exact state, and gradients at their widest."""
ROOM = 1 << 30
"""Additional bytes for transfers in a budget that holds everything."""


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table."""

    kind: str
    """A key of contestant.KINDS."""
    tokens: int
    budget: str = ""
    """Infinity's budget: a size as it was typed, ALL or EQUAL."""
    update: str = ""
    state_dtype: str = ""

    @property
    def name(self) -> str:
        """Its name, without the tokens."""
        if self.kind != "infinity":
            return NAMES[self.kind]
        budget = "DeepSpeed's memory" if self.budget == EQUAL else self.budget
        return f"Infinity, {budget}, {self.update}, {self.state_dtype} state"

    def settings(self, model: str, rival_nbytes: int | None, micro_batches: int = 1) -> dict[str, Any]:
        """Return the settings of its kind. rival_nbytes: DeepSpeed's memory, for a budget of EQUAL."""
        if self.kind == "deepspeed":
            return rival.settings(model, micro_batches)
        if self.kind != "infinity":
            return {}
        budget: int | str = self.budget
        if self.budget == ALL:
            budget = STATE_AND_GRADIENTS * parameter_count(model) + ROOM
        elif self.budget == EQUAL:
            if rival_nbytes is None:
                raise ConfigError(f'the budget "{EQUAL}" is the memory of DeepSpeed, which did not run')
            budget = rival_nbytes
        return settings_of(budget, self.update, self.state_dtype)


def cases(
    tokens: Sequence[int],
    budgets: Sequence[str],
    updates: Sequence[str],
    state_dtypes: Sequence[str],
    peers: Sequence[str],
    micro_batches: int = 1,
) -> list[Case]:
    """List all cases in the order of a round.

    For each number of tokens: computing alone, which the floor needs; DeepSpeed, whose memory may be a
    budget; computing beside updates, which a forecast needs (only for steps of one micro-batch); then
    Infinity.
    """
    found = []
    for each in tokens:
        found.append(Case("forward_backward", each))
        for peer in sorted(set(peers)):  # DeepSpeed before torch
            found += [Case(kind, each) for kind in PEERS[peer]]
        if micro_batches == 1:
            found.append(Case("beside_updates", each))
        found += [
            Case("infinity", each, budget, update, state_dtype)
            for budget in budgets
            for update in updates
            for state_dtype in state_dtypes
        ]
    return list(dict.fromkeys(found))


def chosen(entries: Sequence[Case], only: Sequence[str]) -> list[Case]:
    """Return the cases whose names contain one of `only` (empty: all), and those that they need: where
    computing beside updates is not among them, there is no forecast.

    Raises: ConfigError for a text that no name contains, and for a case whose requirements are left out.
    """
    for text in only:
        if not any(text.lower() in one.name.lower() for one in entries):
            names = ", ".join(dict.fromkeys(f'"{one.name}"' for one in entries))
            raise ConfigError(f"--only {text!r} is in no name here. They are: {names}")
    taken = [
        one
        for one in entries
        if not only
        or one.kind == "forward_backward"
        or any(text.lower() in one.name.lower() for text in only)
    ]
    if any(one.budget == EQUAL for one in taken) and all(one.kind != "deepspeed" for one in taken):
        raise ConfigError(
            f"--host-memory {EQUAL} is what DeepSpeed takes: add --peer deepspeed, and its name to --only"
        )
    return taken
