"""Counts the bytes of tensor storages, live and at their peak, by watching every operation's results.

What an operation allocates and frees inside itself is not seen.
"""

import weakref

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Allocations(TorchDispatchMode):
    """Storages that come into being inside the `with`."""

    def __init__(self):
        super().__init__()
        self.live_nbytes = self.peak_nbytes = 0
        self._known = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {
            one.untyped_storage()._cdata
            for one in pytree.tree_leaves((args, kwargs))
            if isinstance(one, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for one in pytree.tree_leaves(result):
            if isinstance(one, torch.Tensor) and one.device.type == "cpu":
                self._see(one.untyped_storage(), before)
        return result

    def _see(self, storage, before):
        key = storage._cdata
        if key in self._known or key in before:
            return
        nbytes = storage.nbytes()
        self._known[key] = nbytes
        self.live_nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.live_nbytes)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key):
        self.live_nbytes -= self._known.pop(key)
