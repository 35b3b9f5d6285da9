"""TorchScript inside Init: modules with parameters are refused, since compiled code reads them where nothing
can bring their values; those without run as ever.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from infinity.errors import UnsupportedError


@contextlib.contextmanager
def refusing_scripts() -> Iterator[None]:
    """Have torch.jit.script and trace refuse modules with parameters, for the length of the `with`."""
    recursive: Any = torch.jit._recursive
    create = recursive.create_script_module

    def checked(nn_module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        refuse_script(nn_module)
        return create(nn_module, *args, **kwargs)

    recursive.create_script_module = checked
    try:
        yield
    finally:
        recursive.create_script_module = create


def refuse_script(module: nn.Module) -> None:
    """Refuse a module that is, or is to be, compiled by TorchScript, if it has parameters.

    Raises: UnsupportedError.
    """
    names = [name for name, _ in module.named_parameters()]
    if names:
        raise UnsupportedError(
            f"torch.jit: a module with {len(names)} parameters ({names[0]}, …) inside Init: what TorchScript "
            "has compiled reads them where Infinity cannot bring their values. Script functions and modules "
            "without parameters there, and put a scripted module into the model after the `with`: its "
            "parameters then stay in memory."
        )
