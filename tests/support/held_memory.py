"""Counts the bytes that a process holds: storages of torch on threads that compute, and what the engine maps,
on any thread. Of a DTensor the local tensors count, and what collectives make for it.

What an operation allocates and frees inside itself is not seen.
"""

import threading
import weakref

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from allocations import Allocations
from infinity.gradients.grad_tensor import Thin
from infinity.storage.memory import Arena

_OF_LOCAL = (DTensor, AsyncCollectiveTensor, Thin)


class HeldMemory(Allocations):
    """Memory that comes into being inside the `with`: live, at its peak, and the largest piece of it."""

    def __init__(self):
        super().__init__()
        self.largest_nbytes = 0
        self._lock = threading.RLock()  # a finalizer may run at any moment, here too
        self._arenas = weakref.WeakSet()

    def __enter__(self):
        self._map = mapped = Arena.__init__

        def counted(arena, nbytes, **where):
            mapped(arena, nbytes, **where)
            self._is_mapped(arena, nbytes)

        Arena.__init__ = counted
        return super().__enter__()

    def __exit__(self, *error):
        Arena.__init__ = self._map
        return super().__exit__(*error)

    def begin(self):
        """Look for the peak, and the largest piece, from now on."""
        with self._lock:
            self.peak_nbytes, self.largest_nbytes = self.live_nbytes, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(one, _OF_LOCAL) for one in types):
            return NotImplemented  # what these do with plain tensors comes here as well
        result, before = func(*args, **(kwargs or {})), set()
        for one in pytree.tree_leaves((args, kwargs)):
            if isinstance(one, torch.Tensor):
                before.add(one.untyped_storage()._cdata)
        for one in pytree.tree_leaves(result):
            if (
                isinstance(one, torch.Tensor)
                and not isinstance(one, (*_OF_LOCAL, FakeTensor))
                and one.device.type == "cpu"
            ):
                self._see(one.untyped_storage(), before)
        return result

    def _is_mapped(self, arena, nbytes):
        with self._lock:
            self._arenas.add(arena)
            self.live_nbytes += nbytes
            self._note(nbytes)
        weakref.finalize(arena, self._unmapped, nbytes).atexit = False

    def _unmapped(self, nbytes):
        with self._lock:
            self.live_nbytes -= nbytes

    def _see(self, storage, before):
        at, nbytes = storage.data_ptr(), storage.nbytes()
        with self._lock:
            if any(one.address <= at < one.address + one.nbytes for one in list(self._arenas)):
                return
            known = len(self._known)
            super()._see(storage, before)
            if len(self._known) > known:
                self._note(nbytes)

    def _note(self, nbytes):
        self.peak_nbytes = max(self.peak_nbytes, self.live_nbytes)
        self.largest_nbytes = max(self.largest_nbytes, nbytes)

    def _gone(self, key):
        with self._lock:
            super()._gone(key)
