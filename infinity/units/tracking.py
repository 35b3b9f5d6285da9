"""Objects of users whose state is captured with each committed step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

DELAYED = "delayed"
"""The name under which an optimizer tracks the gradients that update="delayed" keeps."""


class Stateful(Protocol):
    """A scheduler, a data loader, a scaler: anything with plain state."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and tensors."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take them."""


class Tracking:
    """The part of an optimizer that keeps what else belongs to a step."""

    tracked: Mapping[str, Stateful] = MappingProxyType({})
    """By name."""
    _begun: set[int]

    def begin(self, parameters: Iterable[object]) -> None:
        """Let the moments of these parameters count from now on, wherever they came from."""
        self._begun.update(map(id, parameters))

    def track(self, *, loader: Stateful | None = None, **others: Stateful) -> None:
        """Let a durable run commit these objects' state with each step, and infinity.resume put it back.

        loader: what knows the data's position, such as torchdata's StatefulDataLoader: its state as it is
        when step() is called. others: by any name, such as scheduler=...: their state as it is when the next
        forward begins. Each has state_dict() and load_state_dict(); the state is plain values (None, bool,
        int, float, str, list, tuple, dict) and tensors, since nothing is ever unpickled. Call it before
        infinity.resume.

        Raises: TypeError for an object without these two methods.
        """
        given = {**({} if loader is None else {"loader": loader}), **others}
        for name, one in given.items():
            if not all(callable(getattr(one, method, None)) for method in ("state_dict", "load_state_dict")):
                raise TypeError(
                    f"track({name}=...): a {type(one).__name__} has no state_dict() and load_state_dict(). "
                    "Give an object that has both, such as torchdata's StatefulDataLoader."
                )
        self.tracked = {**self.tracked, **given}

    def track_what(self, earlier: Tracking) -> None:
        """Track what an earlier optimizer tracked as well, but for what was its own, and under names that are
        taken here.
        """
        of_user = {name: one for name, one in earlier.tracked.items() if name != DELAYED}
        self.tracked = {**of_user, **self.tracked}
