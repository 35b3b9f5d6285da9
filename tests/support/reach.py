"""What nothing will ever collect reaches: a running thread, and weakref's registry of finalizers."""

import gc
import importlib.machinery
import sys
import threading
import time
import types
import weakref

import pytest
from torch import nn

from infinity.engine.engine import Engine

OURS = (Engine, nn.Module, BaseException)
"""What they may not reach; see the note in infinity/ending.py."""

BEYOND = (type, types.ModuleType, importlib.machinery.ModuleSpec, pytest.Collector, pytest.Item)
"""Where the search ends: modules, and pytest, whose reports of failed tests hold those tests' errors."""


def _roots():
    for one in list(weakref.finalize._registry.values()):
        yield f"the finalizer {getattr(one.func, '__qualname__', one.func)}", [one.func, one.args, one.kwargs]
    here, frames = threading.get_ident(), sys._current_frames()
    for thread in threading.enumerate():
        frame = frames.get(thread.ident)
        while thread.ident != here and frame is not None:
            yield f"{thread.name} in {frame.f_code.co_name}", list(frame.f_locals.values())
            frame = frame.f_back


def _referents(one):
    if isinstance(one, BEYOND):
        return []
    if isinstance(one, types.FunctionType):  # not its module
        return [one.__closure__, one.__defaults__, one.__kwdefaults__]
    return gc.get_referents(one)


def reached():
    """Return how each engine, module or error is reached, once each: types, the root first."""
    seen, found = {}, []
    for name, roots in _roots():
        ways = [(root, (name,)) for root in roots]
        while ways:
            one, way = ways.pop()
            if id(one) in seen:
                continue
            seen[id(one)] = one  # alive, so that its id stays its own
            way = (*way, type(one).__qualname__)
            if isinstance(one, OURS):
                found.append(" > ".join(way))
            else:
                ways += [(referent, way) for referent in _referents(one)]
    return found


def collected(over):
    """Collect until it is over: a pass that is under way keeps what it works with, on a busy disk longer."""
    for _ in range(600):
        gc.collect()
        if over():
            return True
        time.sleep(0.05)
    return False
