"""The options that torch's optimizers have and ours do not: taken where they change nothing, else refused."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch.optim import Optimizer

from infinity.errors import UnsupportedError, meant
from infinity.sizes import format_size

IMPLEMENTATION = frozenset({"foreach", "fused"})
"""They choose among implementations of torch: a step here is one pass over the records anyway."""
_CURES = {
    "amsgrad": "leave it out",
    "capturable": "steps here are no work of CUDA graphs; leave it out",
    "differentiable": "steps here leave no graph to go back through; leave it out",
    "maximize": "leave it out, and call backward on the negative of what is to be maximized",
}
MISSING = frozenset(_CURES)
"""They change what a step does; False is taken."""
DECOUPLED = "decoupled_weight_decay"
"""What makes AdamW of torch's Adam."""


def settle(kind: type, torchs: type[Optimizer] | None, options: Mapping[str, Any], params: Any) -> None:
    """See that `options`, which are none of `kind`'s own, change nothing.

    torchs: the optimizer of torch whose place it takes. params: what it was given to optimize.

    Raises: UnsupportedError for one that does; TypeError for one that torch's does not have either, with the
    name that may have been meant.
    """
    taken = set(inspect.signature(torchs.__init__).parameters) if torchs is not None else set()
    taken &= IMPLEMENTATION | MISSING | {DECOUPLED}
    for name in options:
        if name not in taken:
            own = inspect.signature(kind.__init__).parameters  # type: ignore[misc]
            known = [one for one in own if one not in ("self", "options")] + sorted(taken)
            raise TypeError(f"{kind.__name__} has no option {name!r}{meant(name, known)}")
    if options.get(DECOUPLED):
        raise UnsupportedError(f"{kind.__name__}({DECOUPLED}=True): that is infinity.AdamW")
    _refuse(kind.__name__, options, params)


def check_group(name: str, own: Iterable[str], group: Mapping[str, Any]) -> None:
    """See that a param group asks for no option that the optimizer, with options of its `own`, does not have.

    Raises: UnsupportedError.
    """
    ours = frozenset(own)
    asked = {option: value for option, value in group.items() if option in MISSING - ours}
    _refuse(name, asked, group["params"])


def _refuse(name: str, options: Mapping[str, Any], params: Any) -> None:
    asked = sorted(option for option in options if option in MISSING and options[option])
    if not asked:
        return
    cost = ""
    if asked[0] == "amsgrad":
        nbytes = 4 * _numel(params)
        cost = (
            "it keeps a third state of 4 bytes per parameter, the maximum of exp_avg_sq"
            f"{f' ({format_size(nbytes)} more)' * bool(nbytes)}, and a record has room for two; "
        )
    raise UnsupportedError(f"{name}({asked[0]}=True) is not supported: {cost}{_CURES[asked[0]]}")


def _numel(params: Any) -> int:
    """Count the elements of parameters, or groups of them; 0 for what can be gone through only once."""
    if not isinstance(params, list | tuple):
        return 0
    total = 0
    for one in params:
        found = one["params"] if isinstance(one, dict) else one
        total += _numel(found) if isinstance(found, list | tuple) else getattr(found, "numel", int)()
    return total
