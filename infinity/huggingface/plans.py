"""Tensor parallelism of transformers' models by their own plans, inside Init, on any dimension of a mesh.

[Note: gradients of parts]
A norm between a layer that is divided by its outputs and one by its inputs, as Qwen3's of queries and keys,
is the same on all ranks and computes on this rank's heads: its gradient is a part of the sum. transformers
sums it in a hook, by a collective on `p.grad`, which is no tensor here until the step. A replicated DTensor
whose local tensor is taken for the forward says the same to torch: its gradient arrives as Partial, and is
brought to the parameter's placement, which is the sum, before it is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from torch import nn

from infinity.errors import UnsupportedError
from infinity.tiling import TiledExperts

_SUMMED = "replicated_with_grad_allreduce"
"""transformers' name of the style whose gradients are parts of a sum."""


def tensor_parallel(model: nn.Module, mesh: Any) -> nn.Module:
    """Divide the layers of a model of transformers by its own plan (its `tp_plan`), and return it.

    model: built, or loaded, inside `infinity.Init(mesh=..., data=...)`; call this before the `with` ends, on
    every rank. mesh: the dimension of that mesh whose ranks have parts of each layer: mesh["tp"]. Its weights
    become DTensors, and each rank keeps its part alone. With other dimensions beside it, such as
    `from_pretrained(..., distributed_config=...)` cannot have.

    ::

        with infinity.Init(config, mesh=mesh, data="dp"):
            model = infinity.huggingface.tensor_parallel(LlamaForCausalLM(llama_config), mesh["tp"])

    Raises: UnsupportedError for a model without a plan; ValueError, of transformers, for one that its plan
    does not fit.
    """
    plan = getattr(model, "tp_plan", None)
    if not plan:
        raise UnsupportedError(
            f"{type(model).__name__} has no tp_plan, by which its layers would be divided. Set model.tp_plan "
            "= {...} first, as transformers' models have it; or divide them by torch's parallelize_module "
            "inside Init"
        )
    if mesh.size() == 1:
        return model
    modules = dict(model.named_modules())
    styles = _resolved(model, mesh.size())
    for name in styles:
        if isinstance(modules.get(name), TiledExperts):
            raise UnsupportedError(
                f"{name} is built expert by expert, and its plan divides stacks of experts: "
                'Config(experts="whole"); or expert_parallel, which divides the experts themselves'
            )
    tied = _tied(model)
    for name, style in styles.items():
        _divide(model, name, modules.get(name), style, mesh)
    for places in tied:
        _tie(places)
    hold_own_heads(model, mesh.size())
    return model


def hold_own_heads(model: Any, size: int) -> None:
    """Have static caches that are made ahead, as for a prompt in chunks, hold the heads of this rank alone.

    transformers reads `_tp_size`, which it sets on models that it has divided itself. It is set for this call
    alone: a Trainer takes it to mean that all ranks of the model divide its layers.
    """
    usual = getattr(model, "_get_static_cache_init_shape", None)
    if usual is None:  # of a transformers that makes none ahead
        return

    @wraps(usual)
    def shape() -> Any:
        model._tp_size = size  # noqa: SLF001 - what transformers asks
        try:
            return usual()
        finally:
            del model._tp_size  # noqa: SLF001

    model._get_static_cache_init_shape = shape  # noqa: SLF001


def _resolved(model: Any, size: int) -> dict[str, str]:
    """Return the style of each module and parameter that the model's plan names, its layers one by one."""
    try:
        from transformers.distributed.configuration_utils import DistributedConfig

        resolve = model._resolve_parallel_plans  # noqa: SLF001 - what from_pretrained calls
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(
            f"tensor_parallel needs plans as transformers 5.21 has them ({error}): install it, or divide the "
            "model by torch's parallelize_module inside Init"
        ) from error
    plan: dict[str, str] = resolve(DistributedConfig(tp_size=size, tp_plan="auto"))[0]
    return plan


Place = tuple[nn.Module, str]
"""Of a parameter: its module, and its name there."""


def _tied(model: nn.Module) -> list[list[Place]]:
    """Return the places of each parameter that is in several."""
    places: dict[int, list[Place]] = {}
    for module in model.modules():
        for name, one in module._parameters.items():
            if one is not None:
                places.setdefault(id(one), []).append((module, name))
    return [one for one in places.values() if len(one) > 1]


def _tie(places: Sequence[Place]) -> None:
    """Have the parameter of the first place in all of them, which the plan divides alike.

    Raises: UnsupportedError where it does not.
    """
    found: list[Any] = [module._parameters[name] for module, name in places]
    placed = {getattr(one, "placements", None) for one in found}
    if len(placed) > 1:
        kinds = ", ".join(f"{type(module).__name__}.{name}" for module, name in places)
        raise UnsupportedError(
            f"{kinds} are one parameter, and the model's plan divides it in different ways, {placed}. "
            "Config tie_word_embeddings=False, or a tp_plan that divides them alike"
        )
    for module, name in places[1:]:
        module.register_parameter(name, found[0])


def _divide(model: Any, name: str, module: nn.Module | None, style: str, mesh: Any) -> None:
    """Make one parameter of a model a DTensor, or have one module's forward take and give its parts."""
    from torch.distributed.tensor import Replicate, distribute_tensor
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    if module is None:
        owner, _, own = name.rpartition(".")
        module = model.get_submodule(owner)
        if style == _SUMMED:
            return  # with its module
        apply_tensor_parallelism(model, mesh, {name: style})
        divided = module._parameters[own]
        if divided is not None:
            module.register_parameter(own, divided)  # transformers sets it past torch's hooks
        return
    if style != _SUMMED:
        apply_tensor_parallelism(model, mesh, {name: style})
        return
    for own, one in list(module._parameters.items()):
        if one is not None:
            whole = distribute_tensor(one, mesh, [Replicate()], src_data_rank=None)
            module.register_parameter(own, nn.Parameter(whole, one.requires_grad))
    module.forward = _on_local_tensors(module)


def _on_local_tensors(module: nn.Module) -> Callable[..., Any]:
    """Return a forward on the local tensors of a module's parameters; see [Note: gradients of parts]."""
    from torch.distributed.tensor import Partial

    forward = module.forward

    @wraps(forward)
    def computed(*args: Any, **kwargs: Any) -> Any:
        own: dict[str, Any] = dict(module._parameters)
        for name, one in own.items():
            if one is not None:
                module._parameters[name] = one.to_local(grad_placements=[Partial()])
        try:
            return forward(*args, **kwargs)
        finally:
            module._parameters.update(own)

    return computed
