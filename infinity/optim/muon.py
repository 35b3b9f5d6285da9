"""Muon: matrices of hidden layers move along their orthogonalized momentum, all else is AdamW's.

[Note: which parameters are Muon's]
torch.optim.Muon takes matrices alone, and leaves the rest to a second optimizer. Here one optimizer has both,
by param groups, as in the code of Muon's authors and in DeepSpeed: a group with use_muon=False is stepped by
AdamW, with AdamW's options and their defaults. Embeddings and the output layer are matrices, but tables of
vectors, and everybody gives them to AdamW: `muon_groups` makes such groups of a model.

A parameter of three dimensions is a stack of experts: each of its matrices is orthogonalized by itself, so
that slices of a stack give the bits of the whole. A weight that is cut into tiles is no matrix any more, and
a step would see its tiles as matrices of their own: it is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from infinity.errors import UnsupportedError, meant
from infinity.optim.base import OffloadedOptimizer, Speculate, When
from infinity.optim.delayed import DELAYED_AFTER
from infinity.optim.ownership import engine_for
from infinity.records import update_rules as recipes
from infinity.records.update_rules import Recipe
from infinity.tensors import is_distributed
from infinity.tiling import Whole
from infinity.units.optimizer_options import settle

_ADAMW: Mapping[str, Any] = MappingProxyType(
    {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
)
_MUONS_ALONE = ("momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn")
MUONS = (*_MUONS_ALONE, "lr", "weight_decay", "eps")
"""The options of one of Muon's groups."""
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STACK = 3


class Muon(OffloadedOptimizer):
    """Muon as torch.optim.Muon, and AdamW for the param groups with use_muon=False.

    params: matrices, or stacks of them [experts, rows, columns], or param groups; see `muon_groups`. lr,
    weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: as torch.optim.Muon, per
    group too. A group with use_muon=False has AdamW's options instead, with AdamW's defaults (lr=1e-3,
    betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2), whatever Muon's are. max_norm, update, seed: as AdamW.
    delayed_after: as AdamW; speculate too, for modules without a matrix that Muon has.

    Beside the budget, a step takes 10 bytes per element of a matrix while that is orthogonalized, as an
    operator takes its intermediate values, and 2 per element of the module's other matrices, such as those
    of a stack; on several ranks 2 to 4 more per element of the stack.

    Raises: ValueError for settings out of range, for parameters that were not built in Init, and for those
    that are no matrix, by name; UnsupportedError for weights that are cut into tiles,
    and for experts that ranks divide.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,  # noqa: FBT001, FBT002 - as torch has it
        ns_coefficients: tuple[float, float, float] = _COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        max_norm: float | None = None,
        update: When = "forward",
        seed: int = 0,
        speculate: Speculate = "auto",
        delayed_after: int = DELAYED_AFTER,
        **options: Any,
    ) -> None:
        settle(Muon, None, options, params)
        self._kinds: list[bool] = []
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "use_muon": True,
        }
        timing: dict[str, Any] = {"update": update, "speculate": speculate, "delayed_after": delayed_after}
        super().__init__(params, defaults, recipes.MUON, max_norm=max_norm, seed=seed, **timing)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters: to be stepped by AdamW where the group says use_muon=False.

        Raises: as OffloadedOptimizer; ValueError for options of the other of the two, and, by name, for a
        parameter that is no matrix; UnsupportedError for a weight that is cut into tiles.
        """
        uses_muon = bool(param_group.get("use_muon", True))
        others = ("betas",) if uses_muon else _MUONS_ALONE
        wrong = [name for name in others if name in param_group]
        if wrong:
            kind = "Muon" if uses_muon else "AdamW"
            raise ValueError(
                f"a param group with use_muon={uses_muon} has {', '.join(wrong)}, which {kind} does not "
                "have: leave it out, or put the parameters into a group of the other kind"
            )
        group = {**({} if uses_muon else _ADAMW), **param_group, "use_muon": uses_muon}
        if uses_muon:
            group["params"] = _checked(group["params"])
        self._kinds.append(uses_muon)
        try:
            super().add_param_group(group)
        except BaseException:
            self._kinds.pop()
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load groups, step counts and state that `state_dict` returned, here or of torch.optim.Muon, whose
        groups are all Muon's.

        Raises: ValueError, with nothing changed, if groups, their use_muon, or shapes do not match.
        """
        groups = state_dict["param_groups"]
        if len(groups) == len(self._kinds):  # else torch says so
            groups = [{"use_muon": True, **group} for group in groups]
            found = [bool(group["use_muon"]) for group in groups]
            if found != self._kinds:
                raise ValueError(f"use_muon of the groups: {found} in the state_dict, {self._kinds} here")
        super().load_state_dict({**state_dict, "param_groups": groups})

    def recipe_in(self, group: dict[str, Any]) -> Recipe:
        """Return Muon's update rule, or AdamW's."""
        return self.recipe if group["use_muon"] else recipes.ADAMW

    def recipe_of(self, parameter: torch.Tensor) -> Recipe:
        """Return the update rule of one of its parameters.

        Raises: UnsupportedError where use_muon of its group was changed: its state is that of the other rule.
        """
        number = self.mine[id(parameter)].group
        if bool(self.param_groups[number]["use_muon"]) is not self._kinds[number]:
            raise UnsupportedError(
                f"use_muon of param group {number} was {self._kinds[number]} when its parameters were added, "
                "and the state in their records is that rule's. Make a new optimizer to change it."
            )
        return super().recipe_of(parameter)


def _checked(given: Any) -> list[Any]:
    """Return the parameters of one of Muon's groups.

    Raises: see Muon.add_param_group.
    """
    params = [given] if isinstance(given, torch.Tensor) else list(given)
    for one in params:
        _check_matrix(one[1] if isinstance(one, tuple) else one)
    return params


def _check_matrix(parameter: Any) -> None:
    if isinstance(parameter, Whole):
        pieces = parameter.pieces()
        _refuse_divided(pieces[0])
        if tuple(pieces[0].shape) == tuple(parameter.shape) or parameter.dim() >= _STACK:
            return
        raise _cut(f"a weight of shape {tuple(parameter.shape)}")
    if not isinstance(parameter, torch.Tensor):
        return  # torch says so
    engine = engine_for(parameter)  # type: ignore[arg-type]
    name, shape = engine.parameters.name_of(parameter), tuple(parameter.shape)  # type: ignore[arg-type]
    if parameter.dim() not in (2, _STACK):
        raise ValueError(
            f"{name}: Muon takes matrices, and stacks of them, but this parameter has the shape {shape}. "
            'Give it to AdamW: in a param group with "use_muon": False; infinity.muon_groups(model) makes '
            "such groups"
        )
    if engine.is_cut(parameter):
        raise _cut(name)
    _refuse_divided(parameter)  # type: ignore[arg-type]


def _refuse_divided(parameter: nn.Parameter) -> None:
    """Refuse a DTensor, and an expert of those that ranks divide: no rank would have the whole matrix."""
    parameters = engine_for(parameter).parameters
    if is_distributed(parameter):
        raise UnsupportedError(
            f"{parameters.name_of(parameter)} is a DTensor: Muon needs the whole matrix, and each rank would "
            'orthogonalize its part. Give it to AdamW: a param group with "use_muon": False'
        )
    if not parameters.unit_of(parameter)[0].record.holders.are_all:
        raise UnsupportedError(
            f"{parameters.name_of(parameter)}: ranks divide the experts (expert_parallel), and Muon would "
            "have all of them put its matrices together. Give experts to AdamW: a param group with "
            '"use_muon": False; or leave expert_parallel out'
        )


def _cut(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name}: Muon needs the whole matrix, and this one is cut into tiles, each a parameter of its own, "
        "which would be orthogonalized by itself. Leave the layer out of tiling, or, of an embedding or an "
        'output layer, give it to AdamW: a param group with "use_muon": False'
    )


def muon_groups(
    model: nn.Module, adamw: Mapping[str, Any] | None = None, **muon: Any
) -> list[dict[str, Any]]:
    """Return a model's trained parameters as param groups for Muon: matrices of hidden layers, and the rest.

    AdamW gets what is no matrix, or stack of matrices, what an nn.Embedding has, the output layer (what
    get_output_embeddings() returns, and whatever is called lm_head, or output or head at the top), what is
    tied to either, biases, convolutions, and weights that are cut into tiles. A parameter with an attribute
    use_muon, as DeepSpeed marks them, goes where that says. adamw, muon: options of the two groups.

        optimizer = infinity.Muon(infinity.muon_groups(model, {"lr": 3e-4}, lr=0.02))

    Raises: ValueError where the model has no trained parameter; TypeError for an option that the group
    does not have.
    """
    for kind, options, known in (("Muon", muon, MUONS), ("AdamW", adamw or {}, tuple(_ADAMW))):
        for name in options:
            if name not in known:
                raise TypeError(f"{kind} has no option {name!r}{meant(name, known)}")
    groups = split_groups(model, list(model.parameters()), muon, adamw or {})
    if not groups:
        raise ValueError(f"{type(model).__name__} has no parameter that requires a gradient")
    return groups


def split_groups(
    model: nn.Module, params: Sequence[Any], muon: Mapping[str, Any], adamw: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return parameters, or param groups, of a model as param groups for Muon, as `muon_groups` does: each
    given group in two, which keep those of its options that they have.
    """
    tables, made = _tables(model), []
    given = params if params and isinstance(params[0], dict) else [{"params": list(params)}]
    for group in given:
        of_group = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
        trained = [one for one in of_group if one.requires_grad]
        for uses_muon, options in ((True, muon), (False, adamw)):
            names = {"lr", *(MUONS if uses_muon else _ADAMW)}
            own = {name: value for name, value in group.items() if name in names}
            half = [one for one in trained if _is_muons(one, tables) is uses_muon]
            if half:
                made.append({"params": half, "use_muon": uses_muon, **options, **own})
    return made


_OUTPUTS = ("lm_head", "embed_out")
_OUTPUTS_AT_TOP = ("output", "head", "classifier", "score")
_NO_MATRICES = (nn.Embedding, nn.Conv1d, nn.ConvTranspose1d)
"""Tables, and kernels of three dimensions [out, in, width], which are no stacks of matrices."""


def _tables(model: nn.Module) -> set[int]:
    """Return the id() of each parameter of embeddings, of convolutions, of the output layer, and of biases:
    those of a stack of experts have two dimensions.
    """
    outputs = getattr(model, "get_output_embeddings", lambda: None)()
    found = set()
    for name, module in model.named_modules():
        found |= {id(one) for key, one in module.named_parameters(recurse=False) if "bias" in key}
        last = name.rpartition(".")[2]
        kind = type(module).__name__
        is_table = isinstance(module, _NO_MATRICES) or module is outputs or name in _OUTPUTS_AT_TOP
        if is_table or last in _OUTPUTS or kind.endswith("Embedding"):
            found |= {id(one) for one in module.parameters()}
        elif kind.endswith("Embeddings"):  # positions and class tokens, [1, tokens, width]
            found |= {id(one) for one in module.parameters(recurse=False)}
    return found


def _is_muons(parameter: Any, tables: set[int]) -> bool:
    marked = getattr(parameter, "use_muon", None)
    if isinstance(marked, bool):
        return bool(marked)
    if parameter.dim() not in (2, _STACK) or id(parameter) in tables:
        return False
    return not engine_for(parameter).is_cut(parameter)
