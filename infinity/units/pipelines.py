"""What torch.distributed.pipelining does with parameters between its forwards and backwards, told by who
calls.

[Note: zero bubbles]
Schedules without bubbles compute the gradients of a stage's inputs first, and those of its weights later,
both
by torch.autograd.grad. So autograd accumulates nothing, and calls no hook: torch's pipelining assigns a
gradient
that is the first to `p.grad`, and adds the others to it, by hand. Both are taken in as what autograd
accumulates:
the first becomes an offloaded gradient (`Arrivals.take`), others are added to it in fp32
(gradients/grad_tensor.py).
Before, it asks each parameter for a view, which it never reads, to find its node of the graph.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

_NAME = "torch.distributed.pipelining"
_BACKWARD, _STAGE = f"{_NAME}._backward", f"{_NAME}.stage"
_FORWARD = "forward_maybe_with_nosync"


def looks_for_node(frame: FrameType) -> bool:
    """Whether this code wants a view of a parameter for its node of the graph alone."""
    return _is_at(frame, "_get_grad_fn_or_grad_acc")


def brings_gradients(frame: FrameType) -> bool:
    """Whether this code assigns, or adds, gradients of weights that it has computed by itself."""
    return _is_at(frame, "stage_backward_weight")


def stage_that_runs() -> Any:
    """Return the PipelineStage whose forward calls this; None where there is none."""
    if _STAGE not in sys.modules:
        return None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == _FORWARD and _is_of(frame, _STAGE):
            return frame.f_locals["self"]
        frame = frame.f_back
    return None


def _is_at(frame: FrameType, name: str) -> bool:
    """Whether the function `name` of torch's pipelining has called torch, through whatever function modes are
    entered, as set_default_device enters one.
    """
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_name == name and _is_of(frame, _BACKWARD)


def _is_of(frame: FrameType, module: str) -> bool:
    return frame.f_globals.get("__name__") == module
