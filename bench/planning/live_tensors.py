"""Counts the bytes of tensors that are alive, as operations make them and references go."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveTensors(TorchDispatchMode):
    """Counts storages that operations make while it is entered."""

    def __init__(self, known: Iterable[Any]) -> None:
        """known: tensors that are not counted; nor are gradients of these, which have their shapes."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = self.peak_nbytes = self.wide_nbytes = 0
        """Now; at most since `begin_peak`; and those of elements of 4 bytes or more, now."""
        leaves = [one for one in tree_leaves(list(known)) if isinstance(one, torch.Tensor)]
        self._shapes = {tuple(sorted(one.shape)) for one in leaves if isinstance(one, torch.nn.Parameter)}
        self._seen: dict[int, Any] = {one.untyped_storage()._cdata: None for one in leaves}

    def begin_peak(self) -> None:
        """Look for the peak from now on."""
        self.peak_nbytes = self.nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do the operation, and count what it makes."""
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if not isinstance(one, torch.Tensor) or one.device.type == "meta":  # that takes no memory
                continue
            if tuple(sorted(one.shape)) not in self._shapes:
                self._count(one.untyped_storage(), wide=one.element_size() >= 4)
        return result

    def _count(self, storage: torch.UntypedStorage, *, wide: bool) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._seen:
            return

        def gone(_: object) -> None:
            if self._seen.pop(key, None) is not None:
                self._add(-nbytes, wide=wide)

        self._seen[key] = weakref.ref(storage, gone)
        self._add(nbytes, wide=wide)
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)

    def _add(self, nbytes: int, *, wide: bool) -> None:
        self.nbytes += nbytes
        self.wide_nbytes += nbytes if wide else 0
