"""The state of a step outside the records, captured for commits and restored on resume.

[Note: when state is captured]
The data loader's position is captured in step(), before the loop reads the next batch. Other tracked objects
and the options of param groups may still change after step() (by a scheduler), and are captured when the next
forward of the training begins. Generators are captured at both moments. resume restores the first, so that
what the loop draws before its next forward (a new epoch's order) is drawn again; the second is restored when
that forward begins, so that the model draws the same whatever the loop has drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

import torch
from torch import nn

from infinity.checkpoint import generators
from infinity.checkpoint.inventory import Inventory
from infinity.checkpoint.save_load import optimizer_out
from infinity.durable.commit import PlainTensor
from infinity.errors import UnsupportedError
from infinity.storage.manifest import decode, encode
from infinity.tensors import as_bytes, empty, local, name_of_dtype
from infinity.units.tracking import Stateful


class Training:
    """The state of a model and optimizer in training, for the commits of a durable run; it implements
    durable.committer.TrainingStateSource.
    """

    def __init__(self, inventory: Inventory, model: nn.Module) -> None:
        """Find the modules that hold the model's buffers and ordinary parameters."""
        if inventory.optimizer is None:
            raise UnsupportedError("resume: a durable run needs its optimizer, got None")
        self.inventory, self.optimizer = inventory, inventory.optimizer
        self._plain: list[tuple[str, nn.Module, str]] = []
        self._rng_forward: Mapping[str, Any] | None = None
        for prefix, module in model.named_modules():
            for name in (*module._parameters, *module._buffers):  # noqa: SLF001 - an assignment replaces them
                full = f"{prefix}.{name}" if prefix else name
                if full in inventory.plain:
                    self._plain.append((full, module, name))

    @property
    def tracked(self) -> Mapping[str, Stateful]:
        """The tracked objects, by name."""
        return self.optimizer.tracked

    def plain(self) -> dict[str, torch.Tensor]:
        """Return the model's buffers and ordinary parameters, as they are now."""
        return {name: getattr(module, of) for name, module, of in self._plain}

    def at_step(self) -> Mapping[str, Any]:
        """See durable.TrainingStateSource."""
        engine = self.inventory.engine
        if any(one is not self.optimizer for one in engine.optimizers):
            raise UnsupportedError(
                "durable: a second optimizer has parameters of this model, but a commit holds only one. Give "
                "all parameters to one optimizer, in param groups."
            )
        tensors: dict[str, torch.Tensor] = {}
        loader = self._encoded("loader", tensors) if "loader" in self.tracked else None
        return {"rng": generators.capture(), "loader": loader, "tensors": tensors}

    def at_forward(
        self, said: Mapping[str, Any], *, begun: bool
    ) -> tuple[dict[str, Any], dict[str, PlainTensor]]:
        """See durable.TrainingStateSource."""
        tensors: dict[str, torch.Tensor] = dict(said["tensors"])
        tracked = {name: self._encoded(name, tensors) for name in self.tracked if name != "loader"}
        if "loader" in self.tracked:
            tracked["loader"] = said["loader"]
        everything = {
            "rng": said["rng"],
            "rng_forward": generators.capture() if begun else None,
            "tracked": tracked,
            "place": list(astuple(self.inventory.place)),
            "optimizer": optimizer_out(self.inventory, _none),
        }
        values = {f"tracked.{key}": _taken(one, key) for key, one in tensors.items()}
        values.update({f"plain.{name}": _taken(local(one), name) for name, one in self.plain().items()})
        return everything, values

    def succeed(self, earlier: Any, later: Any) -> None:
        """See durable.TrainingStateSource. Commits get the later optimizer's state, and the objects that the
        earlier one tracked.
        """
        if earlier is self.optimizer:
            later.track_what(earlier)
            self.optimizer = self.inventory.optimizer = later

    def _encoded(self, name: str, tensors: dict[str, torch.Tensor]) -> Any:
        def keep(value: Any, what: str) -> str | None:
            if not isinstance(value, torch.Tensor):
                return None
            name_of_dtype(value, what)
            key = f"{name}.{len(tensors)}"
            tensors[key] = value.detach().clone()
            return key

        return encode(self.tracked[name].state_dict(), f"{name}.state_dict()", keep)

    def restore(self, said: Mapping[str, Any], tensors: Mapping[str, PlainTensor]) -> None:
        """Restore what was captured; generators as they were in step()."""
        with torch.no_grad():
            for name, tensor in self.plain().items():
                local(tensor).copy_(_given(tensors[f"plain.{name}"]))
        for name, one in self.tracked.items():
            one.load_state_dict(decode(said["tracked"][name], lambda key: _given(tensors[f"tracked.{key}"])))
        generators.restore(said["rng"])
        self._rng_forward = said["rng_forward"]

    def restore_at_forward(self) -> None:
        """See durable.TrainingStateSource and [Note: when state is captured]."""
        if self._rng_forward is not None:
            generators.restore(self._rng_forward)
            self._rng_forward = None


def _none(_value: Any, _what: str) -> None:
    return None


def _taken(tensor: torch.Tensor, what: str) -> PlainTensor:
    plain = tensor.detach().to("cpu").contiguous()
    return PlainTensor(name_of_dtype(plain, what), tuple(plain.shape), bytes(as_bytes(plain)))


def _given(plain: PlainTensor) -> torch.Tensor:
    tensor = empty(plain.dtype, plain.shape)
    as_bytes(tensor)[:] = plain.values
    return tensor
