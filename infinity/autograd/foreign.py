"""Parameters that were not built in Init and are trained beside those that were: by optimizers of torch."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import nn
from torch.nn.parallel import DistributedDataParallel

logger = logging.getLogger("infinity")


class ForeignParameters:
    """With several ranks, warns once of trainable parameters that were not built in Init: nothing but
    DistributedDataParallel reduces their gradients, and without it the ranks' models drift apart.
    """

    def __init__(self, keeps: Callable[[nn.Parameter], bool]) -> None:
        """keeps: whether a parameter was built in Init."""
        self._keeps = keeps
        self._asked = False

    def look(self, module: nn.Module) -> None:
        """Look at the module whose forward begins."""
        if self._asked:
            return
        self._asked = True
        wrapped = DistributedDataParallel._get_active_ddp_module() is not None  # noqa: SLF001 - as torch.compile asks
        named = () if wrapped else module.named_parameters()
        names = [name for name, one in named if one.requires_grad and not self._keeps(one)]
        if names:
            logger.warning(
                "%d trainable parameters of %s were not built inside Init (%s, …). On several ranks nothing "
                "reduces their gradients: each rank trains its own. Build them inside Init "
                "(peft.get_peft_model, too), wrap the model in DistributedDataParallel, or reduce them.",
                len(names),
                type(module).__name__,
                names[0],
            )


class ForeignSteps:
    """Steps that no optimizer of ours decides, as of adapters beside weights that are all frozen: a forward
    that follows a backward begins the next one. So uses of these weights are planned, and the weights placed,
    too. Not in durable runs, which commit steps of our optimizers.
    """

    def __init__(self, close: Callable[[], None], foreign: Callable[[], bool]) -> None:
        """close: called when a step is over, if it is `foreign` then."""
        self._close, self._foreign = close, foreign
        self._went_back = False

    def backward_ended(self) -> None:
        """Note that a backward is over."""
        self._went_back = True

    def forward_began(self, _module: object) -> None:
        """Close the step, if there was a backward in it."""
        went_back, self._went_back = self._went_back, False
        if went_back and self._foreign():
            self._close()
