"""The public optimizers: torch's signatures, followed by Infinity's options.

All take torch's param groups, and max_norm, update, seed and speculate as OffloadedOptimizer. Options that
only choose among torch's implementations (foreach, fused) are accepted and have no effect; amsgrad, maximize,
capturable and differentiable are accepted if False.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from infinity.engine.engine import Engine
from infinity.optim.base import OffloadedOptimizer, Speculate, When
from infinity.optim.delayed import DELAYED_AFTER
from infinity.records import update_rules as recipes
from infinity.tensors import local, spread_as
from infinity.units.optimizer_options import settle


class AdamW(OffloadedOptimizer):
    """AdamW with decoupled weight decay, on parameters built inside `with infinity.Init(...)`.

    params, lr, betas, eps, weight_decay: as torch.optim.AdamW, per group too. max_norm: clip the global
    gradient norm, in fp32, inside the update (leave it None if you call torch.nn.utils.clip_grad_norm_).
    update: "forward", "backward", "auto" or "delayed", the last from `delayed_after` steps on; see [Note:
    when an update happens] in optim/base.py. seed: of the random bits that round the moments of
    Config(state_dtype="bf16", "int8" or "int4"), and masters in 24 bits; the same seed gives the same bits.
    speculate: "auto" or True makes updates in the backward as if nothing were clipped, and lets them count
    where step() decides the same; that takes as much of the disk again as the records do. "auto" does so
    where it is faster, and where twice that is free; see the same note.

    Raises: ValueError for settings out of range and for parameters that were not built in Init; with
    speculate=True UnsupportedError where no update can be made so, and aio.StorageFullError.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,  # noqa: FBT001, FBT002 - as torch has it
        *,
        max_norm: float | None = None,
        update: When = "forward",
        seed: int = 0,
        speculate: Speculate = "auto",
        delayed_after: int = DELAYED_AFTER,
        **options: Any,
    ) -> None:
        settle(AdamW, torch.optim.AdamW, {"amsgrad": amsgrad, **options}, params)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        timing: dict[str, Any] = {"update": update, "speculate": speculate, "delayed_after": delayed_after}
        super().__init__(params, defaults, recipes.ADAMW, max_norm=max_norm, seed=seed, **timing)


class Adam(OffloadedOptimizer):
    """Adam as torch.optim.Adam: weight decay is part of the gradient (L2). Arguments and errors as AdamW."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,  # noqa: FBT001, FBT002 - as torch has it
        *,
        max_norm: float | None = None,
        update: When = "forward",
        seed: int = 0,
        speculate: Speculate = "auto",
        delayed_after: int = DELAYED_AFTER,
        **options: Any,
    ) -> None:
        settle(Adam, torch.optim.Adam, {"amsgrad": amsgrad, **options}, params)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        timing: dict[str, Any] = {"update": update, "speculate": speculate, "delayed_after": delayed_after}
        super().__init__(params, defaults, recipes.ADAM, max_norm=max_norm, seed=seed, **timing)


class SGD(OffloadedOptimizer):
    """Stochastic gradient descent, with or without momentum, as torch.optim.SGD.

    If none of the groups it is made with has a momentum, it keeps no state; no group can get one later.

    Raises: ValueError as AdamW, and for a dampening without momentum, or with Nesterov's.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,  # noqa: FBT001, FBT002 - as torch has it
        *,
        max_norm: float | None = None,
        update: When = "forward",
        seed: int = 0,
        speculate: Speculate = "auto",
        delayed_after: int = DELAYED_AFTER,
        **options: Any,
    ) -> None:
        settle(SGD, torch.optim.SGD, options, params)
        if nesterov and not momentum:
            raise ValueError(f"nesterov=True with momentum={momentum}: Nesterov needs a momentum above 0")
        groups = list(params)
        momenta = [group.get("momentum", momentum) for group in groups if isinstance(group, dict)]
        recipe = recipes.MOMENTUM if any(momenta or [momentum]) else recipes.SGD
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening}
        defaults |= {"weight_decay": weight_decay, "nesterov": nesterov}
        timing: dict[str, Any] = {"update": update, "speculate": speculate, "delayed_after": delayed_after}
        super().__init__(groups, defaults, recipe, max_norm=max_norm, seed=seed, **timing)


class Adagrad(OffloadedOptimizer):
    """Adagrad, as torch.optim.Adagrad: one state, the sum of squared gradients.

    Raises: ValueError as AdamW.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        max_norm: float | None = None,
        update: When = "forward",
        seed: int = 0,
        speculate: Speculate = "auto",
        delayed_after: int = DELAYED_AFTER,
        **options: Any,
    ) -> None:
        settle(Adagrad, torch.optim.Adagrad, options, params)
        if not initial_accumulator_value >= 0:
            raise ValueError(f"initial_accumulator_value={initial_accumulator_value}: expected at least 0")
        defaults = {"lr": lr, "lr_decay": lr_decay, "eps": eps, "weight_decay": weight_decay}
        defaults["initial_accumulator_value"] = initial_accumulator_value
        super().__init__(
            params,
            defaults,
            recipes.ADAGRAD,
            max_norm=max_norm,
            update=update,
            seed=seed,
            speculate=speculate,
            delayed_after=delayed_after,
        )

    def make_room(self, engine: Engine, parameter: nn.Parameter) -> None:
        """Make room for the sum of squared gradients, with its initial value."""
        begins = id(parameter) not in self._begun
        super().make_room(engine, parameter)
        first = self.param_groups[self.mine[id(parameter)].group]["initial_accumulator_value"]
        if begins and first:
            begin = torch.full(local(parameter).shape, float(first), device="cpu")
            engine.parameters.write(parameter, {"v": spread_as(parameter, begin)})


class Lion(OffloadedOptimizer):
    """Lion: each weight moves by lr along the sign of its momentum (Chen et al., arXiv 2302.06675).

    lr, betas, weight_decay (decoupled): as in the authors' implementation.

    Raises: ValueError as AdamW.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        max_norm: float | None = None,
        update: When = "forward",
        seed: int = 0,
        speculate: Speculate = "auto",
        delayed_after: int = DELAYED_AFTER,
        **options: Any,
    ) -> None:
        settle(Lion, None, options, params)
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        timing: dict[str, Any] = {"update": update, "speculate": speculate, "delayed_after": delayed_after}
        super().__init__(params, defaults, recipes.LION, max_norm=max_norm, seed=seed, **timing)
